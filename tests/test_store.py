"""Bytes from files into rows: order, short reads, damaged scales, tables in memory."""

import os
import threading
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxmoe.checkpoint import open_checkpoint
from mlxmoe.errors import CheckpointError, ReadError
from mlxmoe.experts.prefetch import Priority, Read, Readers
from mlxmoe.experts.store import Store, open_uncached
from mlxmoe.experts.tables import PAGE, SlotTable, _address
from mlxmoe.manifest import ExpertLayer, ExpertPart, Manifest, ShardFile
from networks import load_arrays

PART = ExpertPart("gate", "weight", "U8", (4, 16), 64)
SCALES = ExpertPart("gate", "scales", "U8", (4, 1), 4)


def one_file(path: Path, data: bytes, offsets: list[list[int]]) -> Manifest:
    """A manifest of one layer whose experts have a weight and scales at these offsets."""
    path.write_bytes(data)
    places = np.array(offsets, np.int64)
    layer = ExpertLayer(1, "layers.1.moe", (PART, SCALES), np.zeros(places.shape, np.int32), places)
    shard = ShardFile(path, len(data), path.stat().st_mtime_ns)
    return Manifest(path.parent, (shard,), (), (layer,))


def rows() -> tuple[memoryview, memoryview]:
    """Room for one record."""
    return memoryview(bytearray(64)), memoryview(bytearray(4))


@pytest.mark.parametrize("places", [[0, 64], [4, 0], [0, 100], [132, 0]])
def test_parts_land_in_their_rows_wherever_they_lie(tmp_path: Path, places: list[int]) -> None:
    """In order, reversed, or with gaps: each part's bytes come to its own view."""
    data = bytes(np.random.default_rng(0).integers(0, 255, 200, dtype=np.uint8))
    store = Store(one_file(tmp_path / "a.bin", data, [places]))
    row = rows()

    assert 68 == store.read(0, 0, row)
    assert data[places[0] : places[0] + 64] == bytes(row[0])
    assert data[places[1] : places[1] + 4] == bytes(row[1])
    store.close()


def test_neighbours_are_one_extent(tmp_path: Path) -> None:
    """Touching parts merge to one run, in file order; others stay apart."""
    layer = one_file(tmp_path / "a.bin", bytes(200), [[4, 0], [0, 64], [0, 100]]).experts[0]

    assert [((1, 0), 0, 68)] == [(e.parts, e.offset, e.nbytes) for e in layer.extents(0)]
    assert [((0, 1), 0, 68)] == [(e.parts, e.offset, e.nbytes) for e in layer.extents(1)]
    assert [(0,), (1,)] == [e.parts for e in layer.extents(2)]


def test_a_nan_scale_is_refused_by_name(tmp_path: Path) -> None:
    """Scale byte 255 means the checkpoint is damaged; 254 is a number."""
    data = bytes(64) + bytes([0, 254, 255, 1]) + bytes([254] * 4)
    store = Store(one_file(tmp_path / "a.bin", data, [[0, 64], [0, 68]]))

    store.read(0, 1, rows())
    with pytest.raises(CheckpointError, match=r"layers\.1\.moe: expert 0 has a scale byte 255"):
        store.read(0, 0, rows())
    store.close()


