"""Damaged checkpoints, end to end: one clear line, exit code 1, never a traceback or a hang."""

import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxmoe.chat.kimi import KimiChat
from mlxmoe.checkpoint import open_checkpoint
from mlxmoe.errors import MlxmoeError
from networks import streamed

TEXTS = ["config.json", "generation_config.json", "tokenizer_config.json", "tiktoken.model"]
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-{n:05}-of-000011.safetensors" for n in (1, 2, 4, 9)]


@pytest.fixture
def copied(goldens: Path, tmp_path: Path) -> Path:
    """A private copy of tiny-k31."""
    return shutil.copytree(goldens / "tiny-k31", tmp_path / "model")


@pytest.fixture(scope="module")
def scratch(goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One copy that every example damages and mends again."""
    return shutil.copytree(goldens / "tiny-k31", tmp_path_factory.mktemp("fuzz") / "model")


def use(folder: Path) -> None:
    """Everything `run` would do with a checkpoint, up to a few tokens."""
    checkpoint = open_checkpoint(folder)
    KimiChat(folder)
    loaded = streamed(checkpoint, 28)
    try:
        mx.eval(loaded.network.hidden(mx.arange(5), loaded.network.make_state()))
    finally:
        loaded.close()


def damaged(data: bytes, how: str, place: float, value: int) -> bytes:
    """`data` with one thing wrong at a relative place."""
    at = min(int(place * len(data)), len(data) - 1)
    match how:
        case "flip":
            return data[:at] + bytes([data[at] ^ (value or 1)]) + data[at + 1 :]
        case "cut":
            return data[:at]
        case "insert":
            return data[:at] + bytes([value]) * 3 + data[at:]
        case _:
            return data[:at] + data[at + 1 + value :]


@given(
    st.sampled_from([*TEXTS, INDEX, *SHARDS]),
    st.sampled_from(["flip", "cut", "insert", "drop"]),
    st.floats(0, 1),
    st.integers(0, 255),
    st.booleans(),
)
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_one_clear_error_or_harmless(
    scratch: Path, name: str, how: str, place: float, value: int, early: bool
) -> None:
    """A changed, cut, grown or shrunk file either still makes a checkpoint (weights are only
    numbers) or raises one of our errors, in one line that names the file."""
    path = scratch / name
    whole = path.read_bytes()
    # Headers lie at the start of a shard; half of the damage goes there.
    place = place * 0.02 if early and name in SHARDS else place
    path.write_bytes(damaged(whole, how, place, value))
    refused: MlxmoeError | None = None
    try:
        use(scratch)
    except MlxmoeError as error:
        refused = error
    finally:
        path.write_bytes(whole)
    if refused:
        assert 1 == refused.exit_code, refused
        assert "\n" not in str(refused)
        assert str(scratch) in str(refused) or "layers." in str(refused), refused


def test_the_undamaged_copy_runs(scratch: Path) -> None:
    """The fuzz starts from something that works."""
    use(scratch)


@pytest.mark.parametrize("name", [*TEXTS, INDEX, *SHARDS])
def test_a_missing_file_is_named(copied: Path, name: str) -> None:
    """Without a file that is needed the error names it; generation_config may be absent."""
    (copied / name).unlink()
    if name == "generation_config.json":
        use(copied)
        return
    with pytest.raises(MlxmoeError) as raised:
        use(copied)

    assert name in str(raised.value)


@pytest.mark.parametrize(
    ("name", "cut"), [(SHARDS[1], 20), (SHARDS[1], 300_000), ("config.json", 900), (INDEX, 5000)]
)
def test_the_command_line_says_one_line_and_exits_with_1(
    root: Path, copied: Path, name: str, cut: int
) -> None:
    """A truncated file through `mlxmoe run`: nothing on stdout, one line on stderr."""
    path = copied / name
    path.write_bytes(path.read_bytes()[:cut])
    command = [sys.executable, "-c", "from mlxmoe.cli import main; main()", "run", str(copied), "x"]

    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)

    assert (1, "") == (done.returncode, done.stdout)
    assert done.stderr.startswith("mlxmoe: ")
    assert 1 == len(done.stderr.splitlines())
    assert name in done.stderr
