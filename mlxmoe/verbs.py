"""What `run` and `score` do once their options are read."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from mlxmoe.agent.loop import Conversation
from mlxmoe.answer import Runtime, check_request
from mlxmoe.console import Screen
from mlxmoe.engine import Engine
from mlxmoe.errors import PromptError, UsageError
from mlxmoe.events import Progress, Request, Stream, collect
from mlxmoe.report import reply_values
from mlxmoe.score import Score, logits_file, score
from mlxmoe.transcript import TIERS, Tier

INTERRUPTED = 130


def read_prompt(prompt: str) -> str:
    """The prompt, or all of stdin for "-". Raises PromptError when there is nothing in it."""
    if prompt == "-":
        try:
            prompt = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise PromptError(f"stdin is not UTF-8 text ({error.reason})") from error
    if not prompt.strip():
        raise PromptError('the prompt is empty. Type one: mlxmoe run [MODEL] "your question"')
    return prompt


def read_tools(path: Path | None) -> tuple[Mapping[str, Any], ...]:
    """Tools out of a JSON file. Raises UsageError when it is not a list of objects."""
    if path is None:
        return ()
    value = _read_json(path)
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise UsageError(f'{path}: expected a JSON list of tools, [{{"type": "function", …}}]')
    return tuple(value)


def check_tier(tier: str) -> Tier:
    """The tier as typed. Raises UsageError for a word the model does not know."""
    for known in TIERS:
        if tier == known:
            return known
    raise UsageError(f"unknown tier {tier!r}, expected {', '.join(TIERS)}")


def run_request(engine: Engine, request: Request, as_json: bool) -> int:
    """Load, answer, print; the exit code. The first interrupt stops between two tokens and
    keeps what was said, a second one ends the process. Raises UsageError before the load."""
    check_request(request)
    screen = Screen(sys.stdout, sys.stderr)
    signal.signal(signal.SIGINT, quit_at_once)
    stream: Stream | None = None
    try:
        engine.start(screen.waiting.show)
        stream = engine.submit(request)
        signal.signal(signal.SIGINT, cancelling(stream))
        reply = collect(screen.show_waiting(stream) if as_json else screen.show_all(stream))
        if as_json:
            screen.waiting.end()
            print(json.dumps(reply_values(reply)), flush=True)
    finally:
        if stream is not None:
            stream.cancel()
        engine.close()
        screen.end()
    return INTERRUPTED if reply.finish_reason == "cancelled" else 0


def run_score(
    engine: Engine, file: Path | None, ids: Path | None, logits: Path | None, as_json: bool
) -> int:
    """Load, score, print; the exit code. Raises UsageError unless just one input is given."""
    if (file is None) == (ids is None):
        raise UsageError("give a text FILE or --ids IDS.json, not both and not neither")
    text = _read_text(file) if file else ""
    given = _read_ids(ids) if ids else None
    if logits is not None:
        _check_writable(logits)
    screen = Screen(sys.stdout, sys.stderr)
    signal.signal(signal.SIGINT, quit_at_once)
    try:
        engine.start(screen.waiting.show)
        result = engine.call(lambda runtime: _score(runtime, text, given, logits, screen))
    finally:
        engine.close()
        screen.end()
    values = {
        "tokens": result.tokens,
        "scored": result.scored,
        "loss": result.loss_sum / result.scored if result.scored else None,
        "perplexity": result.perplexity if result.scored else None,
    }
    if as_json:
        print(json.dumps(values))
    elif result.scored:
        print(f"perplexity {result.perplexity:.4f} over {result.scored} tokens")
    else:
        print("one token: nothing to score")
    return 0


def _score(
    runtime: Runtime, text: str, given: list[int] | None, logits: Path | None, screen: Screen
) -> Score:
    """The work of `score`, in the engine's thread."""
    ids = runtime.chat.encode_text(text) if given is None else given
    if len(ids) > runtime.limits.context:
        raise PromptError(
            f"the text has {len(ids)} tokens, the context holds {runtime.limits.context}. "
            "Start with a larger --context"
        )
    runtime.limits.check_ids(ids)
    begin = time.monotonic()

    def on_tokens(done: float) -> None:
        seconds = time.monotonic() - begin
        screen.waiting.show(Progress("prefill", int(done), len(ids), "tokens", seconds))

    with logits_file(logits, len(ids)) if logits else nullcontext() as keep:
        return score(runtime.loaded.network, ids, runtime.limits.span, on_tokens, keep)


def cancelling(work: Stream | Conversation) -> Callable[[int, FrameType | None], None]:
    """An interrupt handler: the first time cancel, then quit."""

    def handler(number: int, frame: FrameType | None) -> None:
        if work.cancelled:
            quit_at_once(number, frame)
        work.cancel()

    return handler


def quit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Leave at once: MLX may be in the middle of something long, and a stream in the middle
    of a write, so neither is touched. What was printed is flushed already."""
    with suppress(OSError):
        os.write(2, b"\nmlxmoe: interrupted\n")
    os._exit(INTERRUPTED)


def _read_ids(path: Path) -> list[int]:
    value = _read_json(path)
    if not isinstance(value, list) or not all(type(id) is int and id >= 0 for id in value):
        raise UsageError(f"{path}: expected a JSON list of token ids, [1, 2, …]")
    return value


def _read_json(path: Path) -> object:
    try:
        return json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON ({error})") from error


def _check_writable(path: Path) -> None:
    """Raises UsageError when a file can't be made there, before hours go into its content."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{path}: can't be written. Name a file in a folder of yours")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: can't be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 text ({error.reason})") from error
