"""What the engine knows of chat formats: a `Chat` renders and makes parsers.

Two makers: `kimi.KimiChat` and `foreign.ForeignChat`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mlxmoe.events import Event, FinishReason, Request

Channel = Literal["think", "response", "tools", "done"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as token ids.

    `ends` are positions in `ids` just after each message, ascending; `channel` is
    what the answer begins with; `tools` are those the parser may need to see.
    """

    ids: tuple[int, ...]
    ends: tuple[int, ...]
    channel: Literal["think", "response"]
    tools: tuple[Mapping[str, Any], ...] = ()


class Parser(Protocol):
    """Generated ids in, events out."""

    @property
    def channel(self) -> Channel:
        """Where the next token belongs."""

    @property
    def holding(self) -> bool:
        """True while text is kept back that may turn out to be a marker or a
        character's first bytes: no moment to put tokens in the model's mouth."""

    def feed(self, ids: Sequence[int]) -> list[Event]:
        """Read more tokens."""

    def finish(self, cut: bool) -> list[Event]:
        """The answer is over, `cut` if by a limit."""

    def finish_reason(self, cut: bool) -> FinishReason:
        """Why it is over: length if cut, else tool_calls if there is any, else stop."""


class Chat(Protocol):
    """One model's way to write conversations.

    `close_thinking` are the ids that end the reasoning and open the answer, empty
    for a model that does not reason.
    """

    stop_ids: frozenset[int]
    close_thinking: tuple[int, ...]

    def render(self, request: Request) -> Prompt:
        """The request's prompt. Raises: PromptError when it can't be rendered."""

    def parser(self, prompt: Prompt) -> Parser:
        """A fresh parser for the answer to `prompt`."""

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, without any control token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, control tokens by their names."""
