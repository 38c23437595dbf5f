"""MLX on Linux: OpenBLAS comes before MLX's own BLAS, and only before MLX does."""

import ctypes
import json
import sys

import pytest

from processes import python

SCRIPT = """if True:
    import ctypes, json, os, sys
    os.environ.pop("MLX_DISABLE_COMPILE", None)
    if sys.argv[1] == "late":
        import mlx.core
    from mlxmoe.linux import prepare
    prepare()
    everything = ctypes.CDLL(None)
    print(json.dumps([hasattr(everything, "openblas_get_config"),
                      os.environ.get("MLX_DISABLE_COMPILE")]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="SKIP: this is about Linux")
@pytest.mark.parametrize("when", ["early", "late"])
def test_openblas_is_loaded_for_all_before_mlx(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Its symbols are global, and kernels aren't compiled; too late, nothing is touched."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    try:
        ctypes.CDLL("libopenblas.so.0")
    except OSError:
        pytest.skip("SKIP: no OpenBLAS here")

    done = python(SCRIPT, when)

    expected = [True, "1"] if when == "early" else [False, None]
    assert expected == json.loads(done.stdout), done.stderr
