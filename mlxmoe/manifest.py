"""What a checkpoint holds and where, as values: trunk tensors and expert records.

`experts.index` makes a `Manifest` from the headers; `budget` plans with it, the
loader reads the trunk from it, and `experts.store` reads records by it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

Projection = Literal["gate", "up", "down"]
Kind = Literal["weight", "scales", "biases"]

# safetensors dtype -> bytes an element
DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file of the checkpoint as it was when its header was read."""

    path: Path
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor by its checkpoint name. `offset` is absolute in file `file` (a
    position in `Manifest.files`); sizes in bytes; `dtype` is safetensors' word."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """One tensor that every expert of a layer has, with one expert's shape."""

    projection: Projection
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Extent:
    """One contiguous run of bytes: `parts` names the parts it covers, in order."""

    file: int
    offset: int
    nbytes: int
    parts: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLayer:
    """The experts of one MoE layer.

    `files`, `offsets`: [E, P], where expert e's part p lies. `prefix` is the
    checkpoint name up to the experts ("…layers.3.block_sparse_moe").
    """

    layer: int
    prefix: str
    parts: tuple[ExpertPart, ...]
    files: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]

    @property
    def num_experts(self) -> int:
        """E, how many experts the layer has."""
        return int(self.offsets.shape[0])

    @property
    def record_bytes(self) -> int:
        """Bytes of one expert."""
        return sum(part.nbytes for part in self.parts)

    def extents(self, expert: int) -> tuple[Extent, ...]:
        """Where one expert lies: runs in file order, neighbours merged."""
        return tuple(self._runs(expert))

    def _runs(self, expert: int) -> Iterator[Extent]:
        order = sorted(
            range(len(self.parts)),
            key=lambda p: (int(self.files[expert, p]), int(self.offsets[expert, p])),
        )
        run: Extent | None = None
        for p in order:
            file, offset = int(self.files[expert, p]), int(self.offsets[expert, p])
            nbytes = self.parts[p].nbytes
            if run and run.file == file and run.offset + run.nbytes == offset:
                run = Extent(file, run.offset, run.nbytes + nbytes, (*run.parts, p))
                continue
            if run:
                yield run
            run = Extent(file, offset, nbytes, (p,))
        if run:
            yield run


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """Everything a checkpoint folder holds, checked, without any weight read.

    `vision`: the tensors of the image side (tower and projector), not part of the trunk.
    """

    folder: Path
    files: tuple[ShardFile, ...]
    trunk: tuple[TensorEntry, ...]
    experts: tuple[ExpertLayer, ...]
    vision: tuple[TensorEntry, ...] = ()

    @property
    def trunk_bytes(self) -> int:
        """Bytes of the trunk as stored."""
        return sum(entry.nbytes for entry in self.trunk)

    @property
    def expert_bytes(self) -> int:
        """Bytes of all routed experts."""
        return sum(layer.record_bytes * layer.num_experts for layer in self.experts)

    @property
    def record_bytes(self) -> int:
        """Bytes of the largest expert record, 0 without experts."""
        return max((layer.record_bytes for layer in self.experts), default=0)
