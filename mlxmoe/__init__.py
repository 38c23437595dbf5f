"""A local runner for Kimi K3 and K3.1 Pro on Apple silicon."""
