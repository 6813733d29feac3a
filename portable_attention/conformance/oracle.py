"""Attention as docs/semantics.md states it: float64, dense, one line for each rule.

This is what every implementation is judged by, so it is written to be checked by eye. Scores are
whole arrays of shape (B..., Hq, Lq, Lk); keys and values are repeated for the query heads that
share them; nothing is tiled, skipped or fused, and nothing of the library's own algorithm is used.
The tests hold it against arithmetic of arbitrary precision.

Letters: B... batch axes, Hq and Hkv query and key/value heads, Lq and Lk lengths, D the width of
query and key, Dv that of value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from portable_attention.conformance.kept import kept_pairs

Float = NDArray[np.float64]
Bool = NDArray[np.bool_]
Numbers = NDArray[Any]

_FAR: Final = 1 << 60  # positions and window sides beyond this are beyond every length


@dataclass(frozen=True)
class Steps:
    """Everything that a call makes on its way to the output and the lse."""

    query: Float  # (B..., Hq, Lq, D)
    key: Float  # (B..., Hq, Lk, D)
    value: Float  # (B..., Hq, Lk, Dv)
    scale: float
    softcap: float | None
    product: Float  # (B..., Hq, Lq, Lk): scale * (q . k)
    slope: Float  # (B..., Hq, Lq, Lk): derivative of the softcap
    bias: Float  # (B..., Hq, Lq, Lk), 0 where there is none
    score: Float  # (B..., Hq, Lq, Lk): after softcap and bias
    allowed: Bool  # (B..., Hq, Lq, Lk)
    kept: Bool  # (B..., Hq, Lq, Lk): allowed, and not dropped
    top: Float  # (B..., Hq, Lq): the largest score of the row, the sink included
    denominator: Float  # (B..., Hq, Lq): of the softmax, relative to exp(top)
    weights: Float  # (B..., Hq, Lq, Lk): the softmax, before dropout
    sink: Float  # (B..., Hq, Lq): the row's sink, -inf without one
    sink_weight: Float  # (B..., Hq, Lq): the share of the sink
    rate: float
    output: Float  # (B..., Hq, Lq, Dv)
    lse: Float  # (B..., Hq, Lq)

    @property
    def empty(self) -> Bool:
        """The rows (B..., Hq, Lq) without an allowed key."""
        rows: Bool = np.logical_not(self.allowed.any(axis=-1))
        return rows

    @property
    def used_weights(self) -> Float:
        """The weights that meet the values: those kept, divided by 1 - rate."""
        return _after_dropout(self.weights, self.kept, self.rate)


class Result(NamedTuple):
    """What a call gives, in the caller's axes."""

    output: Float
    lse: Float


class Gradient(NamedTuple):
    """The gradients of a call, and what was made on the way to them."""

    by_argument: dict[str, Float]  # in the shape of the argument
    d_output: Float  # (B..., Hq, Lq, Dv)
    d_lse: Float  # (B..., Hq, Lq)
    by_weight: Float  # (B..., Hq, Lq, Lk)
    mean: Float  # (B..., Hq, Lq): sum of weights * by_weight
    by_score: Float  # (B..., Hq, Lq, Lk)
    by_product: Float  # (B..., Hq, Lq, Lk), before the scale


def attention(query: Numbers, key: Numbers, value: Numbers, **options: Any) -> Result:
    """Return the output and the lse of a call, in float64.

    Parameters
    ----------
    query, key, value
        As `portable_attention.attention` takes them, in any floating dtype.
    **options
        Those of `portable_attention.attention`. They are taken as valid. Dropout may also be a
        mapping with ``rate`` and ``seed``.

    Returns
    -------
    Result
        ``output`` and ``lse``.

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention.conformance import oracle
    >>> zeros, values = np.zeros((2, 1)), np.array([[1.0], [3.0]])
    >>> oracle.attention(zeros, zeros, values, causal=True).output.ravel()
    array([1., 2.])
    """
    steps = steps_of(query, key, value, **options)
    output, lse = steps.output, steps.lse
    if options.get("layout") == "blhd":
        output = output.swapaxes(-3, -2)
    elif query.ndim == key.ndim == value.ndim == 2:
        output, lse = output[0], lse[0]
    return Result(output, lse)


def gradients(
    query: Numbers,
    key: Numbers,
    value: Numbers,
    d_output: Numbers | None,
    d_lse: Numbers | None = None,
    **options: Any,
) -> dict[str, Float]:
    """Return the gradients of ``sum(output * d_output) + sum(lse * d_lse)`` by formula.

    They come by the argument's name, in its shape: query, key, value, and bias and sinks where
    they are given.

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention.conformance import oracle
    >>> zeros, values = np.zeros((2, 1)), np.array([[1.0], [3.0]])
    >>> oracle.gradients(zeros, zeros, values, np.ones((2, 1)))["value"].ravel()
    array([1., 1.])
    """
    steps = steps_of(query, key, value, **options)
    inputs = {"query": query, "key": key, "value": value, **options}
    return gradient_of(steps, inputs, d_output, d_lse).by_argument


