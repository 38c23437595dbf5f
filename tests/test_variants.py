"""The same model stored or shaped another way: what is accepted also runs, and is right."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import make_checkpoint
from mlxmoe.checkpoint import open_checkpoint
from mlxmoe.models.kda import KdaState
from mlxmoe.models.kimi_k3 import Model
from networks import load_main, run_spans, streamed
from rewritten import rewrite, unpack_experts, without_wrapper

WIDE = ("layernorm.weight", "_norm.weight", "k_norm.weight", "norm.weight", "k_norm.bias")
NARROW = ("_conv1d.weight", ".A_log", ".dt_bias", ".o_norm.weight", "correction_bias")


@pytest.mark.parametrize("stored", [without_wrapper, unpack_experts])
@pytest.mark.parametrize("slots", [4, 112])
def test_other_storage_gives_the_golden_logits(
    goldens: Path, tmp_path: Path, stored: object, slots: int
) -> None:
    """Names without their wrapper, and experts unpacked to bfloat16, are the same model."""
    assert callable(stored)
    folder = stored(goldens / "tiny-k3", tmp_path / "model")
    main = load_main(goldens, "tiny-k3")
    loaded = streamed(open_checkpoint(folder), slots)

    logits = run_spans(loaded.network, main["input_ids"], [70, 1, 7])

    assert np.abs(logits - np.array(main["logits_f64"])).max() < 2e-4
    loaded.close()


def test_unpacked_experts_take_one_matrix_more_of_memory(goldens: Path, tmp_path: Path) -> None:
    """On the CPU narrow floats are cast a slot at a time, not a row at a time."""
    folder = unpack_experts(goldens / "tiny-k3", tmp_path / "model")
    loaded = streamed(open_checkpoint(folder), 112)
    x = mx.random.normal((600, 64))
    ids = mx.broadcast_to(mx.arange(4), (600, 4))
    assert isinstance(loaded.network, Model)
    experts = loaded.network.layers[1].block_sparse_moe.experts
    mx.eval(x, ids, experts(x[:1], ids[:1]))
    mx.reset_peak_memory()
    before = mx.get_active_memory()

    mx.eval(experts(x, ids))

    rows, outs = 2400, (96 + 96 + 96 + 64) * 4
    assert mx.get_peak_memory() - before < 4 * rows * outs
    loaded.close()


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-k31"])
def test_dtypes_are_decided_by_name_not_by_file(goldens: Path, tmp_path: Path, name: str) -> None:
    """Float32 norms in the file leave a bfloat16 stream and caches; bfloat16 convolutions
    and gates are computed in float32 all the same."""

    def change(tensor: str, array: mx.array) -> tuple[str, mx.array]:
        if tensor.endswith(NARROW):
            return tensor, array.astype(mx.bfloat16)
        return tensor, array.astype(mx.float32) if tensor.endswith(WIDE) else array

    folder = rewrite(goldens / name, tmp_path / "model", change)
    loaded = streamed(open_checkpoint(folder), 112, mx.bfloat16)
    network = loaded.network
    assert isinstance(network, Model)
    state = network.make_state()

    hidden = network.hidden(mx.arange(30), state)

    stream = {hidden.dtype}
    for layer, carried in zip(network.layers, state.layers, strict=True):
        if isinstance(carried, KdaState):
            attention = layer.self_attn
            kept = (attention.A_log, attention.dt_bias, attention.q_conv1d.weight)
            assert {mx.float32} == {array.dtype for array in (*kept, attention.o_norm.weight)}
            assert carried.recurrent is not None
            assert mx.float32 == carried.recurrent.dtype
            assert carried.conv is not None
            stream.add(carried.conv.dtype)
        else:
            stream.update(array.dtype for array in carried.arrays)
    assert {mx.bfloat16} == stream
    loaded.close()


def test_one_expert_a_token_and_one_slot(tmp_path: Path) -> None:
    """The smallest of all: top-1 routing through a table of a single slot."""
    sizes = ["--layers", "4", "--experts", "6", "--top-k", "1"]
    assert 0 == make_checkpoint.main([str(tmp_path / "model"), *sizes])
    checkpoint = open_checkpoint(tmp_path / "model")
    ids = mx.arange(40)
    outs = []
    for slots in (18, 1):
        loaded = streamed(checkpoint, slots)
        outs.append(run_spans(loaded.network, ids, [33, 1, 6]))
        loaded.close()

    assert np.array_equal(outs[0], outs[1])


def test_sparse_prefill_does_not_hold_every_gather(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A DSA layer gathers 90 MB of latent rows for these queries, a few MB at a time."""
    monkeypatch.setattr("mlxmoe.models.mla.BLOCK_ELEMENTS", 1 << 20)
    sizes = {"layers": 2, "hidden": 64, "heads": 8, "kv-lora": 256, "rope": 64, "index-topk": 256}
    words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    assert 0 == make_checkpoint.main([str(tmp_path / "model"), "--indexer", *words])
    loaded = streamed(open_checkpoint(tmp_path / "model"), 16)
    network = loaded.network
    assert isinstance(network, Model)
    x, cache = mx.random.normal((530, 64)), network.make_state().layers[1]
    mx.eval(x)
    mx.reset_peak_memory()
    before = mx.get_active_memory()

    mx.eval(network.layers[1].self_attn(x, cache))

    assert mx.get_peak_memory() - before < 40e6
    loaded.close()
