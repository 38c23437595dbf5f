"""The slot tables: fixed arrays whose rows are slots, and those rows as bytes.

A table is never assigned to after it is made, since assignment may move the buffer:
only its memory is written, through the views that `row` gives.
"""

import math
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlxmoe.manifest import ExpertPart

PAGE = 16384
WORDS_PER_PAGE = PAGE // 4
# Kernels index a table's words with 32 bits, signed.
MAX_TABLE_WORDS = 2**31 - 1

_ARRAY_DTYPES = {
    "U8": mx.uint8,
    "F8_E8M0": mx.uint8,
    "U32": mx.uint32,
    "BF16": mx.bfloat16,
    "F16": mx.float16,
    "F32": mx.float32,
}


class SlotTable:
    """Room for `slots` experts of one shape.

    `arrays` holds one array a part, [S, *shape]; packed U8 weights are seen as uint32
    [S, out, in / 8], which is what `gather_qmm` takes. Rows are dense, and the first
    starts page-aligned.
    """

    def __init__(self, parts: tuple[ExpertPart, ...], slots: int):
        self.slots = slots
        self._raw: list[mx.array] = []
        self._bytes: list[memoryview] = []
        self._row_bytes = [part.nbytes for part in parts]
        self.arrays = tuple(self._allocate(part) for part in parts)

    def row(self, slot: int) -> tuple[memoryview, ...]:
        """One slot's memory, a writable view of bytes for each part."""
        return tuple(
            view[slot * size : (slot + 1) * size]
            for view, size in zip(self._bytes, self._row_bytes, strict=True)
        )

    def _allocate(self, part: ExpertPart) -> mx.array:
        row_words = math.ceil(part.nbytes / 4)
        assert part.nbytes % 4 == 0, f"a row of {part.nbytes} bytes is not made of words"
        words = row_words * self.slots
        assert words <= MAX_TABLE_WORDS - WORDS_PER_PAGE, f"{words} words in one table"
        raw = mx.zeros((words + WORDS_PER_PAGE,), mx.uint32)
        mx.eval(raw)
        skip = (-_address(raw) % PAGE) // 4
        flat = raw[skip : skip + words].reshape(self.slots, row_words)
        array = _seen_as(flat, part).reshape(self.slots, *_array_shape(part))
        mx.eval(array)
        assert _address(array) == _address(raw) + 4 * skip, "MLX copied a slot table"
        self._raw.append(raw)
        self._bytes.append(_memory(raw)[4 * skip : 4 * (skip + words)])
        return array


def _is_packed(part: ExpertPart) -> bool:
    return part.kind == "weight" and part.dtype == "U8"


def _array_shape(part: ExpertPart) -> tuple[int, ...]:
    return (part.shape[0], part.shape[1] // 4) if _is_packed(part) else part.shape


def _seen_as(flat: mx.array, part: ExpertPart) -> mx.array:
    return flat if _is_packed(part) else flat.view(_ARRAY_DTYPES[part.dtype])


def _memory(array: mx.array) -> memoryview:
    """The array's own bytes, writable."""
    return memoryview(cast(Any, array)).cast("B")


def _address(array: mx.array) -> int:
    return int(np.frombuffer(_memory(array), np.uint8).ctypes.data)
