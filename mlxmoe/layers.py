"""Layers that stand in for a model's own: experts whose weights are slots.

Legend: T tokens, D width, E experts, K experts a token, F width inside an expert,
S slots. A model stays plain; the loader swaps its `SwitchGLU`s for these.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from mlxmoe.experts.prefetch import Priority
from mlxmoe.experts.slots import Lease, Slots
from mlxmoe.manifest import ExpertPart, Kind, Projection

Ids = npt.NDArray[np.int32]

# Above this size the [T, K, D] outputs of a span are summed expert by expert instead.
PAIR_BYTES = 256 << 20
# Rows of experts whose outputs a sweep holds before it adds them up.
SWEEP_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Packing:
    """How expert weights are quantised; `mode` None for plain floats."""

    mode: str | None
    bits: int = 0
    group_size: int = 0


class StreamedExperts(nn.Module):
    """`SwitchGLU` with its experts on disk.

    x: [..., D], ids: [..., K] -> [..., K, D]. The weights are rows of a slot table, so
    ids (which expert) become slots (which row) before the gather. One host sync a call.
    """

    def __init__(
        self,
        layer: int,
        slots: Slots,
        parts: Sequence[ExpertPart],
        packing: Packing,
        activation: Callable[[mx.array, mx.array], mx.array],
        pair_bytes: int = PAIR_BYTES,
    ):
        """`layer` counts MoE layers from 0; `parts` is the order of a table's arrays."""
        super().__init__()
        self._layer, self._slots, self._packing = layer, slots, packing
        self._place = {(part.projection, part.kind): i for i, part in enumerate(parts)}
        self._activation = activation
        self._pair_bytes = pair_bytes

    def __call__(self, x: mx.array, ids: mx.array) -> mx.array:
        """x: [..., D], ids: [..., K] -> [..., K, D] in x's dtype."""
        picks = self._slots.read_back(ids).reshape(-1, ids.shape[-1])
        out = self._pairs(x.reshape(-1, x.shape[-1]), picks, ())
        return out.reshape(*ids.shape, -1)

    def weighted_sum(
        self, x: mx.array, ids: mx.array, weights: mx.array, meanwhile: Sequence[mx.array] = ()
    ) -> mx.array:
        """sum_k weights_k * expert_ids_k(x), float32 [T, D].

        x: [T, D], ids: [T, K] ascending, weights: float32 [T, K]. `meanwhile` is
        computed while missing experts are read.
        """
        picks = self._slots.read_back(ids)
        if picks.size * x.shape[1] * 4 > self._pair_bytes:
            return self._sweep(x, picks, weights)
        pairs = self._pairs(x, picks, meanwhile).astype(mx.float32)
        return (pairs * weights[..., None]).sum(axis=-2)

    def _pairs(self, x: mx.array, picks: Ids, meanwhile: Sequence[mx.array]) -> mx.array:
        """x: [T, D], picks: [T, K] -> [T, K, D]: every pick's output, by groups of experts
        that are in slots together. What a row's output is does not depend on its group."""
        experts = (picks[0] if len(picks) == 1 else np.unique(picks)).tolist()
        if len(experts) <= self._slots.capacity(self._layer):
            lease = self._slots.lease(self._layer, experts, Priority.DEMAND)
            return lease.bind(self._hits_then_misses(x, picks, lease, meanwhile))
        flat = picks.reshape(-1)
        outs, order = [], []
        for lease in self._leases(self._slots.seated_first(self._layer, experts)):
            rows = _by_slot(np.flatnonzero(np.isin(flat, list(lease.slot_of))), flat, lease)
            outs.append(lease.bind(self._rows(x, rows, picks, lease)))
            order.append(rows)
            self._slots.release(lease)
        return _restore(outs, order).reshape(*picks.shape, -1)

    def _hits_then_misses(
        self, x: mx.array, picks: Ids, lease: Lease, meanwhile: Sequence[mx.array]
    ) -> mx.array:
        """One lease holds all picks: hits and `meanwhile` are computed while misses arrive."""
        if not lease.arriving and len(picks) == 1:
            slots = mx.array(_slots_of(picks, lease))
            return self._experts(x[:, None, None], slots, lease).squeeze(-2)
        flat = picks.reshape(-1)
        late = np.isin(flat, list(lease.arriving))
        outs, order = [], [_by_slot(np.flatnonzero(mask), flat, lease) for mask in (~late, late)]
        if order[0].size:
            outs.append(self._rows(x, order[0], picks, lease))
        mx.async_eval(*outs, *meanwhile)
        lease.wait()
        if order[1].size:
            outs.append(self._rows(x, order[1], picks, lease))
        return _restore(outs, order).reshape(*picks.shape, -1)

    def _sweep(self, x: mx.array, picks: Ids, weights: mx.array) -> mx.array:
        """The weighted sum, one expert after the other in ascending order, so that the
        sum's order (and so its last bit) does not depend on the slots. float32 [T, D]."""
        flat = picks.reshape(-1)
        order = np.argsort(flat, kind="stable").astype(np.int32)
        experts, starts = np.unique(flat[order], return_index=True)
        rows_of = dict(zip(experts.tolist(), np.split(order, starts[1:]), strict=True))
        total, waiting = mx.zeros(x.shape, mx.float32), 0
        flat_weights = weights.reshape(-1)
        for lease in self._leases(experts.tolist()):
            for expert in sorted(lease.slot_of):
                for rows in _pieces(rows_of[expert], SWEEP_ROWS):
                    out = self._rows(x, rows, picks, lease).astype(mx.float32)
                    share = flat_weights[mx.array(rows)][:, None]
                    total = total.at[mx.array(rows // picks.shape[1])].add(out * share)
                    waiting += len(rows)
                    if waiting >= SWEEP_ROWS:
                        mx.eval(total)
                        waiting = 0
            lease.bind(total)
            self._slots.release(lease)
        return total

    def _leases(self, experts: list[int]) -> Iterator[Lease]:
        """Leases over `experts` in order; the next group is read while one is used.
        The user of a lease releases it before asking for the next."""
        capacity = self._slots.capacity(self._layer)
        size = max(1, capacity // 2)
        groups = [experts[i : i + size] for i in range(0, len(experts), size)]
        current = self._slots.lease(self._layer, groups[0], Priority.DEMAND)
        for group in groups[1:]:
            # A table of one slot has no room to read ahead.
            ahead = self._slots.lease(self._layer, group, Priority.HINT) if capacity > 1 else None
            current.wait()
            yield current
            current = ahead or self._slots.lease(self._layer, group, Priority.DEMAND)
        current.wait()
        yield current

    def _rows(self, x: mx.array, rows: Ids, picks: Ids, lease: Lease) -> mx.array:
        """Outputs of some of the T*K picks (`rows`, sorted by slot): [n, D]."""
        slots = mx.array(_slots_of(picks.reshape(-1)[rows], lease))
        tokens = mx.array(rows // picks.shape[1])
        return self._experts(x[tokens][:, None], slots, lease, ordered=True).squeeze(-2)

    def _experts(
        self, x: mx.array, slots: mx.array, lease: Lease, ordered: bool = False
    ) -> mx.array:
        """x: [..., 1, D], slots: [...] -> [..., 1, D]."""
        up = self._linear("up", x, slots, lease, ordered)
        gate = self._linear("gate", x, slots, lease, ordered)
        return self._linear("down", self._activation(up, gate), slots, lease, ordered)

    def _linear(
        self, projection: Projection, x: mx.array, slots: mx.array, lease: Lease, ordered: bool
    ) -> mx.array:
        weight = lease.table.arrays[self._place[projection, "weight"]]
        if self._packing.mode is not None:
            return mx.gather_qmm(
                x,
                weight,
                self._part(projection, "scales", lease),
                self._part(projection, "biases", lease),
                rhs_indices=slots,
                transpose=True,
                group_size=self._packing.group_size,
                bits=self._packing.bits,
                mode=self._packing.mode,
                sorted_indices=ordered,
            )
        if weight.dtype != mx.float32 and mx.default_device() == mx.cpu:
            return _matmul_by_slot(x, weight, slots)
        return mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=slots, sorted_indices=ordered)

    def _part(self, projection: Projection, kind: Kind, lease: Lease) -> Any:
        """The table's array of a part, None for a format without it."""
        place = self._place.get((projection, kind))
        return None if place is None else lease.table.arrays[place]


def _matmul_by_slot(x: mx.array, weight: mx.array, slots: mx.array) -> mx.array:
    """`gather_mm` for narrow floats on the CPU, where MLX's own knows float32 only.

    x: [..., 1, D], weight: [S, F, D], slots: [...] -> [..., 1, F]. One slot is cast at a
    time, so that memory holds one matrix more, not one a row.
    """
    picks = np.asarray(slots)
    rows = mx.broadcast_to(x, (*picks.shape, *x.shape[-2:])).reshape(-1, x.shape[-1])
    flat, outs, order = picks.reshape(-1), [], []
    for slot in np.unique(flat).tolist():
        order.append(np.flatnonzero(flat == slot).astype(np.int32))
        outs.append(rows[mx.array(order[-1])] @ weight[slot].astype(x.dtype).T)
        mx.eval(outs[-1])
    return _restore(outs, order).reshape(*picks.shape, 1, -1)


def _pieces(rows: Ids, size: int) -> list[Ids]:
    """`rows` in runs of at most `size`."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _slots_of(picks: Ids, lease: Lease) -> npt.NDArray[np.uint32]:
    """Expert ids to slot numbers, same shape."""
    lookup = np.zeros(max(lease.slot_of) + 1, np.uint32)
    lookup[list(lease.slot_of)] = list(lease.slot_of.values())
    return np.asarray(lookup[picks], np.uint32)


def _by_slot(rows: npt.NDArray[np.intp], flat: Ids, lease: Lease) -> Ids:
    """`rows` of the flat picks, sorted by slot."""
    if not rows.size:
        return rows.astype(np.int32)
    return rows[np.argsort(_slots_of(flat[rows], lease), kind="stable")].astype(np.int32)


def _restore(outs: Sequence[mx.array], order: Sequence[Ids]) -> mx.array:
    """Rows computed in `order` back in the order of the picks: [T*K, D]."""
    whole = mx.concatenate(list(outs)) if len(outs) > 1 else outs[0]
    return whole[mx.array(np.argsort(np.concatenate(order)).astype(np.uint32))]
