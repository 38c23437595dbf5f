"""How the memory is shared out, before anything is loaded: pure arithmetic on values.

The floor is trunk + state for the shortest context + scratch for the shortest span +
one table of top-k slots that all layers take turns with. What the budget holds above it
goes to the context (up to half), the span (a quarter, for each span reads every expert
anew) and the slots; what is left when all experts have slots goes to the span as well.
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from itertools import groupby
from typing import Literal

from mlxmoe.config import KimiConfig, ModelConfig
from mlxmoe.errors import BudgetError, CheckpointError, UsageError
from mlxmoe.footprint import (
    KILO,
    RUNTIME_BYTES,
    State,
    load_bytes,
    scratch_bytes,
    sequence_state,
    trunk_bytes,
)
from mlxmoe.manifest import Manifest

DEFAULT_CONTEXT = 32_768  # tokens planned for when none are asked for
LEAST_CONTEXT = 2_048
LEAST_SPAN = 32
KIMI_SPAN = 32_768
FOREIGN_SPAN = 2_048  # mlx-lm's models take a span through attention in one piece
SPAN_SHARE = 4  # a quarter of what is left goes to the span
SYSTEM_BYTES = 1 << 30  # left to the system of what is free
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SIZE = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*(?:([kmgt]?)b?|([kmgt])ib)\s*")


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory in bytes: what there is, and what is free now."""

    total: int
    available: int


@dataclass(frozen=True, slots=True)
class Settings:
    """What a person asked for; None leaves it to the plan.

    `ram` bytes in all, `slots` experts in memory, `max_span` and `context` in tokens.
    `width`: bytes of an element of trunk and caches, 2 on Metal, 4 on Linux' CPU.
    """

    ram: int | None = None
    slots: int | None = None
    max_span: int | None = None
    context: int | None = None
    width: int = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """Who gets how much. Bytes unless named otherwise; `state_bytes_per_1k` is for 1,024
    tokens, `working_set_bytes` what one token touches of the experts."""

    budget_bytes: int
    floor_bytes: int
    trunk_bytes: int
    state_fixed_bytes: int
    state_bytes_per_1k: int
    state_bytes: int
    context: int
    scratch_bytes: int
    span: int
    record_bytes: int
    slots: int
    experts: int
    working_set_bytes: int
    residency: Literal["resident", "cached"]

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.record_bytes

    @property
    def planned_bytes(self) -> int:
        """The peak this plan expects."""
        return self.trunk_bytes + self.state_bytes + self.scratch_bytes + self.slot_bytes


@dataclass(frozen=True, slots=True)
class _Needs:
    """One model's needs as functions of context, span and slots.

    Scratch is counted for `context_cap`, the longest context that may be chosen.
    """

    config: ModelConfig
    width: int
    trunk: int
    state: State
    record: int
    context_cap: int
    loading: int

    def scratch(self, span: int) -> int:
        """Bytes of scratch for a span, or for loading if that takes more."""
        running = scratch_bytes(self.config, span, self.context_cap, self.width)
        return max(running, RUNTIME_BYTES + self.loading)

    def parts(self, context: int, span: int, slots: int) -> tuple[int, int, int, int]:
        """Bytes of trunk, state, scratch, slots."""
        return self.trunk, self.state.at(context), self.scratch(span), slots * self.record


