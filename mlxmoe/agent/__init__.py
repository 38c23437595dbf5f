"""The tool-agent runtime stands here; it imports no mlx and no terminal."""
