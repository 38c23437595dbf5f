"""The streaming parser: every golden at every split, by text and by ids."""

import itertools
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxmoe.chat.arguments import argument_value
from mlxmoe.chat.parser import XtmlParser
from mlxmoe.chat.tokenizer import KimiTokenizer
from mlxmoe.events import (
    Event,
    Finished,
    ReasoningDelta,
    Stats,
    TextDelta,
    ToolArgumentDelta,
    ToolCallDropped,
    ToolCallFinished,
    ToolCallStarted,
    Usage,
    collect,
)
from mlxmoe.transcript import ToolCall

GOLDENS = Path(__file__).parent / "goldens"
CASES = json.loads((GOLDENS / "parse" / "cases.json").read_text())["cases"]
TOKENIZER = KimiTokenizer(GOLDENS / "tokenizer")
CALL = '<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
ARGUMENT = '<|open|>argument key="a" type="string"<|sep|>'
ENDED = "<|close|>argument<|sep|><|close|>call<|sep|>"

each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])


def parsed(chunks: Iterable[str] | Iterable[Sequence[int]], case: dict[str, Any]) -> list[Event]:
    """All events of the case fed in these chunks, up to Finished."""
    parser = XtmlParser(TOKENIZER, "think" if case["mode"] == "thinking" else "response")
    events: list[Event] = []
    for chunk in chunks:
        events += parser.feed_text(chunk) if isinstance(chunk, str) else parser.feed(chunk)
    cut = case["stop"] == "length"
    events += parser.finish(cut)
    assert parser.channel == "done"
    return [*events, Finished(parser.finish_reason(cut), Usage(), Stats())]


def answer(events: list[Event]) -> dict[str, Any]:
    """Added-up events in the goldens' form."""
    reply = collect(events)
    return {
        "reasoning": reply.reasoning,
        "content": reply.content,
        "tool_calls": [written(c.name, c.arguments) for c in reply.tool_calls],
        "finish_reason": reply.finish_reason,
    }


