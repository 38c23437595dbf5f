"""One turn of a made-up dialogue: what is asked, and what a good demo model does about it.

Every answer follows from what stands before it, so that a network can learn all of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from mlxmoe.transcript import Message, Text, ToolCall, user
from train_demo.wordings import HELD, SEEN, dress, spin
from train_demo.words import Lexicon
from train_demo.world import World

Effort = Literal["low", "high", "max", "off"]
ARGUMENT = {
    "calculator": "expression",
    "list_files": "folder",
    "read_file": "path",
    "find_word": "word",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One message of the assistant: reasoning, then an answer or calls of (tool, argument)."""

    reasoning: str
    answer: str = ""
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and the steps that answer it; the last step has no calls."""

    kind: str
    text: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> str:
        """The final answer."""
        return self.steps[-1].answer

    def messages(self, world: World) -> list[Message]:
        """The turn as messages, tool results from `world`."""
        found = [user(self.text)]
        for step in self.steps:
            calls = tuple(ToolCall(tool, {ARGUMENT[tool]: given}) for tool, given in step.calls)
            content = (Text(step.answer),) if step.answer else ()
            found.append(Message("assistant", content, step.reasoning, calls))
            for tool, given in step.calls:
                result = world.call(tool, {ARGUMENT[tool]: given})
                found.append(Message("tool", (Text(result),), name=tool))
        return found


@dataclass(slots=True)
class Scene:
    """What a turn is made in: effort, tools or none, the folder, and what was found so far."""

    lexicon: Lexicon
    world: World
    effort: Effort
    tools: bool
    result: str | None = None
    seen: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def random(self) -> Random:
        """The one source of chance."""
        return self.lexicon.random

    def ask(self, kind: str, **slots: str) -> str:
        """A wording of `kind`, filled in and dressed."""
        return fill(dress(self.random, self.wording(kind)), slots)

    def plain(self, kind: str, **slots: str) -> str:
        """A wording of `kind`, filled in."""
        return fill(self.wording(kind), slots)

    def wording(self, kind: str) -> str:
        """A wording of `kind`, its slots still open."""
        wordings = (HELD if self.lexicon.fresh else SEEN)[kind]
        return spin(self.random, self.random.choice(wordings))

    def think(self, high: str, most: str) -> str:
        """The reasoning of this effort: none for low."""
        return {"high": high, "max": most}.get(self.effort, "")


def fill(text: str, slots: Mapping[str, str]) -> str:
    """Put the values in their places. It comes last, so that no name is given a capital."""
    for name, value in slots.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def listing(names: list[str]) -> str:
    """`a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def tool_turn(
    scene: Scene, kind: str, text: str, before: str, call: tuple[str, str], last: Step
) -> Turn:
    """A turn of one call and an answer."""
    return Turn(kind, text, (Step(before, calls=(call,)), last))


def plain_turn(kind: str, text: str, reasoning: str, answer: str) -> Turn:
    """A turn without calls."""
    return Turn(kind, text, (Step(reasoning, answer),))


def result_of(world: World, tool: str, given: str) -> str:
    """What a tool will say."""
    arguments: Mapping[str, str] = {ARGUMENT[tool]: given}
    return world.call(tool, arguments)
