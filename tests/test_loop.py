"""Turns with tools, on a scripted engine: rounds, history, cancelling, failures."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlxmoe.agent.loop import (
    MOST_ROUNDS,
    Conversation,
    Forgotten,
    RoundsSpent,
    ToolResult,
    TurnEvent,
)
from mlxmoe.agent.toolbox import Toolbox, own_tools
from mlxmoe.checkpoint import open_checkpoint
from mlxmoe.errors import PromptError
from mlxmoe.events import Finished, Request, Sampling, Stream, TextDelta, ToolCallFinished
from mlxmoe.transcript import Message, Text, ToolCall, user
from scripted import Stage

FORM = Request((), sampling=Sampling(0.0))
SUM = ToolCall("calculator", {"expression": "17*23"})


@pytest.fixture
def stage(goldens: Path) -> Iterator[Stage]:
    """A scripted network under the chat of tiny-k31."""
    made = Stage(open_checkpoint(goldens / "tiny-k31"))
    yield made
    made.engine.close()


@pytest.fixture
def toolbox(tmp_path: Path) -> Toolbox:
    """The four tools over a folder with one file."""
    (tmp_path / "notes.txt").write_text("buy milk\n")
    return own_tools(tmp_path)


def said(reasoning: str, content: str = "", *calls: ToolCall) -> Message:
    """An assistant's message."""
    return Message("assistant", (Text(content),) if content else (), reasoning, calls)


def result(name: str, text: str) -> Message:
    """A tool's message."""
    return Message("tool", (Text(text),), name=name)


def asked(toolbox: Toolbox, *messages: Message) -> Request:
    """The request for what comes after `messages`."""
    return replace(FORM, messages=messages, tools=toolbox.declarations)


def teach(stage: Stage, toolbox: Toolbox, messages: list[Message]) -> None:
    """Let the network say the assistant's part of `messages`."""
    for at, message in enumerate(messages):
        if message.role == "assistant":
            stage.teach(asked(toolbox, *messages[:at]), message)


def results(events: list[TurnEvent]) -> list[str]:
    """The texts of the tools."""
    return [event.text for event in events if isinstance(event, ToolResult)]


def test_calls_are_run_and_the_model_is_asked_again(stage: Stage, toolbox: Toolbox) -> None:
    """Two calls in a round, one in the next, an answer, a second turn that goes on: the history
    is all of it word for word, and each prompt is computed from where the last one ended."""
    find, read = ToolCall("find_word", {"word": "milk"}), ToolCall("read_file", {"path": "x"})
    dialogue = [
        user("milk and 17 * 23?"),
        said("two tools", "Looking.", SUM, find),
        result("calculator", "391"),
        result("find_word", "notes.txt: buy milk"),
        said("one more", "", read),
        result("read_file", "error: no file x"),
        said("done", "391, and milk is to buy."),
        user("thanks"),
        said("", "You're welcome."),
    ]
    teach(stage, toolbox, dialogue)
    conversation = Conversation(stage.engine.submit, toolbox, FORM)

    first, second = list(conversation.turn(dialogue[0].text)), list(conversation.turn("thanks"))

    assert tuple(dialogue) == conversation.messages
    assert ["391", "notes.txt: buy milk", "error: no file x"] == results(first)
    assert ["tool_calls", "tool_calls", "stop"] == [
        event.reason for event in first if isinstance(event, Finished)
    ]
    kinds = [type(event) for event in first]
    assert kinds.index(ToolCallFinished) < kinds.index(Finished) < kinds.index(ToolResult)
    (ended,) = [event for event in second if isinstance(event, Finished)]
    whole = stage.chat.render(asked(toolbox, *dialogue[:7]))
    # The last token drawn, and the end token after it, were never computed.
    assert whole.ends[-1] - 2 == ended.usage.cached_tokens


def test_wrong_calls_are_told_to_the_model(stage: Stage, toolbox: Toolbox) -> None:
    """A tool that is not there, a number for a string, broken JSON: results, then an answer."""
    calls = (
        ToolCall("fly", {"to": "the moon"}),
        ToolCall("calculator", {"expression": 5}),
        ToolCall("read_file", '{"path": '),
    )
    texts = [toolbox.answer(call) for call in calls]
    dialogue = [
        user("go"),
        said("", "", *calls),
        *(result(call.name, text) for call, text in zip(calls, texts, strict=True)),
        said("", "I can't."),
    ]
    teach(stage, toolbox, dialogue)
    conversation = Conversation(stage.engine.submit, toolbox, FORM)

    events = list(conversation.turn("go"))

    assert texts == results(events)
    assert all(text.startswith("error: ") for text in texts)
    assert tuple(dialogue) == conversation.messages


