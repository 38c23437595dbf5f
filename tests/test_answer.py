"""What one request makes of a network that says known words: channels, caps, stops, counts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlxmoe import answer
from mlxmoe.chat.kimi import KimiChat
from mlxmoe.checkpoint import open_checkpoint
from mlxmoe.errors import PromptError, UsageError
from mlxmoe.events import (
    Event,
    Progress,
    Reply,
    Request,
    Sampling,
    TextDelta,
    ThinkingCapped,
    ToolCallDropped,
    ToolCallStarted,
    collect,
)
from mlxmoe.transcript import Message, Text, ToolCall, user
from scripted import Stage

ASK = Request((user("hello"),), sampling=Sampling(0.0))
CALLS = (ToolCall("get_weather", {"city": "Paris", "days": 3}), ToolCall("now", {}))


def said(reasoning: str, content: str, calls: tuple[ToolCall, ...] = ()) -> Message:
    """An assistant's message."""
    return Message("assistant", (Text(content),), reasoning, calls)


@pytest.fixture
def stage(goldens: Path) -> Iterator[Stage]:
    """A scripted network under the chat of tiny-k31."""
    made = Stage(open_checkpoint(goldens / "tiny-k31"))
    yield made
    made.engine.close()


def ask(stage: Stage, request: Request) -> tuple[Reply, list[Event]]:
    """The reply, and its events without progress."""
    events = list(stage.engine.submit(request))
    return collect(events), [event for event in events if not isinstance(event, Progress)]


def test_an_answer_comes_back_as_it_was_said(stage: Stage) -> None:
    """Reasoning, content, counts and reason of a plain answer; the marker that closes the
    reasoning is not counted as reasoning."""
    ids = stage.teach(ASK, said("let me think", "Hello there."))
    close = stage.chat.tokenizer.special_id("<|close|>")

    reply, _ = ask(stage, ASK)

    assert said("let me think", "Hello there.") == reply.message
    assert "stop" == reply.finish_reason
    assert len(stage.prompt(ASK)) == reply.usage.prompt_tokens == reply.stats.prefill_tokens
    assert 0 == reply.usage.cached_tokens
    assert len(ids) == reply.usage.completion_tokens == reply.stats.decode_tokens
    assert ids.index(close) == reply.usage.reasoning_tokens
    assert 0 < reply.stats.ttft_seconds <= reply.stats.prefill_seconds + reply.stats.decode_seconds


def test_tool_calls_come_back_typed(stage: Stage) -> None:
    """Two calls after content: finish reason tool_calls, arguments with their types."""
    stage.teach(ASK, said("which tool?", "Looking.", CALLS))

    reply, events = ask(stage, ASK)

    assert ("tool_calls", "Looking.") == (reply.finish_reason, reply.content)
    assert CALLS == reply.tool_calls
    assert [(0, "get_weather"), (1, "now")] == [
        (event.index, event.name) for event in events if isinstance(event, ToolCallStarted)
    ]


def test_the_next_turn_reuses_the_whole_first(stage: Stage) -> None:
    """A history that ends with the answer goes on where the answer ended."""
    ids = stage.teach(ASK, said("hm", "Hello.", CALLS[:1]))
    first, _ = ask(stage, ASK)
    result = Message("tool", (Text("sunny"),), name="get_weather")
    more = replace(ASK, messages=(*ASK.messages, first.message, result))
    stage.teach(more, said("good", "It is sunny."))

    second, _ = ask(stage, more)

    # The last token was drawn but never went through the network.
    assert len(stage.prompt(ASK)) + len(ids) - 1 == second.usage.cached_tokens
    assert second.usage.prompt_tokens - second.usage.cached_tokens == second.stats.prefill_tokens
    assert "It is sunny." == second.content


def test_capped_thinking_is_closed_and_the_answer_goes_on(stage: Stage) -> None:
    """At the cap the model's own markers close the thinking; the next turn reuses them too."""
    ids = stage.ids(ASK, said("a b c d e f g h i j", "never said"))
    prompt, close = stage.prompt(ASK), list(stage.chat.close_thinking)
    tail = stage.ids(replace(ASK, thinking=False), said("", "Short then."))
    stage.script.add(prompt, ids)
    stage.script.add([*prompt, *ids[:6], *close], tail)
    request = replace(ASK, thinking_cap=6)

    reply, events = ask(stage, request)

    assert (stage.chat.decode(ids[:6]), "Short then.") == (reply.reasoning, reply.content)
    assert [ThinkingCapped(6, 6)] == [e for e in events if isinstance(e, ThinkingCapped)]
    assert (6, 6 + len(close) + len(tail)) == (
        reply.usage.reasoning_tokens,
        reply.usage.completion_tokens,
    )
    assert [*prompt, *ids[:6], *close, *tail[:-1]] == stage.timeline()
    assert "<|close|>think<|sep|><|open|>response<|sep|>" == stage.chat.decode(close)
    more = replace(request, messages=(*ASK.messages, reply.message, user("go on")))
    assert len(stage.timeline()) == ask(stage, more)[0].usage.cached_tokens


