"""The peak memory of one entry, above inputs and output, in a process of its own.

`python -m benchmarks.memory WORKLOAD ENTRY` prints it in bytes. The process makes the inputs, runs
a small call of the same kind, so that libraries, threads and their first buffers are there, resets
the kernel's high-water mark, and runs the call once. Pages are counted, not requests, so what the
interpreter and the allocator keep is in it, too.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.records import Entry

_RESET = Path("/proc/self/clear_refs")
_SMALL = 256  # the length of the call that loads everything


def missing() -> str | None:
    """Return why memory cannot be measured here, or None."""
    return None if os.access(_RESET, os.W_OK) else "needs Linux: a peak that can be reset"


def in_child(workload: str, entry: str) -> int:
    """Return the bytes of an entry, measured in a child process."""
    command = [sys.executable, "-m", "benchmarks.memory", workload, entry]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return int(done.stdout.split()[-1])


def measure(entry: Entry) -> int:
    """Return the bytes that an entry takes above its inputs and output, in this process."""
    from benchmarks.arrays import largest_error, make_inputs
    from benchmarks.peers import PEERS

    peer, call = PEERS[entry.peer], entry.call
    small = call.but(length=min(call.length, _SMALL))
    way = peer.prepare(small, make_inputs(small))
    way.run()
    inputs = make_inputs(call)
    way = peer.prepare(call, inputs)
    if way.planned_bytes is not None:
        return way.planned_bytes()
    gc.collect()
    _give_back()
    before = _status("VmRSS")
    _RESET.write_text("5", encoding="ascii")
    result = way.run()
    peak = _status("VmHWM")
    answer = way.answer(result) if way.answer is not None else None
    if answer is None:
        raise ValueError(f"{entry.peer} has no output to subtract")
    error = largest_error(call, inputs, answer)
    if not error < 1e-3:
        raise ValueError(f"{entry.peer} is off by {error:.3g}")
    return max(0, peak - before - answer.nbytes)


def _give_back() -> None:
    """Let the allocator return what is free, so that the call cannot hide in it."""
    library: Any = ctypes.CDLL(ctypes.util.find_library("c"))
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"no {name} in /proc/self/status")


def _main() -> None:
    from benchmarks.workloads import WORKLOADS

    workload, name = sys.argv[1:]
    (found,) = [one for one in WORKLOADS if one.name == workload]
    (entry,) = [one for one in found.entries if one.name == name]
    print(measure(entry))


if __name__ == "__main__":
    _main()
