"""Kernels and their plain-mx references, one noun a file. Knows only mlx."""
