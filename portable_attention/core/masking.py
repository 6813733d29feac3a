"""Which pairs of a tile are allowed, and what non-finite values do to the rows that attend them."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import numpy as np

from portable_attention.backends import Array, Backend
from portable_attention.backends.base import dtype_name
from portable_attention.core.problem import Limits

_NEG_INF = float("-inf")
LARGE_VALUE = 1e25


def limits_on_device(backend: Backend, limits: Limits, device: Any) -> Limits:
    """Return limits that can be compared with positions on the device."""

    def move(limit: Any) -> Any:
        if isinstance(limit, np.ndarray):
            return backend.asarray(limit, device, "int32")
        return limit

    return Limits(**{name: move(limit) for name, limit in limits.items()})


def within_limits(limits: Limits, rows: Array, columns: Array) -> list[Array]:
    """Return one condition a limit, from rows (q, 1) and columns (k,)."""
    conditions = []
    if limits.low is not None:
        conditions.append(columns >= rows + limits.low)
    if limits.high is not None:
        conditions.append(columns < rows + limits.high)
    if limits.key_length is not None:
        conditions.append(columns < limits.key_length)
    if limits.query_length is not None:
        conditions.append(rows < limits.query_length)
    return conditions


def rows_within(limits: Limits, rows: Array, key_length: int, xp: Any) -> Array:
    """Return which of the rows (q, 1) may attend any of the keys."""
    first, stop = xp.zeros_like(rows), xp.full_like(rows, key_length)
    if limits.low is not None:
        first = xp.maximum(first, rows + limits.low)
    if limits.high is not None:
        stop = xp.minimum(stop, rows + limits.high)
    if limits.key_length is not None:
        stop = xp.minimum(stop, limits.key_length)
    found = first < stop
    return found if limits.query_length is None else found & (rows < limits.query_length)


def both(conditions: Iterable[Array | None]) -> Array | None:
    """Return the conjunction of conditions that broadcast together; None means all allowed."""
    present = [condition for condition in conditions if condition is not None]
    return reduce(lambda one, other: one & other, present) if present else None


def block(array: Array | None, rows: tuple[int, int], columns: tuple[int, int]) -> Array | None:
    """Return the tile of a mask or bias, whose axes of size 1 stay so."""
    if array is None:
        return None
    picked_rows = slice(None) if array.shape[-2] == 1 else slice(*rows)
    picked_columns = slice(None) if array.shape[-1] == 1 else slice(*columns)
    return array[..., picked_rows, picked_columns]


def bias_block(backend: Backend, bias: Array | None, dtype: Any) -> Array | None:
    """Return a tile of the bias in the dtype of the scores; a finite bias stays finite."""
    if bias is None:
        return None
    xp = backend.xp
    if dtype_name(bias) == "float64" and dtype != bias.dtype:
        # Beyond float32 a finite bias would become -inf, and so a mask.
        largest = float(np.finfo(np.float32).max)
        clipped = xp.clip(bias, -largest, largest)
        bias = xp.where(xp.isfinite(bias), clipped, bias)
    return backend.astype(bias, dtype)


def not_masked(bias: Array | None) -> Array | None:
    """Return where a bias allows a pair: anything but -inf does, NaN included."""
    return None if bias is None else bias != _NEG_INF


def value_factor(backend: Backend, value: Array, dtype: Any) -> Array:
    """Return what to multiply values by so that their sums stay finite: 1 nearly always.

    The weights are divided by their sum at the end, so sums of values exceed the output by a factor
    of up to the number of keys.
    """
    xp = backend.xp
    if value.shape[-1] == 0 or value.shape[-2] == 0:
        return xp.ones((1,), dtype=dtype, device=backend.device(value))
    size = xp.abs(backend.astype(value, dtype))
    size = xp.where(xp.isfinite(size), size, 0.0)
    largest = xp.max(size, axis=(-1, -2), keepdims=True)
    return xp.where(largest >= LARGE_VALUE, 2.0**-40, xp.ones_like(largest))


def infinities(backend: Backend, value: Array, dtype: Any) -> tuple[Array, Array]:
    """Return where values are +inf and where they are -inf, as 1 and 0; NaN counts as both."""
    xp = backend.xp
    nan = xp.isnan(value)
    infinite = xp.isinf(value)
    positive = nan | (infinite & (value > 0))
    negative = nan | (infinite & (value < 0))
    return backend.astype(positive, dtype), backend.astype(negative, dtype)


def infinite_part(backend: Backend, positive: Array, negative: Array, lse: Array) -> Array:
    """Return +inf, -inf or NaN where those were attended, and 0 elsewhere.

    It is a multiple of exp(lse - lse), so that automatic differentiation finds what is true of it:
    where it is not 0, the scores of the row have no finite derivative.
    """
    xp = backend.xp
    zero = xp.zeros_like(positive)
    found = xp.where(positive > 0, float("inf"), zero) + xp.where(negative > 0, _NEG_INF, zero)
    known = xp.where(xp.isfinite(lse), lse, 0.0)
    return found * xp.expand_dims(xp.exp(known - backend.stop_gradient(known)), axis=-1)
