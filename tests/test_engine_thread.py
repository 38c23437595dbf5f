"""The engine's thread: cancelling, queueing, calls, its beginning and its end."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from mlxmoe.answer import Runtime
from mlxmoe.checkpoint import open_checkpoint
from mlxmoe.engine import Engine, Opened, engine_for
from mlxmoe.errors import CheckpointError, EngineError, MlxmoeError
from mlxmoe.events import (
    Finished,
    Progress,
    ReasoningDelta,
    Sampling,
    Stream,
    TextDelta,
    ToolArgumentDelta,
    ToolCallDropped,
    collect,
)
from mlxmoe.loader import OnProgress
from mlxmoe.transcript import Message, Text, ToolCall, user
from scripted import Stage
from test_engine import ASK, plan_of, said


@pytest.fixture
def stage(goldens: Path) -> Iterator[Stage]:
    """A scripted network under the chat of tiny-k31."""
    made = Stage(open_checkpoint(goldens / "tiny-k31"))
    made.teach(ASK, Message("assistant", (Text("Fine. " * 20),), "well " * 20))
    yield made
    made.engine.close()


@pytest.mark.parametrize("at", [ReasoningDelta, Progress])
def test_cancel_stops_soon_and_cleanly(stage: Stage, at: type) -> None:
    """Between two tokens, or two layers of the prefill: Finished, and a right next answer."""
    stage.network.seconds = 0.002
    stream, seen = stage.engine.submit(ASK), []
    for event in stream:
        seen.append(event)
        if isinstance(event, at):
            stream.cancel()
    stage.network.seconds = 0.0

    reply, whole = collect(seen), collect(stage.engine.submit(ASK))

    assert "cancelled" == reply.finish_reason
    assert (reply.usage.completion_tokens > 0) == (at is ReasoningDelta)
    assert reply.usage.completion_tokens < 12
    assert whole.reasoning.startswith(reply.reasoning)
    assert 24 == whole.usage.completion_tokens
    if at is Progress:
        assert 0 == whole.usage.cached_tokens
        assert reply.stats.prefill_tokens < reply.usage.prompt_tokens


def test_a_call_that_is_cancelled_is_dropped(stage: Stage) -> None:
    """Half a call is no call, whatever its arguments look like so far."""
    request = replace(ASK, sampling=Sampling(0.0))
    call = ToolCall("search", {"text": "words " * 20})
    stage.teach(request, Message("assistant", (), "hm", (call,)))
    stage.network.seconds = 0.002
    stream, seen = stage.engine.submit(request), []
    for event in stream:
        seen.append(event)
        if isinstance(event, ToolArgumentDelta):
            stream.cancel()

    dropped = [event.why for event in seen if isinstance(event, ToolCallDropped)]
    assert ["the answer was cut off in it"] == dropped
    assert ("cancelled", ()) == (collect(seen).finish_reason, collect(seen).tool_calls)


def test_a_request_cancelled_in_the_queue_touches_nothing(stage: Stage) -> None:
    """It ends at once, and the session of the request before it is whole."""
    stage.network.seconds = 0.002
    first, second = stage.engine.submit(ASK), stage.engine.submit(ASK)
    second.cancel()

    replies = collect(first), collect(second)

    assert ["length", "cancelled"] == [reply.finish_reason for reply in replies]
    assert 0 == replies[1].usage.completion_tokens == replies[1].stats.prefill_tokens
    assert replies[0].usage.prompt_tokens + 23 == len(stage.timeline())


def test_requests_of_two_threads_wait_for_each_other(goldens: Path) -> None:
    """Each gets its own whole answer, as if alone."""
    checkpoint = open_checkpoint(goldens / "tiny-k31")
    engine = engine_for(checkpoint, plan_of(checkpoint))
    engine.start()
    short = replace(ASK, sampling=Sampling(0.0, max_tokens=6))
    asked = (short, replace(short, messages=(user("And the hills?"),)))
    alone = [said(collect(engine.submit(request))) for request in asked]
    replies: dict[int, tuple[str, str]] = {}

    def work(number: int) -> None:
        replies[number] = said(collect(engine.submit(asked[number % 2])))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    engine.close()

    assert {0: alone[0], 1: alone[1], 2: alone[0]} == replies


def test_call_runs_in_the_engines_thread(stage: Stage) -> None:
    """Its result comes back, or its error, and the engine goes on."""

    def fail(runtime: Runtime) -> NoReturn:
        raise MlxmoeError("on purpose")

    assert "engine" == stage.engine.call(lambda runtime: threading.current_thread().name)
    with pytest.raises(MlxmoeError, match="on purpose"):
        stage.engine.call(fail)
    assert any(isinstance(event, TextDelta | Finished) for event in stage.engine.submit(ASK))


def test_after_the_end_nothing_is_taken(stage: Stage) -> None:
    """`close` twice is no harm; `submit` and `call` say what is wrong."""
    stage.engine.close()
    stage.engine.close()

    for ask in (stage.engine.submit, lambda request: stage.engine.call(lambda runtime: request)):
        with pytest.raises(EngineError, match="not running"):
            ask(ASK)
    with pytest.raises(EngineError, match="an engine starts once"):
        stage.engine.start()


def test_before_the_beginning_nothing_is_taken(goldens: Path) -> None:
    """An engine that was not started, or never will be, says so."""
    checkpoint = open_checkpoint(goldens / "tiny-k31")
    engine = engine_for(checkpoint, plan_of(checkpoint))

    with pytest.raises(EngineError, match="not running: start one first"):
        engine.submit(ASK)
    engine.close()
    with pytest.raises(EngineError, match="an engine starts once"):
        engine.start()


def test_what_is_queued_is_finished_at_the_end(stage: Stage) -> None:
    """`close` waits for the requests before it."""
    streams = [stage.engine.submit(ASK) for _ in range(3)]
    stage.engine.close()

    assert ["length"] * 3 == [collect(stream).finish_reason for stream in streams]


def submit_until_refused(engine: Engine, taken: list[Stream], ready: threading.Barrier) -> None:
    """Submit as fast as can be, from when all are ready until the engine takes no more."""
    ready.wait()
    request = replace(ASK, sampling=Sampling(0.0, max_tokens=1))
    while True:
        try:
            taken.append(engine.submit(request))
        except EngineError:
            return


@pytest.mark.parametrize("attempt", range(4))
def test_no_stream_is_left_hanging_by_the_end(stage: Stage, attempt: int) -> None:
    """Whatever thread submits while another closes: it is refused, or it is answered."""
    taken, ready = list[Stream](), threading.Barrier(3)
    arguments = (stage.engine, taken, ready)
    threads = [threading.Thread(target=submit_until_refused, args=arguments) for _ in range(2)]
    for thread in threads:
        thread.start()
    ready.wait()
    stage.engine.close()
    for thread in threads:
        thread.join()

    # Without the end of its events a reader would wait for ever.
    readers = [threading.Thread(target=collect, args=(s,), daemon=True) for s in taken]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(5)
    assert not any(reader.is_alive() for reader in readers)


@pytest.mark.parametrize("error", [CheckpointError("no such shard"), MemoryError(), OSError(28)])
def test_errors_of_loading_come_out_of_start(error: Exception) -> None:
    """Whatever loading raises, `start` raises, and the engine takes nothing."""

    def open_model(on_progress: OnProgress) -> Opened:
        raise error

    engine = Engine(open_model)
    with pytest.raises(type(error)) as found:
        engine.start()
    engine.close()

    assert error is found.value
    with pytest.raises(EngineError, match="not running"):
        engine.submit(ASK)


def test_loading_says_how_far_it_is(goldens: Path) -> None:
    """Progress in bytes up to the whole trunk."""
    checkpoint = open_checkpoint(goldens / "tiny-k31")
    engine, heard = engine_for(checkpoint, plan_of(checkpoint)), list[Progress]()
    engine.start(heard.append)
    engine.close()

    done = [progress.done for progress in heard]
    assert sorted(done) == done
    assert ("load", "bytes") == (heard[-1].stage, heard[-1].unit)
    assert checkpoint.manifest.trunk_bytes == done[-1] == heard[-1].total
