"""A chat in the terminal, a line a turn. When stdin is no terminal, its lines are the turns.

The first interrupt stops an answer and keeps the chat; at the prompt it ends the chat, as
the end of the input does.
"""

import signal
import sys
from contextlib import suppress
from typing import TextIO

from mlxmoe.agent.loop import Conversation, Forgotten, RoundsSpent, ToolResult
from mlxmoe.agent.toolbox import Toolbox
from mlxmoe.answer import check_request
from mlxmoe.console import Screen
from mlxmoe.engine import Engine
from mlxmoe.errors import MlxmoeError, PromptError, UsageError
from mlxmoe.events import Finished, Request
from mlxmoe.report import turn_line
from mlxmoe.transcript import TIERS
from mlxmoe.verbs import INTERRUPTED, cancelling, check_tier, quit_at_once

with suppress(ImportError):
    # Where Python has it, `input` gets the keys that edit a line.
    import readline  # noqa: F401

PROMPT = "> "
RESULT_LINES = 12
HELP = (
    "/tier low|high|max   how much to think from now on",
    "/new                 forget the conversation",
    "/help                this",
    "/quit                end, like Ctrl-D; Ctrl-C stops an answer",
)


class Dialogue:
    """Lines in, turns out. `thinks` says whether a tier means anything."""

    def __init__(self, conversation: Conversation, screen: Screen, lines: TextIO, thinks: bool):
        self._conversation, self._screen = conversation, screen
        self._lines, self._thinks = lines, thinks
        self._typed = lines.isatty()

    def run(self) -> int:
        """Until the input ends or something ends it; the exit code.

        On a terminal an error is shown and the chat goes on. Raises MlxmoeError elsewhere.
        """
        while True:
            try:
                line = self._read()
                if line is None or line == "/quit":
                    return 0
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    self._turn(line)
            except KeyboardInterrupt:
                self._screen.note("\nmlxmoe: interrupted")
                return INTERRUPTED
            except MlxmoeError as error:
                if not self._typed:
                    raise
                self._screen.note(f"mlxmoe: {' '.join(str(error).splitlines())}")
            if self._conversation.cancelled and not self._typed:
                return INTERRUPTED

    def _read(self) -> str | None:
        """The next line, None at the end. Raises KeyboardInterrupt, PromptError."""
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            line = input(PROMPT) if self._typed else self._lines.readline()
        except EOFError:
            self._screen.say("")
            return None
        except UnicodeDecodeError as error:
            raise PromptError(f"the line is not UTF-8 text ({error.reason})") from error
        finally:
            signal.signal(signal.SIGINT, quit_at_once)
        if not self._typed and not line:
            return None
        line = line.strip()
        if not self._typed and line:
            self._screen.say(f"{PROMPT}{line}")
        return line

    def _turn(self, text: str) -> None:
        """One question, its answer, and a line of figures."""
        signal.signal(signal.SIGINT, cancelling(self._conversation))
        effort = self._conversation.tier if self._thinks else "no thinking"
        rounds: list[Finished] = []
        try:
            for event in self._conversation.turn(text):
                match event:
                    case Finished():
                        rounds.append(event)
                    case ToolResult(_, result):
                        self._screen.aside(_result_lines(result))
                    case RoundsSpent(number):
                        self._screen.note(f"stopped: {number} rounds of tool calls, no answer")
                    case Forgotten():
                        self._screen.note("stopped: this turn is forgotten")
                    case _:
                        self._screen.show(event)
        finally:
            self._screen.end()
            signal.signal(signal.SIGINT, quit_at_once)
        if rounds:
            self._screen.note(turn_line(effort, rounds))

    def _command(self, line: str) -> None:
        """Do what a line with a slash says. Raises UsageError when it says nothing known."""
        word, _, rest = line.partition(" ")
        match word, rest.strip():
            case "/tier", "":
                tiers = ", ".join(TIERS)
                self._screen.note(f"the tier is {self._conversation.tier}, of {tiers}")
            case "/tier", tier:
                self._conversation.set_tier(check_tier(tier))
                self._screen.note(f"the tier is {tier}")
            case "/new", _:
                self._conversation.restart()
                self._screen.note("a new conversation")
            case "/help", _:
                for about in HELP:
                    self._screen.note(about)
            case _:
                raise UsageError(f"no command {word}. /help lists those there are")


def _result_lines(result: str) -> str:
    """A tool's result to look at: its first lines, with an arrow at the first."""
    lines = result.splitlines()
    if (more := len(lines) - RESULT_LINES) > 0:
        lines = [*lines[:RESULT_LINES], f"… {more} more lines"]
    return "← " + "\n  ".join(lines)


def run_chat(engine: Engine, toolbox: Toolbox, form: Request, title: str) -> int:
    """Load, talk; the exit code. Raises UsageError before the load, and see `Dialogue.run`."""
    check_request(form)
    screen = Screen(sys.stdout, sys.stderr)
    conversation = Conversation(engine.submit, toolbox, form)
    signal.signal(signal.SIGINT, quit_at_once)
    try:
        engine.start(screen.waiting.show)
        screen.waiting.end()
        if sys.stdin.isatty():
            screen.note(f"{title}. /help lists the commands.")
        return Dialogue(conversation, screen, sys.stdin, form.thinking).run()
    finally:
        conversation.cancel()
        engine.close()
        screen.end()
