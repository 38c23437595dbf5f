"""The loaded model behind a queue: one thread owns MLX, requests go in, events come out.

A request runs from its prompt to its last token before the next one begins. Errors end
the request, never the thread.
"""

import atexit
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import mlx.core as mx

from mlxmoe.answer import Answer, Limits, Runtime
from mlxmoe.budget import Plan
from mlxmoe.chat.foreign import ForeignChat
from mlxmoe.chat.kimi import KimiChat
from mlxmoe.chat.prompt import Chat
from mlxmoe.checkpoint import Checkpoint
from mlxmoe.config import KimiConfig
from mlxmoe.errors import EngineError, MlxmoeError
from mlxmoe.events import Failed, Request, Stream
from mlxmoe.experts.index import check_unchanged
from mlxmoe.loader import Loaded, OnProgress, hold_memory, load
from mlxmoe.session import Session

T = TypeVar("T")
Opened = tuple[Loaded, Chat, Limits]


class Engine:
    """A running model. `submit` may be called from any thread."""

    def __init__(self, open_model: Callable[[OnProgress], Opened]):
        """`open_model` runs in the engine's thread; call `start` to run it."""
        self._open_model = open_model
        self._jobs: queue.SimpleQueue[Callable[[Runtime], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._unanswered: list[Stream] = []

    def start(self, on_progress: OnProgress = lambda progress: None) -> None:
        """Load the model; return when it is ready. Raises what loading raised."""
        if self._thread is not None or self._closed:
            raise EngineError("an engine starts once: make another one")
        ready: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, args=(on_progress, ready), name="engine", daemon=True
        )
        self._thread.start()
        if error := ready.get():
            self._thread.join()
            raise error
        atexit.register(self._leave)

    def submit(self, request: Request) -> Stream:
        """Queue a request; its events come in the stream at once as they happen."""
        stream = Stream()

        def job(runtime: Runtime) -> None:
            answer = Answer(runtime, request, stream)
            try:
                check_unchanged(runtime.loaded.manifest)
                answer.run()
            except MlxmoeError as error:
                if answer.begun:
                    _recover(runtime)
                stream.put(Failed(error))
            except Exception as error:
                _recover(runtime)
                failure = EngineError(f"the engine failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
                stream.put(Failed(failure))
            self._unanswered.remove(stream)

        self._unanswered.append(stream)
        try:
            self._put(job)
        except EngineError:
            self._unanswered.remove(stream)
            raise
        return stream

    def call(self, work: Callable[[Runtime], T]) -> T:
        """Run `work` in the engine's thread between requests; its result or its error."""
        done: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

        def job(runtime: Runtime) -> None:
            try:
                done.put((work(runtime), None))
            except Exception as error:
                _recover(runtime)
                done.put((None, error))

        self._put(job)
        result, error = done.get()
        if error:
            raise error
        return result  # type: ignore[return-value]

    def close(self) -> None:
        """Finish what is queued, then free the model and end the thread."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        if self._thread:
            self._thread.join()
        atexit.unregister(self._leave)

    def _leave(self) -> None:
        """At the program's end: a thread that is inside MLX then would abort the process."""
        for stream in list(self._unanswered):
            stream.cancel()
        self.close()

    def _put(self, job: Callable[[Runtime], None]) -> None:
        with self._lock:
            if self._closed or self._thread is None or not self._thread.is_alive():
                raise EngineError("the engine is not running: start one first")
            self._jobs.put(job)

    def _run(self, on_progress: OnProgress, ready: queue.SimpleQueue[Exception | None]) -> None:
        try:
            runtime = self._open(on_progress)
        except Exception as error:
            mx.clear_streams()
            ready.put(error)
            return
        ready.put(None)
        while job := self._jobs.get():
            job(runtime)
        runtime.loaded.close()
        del runtime
        # Without this the process may abort when the thread ends just before exit.
        mx.clear_streams()

    def _open(self, on_progress: OnProgress) -> Runtime:
        loaded, chat, limits = self._open_model(on_progress)
        try:
            session = Session(loaded.network, limits.span)
        except BaseException:
            loaded.close()
            raise
        return Runtime(loaded, chat, session, limits)


def engine_for(checkpoint: Checkpoint, plan: Plan) -> Engine:
    """An engine that will load `checkpoint` as planned."""

    def open_model(on_progress: OnProgress) -> Opened:
        manifest, config = checkpoint.manifest, checkpoint.config
        folder = manifest.folder
        chat: Chat = KimiChat(folder) if isinstance(config, KimiConfig) else ForeignChat(folder)
        hold_memory(plan.planned_bytes)
        loaded = load(manifest, config, plan.slots, on_progress)
        vocab = config.vocab_size if isinstance(config, KimiConfig) else config.number("vocab_size")
        return loaded, chat, Limits(plan.context, plan.span, plan.planned_bytes, vocab)

    return Engine(open_model)


def _recover(runtime: Runtime) -> None:
    """A clean state after an error in the middle of a step."""
    runtime.loaded.slots.abandon()
    runtime.session.recover()
