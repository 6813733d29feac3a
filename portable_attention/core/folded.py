"""Sums that matrix products take along: a column less costs a pass over a tile, as a pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portable_attention.backends import Array
from portable_attention.backends.numpy_backend import HostOps
from portable_attention.core.eager import Tile

# How many ones a column ends in, and numbers a row: their product adds the sum of the numbers.
FOLDED = 2
Columns = tuple[int, int]


def pack_columns(rows: Array, dtype: Any, ones: int) -> Array:
    """Return (..., k, n) as (..., k, n + ones), packed in columns that end in ones."""
    *lead, count, width = rows.shape
    tile = np.empty((*lead, width + ones, count), dtype)
    tile[..., :width, :] = np.swapaxes(rows, -1, -2)
    tile[..., width:, :] = 1.0
    return np.swapaxes(tile, -1, -2)


class Folded:
    """Weights, and their gradients less the row term, of a block of rows whose options are few."""

    def __init__(
        self,
        ops: HostOps,
        tile_of: Callable[[str, Columns], Array],
        query: Array,
        shift: Array,
        d_output: Array,
        inner: Array,
    ) -> None:
        self.ops, self.tile_of = ops, tile_of
        unit = ops.exponent_unit(query.dtype)
        # In two numbers, since what one is rounded by would be felt by all weights of a row.
        exact = shift.astype(np.float64) * -unit
        high = exact.astype(query.dtype)
        self.query = _ending_in(query * unit, high, (exact - high).astype(query.dtype))
        self.d_output = _ending_in(d_output, -inner)

    def weights(self, met: Tile) -> tuple[Array, None]:
        """Return exp(scores - lse), 0 where a pair is not allowed."""
        scores = self.ops.scores(self.query, self.tile_of("key", met.columns))
        weights = self.ops.exp_of_units(scores)
        if met.allowed is not None:
            # Not the scores: powers of -inf take NumPy many times as long as those of numbers.
            weights = self.ops.select(weights, met.allowed, 0.0)
        return weights, None

    def d_weights(self, met: Tile, *, careful: bool) -> Array:
        """Return do v^T - rowsum(do o) + dlse; `careful` leaves out values that are not finite."""
        value = self.tile_of("value", met.columns)
        if careful:
            value = np.where(np.isfinite(value), value, 0.0)
        return self.ops.scores(self.d_output, value, "d_weights")


def _ending_in(rows: Array, *ends: Array) -> Array:
    # The rows may belong to several items of the batch, or have no columns at all.
    lead = np.broadcast_shapes(rows.shape[:-1], *(end.shape[:-1] for end in ends))
    missing = [np.zeros((*lead, 1), rows.dtype)] * (FOLDED - len(ends))
    spread = [np.broadcast_to(array, (*lead, array.shape[-1])) for array in (rows, *ends)]
    return np.concatenate([*spread, *missing], axis=-1)
