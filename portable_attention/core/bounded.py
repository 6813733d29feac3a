"""Rows whose scores are known to be small, in host memory: no maximum is needed, nor looked for.

Nothing is subtracted from the scores and nothing rescaled. Their exponentials are taken in whatever
base the library is fastest in, with the factor between the bases in the scale of the query.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from portable_attention.backends import Array
from portable_attention.core import eager, masking, tile
from portable_attention.core.heads import Heads

# Weights far below 1, or small sums of values under weights below 1, may have lost digits to
# underflow, which a maximum would have kept them from.
_SMALL_DENOMINATOR = 1e-7
_SMALL_SUM = 1e-30
_NEAR_ONE = (0.37, 2.72)  # the log of which lies within (-1, 1)


def attend_bounded(
    heads: Heads,
    rows: tuple[int, int],
    query: Array,
    finite: Array,
    output: Array,
    lse: Array,
    *,
    careful: bool = False,
) -> Faults:
    """Write the results of scores that are known to be small, whose exp needs no maximum.

    Return the rows that are to be computed again, those that met NaN or infinities with `careful`.
    That costs more, selects where this multiplies by what is allowed, and gives all other rows the
    same bits. `finite`, (..., 1, 1), marks the heads whose scores are all known to be finite.
    """
    ops = heads.ops
    scores_of = _Scores(heads, query)
    garbage = _Garbage(heads, rows[1] - rows[0]) if careful and not heads.ordinary_values else None
    shape = (*heads.lead, rows[1] - rows[0])
    total = np.zeros((*shape, 1), heads.dtype)
    sums = ops.buffer("sums", (*shape, heads.call.problem.value_width), heads.dtype)
    begun = False
    occupied = np.zeros(total.shape, bool) if careful else None
    for met in heads.tiles(rows, heads.block_k, trim=True):
        here = slice(*met.rows)
        weights = ops.exp_of_units(scores_of(here, met.key))
        if occupied is not None:
            occupied[..., here, :] |= True if met.allowed is None else _any(met.allowed)
        if met.allowed is not None and careful:
            weights = ops.select(weights, met.allowed, 0.0)
        elif met.allowed is not None:
            weights = ops.multiply(weights, met.allowed)
        total[..., here, :] += ops.row_sum(weights)
        if met.kept is not None:
            weights = ops.select(weights, met.kept, 0.0)
        value = met.value if garbage is None else garbage.remove(met, weights.shape)
        if begun or met.rows != (0, shape[-1]):
            if not begun:
                sums[...] = 0.0
            product = ops.product(weights, value)
            np.add(sums[..., here, :], product, out=sums[..., here, :])
        else:
            ops.product(weights, value, "sums")
        begun = True
    if not begun:
        sums[...] = 0.0
    if careful:
        # Only a score of +inf makes an infinite sum here; its row is NaN.
        total = np.where(np.isinf(total), np.nan, total)
    found = faults(sums, total)
    plain = found is NONE
    # A row that has seen nothing is empty, or has seen scores of -inf alone.
    if occupied is not None:
        found = found._replace(harmed=either(found.harmed, (total == 0.0) & occupied))
    elif not plain and not finite.all():
        found = found._replace(wrong=either(found.wrong, (total == 0.0) & ~finite))
    _finish(heads, rows, sums, total, garbage, output, lse, plain=plain)
    return found


class _Scores:
    """The scores of a block of queries, in the units that `HostOps.exp_of_units` takes."""

    def __init__(self, heads: Heads, query: Array) -> None:
        self.ops, self.softcap = heads.ops, heads.call.problem.softcap
        self.unit = self.ops.exponent_unit(heads.dtype)
        scale = heads.call.problem.scale
        if self.softcap is None:
            scale *= self.unit
        early, self.late_scale = eager.split_scale(scale, largest=1.5)
        self.query = query if early == 1.0 else self.ops.scaled(query, early, "query")

    def __call__(self, rows: slice, key: Array) -> Array:
        ops, cap = self.ops, self.softcap
        scores = ops.scores(self.query[..., rows, :], key)
        if self.late_scale != 1.0:
            scores = ops.multiply(scores, self.late_scale)
        if cap is not None:
            scores = ops.multiply(ops.tanh(ops.divide(scores, cap)), cap * self.unit)
        return scores


class _Garbage:
    """The values of some heads that are not finite, or too large to be summed as they are."""

    def __init__(self, heads: Heads, rows: int) -> None:
        self.heads = heads
        shape = (*heads.lead, rows, heads.call.problem.value_width)
        self.infinite = np.zeros(shape, heads.dtype), np.zeros(shape, heads.dtype)

    def remove(self, met: eager.Tile, shape: tuple[int, ...]) -> Array:
        """Return the values of a tile without it; remember which rows attend what was removed."""
        backend = self.heads.call.backend
        attended = masking.both([met.allowed, met.kept])
        found = eager.add_infinities(backend, None, met.value, attended, shape)
        for seen, added in zip(self.infinite, found, strict=True):
            seen[..., slice(*met.rows), :] += added
        return backend.as_finite(met.value) * self.heads.value_factor

    def restore(self, output: Array, lse: Array) -> Array:
        """Return an output with what was removed."""
        output = output / self.heads.value_factor
        return output + masking.infinite_part(self.heads.call.backend, *self.infinite, lse)


class Faults(NamedTuple):
    """Rows (..., q, 1) of weights without a maximum that are to be looked at again; None: none."""

    wrong: Array | None = None  # not finite
    harmed: Array | None = None  # overflowed, or lost digits to underflow
    near_one: Array | None = None  # whose sum of weights is near 1, and its log lost digits


NONE = Faults()


def faults(sums: Array, total: Array) -> Faults:
    """Return the rows that need another look, for their sums (..., q, Dv) and those of weights."""
    # A sum is finite only if all its terms are.
    of_all = np.add.reduce(sums, axis=None) + np.add.reduce(total, axis=None)
    if not math.isfinite(of_all):
        finite = _all_finite(sums)
        wrong = ~(np.isfinite(total) & finite)
        # A finite sum of weights means finite scores, and values whose sum overflowed.
        harmed = np.isfinite(total) & ~finite
    elif np.minimum.reduce(total, axis=None) >= _NEAR_ONE[1]:
        return NONE
    else:
        wrong = harmed = np.zeros(total.shape, bool)
    below_one = total < 1.0
    harmed = (harmed | (total < _SMALL_DENOMINATOR)) & (total != 0.0)
    below_one &= total != 0.0
    if below_one.any():
        small = np.zeros_like(harmed)
        small[below_one] = (np.abs(sums[below_one[..., 0]]) < _SMALL_SUM).any(axis=-1)
        harmed |= small
    near_one = (total > _NEAR_ONE[0]) & (total < _NEAR_ONE[1]) & ~harmed
    return Faults(*(rows if rows.any() else None for rows in (wrong, harmed, near_one)))


def _finish(
    heads: Heads,
    rows: tuple[int, int],
    sums: Array,
    total: Array,
    garbage: _Garbage | None,
    output: Array,
    lse: Array,
    *,
    plain: bool,
) -> None:
    """Write the output and lse of bounded scores; those of `plain` rows are all above 0."""
    place = (*heads.index, slice(*rows))
    empty = np.False_ if plain else total == 0.0
    some_empty = bool(empty.any())
    if garbage is None and heads.sinks is None and heads.call.problem.dropout_rate == 0.0:
        lse[place] = np.log(total[..., 0])
        divisor = np.where(empty, 1.0, total) if some_empty else total
        target = output[place]
        if target.dtype == sums.dtype:
            np.divide(sums, divisor, out=target)
        else:
            target[...] = np.divide(sums, divisor, out=sums)
        return
    found, found_lse = tile.finish(
        heads.call.backend,
        tile.SoftmaxState(sums, np.where(empty, float("-inf"), np.zeros_like(total)), total),
        occupied=~empty if some_empty else None,
        sinks=heads.sinks,
        keep_rate=1.0 - heads.call.problem.dropout_rate,
    )
    output[place] = found if garbage is None else garbage.restore(found, found_lse)
    lse[place] = found_lse


def _any(allowed: Array) -> Array:
    return allowed.any(axis=-1, keepdims=True)


def _all_finite(sums: Array) -> Array:
    return np.isfinite(sums).all(axis=-1, keepdims=True)


def either(rows: Array | None, others: Array) -> Array | None:
    """Return the union of rows; None stands for none."""
    if not others.any():
        return rows
    return others if rows is None else rows | others