@np.errstate(all="ignore")
def steps_of(
    query: Numbers,
    key: Numbers,
    value: Numbers,
    *,
    mask: Numbers | None = None,
    bias: Numbers | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    query_offset: Any = None,
    query_lengths: Any = None,
    key_lengths: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Numbers | None = None,
    dropout: Any = None,
    layout: str = "bhld",
) -> Steps:
    """Return every step of a call; the arguments are those of `attention`."""
    query, key, value = (_heads_first(array, layout) for array in (query, key, value))
    batch = np.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    heads = query.shape[-3]
    query, key, value = (_repeated(array, batch, heads) for array in (query, key, value))
    width = query.shape[-1]
    if scale is None:
        scale = 1 / math.sqrt(width) if width else 0.0

    product = float(scale) * (query @ key.swapaxes(-1, -2))
    score, slope = product, np.ones_like(product)
    if softcap is not None:
        bounded = np.tanh(product / softcap)
        score, slope = softcap * bounded, 1 - bounded**2
    added = np.zeros_like(product)
    if bias is not None:
        added = np.broadcast_to(np.asarray(bias).astype(np.float64), product.shape)
    score = score + added

    allowed = allowed_pairs(
        product.shape,
        mask=mask,
        causal=causal,
        window=window,
        query_offset=query_offset,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
    )
    allowed = allowed & ~np.isneginf(added)

    sink = np.full(product.shape[:-1], -np.inf)
    if sinks is not None:
        sink = np.broadcast_to(np.asarray(sinks).astype(np.float64)[:, None], sink.shape)
    reachable = np.where(allowed, score, -np.inf)
    top = np.maximum(np.max(reachable, axis=-1, initial=-np.inf), sink)
    top = np.where(np.isfinite(top), top, 0.0)
    exponential = np.where(allowed, np.exp(reachable - top[..., None]), 0.0)
    denominator = exponential.sum(axis=-1) + np.exp(sink - top)
    lse = top + np.log(denominator)
    endless = np.isposinf(reachable).any(axis=-1) | np.isposinf(sink)
    lse = np.where(endless, np.nan, lse)  # +inf has no softmax

    weights = np.where(np.isnan(lse)[..., None], np.nan, exponential / denominator[..., None])
    weights = np.where(allowed, weights, 0.0)  # an empty row is 0, not 0/0
    sink_weight = np.where(np.isneginf(sink), 0.0, np.exp(sink - lse))

    rate, kept = 0.0, allowed
    if dropout is not None:
        rate, seed = _rate_and_seed(dropout)
        kept = allowed & kept_pairs(rate, seed, product.shape)
    output = selecting_product(_after_dropout(weights, kept, rate), value, kept)
    return Steps(
        query=query,
        key=key,
        value=value,
        scale=float(scale),
        softcap=softcap,
        product=product,
        slope=slope,
        bias=added,
        score=score,
        allowed=allowed,
        kept=kept,
        top=top,
        denominator=denominator,
        weights=weights,
        sink=sink,
        sink_weight=sink_weight,
        rate=rate,
        output=output,
        lse=lse,
    )


@np.errstate(all="ignore")
def gradient_of(
    steps: Steps,
    inputs: Mapping[str, Any],
    d_output: Numbers | None,
    d_lse: Numbers | None = None,
) -> Gradient:
    """Return the gradients of a call and the steps to them.

    With P the weights, K which of them dropout keeps, r its rate, and dO and dl the gradients of
    output and lse:

        dV = (P K / (1 - r))^T dO          dP = K (dO V^T) / (1 - r)
        dS = P (dP - sum_j P dP + dl)      dsink = P_sink (dl - sum_j P dP)
        dQ = scale (dS slope) K            dK = scale (dS slope)^T Q
    """
    layout = inputs.get("layout") or "bhld"
    upstream = _cotangent(d_output, steps.output, layout)
    upstream_lse = _cotangent(d_lse, steps.lse, "bhld")

    by_weight = upstream @ steps.value.swapaxes(-1, -2)
    by_weight = _after_dropout(by_weight, steps.kept, steps.rate)
    mean = np.where(steps.kept, steps.weights * by_weight, 0.0).sum(axis=-1)
    by_score = steps.weights * (by_weight - mean[..., None] + upstream_lse[..., None])
    by_score = np.where(steps.allowed, by_score, 0.0)
    by_product = np.where(steps.allowed, by_score * steps.slope, 0.0)
    by_sink = steps.sink_weight * (upstream_lse - mean)

    swapped, kept = by_product.swapaxes(-1, -2), steps.kept.swapaxes(-1, -2)
    per_head = {
        "query": steps.scale * selecting_product(by_product, steps.key, steps.allowed),
        "key": steps.scale
        * selecting_product(swapped, steps.query, steps.allowed.swapaxes(-1, -2)),
        "value": selecting_product(steps.used_weights.swapaxes(-1, -2), upstream, kept),
    }
    found = {name: like(per_head[name], np.shape(inputs[name]), layout) for name in per_head}
    if inputs.get("bias") is not None:
        found["bias"] = summed_to(by_score, np.shape(inputs["bias"]))
    if inputs.get("sinks") is not None:
        found["sinks"] = summed_to(by_sink[..., None], (by_sink.shape[-2], 1, 1))[:, 0, 0]
    return Gradient(found, upstream, upstream_lse, by_weight, mean, by_score, by_product)


