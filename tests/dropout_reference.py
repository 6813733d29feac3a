"""Which weights dropout keeps, computed again from the description in docs/semantics.md.

In unsigned 32-bit integers that wrap. `mix` is lowbias32 (C. Wellons, 2018):

    x ^= x >> 16;  x *= 0x7FEB352D;  x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16

A chain starts at a constant and takes in a number by ``state = mix((mix(number) ^ state) +
0x9E3779B9)``. Two chains, from 0x9E3779B9 and 0xB7E15163, take in the low and the high half of the
seed (64 bits, two's complement), the batch index (row-major in the broadcast batch shape), the
query head and the row i: they are the two keys of the row. The pair (i, j) is then hashed by

    x = (key0 ^ mix(j)) * 0x7FEB352D;  x = (x ^ (x >> 15)) + key1;  x *= 0x846CA68B;  x ^= x >> 16

and kept where x, read as a signed number, is at least round(rate * 2**32) - 2**31.
"""

from __future__ import annotations

import math

import numpy as np

_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_GOLDEN, _EULER = np.uint32(0x9E3779B9), np.uint32(0xB7E15163)


def keep_mask(rate: float, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return which pairs of scores (B..., Hq, Lq, Lk) are kept."""
    *batch, heads, rows, columns = shape
    items = math.prod(batch)
    half = [np.array([(seed >> bits) & 0xFFFFFFFF], dtype=np.uint32) for bits in (0, 32)]
    item = np.arange(items, dtype=np.uint32)[:, None, None, None]
    head = np.arange(heads, dtype=np.uint32)[:, None, None]
    row = np.arange(rows, dtype=np.uint32)[:, None]
    column = np.arange(columns, dtype=np.uint32)

    keys = []
    for start in (_GOLDEN, _EULER):
        state = np.array([start])
        for number in (*half, item, head, row):
            state = _mix((_mix(number) ^ state) + _GOLDEN)
        keys.append(state)

    x = (keys[0] ^ _mix(column)) * _FIRST
    x = (x ^ (x >> 15)) + keys[1]
    x = x * _SECOND
    x = x ^ (x >> 16)
    kept = x.view(np.int32) >= round(rate * 2**32) - 2**31
    return kept.reshape(shape)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> 16)) * _FIRST
    x = (x ^ (x >> 15)) * _SECOND
    return x ^ (x >> 16)
