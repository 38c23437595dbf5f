"""Models of mlx-lm's, streamed, against mlx-lm's own resident ones, bit for bit."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from foreign_checkpoints import KIMI_LINEAR, LAYER_EXPERTS, QWEN, TOP_K, VOCAB, make_checkpoint
from mlxmoe.budget import Settings
from mlxmoe.chat.foreign import ForeignChat
from mlxmoe.checkpoint import Checkpoint, open_checkpoint
from mlxmoe.engine import engine_for
from mlxmoe.errors import CheckpointError
from mlxmoe.events import Finished, Request, Sampling, Stats, Usage, collect
from mlxmoe.loader import Loaded, load
from mlxmoe.models.foreign import ForeignModel
from mlxmoe.transcript import user
from networks import quiet
from test_chat_foreign import TEMPLATE, write

MOE_LAYERS = 3
SLIDING = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}
PACKINGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "affine": {"group_size": 32, "bits": 4, "mode": "affine"},
    "affine-8": {"group_size": 64, "bits": 8, "mode": "affine"},
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
}
IDS = np.random.default_rng(0).integers(0, 256, 40).tolist()
SPANS = [25, 7, *[1] * 8]
Logits = npt.NDArray[np.float32]


@dataclass
class Case:
    """A checkpoint and what mlx-lm's own model says to IDS."""

    checkpoint: Checkpoint
    logits: Logits


@pytest.fixture(scope="module", params=[(m, p) for m in ("qwen", "linear") for p in PACKINGS])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Each kind of model, stored each way."""
    kind, packing = request.param
    config = QWEN if kind == "qwen" else KIMI_LINEAR
    folder = make_checkpoint(tmp_path_factory.mktemp(kind), config, PACKINGS[packing])
    model, _ = load_model(folder)
    cache, outs, start = make_prompt_cache(model), [], 0
    for span in SPANS:
        outs.append(model(mx.array(IDS[start : start + span])[None], cache=cache)[0])
        mx.eval(outs[-1], [c.state for c in cache])
        start += span
    return Case(open_checkpoint(folder), np.array(mx.concatenate(outs)))


def streamed(checkpoint: Checkpoint, slots: int) -> Loaded:
    """The checkpoint as the product loads it."""
    return load(checkpoint.manifest, checkpoint.config, slots, quiet)


@pytest.mark.parametrize("slots", [MOE_LAYERS * LAYER_EXPERTS, 9, 5, TOP_K])
def test_streamed_equals_mlx_lm(case: Case, slots: int) -> None:
    """Spans and decode steps give the resident model's bits, with any number of slots."""
    loaded = streamed(case.checkpoint, slots)
    state, outs, start = loaded.network.make_state(), [], 0
    for span in SPANS:
        hidden = loaded.network.hidden(mx.array(IDS[start : start + span]), state)
        outs.append(np.array(loaded.network.logits(hidden)))
        start += span

    assert np.array_equal(case.logits, np.concatenate(outs))
    stats = loaded.slots.stats
    assert stats.misses * case.checkpoint.manifest.record_bytes == stats.bytes_read
    assert (stats.evictions > 0) == (slots < MOE_LAYERS * LAYER_EXPERTS)
    loaded.close()


def test_experts_are_never_loaded(case: Case) -> None:
    """The network's parameters are the trunk; experts are in slots alone."""
    loaded = streamed(case.checkpoint, TOP_K)

    assert isinstance(loaded.network, ForeignModel)
    model = loaded.network.model
    modules = [name for name, _ in model.named_modules()]
    parameters = dict(tree_flatten(model.parameters()))
    assert MOE_LAYERS == sum(name.endswith("switch_mlp") for name in modules)
    assert [] == [name for name in parameters if "switch_mlp" in name]
    loaded.close()


@pytest.fixture
def linear(tmp_path: Path) -> Iterator[Loaded]:
    """A Kimi-Linear of float32 weights, whole in memory."""
    loaded = streamed(open_checkpoint(make_checkpoint(tmp_path, KIMI_LINEAR, None)), 24)
    yield loaded
    loaded.close()


