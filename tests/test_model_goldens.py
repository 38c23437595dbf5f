"""The networks against numbers of the official code and of a float64 oracle."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxmoe.models.kda import KdaState
from mlxmoe.models.kimi_k3 import CHUNK_TOKENS, Model, chunk_borders
from mlxmoe.models.latent_cache import LatentCache
from networks import load_arrays, load_main, plain_network, run_spans, spans_of
from recorder import record

# (checkpoint, prefix of its tensors, where the logits are)
CASES = [
    ("tiny-k3", "", "logits_f64"),
    ("tiny-k31", "A.", "A.logits"),
    ("tiny-k31", "B.", "B.logits"),
]


@pytest.fixture(scope="module", params=["tiny-k3", "tiny-k31"])
def network(request: pytest.FixtureRequest, goldens: Path) -> tuple[str, Model]:
    """A resident float32 network, by name."""
    return request.param, plain_network(goldens / request.param)


def golden_cases(name: str) -> list[tuple[str, str]]:
    """(prefix, logits' name) of a checkpoint's cases."""
    return [(prefix, logits) for case, prefix, logits in CASES if case == name]


@pytest.mark.parametrize("split", ["all", "decode", "7", "64"])
def test_logits_match_the_reference(network: tuple[str, Model], goldens: Path, split: str) -> None:
    """float32 logits are within 2e-4 of float64 and 2e-5 on average, however tokens come."""
    name, model = network
    main = load_main(goldens, name)
    for prefix, logits in golden_cases(name):
        ids = main[prefix + "input_ids"]
        total = ids.shape[0]
        spans = {
            "all": [total],
            "decode": [total - 8] + [1] * 8,
            "7": spans_of(total, 7),
            "64": spans_of(total, 64),
        }[split]

        error = np.abs(run_spans(model, ids, spans) - np.array(main[logits]))

        assert error.max() < 2e-4
        assert error.mean() < 2e-5


def test_bfloat16_logits_stay_near_the_reference(goldens: Path) -> None:
    """With a bfloat16 stream errors stay where the official bfloat16 run has them."""
    main = load_main(goldens, "tiny-k3")
    model = plain_network(goldens / "tiny-k3", mx.bfloat16)

    ours = run_spans(model, main["input_ids"], [78])
    wanted = np.array(main["logits_f64"])

    assert np.abs(ours - wanted).mean() < 0.06
    assert np.abs(ours - wanted).max() < 0.6
    assert (ours.argmax(-1) == wanted.argmax(-1)).mean() > 0.9


def test_bfloat16_keeps_stream_and_caches_narrow(goldens: Path) -> None:
    """Stream, latents and convolution inputs are bfloat16; recurrent state is float32."""
    model = plain_network(goldens / "tiny-k31", mx.bfloat16)
    state = model.make_state()

    hidden = model.hidden(mx.arange(30), state)

    dtypes = {hidden.dtype}
    for layer in state.layers:
        if isinstance(layer, KdaState):
            assert layer.recurrent is not None
            assert layer.conv is not None
            assert layer.recurrent.dtype == mx.float32
            dtypes.add(layer.conv.dtype)
        else:
            dtypes.update(array.dtype for array in layer.arrays)
    assert dtypes == {mx.bfloat16}


def test_every_layers_output_matches_the_reference(goldens: Path) -> None:
    """Embedding, attention, feed-forward and partial sums of K3 are within 1e-5."""
    debug = load_arrays(goldens / "tiny-k3/goldens/debug.safetensors")
    ids = load_main(goldens, "tiny-k3")["input_ids"]
    model = plain_network(goldens / "tiny-k3")
    attention, moe, mlp = (record(model, name) for name in ("self_attn", "block_sparse_moe", "mlp"))

    sums: list[mx.array] = []
    layers: list[Any] = model.language_model.model.layers
    for number, layer in enumerate(model.layers):
        layers[number] = Spy(layer, sums)
    run_spans(model, ids, [78])

    def close(ours: mx.array, name: str) -> None:
        assert np.abs(np.array(ours) - np.array(debug[name])).max() < 1e-5, name

    close(model.language_model.model.embed_tokens(ids), "embed")
    for number in range(8):
        close(attention[number].kept[0], f"attn.{number}")
        close((moe[number].kept[0][0] if number in moe else mlp[number].kept[0]), f"mlp.{number}")
        close(sums[number], f"p.{number}")


class Spy(nn.Module):
    """Stands around a decoder layer and keeps the partial sum after it."""

    def __init__(self, layer: nn.Module, sums: list[mx.array]):
        super().__init__()
        self._layer, self._sums = layer, sums
        self.is_kda = layer.is_kda

    def __call__(self, chunks: list[Any], *args: Any) -> None:
        """Call through."""
        self._layer(chunks, *args)
        self._sums.append(mx.concatenate([chunk.p for chunk in chunks]))


@pytest.mark.parametrize(("name", "prefix", "logits"), CASES)
def test_router_picks_and_weights_match(goldens: Path, name: str, prefix: str, logits: str) -> None:
    """Each layer picks exactly the reference's experts, ascending, with its weights."""
    main = load_main(goldens, name)
    model = plain_network(goldens / name)
    routers = record(model, "block_sparse_moe.gate")
    ids = main[prefix + "input_ids"]

    run_spans(model, ids, [ids.shape[0]])

    assert sorted(routers) == list(range(1, 8))
    for number, router in routers.items():
        picks, weights = router.kept[0]
        assert np.array_equal(np.array(main[f"{prefix}router.idx.{number}"]), np.array(picks))
        error = np.abs(np.array(weights) - np.array(main[f"{prefix}router.weight.{number}"]))
        assert error.max() < 1e-5


def test_recurrent_state_convolution_and_latents_match(goldens: Path) -> None:
    """After 70 and 78 tokens every layer's carried state is the reference's."""
    main = load_main(goldens, "tiny-k3")
    model = plain_network(goldens / "tiny-k3")
    state = model.make_state()
    for when, part in (("prefill", slice(0, 70)), ("end", slice(70, 78))):
        model.hidden(main["input_ids"][part], state)
        for number, layer in enumerate(state.layers):
            if isinstance(layer, LatentCache):
                rows = np.array(layer.arrays[0][: layer.offset])
                wanted = np.array(main[f"mla.latent.{number}"])[: layer.offset]
                assert np.abs(rows - wanted).max() < 1e-5
                continue
            recurrent = np.array(layer.recurrent).swapaxes(-1, -2)
            wanted = np.array(main[f"kda.state_{when}.{number}"])
            assert np.abs(recurrent - wanted).max() < 1e-5
            conv = np.split(np.array(layer.conv), 3, axis=-1)
            for ours, channel in zip(conv, "qkv", strict=True):
                kept = np.array(main[f"kda.conv_{when}.{channel}.{number}"])
                assert np.abs(ours - kept).max() < 1e-5


@pytest.mark.parametrize("name", ["tiny-k3", "tiny-k31"])
def test_greedy_continuations_are_exact(goldens: Path, name: str) -> None:
    """Temperature 0 from the golden prompts gives the golden ids, token by token."""
    cases = json.loads((goldens / name / "goldens/greedy.json").read_text())["cases"]
    model = plain_network(goldens / name)
    for case in cases:
        state = model.make_state()
        logits = model(mx.array(case["prompt_ids"]), state)[-1]
        ids: list[int] = []
        while len(ids) < len(case["greedy_ids"]):
            ids.append(int(np.argmax(np.array(logits))))
            logits = model(mx.array(ids[-1:]), state)[-1]

        assert case["greedy_ids"] == ids


def test_long_spans_are_chunked_without_changing_numbers(goldens: Path) -> None:
    """A span over the chunk size gives the logits of the same tokens in short spans."""
    ids = mx.array(np.random.RandomState(3).randint(0, 1344, CHUNK_TOKENS + 90))
    model = plain_network(goldens / "tiny-k31")

    whole = run_spans(model, ids, [ids.shape[0]], cuts=[100])
    parts = run_spans(model, ids, spans_of(ids.shape[0], 128))

    assert np.abs(whole - parts).max() < 2e-4


def test_chunk_borders_fall_on_cuts_and_never_exceed_the_chunk() -> None:
    """Borders rise from 0 to the end, hold every inner cut, and leave no longer gap."""
    borders = chunk_borders(1300, [40, 1300, 0, 1299])

    assert [0, 40, 552, 1064, 1299, 1300] == borders
