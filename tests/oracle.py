"""Attention as docs/semantics.md states it: dense, explicit, float64, and nothing of the package.

Written for reading. Every array has the shape of the scores, (B..., Hq, Lq, Lk), or is summed from
one that has; keys and values are repeated for the query heads that share them; nothing is skipped
and nothing is fast.

B stands for any batch axes, Hq and Hkv for query and key/value heads, Lq and Lk for the lengths,
D for the width of query and key, Dv for the width of the value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np


class Result(NamedTuple):
    """What a call gives: the output, and the natural log of the softmax denominator."""

    output: np.ndarray
    lse: np.ndarray


@dataclass(frozen=True)
class Steps:
    """Everything a call makes on its way, each of the shape that its comment gives."""

    query: np.ndarray  # (B..., Hq, Lq, D)
    key: np.ndarray  # (B..., Hq, Lk, D), repeated for the query heads
    value: np.ndarray  # (B..., Hq, Lk, Dv), repeated for the query heads
    scale: float
    score: np.ndarray  # (B..., Hq, Lq, Lk), after softcap and bias
    slope: np.ndarray  # (B..., Hq, Lq, Lk): d(capped score) / d(score)
    allowed: np.ndarray  # (B..., Hq, Lq, Lk), bool
    top: np.ndarray  # (B..., Hq, Lq): what is subtracted from the scores, their maximum
    denominator: np.ndarray  # (B..., Hq, Lq), of the softmax, relative to that
    weights: np.ndarray  # (B..., Hq, Lq, Lk), before dropout
    sink_weight: np.ndarray  # (B..., Hq, Lq): what the sink takes of each row
    kept: np.ndarray  # (B..., Hq, Lq, Lk), bool: allowed and not dropped
    rate: float
    output: np.ndarray  # (B..., Hq, Lq, Dv)
    lse: np.ndarray  # (B..., Hq, Lq)

    @property
    def dropped_weights(self) -> np.ndarray:
        """The weights that meet the values: kept ones over 1 - rate, and 0."""
        return _after_dropout(self.weights, self.kept, self.rate)


def attention(query, key, value, *, layout="bhld", **options: Any) -> Result:
    """Return the output and the lse of a call, in float64.

    Options are those of `portable_attention.attention`, except that dropout is given as ``rate``
    and ``keep``, the boolean array of the pairs that stay, and that ``precision`` is the dtype in
    which everything is computed: with float32 this is an honest dense implementation, and what it
    loses against float64 measures what may be lost.
    """
    steps = steps_of(query, key, value, layout=layout, **options)
    output, lse = steps.output, steps.lse
    if layout == "blhd":
        output = output.swapaxes(-3, -2)
    elif query.ndim == key.ndim == value.ndim == 2:
        output, lse = output[0], lse[0]
    return Result(output, lse)


def steps_of(
    query,
    key,
    value,
    *,
    mask=None,
    bias=None,
    causal=False,
    window=None,
    query_offset=None,
    query_lengths=None,
    key_lengths=None,
    scale=None,
    softcap=None,
    sinks=None,
    rate=0.0,
    keep=None,
    layout="bhld",
    precision=np.float64,
) -> Steps:
    """Return every step of a call; `attention` says what the arguments are."""
    query, key, value = _heads_first(query, key, value, layout, precision)
    width, heads = query.shape[-1], query.shape[-3]
    key = np.repeat(key, heads // key.shape[-3], axis=-3)
    value = np.repeat(value, heads // value.shape[-3], axis=-3)
    if scale is None:
        scale = 1 / math.sqrt(width) if width else 0.0
    scale = precision(scale)

    with np.errstate(all="ignore"):
        score = scale * (query @ key.swapaxes(-1, -2))  # (B..., Hq, Lq, Lk)
        batch = np.broadcast_shapes(score.shape[:-3], value.shape[:-3])
        score = np.broadcast_to(score, batch + score.shape[-3:])
        slope = np.ones_like(score)
        if softcap is not None:
            bounded = np.tanh(score / precision(softcap))
            score, slope = precision(softcap) * bounded, 1 - bounded**2
        allowed = allowed_pairs(
            score.shape,
            mask=mask,
            causal=causal,
            window=window,
            query_offset=query_offset,
            query_lengths=query_lengths,
            key_lengths=key_lengths,
        )
        if bias is not None:
            bias = np.asarray(bias).astype(precision)
            score = score + bias
            allowed = allowed & ~np.isneginf(bias)
        top, denominator, weights, sink_weight, lse = _softmax(score, allowed, sinks)
        kept = allowed if keep is None else allowed & keep
        output = select_product(_after_dropout(weights, kept, rate), value, kept)
    return Steps(
        query=query,
        key=key,
        value=value,
        scale=scale,
        score=score,
        slope=slope,
        allowed=allowed,
        top=top,
        denominator=denominator,
        weights=weights,
        sink_weight=sink_weight,
        kept=kept,
        rate=rate,
        output=output,
        lse=lse,
    )


def allowed_pairs(
    shape,
    *,
    mask=None,
    causal=False,
    window=None,
    query_offset=None,
    query_lengths=None,
    key_lengths=None,
) -> np.ndarray:
    """Return which pairs (i, j) all options but the bias allow, in the shape of the scores."""
    *_, query_length, key_length = shape
    valid_queries = _per_item(query_length if query_lengths is None else query_lengths)
    valid_keys = _per_item(key_length if key_lengths is None else key_lengths)
    if isinstance(query_offset, str):
        offset = {"start": _per_item(0), "end": valid_keys - valid_queries}[query_offset]
    else:
        offset = _per_item(0 if query_offset is None else query_offset)
    row = np.arange(query_length)[:, None]
    column = np.arange(key_length)  # where the key stands
    position = row + offset  # where the query stands

    allowed = (row < valid_queries) & (column < valid_keys)
    if causal:
        allowed = allowed & (column <= position)
    if window is not None:
        left, right = window
        if left is not None:
            allowed = allowed & (position - left <= column)
        if right is not None:
            allowed = allowed & (column <= position + right)
    if mask is not None:
        allowed = allowed & mask
    return np.broadcast_to(allowed, shape)


def select_product(weights, values, felt) -> np.ndarray:
    """Return ``weights @ values`` in which row i feels value j only where ``felt[i, j]``.

    A finite value counts by its weight. One that is NaN or infinite, and felt, makes its column NaN
    or infinite, whatever its weight.
    """
    finite = np.where(felt, weights, 0) @ np.where(np.isfinite(values), values, 0)

    def meets(kind):
        return (felt.astype(np.float64) @ kind.astype(np.float64)) > 0

    with np.errstate(invalid="ignore"):
        return (
            finite
            + np.where(meets(np.isposinf(values)), values.dtype.type(np.inf), 0)
            + np.where(meets(np.isneginf(values)), values.dtype.type(-np.inf), 0)
            + np.where(meets(np.isnan(values)), values.dtype.type(np.nan), 0)
        )


def _softmax(score, allowed, sinks):
    """Return maximum, denominator, weights, weight of the sink, and lse, row by row."""
    score = np.where(allowed, score, -np.inf).astype(score.dtype)
    top = np.max(score, axis=-1, initial=-np.inf)  # (B..., Hq, Lq)
    if sinks is None:
        sink = np.full_like(top, -np.inf)
    else:
        sink = np.broadcast_to(np.asarray(sinks).astype(score.dtype)[:, None], top.shape)
    top = np.maximum(top, sink)
    top = np.where(np.isfinite(top), top, 0).astype(score.dtype)
    part = np.where(allowed, np.exp(score - top[..., None]), 0).astype(score.dtype)
    sink_part = np.exp(sink - top)
    denominator = part.sum(-1) + sink_part
    lse = np.log(denominator) + top
    # A row with a score or a sink of +inf has no softmax; one with NaN has come out NaN by itself.
    endless = np.isposinf(score).any(-1) | np.isposinf(sink)
    lse = np.where(endless, np.nan, lse).astype(score.dtype)
    weights = np.where(np.isnan(lse)[..., None], np.nan, part / denominator[..., None])
    weights = np.where(allowed, weights, 0).astype(score.dtype)
    # An empty row without a sink has no denominator, and nothing takes its weight.
    sink_weight = np.where(denominator == 0, 0, sink_part / denominator).astype(score.dtype)
    return top, denominator, weights, sink_weight, lse


def _after_dropout(weights, kept, rate):
    return np.where(kept, weights / weights.dtype.type(1 - rate if rate < 1 else 1), 0)


def _heads_first(query, key, value, layout, precision):
    """Return the inputs as (B..., H, L, width), all of one rank, in the precision asked for."""
    inputs = [np.asarray(array).astype(precision) for array in (query, key, value)]
    if layout == "blhd":
        return [array.swapaxes(-3, -2) for array in inputs]
    rank = max(3, *(array.ndim for array in inputs))
    return [array.reshape((1,) * (rank - array.ndim) + array.shape) for array in inputs]


def _per_item(numbers) -> np.ndarray:
    """Return an int or an array over the batch axes, shaped to broadcast with the scores."""
    numbers = np.asarray(numbers).astype(np.int64)
    return numbers[..., None, None, None] if numbers.ndim else numbers


def vjp(
    query,
    key,
    value,
    cotangent=None,
    lse_cotangent=None,
    *,
    forward=None,
    sizes=False,
    layout="bhld",
    **options: Any,
) -> dict[str, np.ndarray]:
    """Return the gradients of ``sum(output * cotangent) + sum(lse * lse_cotangent)``, by formula.

    They come by argument name, in the shape of the argument: query, key, value, and bias and sinks
    where given. A cotangent left out is zero. With the steps of a `forward` pass that is another
    one, the weights are made again, from the scores of this call and the denominator of that. With
    `sizes` they are the sizes of what is summed: all numbers by their magnitude, and no
    differences.
    """
    arguments = {"query": query, "key": key, "value": value}
    steps = steps_of(query, key, value, layout=layout, **options)
    if forward is not None:
        with np.errstate(all="ignore"):
            again = np.exp(steps.score - forward.top[..., None]) / forward.denominator[..., None]
        steps = replace(steps, weights=np.where(steps.allowed, again, 0).astype(again.dtype))
    if cotangent is None:
        cotangent = np.zeros_like(steps.output)
    elif layout == "blhd":
        cotangent = cotangent.swapaxes(-3, -2)
    precision = steps.output.dtype
    cotangent = np.asarray(cotangent).astype(precision).reshape(steps.output.shape)
    if lse_cotangent is None:
        lse_cotangent = np.zeros_like(steps.lse)
    lse_cotangent = np.asarray(lse_cotangent).astype(precision).reshape(steps.lse.shape)

    sign = -1
    if sizes:
        sign, cotangent, lse_cotangent = 1, np.abs(cotangent), np.abs(lse_cotangent)
        magnitudes = {name: np.abs(getattr(steps, name)) for name in (*arguments, "scale")}
        steps = replace(steps, **magnitudes)

    with np.errstate(all="ignore"):
        # By each weight that is kept; what is not kept is not felt here either.
        by_weight = cotangent @ steps.value.swapaxes(-1, -2)
        by_weight = _after_dropout(by_weight, steps.kept, steps.rate)
        mean = np.where(steps.kept, steps.weights * by_weight, 0).sum(-1, keepdims=True)
        by_score = steps.weights * (by_weight + sign * mean + lse_cotangent[..., None])
        by_score = np.where(steps.allowed, by_score, 0)
        by_sink = steps.sink_weight * (lse_cotangent + sign * mean[..., 0])
        by_product = np.where(steps.allowed, by_score * steps.slope, 0) * steps.scale

        transposed = steps.allowed.swapaxes(-1, -2)
        gradients = {
            "query": select_product(by_product, steps.key, steps.allowed),
            "key": select_product(by_product.swapaxes(-1, -2), steps.query, transposed),
            "value": select_product(
                steps.dropped_weights.swapaxes(-1, -2), cotangent, steps.kept.swapaxes(-1, -2)
            ),
        }
    for name, gradient in gradients.items():
        gradients[name] = _like_argument(gradient, np.shape(arguments[name]), layout)
    if options.get("bias") is not None:
        gradients["bias"] = _summed_to(by_score, np.shape(options["bias"]))
    if options.get("sinks") is not None:
        gradients["sinks"] = _summed_to(by_sink[..., None], (by_sink.shape[-2], 1, 1))[:, 0, 0]
    return gradients


def _like_argument(gradient, shape, layout):
    """Sum the gradient of a repeated, broadcast and padded array to the shape it was given in."""
    if layout == "blhd":
        *batch, length, heads, width = shape
        shape = (*batch, heads, length, width)
    rank = gradient.ndim
    padded = (1,) * (rank - len(shape)) + tuple(shape)
    *batch, heads, length, width = gradient.shape
    own = padded[-3]
    shared = gradient.reshape(*batch, own, heads // own, length, width).sum(-3)
    summed = _summed_to(shared, padded).reshape(shape)
    return summed.swapaxes(-3, -2) if layout == "blhd" else summed


def _summed_to(array, shape):
    """Sum an array over the axes along which one of `shape` was broadcast to it."""
    padded = (1,) * (array.ndim - len(shape)) + tuple(shape)
    axes = tuple(axis for axis, size in enumerate(padded) if size == 1 != array.shape[axis])
    return array.sum(axis=axes, keepdims=True).reshape(shape)
