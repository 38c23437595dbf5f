"""The index and the shards must agree to the last tensor; each disagreement is one line."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxmoe.config import read_config
from mlxmoe.errors import CheckpointError
from mlxmoe.experts.index import INDEX, read_manifest

NORM = "language_model.model.norm.weight"
TOP = "model-00009-of-000011.safetensors"
Places = dict[str, str]


@pytest.fixture
def folder(goldens: Path, tmp_path: Path) -> Path:
    """A copy of tiny-k3 that a test may damage."""
    return Path(
        shutil.copytree(
            goldens / "tiny-k3", tmp_path / "model", ignore=shutil.ignore_patterns("goldens")
        )
    )


def refusal(folder: Path) -> str:
    """The one printable line with which a folder is refused."""
    with pytest.raises(CheckpointError) as caught:
        read_manifest(folder, read_config(folder))
    assert str(caught.value).isprintable()
    return str(caught.value)


def change_index(folder: Path, change: Callable[[Places], object]) -> None:
    """Rewrites the weight_map of the folder's index."""
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.pop(NORM), [TOP, f"holds {NORM}", "places it nowhere"]),
        (lambda m: m.update(a=TOP), [TOP, "has no tensor 'a'", "1 missing in all"]),
        (
            lambda m: m.update({NORM: "model-00001-of-000011.safetensors"}),
            [TOP, f"holds {NORM}", "in 'model-00001-of-000011.safetensors'"],
        ),
        (lambda m: m.update(a="other.safetensors"), ["other.safetensors: can't be opened"]),
        (lambda m: m.update(a="../x.safetensors"), ["'../x.safetensors' is not a plain name"]),
        (lambda m: m.update(a="/etc/passwd"), ["'/etc/passwd' is not a plain name"]),
        (lambda m: m.update(a="/x.safetensors"), ["not a plain name"]),
        (lambda m: m.update(a="a\\x.safetensors"), ["not a plain name"]),
        (lambda m: m.update(a="x\x00.safetensors"), ["'x\\x00.safetensors'"]),
        (lambda m: m.update(a="\n.safetensors"), ["'\\n.safetensors'"]),
        (lambda m: m.update(a=".safetensors"), ["not a plain name"]),
        (lambda m: m.update(a=""), ["not a plain name"]),
        (lambda m: m.update(a="x" * 300 + ".safetensors"), ["not a plain name"]),
        (lambda m: m.update(a="config.json"), ["'config.json' is not a plain name"]),
        (lambda m: m.update(a=3), ["3 is not a shard's file name"]),
        (lambda m: m.update(a=["x"]), ["a list of 1 is not a shard's file name"]),
        (lambda m: m.update(a="model-00012-of-000011.safetensors"), ["names 12 shards of 11"]),
        (lambda m: m.update(a="model-00000-of-000011.safetensors"), ["names 12 shards of 11"]),
        (lambda m: m.update(a="model-00001-of-000012.safetensors"), ["names 1 shards of 12"]),
        (lambda m: m.clear(), ["weight_map is an object of 0"]),
    ],
)
def test_the_index_and_the_shards_agree(
    folder: Path, change: Callable[[Places], object], words: list[str]
) -> None:
    """Tensors and files that only one of the two knows; names that leave the folder."""
    change_index(folder, change)
    message = refusal(folder)

    assert [word for word in words if word not in message] == [], message


def test_a_shard_missing_from_the_index(folder: Path) -> None:
    """An index that forgets a whole shard states fewer than the names' total."""

    def forget(places: Places) -> None:
        for name in [name for name, shard in places.items() if shard == TOP]:
            del places[name]

    change_index(folder, forget)
    assert "names 10 shards of 11, expected each of them once" in refusal(folder)


@pytest.mark.parametrize(
    "index", [b"", b"{}", b"[]", b'{"weight_map": 3}', b'{"weight_map": {"a": "b", "a": "c"}}']
)
def test_damaged_index_files(folder: Path, index: bytes) -> None:
    """An index that is no index is named."""
    (folder / INDEX).write_bytes(index)
    assert str(folder / INDEX) in refusal(folder)


def test_files_that_are_gone_or_are_no_files(folder: Path) -> None:
    """A shard that is missing, a folder, a pipe, cut short or empty."""
    path = folder / TOP
    data = path.read_bytes()
    path.unlink()
    assert f"{path}: can't be opened (No such file or directory)" in refusal(folder)
    path.symlink_to(folder / "nowhere")
    assert f"{path}: can't be opened" in refusal(folder)
    path.unlink()
    path.mkdir()
    assert f"{path}: is not a file" in refusal(folder)
    path.rmdir()
    os.mkfifo(path)
    assert f"{path}: is not a file" in refusal(folder)
    path.unlink()
    for size in (0, 7, 8, 100, 575, 576, 1000, len(data) - 1):
        path.write_bytes(data[:size])
        assert str(path) in refusal(folder)
    path.write_bytes(data + b"\0")
    assert f"{path}: 820,545 bytes, expected 820,544" in refusal(folder)


def test_folders_that_hold_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    """No folder, no shards, shards without an index."""
    config = read_config(folder)
    with pytest.raises(CheckpointError, match="no such folder"):
        read_manifest(tmp_path / "nowhere", config)
    with pytest.raises(CheckpointError, match="no such folder"):
        read_manifest(folder / TOP, config)
    (folder / INDEX).unlink()
    assert f"has 11 .safetensors files but no {INDEX}" in refusal(folder)
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    assert f"has no {INDEX} or model.safetensors" in refusal(folder)


def test_the_index_may_link_elsewhere_but_not_name_it(folder: Path) -> None:
    """A link is followed, as in Hugging Face's cache; a path in the index is not."""
    blob = folder.parent / "blob"
    (folder / TOP).rename(blob)
    (folder / TOP).symlink_to(blob)
    assert read_manifest(folder, read_config(folder)).files[8].path == folder / TOP

    def leave(places: Places) -> None:
        places.update({n: f"../{blob.name}" for n, shard in places.items() if shard == TOP})

    change_index(folder, leave)
    assert "'../blob' is not a plain name" in refusal(folder)


def test_a_tensor_in_two_shards(folder: Path) -> None:
    """A shard that repeats another's tensors is named."""
    first: Any = folder / "model-00001-of-000011.safetensors"
    (folder / TOP).write_bytes(first.read_bytes())
    assert f"{folder / TOP}: holds language_model.model.layers.0." in refusal(folder)
