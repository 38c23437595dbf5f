"""The engine: a quarter of the experts, errors under its feet, threads, and its end."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlxmoe.budget import Plan, Settings
from mlxmoe.chat.kimi import KimiChat
from mlxmoe.checkpoint import Checkpoint, open_checkpoint
from mlxmoe.engine import Engine, engine_for
from mlxmoe.errors import MlxmoeError, ReadError
from mlxmoe.events import (
    Finished,
    Reply,
    Request,
    Sampling,
    Stats,
    Usage,
    collect,
)
from mlxmoe.transcript import Message, Text, user
from scripted import Stage

ASK = Request((user("Tell me about the sea."),), sampling=Sampling(0.0, max_tokens=24))
EXPERTS, QUARTER = 112, 28


def plan_of(checkpoint: Checkpoint, slots: int = QUARTER) -> Plan:
    """A plan with this many slots."""
    return checkpoint.plan(Settings(slots=slots, max_span=32, context=2048, width=4))


def started(folder: Path, slots: int = QUARTER) -> Engine:
    """A running engine of the checkpoint."""
    checkpoint = open_checkpoint(folder)
    engine = engine_for(checkpoint, plan_of(checkpoint, slots))
    engine.start()
    return engine


def said(reply: Reply) -> tuple[str, str]:
    """What was said."""
    return reply.reasoning, reply.content


@pytest.fixture(scope="module")
def resident(goldens: Path) -> Reply:
    """What tiny-k31 answers with all experts in memory."""
    engine = started(goldens / "tiny-k31", EXPERTS)
    reply = collect(engine.submit(ASK))
    engine.close()
    return reply


@pytest.fixture
def folder(goldens: Path, tmp_path: Path) -> Path:
    """A copy of tiny-k31 to spoil."""
    return shutil.copytree(goldens / "tiny-k31", tmp_path / "model")


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    """An engine of that copy, a quarter of the experts in slots."""
    running = started(folder)
    yield running
    running.close()


@pytest.fixture
def stage(goldens: Path) -> Iterator[Stage]:
    """A scripted network under the chat of tiny-k31."""
    made = Stage(open_checkpoint(goldens / "tiny-k31"))
    made.teach(ASK, Message("assistant", (Text("Fine. " * 20),), "well " * 20))
    yield made
    made.engine.close()


def test_a_quarter_of_the_experts_says_the_same(engine: Engine, resident: Reply) -> None:
    """The same text, with evictions; the figures belong together."""
    reply = collect(engine.submit(ASK))
    plan = engine.call(lambda runtime: runtime.limits)

    assert said(resident) == said(reply)
    assert resident.usage == reply.usage
    assert (0, True) == (resident.stats.experts.evictions, reply.stats.experts.evictions > 0)
    assert resident.stats.experts.misses < reply.stats.experts.misses
    assert (24, "length") == (reply.usage.completion_tokens, reply.finish_reason)
    assert plan.planned_bytes == reply.stats.planned_memory_bytes
    # 7 MoE layers, for each of the 23 tokens that were stepped and for each span.
    spans = -(-(reply.usage.prompt_tokens - 1) // 32) + 2
    assert 7 * 23 < reply.stats.host_syncs <= 7 * (23 + 2 * spans)
    assert reply.stats.peak_memory_bytes > 1 << 20


def test_stats_are_of_one_request(engine: Engine) -> None:
    """A second request counts from nothing, and reuses the prompt up to its last message."""
    first, second = (collect(engine.submit(ASK)) for _ in range(2))

    assert said(first) == said(second)
    record = engine.call(lambda runtime: runtime.loaded.manifest.record_bytes)
    for reply in (first, second):
        assert reply.stats.experts.misses * record == reply.stats.experts.bytes_read
        assert reply.usage.prompt_tokens - reply.usage.cached_tokens == reply.stats.prefill_tokens
    assert 0 == first.usage.cached_tokens < second.usage.cached_tokens
    assert second.stats.host_syncs < first.stats.host_syncs


@pytest.mark.parametrize(
    "case", ["thinking-false-effort-ignored", "thinking-false-template-default"]
)
def test_golden_chats_are_answered_as_the_oracle_does(goldens: Path, case: str) -> None:
    """From messages to text: the greedy tokens of the float64 oracle, read by the parser."""
    (greedy,) = [
        c
        for c in json.loads((goldens / "tiny-k3/goldens/greedy.json").read_text())["cases"]
        if c["chat_case"] == case
    ]
    cases = json.loads((goldens / "chat/cases.json").read_text())["cases"]
    (chat_case,) = [c for c in cases if c["id"] == case]
    messages = tuple(Message(m["role"], (Text(m["content"]),)) for m in chat_case["messages"])
    sampling = Sampling(0.0, max_tokens=len(greedy["greedy_ids"]))
    chat = KimiChat(goldens / "tiny-k3")
    request = Request(messages, thinking=False, sampling=sampling)
    prompt = chat.render(request)
    parser = chat.parser(prompt)
    events = [*parser.feed(greedy["greedy_ids"]), *parser.finish(True)]
    expected = collect([*events, Finished("length", Usage(), Stats())])
    engine = started(goldens / "tiny-k3")

    reply = collect(engine.submit(request))
    engine.close()

    assert greedy["prompt_ids"] == list(prompt.ids)
    assert (said(expected), "length") == (said(reply), reply.finish_reason)


def test_seeds_repeat(engine: Engine) -> None:
    """The same seed says the same at a temperature, another seed something else."""
    texts = []
    for seed in (1, 1, 2):
        sampling = Sampling(1.0, seed=seed, max_tokens=12)
        texts.append(said(collect(engine.submit(replace(ASK, sampling=sampling)))))

    assert texts[0] == texts[1] != texts[2]


def truncate(shard: Path) -> None:
    """Cut a file's second half away."""
    os.truncate(shard, shard.stat().st_size // 2)


def touch(shard: Path) -> None:
    """Rewrite a file's time."""
    os.utime(shard, ns=(1, 1))


SPOILERS: list[Callable[[Path], None]] = [truncate, touch, Path.unlink]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_a_shard_that_changes_is_one_error(
    engine: Engine, folder: Path, resident: Reply, spoil: Callable[[Path], None]
) -> None:
    """Each request says so in one line while it lasts; once it is restored all is well."""
    shard = folder / "model-00005-of-000011.safetensors"
    kept, times = shard.read_bytes(), shard.stat()
    assert said(resident) == said(collect(engine.submit(ASK)))
    spoil(shard)

    for _ in range(2):
        with pytest.raises(
            ReadError, match=rf"^{shard}: (changed since|can't be read now)"
        ) as found:
            collect(engine.submit(ASK))
        assert 1 == len(str(found.value).splitlines())
    shard.write_bytes(kept)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert said(resident) == said(collect(engine.submit(ASK)))


def test_a_read_that_fails_midway_is_one_error(
    engine: Engine, folder: Path, resident: Reply
) -> None:
    """A shard cut while experts are read from it: ReadError, and a clean engine after it."""
    shard = folder / "model-00005-of-000011.safetensors"
    kept, times = shard.read_bytes(), shard.stat()
    ids = KimiChat(folder).render(ASK).ids
    truncate(shard)

    for _ in range(2):
        with pytest.raises(ReadError, match="the file ends there"):
            engine.call(lambda runtime: runtime.session.sync(ids))
    shard.write_bytes(kept)
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))

    assert said(resident) == said(collect(engine.submit(ASK)))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("no bytes left"), "the engine failed: RuntimeError: no bytes left"),
        (ReadError("the disk is gone"), "the disk is gone"),
    ],
)
def test_a_broken_network_is_one_error(stage: Stage, error: Exception, words: str) -> None:
    """What breaks in the middle ends the request with its name, and only the request."""
    good = stage.network.say

    def bad(timeline: list[int]) -> int:
        raise error

    stage.network.say = bad
    for _ in range(2):
        with pytest.raises(MlxmoeError, match=f"^{words}$"):
            collect(stage.engine.submit(ASK))
    stage.network.say = good

    assert "well" in collect(stage.engine.submit(ASK)).reasoning
