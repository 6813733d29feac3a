"""Attention with the linear biases of ALiBi, in memory that is linear in the lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from portable_attention.attention import attention
from portable_attention.backends import Array, Backend, common_backend
from portable_attention.backends.base import dtype_name
from portable_attention.core.arguments import FLOATS, described

_BIASES = 1 << 22  # how many numbers of a bias are made at once: 16 MiB of float32


def attend_with_alibi(
    q: Array, k: Array, v: Array, slopes: Array, options: dict[str, Any]
) -> tuple[Array, Array]:
    """Attend with the bias of ALiBi, for so many rows at a time that it stays small."""
    backend = common_backend({"q": q, "k": k, "v": v, "alibi_slopes": slopes})
    if dtype_name(slopes) not in FLOATS or tuple(slopes.shape) not in (
        (q.shape[2],),
        (q.shape[0], q.shape[2]),
    ):
        raise ValueError(
            f"alibi_slopes must be floating with shape (H,) or (B, H), here ({q.shape[2]},) or "
            f"({q.shape[0]}, {q.shape[2]}), got {described(slopes)} and {dtype_name(slopes)}"
        )
    if dtype_name(slopes) in ("float16", "bfloat16"):  # distances would not be whole numbers
        slopes = backend.astype(slopes, backend.dtype("float32"))
    length_q, length_k = q.shape[1], k.shape[1]
    parts = []
    for rows in _row_blocks(length_q, length_k * math.prod(slopes.shape)):
        position = rows.start + length_k - length_q
        bias = _alibi(backend, slopes, (position, rows.stop - rows.start), length_k)
        parts.append(
            attention(
                q[:, rows, ...],
                k,
                v,
                bias=bias,
                return_lse=True,
                layout="blhd",
                **{**options, "query_offset": position},
            )
        )
    outs, lses = zip(*parts, strict=True)
    return backend.xp.concat(outs, axis=1), backend.xp.concat(lses, axis=-1)


def _row_blocks(length: int, numbers_a_row: int) -> Iterator[slice]:
    step = max(1, _BIASES // max(1, numbers_a_row))
    for start in range(0, max(length, 1), step):
        yield slice(start, min(start + step, length))


def _alibi(backend: Backend, slopes: Array, rows: tuple[int, int], length_k: int) -> Array:
    """Return the bias (H, rows, Lk) or (B, H, rows, Lk) of a block that begins at a position."""
    xp, device = backend.xp, backend.device(slopes)
    positions = xp.expand_dims(backend.arange(rows[0], sum(rows), device), axis=-1)
    distances = xp.abs(positions - xp.expand_dims(backend.arange(0, length_k, device), axis=0))
    slopes = xp.reshape(slopes, (*slopes.shape, 1, 1))
    return -slopes * backend.astype(distances, slopes.dtype)