def test_snapshots_restore_exactly(linear: Loaded) -> None:
    """From each snapshot the same tokens give the same bits, also after others came between."""
    network, ids = linear.network, mx.array(IDS)
    state = network.make_state()
    empty = state.take()
    mx.eval(network.hidden(ids[:20], state, [7, 20]), state.arrays())
    at_7, at_20 = state.kept()
    after_20 = np.array(network.hidden(ids[20:30], state))

    state.restore(at_20)
    again = np.array(network.hidden(ids[20:30], state))
    state.restore(at_7)
    mx.eval(network.hidden(mx.array([3, 1, 2]), state), state.arrays())
    state.restore(at_7)
    from_7 = np.array(network.hidden(ids[7:20], state))
    state.restore(empty)
    anew = [network.hidden(part, state) for part in (ids[:7], ids[7:20])]

    assert (0, 7, 20) == (empty.tokens, at_7.tokens, at_20.tokens)
    assert np.array_equal(after_20, again)
    assert np.array_equal(np.array(anew[1]), from_7)
    assert [] == state.kept()


def greedy(folder: Path, ids: list[int], tokens: int) -> list[int]:
    """What mlx-lm's own model says after `ids`, most likely token by token."""
    model, _ = load_model(folder)
    cache, said = make_prompt_cache(model), list[int]()
    logits = model(mx.array(ids)[None], cache=cache)[0, -1]
    for _ in range(tokens):
        said.append(int(mx.argmax(logits).item()))  # type: ignore[arg-type]
        logits = model(mx.array(said[-1:])[None], cache=cache)[0, -1]
    return said


@pytest.mark.parametrize("config", [QWEN, KIMI_LINEAR], ids=["qwen", "linear"])
def test_the_engine_answers_like_mlx_lm(config: dict[str, Any], tmp_path: Path) -> None:
    """With a quarter of the experts in slots the text is that of mlx-lm's greedy tokens."""
    write(tmp_path, TEMPLATE)
    make_checkpoint(tmp_path, config | {"eos_token_id": [1, 0]}, None)
    checkpoint = open_checkpoint(tmp_path)
    engine = engine_for(checkpoint, checkpoint.plan(Settings(slots=6, width=4)))
    engine.start()
    chat = ForeignChat(tmp_path)
    request = Request((user("the weather in Paris"),), sampling=Sampling(0.0, max_tokens=24))
    prompt = chat.render(request)
    said = greedy(tmp_path, list(prompt.ids), 24)
    ended = [at for at, token in enumerate(said) if token in chat.stop_ids]
    parser = chat.parser(prompt)
    spoken = said[: ended[0]] if ended else said
    finished = Finished("stop", Usage(), Stats())
    expected = collect([*parser.feed(spoken), *parser.finish(not ended), finished])

    first = collect(engine.submit(request))
    again = collect(engine.submit(request))
    engine.close()

    assert expected.reasoning + expected.content
    assert (expected.reasoning, expected.content) == (first.reasoning, first.content)
    assert (first.reasoning, first.content) == (again.reasoning, again.content)
    assert (0, prompt.ends[-1]) == (first.usage.cached_tokens, again.usage.cached_tokens)
    assert first.stats.experts.evictions > 0
    assert first.usage.completion_tokens == (ended[0] + 1 if ended else 24)


def test_a_cache_that_forgets_is_refused(tmp_path: Path) -> None:
    """Sliding windows can't be taken back to a snapshot: one clear error, and no hang."""
    write(tmp_path, TEMPLATE)
    checkpoint = open_checkpoint(make_checkpoint(tmp_path, SLIDING, None))
    engine = engine_for(checkpoint, checkpoint.plan(Settings(width=4)))

    with pytest.raises(CheckpointError, match="keeps a RotatingKVCache, expected KVCache"):
        engine.start()
    engine.close()
