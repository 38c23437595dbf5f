"""What `run`, `chat` and `score` show in a terminal: waiting, thinking, answering, figures.

The answer goes to stdout. Everything about it goes to stderr; so does the reasoning,
unless stdout is a terminal. Model text is shown with its control characters taken out.
"""

import time
from collections.abc import Iterable, Iterator
from typing import TextIO

from mlxmoe.events import (
    Event,
    Finished,
    Progress,
    ReasoningDelta,
    TextDelta,
    ThinkingCapped,
    ToolCallDropped,
    ToolCallFinished,
)
from mlxmoe.report import call_line, stats_line

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
CLEAR_LINE = "\r\x1b[K"
# Control characters but newline and tab: a model must not drive the terminal.
_UNSAFE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_REDRAWS = 0.1


def printable(text: str) -> str:
    """`text` without control characters (newline and tab stay)."""
    return text.translate(_UNSAFE)


class Waiting:
    """Progress of long waits: one redrawn line on a terminal, else a line now and then."""

    def __init__(self, out: TextIO):
        self._out, self._tty = out, out.isatty()
        self._stage, self._last, self._drawn = "", 0.0, False

    def show(self, progress: Progress) -> None:
        """One more figure."""
        now = time.monotonic()
        if progress.stage != self._stage:
            self._stage, self._last = progress.stage, now if not self._tty else 0.0
        rest = SECONDS_BETWEEN_REDRAWS if self._tty else SECONDS_BETWEEN_LINES
        if now - self._last < rest:
            return
        self._last = now
        line = f"{progress.stage} {_amount(progress)}"
        if self._tty:
            self._out.write(f"{CLEAR_LINE}{DIM}{_bar(progress)} {line}{PLAIN}")
            self._drawn = True
        else:
            self._out.write(line + "\n")
        self._out.flush()

    def end(self) -> None:
        """Take the line away before other text comes."""
        if self._drawn:
            self._out.write(CLEAR_LINE)
            self._out.flush()
            self._drawn = False


def _bar(progress: Progress, width: int = 20) -> str:
    filled = width * progress.done // max(progress.total, 1)
    return "█" * filled + "░" * (width - filled)


def _amount(progress: Progress) -> str:
    """`12.3 of 111.1 GB, 3.1 GB/s, 32 s left`."""
    eta = "" if progress.eta is None else f", {progress.eta:.0f} s left"
    if progress.unit == "bytes":
        done, total, rate = (x / 1e9 for x in (progress.done, progress.total, progress.rate))
        return f"{done:.2f} of {total:.2f} GB, {rate:.2f} GB/s{eta}"
    return f"{progress.done} of {progress.total} tokens, {progress.rate:.1f} tokens/s{eta}"


class Screen:
    """Prints the events of one answer."""

    def __init__(self, out: TextIO, notes: TextIO):
        self._out, self._notes = out, notes
        self._thoughts = out if out.isatty() else notes
        self.waiting = Waiting(notes)
        self._column: TextIO | None = None
        self._dimmed = False

    def show(self, event: Event) -> None:
        """Print one event."""
        if not isinstance(event, Progress):
            self.waiting.end()
        match event:
            case Progress():
                self.waiting.show(event)
            case ReasoningDelta(text):
                self._write(self._thoughts, text, dim=True)
            case TextDelta(text):
                self._write(self._out, text)
            case ToolCallFinished(_, call):
                self._line(self._out, call_line(call))
            case ToolCallDropped(_, why):
                self._line(self._notes, f"a tool call was dropped: {why}")
            case ThinkingCapped(tokens, _):
                self._line(self._notes, f"thinking was closed after {tokens} tokens")
            case Finished():
                self.note(stats_line(event))
            case _:
                pass

    def say(self, text: str) -> None:
        """A line of its own among the answers."""
        self._line(self._out, text)

    def note(self, text: str) -> None:
        """A dim line of its own about the answers."""
        self._line(self._notes, text, dim=True)

    def aside(self, text: str) -> None:
        """Dim lines of their own beside the reasoning."""
        self._line(self._thoughts, text, dim=True)

    def show_waiting(self, events: Iterable[Event]) -> Iterator[Event]:
        """Show only how waits go; everything passes by."""
        for event in events:
            if isinstance(event, Progress):
                self.waiting.show(event)
            yield event

    def show_all(self, events: Iterable[Event]) -> Iterator[Event]:
        """Print events as they pass by."""
        for event in events:
            self.show(event)
            yield event

    def end(self) -> None:
        """Nothing more comes: leave both streams at the beginning of a line."""
        self.waiting.end()
        self._end_line()

    def _write(self, out: TextIO, text: str, dim: bool = False) -> None:
        """Text that goes on where the last ended; another stream begins on a new line."""
        if (self._column, self._dimmed) != (out, dim):
            self._end_line()
        self._column, self._dimmed = out, dim
        text = printable(text)
        out.write(f"{DIM}{text}{PLAIN}" if dim and out.isatty() else text)
        out.flush()

    def _line(self, out: TextIO, text: str, dim: bool = False) -> None:
        """A line of its own."""
        self._end_line()
        text = printable(text)
        out.write((f"{DIM}{text}{PLAIN}" if dim and out.isatty() else text) + "\n")
        out.flush()

    def _end_line(self) -> None:
        if self._column is not None:
            self._column.write("\n")
            self._column.flush()
            self._column = None
