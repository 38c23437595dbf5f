"""Streamed networks against resident ones, bit for bit, at every number of slots."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest

from mlxmoe.checkpoint import Checkpoint, open_checkpoint
from mlxmoe.errors import BudgetError
from mlxmoe.layers import StreamedExperts
from mlxmoe.loader import Loaded
from mlxmoe.models.kimi_k3 import Model
from networks import load_arrays, plain_network, run_spans, spans_of, streamed

EXPERTS, TOP_K, MOE_LAYERS = 16, 4, 7
ALL = EXPERTS * MOE_LAYERS
TOKENS = 70
SPANS = {
    "decode": [62] + [1] * 8,
    "1": [1] * 12,
    "7": spans_of(TOKENS, 7),
    "64": [64, 6],
    "all": [TOKENS],
}
Name = str


@pytest.fixture(scope="module", params=["tiny-k3", "tiny-k31"])
def name(request: pytest.FixtureRequest) -> str:
    """A checkpoint's name; tiny-k31 keeps 24 keys of up to 70."""
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(goldens: Path, name: str) -> Checkpoint:
    """The checkpoint, opened."""
    return open_checkpoint(goldens / name)


@pytest.fixture(scope="module")
def ids(goldens: Path, name: str) -> mx.array:
    """Golden token ids."""
    main = load_arrays(goldens / name / "goldens/main.safetensors")
    return main["input_ids" if name == "tiny-k3" else "A.input_ids"][:TOKENS]


@pytest.fixture(scope="module")
def resident(goldens: Path, name: str, ids: mx.array) -> dict[str, npt.NDArray[np.float32]]:
    """Logits of the plain network for each way to feed the tokens."""
    network = plain_network(goldens / name)
    return {how: run_spans(network, ids, spans) for how, spans in SPANS.items()}


@pytest.mark.parametrize("slots", [*range(TOP_K, 40), *range(40, ALL, 9), ALL - 1, ALL])
def test_streamed_equals_resident(
    checkpoint: Checkpoint, ids: mx.array, resident: dict[str, npt.NDArray[np.float32]], slots: int
) -> None:
    """Decode and spans give the resident network's logits bit for bit. Half of the slot
    counts run each way of feeding, so that all pairs of neighbours are covered."""
    ways = list(SPANS) if slots in (TOP_K, 28, ALL) else list(SPANS)[slots % 2 :: 2]
    loaded = streamed(checkpoint, slots)
    for how in ways:
        assert np.array_equal(resident[how], run_spans(loaded.network, ids, SPANS[how])), how
    loaded.close()


@pytest.mark.slow
@pytest.mark.parametrize("slots", range(TOP_K, ALL + 1))
def test_streamed_equals_resident_at_every_slot_count(
    checkpoint: Checkpoint, ids: mx.array, resident: dict[str, npt.NDArray[np.float32]], slots: int
) -> None:
    """All ways of feeding at all slot counts from the floor up: minutes, so run it with
    `scripts/test -m slow`."""
    loaded = streamed(checkpoint, slots)
    for how, spans in SPANS.items():
        assert np.array_equal(resident[how], run_spans(loaded.network, ids, spans)), how
    loaded.close()


def sweeping(loaded: Loaded) -> Loaded:
    """Make every expert layer sum expert by expert, as long spans do."""
    for experts in expert_layers(loaded):
        experts._pair_bytes = 0
    return loaded


def expert_layers(loaded: Loaded) -> list[StreamedExperts]:
    """The streamed layers of a loaded Kimi network."""
    assert isinstance(loaded.network, Model)
    return [layer.block_sparse_moe.experts for layer in loaded.network.layers if layer.is_moe]


@pytest.mark.parametrize("slots", [TOP_K, 9, 28, ALL])
def test_sweeps_equal_resident(
    checkpoint: Checkpoint, ids: mx.array, resident: dict[str, npt.NDArray[np.float32]], slots: int
) -> None:
    """The sum of a sweep is the plain sum, bit for bit, with any number of slots."""
    loaded = sweeping(streamed(checkpoint, slots))
    for how in ("7", "64", "all"):
        assert np.array_equal(resident[how], run_spans(loaded.network, ids, SPANS[how])), how
    loaded.close()


