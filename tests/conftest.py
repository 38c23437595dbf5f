"""What every test stands on: no compiled ops, no network, the same examples each run."""

import os

# Read by MLX and by huggingface_hub when they are first imported, so before any test file is.
os.environ["MLX_DISABLE_COMPILE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path

import pytest
from hypothesis import settings

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
