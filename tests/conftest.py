"""What every test stands on: no compiled ops, no network, the same examples each run."""

import os

# Read by MLX and by huggingface_hub when they are first imported, so before any test file is.
os.environ["MLX_DISABLE_COMPILE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from mlxmoe import cli
from processes import Run

settings.register_profile("house", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("house")


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the repository."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder of the golden data."""
    return Path(__file__).resolve().parent / "goldens"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Run the command line here: its exit code, stdout and stderr."""
    handler = signal.getsignal(signal.SIGINT)

    def run_here(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mlxmoe", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert isinstance(left.value.code, int)
        return left.value.code, *capsys.readouterr()

    yield run_here
    signal.signal(signal.SIGINT, handler)