def test_a_sweep_in_small_pieces_is_the_same_sum(
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Checkpoint,
    ids: mx.array,
    resident: dict[str, npt.NDArray[np.float32]],
) -> None:
    """An expert with more rows than a sweep holds at once is computed in pieces."""
    monkeypatch.setattr("mlxmoe.layers.SWEEP_ROWS", 5)
    loaded = sweeping(streamed(checkpoint, 28))

    assert np.array_equal(resident["all"], run_spans(loaded.network, ids, [TOKENS]))
    loaded.close()


@pytest.mark.parametrize("slots", [TOP_K, 12, 28, ALL])
@pytest.mark.parametrize("swept", [False, True])
def test_a_span_reads_each_distinct_expert_at_most_once(
    checkpoint: Checkpoint, ids: mx.array, slots: int, swept: bool
) -> None:
    """Bytes read for one span are at most those of the distinct experts it touches."""
    loaded = streamed(checkpoint, slots)
    if swept:
        sweeping(loaded)
    touched = count_touched(loaded)

    run_spans(loaded.network, ids, [TOKENS])

    stats = loaded.slots.stats
    assert stats.hits + stats.misses == sum(len(picks) for picks in touched)
    assert stats.bytes_read == stats.misses * checkpoint.manifest.record_bytes
    assert stats.misses == sum(len(picks) for picks in touched)
    loaded.close()


def count_touched(loaded: Loaded) -> list[set[int]]:
    """The distinct experts that each read-back of this model will name."""
    touched: list[set[int]] = []
    read_back = loaded.slots.read_back

    def listen(ids: mx.array) -> npt.NDArray[np.int32]:
        picks = read_back(ids)
        touched.append(set(picks.reshape(-1).tolist()))
        return picks

    loaded.slots.read_back = listen  # type: ignore[method-assign]
    return touched


def test_a_hit_costs_one_sync_a_layer_and_no_read(checkpoint: Checkpoint, ids: mx.array) -> None:
    """With every expert in its slot a token reads nothing and syncs once a MoE layer."""
    loaded = streamed(checkpoint, ALL)
    state = loaded.network.make_state()
    mx.eval(loaded.network.logits(loaded.network.hidden(ids, state)))
    first = loaded.network.make_state()
    mx.eval(loaded.network.logits(loaded.network.hidden(ids, first)))
    before, syncs = loaded.slots.stats, loaded.slots.host_syncs

    again = loaded.network.make_state()
    mx.eval(loaded.network.logits(loaded.network.hidden(ids[:1], again)))

    after = loaded.slots.stats
    assert (before.bytes_read, before.misses) == (after.bytes_read, after.misses)
    assert TOP_K * MOE_LAYERS == after.hits - before.hits
    assert MOE_LAYERS == loaded.slots.host_syncs - syncs
    loaded.close()


def test_threads_do_not_change_the_answer(checkpoint: Checkpoint, ids: mx.array) -> None:
    """One reader thread and eight give the same bits."""
    outs = []
    for threads in (1, 8):
        loaded = streamed(checkpoint, 20, threads=threads)
        outs.append(run_spans(loaded.network, ids, SPANS["7"]))
        loaded.close()

    assert np.array_equal(outs[0], outs[1])


def test_fewer_slots_than_a_token_needs_are_refused(checkpoint: Checkpoint) -> None:
    """Under top-k slots there is nothing to compute from."""
    with pytest.raises(BudgetError, match="3 expert slots are under the floor of 4"):
        streamed(checkpoint, TOP_K - 1)


def test_bfloat16_streams_like_bfloat16_resident(goldens: Path, name: str, ids: mx.array) -> None:
    """The Mac's dtypes go through the same paths: equal bits on the CPU."""
    plain = plain_network(goldens / name, mx.bfloat16)
    loaded = streamed(open_checkpoint(goldens / name), 28, mx.bfloat16)

    assert np.array_equal(
        run_spans(plain, ids[:30], [26, 1, 1, 1, 1]),
        run_spans(loaded.network, ids[:30], [26, 1, 1, 1, 1]),
    )
    loaded.close()


def test_streamed_layers_hold_no_weights(checkpoint: Checkpoint) -> None:
    """Slot tables are no parameters of the network: nothing can cast, save or move them."""
    loaded = streamed(checkpoint, ALL)

    found = expert_layers(loaded)

    assert [StreamedExperts] * MOE_LAYERS == [type(experts) for experts in found]
    assert [{}] * MOE_LAYERS == [experts.parameters() for experts in found]
    loaded.close()