def allowed_pairs(
    shape: tuple[int, ...],
    *,
    mask: Numbers | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    query_offset: Any = None,
    query_lengths: Any = None,
    key_lengths: Any = None,
) -> Bool:
    """Return which pairs of scores (B..., Hq, Lq, Lk) everything but the bias allows."""
    *_, rows, columns = shape
    valid_rows = _per_item(rows if query_lengths is None else query_lengths)
    valid_columns = _per_item(columns if key_lengths is None else key_lengths)
    if isinstance(query_offset, str):
        offset = {"start": _per_item(0), "end": valid_columns - valid_rows}[query_offset]
    else:
        offset = _per_item(0 if query_offset is None else query_offset)
    row = np.arange(rows)[:, None]
    column = np.arange(columns)  # where the key stands
    position = row + offset  # where the query stands

    allowed = (row < valid_rows) & (column < valid_columns)
    if causal:
        allowed = allowed & (column <= position)
    left, right = window or (None, None)
    if left is not None:
        allowed = allowed & (column >= position - min(left, _FAR))
    if right is not None:
        allowed = allowed & (column <= position + min(right, _FAR))
    if mask is not None:
        allowed = allowed & np.asarray(mask)
    return np.broadcast_to(allowed, shape)


def selecting_product(weights: Float, values: Float, felt: Bool) -> Float:
    """Return ``weights @ values``, where row i feels value j only if ``felt[i, j]``.

    A finite value counts by its weight. One that is NaN or infinite, and felt, makes its column of
    the row NaN or infinite, however small its weight.
    """
    product: Float = np.where(felt, weights, 0.0) @ np.where(np.isfinite(values), values, 0.0)
    if np.isfinite(values).all():
        return product
    for special, found in (
        (np.inf, np.isposinf(values)),
        (-np.inf, np.isneginf(values)),
        (np.nan, np.isnan(values)),
    ):
        meets = felt.astype(np.float64) @ found.astype(np.float64) > 0
        product = product + np.where(meets, special, 0.0)
    return product


def like(array: Float, shape: tuple[int, ...], layout: str) -> Float:
    """Sum what was repeated and broadcast, (B..., Hq, L, width), to the shape of an argument."""
    if layout == "blhd":
        *outer, length, own, width = shape
        return like(array, (*outer, own, length, width), "bhld").swapaxes(-3, -2)
    padded = (1,) * (array.ndim - len(shape)) + tuple(shape)
    *batch, heads, length, width = array.shape
    own = padded[-3]
    shared = array.reshape(*batch, own, heads // own, length, width).sum(axis=-3)
    return summed_to(shared, padded).reshape(shape)


def summed_to(array: Float, shape: tuple[int, ...]) -> Float:
    """Sum an array over the axes along which one of `shape` was broadcast to it."""
    padded = (1,) * (array.ndim - len(shape)) + tuple(shape)
    axes = tuple(axis for axis, size in enumerate(padded) if size == 1 != array.shape[axis])
    summed: Float = array.sum(axis=axes, keepdims=True)
    return summed.reshape(shape)


def _heads_first(array: Numbers, layout: str) -> Float:
    """Return an input as (B..., H, L, width) in float64; a matrix is one head."""
    wide = np.asarray(array).astype(np.float64)
    if layout == "blhd":
        return wide.swapaxes(-3, -2)
    return wide[None] if wide.ndim == 2 else wide


def _repeated(array: Float, batch: tuple[int, ...], heads: int) -> Float:
    """Repeat an input for the batch, and its heads for the query heads that share them."""
    array = np.repeat(array, heads // array.shape[-3], axis=-3)  # head h reads h // group
    return np.broadcast_to(array, batch + array.shape[-3:])


def _per_item(numbers: Any) -> Numbers:
    """Return an int, or an array over the batch axes, to stand against the scores."""
    if isinstance(numbers, int):
        numbers = max(-_FAR, min(_FAR, numbers))
    array = np.asarray(numbers).astype(np.int64)
    return array[..., None, None, None] if array.ndim else array


def _after_dropout(array: Float, kept: Bool, rate: float) -> Float:
    return np.where(kept, array / (1 - rate if rate < 1 else 1.0), 0.0)


def _rate_and_seed(dropout: Any) -> tuple[float, int]:
    if isinstance(dropout, Mapping):
        return float(dropout["rate"]), int(dropout["seed"])
    return float(dropout.rate), int(dropout.seed)


def _cotangent(array: Numbers | None, like_this: Float, layout: str) -> Float:
    if array is None:
        return np.zeros_like(like_this)
    wide = np.asarray(array).astype(np.float64)
    return (wide.swapaxes(-3, -2) if layout == "blhd" else wide).reshape(like_this.shape)
