"""What a person sees: streams, dimming, progress, and no control over the terminal."""

import io
import os
import pty
import re
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxmoe import console
from mlxmoe.console import CLEAR_LINE, DIM, PLAIN, Screen, Waiting
from mlxmoe.events import (
    Event,
    ExpertStats,
    Finished,
    Progress,
    ReasoningDelta,
    Stats,
    TextDelta,
    ThinkingCapped,
    ToolArgumentDelta,
    ToolCallDropped,
    ToolCallFinished,
    ToolCallStarted,
    Usage,
)
from mlxmoe.transcript import ToolCall

STATS = Stats(
    prefill_tokens=93,
    prefill_seconds=1.5,
    decode_tokens=20,
    decode_seconds=4.0,
    peak_memory_bytes=2_000_000_000,
    planned_memory_bytes=3_000_000_000,
    experts=ExpertStats(hits=75, misses=25, evictions=5, bytes_read=5_000_000_000),
)
END = Finished("stop", Usage(93, 0, 5, 20), STATS)
CALL = ToolCall("get_weather", {"city": "Zürich", "days": 3})
ANSWER: list[Event] = [
    Progress("prefill", 40, 93, "tokens", 1.0),
    ReasoningDelta("let me "),
    ReasoningDelta("think"),
    TextDelta("It is "),
    TextDelta("fine."),
    ToolCallStarted(0, "get_weather"),
    ToolArgumentDelta(0, "city", "string", "Zürich"),
    ToolCallFinished(0, CALL),
    END,
]
CONTROLS = [chr(code) for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"]


class Terminal(io.StringIO):
    """Text that says it is a terminal."""

    def isatty(self) -> bool:
        """It is."""
        return True


def shown(events: Iterable[Event], out: io.StringIO, notes: io.StringIO) -> tuple[str, str]:
    """What a screen writes to each stream."""
    screen = Screen(out, notes)
    assert list(events) == list(screen.show_all(events))
    screen.end()
    return out.getvalue(), notes.getvalue()


def test_piped_answers_are_plain() -> None:
    """stdout has the answer and its calls alone, stderr the rest, neither any codes."""
    out, notes = shown(ANSWER, io.StringIO(), io.StringIO())

    assert 'It is fine.\n→ get_weather({"city": "Zürich", "days": 3})\n' == out
    thoughts, stats, *rest = notes.splitlines()
    assert ("let me think", []) == (thoughts, rest)
    assert stats.startswith("[stop] 93 prompt tokens in 1.5 s, 20 tokens at 5.00/s, 75% of 100 ")


def test_on_a_terminal_reasoning_is_dimmed() -> None:
    """Both streams a terminal: the thinking on stdout, dimmed, before the answer."""
    out, notes = shown(ANSWER, Terminal(), Terminal())

    thoughts = f"{DIM}let me {PLAIN}{DIM}think{PLAIN}\n"
    call = '→ get_weather({"city": "Zürich", "days": 3})'
    assert f"{thoughts}It is fine.\n{call}\n" == out
    assert "let me think" not in notes
    assert CLEAR_LINE in notes
    assert notes.endswith(f"planned{PLAIN}\n")


def test_a_piped_answer_leaves_reasoning_on_the_terminal() -> None:
    """stdout into a file, stderr a terminal: the thinking is dimmed there."""
    out, notes = shown(ANSWER[1:], io.StringIO(), Terminal())

    assert out.startswith("It is fine.\n")
    assert notes.startswith(f"{DIM}let me {PLAIN}{DIM}think{PLAIN}\n")


def test_an_answer_that_breaks_off_ends_its_line() -> None:
    """Whatever comes next, an error or a shell's prompt, begins on a new line."""
    assert ("It is \n", "") == shown([TextDelta("It is ")], io.StringIO(), io.StringIO())


def test_caps_and_dropped_calls_are_said() -> None:
    """On stderr, each on a line of its own."""
    events: list[Event] = [
        ReasoningDelta("hm"),
        ThinkingCapped(8192, 8192),
        TextDelta("x"),
        ToolCallDropped(0, "it names no tool"),
    ]

    out, notes = shown(events, io.StringIO(), io.StringIO())

    assert "x\n" == out
    assert [
        "hm",
        "thinking was closed after 8192 tokens",
        "a tool call was dropped: it names no tool",
    ] == notes.splitlines()


texts = st.text(st.sampled_from([*CONTROLS, *"a[2J\n\té", "\u202e"]), max_size=20)


@given(texts, texts, texts, texts)
def test_model_text_never_drives_the_terminal(think: str, say: str, name: str, value: str) -> None:
    """Of control characters only newline and tab pass, wherever the text comes from."""
    events: list[Event] = [
        ReasoningDelta(think),
        TextDelta(say),
        ToolCallFinished(0, ToolCall(name, {value: value})),
        ToolCallFinished(1, ToolCall(name, value)),
        ToolCallDropped(2, value),
        TextDelta(value),
        END,
    ]
    ours = re.compile("|".join(map(re.escape, (CLEAR_LINE, DIM, PLAIN))))
    for stream in (io.StringIO, Terminal):
        for text in shown(events, stream(), stream()):
            left = ours.sub("", text) if stream is Terminal else text
            assert not set(CONTROLS) & set(left)


def test_other_text_stays_as_it_is() -> None:
    """Letters of all scripts, spaces, newlines and tabs."""
    text = "Grüße, 你好\n\t— 🜚  שלום"

    assert f"{text}\n" == shown([TextDelta(text)], io.StringIO(), io.StringIO())[0]


def test_progress_is_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then a whole line: amounts, rate and what is left; at first nothing."""
    out = io.StringIO()
    waiting = Waiting(out)
    waiting.show(Progress("load", 1, 10**10, "bytes", 0.1))
    assert "" == out.getvalue()
    monkeypatch.setattr(console, "SECONDS_BETWEEN_LINES", 0.0)

    waiting.show(Progress("load", 25 * 10**8, 10**10, "bytes", 5.0))
    waiting.show(Progress("prefill", 0, 400, "tokens", 0.0))
    waiting.show(Progress("prefill", 100, 400, "tokens", 2.0))
    waiting.end()

    assert [
        "load 2.50 of 10.00 GB, 0.50 GB/s, 15 s left",
        "prefill 0 of 400 tokens, 0.0 tokens/s",
        "prefill 100 of 400 tokens, 50.0 tokens/s, 6 s left",
    ] == out.getvalue().splitlines()


def test_progress_is_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redrawn in place, not too often, and gone at the end."""
    out = Terminal()
    waiting = Waiting(out)
    for done in range(0, 400, 100):
        waiting.show(Progress("prefill", done, 400, "tokens", 1.0))
    assert 1 == out.getvalue().count(CLEAR_LINE)
    monkeypatch.setattr(console, "SECONDS_BETWEEN_REDRAWS", 0.0)

    waiting.show(Progress("prefill", 200, 400, "tokens", 1.0))
    waiting.end()
    waiting.end()

    first, second, gone = out.getvalue().split(CLEAR_LINE)[1:]
    assert "\n" not in out.getvalue()
    assert "" == gone
    assert f"{DIM}{'░' * 20} prefill 0 of 400 tokens, 0.0 tokens/s{PLAIN}" == first
    assert f"{'█' * 10}{'░' * 10} prefill 200 of 400" in second


def test_json_shows_only_progress() -> None:
    """While the object is being made nothing of the answer is printed."""
    out, notes = io.StringIO(), Terminal()
    screen = Screen(out, notes)

    assert ANSWER == list(screen.show_waiting(ANSWER))
    screen.end()

    assert "" == out.getvalue()
    assert "prefill 40 of 93 tokens" in notes.getvalue()
    assert "fine" not in notes.getvalue()


def test_on_a_real_terminal() -> None:
    """Through a pty: dimmed thinking, the answer, and none of the model's codes."""
    master, slave = pty.openpty()
    events: list[Event] = [ReasoningDelta("hm\x1b[31m"), TextDelta("yes\x9b2J\x07\r\b!"), END]
    with os.fdopen(slave, "w", encoding="utf-8") as terminal:
        screen = Screen(terminal, terminal)
        for event in events:
            screen.show(event)
        screen.end()
        text = ""
        while "planned" not in text:
            text += os.read(master, 1 << 16).decode()
    os.close(master)

    lines = text.split("\r\n")
    assert [f"{DIM}hm[31m{PLAIN}", "yes2J!"] == lines[:2]
    assert lines[2].startswith(f"{DIM}[stop] 93 prompt tokens")
