"""A conversation with tools: ask, run the tools that were called, ask again.

Knows no engine and no terminal: whoever takes a `Request` and gives a `Stream` will do.
The history is what was said, word for word, so that each prompt begins with the last one.
"""

import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace

from mlxmoe.agent.toolbox import Toolbox
from mlxmoe.events import Event, Reply, Request, Stream, collect
from mlxmoe.transcript import Message, Text, Tier, ToolCall, user

MOST_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A call was run; `text` is what the model will read."""

    call: ToolCall
    text: str


@dataclass(frozen=True, slots=True)
class RoundsSpent:
    """The turn ended without an answer, after so many requests that all called tools."""

    rounds: int


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The turn was cancelled where there was nothing whole to keep of it."""


TurnEvent = Event | ToolResult | RoundsSpent | Forgotten


class Conversation:
    """Turns of a person and a model. One thread takes the turns; `cancel` is for any."""

    def __init__(self, submit: Callable[[Request], Stream], toolbox: Toolbox, form: Request):
        """`form` is how each request is made (tier, sampling); its messages come first."""
        self._submit, self._toolbox = submit, toolbox
        self._form = replace(form, tools=toolbox.declarations)
        self._messages = form.messages
        self._stream: Stream | None = None
        self._cancelled = threading.Event()

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was said so far."""
        return self._messages

    @property
    def tier(self) -> Tier:
        """The thinking effort."""
        return self._form.tier

    @property
    def cancelled(self) -> bool:
        """True once this turn was asked to stop."""
        return self._cancelled.is_set()

    def set_tier(self, tier: Tier) -> None:
        """Think so from the next request on."""
        self._form = replace(self._form, tier=tier)

    def restart(self) -> None:
        """Forget all that was said."""
        self._messages = self._form.messages

    def cancel(self) -> None:
        """Stop this turn soon: its stream ends as cancelled, or no other one begins."""
        self._cancelled.set()
        if self._stream:
            self._stream.cancel()

    def turn(self, text: str) -> Iterator[TurnEvent]:
        """One question and all that follows, as it happens; each round ends with a `Finished`.

        A turn that was cancelled in the middle of a reply keeps what was said of it; between
        two replies it is forgotten. Raises what a stream failed with, and then too the
        conversation is as it was before the turn.
        """
        before, kept = self._messages, False
        self._messages = (*before, user(text))
        self._cancelled.clear()
        try:
            kept = yield from self._rounds()
            if not kept:
                yield Forgotten()
        finally:
            if self._stream and not kept:
                self._stream.cancel()
            self._stream = None
            if not kept:
                self._messages = before

    def _rounds(self) -> Generator[TurnEvent, None, bool]:
        """Whether there is something to keep."""
        for _ in range(MOST_ROUNDS):
            if self._cancelled.is_set():
                return False
            reply = yield from self._ask()
            if reply.finish_reason != "tool_calls":
                # Calls that are not run would stand in the history without results.
                self._messages += (replace(reply.message, tool_calls=()),)
                return bool(reply.reasoning or reply.content or not self._cancelled.is_set())
            self._messages += (reply.message,)
            for call in reply.tool_calls:
                if self._cancelled.is_set():
                    return False
                result = ToolResult(call, self._toolbox.answer(call))
                self._messages += (_message(result),)
                yield result
        yield RoundsSpent(MOST_ROUNDS)
        return True

    def _ask(self) -> Generator[Event, None, Reply]:
        """The next reply, its events as they come."""
        self._stream = stream = self._submit(replace(self._form, messages=self._messages))
        if self._cancelled.is_set():
            stream.cancel()
        seen = []
        for event in stream:
            seen.append(event)
            yield event
        return collect(seen)


def _message(result: ToolResult) -> Message:
    call = result.call
    return Message("tool", (Text(result.text),), tool_call_id=call.id, name=call.name)
