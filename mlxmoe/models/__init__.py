"""The networks, plain: no streaming, no sharding, no threads."""
