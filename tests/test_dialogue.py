"""The chat in a terminal: what is shown where, its commands, its ends."""

import io
import os
import pty
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlxmoe.agent.loop import Conversation
from mlxmoe.agent.toolbox import Toolbox, own_tools
from mlxmoe.checkpoint import open_checkpoint
from mlxmoe.console import DIM, PLAIN, Screen
from mlxmoe.dialogue import HELP, Dialogue
from mlxmoe.errors import PromptError, UsageError
from mlxmoe.events import Request, Sampling
from mlxmoe.transcript import Message, Text, ToolCall, user
from processes import COMMAND, ROOT, mlxmoe, read_until
from scripted import Stage

FORM = Request((), sampling=Sampling(0.0))
SLOTS = ["--slots", "28"]


class Terminal(io.StringIO):
    """Text that says it is a terminal."""

    def isatty(self) -> bool:
        """It is."""
        return True


@pytest.fixture
def stage(goldens: Path) -> Iterator[Stage]:
    """A scripted network under the chat of tiny-k31."""
    handler = signal.getsignal(signal.SIGINT)
    made = Stage(open_checkpoint(goldens / "tiny-k31"))
    yield made
    made.engine.close()
    signal.signal(signal.SIGINT, handler)


def said(reasoning: str, content: str, *calls: ToolCall) -> Message:
    """An assistant's message."""
    return Message("assistant", (Text(content),) if content else (), reasoning, calls)


def play(
    stage: Stage, lines: str, toolbox: Toolbox, out: io.StringIO, form: Request = FORM
) -> tuple[int, str, str]:
    """The exit code, and what a script of these lines writes to each stream."""
    notes = type(out)()
    conversation = Conversation(stage.engine.submit, toolbox, form)
    code = Dialogue(conversation, Screen(out, notes), io.StringIO(lines), form.thinking).run()
    return code, out.getvalue(), notes.getvalue()


@pytest.fixture
def toolbox(stage: Stage, tmp_path: Path) -> Toolbox:
    """The four tools over a folder with a long file; the network knows one question on it."""
    (tmp_path / "notes.txt").write_text("".join(f"line {number}\n" for number in range(20)))
    box = own_tools(tmp_path)
    read = ToolCall("read_file", {"path": "notes.txt"})
    text = box.answer(read)
    ask = replace(FORM, messages=(user("read it"),), tools=box.declarations)
    result = Message("tool", (Text(text),), name="read_file")
    called = said("let me look", "", read)
    stage.teach(ask, called)
    stage.teach(replace(ask, messages=(*ask.messages, called, result)), said("so", "Lines."))
    return box


def test_a_turn_with_a_tool(stage: Stage, toolbox: Toolbox) -> None:
    """Piped: prompt, call and answer on stdout; reasoning, result and figures on stderr."""
    code, out, notes = play(stage, "read it\n", toolbox, io.StringIO())

    *thoughts, figures = notes.splitlines()
    assert (0, '> read it\n→ read_file({"path": "notes.txt"})\nLines.\n') == (code, out)
    shown = [f"  line {number}" for number in range(1, 12)]
    assert ["let me look", "← line 0", *shown, "  … 8 more lines", "so"] == thoughts
    assert figures.startswith("[max] ")
    assert ", 2 rounds, " in figures
    assert " thinking tokens of " in figures


def test_a_turn_on_a_terminal(stage: Stage, toolbox: Toolbox) -> None:
    """Reasoning and result among the answer, dimmed; the figures dimmed too."""
    _, out, notes = play(stage, "read it\n", toolbox, Terminal())

    assert f"{DIM}← line 0\n  line 1\n" in out
    assert out.replace(f"{PLAIN}{DIM}", "").endswith(f"{DIM}so{PLAIN}\nLines.\n")
    assert f"{DIM}[max] " in notes


def test_commands(stage: Stage) -> None:
    """The tier is shown, set and used; a new conversation has no past; help; quit is the end."""
    low = replace(FORM, tier="low", messages=(user("hello"),))
    stage.teach(low, said("", "Hi."))
    lines = "/tier\n/tier low\n\nhello\n/new\n  hello  \n/help\n/quit\nhello\n"

    code, out, notes = play(stage, lines, Toolbox(), io.StringIO())

    words = [line for line in notes.splitlines() if not line.startswith("[low] ")]
    tiers = ["the tier is max, of low, high, max", "the tier is low"]
    assert [*tiers, "a new conversation", *HELP] == words
    echoes = [line for line in out.splitlines() if line.startswith("> ")]
    assert (0, 7, 2) == (code, len(echoes), out.count("\nHi.\n"))
    assert 2 == notes.count("[low] ")


