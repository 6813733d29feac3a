"""Timing of several ways to do one thing, by turns, in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks.environment import Watch

Way = Callable[[], object]
# The OpenMP threads of PyTorch and the pools of others keep spinning on their cores for some
# milliseconds after a call has returned, which would be charged to whoever comes next.
REST = 0.02
# What a long call has freed, half a gigabyte after `jax.nn`, is given back to the system for a
# while after it has returned: the next one waits for a fifth of the time that it took, up to this.
LONGEST_REST = 0.2
# A way that has taken this many seconds gets no further runs: some are a hundred times slower.
ENOUGH = 12.0
# After so many seconds, three rounds are enough: a busy machine must not take hours.
LONGEST = 40.0


@dataclass(frozen=True)
class Sample:
    """What several runs of one way took: the median, and the quartiles around it."""

    median: float
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, values: list[float]) -> Sample:
        """Return the sample of some values."""
        if len(values) < 2:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Patience:
    """The seconds that a run may spend on rounds that other programs disturbed, and on waiting."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.left = seconds

    def again(self, watch: Watch) -> bool:
        """Whether to do over what was watched; wait until the machine is quiet, if so."""
        if self.left <= 0 or not watch.disturbed():
            return False
        start = watch.began
        while self.left > time.perf_counter() - start:
            second = Watch()
            time.sleep(1.0)
            if not second.disturbed():
                break
        self.left -= time.perf_counter() - start
        return True


def samples(
    ways: dict[str, Way],
    rounds: int,
    repeats: dict[str, int] | None = None,
    *,
    patience: Patience | None = None,
    warm: bool = False,
) -> tuple[dict[str, Sample], float | None]:
    """Return the seconds of each way, and the part of the cores that other programs took.

    The ways take turns, A B A B, since machines drift.

    `repeats` names the ways that are too short for the clock, and how often to run them in a row.
    They are run once before, to compile and to fault memory in, unless they are `warm` already.
    A round that other programs disturbed is done over, whatever it gave, while there is `patience`.
    What takes very long gets fewer rounds, but three.
    """
    repeats, patience = repeats or {}, patience or Patience()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    if not warm:
        for way in ways.values():
            way()
    done, spent, total, others, last = 0, 0.0, 0.0, 0.0, 0.0
    while ways and done < (rounds if spent < LONGEST else min(rounds, 3)):
        watch, row = Watch(), {}
        for name, way in ways.items():
            repeat = repeats.get(name, 1)
            if sum(taken[name]) * repeat < ENOUGH:
                row[name] = _time(way, repeat, last)
                last = row[name] * repeat
        if patience.again(watch):
            continue
        for name, seconds in row.items():
            taken[name].append(seconds)
        there, theirs = watch.since()
        spent += time.perf_counter() - watch.began
        done, total, others = done + 1, total + there, others + theirs
    found = {name: Sample.of(seconds) for name, seconds in taken.items()}
    return found, others / total if total else None


def alternate(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """Return the median seconds of each way, by turns."""
    return {name: sample.median for name, sample in samples(ways, rounds)[0].items()}


def _time(way: Way, repeat: int, last: float) -> float:
    time.sleep(max(REST, min(LONGEST_REST, last / 5)))
    start = time.perf_counter()
    for _ in range(repeat):
        way()
    return (time.perf_counter() - start) / repeat


def check_agreement(results: dict[str, np.ndarray], tolerance: float) -> None:
    """Raise if the ways do not give the same answer: what is wrong is not worth timing."""
    first = next(iter(results))
    for name, result in results.items():
        error = float(np.max(np.abs(result.astype(np.float64) - results[first])))
        if not error <= tolerance:
            raise SystemExit(f"{name} differs from {first} by {error:.3g}: nothing was timed")


def table(header: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
