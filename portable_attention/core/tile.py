"""The one tile: a block of queries against a block of keys, and the softmax state it adds to.

A state is (accumulator, maximum, denominator): the output before division, the largest score seen
and the sum of exponentials, both relative to that maximum. States of disjoint keys are joined by
rescaling to the common maximum, the online softmax of Milakov and Gimelshein, "Online normalizer
calculation for softmax" (2018), and of Rabe and Staats, "Self-attention does not need O(n^2)
memory" (2021).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from portable_attention.backends import Array, Backend

_NEG_INF = float("-inf")


class SoftmaxState(NamedTuple):
    """What has been seen of some rows so far; rows stand on axis -2."""

    accumulator: Array  # (..., q, Dv): sum of exp(s - maximum) v
    maximum: Array  # (..., q, 1): -inf before anything was seen
    denominator: Array  # (..., q, 1): sum of exp(s - maximum)


def start(
    backend: Backend,
    shape: tuple[int, ...],
    value_width: int,
    like: Array,
) -> SoftmaxState:
    """Return the state of rows (..., q, 1) that have seen nothing."""
    xp = backend.xp
    options: dict[str, Any] = {"dtype": like.dtype, "device": backend.device(like)}
    return SoftmaxState(
        xp.zeros((*shape[:-1], value_width), **options),
        xp.full(shape, _NEG_INF, **options),
        xp.zeros(shape, **options),
    )


def tile_scores(
    backend: Backend,
    query: Array,
    key: Array,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    bias: Array | None = None,
    allowed: Array | None = None,
    finite: bool = False,
) -> Array:
    """Return the scores of a tile, -inf where a pair is not allowed.

    Masking is a selection and comes last: what stands in a pair that is not allowed is not felt.
    `finite` says that query and key are known to be finite.
    """
    ops = backend.ops
    scores, _ = capped_scores(
        backend, query, key, scale=scale, softcap=softcap, allowed=allowed, finite=finite
    )
    if bias is not None:
        scores = ops.add(scores, bias)
    if allowed is not None:
        scores = ops.select(scores, allowed, _NEG_INF)
    return scores


def capped_scores(
    backend: Backend,
    query: Array,
    key: Array,
    *,
    scale: float,
    softcap: float | None,
    allowed: Array | None,
    slope: bool = False,
    finite: bool = False,
) -> tuple[Array, Array | None]:
    """Return the scores before bias and masking, and the derivative of the softcap if wanted."""
    ops = backend.ops
    scores = ops.scores(query, key) if finite else backend.safe_scores(query, key)
    if scale != 1.0:
        scores = ops.multiply(scores, scale)
    if softcap is None:
        return scores, None
    if allowed is not None:
        # A NaN here would come back in the derivative of tanh, multiplied by 0.
        scores = ops.select(scores, allowed, 0.0)
    ratio = ops.tanh(ops.divide(scores, softcap))
    derivative = 1.0 - ratio * ratio if slope else None
    return ops.multiply(ratio, softcap), derivative


def update(
    backend: Backend,
    state: SoftmaxState,
    scores: Array,
    value: Array,
    kept: Array | None = None,
) -> SoftmaxState:
    """Add a tile of scores and its finite values to a state; `kept` are the pairs dropout keeps."""
    ops, xp = backend.ops, backend.xp
    accumulator, maximum, denominator = state
    maximum = xp.maximum(maximum, backend.stop_gradient(ops.row_max(scores)))
    shift = finite_shift(xp, maximum)
    decay = xp.exp(state.maximum - shift)
    weights = ops.exp(ops.subtract(scores, shift))
    denominator = ops.add(ops.multiply(denominator, decay), ops.row_sum(weights))
    accumulator = ops.multiply(accumulator, decay)
    if kept is not None:
        weights = ops.select(weights, kept, 0.0)
    return SoftmaxState(ops.add(accumulator, ops.product(weights, value)), maximum, denominator)


def finish(
    backend: Backend,
    state: SoftmaxState,
    *,
    occupied: Array | None,
    sinks: Array | None,
    keep_rate: float,
) -> tuple[Array, Array]:
    """Return output (..., q, Dv) and lse (..., q) of a state.

    `occupied` (..., q, 1) says which rows may attend any key; None means that all of them do.
    """
    xp = backend.xp
    accumulator, maximum, denominator = state
    shift = finite_shift(xp, maximum)
    if sinks is not None:
        level = xp.maximum(maximum, backend.stop_gradient(sinks))
        level_shift = finite_shift(xp, level)
        # In two steps: far below a sink, one factor alone would underflow before the sums do.
        decay = xp.exp((maximum - level_shift) * 0.5)
        denominator = denominator * decay * decay + xp.exp(sinks - level_shift)
        accumulator = accumulator * decay * decay
        shift = level_shift
    if keep_rate != 1.0:
        accumulator = accumulator * (1.0 / keep_rate if keep_rate else 0.0)
    if occupied is None:
        return accumulator / denominator, xp.squeeze(shift + xp.log(denominator), axis=-1)
    # The inner selection keeps the division out of empty rows: no derivative is 0 times NaN.
    full = occupied if sinks is None else occupied | (denominator != 0.0)
    safe = xp.where(full, denominator, 1.0)
    output = xp.where(occupied, accumulator / safe, 0.0)
    lse = xp.where(full, shift + xp.log(safe), _NEG_INF)
    return output, xp.squeeze(lse, axis=-1)


def finite_shift(xp: Any, maximum: Array) -> Array:
    """Return the maximum, 0 where it is -inf: exp(-inf - 0) is the 0 that -inf - -inf is not."""
    return xp.where(maximum == _NEG_INF, 0.0, maximum)
