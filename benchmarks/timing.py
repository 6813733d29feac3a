"""Timing of several ways to do one thing, by turns, in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

Way = Callable[[], object]


def alternate(ways: dict[str, Way], rounds: int) -> dict[str, float]:
    """Return the median seconds of each way; they take turns, since machines drift."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()  # warm up: compile, fault memory in
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


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
