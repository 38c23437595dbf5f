"""The HTTP endpoint stands here; it imports no mlx."""
