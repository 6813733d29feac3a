"""Where calls are made: in a process of their own, that may hang or crash, or in this one.

A process is started once and takes one call after another. When it does not answer in time it is
ended; when it has ended, by itself or not, the next call starts another.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Final, Protocol

from portable_attention.conformance.adapter import TimeLimit
from portable_attention.conformance.calls import Call, Outcome
from portable_attention.conformance.implementation import (
    Implementation,
    ImplementationError,
    importable,
)

START: Final = 120.0  # seconds for a process to import its libraries and the implementation
_TAIL: Final = 300  # characters of what a process wrote before it ended


class Session(Protocol):
    """Makes calls of one implementation."""

    isolated: bool

    def describe(self) -> dict[str, Any]:
        """Return what the adapter says of the implementation."""

    def run(self, call: Call) -> Outcome:
        """Make one call."""

    def close(self) -> None:
        """End what was started."""


class Direct:
    """Calls made in this process; where it can be, a call that takes too long is ended.

    Parameters
    ----------
    implementation
        What to call.
    limit
        Seconds for a call. Kept on the main thread of a POSIX system, and only for a call that
        runs Python code now and then.
    """

    isolated = False

    def __init__(self, implementation: Implementation, limit: float) -> None:
        self._adapter = implementation.adapter()
        self._limit = _Limit(limit)

    def describe(self) -> dict[str, Any]:
        """Return what the adapter says of the implementation."""
        return self._adapter.describe()

    def run(self, call: Call) -> Outcome:
        """Make one call."""
        quiet, limit = io.StringIO(), self._limit.next()
        try:
            with (
                warnings.catch_warnings(),
                contextlib.redirect_stdout(quiet),
                contextlib.redirect_stderr(quiet),
                _alarm(limit),
            ):
                warnings.simplefilter("ignore")
                return self._adapter.run(call)
        except TimeLimit:
            return Outcome("hung", error=_hung(limit))

    def close(self) -> None:
        """Do nothing."""


class _Limit:
    """The seconds that calls may take: thrice as many for the first, which compiles and loads."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._first = True

    def next(self) -> float:
        """Return the seconds for the next call."""
        first, self._first = self._first, False
        return self._seconds * (3 if first else 1)


@contextlib.contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    if not hasattr(signal, "setitimer") or threading.current_thread() != threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGALRM, ring)
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, remaining)
        signal.signal(signal.SIGALRM, before)


class Isolated:
    """Calls made in a process of their own.

    Parameters
    ----------
    implementation
        What to call. A function that is named, or can be imported by its name, is imported in a
        fresh process; any other one is taken along into a fork of this one.
    limit
        Seconds for a call.
    fork
        Whether to fork even where the function could be imported.
    """

    isolated = True

    def __init__(self, implementation: Implementation, limit: float, *, fork: bool = False) -> None:
        self._implementation = implementation
        self._limit = _Limit(limit)
        self._fork = fork
        self._worker: _Worker | None = None
        self._described = self._start().described

    def describe(self) -> dict[str, Any]:
        """Return what the adapter says of the implementation."""
        return self._described

    def run(self, call: Call) -> Outcome:
        """Make one call."""
        worker, limit = self._worker or self._start(), self._limit.next()
        try:
            worker.connection.send(call)
            if worker.connection.poll(limit):
                outcome = worker.connection.recv()
                if isinstance(outcome, Outcome):
                    return outcome
        except Exception:  # the process has ended, or somebody else has written to its socket
            return Outcome("crashed", error=self._ended())
        worker.process.kill()
        self.close()
        return Outcome("hung", error=_hung(limit))

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _start(self) -> _Worker:
        self._worker = worker = _Worker.started(self._implementation, self._fork)
        try:
            if worker.connection.poll(START):
                kind, said = worker.connection.recv()
                if kind == "ready":
                    worker.described = said
                    return worker
                raise ImplementationError(said)
        except (EOFError, OSError):
            raise ImplementationError(f"importing it: {self._ended()}") from None
        finally:
            if not worker.described:
                self.close()
        raise ImplementationError(f"importing it: {_hung(START)}")

    def _ended(self) -> str:
        """Return how the process came to its end."""
        worker, self._worker = self._worker, None
        if worker is None:
            return "the process ended"
        status, tail = worker.end()
        how = f"exit status {status}"
        if status is not None and status < 0:
            with contextlib.suppress(ValueError):
                how = f"signal {signal.Signals(-status).name}"
        return f"the process ended ({how})" + (f": {tail}" if tail else "")


class _Worker:
    """One process, the connection to it, and the file that takes what it writes."""

    def __init__(self, process: Any, connection: Connection, written: str) -> None:
        self.process = process
        self.connection = connection
        self.written = written
        self.described: dict[str, Any] = {}

    @classmethod
    def started(cls, implementation: Implementation, fork: bool) -> _Worker:
        """Start a process, in the way that the function allows."""
        handle, written = tempfile.mkstemp(prefix="conformance-", suffix=".log")
        os.close(handle)
        ours, theirs = socket.socketpair()
        connection = Connection(ours.detach())
        try:
            named = None if fork else importable(implementation)
            if named is not None:
                process: Any = subprocess.Popen(
                    [sys.executable, "-m", "portable_attention.conformance.worker",
                     str(theirs.fileno()), written],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(p or "." for p in sys.path)},
                    stdin=subprocess.DEVNULL,
                )  # fmt: skip
                connection.send(named)
            else:
                from portable_attention.conformance.worker import serve

                process = multiprocessing.get_context("fork").Process(
                    target=serve,
                    args=(Connection(os.dup(theirs.fileno())), written, implementation),
                    daemon=True,
                )
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of forks beside threads
                    process.start()
        finally:
            theirs.close()
        return cls(process, connection, written)

    def end(self) -> tuple[int | None, str]:
        """End the process and return its exit status and the end of what it wrote."""
        self.connection.close()
        status = _status(self.process, 2.0)
        if status is None:
            self.process.kill()
            status = _status(self.process, 10.0)
        try:
            with open(self.written, "rb") as file:
                file.seek(max(0, os.path.getsize(self.written) - 4 * _TAIL))
                tail = " ".join(file.read().decode(errors="replace").split())[-_TAIL:]
            os.unlink(self.written)
        except OSError:
            tail = ""
        return status, tail


def _status(process: Any, seconds: float) -> int | None:
    """Return the exit status of a process, or None if it is still there after some seconds."""
    if isinstance(process, subprocess.Popen):
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
    process.join(seconds)
    status: int | None = process.exitcode
    return status


def open_session(implementation: Implementation, isolate: bool | None, limit: float) -> Session:
    """Return where to make calls.

    Parameters
    ----------
    implementation
        What to call.
    isolate
        Whether in a process of its own; None is where that is possible.
    limit
        Seconds for a call.
    """
    if isolate is False or (isolate is None and not _can_isolate(implementation)):
        return Direct(implementation, limit)
    try:
        return Isolated(implementation, limit)
    except ImplementationError:
        # What is imported here may not be there: a test module, or a script in another folder.
        if isolate or isinstance(implementation.function, str):
            raise
    if implementation.backend == "numpy":
        return Isolated(implementation, limit, fork=True)
    return Direct(implementation, limit)


def _can_isolate(implementation: Implementation) -> bool:
    if os.name != "posix":
        return False
    # A forked process can use neither a GPU nor the threads of JAX or PyTorch.
    return importable(implementation) is not None or implementation.backend == "numpy"


def _hung(seconds: float) -> str:
    return f"did not return within {seconds:g} s"
