"""Tile threads: one BLAS thread each, whoever else is calling.

Most BLAS libraries have one thread count for the whole process. A call that runs tiles in threads
of its own sets it to 1 and puts it back, through one counted guard: the first call in takes the
count down, the last one out restores it, so concurrent callers cannot leave BLAS throttled. A BLAS
on OpenMP has a count for each thread instead, which each thread sets for itself.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

Task = Callable[[], None]


@cache
def _libraries(*, per_thread: bool) -> list[Any]:
    # Looking the libraries up takes milliseconds; NumPy's are loaded before this module is.
    found = ThreadpoolController().select(user_api="blas").lib_controllers
    return [one for one in found if (_layer(one) == "openmp") == per_thread]


def _layer(library: Any) -> str:
    return str(getattr(library, "threading_layer", "unknown"))


def _count(library: Any) -> int:
    return library.get_num_threads() or 1


def _set_count(library: Any, count: int) -> None:
    # threadpoolctl 3.7 lets only one thread set the count of OpenBLAS, the first that ever did, and
    # ignores the others. Calls are ordered by the guard's lock here, so ownership is given up.
    give_up = getattr(type(library), "clear_controlling_thread", lambda force: None)
    give_up(force=True)
    library.set_num_threads(count)
    give_up(force=True)


class _BlasGuard:
    """Knows the calls that want BLAS to run in one thread.

    Ctrl-C may come between any two steps, and a fork may copy what stands between them. So a call
    is entered before anything is changed, what is to be restored is known before it is changed and
    until it is restored, and every step may be done twice.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders: set[int] = set()
        self.saved: list[tuple[Any, int]] = []

    def threads(self) -> int:
        """Return how many threads BLAS may use as the user has set it."""
        with self.lock:
            counts = [_count(library) for library in _libraries(per_thread=True)]
            if self.saved:
                counts += [count for _, count in self.saved]
            else:
                counts += [_count(library) for library in _libraries(per_thread=False)]
        return max(counts, default=0) or available_cores()

    def hold(self, holder: object) -> None:
        with self.lock:
            self.holders.add(id(holder))
            if not self.saved:
                self.saved = [(one, _count(one)) for one in _libraries(per_thread=False)]
            if len(self.holders) == 1:
                for library, count in self.saved:
                    if count != 1:
                        _set_count(library, 1)

    def release(self, holder: object) -> None:
        with self.lock:
            self.holders.discard(id(holder))
            if not self.holders:
                self.restore()

    def restore(self) -> None:
        for library, count in self.saved:
            if count != 1:
                _set_count(library, count)
        self.saved = []


_guard = _BlasGuard()


def available_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _after_fork() -> None:
    # The child has none of the callers that hold the guard.
    _guard.lock = threading.Lock()
    _guard.holders.clear()
    _guard.restore()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Hold BLAS to one thread within the block, in the whole process."""
    holder = object()
    try:
        _guard.hold(holder)
        with _one_thread_here():
            yield
    finally:
        try:
            _release(holder)
        except BaseException:  # Ctrl-C, before it could begin
            _release(holder)
            raise


def _release(holder: object) -> None:
    """Release the guard, whatever comes in between, and raise that afterwards."""
    interrupted: BaseException | None = None
    for _ in range(100):
        try:
            _guard.release(holder)
            break
        except BaseException as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


@contextmanager
def _one_thread_here() -> Iterator[None]:
    """Hold those BLAS libraries to one thread that count threads for each caller."""
    with ExitStack() as stack:
        for library in _libraries(per_thread=True):
            stack.callback(library.set_num_threads, _count(library))
            library.set_num_threads(1)
        yield


def usable_threads() -> int:
    """Return how many tile threads a call may use: as many as BLAS may."""
    return min(_guard.threads(), available_cores())


def run_tasks(tasks: Iterator[Task], count: int, done: Task = lambda: None) -> None:
    """Run independent tasks, in as many threads as BLAS may use, the caller's own among them.

    Each thread calls `done` when it finds no more tasks. An exception in any of them, Ctrl-C in the
    caller included, ends the others at their next task and is raised when all have stopped.
    """
    helpers = min(usable_threads(), count) - 1
    queue = _Queue(tasks, done, _current_core() if helpers else None)
    with one_blas_thread():
        threads = []
        try:
            for _ in range(helpers):
                threads.append(_start(queue))
            queue.work()
        finally:
            queue.stopped = True
            for thread in threads:
                if thread is not None:
                    thread.join()
    if queue.error is not None:
        raise queue.error


def _start(queue: _Queue) -> threading.Thread | None:
    # Daemons of one call: an interpreter that ends does not wait for them, nothing is left between
    # calls, and a forked child misses none. Starting one costs less than the smallest tile.
    thread = threading.Thread(target=queue.help, name="portable-attention", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down: the caller's thread does it all
        return None
    return thread


@cache
def _getcpu() -> Callable[[], int] | None:
    try:
        found: Callable[[], int] = ctypes.CDLL(None).sched_getcpu  # of Linux
    except (AttributeError, OSError, TypeError):
        return None
    return found


def _current_core() -> int | None:
    getcpu = _getcpu() if hasattr(os, "sched_setaffinity") else None
    return None if getcpu is None else getcpu()


def _leave(core: int | None) -> None:
    """Move this thread off a core, but let it be moved anywhere afterwards.

    Linux may start a thread on the core of its maker and leave both there for 10 ms, although
    another one idles: of 8 ms of work, measured on two cores, which then took 14 ms.
    """
    if core is None:
        return
    with suppress(OSError):  # where it is forbidden, or the cores of the process have changed
        allowed = os.sched_getaffinity(0)  # of this thread alone
        if others := allowed - {core}:
            os.sched_setaffinity(0, others)
            os.sched_setaffinity(0, allowed)


class _Queue:
    """Tasks that several threads take from one iterator."""

    def __init__(self, tasks: Iterator[Task], done: Task, core: int | None = None) -> None:
        self._tasks = tasks
        self._done = done
        self._core = core  # that of the caller
        self._lock = threading.Lock()
        self.stopped = False
        self.error: BaseException | None = None

    def _next(self) -> Task | None:
        with self._lock:
            return None if self.stopped else next(self._tasks, None)

    def work(self) -> None:
        """Take tasks until there are none, or another thread has failed."""
        try:
            with np.errstate(all="ignore"):
                while (task := self._next()) is not None:
                    task()
        finally:
            self._done()

    def help(self) -> None:
        """Do the same in a thread that has nobody to raise an error to."""
        try:
            _leave(self._core)
            with _one_thread_here():
                self.work()
        except BaseException as error:
            self.stopped = True
            self.error = error
