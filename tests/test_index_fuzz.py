"""safetensors headers from anyone: good ones round-trip, bad ones are one clear error."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from checkpoints import WIDTH, Tensors, nbytes, write_raw, write_shard
from mlxmoe.errors import CheckpointError
from mlxmoe.experts.headers import read_header
from mlxmoe.manifest import DTYPE_BYTES, TensorEntry

NAME = st.from_regex(r"[a-z_][a-z0-9_]{0,7}(\.[a-z0-9_]{1,8}){0,4}", fullmatch=True)
SHAPE = st.lists(st.integers(0, 5), max_size=4)
TENSORS = st.dictionaries(NAME, st.tuples(st.sampled_from(sorted(WIDTH)), SHAPE), max_size=12)
ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def found(entries: list[TensorEntry]) -> dict[str, tuple[str, list[int], int]]:
    """Name -> dtype, shape, bytes."""
    return {entry.name: (entry.dtype, list(entry.shape), entry.nbytes) for entry in entries}


@ONE_FOLDER
@given(tensors=TENSORS, pad=st.booleans())
def test_our_writer_round_trips(tmp_path: Path, tensors: Tensors, pad: bool) -> None:
    """What a plain writer wrote is read, offsets adding up to the file."""
    path = tmp_path / "x.safetensors"
    write_shard(path, tensors, pad)
    shard, entries = read_header(path, 3)

    assert shard.size == path.stat().st_size
    assert found(entries) == {n: (d, s, nbytes(d, s)) for n, (d, s) in tensors.items()}
    assert {entry.file for entry in entries} <= {3}
    assert (
        sum(entry.nbytes for entry in entries) == shard.size - entries[0].offset if entries else 1
    )


NUMPY: dict[str, Any] = {
    "U8": np.uint8,
    "F16": np.float16,
    "F32": np.float32,
    "I64": np.int64,
    "BOOL": np.bool_,
}


@ONE_FOLDER
@given(
    tensors=st.dictionaries(NAME, st.tuples(st.sampled_from(sorted(NUMPY)), SHAPE), max_size=8),
    seed=st.integers(0, 2**32 - 1),
    metadata=st.none() | st.dictionaries(NAME, st.text(max_size=9), min_size=1, max_size=3),
)
def test_the_library_round_trips(
    tmp_path: Path, tensors: Tensors, seed: int, metadata: dict[str, str] | None
) -> None:
    """What the safetensors library wrote is read, and the bytes are where we say."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Any] = {
        n: rng.integers(0, 2, s).astype(NUMPY[d]) for n, (d, s) in tensors.items()
    }
    path = tmp_path / "x.safetensors"
    save_file(arrays, path, metadata)
    data = path.read_bytes()
    _, entries = read_header(path, 0)

    assert found(entries) == {n: (d, s, arrays[n].nbytes) for n, (d, s) in tensors.items()}
    for entry in entries:
        at = entry.offset
        assert data[at : at + entry.nbytes] == arrays[entry.name].tobytes()


def header() -> dict[str, Any]:
    """A sound header of three tensors over 40 bytes."""
    return {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
        "c.weight": {"dtype": "U8", "shape": [16, 1], "data_offsets": [24, 40]},
    }


def put(key: str, value: object, name: str = "b.weight") -> dict[str, Any]:
    """The sound header with one value of one tensor changed."""
    made = header()
    made[name][key] = value
    return made


def rename(name: str) -> dict[str, Any]:
    """The sound header with one tensor called otherwise."""
    return {name if key == "b.weight" else key: value for key, value in header().items()}


