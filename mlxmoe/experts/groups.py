"""How slots are shared out: which MoE layers sit at which table, and how many slots each.

A gather reads one array, so a table per layer would be best; but a layer's step needs
`top_k` slots of its table at once. With few slots, layers share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from mlxmoe.errors import BudgetError
from mlxmoe.manifest import ExpertLayer

# Words one array may have: kernels index them with 32 bits.
MAX_WORDS = 2**31 - 8192


@dataclass(frozen=True, slots=True)
class Group:
    """MoE layers (counted from 0) that share a table of `slots` slots."""

    layers: tuple[int, ...]
    slots: int


def share_slots(layers: Sequence[ExpertLayer], slots: int, top_k: int) -> tuple[Group, ...]:
    """Part `slots` among `layers`: as many tables as leave each 2 `top_k` slots.

    Layers of different shapes never share. The slots of the groups add up to `slots` but
    for what exceeds all experts, or a table's length. Raises BudgetError under `top_k`
    slots a shape, or when `top_k` records exceed a table.
    """
    alike = [
        [number for number, _ in run]
        for _, run in groupby(enumerate(layers), key=lambda item: item[1].parts)
    ]
    if slots < top_k * len(alike):
        raise BudgetError(
            f"{slots} expert slots are under the floor of {top_k * len(alike)} "
            f"({top_k} experts a token, {len(alike)} shape(s) of expert). Give more with --slots"
        )
    groups: list[Group] = []
    for share, run in zip(_parted(slots, [len(run) for run in alike], top_k), alike, strict=True):
        groups.extend(_tables([(n, layers[n]) for n in run], share, top_k))
    return tuple(groups)


def _tables(run: list[tuple[int, ExpertLayer]], slots: int, top_k: int) -> list[Group]:
    """Groups of one run of like layers."""
    longest = MAX_WORDS // max(part.nbytes // 4 for part in run[0][1].parts)
    if longest < top_k:
        raise BudgetError(
            f"{run[0][1].prefix}: {top_k} experts of {run[0][1].record_bytes:,} bytes don't fit "
            f"one table, which holds {longest} at most: this model can't be streamed"
        )
    count = min(len(run), max(slots // (2 * top_k), 1))
    if slots >= sum(layer.num_experts for _, layer in run):
        count = len(run)
    sizes = _even(len(run), count)
    groups, start = [], 0
    for size, share in zip(sizes, _parted(slots, sizes, top_k), strict=True):
        members = run[start : start + size]
        start += size
        room = min(sum(layer.num_experts for _, layer in members), longest)
        groups.append(Group(tuple(number for number, _ in members), min(share, room)))
    return groups


def _even(total: int, parts: int) -> list[int]:
    """`total` in `parts` whole shares that differ by at most one."""
    return [total // parts + (n < total % parts) for n in range(parts)]


def _parted(slots: int, weights: Sequence[int], least: int) -> list[int]:
    """`slots` in proportion to `weights`, none under `least`, adding up exactly."""
    spare = slots - least * len(weights)
    ends = [spare * sum(weights[: n + 1]) // sum(weights) for n in range(len(weights))]
    return [least + end - start for start, end in zip([0, *ends], ends, strict=False)]
