"""Routed experts on disk and in slots: index, store, tables, prefetch, slots."""
