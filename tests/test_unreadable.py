"""Files that may not be read, also where the tests run as root, who may read everything."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlxmoe.checkpoint import open_checkpoint
from mlxmoe.errors import CheckpointError

NOBODY = 65534


@contextmanager
def as_nobody() -> Iterator[None]:
    """The rights of a user who owns nothing; those of the tests' own user unless it is root."""
    mine = os.geteuid()
    if mine == 0:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if mine == 0:
            os.seteuid(mine)


@pytest.fixture
def open_folder(goldens: Path) -> Iterator[Path]:
    """A copy of tiny-k31 that every user may enter: pytest's own folders are private."""
    top = Path(tempfile.mkdtemp())
    top.chmod(0o755)
    yield shutil.copytree(goldens / "tiny-k31", top / "model")
    shutil.rmtree(top)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "model-00002-of-000011.safetensors"]
)
def test_an_unreadable_file_is_named_with_the_reason(open_folder: Path, name: str) -> None:
    """One error with the file and what the system says; readable again, it opens."""
    (open_folder / name).chmod(0)
    with as_nobody(), pytest.raises(CheckpointError) as raised:
        open_checkpoint(open_folder)
    assert f"{open_folder / name}: can't be opened (Permission denied)" in str(raised.value)

    (open_folder / name).chmod(0o644)
    with as_nobody():
        assert 7 == len(open_checkpoint(open_folder).manifest.experts)


def test_a_closed_folder_is_named(open_folder: Path) -> None:
    """A folder that may not be entered says what to look at."""
    open_folder.chmod(0)
    with as_nobody(), pytest.raises(CheckpointError, match="Check its permissions"):
        open_checkpoint(open_folder)
    open_folder.chmod(0o755)
