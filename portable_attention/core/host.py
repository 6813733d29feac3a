"""The schedule for host memory: tiles over a pool of threads, in buffers that are kept.

A block of rows is first computed as if its inputs were ordinary: without a running maximum where
a bound on the scores shows that exp cannot overflow, and without looking for NaN and infinities.
Those cannot hide: whatever they touch comes out not finite, or as a row that has seen nothing.
A head that shows either is computed again by `eager.attend_rows`, which selects where this
multiplies. Every decision is made head by head, so that no head's bits depend on another's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from portable_attention.backends import Array
from portable_attention.core import eager, plan, tile
from portable_attention.core.problem import Call
from portable_attention.core.threads import Task, run_tasks

# exp(32) = 8e13 leaves room in float32 for sums over any number of keys.
_SMALL_SCORE = 32.0
# Far enough from overflow that adding a bias cannot reach it.
_FINITE_SCORE = 1e30
# Weights far below 1, or small sums of values under weights below 1, may have lost digits to
# underflow, which a maximum would have kept them from.
_SMALL_DENOMINATOR = 1e-7
_SMALL_SUM = 1e-30
_NEAR_ONE = (0.37, 2.72)  # the log of which lies within (-1, 1)
# Squares below this may have lost digits, too: a norm counts as its root at the least.
_SMALL_SQUARE = 1e-30
# Finding the largest norms costs a pass over the keys, which pays when several rows share it.
_ROWS_FOR_BOUND = 32
# Small heads are batched until a tile holds as many scores as one large tile.
BUDGET = 1 << 18


def run(call: Call, dtype: Any) -> tuple[Array, Array]:
    """Return the output (*batch, Hkv, G, Lq, Dv) and the lse (*batch, Hkv, G, Lq) of a call."""
    problem = call.problem
    output = np.empty(problem.output_shape, dtype)
    lse = np.empty(problem.output_shape[:-1], problem.compute_dtype)
    sizes = (*problem.batch, *problem.heads)
    block_q, block_k = plan.block_sizes(problem)
    capacity = plan.capacity(BUDGET, block_q * block_k)
    starts = range(0, problem.query_length, block_q)

    def tasks() -> Iterator[Task]:
        for index in plan.chunks(sizes, capacity):
            heads = Heads(call, index, block_k)
            # The last rows reach the most keys under causal: they go first.
            for start in reversed(starts):
                rows = (start, min(start + block_q, problem.query_length))
                yield partial(_attend, heads, rows, output, lse)

    cuts = plan.cuts(sizes, capacity)
    run_tasks(tasks(), len(starts) * int(np.prod([len(cut) for cut in cuts])))
    return output, lse


class Heads(eager.Part):
    """The heads of one chunk, with what their blocks of rows share: widened keys, and bounds."""

    def __init__(self, call: Call, index: plan.Index, block_k: int) -> None:
        super().__init__(call, index)
        self.block_k = block_k
        self.dtype = np.dtype(call.problem.compute_dtype)
        self._lock = threading.RLock()  # the norms need the widened keys
        self._shared: dict[str, Any] = {}

    def singles(self) -> Iterator[Heads]:
        """Return each head of this chunk by itself."""
        starts = [range(cut.start, cut.stop) for cut in self.index]
        for numbers in np.ndindex(*(len(part) for part in starts)):
            index = tuple(
                slice(part[number], part[number] + 1)
                for part, number in zip(starts, numbers, strict=True)
            )
            yield Heads(self.call, index, self.block_k)

    def _once(self, name: str, make: Any) -> Any:
        with self._lock:
            if name not in self._shared:
                self._shared[name] = make()
            return self._shared[name]

    def query_rows(self, rows: tuple[int, int]) -> Array:
        return np.array(self.query[..., slice(*rows), :], self.dtype, order="C")

    def tile_of(self, name: str, columns: tuple[int, int]) -> Array:
        """Return a tile of the keys or values in packed rows.

        BLAS wants them so, and gives other bits for other strides.
        """
        array = self.key if name == "key" else self.value
        rows = (array.shape[-1] * array.itemsize, array.itemsize)
        if array.dtype == self.dtype and array.strides[-2:] == rows:
            return array[..., slice(*columns), :]
        if self.call.problem.span is None:
            # Every block of rows reads all keys: widen them once.
            whole = self._once(name, lambda: np.ascontiguousarray(array, self.dtype))
            return whole[..., slice(*columns), :]
        return np.ascontiguousarray(array[..., slice(*columns), :], self.dtype)

    @property
    def largest_keys(self) -> tuple[Array, Array]:
        """The largest norm of a head's keys, squared, and whether all are finite: (..., 1, 1)."""
        found: tuple[Array, Array] = self._once("norms", self._find_largest_keys)
        return found

    def _find_largest_keys(self) -> tuple[Array, Array]:
        length = self.call.problem.key_length
        found = [
            _largest_norm(self.tile_of("key", (first, min(first + self.block_k, length))))
            for first in range(0, length, self.block_k)
        ]
        shape = (*self.key.shape[:-2], 1, 1)
        largest, finite = np.zeros(shape, self.dtype), np.ones(shape, bool)
        for norm, whole in found:
            np.maximum(largest, norm, out=largest)
            finite &= whole
        return largest, finite