def test_no_thinking_has_no_tier(stage: Stage) -> None:
    """The figures say so."""
    form = replace(FORM, thinking=False)
    stage.teach(replace(form, messages=(user("hello"),)), said("", "Hi."))

    _, _, notes = play(stage, "hello\n", Toolbox(), io.StringIO(), form)

    assert notes.startswith("[no thinking] 0 thinking tokens of ")


@pytest.mark.parametrize(
    ("lines", "kind", "words"),
    [
        ("/fly\n", UsageError, "no command /fly"),
        ("/tier medium\n", UsageError, "unknown tier 'medium', expected low, high, max"),
        ("word " * 9000 + "\n", PromptError, "the context holds 4096"),
    ],
)
def test_an_error_ends_a_script(
    stage: Stage, lines: str, kind: type[Exception], words: str
) -> None:
    """What comes after it is not played."""
    with pytest.raises(kind, match=words):
        play(stage, f"{lines}/help\n", Toolbox(), io.StringIO())


def test_an_answer_cut_short_says_why(stage: Stage) -> None:
    """The reason stands beside the tier."""
    form = replace(FORM, sampling=Sampling(0.0, max_tokens=3))
    stage.teach(replace(form, messages=(user("hello"),)), said("let me think of it", "Hi."))

    _, _, notes = play(stage, "hello\n", Toolbox(), io.StringIO(), form)

    assert "[max, length] 3 thinking tokens of 3 at " in notes


def test_a_script_as_a_process(goldens: Path, tmp_path: Path) -> None:
    """Lines on stdin, exit 0 at their end; misuse is refused before the model is loaded."""
    model = str(goldens / "tiny-k31")
    limits = ["--max-tokens", "4", "--temperature", "0", "--folder", str(tmp_path)]

    done = mlxmoe("chat", model, *SLOTS, *limits, text="hello\n/tier low\nhello")
    nowhere = mlxmoe("chat", model, "--folder", tmp_path / "none", text="hello\n")
    odd = mlxmoe("chat", model, *SLOTS, "--top-k", "3", text="")
    broken = mlxmoe("chat", model, *SLOTS, text="/fly\n")

    assert (0, 3) == (done.returncode, done.stdout.count("> "))
    assert ["[max, length] 4 ", "[low, length] 4 "] == [
        line[: len("[max, length] 4 ")] for line in done.stderr.splitlines() if line[0] == "["
    ]
    assert (2, 2, 2) == (nowhere.returncode, odd.returncode, broken.returncode)
    assert f"mlxmoe: --folder {tmp_path / 'none'}: is no folder" in nowhere.stderr
    assert "mlxmoe: no command /fly. /help lists those there are\n" == broken.stderr


@pytest.fixture
def typed(goldens: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A chat whose streams are all one terminal, and the terminal's other end."""
    master, slave = pty.openpty()
    model = [str(goldens / "tiny-k31"), *SLOTS, "--temperature", "0", "--no-tools"]
    with subprocess.Popen(
        [*COMMAND, "chat", *model], cwd=ROOT, stdin=slave, stdout=slave, stderr=slave
    ) as process:
        os.close(slave)
        try:
            read_until(master, b"> ")
            yield process, master
        finally:
            process.kill()
            os.close(master)


def test_an_interrupt_stops_the_answer_and_keeps_the_chat(
    typed: tuple[subprocess.Popen[bytes], int],
) -> None:
    """The prompt comes back; there a second one ends with 130."""
    process, master = typed
    os.write(master, b"hello\r")
    read_until(master, b"\x1b[2m")
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    read_until(master, b"[max, cancelled] ")
    os.write(master, b"/tier low\r")
    read_until(master, b"the tier is low")
    process.send_signal(signal.SIGINT)
    read_until(master, b"mlxmoe: interrupted")

    assert 130 == process.wait(10)


def test_mistakes_and_the_end_at_a_terminal(
    typed: tuple[subprocess.Popen[bytes], int],
) -> None:
    """A mistake is told and the prompt comes back; Ctrl-D ends with 0."""
    process, master = typed
    os.write(master, b"/fly\r")
    read_until(master, b"mlxmoe: no command /fly")
    time.sleep(1.0)  # until the prompt is there: the key is one only then
    os.write(master, b"\x04")

    assert 0 == process.wait(10)
