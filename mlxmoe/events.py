"""What goes into a maker of answers and what comes out: `Request`, `Event`, `Stream`.

The engine, a remote client and the scripted engine of the tests all take a
`Request` and return a `Stream` of `Event`s. Nothing here imports mlx.
"""

import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxmoe.transcript import Message, Text, Tier, ToolCall

FinishReason = Literal["stop", "length", "tool_calls", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. Temperature 0 takes the most likely one.

    `top_k` 0 and `top_p` 1 switch those filters off; `seed` None draws a new one.
    `stop` strings end the answer (not the reasoning) and are not part of it.
    """

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One question to the model: the whole conversation and how to answer it.

    `thinking_cap` is the most reasoning tokens, None for the tier's own default.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | None = None
    response_format: Mapping[str, Any] | None = None
    tier: Tier = "max"
    thinking: bool = True
    thinking_cap: int | None = None
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True, slots=True)
class Progress:
    """A long wait moved on: `done` of `total` `unit`s after `seconds`."""

    stage: Literal["load", "prefill"]
    done: int
    total: int
    unit: Literal["bytes", "tokens"]
    seconds: float

    @property
    def rate(self) -> float:
        """Units a second, 0 before anything was done."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    @property
    def eta(self) -> float | None:
        """Seconds left at this rate, None while there is no rate yet."""
        return (self.total - self.done) / self.rate if self.rate > 0 else None


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """The model opened its tool call number `index` (from 0)."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ToolArgumentDelta:
    """More of one argument's raw text; `type` is the model's own word for it.

    A call given as one JSON block has the key "" and the type "object".
    """

    index: int
    key: str
    type: str
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallFinished:
    """Tool call number `index` is whole."""

    index: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class ToolCallDropped:
    """Tool call number `index` was begun but can't be used: forget its deltas."""

    index: int
    why: str


@dataclass(frozen=True, slots=True)
class ThinkingCapped:
    """The thinking reached its cap and was closed for the model."""

    tokens: int
    cap: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request; `cached_tokens` were taken from a snapshot."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ExpertStats:
    """Expert picks by how they were served, and the bytes that took.

    A pick of one expert by one layer's step counts once: hit (was in a slot),
    miss (had to be read), rescue (a guess had it on its way already).
    """

    hits: int = 0
    misses: int = 0
    rescues: int = 0
    evictions: int = 0
    bytes_read: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """What one request took, in tokens, seconds and bytes."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    ttft_seconds: float = 0.0
    host_syncs: int = 0
    peak_memory_bytes: int = 0
    planned_memory_bytes: int = 0
    experts: ExpertStats = ExpertStats()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of an answer, also of a cancelled one."""

    reason: FinishReason
    usage: Usage
    stats: Stats


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of an answer that broke off; `error` is what happened."""

    error: Exception


Event = (
    Progress
    | ReasoningDelta
    | TextDelta
    | ToolCallStarted
    | ToolArgumentDelta
    | ToolCallFinished
    | ToolCallDropped
    | ThinkingCapped
    | Finished
    | Failed
)


class Stream:
    """Events of one request, in order, ending with `Finished` or `Failed`.

    The maker calls `put`; one reader iterates. `cancel` may be called from any
    thread: the maker stops between two tokens and still sends `Finished`.
    """

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._cancelled = threading.Event()

    def put(self, event: Event) -> None:
        """Hand one event to the reader."""
        self._events.put(event)

    def cancel(self) -> None:
        """Ask the maker to stop after the token it is on."""
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        """True once `cancel` was called."""
        return self._cancelled.is_set()

    def __iter__(self) -> Iterator[Event]:
        while True:
            event = self._events.get()
            yield event
            if isinstance(event, Finished | Failed):
                return


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, whole."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    usage: Usage
    stats: Stats

    @property
    def message(self) -> Message:
        """The answer as the assistant message that belongs in the history."""
        content = (Text(self.content),) if self.content else ()
        return Message("assistant", content, self.reasoning, self.tool_calls)


def collect(events: Iterable[Event]) -> Reply:
    """Add up `events` to a `Reply`.

    Raises: the error inside `Failed`.
    """
    reasoning: list[str] = []
    content: list[str] = []
    calls: dict[int, ToolCall] = {}
    finished = Finished("error", Usage(), Stats())
    for event in events:
        match event:
            case ReasoningDelta(text):
                reasoning.append(text)
            case TextDelta(text):
                content.append(text)
            case ToolCallFinished(index, call):
                calls[index] = call
            case Finished():
                finished = event
            case Failed(error):
                raise error
            case _:
                pass
    return Reply(
        "".join(reasoning),
        "".join(content),
        tuple(calls[index] for index in sorted(calls)),
        finished.reason,
        finished.usage,
        finished.stats,
    )