def _largest_norm(rows: Array) -> tuple[Array, Array]:
    """Return the largest norm of rows, squared, and whether all of them are finite: (..., 1, 1).

    A row with NaN or infinities does not count. Where it is attended, the result is not finite
    whatever is done here; where it is masked, it must not decide anything.
    """
    squares = np.einsum("...d,...d->...", rows, rows)
    finite = np.isfinite(squares)
    if not finite.all():
        finite = np.isfinite(rows).all(axis=-1)
        squares = np.where(finite, squares, 0.0)
    axes = (..., np.newaxis, np.newaxis)
    return squares.max(axis=-1, initial=_SMALL_SQUARE)[axes], finite.all(axis=-1)[axes]


def _attend(heads: Heads, rows: tuple[int, int], output: Array, lse: Array) -> None:
    """Write the results of a block of rows, for all heads of a chunk."""
    problem, backend = heads.call.problem, heads.call.backend
    query, late_scale = eager.scale_query(backend, heads.query_rows(rows), problem)

    bounded = False
    # Scores that are known to be finite are -inf only where they are masked.
    finite: Any = False
    if problem.query_length >= _ROWS_FOR_BOUND:
        norm, finite_rows = _largest_norm(query)
        key_norm, finite_keys = heads.largest_keys
        bound = np.sqrt(norm) * np.sqrt(key_norm) * abs(late_scale)
        small = bound <= _SMALL_SCORE
        finite = (bound < _FINITE_SCORE) & finite_rows & finite_keys
        if problem.softcap is not None and problem.softcap <= _SMALL_SCORE:
            small = bound < _FINITE_SCORE
        if heads.bias is None:
            bounded = bool(small.all())
            if not bounded and small.any():
                for single in heads.singles():
                    _attend(single, rows, output, lse)
                return
    place = (*heads.index, slice(*rows))
    state = _attend_fast(heads, rows, query, late_scale, bounded)
    if bounded:
        state = tile.unbounded(backend, state)
    empty = state.maximum == float("-inf")
    output[place], lse[place] = tile.finish(
        backend,
        state,
        occupied=~empty if empty.any() else None,
        sinks=heads.sinks,
        keep_rate=1.0 - problem.dropout_rate,
    )
    wrong = ~np.isfinite(state.denominator) | ~_all_finite(state.accumulator)
    wrong |= empty & np.logical_not(finite)
    harmed = _harmed(state) if bounded else np.zeros_like(wrong)
    if not (wrong.any() or harmed.any()):
        return
    for single, not_finite, rows_harmed in zip(
        heads.singles(), _by_head(wrong), _by_head(harmed), strict=True
    ):
        if not_finite.any():
            place = (*single.index, slice(*rows))
            output[place], lse[place], state = eager.attend_rows(
                single, rows, heads.block_k, bounded=bounded
            )
            rows_harmed = _harmed(state).ravel() if bounded else rows_harmed  # noqa: PLW2901
        if rows_harmed.any():
            (numbers,) = np.nonzero(rows_harmed)
            again = (rows[0] + int(numbers[0]), rows[0] + int(numbers[-1]) + 1)
            place = (*single.index, slice(*again))
            output[place], lse[place], _ = eager.attend_rows(single, again, heads.block_k)


def _by_head(rows: Array) -> Array:
    """Return an array over rows (..., q, 1) as (heads, q)."""
    return rows.reshape(-1, rows.shape[-2])


def _all_finite(sums: Array) -> Array:
    return np.isfinite(sums).all(axis=-1, keepdims=True)


def _harmed(state: tile.SoftmaxState) -> Array:
    """Return the rows (..., q, 1) to which having no maximum did harm.

    Their sums overflowed, lost digits to underflow, or have a log near 0, which a sum relative to
    the maximum would give more exactly.
    """
    total, sums = state.denominator, state.accumulator
    small_sums = (np.abs(sums) < _SMALL_SUM).any(axis=-1, keepdims=True)
    harmed = np.isfinite(total) & ~_all_finite(sums)
    harmed |= (total < _SMALL_DENOMINATOR) | ((total < 1.0) & small_sums)
    harmed |= (total > _NEAR_ONE[0]) & (total < _NEAR_ONE[1])
    return harmed & (total != 0.0)


def _attend_fast(
    heads: Heads, rows: tuple[int, int], query: Array, late_scale: float, bounded: bool
) -> tile.SoftmaxState:
    """Return the state of a block of rows, taking the inputs to be finite."""
    problem, backend = heads.call.problem, heads.call.backend
    shape = (*heads.lead, rows[1] - rows[0], 1)
    state = tile.start(backend, shape, problem.value_width, query, bounded=bounded)
    for met in heads.tiles(rows, heads.block_k):
        scores = tile.tile_scores(
            backend,
            query,
            met.key,
            scale=late_scale,
            softcap=problem.softcap,
            bias=met.bias,
            allowed=None if bounded else met.allowed,
        )
        state = tile.update(
            backend,
            state,
            scores,
            met.value,
            met.kept,
            allowed=met.allowed if bounded else None,
            bounded=bounded,
        )
    return state
