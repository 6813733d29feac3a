"""The optional last output of ONNX's operator: the scores, as an array of size Lq x Lk."""

from __future__ import annotations

from typing import Any

import numpy as np

from portable_attention.backends import Array, Backend, common_backend

MODES = (0, 1, 2, 3)  # scores, after the softcap, after bias and masks, after the softmax


def explicit_scores(
    backend: Backend,
    query: Array,
    key: Array,
    lse: Array,
    *,
    mode: int,
    scale: float | None,
    softcap: float | None,
    mask: Array | None = None,
    bias: Array | None = None,
    limits: tuple[Any, int | None, int | None],
    key_lengths: Array | None,
) -> Array:
    """Return (B, Hq, Lq, Lk) scores in the dtype of the query.

    `limits` are the position of row 0, and how many keys before and after its own position a row
    may attend.
    """
    xp, dtype = backend.xp, query.dtype
    *_, heads, rows, width = query.shape
    batch, kv_heads, columns = key.shape[:3]
    with np.errstate(all="ignore"):
        # The query heads of a group are rows of one product, as keys are never copied.
        factor = max(width, 1) ** -0.5 if scale is None else scale
        wide = backend.astype(query, lse.dtype) * factor
        grouped = xp.reshape(wide, (batch, kv_heads, heads // kv_heads * rows, width))
        transposed = xp.matrix_transpose(backend.astype(key, lse.dtype))
        scores = backend.ops.matmul(grouped, transposed)
        scores = xp.reshape(scores, (batch, heads, rows, columns))
        if mode >= 1 and softcap is not None:
            scores = softcap * xp.tanh(scores / softcap)
        if mode >= 2:
            if bias is not None:
                scores = scores + backend.astype(bias, lse.dtype)
            allowed = _allowed(backend, (rows, columns), query, limits, key_lengths)
            for condition in (mask, None if bias is None else bias != float("-inf")):
                if condition is not None:
                    allowed = allowed & condition
            weights = xp.exp(scores - xp.expand_dims(lse, axis=-1)) if mode == 3 else scores
            scores = xp.where(allowed, weights, 0.0 if mode == 3 else float("-inf"))
        return backend.astype(scores, dtype)


def _allowed(
    backend: Backend,
    shape: tuple[int, int],
    query: Array,
    limits: tuple[Any, int | None, int | None],
    key_lengths: Array | None,
) -> Array:
    """Return what positions and lengths allow, (Lq, Lk) or (B, 1, Lq, Lk)."""
    xp, device = backend.xp, backend.device(query)
    offset, left, right = limits
    rows = xp.expand_dims(backend.arange(0, shape[0], device), axis=-1)
    columns = xp.expand_dims(backend.arange(0, shape[1], device), axis=0)
    allowed = columns >= 0
    if key_lengths is not None:
        lengths = _over_batch(backend, key_lengths, device)
        allowed = allowed & (columns < lengths)
        offset = lengths - shape[0]
    if left is not None:
        allowed = allowed & (columns >= rows + offset - left)
    if right is not None:
        allowed = allowed & (columns <= rows + offset + right)
    return allowed


def _over_batch(backend: Backend, lengths: Array, device: Any) -> Array:
    """Return lengths (B,) as (B, 1, 1, 1) on the device."""
    values = common_backend({"nonpad_kv_seqlen": lengths}).read(lengths)
    if values is not None:
        lengths = backend.asarray(np.asarray(values), device, "int32")
    return backend.xp.reshape(lengths, (-1, 1, 1, 1))
