"""The gradient of one block of rows, tile by tile.

The weights are made again from the scores and the lse, so nothing of the size of the scores is
kept between the passes: Rabe and Staats (2021), in the form of Dao et al., "FlashAttention" (2022),
algorithm 4. With p the weights, o the output and do, dlse the cotangents of output and lse,

    dv = p^T do,   dp = do v^T,   ds = p (dp - rowsum(do o) + dlse),   dq = ds k,   dk = ds^T q.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from portable_attention.backends import Array
from portable_attention.core import plan, tile
from portable_attention.core.eager import Part, Tile, scale_query
from portable_attention.core.problem import Call, Problem

_NEG_INF = float("-inf")
# Up to here the lse is rounded no more coarsely than scores of its size are.
_FAR_LSE = 64.0

# Takes a name ("key", "value" or "bias"), the columns of a tile, and its gradient.
Emit = Callable[[str, tuple[int, int], Array], None]


class Tiles(Protocol):
    """What makes the two arrays of the size of a tile."""

    def weights(self, met: Tile) -> tuple[Array, Array | None]:
        """Return the weights, from the lse, and the derivative of the softcap if there is one."""

    def d_weights(self, met: Tile, *, careful: bool) -> Array:
        """Return do v^T - rowsum(do o) + dlse; `careful` leaves out values that are not finite."""


@dataclass(frozen=True)
class Cotangents:
    """What the backward pass is given, all in the dtype of the scores."""

    output: Array  # (*batch, Hkv, G, Lq, Dv), of the forward pass
    lse: Array  # (*batch, Hkv, G, Lq)
    d_output: Array  # as output
    d_lse: Array | None  # as lse
    # Whether the gradient of a bias is wanted: it may be as large as the scores.
    of_bias: bool = True

    def map(self, convert: Callable[[Array], Array]) -> Cotangents:
        arrays = {name: getattr(self, name) for name in ("output", "lse", "d_output", "d_lse")}
        return replace(
            self,
            **{name: convert(array) for name, array in arrays.items() if array is not None},
        )

    def wanted(self, call: Call) -> dict[str, Array]:
        """Return the operands whose gradients are wanted."""
        names = ("query", "key", "value", *(["bias"] if self.of_bias else []), "sinks")
        operands = {name: getattr(call, name) for name in names}
        return {name: array for name, array in operands.items() if array is not None}

    def part(self, index: plan.Index) -> Cotangents:
        return self.map(lambda array: plan.take(array, index))


def row_gradients(
    part: Part,
    rows: tuple[int, int],
    block_k: int,
    given: Cotangents,
    emit: Emit,
    *,
    careful: bool,
) -> tuple[Array, Array | None]:
    """Emit the gradients of keys, values and bias; return those of the query and the sinks.

    `given` belongs to the part. Without `careful`, inputs are taken to be finite: what is not
    comes out as a gradient that is not finite either.
    """
    call, backend = part.call, part.call.backend
    problem, xp, ops = call.problem, backend.xp, backend.ops
    dtype = backend.dtype(problem.compute_dtype)
    here = slice(*rows)
    d_output, inner, lse, shift = _row_terms(xp, given, here, careful=careful)
    query, late_scale = scale_query(backend, part.query_rows(rows), problem)
    tiles = _Unfolded(part, query, late_scale, shift, d_output, inner)
    far = xp.isfinite(lse) & (xp.abs(lse) > _FAR_LSE)
    if xp.any(far):
        # What the weights below must be multiplied by, at the rows rather than at the tiles.
        factor = 1.0 / _total(part, rows, block_k, tiles)
        factor = xp.where(far, factor, xp.ones_like(factor))
        d_output, inner = d_output * factor, inner * factor
        tiles = _Unfolded(part, query, late_scale, shift, d_output, inner)
    plain_query = finite_or_zero(xp, query) if careful else query
    folded: Tiles | None = None
    if late_scale == 1.0:
        folded = part.fold(query, shift, d_output, inner)
    made_by: Tiles = folded or tiles
    d_query = xp.zeros(
        (*part.lead, rows[1] - rows[0], problem.width), dtype=dtype, device=call.device
    )

    for met in part.tiles(rows, block_k):
        _, columns, key, _, bias, allowed, kept = met
        weights, slope = made_by.weights(met)
        if careful:
            key = finite_or_zero(xp, key)
            if allowed is not None:  # in a row whose lse is NaN
                weights = ops.select(weights, allowed, 0.0)
        d_weights = made_by.d_weights(met, careful=careful)
        used = weights if kept is None else xp.where(kept, weights * _share(problem), 0.0)
        emit("value", columns, ops.transposed_product(used, d_output))
        d_scores = ops.multiply(d_weights, weights)
        if careful and allowed is not None:
            d_scores = ops.select(d_scores, allowed, 0.0)
        if bias is not None and given.of_bias:
            emit("bias", columns, d_scores)
        if slope is not None:
            d_scores = d_scores * slope
        if late_scale != 1.0:
            d_scores = d_scores * late_scale
        emit("key", columns, ops.transposed_product(d_scores, plain_query))
        d_query = ops.add(d_query, ops.product(d_scores, key))

    d_sinks = None
    if part.sinks is not None:
        share_of_sink = xp.exp(part.sinks - shift)
        # An infinite negative sink counts for nothing, whatever the row holds.
        d_sinks = xp.where(share_of_sink == 0.0, 0.0, -(share_of_sink * inner))
    early_scale = problem.scale if late_scale == 1.0 else 1.0
    return ops.multiply(d_query, early_scale), d_sinks


@dataclass(frozen=True)
class _Unfolded:
    """Tiles made pass by pass, whatever the options."""

    part: Part
    query: Array
    late_scale: float
    shift: Array
    d_output: Array
    inner: Array

    def weights(self, met: Tile) -> tuple[Array, Array | None]:
        """Return the weights, from the lse, and the derivative of the softcap if there is one."""
        backend, ops = self.part.call.backend, self.part.call.backend.ops
        scores, slope = tile.capped_scores(
            backend,
            self.query,
            met.key,
            scale=self.late_scale,
            softcap=self.part.call.problem.softcap,
            allowed=met.allowed,
            slope=True,
        )
        if met.bias is not None:
            scores = ops.add(scores, met.bias)
        if met.allowed is not None:
            scores = ops.select(scores, met.allowed, _NEG_INF)
        return ops.exp(ops.subtract(scores, self.shift)), slope

    def d_weights(self, met: Tile, *, careful: bool) -> Array:
        """Return do v^T - rowsum(do o) + dlse, after dropout."""
        backend, ops = self.part.call.backend, self.part.call.backend.ops
        value = finite_or_zero(backend.xp, met.value) if careful else met.value
        found = ops.scores(self.d_output, value, "d_weights")
        if met.kept is not None:
            found = ops.multiply(found, _share(self.part.call.problem))
            found = ops.select(found, met.kept, 0.0)
        return ops.subtract(found, self.inner)


def _share(problem: Problem) -> float:
    """Return what a weight is multiplied by that dropout keeps."""
    return 1.0 / (1.0 - problem.dropout_rate) if problem.dropout_rate < 1.0 else 0.0


def _row_terms(
    xp: Any, given: Cotangents, here: slice, *, careful: bool
) -> tuple[Array, Array, Array, Array]:
    """Return do (..., q, D), rowsum(do o) - dlse, the lse and what stands for it in exp."""
    lse = xp.expand_dims(given.lse[..., here], axis=-1)
    d_output = given.d_output[..., here, :]
    if careful:
        # Nothing comes back through a row that attends nothing.
        d_output = xp.where(lse == _NEG_INF, 0.0, d_output)
    d_lse = None if given.d_lse is None else xp.expand_dims(given.d_lse[..., here], axis=-1)
    if careful and d_lse is not None:
        d_lse = xp.where(lse == _NEG_INF, 0.0, d_lse)
    inner = xp.sum(d_output * given.output[..., here, :], axis=-1, keepdims=True)
    if d_lse is not None:
        inner = inner - d_lse
    return d_output, inner, lse, tile.finite_shift(xp, lse)


def _total(
    part: Part,
    rows: tuple[int, int],
    block_k: int,
    tiles: _Unfolded,
) -> Array:
    """Return the sum of the weights of each row as the lse gives them: 1, up to its rounding.

    A large lse has lost the log of the sum beside the maximum: of three keys under a bias of -1e9,
    each would get a weight of 1.
    """
    backend, xp = part.call.backend, part.call.backend.xp
    total = xp.zeros_like(tiles.shift)
    if part.sinks is not None:
        total = total + xp.exp(part.sinks - tiles.shift)
    for met in part.tiles(rows, block_k):
        weights, _ = tiles.weights(met)
        total = total + backend.ops.row_sum(weights)
    return total


def finite_or_zero(xp: Any, array: Array) -> Array:
    """Replace NaN and infinities by 0."""
    return xp.where(xp.isfinite(array), array, 0.0)


def sum_to(xp: Any, gradient: Array, shape: tuple[int, ...]) -> Array:
    """Sum the axes along which an operand of this shape was broadcast."""
    axes = tuple(
        axis
        for axis, (full, size) in enumerate(zip(gradient.shape, shape, strict=True))
        if size == 1 and full != 1
    )
    return xp.sum(gradient, axis=axes, keepdims=True) if axes else gradient
