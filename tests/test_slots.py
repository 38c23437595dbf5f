"""The slot cache against a small model of it, and leases that are never broken."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlxmoe.checkpoint import open_checkpoint
from mlxmoe.errors import ReadError
from mlxmoe.experts.prefetch import Priority, Readers
from mlxmoe.experts.slots import VICTIM_SAMPLE, Lease, Seats, Slots
from mlxmoe.experts.store import Store
from mlxmoe.loader import make_slots
from networks import streamed

KEYS = st.tuples(st.integers(0, 2), st.integers(0, 9))


class SeatsAgainstModel(RuleBasedStateMachine):
    """Random uses, pins and seats; the model is a list in order of use and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.seats = Seats(6)
        self.order: list[tuple[int, int]] = []
        self.uses: dict[tuple[int, int], int] = {}
        self.pins: list[tuple[int, int]] = []

    def touch(self, key: tuple[int, int]) -> None:
        """What a use does to the model."""
        if key in self.order:
            self.order.remove(key)
        self.order.append(key)
        self.uses[key] = self.uses.get(key, 0) + 1

    @rule(key=KEYS)
    def use(self, key: tuple[int, int]) -> None:
        """Ask for a record: it is found, or seated where the rule says."""
        slot = self.seats.find(key)
        assert (slot is not None) == (key in self.order)
        if slot is not None:
            self.touch(key)
            return
        free = [k for k in self.order if k not in self.pins]
        if len(self.order) == 6 and not free:
            return
        wanted = None
        if len(self.order) == 6:
            sample = free[:VICTIM_SAMPLE]
            wanted = min(sample, key=lambda k: (self.uses[k], sample.index(k)))
            self.order.remove(wanted)
        _, victim = self.seats.seat(key)
        self.touch(key)
        assert wanted == victim

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        """Lease a seated record."""
        key = data.draw(st.sampled_from(self.order))
        self.seats.pin(key)
        self.pins.append(key)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """Give one lease back."""
        key = data.draw(st.sampled_from(self.pins))
        self.seats.unpin(key)
        self.pins.remove(key)

    @invariant()
    def pinned_stay_and_slots_are_distinct(self) -> None:
        """Nobody leased was moved, and no two records share a slot."""
        seated = self.seats.seated
        assert set(self.pins) <= set(seated)
        assert sorted(self.order) == sorted(seated)
        assert len(set(seated.values())) == len(seated)
        assert self.seats.unpinned == 6 - len(set(self.pins))


TestSeats = SeatsAgainstModel.TestCase
TestSeats.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_a_full_table_of_leases_is_our_own_mistake() -> None:
    """Seating with every slot leased asserts, and moves nothing."""
    seats = Seats(1)
    seats.seat((0, 0))
    seats.pin((0, 0))
    with pytest.raises(AssertionError, match="all 1 slots are leased"):
        seats.seat((0, 1))

    assert {(0, 0): 0} == seats.seated


def test_what_is_used_often_outlives_what_was_used_last() -> None:
    """Of the oldest records the one with fewest uses goes."""
    seats = Seats(3)
    for expert in (0, 0, 0, 1, 2):
        if seats.find((0, expert)) is None:
            seats.seat((0, expert))

    assert (0, 1) == seats.seat((0, 3))[1]
    assert (0, 2) == seats.seat((0, 4))[1]


@pytest.fixture
def slots(goldens: Path) -> Iterator[tuple[Slots, Store]]:
    """Ten slots over tiny-k3's records."""
    manifest = open_checkpoint(goldens / "tiny-k3").manifest
    store = Store(manifest)
    readers = Readers(store)
    yield make_slots(manifest, 10, 4, readers), store
    readers.close()
    store.close()


def record_of(store: Store, layer: int, expert: int, lease: Lease) -> bool:
    """Whether the leased slot holds just the record's bytes, read again apart."""
    row = lease.table.row(lease.slot_of[expert])
    fresh = [memoryview(bytearray(len(view))) for view in row]
    store.read(layer, expert, fresh)
    return all(bytes(view) == bytes(wanted) for view, wanted in zip(row, fresh, strict=True))


EXPERT_SETS = st.sets(st.integers(0, 15), min_size=1, max_size=5)


@given(st.lists(st.tuples(st.integers(0, 6), EXPERT_SETS), max_size=30))
@settings(max_examples=25)
def test_leased_slots_hold_the_right_bytes_until_read_back(
    goldens: Path, steps: list[tuple[int, set[int]]]
) -> None:
    """After any sequence of leases every slot of the open lease holds its record."""
    manifest = open_checkpoint(goldens / "tiny-k3").manifest
    store = Store(manifest)
    readers = Readers(store)
    slots = make_slots(manifest, 10, 4, readers)
    for layer, experts in steps:
        slots.read_back(mx.zeros((1, 1), mx.int32))
        lease = slots.lease(layer, sorted(experts), Priority.DEMAND)
        lease.wait()
        assert all(record_of(store, layer, expert, lease) for expert in experts)
    stats = slots.stats
    assert stats.hits + stats.misses == sum(len(experts) for _, experts in steps)
    assert stats.bytes_read == stats.misses * manifest.record_bytes
    readers.close()
    store.close()


