"""The plain formula of attention in float64, to judge every other answer by.

It shares nothing with the tiled algorithm: whole rows of scores, one softmax each, and every
rule of the specification written out once. (Which weights dropout keeps is a definition, not a
computation, and is asked of its one source.) Queries are taken in groups of rows, so its memory
is bounded too.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from portable_attention.core.dropout import Dropout, kept, row_keys

Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

_SCORES_AT_ONCE: Final = 1 << 22  # 32 MiB of float64
_FAR: Final = 1 << 60  # positions farther than this are beyond every length


@np.errstate(invalid="ignore", divide="ignore", over="ignore")  # NaN and inf are answers here
def exact_attention(
    query: NDArray[Any],
    key: NDArray[Any],
    value: NDArray[Any],
    *,
    mask: NDArray[Any] | None = None,
    bias: NDArray[Any] | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    query_offset: int | str | NDArray[Any] | None = None,
    query_lengths: int | NDArray[Any] | None = None,
    key_lengths: int | NDArray[Any] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: NDArray[Any] | None = None,
    dropout: Dropout | None = None,
    layout: str = "bhld",
) -> tuple[Float64, Float64]:
    """Return the output and lse of `portable_attention.attention`, all in float64.

    The arguments mean what they mean there and are taken as valid.
    """
    flat = query.ndim == key.ndim == value.ndim == 2
    query, key, value = (_heads_first(a, layout) for a in (query, key, value))
    batch = np.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
    heads, rows, width = query.shape[-3:]
    keys = key.shape[-2]
    group = heads // key.shape[-3]
    query = query * (width**-0.5 if scale is None and width else 1.0 if scale is None else scale)
    query = np.broadcast_to(query, (*batch, heads, rows, width))
    key = np.repeat(np.broadcast_to(key, (*batch, *key.shape[-3:])), group, axis=-3)
    value = np.repeat(np.broadcast_to(value, (*batch, *value.shape[-3:])), group, axis=-3)

    query_count = _column(rows if query_lengths is None else query_lengths)
    key_count = _column(keys if key_lengths is None else key_lengths)
    if isinstance(query_offset, str):
        offset = key_count - query_count if query_offset == "end" else _column(0)
    else:
        offset = _column(0 if query_offset is None else query_offset)
    left, right = (None if side is None else min(side, _FAR) for side in window or (None, None))

    output = np.empty((*batch, heads, rows, value.shape[-1]))
    lse = np.empty((*batch, heads, rows))
    columns = np.arange(keys)
    at_once = max(1, _SCORES_AT_ONCE // max(1, math.prod(batch) * heads * max(1, keys)))
    for start in range(0, rows, at_once):
        part = slice(start, min(rows, start + at_once))
        index = np.arange(part.start, part.stop)[:, None]
        position = index + offset
        allowed = (index < query_count) & (columns < key_count)
        if causal:
            allowed = allowed & (columns <= position)
        if left is not None:
            allowed = allowed & (columns >= position - left)
        if right is not None:
            allowed = allowed & (columns <= position + right)
        if mask is not None:
            allowed = allowed & _rows_of(mask, part)
        scores = query[..., part, :] @ key.swapaxes(-1, -2)
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if bias is not None:
            added = _rows_of(bias, part).astype(np.float64)
            allowed = allowed & (added != -np.inf)
            scores = scores + added
        allowed = np.broadcast_to(allowed, scores.shape)
        weights, total, lse[..., part] = _softmax(scores, allowed, sinks)
        kept_share = 1.0
        if dropout is not None:
            allowed = allowed & _kept(dropout, allowed.shape, start)
            weights = np.where(allowed, weights, 0.0)
            kept_share = 1.0 - dropout.rate or 1.0  # nothing is left to divide at rate 1
        output[..., part, :] = _product(weights, allowed, value) / total / kept_share
    if flat:
        return output[0], lse[0]
    return (output.swapaxes(-3, -2) if layout == "blhd" else output), lse


def _heads_first(array: NDArray[Any], layout: str) -> Float64:
    """Return (..., heads, length, width) in float64; one head for a 2-D array."""
    wide = array.astype(np.float64)
    if layout == "blhd":
        return wide.swapaxes(-3, -2)
    return wide[None] if wide.ndim == 2 else wide


def _column(counts: int | NDArray[Any]) -> NDArray[np.int64]:
    """Return one number per batch item, to stand against (heads, rows, keys)."""
    if isinstance(counts, int):
        counts = max(-_FAR, min(_FAR, counts))
    elif counts.dtype.kind == "u":
        counts = np.minimum(counts.astype(np.uint64), np.uint64(_FAR))
    near = np.clip(np.asarray(counts, dtype=np.int64), -_FAR, _FAR)
    return near[..., None, None, None]


def _rows_of(array: NDArray[Any], part: slice) -> NDArray[Any]:
    """Return the rows of a mask or bias that broadcasts against (..., rows, keys)."""
    if array.ndim < 2 or array.shape[-2] == 1:
        return array
    return array[..., part, :]


def _softmax(
    scores: Float64, allowed: Bool, sinks: NDArray[Any] | None
) -> tuple[Float64, Float64, Float64]:
    """Return the weights, what to divide them by, and the lse of whole rows of scores."""
    scores = np.where(allowed, scores, -np.inf)
    empty = ~allowed.any(axis=-1, keepdims=True)
    top = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        sink = sinks.astype(np.float64)[:, None, None]
        top = np.maximum(top, sink)  # NaN stays NaN
    shift = np.where(empty & np.isneginf(top), 0.0, top)
    weights = np.where(allowed, np.exp(scores - shift), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sink - shift)
    # Where every allowed score is -inf, the denominator is 0: lse -inf, and an output of 0/0.
    lse = np.where(np.isneginf(top), -np.inf, shift + np.log(total))
    return weights, np.where(empty, 1.0, total), lse[..., 0]


def _kept(dropout: Dropout, shape: tuple[int, ...], start: int) -> Bool:
    """Return which pairs of (*batch, heads, rows, keys) dropout keeps, from row `start` on."""
    *batch, heads, rows, keys = shape
    seed = np.array([dropout.seed & 0xFFFFFFFF, (dropout.seed >> 32) & 0xFFFFFFFF], dtype=np.uint32)
    items = np.arange(math.prod(batch), dtype=np.int32).reshape(*batch, 1, 1, 1)
    keyed = row_keys(
        seed.view(np.int32),
        items,
        np.arange(heads, dtype=np.int32)[:, None, None],
        np.arange(start, start + rows, dtype=np.int32)[:, None],
    )
    pairs: Bool = kept(keyed, np.arange(keys, dtype=np.int32), dropout.rate)
    return pairs


def _product(weights: Float64, allowed: Bool, value: Float64) -> Float64:
    """Return weights @ value, where a value that is not attended cannot be felt."""
    finite = np.isfinite(value)
    if finite.all():
        return weights @ value
    product: Float64 = weights @ np.where(finite, value, 0.0)
    reach = allowed.astype(np.float64)
    for special in (np.inf, -np.inf, np.nan):
        found = np.isnan(value) if np.isnan(special) else value == special
        product = product + np.where(reach @ found.astype(np.float64) > 0, special, 0.0)
    return product