BAD: list[tuple[object, str]] = [
    (put("data_offsets", [16, 23]), "b.weight takes 7 bytes, expected 8 for BF16 [4]"),
    (put("data_offsets", [8, 16]), "overlaps a.weight"),
    (put("data_offsets", [0, 8]), "overlaps"),
    (put("data_offsets", [17, 25]), "leaves a gap after a.weight"),
    (put("data_offsets", [24, 16]), "damaged data_offsets"),
    (put("data_offsets", [-8, 0]), "damaged data_offsets"),
    (put("data_offsets", [16.0, 24.0]), "damaged data_offsets"),
    (put("data_offsets", ["16", "24"]), "damaged data_offsets"),
    (put("data_offsets", [16, 24, 32]), "damaged data_offsets"),
    (put("data_offsets", [16]), "damaged data_offsets"),
    (put("data_offsets", None), "damaged data_offsets"),
    (put("data_offsets", [10**30, 10**30 + 8]), "damaged data_offsets"),
    (put("data_offsets", [False, 8]), "damaged data_offsets"),
    (put("data_offsets", [24, 40], "b.weight"), "takes 16 bytes"),
    (put("data_offsets", [40, 56], "c.weight"), "leaves a gap"),
    (put("shape", [5]), "expected 10 for BF16 [5]"),
    (put("shape", [True, 4]), "damaged shape"),
    (put("shape", [-4]), "damaged shape"),
    (put("shape", [4.0]), "damaged shape"),
    (put("shape", 4), "damaged shape"),
    (put("shape", [1] * 9), "damaged shape"),
    (put("shape", [1 << 60, 0]), "damaged shape"),
    (put("shape", [1 << 47] * 8), "takes 8 bytes"),
    (put("dtype", "F4"), "dtype 'F4', which is not supported"),
    (put("dtype", 3), "dtype 3"),
    (put("dtype", ["F32"]), "dtype a list of 1"),
    (put("dtype", "f32"), "dtype 'f32'"),
    (put("extra", 1), "an object of 4, expected dtype, shape"),
    (header() | {"b.weight": [1]}, "b.weight is a list of 1"),
    (header() | {"b.weight": {"dtype": "BF16", "shape": [4]}}, "an object of 2"),
    (header() | {"__metadata__": {"a": 1}}, "__metadata__"),
    (header() | {"__metadata__": []}, "__metadata__"),
    ({key: value for key, value in header().items() if key[0] != "b"}, "leaves a gap"),
    ({key: value for key, value in header().items() if key[0] != "c"}, "expected"),
    (rename("../b"), "'../b' is not a plain one"),
    (rename("/b"), "'/b'"),
    (rename("b..c"), "'b..c'"),
    (rename("b\0c"), "'b\\x00c'"),
    (rename("b\nc"), "'b\\nc'"),
    (rename("\x1b[31m"), "'\\x1b[31m'"),
    (rename("\ud800"), "'\\ud800'"),
    (rename(""), "''"),
    (rename("x" * 600), "is not a plain one"),
    ([], "header is a list of 0"),
    (b"", "header length 0, expected 2"),
    (b"{} {}", "not JSON"),
    (b" " + json.dumps(header()).encode(), "expected an object at once"),
    (b"\xff\xfe", "not UTF-8"),
    (b'{"a": NaN}', "NaN"),
    (b"[" * 50_000, "nested too deep"),
    (json.dumps(header()).replace("b.weight", "a.weight").encode(), "'a.weight' is given twice"),
    (b'{"a": {"dtype": "U8", "dtype": "U8"}}', "'dtype' is given twice"),
]


@pytest.mark.parametrize(("made", "word"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_each_lie_is_named(tmp_path: Path, made: object, word: str) -> None:
    """One test a lie: what it is, in one line that names the file."""
    path = tmp_path / "x.safetensors"
    write_raw(path, made, 40, pad=False)
    with pytest.raises(CheckpointError) as caught:
        read_header(path, 0)
    message = str(caught.value)

    assert word in message
    assert message.startswith(f"{path}: ")
    assert message.isprintable()


def test_the_sound_header_is_sound(tmp_path: Path) -> None:
    """The header that the lies start from is taken."""
    write_raw(tmp_path / "x", header(), 40)
    assert len(read_header(tmp_path / "x", 0)[1]) == 3


@pytest.mark.parametrize("length", [1, 9, 10**6, 10**8, 10**8 + 1, 2**29, 2**63, 2**64 - 1])
def test_header_lengths(tmp_path: Path, length: int) -> None:
    """A stated length that is no header's, or longer than the file."""
    path = tmp_path / "x"
    path.write_bytes(struct.pack("<Q", length) + b"{}")
    with pytest.raises(CheckpointError, match=r"header"):
        read_header(path, 0)


def outcome(path: Path) -> list[TensorEntry] | str:
    """The tensors, or the words of the refusal."""
    try:
        return read_header(path, 0)[1]
    except CheckpointError as error:
        return str(error)


@settings(ONE_FOLDER, max_examples=200)
@given(data=st.data())
def test_no_damage_goes_unnoticed(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes changed, cut, put in or doubled: refused in one line, or, where the result is
    sound, read just as the safetensors library reads it."""
    path = tmp_path / "x.safetensors"
    write_raw(path, header(), 40, pad=data.draw(st.booleans()))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        kind = data.draw(st.sampled_from(["set", "cut", "put", "drop"]))
        if kind == "set":
            raw[at] = data.draw(st.integers(0, 255) | st.sampled_from(b'0123456789"[]{},:-.eE '))
        elif kind == "cut":
            del raw[max(at, 1) :]
        elif kind == "put":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        else:
            del raw[at : at + data.draw(st.integers(1, 30))]
            raw = raw or bytearray(1)
    path.write_bytes(raw)
    taken = outcome(path)
    if isinstance(taken, str):
        assert taken.isprintable()
        return
    with safe_open(path, "np") as library:
        names = set(library.keys())
        shapes = {name: library.get_slice(name).get_shape() for name in names}
    assert {entry.name: list(entry.shape) for entry in taken} == shapes
    assert all(entry.dtype in DTYPE_BYTES for entry in taken)
