"""Dropout that is a pure function of the seed and of (batch, head, i, j).

A pair is kept or dropped by a hash of 32-bit integers: additions, multiplications, exclusive ors
and shifts that wrap, which every array library has and which every language can repeat. The hash
of a row costs nothing beside the tile; a pair then takes two rounds of the mixing function
"lowbias32" (C. Wellons, "Prospecting for Hash Functions", 2018), keyed with 64 bits of its row.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from portable_attention.backends import Array, Backend, common_backend
from portable_attention.backends.base import dtype_name
from portable_attention.core.arguments import described, real_number


@dataclass(frozen=True)
class Dropout:
    """Dropout on the attention weights, the same on every backend.

    Parameters
    ----------
    rate : float
        The fraction of weights that is dropped, in [0, 1]; those that are kept are divided by
        ``1 - rate``. With rate 1 the output is 0.
    seed : int or 0-d integer array
        Whether the weight of (batch, head, i, j) is kept is a pure function of the seed and these
        four indices: it is the same on every backend, for every tiling, and in the backward pass.
        An int lies in [-2**63, 2**64). A traced JAX integer is a seed, too.

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention import Dropout, attention
    >>> x = np.ones((1, 1, 4, 8), dtype=np.float32)
    >>> attention(x, x, x, dropout=Dropout(0.5, seed=7)).shape
    (1, 1, 4, 8)

    References
    ----------
    Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting",
    JMLR 15, 2014.
    """

    rate: float
    seed: Any


def check_dropout(
    backend: Backend, device: Any, dropout: Dropout | None
) -> tuple[float, Array | None]:
    """Return the rate and the two words of the seed of an optional Dropout."""
    if dropout is None:
        return 0.0, None
    if not isinstance(dropout, Dropout):
        raise TypeError(f"dropout must be a Dropout(rate, seed), got {dropout!r}")
    rate = real_number("the rate of dropout", dropout.rate)
    if not 0 <= rate <= 1:
        raise ValueError(f"the rate of dropout must lie in [0, 1], got {rate}")
    seed = _seed_words(backend, device, dropout.seed)
    return rate, seed if rate else None


def _seed_words(backend: Backend, device: Any, seed: Any) -> Array:
    """Return the low and the high 32 bits of a seed, as int32 of shape (2,)."""
    message = "the seed of dropout must be an int or a 0-d integer array"
    if isinstance(seed, bool | np.bool_) or (
        hasattr(seed, "dtype") and "int" not in dtype_name(seed)
    ):
        raise TypeError(f"{message}, got {described(seed)}")
    if hasattr(seed, "dtype") and hasattr(seed, "shape"):
        if tuple(seed.shape) != ():
            raise TypeError(f"{message}, got {described(seed)}")
        values = common_backend({"the seed of dropout": seed}).read(seed)
        if values is None:
            return backend.split_seed(seed)
        seed = int(values)
    try:
        number = operator.index(seed)
    except TypeError:
        raise TypeError(f"{message}, got {described(seed)}") from None
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"the seed of dropout must lie in [-2**63, 2**64), got {number}")
    words = np.array([number & 0xFFFFFFFF, (number >> 32) & 0xFFFFFFFF], dtype=np.uint32)
    return backend.asarray(words.view(np.int32), device, "int32")


# The multipliers of lowbias32, as signed 32-bit integers: 0x7FEB352D and 0x846CA68B.
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - 2**32
# Two chains give a row 64 bits; they start at the fractional bits of the golden ratio and of e.
_STARTS = (0x9E3779B9 - 2**32, 0xB7E15163 - 2**32)


def row_keys(seed: Array, batch: Array, head: Array, row: Array) -> tuple[Array, Array]:
    """Return the two 32-bit keys of each row, from int32 arrays that broadcast together."""
    first, second = (
        _fold(_fold(_fold(_fold(_fold(start, seed[0]), seed[1]), batch), head), row)
        for start in _STARTS
    )
    return first, second


def kept(keys: tuple[Array, Array], column: Array, rate: float) -> Array:
    """Return which pairs are kept, from the keys of the rows (..., q, 1) and int32 columns (k,)."""
    x = (keys[0] ^ _mix(column)) * _FIRST
    x = (x ^ _shift(x, 15)) + keys[1]
    x = x * _SECOND
    x = x ^ _shift(x, 16)
    # The hash is uniform over the signed integers, so a share `rate` of it lies below this.
    threshold = round(rate * 2**32) - 2**31
    if threshold >= 2**31:
        return x < x  # noqa: PLR0124 - a share of 1 drops every pair
    return x >= threshold


def _fold(state: Any, value: Array) -> Array:
    return _mix((_mix(value) ^ state) + _STARTS[0])


def _mix(x: Array) -> Array:
    """Return lowbias32 of an int32 array."""
    x = (x ^ _shift(x, 16)) * _FIRST
    x = (x ^ _shift(x, 15)) * _SECOND
    return x ^ _shift(x, 16)


def _shift(x: Array, bits: int) -> Array:
    """Shift the 32 bits right and fill with zeros; >> alone repeats the sign."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)
