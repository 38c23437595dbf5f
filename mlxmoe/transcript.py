"""What was said, as values: messages, their parts, and tool calls.

Knows nothing of wires, templates or tokens. `server` and `cli` make these values,
`chat` renders them, and the parser's result goes back into them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Tier = Literal["low", "high", "max"]
TIERS: tuple[Tier, ...] = ("low", "high", "max")


@dataclass(frozen=True, slots=True)
class Text:
    """A run of plain text. It never becomes structure, whatever it holds."""

    text: str


@dataclass(frozen=True, slots=True)
class Image:
    """A picture in a message, by its original size in pixels."""

    width: int
    height: int
    data: bytes = b""


Part = Text | Image


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool the assistant asks for.

    `arguments` is a mapping when it is known to be an object, else the raw text
    that was given (kept as it is, so that broken JSON survives a round trip).
    """

    name: str
    arguments: Mapping[str, Any] | str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `reasoning` and `tool_calls` belong to assistant messages,
    `tool_call_id` and `name` to tool results, `tools` to system messages that
    declare more tools midway."""

    role: Role
    content: tuple[Part, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def text(self) -> str:
        """The text parts, joined."""
        return "".join(part.text for part in self.content if isinstance(part, Text))


def user(text: str) -> Message:
    """A user message of plain text."""
    return Message("user", (Text(text),))


def system(text: str) -> Message:
    """A system message of plain text."""
    return Message("system", (Text(text),))