def test_read_back_evaluates_what_was_made_before_slots_are_refilled(
    slots: tuple[Slots, Store],
) -> None:
    """An array built lazily from a slot keeps the old bytes' values although the slot is
    refilled by the next lease: read_back evaluated it first."""
    cache, _ = slots
    lease = cache.lease(0, [0], Priority.DEMAND)
    lease.wait()
    wanted = np.array(lease.table.arrays[0][lease.slot_of[0]])
    lazy = lease.bind(lease.table.arrays[0][lease.slot_of[0]] + 0)
    capacity = cache.capacity(0)

    cache.read_back(mx.zeros((1, 1), mx.int32))
    for start in range(1, 15, capacity):
        after = cache.lease(0, range(start, min(start + capacity, 16)), Priority.DEMAND)
        after.wait()
        cache.read_back(mx.zeros((1, 1), mx.int32))

    assert (0, 0) not in cache._seats[0][0]
    assert np.array_equal(wanted, np.array(lazy))


def test_a_failed_read_raises_and_leaves_no_slot_of_rubbish(tmp_path: Path, goldens: Path) -> None:
    """The error names file, offset, wanted and got; the record is read again next time."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (goldens / "tiny-k3").iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    manifest = open_checkpoint(folder).manifest
    shard = manifest.files[int(manifest.experts[0].files[3, 0])].path
    whole = shard.read_bytes()
    store = Store(manifest)
    readers = Readers(store)
    slots = make_slots(manifest, 10, 4, readers)
    with shard.open("r+b") as handle:
        handle.truncate(int(manifest.experts[0].offsets[3, 0]) + 10)
    lease = slots.lease(0, [3], Priority.DEMAND)
    with pytest.raises(ReadError, match=r"model-00002.*wanted \d+ bytes at \d+, got 10: "):
        lease.wait()
    slots.abandon()
    shard.write_bytes(whole)

    again = slots.lease(0, [3], Priority.DEMAND)
    again.wait()

    assert 2 == slots.stats.misses
    assert record_of(store, 0, 3, again)
    readers.close()
    store.close()


def test_leases_of_several_layers_share_a_table_without_mixing(goldens: Path) -> None:
    """With few slots all layers sit at one table, and expert 3 of two layers is two records."""
    loaded = streamed(open_checkpoint(goldens / "tiny-k3"), 7)
    first = loaded.slots.lease(0, [3], Priority.DEMAND)
    second = loaded.slots.lease(6, [3], Priority.DEMAND)
    first.wait()
    second.wait()

    assert first.table is second.table
    assert first.slot_of[3] != second.slot_of[3]
    assert record_of(loaded.store, 0, 3, first)
    assert record_of(loaded.store, 6, 3, second)
    loaded.close()


def test_a_record_on_its_way_is_waited_for_not_taken_for_a_hit(
    slots: tuple[Slots, Store],
) -> None:
    """A second lease of a record that is still being read is a rescue, and waits too."""
    cache, store = slots
    gate, read = threading.Event(), store.read

    def late(layer: int, expert: int, row: Sequence[memoryview]) -> int:
        gate.wait(10)
        return read(layer, expert, row)

    store.read = late  # type: ignore[method-assign]
    cache.lease(0, [5], Priority.HINT)
    second = cache.lease(0, [5], Priority.DEMAND)
    gate.set()
    second.wait()

    assert record_of(store, 0, 5, second)
    assert (0, 1, 1) == (cache.stats.hits, cache.stats.misses, cache.stats.rescues)
    cache.abandon()


def test_two_leases_of_a_record_that_fails_both_raise(slots: tuple[Slots, Store]) -> None:
    """The slot is freed once, when the last of them is closed."""
    cache, store = slots

    def broken(layer: int, expert: int, row: Sequence[memoryview]) -> int:
        raise ReadError("no disk")

    store.read = broken  # type: ignore[method-assign]
    leases = [cache.lease(0, [5], Priority.HINT), cache.lease(0, [5], Priority.DEMAND)]
    for lease in leases:
        with pytest.raises(ReadError, match="no disk"):
            lease.wait()
    cache.abandon()

    assert (0, 5) not in cache._seats[0][0]


def test_a_record_that_has_come_is_a_hit_also_while_its_lease_is_open(
    slots: tuple[Slots, Store],
) -> None:
    """Only what is still being read is a rescue."""
    cache, _ = slots
    cache.lease(0, [5], Priority.HINT).wait()
    second = cache.lease(0, [5], Priority.DEMAND)

    assert {} == second.arriving
    assert (1, 1, 0) == (cache.stats.hits, cache.stats.misses, cache.stats.rescues)
    cache.abandon()