@given(st.integers(0, 67))
def test_a_short_file_never_gives_a_record(
    tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    """Whatever is missing at the end, the read raises with what was wanted and got."""
    path = tmp_path_factory.mktemp("short") / "a.bin"
    manifest = one_file(path, bytes(68), [[0, 64]])
    store = Store(manifest)
    os.truncate(path, size)
    with pytest.raises(ReadError, match=rf"wanted 68 bytes at 0, got {size}"):
        store.read(0, 0, rows())
    store.close()


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    """Opening what is not there says so."""
    with pytest.raises(ReadError, match=r"can't open .*gone: No such file"):
        open_uncached(tmp_path / "gone")


def test_reads_in_interrupted_pieces_fill_the_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A kernel that returns a few bytes at a time still gives the whole record."""
    data = bytes(range(68))
    store = Store(one_file(tmp_path / "a.bin", data, [[0, 64]]))
    whole = os.preadv

    def dribble(handle: int, views: list[memoryview], offset: int) -> int:
        return whole(handle, [views[0][:3]], offset)

    monkeypatch.setattr(os, "preadv", dribble)
    row = rows()

    assert 68 == store.read(0, 0, row)
    assert data == bytes(row[0]) + bytes(row[1])
    store.close()


def test_reads_are_queued_in_disk_order_and_demands_go_first(tmp_path: Path) -> None:
    """With one thread: the demand before hints that were queued earlier, each batch by offset."""
    offsets = [[300 - 68 * n, 364 - 68 * n] for n in range(4)]
    store = Store(one_file(tmp_path / "a.bin", bytes(400), offsets))
    gate, order = threading.Event(), []
    read = store.read

    def watched(layer: int, expert: int, row: tuple[memoryview, ...]) -> int:
        gate.wait(10)
        order.append(expert)
        return read(layer, expert, row)

    store.read = watched  # type: ignore[method-assign, assignment]
    readers = Readers(store, threads=1)
    first = readers.submit([Read(0, 0, rows())], Priority.DEMAND)
    while readers._jobs.qsize():
        pass
    hints = readers.submit([Read(0, 1, rows()), Read(0, 2, rows())], Priority.HINT)
    demand = readers.submit([Read(0, 3, rows())], Priority.DEMAND)
    gate.set()
    for future in [*first, *hints, *demand]:
        future.result()

    assert [0, 3, 2, 1] == order
    assert 4 * 68 == readers.bytes_read
    readers.close()
    store.close()


def test_table_rows_are_the_arrays_memory(goldens: Path) -> None:
    """Bytes written to a row are seen in the array, packed weights as uint32, at a
    page-aligned address that never moves."""
    table = SlotTable((PART, SCALES), 3)
    addresses = [_address(array) for array in table.arrays]
    data = np.random.default_rng(1).integers(0, 255, 64, dtype=np.uint8)
    table.row(2)[0][:] = data.tobytes()

    assert [(3, 4, 4), (3, 4, 1)] == [array.shape for array in table.arrays]
    assert [0, 0] == [address % PAGE for address in addresses]
    assert np.array_equal(data.view(np.uint32).reshape(4, 4), np.array(table.arrays[0])[2])
    assert not np.array(table.arrays[0])[:2].any()
    mx.eval([array[1] + 0 for array in table.arrays])
    assert addresses == [_address(array) for array in table.arrays]


def landed(packed: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8], slot: int) -> SlotTable:
    """A table of three slots with these bytes in one of them, the others zero."""
    part = ExpertPart("gate", "weight", "U8", packed.shape, packed.nbytes)
    scale = ExpertPart("gate", "scales", "U8", scales.shape, scales.nbytes)
    table = SlotTable((part, scale), 3)
    for view, array in zip(table.row(slot), (packed, scales), strict=True):
        view[:] = array.tobytes()
    return table


def test_landed_bytes_are_mlx_operands_as_published(goldens: Path) -> None:
    """MXFP4 bytes in a slot mean the golden values bit for bit: all 256 bytes, at every
    scale but NaN; and the random block's product with x is the golden one."""
    data = load_arrays(goldens / "mxfp4/goldens.safetensors")
    packed, scales = np.array(data["edge.weight_packed"]), np.array(data["edge.weight_scale"])
    table = landed(packed, scales, 1)

    weight, scale_rows = table.arrays[0][1], table.arrays[1][1]
    weights = mx.dequantize(
        weight, scale_rows, group_size=32, bits=4, mode="mxfp4", dtype=mx.float32
    )
    ours, wanted = np.array(weights), np.array(data["edge.f32"])

    usable = scales[:, 0] != 255
    assert 14 == usable.sum()
    assert np.array_equal(wanted[usable].view(np.uint32), ours[usable].view(np.uint32))


def test_a_random_blocks_product_is_the_golden_one(goldens: Path) -> None:
    """`gather_qmm` on published bytes gives x W^T of the exact weights, in float32."""
    data = load_arrays(goldens / "mxfp4/goldens.safetensors")
    table = landed(np.array(data["rand.weight_packed"]), np.array(data["rand.weight_scale"]), 2)

    out = mx.gather_qmm(
        data["rand.x"][:, None],
        table.arrays[0],
        table.arrays[1],
        rhs_indices=mx.full((5,), 2, mx.uint32),
        transpose=True,
        group_size=32,
        bits=4,
        mode="mxfp4",
    )

    wanted = np.array(data["rand.x"]).astype(np.float64) @ np.array(data["rand.f32"]).T
    assert np.allclose(wanted, np.array(data["rand.y"]), rtol=1e-5, atol=1e-4)
    assert np.abs(np.array(out)[:, 0] - wanted).max() <= 1e-5 * np.abs(wanted).max()


def test_checkpoint_records_are_one_extent_each(goldens: Path) -> None:
    """In the published layout a record is read with one call."""
    manifest = open_checkpoint(goldens / "tiny-k3").manifest

    assert {1} == {len(layer.extents(e)) for layer in manifest.experts for e in range(16)}
