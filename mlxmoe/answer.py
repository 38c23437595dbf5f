"""One request from its prompt to its last token: prefill, the decode loop, its events."""

import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from mlxmoe.chat.prompt import Chat, Parser, Prompt
from mlxmoe.errors import PromptError, UsageError
from mlxmoe.events import (
    Event,
    ExpertStats,
    Finished,
    FinishReason,
    Progress,
    Request,
    Stats,
    Stream,
    TextDelta,
    ThinkingCapped,
    Usage,
)
from mlxmoe.loader import Loaded
from mlxmoe.sampling import Sampler, StopStrings, check_sampling
from mlxmoe.session import Session
from mlxmoe.transcript import Tier

# Reasoning tokens a tier may spend; None is no cap.
THINKING_CAPS: dict[Tier, int | None] = {"low": 8192, "high": 32768, "max": None}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the plan allows (tokens of a timeline, tokens of a span, bytes in all), and how
    many ids the model knows, None when its config does not say."""

    context: int
    span: int
    planned_bytes: int
    vocab: int | None = None

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raises PromptError for an id that has no embedding: MLX would read past its rows."""
        highest = max(ids, default=0)
        if self.vocab is not None and highest >= self.vocab:
            raise PromptError(
                f"token id {highest}, this model knows 0 to {self.vocab - 1}. "
                "Are the ids, or the tokenizer's files, those of another model?"
            )


@dataclass(slots=True)
class Runtime:
    """What the engine's thread works with."""

    loaded: Loaded
    chat: Chat
    session: Session
    limits: Limits


class CancelledError(Exception):
    """The reader of the stream asked to stop during prefill."""


def check_request(request: Request) -> None:
    """Raises UsageError when a number of the request is out of its range."""
    check_sampling(request.sampling)
    if request.thinking_cap is not None and request.thinking_cap < 0:
        raise UsageError(f"thinking_cap is {request.thinking_cap}, expected 0 or more tokens")


