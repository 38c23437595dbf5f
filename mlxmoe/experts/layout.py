"""From tensor names to expert records: which layer, expert and part a tensor is.

Three ways of writing experts are known, all below "…layers.N.<block>.":
    experts.E.w1.weight_packed | weight_scale      Kimi K3 as published (w1 gate, w3 up, w2 down)
    experts.E.gate_proj.weight | scales | biases   an expert a tensor (Hugging Face)
    switch_mlp.gate_proj.weight | scales | biases  all experts stacked, E first (mlx-lm)
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlxmoe.errors import CheckpointError
from mlxmoe.manifest import ExpertLayer, ExpertPart, Kind, Projection, TensorEntry

PROJECTIONS: dict[str, Projection] = {
    "w1": "gate", "w3": "up", "w2": "down",
    "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
}  # fmt: skip
KINDS: dict[str, Kind] = {
    "weight": "weight", "scales": "scales", "biases": "biases",
    "weight_packed": "weight", "weight_scale": "scales",
}  # fmt: skip
MAX_EXPERTS = 1 << 16
PARTS: tuple[tuple[Projection, Kind], ...] = (
    ("gate", "weight"), ("gate", "scales"), ("gate", "biases"),
    ("up", "weight"), ("up", "scales"), ("up", "biases"),
    ("down", "weight"), ("down", "scales"), ("down", "biases"),
)  # fmt: skip
_EXPERTS = re.compile(r"\.(experts|switch_mlp)\.")
_LAYER = re.compile(r"(?:^|\.)layers\.(0|[1-9][0-9]{0,5})\.")
_TAIL = re.compile(rf"(?:(0|[1-9][0-9]{{0,5}})\.)?({'|'.join(PROJECTIONS)})\.({'|'.join(KINDS)})")


def layer_of(name: str) -> int | None:
    """N of the first "layers.N." in a tensor's name."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


@dataclass(slots=True)
class _Part:
    """One part of a layer's experts while its tensors come in; `places`: expert -> where."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    stacked: bool
    places: dict[int, tuple[int, int]]


Parts = dict[tuple[Projection, Kind], _Part]


class ExpertNames:
    """Collects expert tensors from any number of shards, in any order."""

    def __init__(self) -> None:
        """Starts with no tensor."""
        self._layers: dict[int, tuple[str, Parts]] = {}

    def take(self, entry: TensorEntry, shard: Path) -> bool:
        """Whether `entry` belongs to routed experts, and if so remembers it.

        CheckpointError for one that looks like it and is not of a known layout.
        """
        split = _EXPERTS.search(entry.name)
        if split is None:
            return False
        prefix = entry.name[: split.start()]
        layer = layer_of(prefix + ".")
        tail = _TAIL.fullmatch(entry.name, split.end())
        if layer is None or not tail or not _is_known(entry, split[1], tail):
            raise CheckpointError(
                f"{shard}: {entry.name} ({entry.dtype}): this layout of experts is not supported"
            )
        known, parts = self._layers.setdefault(layer, (prefix, {}))
        if known != prefix:
            raise CheckpointError(
                f"{shard}: {entry.name}: there are experts under {known} too; "
                "two sets of experts in a layer are not supported"
            )
        key = PROJECTIONS[tail[2]], KINDS[tail[3]]
        twice = _add(parts, key, entry, int(tail[1])) if tail[1] else _stack(parts, key, entry)
        if twice:
            raise CheckpointError(f"{shard}: {entry.name}: this part of the experts is there twice")
        part = parts[key]
        if tail[1] and (entry.dtype, entry.shape) != (part.dtype, part.shape):
            raise CheckpointError(
                f"{shard}: {entry.name} is {entry.dtype} {list(entry.shape)}, "
                f"expected {part.dtype} {list(part.shape)} as its sisters are"
            )
        return True

    def layers(self) -> tuple[ExpertLayer, ...]:
        """The MoE layers in order; CheckpointError when one lacks an expert or a part."""
        return tuple(_layer(layer, *self._layers[layer]) for layer in sorted(self._layers))


def _is_known(entry: TensorEntry, block: str, tail: re.Match[str]) -> bool:
    if tail[3].startswith("weight_") and (entry.dtype != "U8" or not tail[1]):
        return False
    if tail[1]:
        return block == "experts"
    return len(entry.shape) == 3 and 0 < entry.shape[0] <= MAX_EXPERTS


def _add(parts: Parts, key: tuple[Projection, Kind], entry: TensorEntry, expert: int) -> bool:
    """Adds one expert's tensor; True when it was there."""
    if key not in parts:
        parts[key] = _Part(entry.dtype, entry.shape, entry.nbytes, False, {})
    if parts[key].stacked or expert in parts[key].places:
        return True
    parts[key].places[expert] = entry.file, entry.offset
    return False


def _stack(parts: Parts, key: tuple[Projection, Kind], entry: TensorEntry) -> bool:
    """Adds all experts' rows of a stacked tensor; True when they were there."""
    if key in parts:
        return True
    experts, *shape = entry.shape
    row = entry.nbytes // experts
    places = {e: (entry.file, entry.offset + e * row) for e in range(experts)}
    parts[key] = _Part(entry.dtype, tuple(shape), row, True, places)
    return False


def _layer(layer: int, prefix: str, parts: Parts) -> ExpertLayer:
    experts = max(len(part.places) for part in parts.values())
    for projection, kind in PARTS:
        if kind == "weight" and (projection, kind) not in parts:
            raise CheckpointError(
                f"{prefix}: its experts have no {projection} projection; "
                "this layout of experts is not supported"
            )
    keys = [key for key in PARTS if key in parts]
    for key in keys:
        lost = _first_lost(parts[key].places, experts)
        if lost is not None:
            raise CheckpointError(
                f"{prefix}: expert {lost} has no {' '.join(key)}, "
                f"expected all of experts 0 to {experts - 1} to have it"
            )
    ordered = [parts[key] for key in keys]
    places = [[part.places[e] for part in ordered] for e in range(experts)]
    table = np.array(places, dtype=np.int64)
    return ExpertLayer(
        layer=layer,
        prefix=prefix,
        parts=tuple(
            ExpertPart(projection, kind, part.dtype, part.shape, part.nbytes)
            for (projection, kind), part in zip(keys, ordered, strict=True)
        ),
        files=np.ascontiguousarray(table[:, :, 0], dtype=np.int32),
        offsets=np.ascontiguousarray(table[:, :, 1]),
    )


def _first_lost(places: Iterable[int], experts: int) -> int | None:
    there = set(places)
    return next((e for e in range(experts) if e not in there), None)
