"""Who sits in which slot: leases, eviction, and the one rule that keeps bytes right.

The rule: a slot may be refilled only after everything computed from it was evaluated.
A `Lease` pins its slots and holds the arrays made from them; `read_back`, the layer's
one host sync, evaluates those arrays together with the router's ids and then lets go.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxmoe.events import ExpertStats
from mlxmoe.experts.prefetch import Priority, Read, Readers
from mlxmoe.experts.tables import SlotTable

# How many of the least recent slots compete; the least often used of them goes.
VICTIM_SAMPLE = 16

Key = tuple[int, int]


class Seats:
    """Which record sits in which slot of one table, and which slot goes next (LFRU).

    Plain bookkeeping, no bytes: `key` is (MoE layer, expert).
    """

    def __init__(self, slots: int):
        self.slots = slots
        self._free = list(range(slots))[::-1]
        self._slot_of: OrderedDict[Key, int] = OrderedDict()
        self._uses: dict[Key, float] = {}
        self._pins: dict[Key, int] = {}
        self._touches = 0

    def find(self, key: Key) -> int | None:
        """The slot of a record that is seated, counted as a use."""
        slot = self._slot_of.get(key)
        if slot is not None:
            self._touch(key)
        return slot

    def seat(self, key: Key) -> tuple[int, Key | None]:
        """Give `key` a slot: a free one, or a victim's, which is returned too.

        Needs a slot that is not pinned; `key` must not be seated.
        """
        assert key not in self._slot_of, f"{key} is seated already"
        victim = None
        if not self._free:
            victim = self._victim()
            self.unseat(victim)
        self._slot_of[key] = slot = self._free.pop()
        self._touch(key)
        return slot, victim

    def unseat(self, key: Key) -> None:
        """Free the slot of `key`."""
        assert key not in self._pins, f"{key} is leased"
        self._free.append(self._slot_of.pop(key))

    def pin(self, key: Key) -> None:
        """Keep `key` where it is until it is unpinned as often as pinned."""
        self._pins[key] = self._pins.get(key, 0) + 1

    def unpin(self, key: Key) -> None:
        """Take one pin back."""
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]

    def __contains__(self, key: Key) -> bool:
        """Whether `key` is seated; not counted as a use."""
        return key in self._slot_of

    def pinned(self, key: Key) -> bool:
        """Whether any lease holds `key`."""
        return key in self._pins

    @property
    def seated(self) -> dict[Key, int]:
        """A copy of who sits where."""
        return dict(self._slot_of)

    @property
    def unpinned(self) -> int:
        """Slots that may be given away."""
        return self.slots - len(self._pins)

    def _touch(self, key: Key) -> None:
        self._slot_of.move_to_end(key)
        self._uses[key] = self._uses.get(key, 0.0) + 1.0
        self._touches += 1
        if self._touches >= 32 * self.slots:
            self._touches = 0
            self._uses = {k: n / 2 for k, n in self._uses.items() if n >= 0.5}

    def _victim(self) -> Key:
        """Of the least recent unpinned records the least often used, the older on a tie."""
        sample: list[Key] = []
        for key in self._slot_of:
            if key not in self._pins:
                sample.append(key)
                if len(sample) == VICTIM_SAMPLE:
                    break
        assert sample, f"all {self.slots} slots are leased"
        return min(sample, key=lambda key: self._uses.get(key, 0.0))


@dataclass(slots=True, eq=False)
class Lease:
    """Slots promised to one layer's step until the arrays made from them are evaluated.

    slot_of: expert -> row of `table`; arriving: experts still being read.
    """

    layer: int
    table: SlotTable
    slot_of: dict[int, int]
    arriving: dict[int, Future[int]]
    made: list[mx.array] = field(default_factory=list)

    def wait(self) -> None:
        """Return once every slot of the lease is filled. Raises the first read's error."""
        for future in self.arriving.values():
            future.result()

    def bind(self, array: mx.array) -> mx.array:
        """Say that `array` was made from these slots."""
        self.made.append(array)
        return array