def accepted(case: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers that the golden allows."""
    answers = [case["expected"], *case.get("accept", [])]
    if case["id"] == "json-block-invalid":
        # Its note allows the raw text as the arguments, and we want it: it renders back.
        raw = {"name": "f", "arguments": '{"city": "Rome", bad'}
        answers = [{**answers[0], "tool_calls": [raw], "finish_reason": "tool_calls"}]
    return [
        {
            "reasoning": answer["reasoning"] or "",
            "content": answer["content"] or "",
            "tool_calls": [written(c["name"], c["arguments"]) for c in answer["tool_calls"]],
            "finish_reason": answer["finish_reason"],
        }
        for answer in answers
    ]


def written(name: str, arguments: Any) -> tuple[str, str]:
    """A call as text, so that 1, 1.0 and true differ."""
    return name, json.dumps(arguments)


@each_case
def test_whole_text_and_given_chunks(case: dict[str, Any]) -> None:
    """The whole text, its random chunks and its ids in random chunks."""
    for chunks in ([case["output"]], case["text_chunks"], case["id_chunks"]):
        assert answer(parsed(chunks, case)) in accepted(case)


@each_case
def test_one_at_a_time(case: dict[str, Any]) -> None:
    """One character, and one token, at a time."""
    ids = [[i] for i in itertools.chain(*case["id_chunks"])]
    for chunks in (case["output"], ids):
        assert answer(parsed(chunks, case)) in accepted(case)


@each_case
def test_every_split(case: dict[str, Any]) -> None:
    """The text and the ids cut in two at every place."""
    expected = accepted(case)
    text, ids = case["output"], list(itertools.chain(*case["id_chunks"]))
    for at in range(len(text) + 1):
        assert answer(parsed([text[:at], text[at:]], case)) in expected, text[:at]
    for at in range(len(ids) + 1):
        assert answer(parsed([ids[:at], ids[at:]], case)) in expected, ids[:at]


@each_case
def test_deltas_add_up_to_the_calls(case: dict[str, Any]) -> None:
    """Argument deltas alone give each finished call its values: an empty delta begins
    a value anew, and a call without a block has no delta of key ""."""
    values: dict[int, dict[str, tuple[str, str]]] = {}
    finished: dict[int, ToolCall] = {}
    for event in parsed(case["output"], case):
        match event:
            case ToolCallStarted(index, _):
                values[index] = {}
            case ToolArgumentDelta(index, key, kind, ""):
                values[index][key] = (kind, "")
            case ToolArgumentDelta(index, key, kind, text):
                values[index][key] = (kind, values[index][key][1] + text)
            case ToolCallFinished(index, call):
                finished[index] = call

    assert {i: c.arguments for i, c in finished.items()} == {i: read(values[i]) for i in finished}


def read(values: dict[str, tuple[str, str]]) -> Any:
    """Typed values of one call's texts."""
    typed: dict[str, Any] = {}
    for key, (kind, text) in values.items():
        try:
            typed[key] = text if kind == "string" else json.loads(text)
        except ValueError:
            typed[key] = text
    return typed.get("", typed)


def feed(*chunks: str) -> list[Event]:
    """Events of text chunks after think was opened, without an end."""
    parser = XtmlParser(TOKENIZER, "think")
    return [event for chunk in chunks for event in parser.feed_text(chunk)]


def test_events_come_as_soon_as_they_can() -> None:
    """Nothing is kept back but what may become a marker."""
    parser = XtmlParser(TOKENIZER, "think")
    seen = [(parser.channel, parser.holding)]
    steps = [
        "ab <|clo",
        "x<|close|>thi",
        "nk<|sep|>",
        "Hi <|",
        "y",
        CALL[21:],
        ARGUMENT + "v<",
        "w",
    ]
    events = []
    for step in steps:
        events.append(parser.feed_text(step))
        seen.append((parser.channel, parser.holding))

    assert events == [
        [ReasoningDelta("ab ")],
        [ReasoningDelta("<|clox")],
        [],
        [TextDelta("Hi ")],
        [TextDelta("<|y")],
        [ToolCallStarted(0, "f")],
        [ToolArgumentDelta(0, "a", "string", ""), ToolArgumentDelta(0, "a", "string", "v")],
        [ToolArgumentDelta(0, "a", "string", "<w")],
    ]
    assert seen == [
        ("think", False),
        ("think", True),
        ("think", True),
        ("response", False),
        ("response", True),
        ("response", False),
        ("tools", False),
        ("tools", True),
        ("tools", False),
    ]


def test_a_character_in_several_tokens_is_held() -> None:
    """No half characters come out, and `holding` says that one is on its way."""
    parser = XtmlParser(TOKENIZER, "think")
    assert [(parser.feed([i]), parser.holding) for i in (320, 626)] == [
        ([], True),
        ([ReasoningDelta("😀")], False),
    ]


def test_half_a_character_at_the_end_is_a_replacement() -> None:
    """An answer cut inside a character ends in U+FFFD, as decode does it."""
    parser = XtmlParser(TOKENIZER, "think")
    assert [*parser.feed([320]), *parser.finish(cut=True)] == [ReasoningDelta("\ufffd")]


def test_end_token_ends_a_value() -> None:
    """`<|end_of_msg|>` as a token ends the answer anywhere; as text in a value it
    is part of the value."""
    parser = XtmlParser(TOKENIZER, "think")
    parser.feed_text(CALL + ARGUMENT + "half <|end_of_msg|>")
    channels = [parser.channel]
    events = parser.feed([TOKENIZER.special_id("<|end_of_msg|>"), 64])

    assert events == [ToolCallDropped(0, "it has no closing marker")]
    assert [*channels, parser.channel] == ["tools", "done"]
    assert parser.finish_reason(cut=False) == "stop"


def test_dropped_calls_say_why() -> None:
    """Nameless, keyless, unclosed and cut calls, and blocks that are no object."""
    opened = '<|open|>call tool="f"<|sep|>'
    block = "<|open|>json<|sep|>[1]<|close|>json<|sep|>"
    events = feed(
        CALL.replace('tool="f"', "") + "<|close|>call<|sep|>",
        opened + '<|open|>argument type="string"<|sep|>v' + ENDED,
        opened + opened + block + "<|close|>call<|sep|>",
        opened + "<|close|>tools<|sep|>",
    )
    parser = XtmlParser(TOKENIZER, "think")
    parser.feed_text(CALL)

    assert [event for event in events if isinstance(event, ToolCallDropped)] == [
        ToolCallDropped(0, "it names no tool"),
        ToolCallDropped(1, "an argument has no key"),
        ToolCallDropped(2, "it has no closing marker"),
        ToolCallDropped(3, "arguments are a JSON array, expected an object"),
        ToolCallDropped(4, "it has no closing marker"),
    ]
    assert parser.finish(cut=True) == [ToolCallDropped(0, "the answer was cut off in it")]


def test_odd_values_stay_text() -> None:
    """Numbers too long and nesting too deep for JSON's reader are kept as text."""
    for text in ("9" * 5000, "[" * 100_000):
        value = ARGUMENT.replace("string", "number") + text
        (call,) = collect(
            [*feed(CALL + value + ENDED), Finished("stop", Usage(), Stats())]
        ).tool_calls
        assert call.arguments == {"a": text}


def test_opener_in_the_response_channel() -> None:
    """A model that thinks all the same, or repeats the opener, is understood."""
    for text, reasoning in (
        ("<|open|>think<|sep|>r<|close|>think<|sep|>c", "r"),
        ("<|open|>response<|sep|>c", ""),
        ("c", ""),
    ):
        case = {"mode": "response", "stop": "eos"}
        reply = collect(parsed(text, case))
        assert (reply.reasoning, reply.content) == (reasoning, "c")


HOSTILE = {
    "a long value": [CALL, ARGUMENT, *("<|open|> some <| text < " * 40_000)],
    "a long key": [CALL, '<|open|>argument key="', *("k <|sep|>" * 100_000)],
    "many calls at once": [
        CALL,
        (ARGUMENT + "v" + ENDED + '<|open|>call tool="f"<|sep|>') * 10_000,
    ],
    "many quotes at once": [CALL.partition("tool=")[0], '"' * 1_000_000],
    "many half markers at once": ["<|close|>thin" * 80_000],
    "many empty tags at once": ["<|close|>think<|sep|>" + "<|close|>response<|sep|>" * 40_000],
}


@pytest.mark.parametrize("chunks", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_megabyte_is_read_in_linear_time(chunks: list[str]) -> None:
    """A million characters, one by one or at once, take seconds at the very most."""
    start = time.perf_counter()
    feed(*chunks)
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("raw", ["NaN", "Infinity", "-Infinity", "1e999", "[1, NaN]"])
def test_numbers_that_json_has_not_stay_text(raw: str) -> None:
    """What Python would read as a number but JSON can't carry is kept as it was said."""
    assert raw == argument_value(raw, "number")