def make_plan(
    manifest: Manifest, config: ModelConfig, machine: Machine, settings: Settings | None = None
) -> Plan:
    """The plan for a model on a machine.

    `BudgetError` when what was asked for is under the floor, over the machine, or does not
    hold the slots asked for; `UsageError` for a context or span that can't be.
    """
    settings = settings or Settings()
    width = settings.width
    least_context, context_cap = _contexts(config, settings)
    needs = _Needs(
        config,
        width,
        trunk_bytes(manifest, config, width),
        sequence_state(config, width),
        manifest.record_bytes,
        context_cap,
        load_bytes(manifest, config, width),
    )
    span_cap = _span_cap(config, settings, context_cap)
    least_span = min(LEAST_SPAN, span_cap)
    experts = sum(layer.num_experts for layer in manifest.experts)
    least_slots = _least_slots(manifest, config)
    floor = needs.parts(least_context, least_span, least_slots)
    budget = _budget(machine, settings)
    if sum(floor) > budget:
        raise BudgetError(_refusal("is under the floor", budget, floor))
    slots, slots_cap = _slots(settings, least_slots, experts)
    room = budget - sum(needs.parts(least_context, least_span, slots))
    if room < 0:
        sizes = needs.parts(least_context, least_span, slots)
        raise BudgetError(_refusal(f"does not hold {slots:,} slots, which take", budget, sizes))
    context = _grow_context(needs, least_context, room)
    room -= needs.state.at(context) - needs.state.at(least_context)
    share = max(room // SPAN_SHARE, room - (slots_cap - slots) * needs.record)
    span = _largest_span(needs, least_span, span_cap, share)
    room -= needs.scratch(span) - needs.scratch(least_span)
    if slots < slots_cap:
        slots = min(slots_cap, slots + room // needs.record)
    return Plan(
        budget_bytes=budget,
        floor_bytes=sum(floor),
        trunk_bytes=needs.trunk,
        state_fixed_bytes=needs.state.fixed,
        state_bytes_per_1k=needs.state.per_token * KILO,
        state_bytes=needs.state.at(context),
        context=context,
        scratch_bytes=needs.scratch(span),
        span=span,
        record_bytes=needs.record,
        slots=slots,
        experts=experts,
        working_set_bytes=(config.top_k or 0) * sum(x.record_bytes for x in manifest.experts),
        residency="resident" if slots == experts else "cached",
    )


def _contexts(config: ModelConfig, settings: Settings) -> tuple[int, int]:
    """(least, most) tokens to plan for; equal when they were asked for."""
    limit = config.context_length or DEFAULT_CONTEXT
    if settings.context is None:
        return min(LEAST_CONTEXT, limit), min(DEFAULT_CONTEXT, limit)
    if not 1 <= settings.context <= limit:
        raise UsageError(f"context {settings.context:,}, this model takes 1 to {limit:,} tokens")
    return settings.context, settings.context


def _span_cap(config: ModelConfig, settings: Settings, context: int) -> int:
    cap = KIMI_SPAN if isinstance(config, KimiConfig) else FOREIGN_SPAN
    if settings.max_span is not None:
        if settings.max_span < 1:
            raise UsageError(f"--max-span {settings.max_span}, expected at least 1 token")
        cap = min(cap, settings.max_span)
    return min(cap, context)


def _least_slots(manifest: Manifest, config: ModelConfig) -> int:
    """Top-k for each run of layers with the same shape of expert: what a layer needs at
    once, of a table that all layers of its shape take turns with."""
    if not manifest.experts:
        return 0
    if config.top_k is None:
        raise CheckpointError(
            f"{manifest.folder / 'config.json'}: does not say how many experts a token takes "
            "(num_experts_per_tok), and there are experts"
        )
    runs = sum(1 for _ in groupby(manifest.experts, key=lambda layer: layer.parts))
    return config.top_k * runs


def _slots(settings: Settings, least: int, experts: int) -> tuple[int, int]:
    """(slots to begin with, most slots); equal when they were asked for."""
    if settings.slots is None:
        return least, experts
    if settings.slots < least:
        raise BudgetError(
            f"--slots {settings.slots}, expected at least {least}: a layer needs the experts "
            "of a token at once"
        )
    slots = min(settings.slots, experts)
    return slots, slots


def _budget(machine: Machine, settings: Settings) -> int:
    if settings.ram is None:
        return default_budget(machine)
    if settings.ram > machine.total:
        unit = _unit(machine.total)
        raise BudgetError(
            f"--ram {_in(settings.ram, unit)} {unit}, this machine has "
            f"{_in(machine.total, unit)} {unit}; the default here is "
            f"{_in(default_budget(machine), unit)} {unit}"
        )
    return settings.ram


def default_budget(machine: Machine) -> int:
    """Bytes when nobody says: three quarters of the memory, or what is free less 1 GiB."""
    return max(0, min(machine.total * 3 // 4, machine.available - SYSTEM_BYTES))


def _grow_context(needs: _Needs, least: int, room: int) -> int:
    """The context, doubled from the least while that takes up to half of `room`."""
    context, limit = least, needs.state.at(least) + room // 2
    while context < needs.context_cap:
        longer = min(2 * context, needs.context_cap)
        if needs.state.at(longer) > limit:
            break
        context = longer
    return context


def _largest_span(needs: _Needs, least: int, cap: int, share: int) -> int:
    """The longest span in [least, cap] whose scratch exceeds the least by at most `share`."""
    limit = needs.scratch(least) + share
    low, high = least, cap
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if needs.scratch(middle) <= limit else (low, middle - 1)
    return low


def _refusal(verdict: str, budget: int, parts: tuple[int, int, int, int]) -> str:
    """`budget 96.0 GB is under the floor 116.8 GB (trunk 111.1, state 3.3, …)`."""
    unit = _unit(sum(parts))
    names = zip(("trunk", "state", "scratch", "slots"), parts, strict=True)
    shares = ", ".join(f"{name} {_in(size, unit)}" for name, size in names)
    return (
        f"budget {_in(budget, unit)} {unit} {verdict} {_in(sum(parts), unit)} {unit} "
        f"({shares}). See: mlxmoe plan MODEL"
    )


def _unit(size: int) -> str:
    return next((unit for unit in ("GB", "MB") if size >= _UNITS[unit[0].lower()]), "kB")


def _in(size: int, unit: str) -> str:
    return f"{size / _UNITS[unit[0].lower()]:.1f}"


def parse_size(text: str) -> int:
    """Bytes of a size as typed: "96GB" (10^9), "1.5GiB" (2^30), "800M", "1000000"."""
    match = _SIZE.fullmatch(text.lower())
    if match:
        number, unit, binary = match.groups()
        factor = _UNITS[unit] if binary is None else 1024 ** (1 + "kmgt".index(binary))
        if (size := int(Decimal(number) * factor)) > 0:
            return size
    raise UsageError(f"{ascii(text)[:40]} is not a size; expected like 96GB, 1.5GiB or 800M")
