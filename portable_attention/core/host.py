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
from portable_attention.core.bounded import attend_bounded, either, faults
from portable_attention.core.heads import Heads, Way, largest_norm
from portable_attention.core.problem import Call
from portable_attention.core.small import attend_small
from portable_attention.core.threads import Task, run_tasks

# exp(32) = 8e13 leaves room in float32 for sums over any number of keys.
_SMALL_SCORE = 32.0
# Rows that are computed a second time come in groups of this size.
_AGAIN = 64
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
    harmed = None
    if way == Way.ANY:
        wrong = attend_any(heads, rows, query, finite, output, lse)
    else:
        wrong, harmed = attend_bounded(heads, rows, query, finite, output, lse, low=low)
    if wrong is None and harmed is None:
        return
    for single, met_garbage, lost in zip(
        heads.singles(), _by_head(heads, rows, wrong), _by_head(heads, rows, harmed), strict=True
    ):
        if met_garbage.any():
            if way == Way.ANY:
                _attend_exactly(single, rows, output, lse)
                continue
            query = single.query_rows(rows)
            _, found = attend_bounded(
                single, rows, query, finite, output, lse, low=low, careful=True
            )
            (lost,) = _by_head(single, rows, found)  # noqa: PLW2901
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
    """Write the results of those rows of a single head that are marked.

    They are computed in groups that lie alike whichever rows are marked, and no other is written,
    so that the bits of a row depend on no other row.
    """
    for start in range(*rows, _AGAIN):
        stop = min(start + _AGAIN, rows[1])
        here = lost[start - rows[0] : stop - rows[0]]
        if here.any():
            place = (*heads.index, slice(start, stop))
            found, found_lse = eager.attend_rows(heads, (start, stop), heads.block_k)
            output[place] = np.where(here[:, np.newaxis], found, output[place])
            lse[place] = np.where(here, found_lse, lse[place])


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
    wrong, _ = faults(state.accumulator, state.denominator)
    return either(wrong, unsure)
