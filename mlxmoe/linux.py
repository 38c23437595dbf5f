"""MLX's CPU backend on Linux, made usable: to be done before mlx is first imported."""

import ctypes
import os
import sys
from contextlib import suppress

OPENBLAS = "libopenblas.so.0"


def prepare() -> None:
    """On Linux: no fused kernels, and OpenBLAS in place of MLX's own BLAS, if it is there.

    MLX compiles each fused kernel with g++, at 1.6 s apiece. Its BLAS is the reference one,
    about 20 times slower; symbols of a library that is loaded globally come before it.
    """
    if sys.platform != "linux" or "mlx" in sys.modules:
        return
    os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
    with suppress(OSError):
        ctypes.CDLL(OPENBLAS, mode=ctypes.RTLD_GLOBAL)
