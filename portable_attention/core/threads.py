"""Tile threads: one BLAS thread each, whoever else is calling.

BLAS libraries have one thread count for the whole process. A call that runs tiles in threads of
its own sets it to 1 and puts it back, through one counted guard: the first call in takes the count
down, the last one out restores it, so concurrent callers cannot leave BLAS throttled.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

Task = Callable[[], None]


class _BlasGuard:
    """Counts the calls that want BLAS to run in one thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.depth = 0
        self.saved: list[tuple[Any, int]] = []
        self._libraries: list[Any] | None = None

    def libraries(self) -> list[Any]:
        # Looking the libraries up takes milliseconds; NumPy's are loaded before this module is.
        if self._libraries is None:
            self._libraries = ThreadpoolController().select(user_api="blas").lib_controllers
        return self._libraries

    def threads(self) -> int:
        """Return how many threads BLAS may use as the user has set it."""
        with self.lock:
            counts = [count for _, count in self.saved]
            if not self.depth:
                counts = [library.get_num_threads() or 1 for library in self.libraries()]
        return max(counts, default=0) or available_cores()

    def enter(self) -> None:
        with self.lock:
            if self.depth == 0:
                self.saved = [(one, one.get_num_threads() or 1) for one in self.libraries()]
                for library, count in self.saved:
                    if count != 1:
                        library.set_num_threads(1)
            self.depth += 1

    def leave(self) -> None:
        with self.lock:
            self.depth -= 1
            if self.depth == 0:
                self.restore()

    def restore(self) -> None:
        saved, self.saved = self.saved, []
        for library, count in saved:
            if count != 1:
                library.set_num_threads(count)


_guard = _BlasGuard()
_pool: ThreadPoolExecutor | None = None
_pool_lock = threading.Lock()


def available_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _after_fork() -> None:
    # The child has neither the pool's threads nor the callers that hold the guard.
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()
    _guard.lock = threading.Lock()
    if _guard.depth:
        _guard.depth = 0
        _guard.restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Hold BLAS to one thread within the block, in the whole process."""
    _guard.enter()
    try:
        yield
    finally:
        _guard.leave()


def _executor() -> ThreadPoolExecutor:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(available_cores(), thread_name_prefix="portable-attention")
        return _pool


def run_tasks(tasks: Iterator[Task], count: int) -> None:
    """Run independent tasks, in as many threads as BLAS may use, the caller's own among them.

    An exception in any of them, Ctrl-C in the caller included, ends the others at their next task
    and is raised when all of them have stopped.
    """
    helpers = min(_guard.threads(), available_cores(), count) - 1
    with one_blas_thread():
        if helpers <= 0:
            with np.errstate(all="ignore"):
                for task in tasks:
                    task()
            return
        queue = _Queue(tasks)
        futures: list[Future[None]] = []
        try:
            futures = [_executor().submit(queue.work) for _ in range(helpers)]
            queue.work()
        finally:
            queue.stop()
            # A helper that another call keeps from starting has nothing left to do here.
            wait([future for future in futures if not future.cancel()])
        for future in futures:
            if not future.cancelled():
                future.result()


class _Queue:
    """Tasks that several threads take from one iterator."""

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._tasks = tasks
        self._lock = threading.Lock()
        self._stopped = False

    def _next(self) -> Task | None:
        with self._lock:
            return None if self._stopped else next(self._tasks, None)

    def stop(self) -> None:
        self._stopped = True

    def work(self) -> None:
        with np.errstate(all="ignore"):
            try:
                while (task := self._next()) is not None:
                    task()
            except BaseException:
                self._stopped = True
                raise
