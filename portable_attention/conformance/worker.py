"""The process in which an implementation is called: one call after another, until the end.

What it writes goes to a file that is kept short, so that it cannot fill a disk or a terminal.
"""

from __future__ import annotations

import os
import sys
import warnings
from multiprocessing.connection import Connection
from typing import Final

from portable_attention.conformance.calls import Call, Outcome
from portable_attention.conformance.implementation import Implementation, ImplementationError

_LONGEST: Final = 1 << 16  # bytes of what is written that are kept


def serve(connection: Connection, written: str, implementation: Implementation) -> None:
    """Make calls as they come, and send back what became of them."""
    warnings.simplefilter("ignore")
    log = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for number, to in ((0, null), (1, log), (2, log)):
        os.dup2(to, number)
    sys.stdout, sys.stderr = (
        open(number, "w", closefd=False, encoding="utf-8", errors="replace")  # noqa: SIM115
        for number in (1, 2)
    )
    try:
        adapter = implementation.adapter()
        connection.send(("ready", adapter.describe()))
    except ImplementationError as error:
        connection.send(("failed", str(error)))
        return
    while True:
        try:
            call = connection.recv()
        except (EOFError, OSError):
            return
        assert isinstance(call, Call)
        outcome = adapter.run(call)
        _keep_short(log)
        try:
            connection.send(outcome)
        except (EOFError, OSError):
            return
        except Exception as error:  # what cannot be sent is no result
            connection.send(Outcome("raised", error=f"its result cannot be sent: {error}"))


def _keep_short(log: int) -> None:
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        pass  # the implementation has closed them
    if os.fstat(log).st_size > _LONGEST:
        os.ftruncate(log, 0)


if __name__ == "__main__":
    _channel = Connection(int(sys.argv[1]))
    serve(_channel, sys.argv[2], _channel.recv())
