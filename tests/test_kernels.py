"""The plain-mx kernels against float64 data at the real head size, and against numpy."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.gated_delta import normalize_qk

from metal_kernels.dsa_scores import reference as dsa_scores
from metal_kernels.dsa_topk import reference as topk_indices
from metal_kernels.kda_chunk import LOWEST_GATE
from metal_kernels.kda_chunk import reference as kda_chunk
from metal_kernels.kda_step import KdaConstants, KdaToken, KdaWeights
from metal_kernels.kda_step import reference as kda_step
from metal_kernels.sparse_mla import reference as sparse_mla
from mlxmoe.models.attention import causal_attention
from networks import load_arrays

KDA_CASES = ["kda_mixed", "kda_fast", "kda_slow", "kda_one_step"]


@pytest.fixture(scope="module")
def kernel_data(goldens: Path) -> dict[str, mx.array]:
    """Unit data of the kernels."""
    return load_arrays(goldens / "kernels/goldens.safetensors")


Five = tuple[mx.array, mx.array, mx.array, mx.array, mx.array]


def take(inputs: Five, part: slice) -> Five:
    """Some tokens of (q, k, v, g, beta)."""
    q, k, v, g, beta = inputs
    return q[part], k[part], v[part], g[part], beta[part]


def kda_inputs(data: dict[str, mx.array], case: str) -> tuple[Five, mx.array]:
    """(q, k, v, g, beta), state of one golden case, as the layer would make them."""
    q, k, v, z, beta = (
        data[f"{case}.{name}"].astype(mx.float32) for name in ("q", "k", "v", "z", "beta_logit")
    )
    heads = q.shape[1]
    q, k = normalize_qk(q, k, inv_scale=128**-0.5, eps=1e-6)
    rate = mx.exp(data[f"{case}.A_log"][:heads])[:, None]
    g = -5.0 * mx.sigmoid(rate * (z + data[f"{case}.dt_bias"].reshape(heads, 128)))
    state = data[f"{case}.state_in"].swapaxes(-1, -2)
    return (q, k, v, g, mx.sigmoid(beta)), state


@pytest.mark.parametrize("case", KDA_CASES)
@pytest.mark.parametrize("cut", [0, 1, 37])
def test_chunkwise_kda_is_the_recurrence(
    kernel_data: dict[str, mx.array], case: str, cut: int
) -> None:
    """Outputs within 1e-6 and state within 5e-6 of the float64 recurrence, also when the
    tokens come in two calls and when every gate is at its fastest or slowest."""
    inputs, state = kda_inputs(kernel_data, case)
    tokens = inputs[0].shape[0]
    outs = []
    for part in (slice(0, cut), slice(cut, tokens)):
        if len(range(tokens)[part]):
            out, state = kda_chunk(*take(inputs, part), state)
            outs.append(out)
    error = np.abs(np.array(mx.concatenate(outs)) - np.array(kernel_data[f"{case}.o"]))
    state_error = np.abs(
        np.array(state.swapaxes(-1, -2)) - np.array(kernel_data[f"{case}.state_out"])
    )

    assert error.max() < 1e-6
    assert state_error.max() < 5e-6


@pytest.mark.parametrize("case", KDA_CASES)
def test_kda_steps_are_the_recurrence(kernel_data: dict[str, mx.array], case: str) -> None:
    """One token at a time gives the same state, and the same outputs after the norm and the
    output gate (those two in float64 numpy)."""
    q, k, v, f, b = (kernel_data[f"{case}.{name}"] for name in ("q", "k", "v", "z", "beta_logit"))
    rng, eps = np.random.default_rng(3), 1e-5
    gate, norm = rng.normal(size=q.shape).astype(np.float32), rng.uniform(0.5, 2, 128)
    weights = KdaWeights(
        kernel_data[f"{case}.A_log"][: q.shape[1]],
        kernel_data[f"{case}.dt_bias"],
        mx.array(norm.astype(np.float32)),
    )
    state, outs = kernel_data[f"{case}.state_in"].swapaxes(-1, -2), []
    for t in range(q.shape[0]):
        wide = [x[t].astype(mx.float32) for x in (q, k, v)]
        token = KdaToken(wide[0], wide[1], wide[2], f[t], b[t], mx.array(gate[t]))
        out, state = kda_step(token, weights, state, KdaConstants(-5.0, 1e-6, eps))
        outs.append(out)
    o = np.array(kernel_data[f"{case}.o"]).astype(np.float64)
    wanted = o / np.sqrt(np.square(o).mean(-1, keepdims=True) + eps) * norm / (1 + np.exp(-gate))
    state_error = np.abs(
        np.array(state.swapaxes(-1, -2)) - np.array(kernel_data[f"{case}.state_out"])
    )

    assert np.abs(np.array(mx.stack(outs)) - wanted).max() < 1e-5
    assert state_error.max() < 5e-6


def test_chunkwise_kda_survives_repeated_keys() -> None:
    """Equal keys, beta 1 and no decay (the worst case of the triangular inverse) still
    give the float64 recurrence."""
    rng = np.random.default_rng(5)
    key = rng.normal(size=128)
    key /= np.linalg.norm(key)
    tokens = 96
    k = np.broadcast_to(key, (tokens, 1, 128))
    v = rng.normal(size=(tokens, 1, 128))
    state, wanted = np.zeros((128, 128)), []
    for t in range(tokens):
        state += np.outer(k[t, 0], v[t, 0] - state.T @ k[t, 0])
        wanted.append(state.T @ k[t, 0])
    keys, values = (mx.array(x.astype(np.float32)) for x in (k, v))
    beta = mx.ones((tokens, 1))

    out, _ = kda_chunk(keys, keys, values, mx.zeros(keys.shape), beta, mx.zeros((1, 128, 128)))

    assert np.abs(np.array(out)[:, 0] - np.array(wanted)).max() < 1e-5


def test_the_fastest_gate_the_config_allows_does_not_overflow() -> None:
    """Every gate at -10: finite, and the float64 recurrence."""
    rng = np.random.default_rng(6)
    q, k, v = (rng.normal(size=(64, 1, 128)) for _ in range(3))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    state, wanted = np.zeros((128, 128)), []
    for t in range(64):
        state *= np.exp(-10.0)
        state += np.outer(k[t, 0], v[t, 0] - state.T @ k[t, 0])
        wanted.append(state.T @ q[t, 0])
    queries, keys, values = (mx.array(x.astype(np.float32)) for x in (q, k, v))
    gates = mx.full(keys.shape, LOWEST_GATE)

    out, _ = kda_chunk(queries, keys, values, gates, mx.ones((64, 1)), mx.zeros((1, 128, 128)))

    assert np.abs(np.array(out)[:, 0] - np.array(wanted)).max() < 1e-4


def test_index_scores_and_selection_match(kernel_data: dict[str, mx.array]) -> None:
    """32 heads x 128 against 2,600 keys: scores within 2e-5, and the oracle's 2,048 keys
    wherever the gap at the border is wider than that."""
    query, weight = kernel_data["dsa.index_query"], kernel_data["dsa.weight_raw"]
    keys, positions = kernel_data["dsa.index_key"], np.array(kernel_data["dsa.position"])
    scaled = weight.astype(mx.float32) * 32**-0.5 * 128**-0.5
    for n, position in enumerate(positions.tolist()):
        scores = dsa_scores(query[n : n + 1], keys, scaled[n : n + 1], position)
        visible = np.array(scores)[0, : position + 1]
        assert np.isneginf(np.array(scores)[0, position + 1 :]).all()
        assert np.abs(visible - np.array(kernel_data["dsa.score"])[n, : position + 1]).max() < 2e-5

        picked = np.array(topk_indices(scores, 2048))[0]
        wanted = np.array(kernel_data["dsa.sel"])[n].astype(np.int32)
        gap = float(np.array(kernel_data["dsa.margin"])[n])
        assert gap > 2e-5
        assert np.array_equal(wanted, picked)


@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=40),
    st.integers(1, 40),
    st.sets(st.integers(0, 39)),
)
def test_topk_is_exact_and_lower_indices_win(values: list[int], k: int, masked: set[int]) -> None:
    """Against a plain sort by (-score, index): ties, masks, more places than scores left."""
    k = min(k, len(values))
    scores = [float("-inf") if n in masked else float(v) for n, v in enumerate(values)]
    order = sorted(
        (n for n in range(len(scores)) if n not in masked), key=lambda n: (-scores[n], n)
    )
    chosen = sorted(order[:k])

    picked = np.array(topk_indices(mx.array([scores]), k))[0].tolist()

    assert chosen + [-1] * (k - len(chosen)) == picked


def test_topk_refuses_more_than_there_is() -> None:
    """k over the number of scores is our own mistake and raises."""
    with pytest.raises(ValueError, match="top-k of 4 from 3 scores"):
        topk_indices(mx.zeros((1, 3)), 4)


def softmax_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray, scale: float
) -> np.ndarray:
    """float64 attention of one head; allowed: bool [T, S]."""
    scores = np.where(allowed, q.astype(np.float64) @ k.T.astype(np.float64) * scale, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ v)


@pytest.mark.parametrize("block", [7, 64, 1 << 20])
def test_causal_attention_does_not_depend_on_blocks(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Queries in the middle of the keys see just the keys up to themselves, whatever the
    block size, as float64 softmax has it."""
    rng = np.random.default_rng(1)
    q, k, v = (
        rng.normal(size=shape).astype(np.float32) for shape in ((2, 9, 16), (2, 60, 16), (2, 60, 8))
    )
    monkeypatch.setattr("mlxmoe.models.attention.BLOCK_ELEMENTS", block * 2 * 9)
    keys, values = mx.array(k), mx.array(v)

    out = causal_attention(mx.array(q), lambda rows: (keys[:, rows], values[:, rows]), 60, 51, 0.3)

    allowed = np.arange(60) <= np.arange(51, 60)[:, None]
    for head in range(2):
        wanted = softmax_attention(q[head], k[head], v[head], allowed, 0.3)
        assert np.abs(np.array(out)[head] - wanted).max() < 1e-5


def test_sparse_attention_sees_only_the_selected_rows() -> None:
    """Each query attends to its own rows; unused places (-1) count for nothing."""
    rng = np.random.default_rng(2)
    q = rng.normal(size=(3, 4, 12)).astype(np.float32)
    latent = rng.normal(size=(30, 12)).astype(np.float32)
    rows = np.array([[0, 3, 9, -1], [5, 6, 7, 8], [29, -1, -1, -1]], np.int32)

    out = np.array(sparse_mla(mx.array(q), mx.array(latent), mx.array(rows), 8, 0.5))

    for t in range(3):
        allowed = np.isin(np.arange(30), rows[t])[None]
        for head in range(4):
            wanted = softmax_attention(q[t, head][None], latent, latent[:, :8], allowed, 0.5)
            assert np.abs(out[t, head] - wanted[0]).max() < 1e-5
