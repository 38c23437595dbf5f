"""K3.1's indexer and sparse attention against a float64 oracle."""

from pathlib import Path

import numpy as np
import pytest

from metal_kernels.dsa_scores import reference as dsa_scores
from mlxmoe.models.latent_cache import LatentCache
from networks import load_main, plain_network, run_spans
from recorder import record


@pytest.mark.parametrize("prefix", ["A.", "B."])
@pytest.mark.parametrize("split", [[], [1], [60, 7]])
def test_selected_keys_are_exactly_the_references(
    goldens: Path, prefix: str, split: list[int]
) -> None:
    """The indexer keeps the oracle's keys for every query, in spans or token by token."""
    main = load_main(goldens, "tiny-k31")
    ids = main[prefix + "input_ids"]
    total = ids.shape[0]
    spans = [*split, total - sum(split)] if split != [1] else [1] * total
    model = plain_network(goldens / "tiny-k31")
    indexers = record(model, "self_attn.indexer")

    run_spans(model, ids, spans)

    assert sorted(indexers) == [3, 6, 7]
    for number, indexer in indexers.items():
        wanted = np.array(main[f"{prefix}sel.{number}"]).astype(np.int32)[24:]
        assert np.array_equal(wanted, np.concatenate([np.array(rows) for rows in indexer.kept]))


@pytest.mark.parametrize("prefix", ["A.", "B."])
def test_index_keys_and_state_match(goldens: Path, prefix: str) -> None:
    """Cached index keys, latents and recurrent state of K3.1 are the oracle's."""
    main = load_main(goldens, "tiny-k31")
    model = plain_network(goldens / "tiny-k31")
    state = model.make_state()
    ids = main[prefix + "input_ids"]
    model.hidden(ids, state)
    for number, layer in enumerate(state.layers):
        if isinstance(layer, LatentCache):
            latent, keys = (np.array(array[: layer.offset]) for array in layer.arrays)
            assert np.abs(latent - np.array(main[f"{prefix}mla_latent.{number}"])).max() < 3e-5
            assert np.abs(keys - np.array(main[f"{prefix}index_key.{number}"])).max() < 1e-5
        else:
            recurrent = np.array(layer.recurrent).swapaxes(-1, -2)
            wanted = np.array(main[f"{prefix}kda_state_end.{number}"])
            assert np.abs(recurrent - wanted).max() < 3e-5


def test_index_scores_match(goldens: Path) -> None:
    """The indexer's scores of every query against every visible key are the oracle's."""
    main = load_main(goldens, "tiny-k31")
    model = plain_network(goldens / "tiny-k31")
    attentions = record(model, "self_attn")
    run_spans(model, main["A.input_ids"], [78])
    for number in (3, 6, 7):
        attention, x = attentions[number], attentions[number].given[0][0]
        residual = attention.q_a_layernorm(attention.q_a_proj(x))
        q, w = attention.indexer.index_queries(x, residual)
        scores = np.array(dsa_scores(q, attention.indexer.index_keys(x), w, 0))
        wanted = np.array(main[f"A.index_score.{number}"])
        visible = np.isfinite(wanted)

        assert np.array_equal(visible, np.isfinite(scores))
        assert np.abs(scores[visible] - wanted[visible]).max() < 1e-5


def test_few_keys_make_sparse_attention_exactly_dense(goldens: Path) -> None:
    """With at most top-k visible keys K3.1 equals the same weights without an indexer,
    bit for bit; past top-k it does not."""
    ids = load_main(goldens, "tiny-k31")["B.input_ids"]
    sparse = plain_network(goldens / "tiny-k31")
    dense = plain_network(goldens / "tiny-k31", dense=True)
    for spans in ([24], [16, 8], [1] * 24):
        assert np.array_equal(run_spans(sparse, ids, spans), run_spans(dense, ids, spans))

    assert np.abs(run_spans(sparse, ids, [60]) - run_spans(dense, ids, [60]))[30:].max() > 0.1
