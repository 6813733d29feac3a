"""A long causal head on NumPy, with the memory it took, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

import portable_attention
from portable_attention import attention
from portable_attention.cli.errors import CommandError
from portable_attention.cli.oracle import exact_attention

LENGTH: Final = 131072
WIDTH: Final = 32  # that of the model's heads
PROBE: Final = 16384  # 1/64 of the scores, by which the time of all of them is foretold


def in_own_process(until: float) -> dict[str, Any]:
    """Return what `measure` finds in a fresh process, where nothing else takes memory."""
    source = str(Path(portable_attention.__file__).resolve().parents[1])
    paths = [source, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "portable_attention.cli.long_head", str(until)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise CommandError(f"the long head failed with status {done.returncode}: {last[0]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(until: float, length: int = LENGTH, probe: int = PROBE) -> dict[str, Any]:
    """Compute a causal head, all of it if that is done by the time `until`, and measure it.

    On a machine that would take longer, the last queries alone read all the keys, as many of
    them as fit into the time; ``rows`` in the answer tells. The time is that of `time.time`,
    which is the same in every process.
    """
    generator = np.random.default_rng(0)
    query, key, value = (
        generator.standard_normal((length, WIDTH), dtype=np.float32) for _ in range(3)
    )
    memory = _memory_meter()
    baseline = memory()

    short = query[:probe], key[:probe], value[:probe]
    for _ in range(2):  # the first call also starts the threads
        started = time.perf_counter()
        attention(*short, causal=True)
        probed = time.perf_counter() - started
    per_score = probed / (probe * probe / 2)
    rows = rows_within(until - time.time(), per_score, length)

    started = time.perf_counter()
    output = attention(query[length - rows :], key, value, causal=True, query_offset="end")
    taken = time.perf_counter() - started
    peak = memory() - baseline

    first = length - rows
    error = 0.0
    for position in sorted({first, first + rows // 3, first + rows // 2, length - 1}):
        exact, _ = exact_attention(
            query[position : position + 1], key, value, causal=True, query_offset=position
        )
        difference = np.abs(output[position - first] - exact[0]).max()
        error = max(error, float(difference / np.abs(exact).max()))
    return {
        "length": length,
        "width": WIDTH,
        "rows": rows,
        "foretold": per_score * length * length / 2,
        "seconds": taken,
        "inputs": query.nbytes + key.nbytes + value.nbytes,
        "output": output.nbytes,
        "peak": peak,
        "meter": memory.__doc__,
        "error": error,
    }


def rows_within(seconds: float, seconds_per_score: float, length: int) -> int:
    """Return how many of the last rows of a causal head can be computed in a time."""
    scores = max(0.0, seconds) / seconds_per_score
    if scores >= length * length / 2:
        return length
    # n rows that end at the last key have n * length - n * n / 2 scores.
    rows = length - (length * length - 2 * scores) ** 0.5
    return min(length, max(1024, int(rows) // 1024 * 1024))


def _memory_meter() -> Callable[[], int]:
    """Return a function that tells the most memory used so far, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():

        def resident() -> int:
            """peak resident memory, VmHWM"""  # noqa: D403, D400
            line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
            return int(line.split()[1]) * 1024

        return resident
    tracemalloc.start()

    def traced() -> int:
        """peak of the memory that NumPy and Python allocated, tracemalloc"""  # noqa: D403, D400
        return tracemalloc.get_traced_memory()[1]

    return traced


if __name__ == "__main__":
    print(json.dumps(measure(float(sys.argv[1]))))
