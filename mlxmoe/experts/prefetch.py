"""Reader threads: records on their way from disk into slots, demands before all else.

Threads make no mx call. A read ends in its `Future`: the bytes read, or the error.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum

from mlxmoe.experts.store import Store

DEFAULT_THREADS = 4


class Priority(IntEnum):
    """What is read first."""

    DEMAND = 0
    HINT = 1
    STOP = 9


@dataclass(frozen=True, slots=True)
class Read:
    """One record wanted in one row. `layer` counts MoE layers from 0."""

    layer: int
    expert: int
    row: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True, order=True)
class _Job:
    priority: Priority
    number: int
    read: Read | None = field(compare=False)
    future: Future[int] = field(compare=False)


class Readers:
    """A few threads that read records in order of priority, then of submission."""

    def __init__(self, store: Store, threads: int = DEFAULT_THREADS):
        self._store = store
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._number = itertools.count()
        self._counting = threading.Lock()
        self._bytes_read = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"reader-{n}", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, reads: Iterable[Read], priority: Priority) -> list[Future[int]]:
        """Queue reads in disk order; their futures in the order of `reads`."""
        wanted = list(reads)
        futures: list[Future[int]] = [Future() for _ in wanted]
        pairs = zip(wanted, futures, strict=True)
        for read, future in sorted(pairs, key=_on(self._store)):
            self._jobs.put(_Job(priority, next(self._number), read, future))
        return futures

    @property
    def bytes_read(self) -> int:
        """Bytes of all records read whole so far."""
        return self._bytes_read

    def close(self) -> None:
        """Finish what is queued and end the threads."""
        for _ in self._threads:
            self._jobs.put(_Job(Priority.STOP, next(self._number), None, Future()))
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()).read is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            read = job.read
            try:
                size = self._store.read(read.layer, read.expert, read.row)
            except Exception as error:  # handed to whoever waits for the future
                job.future.set_exception(error)
            else:
                with self._counting:
                    self._bytes_read += size
                job.future.set_result(size)


def _on(store: Store) -> Callable[[tuple[Read, Future[int]]], tuple[int, int]]:
    """Key that sorts reads by where they lie on the disk."""
    return lambda pair: store.position(pair[0].layer, pair[0].expert)