class Answer:
    """The work on one request. `run` puts every event of it into the stream; once it has
    `begun`, an error leaves the session spoilt."""

    def __init__(self, runtime: Runtime, request: Request, stream: Stream):
        self._chat, self._session = runtime.chat, runtime.session
        self._slots, self._limits = runtime.loaded.slots, runtime.limits
        self._request, self._stream = request, stream
        self.begun = False
        self._stops = StopStrings(request.sampling.stop)
        self._prompt_tokens = self._cached = self._prefilled = 0
        self._reasoning = self._completion = 0
        self._undecided = 0
        self._prefill_end = self._first_token = 0.0

    def run(self) -> None:
        """Answer. Raises MlxmoeError before or during the work."""
        self._begin = time.monotonic()
        self._experts_before = self._slots.stats
        self._syncs_before = self._slots.host_syncs
        check_request(self._request)
        if self._stream.cancelled:
            self._finish("cancelled")
            return
        prompt = self._chat.render(self._request)
        self._prompt_tokens = len(prompt.ids)
        limit = self._token_limit(prompt)
        self.begun = True
        try:
            logits, _ = self._session.sync(prompt.ids, prompt.ends, self._on_tokens)
        except CancelledError:
            self._slots.abandon()
            self._session.recover()
            self._finish("cancelled")
            return
        self._prefill_end = time.monotonic()
        parser = self._chat.parser(prompt)
        reason = self._decode(logits, parser, limit)
        self._put(parser.finish(reason != "stop"))
        if not self._stops.found and (tail := self._stops.finish()):
            self._stream.put(TextDelta(tail))
        if reason == "stop":
            reason = "stop" if self._stops.found else parser.finish_reason(False)
        self._finish(reason)

    def _token_limit(self, prompt: Prompt) -> int:
        """The most tokens to generate. Raises PromptError when the prompt does not fit."""
        if not prompt.ids:
            raise PromptError("the prompt is empty, expected at least one token. Type something")
        self._limits.check_ids((*prompt.ids, *self._chat.close_thinking))
        room = self._limits.context - len(prompt.ids)
        if room < 1:
            raise PromptError(
                f"the prompt has {len(prompt.ids)} tokens, and the context holds "
                f"{self._limits.context}. "
                "Shorten it, or start with a larger --context"
            )
        return min(room, self._request.sampling.max_tokens or room)

    def _decode(self, logits: mx.array, parser: Parser, limit: int) -> FinishReason:
        """Draw, show, step until something ends it."""
        sampler = Sampler(self._request.sampling)
        cap = self._thinking_cap()
        while True:
            if self._stream.cancelled:
                return "cancelled"
            if self._at_cap(cap, parser):
                forced = self._chat.close_thinking[: limit - self._completion]
                logits = self._session.extend(forced)
                self._take(forced, parser)
                self._stream.put(ThinkingCapped(self._reasoning, cap or 0))
            else:
                token = sampler(logits)
                self._first_token = self._first_token or time.monotonic()
                self._undecided += parser.channel == "think"
                self._take([token], parser)
                self._settle_reasoning(parser)
                if token in self._chat.stop_ids or self._stops.found or parser.channel == "done":
                    return "stop"
                if self._completion < limit:
                    logits = self._session.step(token)
            if self._completion >= limit:
                return "length"

    def _settle_reasoning(self, parser: Parser) -> None:
        """Tokens that turn out to close the reasoning are no reasoning."""
        if parser.channel != "think":
            self._undecided = 0
        elif not parser.holding:
            self._reasoning += self._undecided
            self._undecided = 0

    def _at_cap(self, cap: int | None, parser: Parser) -> bool:
        return (
            cap is not None
            and self._reasoning >= cap
            and parser.channel == "think"
            and not parser.holding
        )

    def _thinking_cap(self) -> int | None:
        request = self._request
        if not (request.thinking and self._chat.close_thinking):
            return None
        if request.thinking_cap is not None:
            return request.thinking_cap
        return THINKING_CAPS[request.tier]

    def _take(self, ids: Sequence[int], parser: Parser) -> None:
        self._completion += len(ids)
        self._put(parser.feed(ids))

    def _put(self, events: Sequence[Event]) -> None:
        """Events to the stream, the answer's text through the stop strings. Text that is
        held back goes before whatever else comes, so that the order stays."""
        for event in events:
            if isinstance(event, TextDelta):
                if text := self._stops.feed(event.text):
                    self._stream.put(TextDelta(text))
            elif not self._stops.found:
                if text := self._stops.finish():
                    self._stream.put(TextDelta(text))
                self._stream.put(event)

    def _on_tokens(self, done: float, reused: int) -> None:
        """Progress of the prefill, and the place where it can be stopped."""
        self._cached, self._prefilled = reused, int(done) - reused
        if self._stream.cancelled:
            raise CancelledError
        total, seconds = self._prompt_tokens - reused, time.monotonic() - self._begin
        self._stream.put(Progress("prefill", self._prefilled, total, "tokens", seconds))

    def _finish(self, reason: FinishReason) -> None:
        now = time.monotonic()
        prefill_end = self._prefill_end or now
        stats = Stats(
            prefill_tokens=self._prefilled,
            prefill_seconds=prefill_end - self._begin,
            decode_tokens=self._completion,
            decode_seconds=now - prefill_end,
            ttft_seconds=(self._first_token or now) - self._begin,
            host_syncs=self._slots.host_syncs - self._syncs_before,
            peak_memory_bytes=peak_memory(),
            planned_memory_bytes=self._limits.planned_bytes,
            experts=_since(self._experts_before, self._slots.stats),
        )
        reasoning = self._reasoning + self._undecided
        usage = Usage(self._prompt_tokens, self._cached, reasoning, self._completion)
        self._stream.put(Finished(reason, usage, stats))


def peak_memory() -> int:
    """The most memory the process has held so far, in bytes."""
    return max(_peak_resident(), mx.get_peak_memory())


def _peak_resident() -> int:
    """Linux: since the program began; getrusage there begins with the parent's figure."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def _since(before: ExpertStats, after: ExpertStats) -> ExpertStats:
    return ExpertStats(
        after.hits - before.hits,
        after.misses - before.misses,
        after.rescues - before.rescues,
        after.evictions - before.evictions,
        after.bytes_read - before.bytes_read,
    )
