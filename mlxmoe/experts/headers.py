"""The header of one safetensors file, checked byte by byte before it is believed.

Layout: 8 bytes little-endian header length, that many bytes of JSON
`{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}}`,
then the data, which the tensors cover exactly, without gap or overlap.
"""

import math
import os
from pathlib import Path

from mlxmoe.errors import CheckpointError
from mlxmoe.manifest import DTYPE_BYTES, ShardFile, TensorEntry
from mlxmoe.untrusted import open_file, parse_json, show

HEADER_BYTES = 100_000_000  # what the safetensors library takes at most
MAX_DIMS = 8
MAX_NAME = 512
TENSOR_KEYS = {"dtype", "shape", "data_offsets"}


def read_header(path: Path, file: int) -> tuple[ShardFile, list[TensorEntry]]:
    """The file as it is now and its tensors in the order of their data.

    `file` is the position the entries are to carry. CheckpointError when anything in the
    header contradicts the file or itself.
    """
    with open_file(path) as stream:
        status = os.fstat(stream.fileno())
        start = _data_start(path, stream.read(8), status.st_size)
        data = stream.read(start - 8)
    if len(data) != start - 8:
        raise CheckpointError(f"{path}: header cut at {len(data) + 8:,} of {start:,} bytes")
    header = parse_json(data, f"{path}: header")
    if not isinstance(header, dict) or not data.startswith(b"{"):
        raise CheckpointError(f"{path}: header is {show(header)}, expected an object at once")
    _check_metadata(path, header.pop("__metadata__", {}))
    entries = [_entry(path, name, value, file, start) for name, value in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_cover(path, entries, start, status.st_size)
    return ShardFile(path, status.st_size, status.st_mtime_ns), entries


def _data_start(path: Path, prefix: bytes, size: int) -> int:
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8:
        raise CheckpointError(f"{path}: {size} bytes, too short for a safetensors header")
    if not 2 <= length <= HEADER_BYTES:
        raise CheckpointError(
            f"{path}: header length {length:,}, expected 2 to {HEADER_BYTES:,}; not safetensors?"
        )
    if 8 + length > size:
        raise CheckpointError(
            f"{path}: header of {length:,} bytes in a file of {size:,}; cut short? Fetch it again"
        )
    return 8 + length


def _check_metadata(path: Path, metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is not an object of strings")


def _entry(path: Path, name: str, value: object, file: int, start: int) -> TensorEntry:
    if not _is_plain(name):
        raise CheckpointError(f"{path}: tensor name {show(name)} is not a plain one")
    if not isinstance(value, dict) or value.keys() != TENSOR_KEYS:
        raise CheckpointError(
            f"{path}: {name} is {show(value)}, expected dtype, shape and data_offsets"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    width = DTYPE_BYTES.get(dtype) if isinstance(dtype, str) else None
    if width is None:
        raise CheckpointError(f"{path}: {name} has dtype {show(dtype)}, which is not supported")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        raise CheckpointError(f"{path}: {name} has a damaged shape, expected at most 8 sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{path}: {name} has damaged data_offsets, expected [begin, end]")
    nbytes = offsets[1] - offsets[0]
    if nbytes != math.prod(shape) * width:
        raise CheckpointError(
            f"{path}: {name} takes {nbytes:,} bytes, "
            f"expected {math.prod(shape) * width:,} for {dtype} {shape}"
        )
    return TensorEntry(name, dtype, tuple(shape), file, start + offsets[0], nbytes)


def _is_plain(name: str) -> bool:
    """Whether a name is one to show and to look up: no path, no control characters."""
    return (
        0 < len(name) <= MAX_NAME
        and name.isprintable()
        and name[0] not in "./\\"
        and ".." not in name
    )


def _are_sizes(numbers: object) -> bool:
    """Whether it is a list of whole numbers that a file's size could be; True is not one."""
    return isinstance(numbers, list) and all(
        type(number) is int and 0 <= number < 1 << 48 for number in numbers
    )


def _check_cover(path: Path, entries: list[TensorEntry], start: int, size: int) -> None:
    at, last = start, "the header"
    for entry in entries:
        if entry.offset != at:
            word = "overlaps" if entry.offset < at else "leaves a gap after"
            raise CheckpointError(
                f"{path}: {entry.name} {word} {last}: begins at byte {entry.offset:,}, "
                f"expected {at:,}"
            )
        at, last = at + entry.nbytes, entry.name
    if at != size:
        raise CheckpointError(
            f"{path}: {size:,} bytes, expected {at:,} by its header; "
            "damaged or cut short? Fetch it again"
        )
