"""The shipped demo model, end to end: its own engine, the chat's loop, real tools, real files."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from metal_kernels.kernels import REFERENCE, Kernels
from mlxmoe import demo
from mlxmoe.answer import Runtime
from mlxmoe.budget import Settings
from mlxmoe.checkpoint import open_checkpoint, stream_width
from mlxmoe.engine import Engine, engine_for
from mlxmoe.events import Request, Sampling, collect
from mlxmoe.models.kimi_k3 import Model
from mlxmoe.transcript import user
from train_demo.batches import THINKING
from train_demo.dialogues import held_cases
from train_demo.grade import is_right
from train_demo.play import play

# Of each kind that the README claims, a held-out dialogue by its number in the evaluation.
CASES = {
    "greet": 0,
    "self": 1,
    "can": 1,
    "thanks": 1,
    "bye": 0,
    "fallback": 0,
    "easy_sum": 0,
    "sum": 0,
    "list": 1,
    "read": 1,
    "value": 0,
    "find": 0,
    "retry": 1,
    "two": 4,
    "follow": 2,
    "recall": 0,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The demo with its default slots, so that experts are evicted on the way."""
    checkpoint = open_checkpoint(demo.FOLDER)
    settings = demo.fill_settings(demo.NAME, Settings(None, None, None, None, stream_width()))
    engine = engine_for(checkpoint, checkpoint.plan(settings))
    engine.start(lambda _: None)
    yield engine
    engine.close()


@pytest.mark.parametrize(("kind", "number"), CASES.items())
def test_one_dialogue_of_each_kind(engine: Engine, tmp_path: Path, kind: str, number: int) -> None:
    """At tier high the model makes the expected calls with the exact arguments, and gives the
    expected answer; nothing but its own text makes them."""
    case = held_cases(kind, "high", number + 1)[number]
    answers = play(engine.submit, case, tmp_path)
    assert is_right(case, answers), [answer.message for answer in answers]


def test_tiers_think_differently(engine: Engine, tmp_path: Path) -> None:
    """For the same kind of question low thinks not at all, high a little, max more."""
    thinking = []
    for tier in THINKING:
        (case,) = held_cases("sum", tier, 1)
        answers = play(engine.submit, case, tmp_path / tier)
        thinking.append(sum(len(answer.message.reasoning) for answer in answers))
    assert 0 == thinking[0] < thinking[1] < thinking[2]


def test_attention_runs_over_a_selection(engine: Engine, tmp_path: Path) -> None:
    """Past `index_topk` keys a full-attention layer reads exactly that many rows of its cache,
    of more than there are."""
    seen: set[tuple[int, int]] = set()

    def recorded(
        q: mx.array, latent: mx.array, rows: mx.array, rank: int, scale: float
    ) -> mx.array:
        seen.add((latent.shape[0], rows.shape[-1]))
        return REFERENCE.sparse_mla(q, latent, rows, rank, scale)

    def run_on(runtime: Runtime, kernels: Kernels) -> None:
        network = runtime.loaded.network
        assert isinstance(network, Model)
        for layer in network.layers:
            layer.self_attn.kernels = kernels

    (case,) = held_cases("read", "high", 1)
    engine.call(lambda runtime: run_on(runtime, replace(REFERENCE, sparse_mla=recorded)))
    play(engine.submit, case, tmp_path)
    engine.call(lambda runtime: run_on(runtime, REFERENCE))
    assert {128} == {rows for _, rows in seen}
    assert all(keys > 128 for keys, _ in seen)
    assert max(keys for keys, _ in seen) > 300


def test_experts_stream(engine: Engine) -> None:
    """With the default slots experts are read from the files and evicted in one answer."""
    asked = Request((user("hello"),), sampling=Sampling(temperature=0.0, max_tokens=100))
    experts = collect(engine.submit(asked)).stats.experts
    assert experts.evictions > 0
    assert experts.bytes_read > 0
