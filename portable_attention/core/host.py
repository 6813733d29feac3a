"""The schedule for host memory: tiles over a pool of threads, in buffers that are kept.

A block of rows is first computed as if its inputs were ordinary: without a running maximum where
a bound on the scores shows that exp cannot overflow, and without looking for NaN and infinities.
Those cannot hide: whatever they touch comes out not finite, or as a row that has seen nothing.
A head that shows either is computed again by `eager.attend_rows`, which selects where this
multiplies. Every decision is made head by head, so that no head's bits depend on another's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from portable_attention.backends import Array
from portable_attention.core import eager, plan, tile, windows
from portable_attention.core.bounded import Faults, attend_bounded, either, faults
from portable_attention.core.heads import Heads, Way, largest_norm
from portable_attention.core.problem import Call
from portable_attention.core.small import attend_small
from portable_attention.core.threads import Task, run_tasks

# exp(32) = 8e13 leaves room in float32 for sums over any number of keys.
_SMALL_SCORE = 32.0
# Rows that are computed a second time come in groups of these sizes.
_AGAIN, _SUM_AGAIN = 64, 32
# If a bias leads rows of more groups out of range, the block is computed again as a whole: a group
# costs about four times its share of that.
_MANY_LOST = 0.25
# Far enough from overflow that adding a bias cannot reach it.
_FINITE_SCORE = 1e30


def run(call: Call, dtype: Any) -> tuple[Array, Array]:
    """Return the output (*batch, Hkv, G, Lq, Dv) and the lse (*batch, Hkv, G, Lq) of a call."""
    found = attend_small(call, dtype)
    if found is not None:
        return found
    problem = call.problem
    output = np.empty(problem.output_shape, dtype)
    lse = np.empty(problem.output_shape[:-1], problem.compute_dtype)
    bands: dict[tuple[Any, ...], Array] = {}
    found_pieces = windows.pieces(call)

    def tasks() -> Iterator[Task]:
        for piece in found_pieces:
            outputs = piece.of_output(output, lse)
            for index in itertools.product(*piece.cuts):
                heads = piece.heads(index, bands)
                # The last rows reach the most keys under causal: they go first.
                for rows in reversed(piece.blocks_of_rows):
                    yield partial(_attend, heads, rows, *outputs)

    count = sum(
        len(piece.blocks_of_rows) * math.prod(len(cut) for cut in piece.cuts)
        for piece in found_pieces
    )
    run_tasks(tasks(), count, call.backend.ops.release)
    return output, lse


def _attend(
    heads: Heads,
    rows: tuple[int, int],
    output: Array,
    lse: Array,
    *,
    with_maximum: bool = False,
) -> None:
    """Write the results of a block of rows, for all heads of a chunk."""
    query = heads.query_rows(rows)
    ways, finite = _ways(heads, rows, query)
    way = Way.ANY if with_maximum else Way(ways.max())
    if way != Way.ANY and way != ways.min():
        for part in heads.alike(ways):
            _attend(part, rows, output, lse)
        return
    low = way == Way.BOUNDED_ABOVE
    if way == Way.ANY:
        found = Faults(attend_any(heads, rows, query, finite, output, lse))
    else:
        found = attend_bounded(heads, rows, query, finite, output, lse, low=low)
    _sum_again(heads, rows, found.near_one, output, lse)
    if found.wrong is None and found.harmed is None:
        return
    for single, met_garbage, lost in zip(
        heads.singles(),
        _by_head(heads, rows, found.wrong),
        _by_head(heads, rows, found.harmed),
        strict=True,
    ):
        if met_garbage.any():
            if way == Way.ANY:
                _attend_exactly(single, rows, output, lse)
                continue
            query = single.query_rows(rows)
            again = attend_bounded(single, rows, query, finite, output, lse, low=low, careful=True)
            _sum_again(single, rows, again.near_one, output, lse)
            (lost,) = _by_head(single, rows, again.harmed)  # noqa: PLW2901
        if heads.bias is not None and _share_of_groups(lost) > _MANY_LOST:
            _attend(single, rows, output, lse, with_maximum=True)
        elif lost.any():
            _attend_again(single, rows, lost, output, lse)


def _ways(heads: Heads, rows: tuple[int, int], query: Array) -> tuple[Any, Any]:
    """Return the way of each head, and whether its scores are known to be finite: (..., 1, 1).

    Those are -inf only where they are masked.
    """
    problem = heads.call.problem
    # Finding the largest norms is a pass over the keys, which does not pay for a few rows.
    if problem.query_length < plan.FEW_ROWS:
        return np.array(Way.ANY), np.False_
    norm, finite_rows = largest_norm(query)
    key_norm, finite_keys = heads.largest_keys
    bound = np.sqrt(norm) * np.sqrt(key_norm) * abs(problem.scale)
    small = bound <= _SMALL_SCORE
    finite = (bound < _FINITE_SCORE) & finite_rows & finite_keys
    if problem.softcap is not None and problem.softcap <= _SMALL_SCORE:
        small = bound < _FINITE_SCORE
    ways = np.where(small, Way.BOUNDED, Way.ANY)
    if heads.bias is not None and small.any():
        ways = np.minimum(ways, heads.ways_of_bias(rows))
    return ways, finite


def _share_of_groups(lost: Array) -> float:
    """Return in how many of the groups of `_attend_again` any row is marked, as a share."""
    groups = np.logical_or.reduceat(lost, np.arange(0, lost.size, _AGAIN))
    return float(groups.mean())


def _attend_exactly(heads: Heads, rows: tuple[int, int], output: Array, lse: Array) -> None:
    """Write the results of a block of rows, whatever the inputs hold."""
    place = (*heads.index, slice(*rows))
    output[place], lse[place] = eager.attend_rows(heads, rows, heads.block_k)


def _attend_again(
    heads: Heads, rows: tuple[int, int], lost: Array, output: Array, lse: Array
) -> None:
    """Write the results of those rows of a single head that are marked."""
    for here, marked in _groups_of(rows, lost, _AGAIN):
        place = (*heads.index, slice(*here))
        found, found_lse = eager.attend_rows(heads, here, heads.block_k)
        np.copyto(output[place], found, where=marked[:, np.newaxis])
        np.copyto(lse[place], found_lse, where=marked)


def _sum_again(
    heads: Heads, rows: tuple[int, int], near_one: Array | None, output: Array, lse: Array
) -> None:
    """Write the lse of those rows (..., q, 1) whose weights sum to nearly 1: its log is near 0.

    Relative to the maximum, the sum has all the digits that the log needs.
    """
    if near_one is None:
        return
    problem, backend, ops = heads.call.problem, heads.call.backend, heads.ops
    if heads.sinks is not None:  # they move the sum away from 1, or to it
        for single, marked in zip(heads.singles(), _by_head(heads, rows, near_one), strict=True):
            if marked.any():
                _attend_again(single, rows, marked, output, lse)
        return
    for here, marked in _groups_of(rows, near_one[..., 0], _SUM_AGAIN):
        query, late_scale = eager.scale_query(backend, heads.query_rows(here), problem)
        maximum, total = np.float32("-inf"), np.float32(0.0)
        for met in heads.tiles(here, heads.block_k, finite=True, narrow=True):
            scores = tile.tile_scores(
                backend,
                query,
                met.key,
                scale=late_scale,
                softcap=problem.softcap,
                bias=met.bias,
                allowed=met.allowed,
            )
            before, maximum = maximum, np.maximum(maximum, ops.row_max(scores))
            shift = tile.finite_shift(np, maximum)
            weights = ops.exp(ops.subtract(scores, shift))
            total = total * np.exp(before - shift) + ops.row_sum(weights)
        place = (*heads.index, slice(*here))
        np.copyto(lse[place], (shift + np.log(total))[..., 0], where=marked)


def _groups_of(
    rows: tuple[int, int], marked: Array, size: int
) -> Iterator[tuple[tuple[int, int], Array]]:
    """Return groups of rows any of which, of any head, are marked, (..., q), and their marks.

    They lie alike whichever rows are marked, so that the bits of a row depend on no other row.
    """
    for start in range(*rows, size):
        stop = min(start + size, rows[1])
        here = marked[..., start - rows[0] : stop - rows[0]]
        if here.any():
            yield (start, stop), here


def _by_head(heads: Heads, rows: tuple[int, int], marked: Array | None) -> Array:
    """Return which rows of each head are marked, (heads, rows), from (..., rows, 1) or None."""
    shape = (*heads.lead, rows[1] - rows[0], 1)
    marked = np.broadcast_to(np.False_ if marked is None else marked, shape)
    return marked.reshape(-1, shape[-2])


def attend_any(
    heads: Heads, rows: tuple[int, int], query: Array, finite: Any, output: Array, lse: Array
) -> Array | None:
    """Write the results of a block of rows, relative to a running maximum.

    Return the rows that met NaN or infinities, None if none did: the inputs are taken to be finite,
    and those whose scores are known to be so are marked by `finite`, (..., 1, 1).
    """
    problem, backend = heads.call.problem, heads.call.backend
    early, late_scale = eager.split_scale(problem.scale)
    query = query if early == 1.0 else query * early
    shape = (*heads.lead, rows[1] - rows[0], 1)
    state = tile.start(backend, shape, problem.value_width, query)
    for met in heads.tiles(rows, heads.block_k, finite=True):
        scores = tile.tile_scores(
            backend,
            query,
            met.key,
            scale=late_scale,
            softcap=problem.softcap,
            bias=met.bias,
            allowed=met.allowed,
        )
        state = tile.update(backend, state, scores, met.value, met.kept)
    empty = state.maximum == float("-inf")
    place = (*heads.index, slice(*rows))
    output[place], lse[place] = tile.finish(
        backend,
        state,
        occupied=~empty if empty.any() else None,
        sinks=heads.sinks,
        keep_rate=1.0 - problem.dropout_rate,
    )
    unsure = empty & np.logical_not(finite)
    return either(faults(state.accumulator, state.denominator).wrong, unsure)
