"""The backward pass for host memory: tile threads, and sums in an order that is always the same.

A task is a run of row blocks for one chunk of heads. It gathers the gradients of the keys it
reaches in an array of its own; tasks then add theirs to the result one after the other, in the
order of their numbers, so that the bits depend on neither the number of threads nor their speed.
A bias with rows of its own is as large as the scores: its gradient is written in place, by tasks
that take all the heads which share it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from portable_attention.backends import Array
from portable_attention.core import plan
from portable_attention.core.backward import Cotangents, row_gradients, sum_to
from portable_attention.core.heads import Heads
from portable_attention.core.problem import Call
from portable_attention.core.threads import Task, run_tasks, usable_threads

# Row blocks a task: enough to make its own array of keys and values cheap beside its tiles.
_BLOCKS_PER_TASK = 4


def run(call: Call, given: Cotangents) -> dict[str, Array]:
    """Return the gradients of the call's operands, in their inner shapes and compute dtype."""
    problem = call.problem
    results = {
        name: np.zeros(array.shape, problem.compute_dtype)
        for name, array in given.wanted(call).items()
    }
    if "sinks" in results:
        results["sinks"] = results["sinks"][(*([np.newaxis] * len(problem.batch)), ...)]

    # The same memory layout whatever the caller's: BLAS gives other bits for other strides.
    given = given.map(np.ascontiguousarray)
    diagonal = call.limits.low is not None or call.limits.high is not None
    block_q, block_k = plan.host_block_sizes(problem, backward=True, diagonal=diagonal)
    threads = usable_threads()
    capacity = plan.host_capacity(call, (block_q, block_k), threads, whole_groups=True)
    chunks = list(plan.chunks((*problem.batch, *problem.heads), capacity))
    groups = _groups(results.get("bias"), chunks)
    starts = range(0, problem.query_length, block_q)
    step = max(1, min(_BLOCKS_PER_TASK, len(starts) // 2))
    runs = [
        [
            (start, min(start + block_q, problem.query_length))
            for start in starts[first : first + step]
        ]
        for first in range(0, len(starts), step)
    ]
    turns = _Turns()
    bands: dict[tuple[Any, ...], Array] = {}

    def tasks() -> Iterator[Task]:
        numbers = itertools.count()
        for group in groups:
            heads = [Heads(call, index, block_k, bands=bands) for index in group]
            # The last rows reach the most keys under causal: they go first.
            for run_of_rows in reversed(runs):
                yield partial(_task, next(numbers), turns, heads, run_of_rows, given, results)

    run_tasks(tasks(), len(groups) * len(runs), call.backend.ops.release)
    return results


def _groups(bias: Array | None, chunks: list[plan.Index]) -> list[list[plan.Index]]:
    """Return the chunks that must be one task after the other, since they share bias rows."""
    if bias is None or bias.shape[-2] == 1:
        return [[index] for index in chunks]
    shared: dict[Any, list[plan.Index]] = {}
    for index in chunks:
        key = tuple(
            None if size == 1 else (cut.start, cut.stop)
            for size, cut in zip(bias.shape, index, strict=False)
        )
        shared.setdefault(key, []).append(index)
    return list(shared.values())


class _Turns:
    """Lets numbered pieces of work happen in order, whichever thread brings them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._waiting: dict[int, list[tuple[Array, Array]]] = {}

    def add(self, number: int, sums: list[tuple[Array, Array]]) -> None:
        with self._lock:
            self._waiting[number] = sums
            while self._next in self._waiting:
                for target, gradient in self._waiting.pop(self._next):
                    np.add(target, gradient, out=target)
                self._next += 1


def _task(
    number: int,
    turns: _Turns,
    group: list[Heads],
    run_of_rows: list[tuple[int, int]],
    given: Cotangents,
    results: dict[str, Array],
) -> None:
    sums: list[tuple[Array, Array]] = []
    for heads in group:
        found = _Gathered(heads, run_of_rows, given.part(heads.index), results)
        found.compute()
        sums += found.sums()
    turns.add(number, sums)


class _Gathered:
    """The gradients of one chunk of heads from a run of row blocks."""

    def __init__(
        self,
        heads: Heads,
        run_of_rows: list[tuple[int, int]],
        given: Cotangents,
        results: dict[str, Array],
    ) -> None:
        self.heads = heads
        self.run_of_rows = run_of_rows
        self.given = given
        self.targets = {name: plan.take(array, heads.index) for name, array in results.items()}
        block_k, length = heads.block_k, heads.call.problem.key_length
        reached = [plan.reach(heads.limits, rows, length) for rows in run_of_rows]
        # Only the keys in the tiles of these rows.
        touched = [columns for found in reached for columns in heads.columns(found, block_k)]
        self.first = min((first for first, _ in touched), default=0)
        self.stop = max((stop for _, stop in touched), default=0)
        self.rows: tuple[int, int] = (0, 0)
        self.gathered: dict[str, Array] = {}
        self.shared_bias: Array | None = None
        self.by_rows: list[tuple[Array, Array]] = []

    def compute(self) -> None:
        """Compute everything, in arrays of its own but for a bias with rows of its own."""
        heads, problem = self.heads, self.heads.call.problem
        careful = self._must_select()
        for name, width in (("key", problem.width), ("value", problem.value_width)):
            shape = (*self.targets[name].shape[:-2], self.stop - self.first, width)
            self.gathered[name] = np.zeros(shape, heads.dtype)
        bias = self.targets.get("bias")
        if bias is not None and bias.shape[-2] == 1:
            self.shared_bias = np.zeros_like(bias)
        for rows in self.run_of_rows:
            self.rows = rows
            d_query, d_sinks = row_gradients(
                heads, rows, heads.block_k, self.given, self._emit, careful=careful
            )
            target = self.targets["query"][..., slice(*rows), :]
            self.by_rows.append((target, sum_to(np, d_query, target.shape)))
            if d_sinks is not None:
                target = self.targets["sinks"]
                self.by_rows.append((target, sum_to(np, d_sinks, target.shape)))

    def _must_select(self) -> bool:
        """Whether NaN or infinities could reach rows that do not attend them."""
        heads, given = self.heads, self.given
        rows = slice(self.run_of_rows[0][0], self.run_of_rows[-1][1])
        keys = slice(self.first, self.stop)
        arrays = (
            heads.query[..., rows, :],
            heads.key[..., keys, :],
            heads.value[..., keys, :],
            given.d_output[..., rows, :],
            0.0 if given.d_lse is None else given.d_lse[..., rows],
        )
        # A sum is finite only if all its terms are, and costs no memory.
        finite = all(np.isfinite(np.sum(array, dtype=heads.dtype)) for array in arrays)
        return not finite or bool(np.isnan(given.lse[..., rows]).any())

    def _emit(self, name: str, columns: tuple[int, int], gradient: Array) -> None:
        if name == "bias":
            bias = self.targets["bias"] if self.shared_bias is None else self.shared_bias
            rows = slice(None) if bias.shape[-2] == 1 else slice(*self.rows)
            picked = slice(None) if bias.shape[-1] == 1 else slice(*columns)
            tile = bias[..., rows, picked]
            tile += sum_to(np, gradient, tile.shape)
            return
        tile = self.gathered[name][..., columns[0] - self.first : columns[1] - self.first, :]
        tile += sum_to(np, gradient, tile.shape)

    def sums(self) -> list[tuple[Array, Array]]:
        """Return what must be added to which part of the results."""
        reached = slice(self.first, self.stop)
        sums = [
            (self.targets[name][..., reached, :], gradient)
            for name, gradient in self.gathered.items()
        ]
        if self.shared_bias is not None:
            sums.append((self.targets["bias"], self.shared_bias))
        return sums + self.by_rows
