"""Which pairs dropout keeps: docs/semantics.md#how-a-pair-is-kept, once more and by itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def kept_pairs(rate: float, seed: int, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Return which pairs of scores (B..., Hq, Lq, Lk) dropout keeps.

    The arithmetic is that of docs/semantics.md#how-a-pair-is-kept.
    """
    *batch, heads, rows, columns = shape
    golden, euler = np.uint32(0x9E3779B9), np.uint32(0xB7E15163)
    seeds = [np.array(seed >> bits & 0xFFFFFFFF, dtype=np.uint32) for bits in (0, 32)]
    item = np.arange(math.prod(batch), dtype=np.uint32)[:, None, None, None]
    head = np.arange(heads, dtype=np.uint32)[:, None, None]
    row = np.arange(rows, dtype=np.uint32)[:, None]
    column = np.arange(columns, dtype=np.uint32)

    keys = []
    for start in (golden, euler):
        state: NDArray[Any] = np.array([start])
        for number in (*seeds, item, head, row):
            state = _mix((_mix(np.atleast_1d(number)) ^ state) + golden)
        keys.append(state)
    x = (keys[0] ^ _mix(column)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) + keys[1]
    x = x * np.uint32(0x846CA68B)
    x = x ^ (x >> np.uint32(16)) ^ np.uint32(0x80000000)
    kept: NDArray[np.bool_] = x.astype(np.int64) >= round(rate * 2**32)
    return np.broadcast_to(kept, (math.prod(batch), heads, rows, columns)).reshape(shape)


def _mix(x: NDArray[Any]) -> NDArray[Any]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    mixed: NDArray[Any] = x ^ (x >> np.uint32(16))
    return mixed
