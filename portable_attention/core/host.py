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
from portable_attention.core import eager, masking, plan, tile
from portable_attention.core.dropout import kept as kept_pairs
from portable_attention.core.problem import Call, Limits
from portable_attention.core.threads import Task, run_tasks

# exp(32) = 8e13 leaves room in float32 for sums over any number of keys.
_SMALL_SCORE = 32.0
# Far enough from overflow that adding a bias cannot reach it.
_FINITE_SCORE = 1e30
# Below this a denominator could have lost digits to underflow in the products that go with it.
_SMALL_DENOMINATOR = 1e-7
# Finding the largest norms costs a pass over the keys, which pays when several rows share it.
_ROWS_FOR_BOUND = 32
# Small heads are batched until a tile holds as many scores as one large tile.
_BUDGET = 1 << 18


def run(call: Call) -> tuple[Array, Array]:
    """Return the output (*batch, Hkv, G, Lq, Dv) and the lse (*batch, Hkv, G, Lq) of a call."""
    problem = call.problem
    output = np.empty(problem.output_shape, call.query.dtype)
    lse = np.empty(problem.output_shape[:-1], problem.compute_dtype)
    sizes = (*problem.batch, *problem.heads)
    block_q, block_k = plan.block_sizes(problem)
    capacity = plan.capacity(_BUDGET, block_q * block_k)
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

    def tile_of(self, name: str, columns: tuple[int, int]) -> Array:
        """Return a tile of the keys or values as BLAS wants it."""
        array = self.key if name == "key" else self.value
        if array.dtype == self.dtype and array.strides[-1] == array.itemsize:
            return array[..., slice(*columns), :]
        if self.call.problem.span is None:
            # Every block of rows reads all keys: widen them once.
            whole = self._once(name, lambda: np.ascontiguousarray(array, self.dtype))
            return whole[..., slice(*columns), :]
        return np.ascontiguousarray(array[..., slice(*columns), :], self.dtype)

    @property
    def largest_keys(self) -> Array:
        """The largest norm of a head's keys, squared: (..., 1, 1)."""
        return self._once("norms", self._find_largest_keys)

    def _find_largest_keys(self) -> Array:
        largest = np.zeros((*self.key.shape[:-2], 1, 1), self.dtype)
        length = self.call.problem.key_length
        for start in range(0, length, self.block_k):
            keys = self.tile_of("key", (start, min(start + self.block_k, length)))
            np.maximum(largest, _largest_norm(keys), out=largest)
        return largest


def _largest_norm(rows: Array) -> Array:
    squares = np.einsum("...d,...d->...", rows, rows)
    return squares.max(axis=-1, initial=0.0)[..., np.newaxis, np.newaxis]


def _attend(heads: Heads, rows: tuple[int, int], output: Array, lse: Array) -> None:
    """Write the results of a block of rows, for all heads of a chunk."""
    problem, backend = heads.call.problem, heads.call.backend
    dtype = heads.dtype
    query = np.array(heads.query[..., slice(*rows), :], dtype, order="C")
    query, late_scale = eager.scale_query(backend, query, problem)

    bounded = False
    # Scores that are known to be finite are -inf only where they are masked.
    finite: Any = False
    if problem.query_length >= _ROWS_FOR_BOUND:
        bound = np.sqrt(_largest_norm(query) * heads.largest_keys) * abs(late_scale)
        finite = bound < _FINITE_SCORE
        small = bound <= _SMALL_SCORE
        if problem.softcap is not None and problem.softcap <= _SMALL_SCORE:
            small = finite
        if heads.bias is None:
            bounded = bool(small.all())
            if not bounded and small.any():
                for single in heads.singles():
                    _attend(single, rows, output, lse)
                return
    place = (*heads.index, slice(*rows))
    found, logarithm, suspect = _attend_fast(heads, rows, query, late_scale, bounded, finite)
    output[place], lse[place] = found, logarithm
    if suspect.any():
        for single, wrong in zip(heads.singles(), suspect.ravel(), strict=True):
            if wrong:
                place = (*single.index, slice(*rows))
                output[place], lse[place] = eager.attend_rows(single, rows, heads.block_k)


def _attend_fast(
    heads: Heads,
    rows: tuple[int, int],
    query: Array,
    late_scale: float,
    bounded: bool,
    finite: Any,
) -> tuple[Array, Array, Array]:
    """Return output and lse of a block of rows, and which heads (*batch, Hkv, G) must be redone."""
    call, backend = heads.call, heads.call.backend
    problem = call.problem
    row_numbers = np.arange(*rows, dtype=np.int32)[:, np.newaxis]
    keys_of_rows = heads.keys_of_rows(row_numbers)
    shape = (*heads.lead, rows[1] - rows[0], 1)
    state = tile.start(
        backend, shape, problem.value_width, query, 0.0 if bounded else float("-inf")
    )
    found = plan.reach(heads.limits, rows, problem.key_length)
    for columns in plan.tiles(found, heads.block_k, problem.key_length):
        column_numbers = np.arange(*columns, dtype=np.int32)
        raw_bias = masking.block(heads.bias, rows, columns)
        limits = Limits() if found.covers(*columns) else heads.limits
        allowed = masking.both(
            [
                *masking.within_limits(limits, row_numbers, column_numbers),
                masking.block(heads.mask, rows, columns),
                masking.not_masked(raw_bias),
            ]
        )
        kept = None
        if keys_of_rows is not None:
            kept = kept_pairs(keys_of_rows, column_numbers, problem.dropout_rate)
        key, value = heads.tile_of("key", columns), heads.tile_of("value", columns)
        scores = tile.tile_scores(
            backend,
            query,
            key,
            scale=late_scale,
            softcap=problem.softcap,
            bias=masking.bias_block(backend, raw_bias, heads.dtype),
            allowed=None if bounded else allowed,
        )
        if bounded:
            state = tile.update_bounded(backend, state, scores, value, allowed=allowed, kept=kept)
        else:
            state = tile.update(backend, state, scores, value, kept)

    denominator = state.denominator
    empty = denominator == 0.0 if bounded else state.maximum == float("-inf")
    output, lse = tile.finish(
        backend,
        state,
        occupied=~empty if empty.any() else None,
        sinks=heads.sinks,
        keep_rate=1.0 - problem.dropout_rate,
    )
    doubtful = (denominator < _SMALL_DENOMINATOR) & ~empty if bounded else empty & ~finite
    fine = np.isfinite(denominator) & ~doubtful
    suspect = ~(fine.all(axis=(-1, -2)) & np.isfinite(state.accumulator).all(axis=(-1, -2)))
    return output, lse, suspect
