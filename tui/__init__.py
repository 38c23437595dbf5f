"""The terminal UI stands here, on `mlxmoe.agent`; it imports no mlx."""