def test_a_cap_of_zero_leaves_no_thinking(stage: Stage) -> None:
    """The first tokens are the markers, then the answer comes."""
    close = list(stage.chat.close_thinking)
    tail = stage.ids(replace(ASK, thinking=False), said("", "At once."))
    stage.script.add([*stage.prompt(ASK), *close], tail)

    reply, events = ask(stage, replace(ASK, thinking_cap=0))

    assert ("", "At once.", 0) == (reply.reasoning, reply.content, reply.usage.reasoning_tokens)
    assert ThinkingCapped(0, 0) == events[0]


@pytest.mark.parametrize("cap", [None, 8, 100])
def test_thinking_under_its_cap_is_left_alone(stage: Stage, cap: int | None) -> None:
    """No cap, or one that is not reached, changes nothing; the closing markers count as
    thinking when the model draws them."""
    ids = stage.teach(ASK, said("one two", "Fine."))
    sep = stage.chat.tokenizer.special_id("<|sep|>")
    assert ids.index(sep) + 1 <= 8

    reply, events = ask(stage, replace(ASK, thinking_cap=cap))

    assert said("one two", "Fine.") == reply.message
    assert not any(isinstance(event, ThinkingCapped) for event in events)


def test_tiers_have_their_own_caps(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """low and high cap at 8,192 and 32,768, max not at all; the request's own cap wins."""
    assert {"low": 8192, "high": 32768, "max": None} == answer.THINKING_CAPS
    monkeypatch.setitem(answer.THINKING_CAPS, "low", 3)
    low = replace(ASK, tier="low")
    stage.teach(low, said("a b c d e f", "Fine."))

    assert 3 == ask(stage, low)[0].usage.reasoning_tokens
    assert "a b c d e f" == ask(stage, replace(low, thinking_cap=50))[0].reasoning


def test_a_cap_waits_for_a_whole_character(stage: Stage) -> None:
    """Thinking is not closed between the bytes of a character."""
    text = "x🜚🜚🜚"
    ids = stage.ids(ASK, said(text, "no"))
    stage.script.add(stage.prompt(ASK), ids)
    cap = next(n for n in range(1, 9) if stage.chat.decode(ids[:n]).endswith("\ufffd"))

    reply, events = ask(stage, replace(ASK, thinking_cap=cap))

    assert "x🜚" == reply.reasoning
    (capped,) = [event for event in events if isinstance(event, ThinkingCapped)]
    assert stage.chat.decode(ids[: capped.tokens]) == "x🜚"


def test_without_thinking_the_answer_begins_at_once(stage: Stage) -> None:
    """The prompt opens the response; no cap applies, even 0."""
    request = replace(ASK, thinking=False, thinking_cap=0)
    stage.teach(request, said("", "Direct."))

    reply, events = ask(stage, request)

    assert ("", "Direct.", 0) == (reply.reasoning, reply.content, reply.usage.reasoning_tokens)
    assert not any(isinstance(event, ThinkingCapped) for event in events)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_max_tokens_ends_it(stage: Stage, tokens: int) -> None:
    """The limit counts every drawn token."""
    ids = stage.teach(ASK, said("one two three four five", "Fine."))

    reply, _ = ask(stage, replace(ASK, sampling=Sampling(0.0, max_tokens=tokens)))

    assert ("length", tokens) == (reply.finish_reason, reply.usage.completion_tokens)
    assert stage.chat.decode(ids[:tokens]) == reply.reasoning
    assert [*stage.prompt(ASK), *ids[: tokens - 1]] == stage.timeline()


def test_max_tokens_may_fall_among_the_forced_markers(stage: Stage) -> None:
    """Half of the closing markers are no text, and never more tokens than asked for."""
    ids = stage.teach(ASK, said("a b c d e f", "no"))
    num_forced = len(stage.chat.close_thinking)
    for tokens in range(3, 3 + num_forced + 1):
        sampling = Sampling(0.0, max_tokens=tokens)

        reply, _ = ask(stage, replace(ASK, thinking_cap=3, sampling=sampling))

        assert ("length", tokens) == (reply.finish_reason, reply.usage.completion_tokens)
        assert (stage.chat.decode(ids[:3]), 3) == (reply.reasoning, reply.usage.reasoning_tokens)
        assert "" == reply.content


@pytest.mark.parametrize("stop", ["lo th", "Hello there.", "there.", "H", " ", "e."])
def test_a_stop_string_cuts_the_answer(stage: Stage, stop: str) -> None:
    """Across token borders, without any of it; the reasoning is not searched."""
    stage.teach(ASK, said("Hello there. H e.", "Hello there. Bye"))

    reply, _ = ask(stage, replace(ASK, sampling=Sampling(0.0, stop=(stop, "nowhere"))))

    assert "Hello there. Bye".partition(stop)[0] == reply.content
    assert ("Hello there. H e.", "stop") == (reply.reasoning, reply.finish_reason)


def test_held_text_comes_before_the_call_after_it(stage: Stage) -> None:
    """What might have been a stop string keeps its place among the events."""
    stage.teach(ASK, said("t", "Wait EN", CALLS[:1]))

    reply, events = ask(stage, replace(ASK, sampling=Sampling(0.0, stop=("END",))))

    kinds = [type(event) for event in events]
    last_text = max(at for at, kind in enumerate(kinds) if kind is TextDelta)
    assert ("Wait EN", CALLS[:1]) == (reply.content, reply.tool_calls)
    assert last_text < kinds.index(ToolCallStarted)
    assert "tool_calls" == reply.finish_reason


def test_a_call_that_is_cut_off_is_dropped(stage: Stage) -> None:
    """By the limit: no call in the reply, and an event that says so."""
    ids = stage.teach(ASK, said("t", "x", CALLS))
    within = next(n for n in range(len(ids)) if "Par" in stage.chat.decode(ids[:n]))
    sampling = Sampling(0.0, max_tokens=within)

    reply, events = ask(stage, replace(ASK, sampling=sampling))

    assert ("length", ()) == (reply.finish_reason, reply.tool_calls)
    dropped = [event for event in events if isinstance(event, ToolCallDropped)]
    assert ["the answer was cut off in it"] == [event.why for event in dropped]


def test_the_context_ends_an_answer(goldens: Path) -> None:
    """Tokens go up to the context and no further; a prompt that fills it is refused, which
    costs the conversation nothing."""
    checkpoint = open_checkpoint(goldens / "tiny-k31")
    size = len(KimiChat(goldens / "tiny-k31").render(ASK).ids)
    for room in (1, 4):
        stage = Stage(checkpoint, context=size + room)
        stage.teach(ASK, said("a b c d e f", "no"))
        longer = replace(ASK, messages=(user("hello" + " x" * room),))
        found = len(stage.prompt(longer))
        assert found >= size + room

        reply, _ = ask(stage, replace(ASK, sampling=Sampling(0.0, max_tokens=50)))

        assert ("length", room) == (reply.finish_reason, reply.usage.completion_tokens)
        with pytest.raises(PromptError, match=f"has {found} tokens, .* holds {size + room}"):
            ask(stage, longer)
        assert size + room - 1 == len(stage.timeline())
        stage.engine.close()


def test_bad_requests_are_refused(stage: Stage) -> None:
    """Before any work, each with its own error; the engine goes on."""
    with pytest.raises(PromptError, match="the conversation is empty"):
        ask(stage, Request(()))
    with pytest.raises(UsageError, match="thinking_cap is -1, expected 0 or more"):
        ask(stage, replace(ASK, thinking_cap=-1))
    with pytest.raises(UsageError, match="top_p is 2"):
        ask(stage, replace(ASK, sampling=Sampling(top_p=2.0)))

    assert "stop" == ask(stage, ASK)[0].finish_reason


def test_a_tokenizer_that_is_not_the_models_is_refused(stage: Stage) -> None:
    """An id without an embedding would be read from past the table's end."""

    def forget_ids(runtime: answer.Runtime) -> None:
        runtime.limits = replace(runtime.limits, vocab=1349)

    stage.engine.call(forget_ids)
    with pytest.raises(PromptError, match="token id 1349, this model knows 0 to 1348"):
        ask(stage, ASK)


def test_progress_counts_what_has_to_be_done(stage: Stage) -> None:
    """Prefill progress is of the tokens not reused, from the first layer to the last."""
    for messages in ((user("hello"),), (user("hello"), said("", ""), user("again " * 90))):
        events = list(stage.engine.submit(replace(ASK, messages=messages)))
        reply = collect(events)
        progress = [event for event in events if isinstance(event, Progress)]
        fresh = reply.usage.prompt_tokens - reply.usage.cached_tokens

        assert {("prefill", fresh, "tokens")} == {(p.stage, p.total, p.unit) for p in progress}
        done = [p.done for p in progress]
        assert sorted(done) == done
        assert (fresh, True) == (done[-1], done[0] < fresh)
