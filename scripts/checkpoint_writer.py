"""Writes safetensors shards of random tensors as a stream: memory stays at a few MB.

The bytes of a tensor depend on the seed and its name alone, not on what else is written.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from checkpoint_tensors import Tensor

CHUNK = 1 << 20
ORDER = ("F32", "BF16", "U8")
# what two random bits add to a scale byte
SCALE_STEPS = (-1, 0, 0, 1)


def in_file_order(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Wide elements first, then by name, as the safetensors library itself lays them out.

    So every tensor is aligned to its element, and an expert's six are neighbours.
    """
    return sorted(tensors, key=lambda tensor: (ORDER.index(tensor.dtype), tensor.name))


def header(tensors: Sequence[Tensor]) -> bytes:
    """The length and the JSON in front of the data of `tensors`, padded to 8 bytes."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(
    path: Path, tensors: Sequence[Tensor], seed: int, wrote: Callable[[int], None]
) -> None:
    """Write one shard; `wrote` hears of each run of bytes that went out.

    Raises: OSError when the disk refuses.
    """
    with path.open("wb") as shard:
        shard.write(header(tensors))
        for tensor in tensors:
            for chunk in chunks(tensor, seed):
                shard.write(chunk.data)
                wrote(chunk.nbytes)


def chunks(tensor: Tensor, seed: int) -> Iterator[npt.NDArray[np.generic]]:
    """The elements of `tensor` in order, at most `CHUNK` at a time, as stored."""
    digest = hashlib.blake2b(f"{seed}/{tensor.name}".encode(), digest_size=16).digest()
    random = np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))
    total = math.prod(tensor.shape)
    for start in range(0, total, CHUNK):
        count = min(CHUNK, total - start)
        match tensor.fill:
            case "codes":
                yield _bytes(random, count)
            case "scales":
                steps = np.array(SCALE_STEPS, np.int16) + round(tensor.mean)
                yield steps.astype(np.uint8)[_bytes(random, count) & 3]
            case "normal":
                yield _normal(random, tensor, start, count)


def _bytes(random: np.random.Generator, count: int) -> npt.NDArray[np.uint8]:
    words = random.bit_generator.random_raw(-(-count // 8))
    return np.asarray(words, np.uint64).view(np.uint8)[:count]


def _normal(
    random: np.random.Generator, tensor: Tensor, start: int, count: int
) -> npt.NDArray[np.generic]:
    values = random.standard_normal(count, dtype=np.float32)
    values *= np.float32(tensor.std)
    values += np.float32(tensor.mean)
    if tensor.used is not None:
        values[max(tensor.used - start, 0) :] = 0.0
    if tensor.dtype == "F32":
        return values
    # bf16 is the upper half of float32; half a unit more makes cutting rounding
    return ((values.view(np.uint32) + np.uint32(0x8000)) >> 16).astype(np.uint16)