def test_rounds_have_an_end(stage: Stage, toolbox: Toolbox) -> None:
    """A model that only calls is asked eight times; every call has its result."""
    dialogue = [user("go"), *[said("", "", SUM), result("calculator", "391")] * MOST_ROUNDS]
    teach(stage, toolbox, dialogue)
    conversation = Conversation(stage.engine.submit, toolbox, FORM)

    events = list(conversation.turn("go"))

    assert (RoundsSpent(8), ["391"] * 8) == (events[-1], results(events))
    assert tuple(dialogue) == conversation.messages


def test_without_tools_none_are_declared(stage: Stage) -> None:
    """The tier is the one that was set last, and a new conversation begins with nothing."""
    low = replace(FORM, tier="low")
    stage.teach(replace(low, messages=(user("hello"),)), said("", "Hi."))
    conversation = Conversation(stage.engine.submit, Toolbox(), FORM)
    conversation.set_tier("low")

    for _ in range(2):
        list(conversation.turn("hello"))
        assert (user("hello"), said("", "Hi.")) == conversation.messages
        conversation.restart()

    assert () == conversation.messages


def test_a_cancelled_reply_keeps_what_was_said(stage: Stage, toolbox: Toolbox) -> None:
    """The words so far stay in the history and can be followed by the next turn."""
    stage.teach(asked(toolbox, user("count")), said("", "one two three " * 50))
    stage.network.seconds = 0.001
    conversation = Conversation(stage.engine.submit, toolbox, FORM)

    text = ""
    for event in conversation.turn("count"):
        if isinstance(event, TextDelta):
            text += event.text
            conversation.cancel()

    assert (user("count"), said("", text)) == conversation.messages
    assert 0 < len(text) < len("one two three " * 50)
    stage.teach(asked(toolbox, *conversation.messages, user("go on")), said("", "four"))
    list(conversation.turn("go on"))
    assert "four" == conversation.messages[-1].text


def test_a_turn_cancelled_between_replies_is_forgotten(stage: Stage, toolbox: Toolbox) -> None:
    """While a tool runs: no other request, and the history is as before."""
    teach(stage, toolbox, [user("go"), said("", "", SUM)])
    submitted: list[Request] = []

    def submit(request: Request) -> Stream:
        submitted.append(request)
        return stage.engine.submit(request)

    conversation = Conversation(submit, toolbox, FORM)
    for event in conversation.turn("go"):
        if isinstance(event, ToolResult):
            conversation.cancel()

    assert (1, ()) == (len(submitted), conversation.messages)


def test_a_turn_cancelled_before_its_tools_run_runs_none(stage: Stage, toolbox: Toolbox) -> None:
    """Nothing is called any more, and the reader hears that the turn is forgotten."""
    teach(stage, toolbox, [user("go"), said("", "", SUM)])
    conversation = Conversation(stage.engine.submit, toolbox, FORM)
    seen: list[TurnEvent] = []
    for event in conversation.turn("go"):
        seen.append(event)
        if isinstance(event, Finished):
            conversation.cancel()

    assert Forgotten() == seen[-1]
    assert not any(isinstance(event, ToolResult) for event in seen)
    assert () == conversation.messages


def test_a_reply_cut_by_its_length_runs_no_calls(stage: Stage, toolbox: Toolbox) -> None:
    """One whole call and a second that broke off: neither is run nor kept."""
    form = replace(FORM, sampling=Sampling(0.0, max_tokens=30))
    call = said("", "Look", SUM, SUM)
    request = replace(asked(toolbox, user("go")), sampling=form.sampling)
    ids = stage.teach(request, call)
    cut = replace(form, sampling=Sampling(0.0, max_tokens=len(ids) - 4))
    conversation = Conversation(stage.engine.submit, toolbox, cut)

    events = list(conversation.turn("go"))

    assert any(isinstance(event, ToolCallFinished) for event in events)
    assert [] == results(events)
    assert (user("go"), said("", "Look")) == conversation.messages


def test_a_failure_leaves_the_conversation_as_it_was(stage: Stage, toolbox: Toolbox) -> None:
    """Too long a prompt raises; a shorter one then works."""
    teach(stage, toolbox, [user("hello"), said("", "Hi.")])
    conversation = Conversation(stage.engine.submit, toolbox, FORM)

    with pytest.raises(PromptError, match="the context holds 4096"):
        list(conversation.turn("word " * 9000))

    kept = conversation.messages
    assert () == kept
    list(conversation.turn("hello"))
    assert "Hi." == conversation.messages[-1].text


def test_a_turn_nobody_reads_on_is_cancelled(stage: Stage, toolbox: Toolbox) -> None:
    """A reader that leaves in the middle: the stream is told, the history is as before."""
    stage.teach(asked(toolbox, user("count")), said("", "one two three " * 50))
    streams: list[Stream] = []

    def submit(request: Request) -> Stream:
        streams.append(stage.engine.submit(request))
        return streams[-1]

    conversation = Conversation(submit, toolbox, FORM)
    turn = conversation.turn("count")
    next(turn)
    turn.close()  # type: ignore[attr-defined]

    assert ([True], ()) == ([stream.cancelled for stream in streams], conversation.messages)
