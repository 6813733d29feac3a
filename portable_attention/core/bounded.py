"""Rows whose scores are known to be small, in host memory: no maximum is needed, nor looked for.

Nothing is subtracted from the scores and nothing rescaled. Their exponentials are taken in whatever
base the library is fastest in, with the factor between the bases in the scale of the query.

A bias is not bounded, only looked at here and there (`Heads.ways_of_bias`): where it leads out of
the range of exp, the sums of the row show it, and the row is computed again.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from portable_attention.backends import Array
from portable_attention.core import eager, masking, tile
from portable_attention.core.heads import Heads

# Weights far below 1, or small sums of values under weights below 1, may have lost digits to
# underflow, which a maximum would have kept them from.
_SMALL_DENOMINATOR = 1e-7
_SMALL_SUM = 1e-30
_NEAR_ONE = (0.37, 2.72)  # the log of which lies within (-1, 1)
# Beside a bias. Steep slopes leave a row one key that counts, so that a good part of the
# denominators lies within (0.37, 2.72), but few where the log has lost more than two of its digits.
_NEAR_ONE_BIASED = (0.99, 1.01)
# Of a sum of a few exponentials of a bias: exp(32) and more, whose rounding would tell.
_LARGE_DENOMINATOR = 1e15


def attend_bounded(
    heads: Heads,
    rows: tuple[int, int],
    query: Array,
    finite: Array,
    output: Array,
    lse: Array,
    *,
    low: bool = False,
    careful: bool = False,
) -> Faults:
    """Write the results of scores that are known to be small, whose exp needs no maximum.

    Return the rows that are to be computed again, those that met NaN or infinities with `careful`.
    That costs more, selects where this multiplies by what is allowed, and gives all other rows the
    same bits. `finite`, (..., 1, 1), marks the heads whose scores are all known to be finite, and
    `low` says that a bias is far below 0 in places.
    """
    ops = heads.ops
    biased = heads.bias is not None
    weights_of = _Weights(heads, query, low=low, careful=careful)
    garbage = _Garbage(heads, rows[1] - rows[0]) if careful and not heads.ordinary_values else None
    shape = (*heads.lead, rows[1] - rows[0])
    total = np.zeros((*shape, 1), heads.dtype)
    sums = ops.buffer("sums", (*shape, heads.call.problem.value_width), heads.dtype)
    begun = False
    occupied = np.zeros(total.shape, bool) if careful else None
    for met in heads.tiles(rows, heads.block_k, trim=True, finite=not careful):
        here = slice(*met.rows)
        weights = weights_of(here, met)
        if occupied is not None:
            occupied[..., here, :] |= True if met.allowed is None else _any(met.allowed)
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
    if careful and not biased:
        # Only a score of +inf makes an infinite sum here; its row is NaN.
        total = np.where(np.isinf(total), np.nan, total)
    found = faults(sums, total, biased=biased)
    plain = found is NONE
    if not plain:
        # A row that has seen nothing is empty, or has seen scores of -inf or a very low bias alone.
        nothing = total == 0.0
        if biased and occupied is None and nothing.any():
            occupied = _occupied(heads, rows)
        if occupied is not None:
            found = found._replace(harmed=either(found.harmed, nothing & occupied))
        elif not finite.all():
            found = found._replace(wrong=either(found.wrong, nothing & ~finite))
    _finish(heads, rows, sums, total, garbage, output, lse, plain=plain)
    return found


class _Weights:
    """The exponentials of the scores of a block of queries, 0 where a pair is not allowed."""

    def __init__(self, heads: Heads, query: Array, *, low: bool, careful: bool) -> None:
        self.ops, self.softcap = heads.ops, heads.call.problem.softcap
        self.low = low
        # A bias that grows along the keys may overflow exp beyond the diagonal.
        self.selects = careful or (heads.bias is not None and bool(heads.limits.items()))
        # A bias is added to the scores as they are.
        self.unit = self.ops.exponent_unit(heads.dtype) if heads.bias is None else 1.0
        scale = heads.call.problem.scale
        if self.softcap is None:
            scale *= self.unit
        early, self.late_scale = eager.split_scale(scale, largest=1.5)
        self.query = query if early == 1.0 else self.ops.scaled(query, early, "query")

    def __call__(self, rows: slice, met: eager.Tile) -> Array:
        ops, cap = self.ops, self.softcap
        scores = ops.scores(self.query[..., rows, :], met.key)
        if self.late_scale != 1.0:
            scores = ops.multiply(scores, self.late_scale)
        if cap is not None:
            scores = ops.multiply(ops.tanh(ops.divide(scores, cap)), cap * self.unit)
        if met.bias is None:
            weights = ops.exp_of_units(scores)
        else:
            scores = ops.add(scores, met.bias)
            weights = ops.exp(scores) if self.low else ops.exp_of_units(self._in_units(scores))
        if met.allowed is None:
            return weights
        if self.selects:
            return ops.select(weights, met.allowed, 0.0)
        return ops.multiply(weights, met.allowed)

    def _in_units(self, scores: Array) -> Array:
        unit = self.ops.exponent_unit(scores.dtype)
        return scores if unit == 1.0 else self.ops.multiply(scores, unit)


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


def faults(sums: Array, total: Array, *, biased: bool = False) -> Faults:
    """Return the rows that need another look, for their sums (..., q, Dv) and those of weights."""
    near_one = _NEAR_ONE_BIASED if biased else _NEAR_ONE
    too_large = _LARGE_DENOMINATOR if biased else math.inf
    # A sum is finite only if all its terms are.
    of_all = float(np.add.reduce(sums, axis=None) + np.add.reduce(total, axis=None))
    if not math.isfinite(of_all):
        finite = _all_finite(sums)
        harmed = (total > too_large) if biased else np.zeros(total.shape, bool)
        wrong = ~(np.isfinite(total) & finite) & ~harmed
        # A finite sum of weights means finite scores, and values whose sum overflowed.
        harmed |= np.isfinite(total) & ~finite
    elif total.min() >= near_one[1] and total.max() <= too_large:
        return NONE
    else:
        wrong, harmed = np.zeros(total.shape, bool), total > too_large
    seen = total != 0.0
    harmed |= total < _SMALL_DENOMINATOR
    below_one = (total < 1.0) & seen
    if below_one.any():
        small = np.zeros_like(harmed)
        small[below_one] = (np.abs(sums[below_one[..., 0]]) < _SMALL_SUM).any(axis=-1)
        harmed |= small
    harmed &= seen
    near = (total > near_one[0]) & (total < near_one[1]) & ~harmed
    return Faults(*(rows if rows.any() else None for rows in (wrong, harmed, near)))


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


def _occupied(heads: Heads, rows: tuple[int, int]) -> Array:
    """Return which of the rows may attend any key, as an array that broadcasts to (..., q, 1)."""
    found: Any = False
    for met in heads.tiles(rows, heads.block_k):
        found = eager.any_allowed(np, found, met.allowed)
    return np.asarray(found)


def _any(allowed: Array) -> Array:
    return allowed.any(axis=-1, keepdims=True)


def _all_finite(sums: Array) -> Array:
    return np.isfinite(sums).all(axis=-1, keepdims=True)


def either(rows: Array | None, others: Array) -> Array | None:
    """Return the union of rows; None stands for none."""
    if not others.any():
        return rows
    return others if rows is None else rows | others