class Slots:
    """All slot tables of a model. Used by the thread that owns MLX only."""

    def __init__(self, tables: Sequence[tuple[Sequence[int], SlotTable]], readers: Readers):
        """`tables`: (MoE layers, table) pairs; each layer belongs to one of them."""
        self._seats: dict[int, tuple[Seats, SlotTable]] = {}
        for layers, table in tables:
            shared = (Seats(table.slots), table)
            self._seats.update((layer, shared) for layer in layers)
        self._readers = readers
        self._open: list[Lease] = []
        self._hits = self._misses = self._rescues = self._evictions = 0
        self.host_syncs = 0

    @property
    def stats(self) -> ExpertStats:
        """Counts since the start."""
        counts = (self._hits, self._misses, self._rescues, self._evictions)
        return ExpertStats(*counts, self._readers.bytes_read)

    def capacity(self, layer: int) -> int:
        """Slots that one step of `layer` may use at once."""
        return self._seats[layer][0].slots

    def seated_first(self, layer: int, experts: Sequence[int]) -> list[int]:
        """`experts` with those in slots before those on disk, so that none of the first is
        evicted for the second before it was used."""
        seats = self._seats[layer][0]
        return sorted(experts, key=lambda expert: (layer, expert) not in seats)

    def read_back(self, ids: mx.array) -> npt.NDArray[np.int32]:
        """The router's picks on the host. Ends every open lease: what was made from
        their slots is evaluated in the same sync."""
        mx.eval(ids, *(array for lease in self._open for array in lease.made))
        self.host_syncs += 1
        self.abandon()
        return np.asarray(ids).astype(np.int32, copy=False)

    def lease(self, layer: int, experts: Iterable[int], priority: Priority) -> Lease:
        """Seat `experts` (distinct, at most the unpinned slots) and start the reads."""
        seats, table = self._seats[layer]
        lease = Lease(layer, table, {}, {})
        missing: list[int] = []
        for expert in experts:
            slot = seats.find((layer, expert))
            if slot is None:
                missing.append(expert)
                continue
            lease.slot_of[expert] = slot
            seats.pin((layer, expert))
            on_its_way = self._on_its_way(layer, expert)
            if on_its_way is not None:
                lease.arriving[expert] = on_its_way
        self._rescues += len(lease.arriving)
        self._hits += len(lease.slot_of) - len(lease.arriving)
        self._misses += len(missing)
        for expert in missing:
            slot, victim = seats.seat((layer, expert))
            self._evictions += victim is not None
            lease.slot_of[expert] = slot
            seats.pin((layer, expert))
        reads = [Read(layer, expert, table.row(lease.slot_of[expert])) for expert in missing]
        futures = self._readers.submit(reads, priority)
        lease.arriving.update(zip(missing, futures, strict=True))
        self._open.append(lease)
        return lease

    def release(self, lease: Lease) -> None:
        """Evaluate what was made from the lease's slots, then let them go."""
        mx.eval(*lease.made)
        self._close(lease)

    def abandon(self) -> None:
        """End every lease; nothing made from them that is not evaluated may be used."""
        for lease in list(self._open):
            self._close(lease)

    def _on_its_way(self, layer: int, expert: int) -> Future[int] | None:
        """The read of a seated record that another open lease waits for, or that failed it."""
        for lease in self._open:
            future = lease.arriving.get(expert) if lease.layer == layer else None
            if future is not None and not (future.done() and future.exception() is None):
                return future
        return None

    def _close(self, lease: Lease) -> None:
        """Unpin; a record whose read failed or never ran leaves its slot."""
        seats = self._seats[lease.layer][0]
        wait(lease.arriving.values())
        for expert in lease.slot_of:
            seats.unpin((lease.layer, expert))
        for expert, future in lease.arriving.items():
            # The last lease of a record that never came frees its slot.
            if future.exception() is not None and not seats.pinned((lease.layer, expert)):
                seats.unseat((lease.layer, expert))
        lease.made.clear()
        self._open.remove(lease)
