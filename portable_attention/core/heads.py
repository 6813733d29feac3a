"""The heads of one chunk in host memory, with what their blocks of rows share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import numpy as np

from portable_attention.backends import Array
from portable_attention.backends.numpy_backend import HostOps, numpy_backend
from portable_attention.core import eager, masking, plan
from portable_attention.core.folded import FOLDED, Folded, pack_columns
from portable_attention.core.problem import Call, Problem

# Patterns of the diagonal in a tile that a call keeps: a few bytes a pair, and few differ.
_MOST_BANDS = 8
# Rows of a block whose bias is looked at, and where the largest of a row must lie so that float32
# holds the denominator with room on both sides.
_SAMPLED = 16
_LOW_BIAS, _HIGH_BIAS = -8.0, 24.0
# Powers of 2 below the normal range, exp(-87), take NumPy 20 to 150 times as long as others.
_FAR_BELOW = -64.0
# Squares below this may have lost digits: a norm counts as its root at the least.
_SMALL_SQUARE = 1e-30


class Way(IntEnum):
    """How a block of rows is computed."""

    ANY = 0  # relative to a running maximum
    BOUNDED_ABOVE = 1  # without one: exp cannot overflow, but may be taken of numbers far below 0
    BOUNDED = 2


class Heads(eager.Part):
    """The heads of one chunk, with what their blocks of rows share: widened keys, and bounds."""

    def __init__(
        self,
        call: Call,
        index: plan.Index,
        block_k: int,
        *,
        forward: bool = False,
        bands: dict[tuple[Any, ...], Array] | None = None,
    ) -> None:
        super().__init__(call, index)
        self.block_k = block_k
        self.forward = forward
        self.dtype = np.dtype(call.problem.compute_dtype)
        self.ops: HostOps = call.backend.ops
        self.in_columns = in_columns(call.problem)
        self._lock = threading.RLock()  # the norms need the widened keys
        self._shared: dict[Any, Any] = {}
        self._bands: dict[tuple[Any, ...], Array] = {} if bands is None else bands

    def within_limits(self, rows: tuple[int, int], columns: tuple[int, int]) -> list[Array]:
        # Under causal and a window alone, tiles that lie alike beside the diagonal are alike.
        limits = self.limits
        moved = limits.key_length is None and limits.query_length is None
        if not (moved and all(isinstance(limit, int) for _, limit in limits.items())):
            return super().within_limits(rows, columns)
        sizes = (rows[1] - rows[0], columns[1] - columns[0])
        place = (limits.low, limits.high, rows[0] - columns[0], *sizes)
        if place not in self._bands:
            (*one, last) = super().within_limits(rows, columns)
            band = one[0] & last if one else last
            if len(self._bands) >= _MOST_BANDS:
                return [band]
            self._bands[place] = band
        return [self._bands[place]]

    def columns(self, found: plan.Reach, block_k: int) -> Iterator[tuple[int, int]]:
        problem = self.call.problem
        free = problem.span is not None and problem.block_size is None
        return plan.tiles(found, block_k, problem.key_length, free=free)

    def singles(self) -> Iterator[Heads]:
        """Return each head of this chunk by itself."""
        starts = [range(cut.start, cut.stop) for cut in self.index]
        for numbers in np.ndindex(*(len(part) for part in starts)):
            index = tuple(
                slice(part[number], part[number] + 1)
                for part, number in zip(starts, numbers, strict=True)
            )
            yield self._of(index)

    def alike(self, ways: Array) -> Iterator[Heads]:
        """Return parts of this chunk whose heads all have the same way, (..., 1, 1)."""
        return self.singles()

    def _of(self, index: plan.Index) -> Heads:
        return type(self)(self.call, index, self.block_k, forward=self.forward, bands=self._bands)

    def _once(self, name: Any, make: Any) -> Any:
        if name not in self._shared:
            with self._lock:
                if name not in self._shared:
                    self._shared[name] = make()
        return self._shared[name]

    def query_rows(self, rows: tuple[int, int]) -> Array:
        return self._packed(self.query[..., slice(*rows), :])

    def tile_of(self, name: str, columns: tuple[int, int]) -> Array:
        """Return a tile of the keys or values in packed rows, or keys in packed columns."""
        if name == "key" and self.in_columns and self.forward:
            return self.folded(name, columns)
        array, packed = self._once(name, lambda: self._rows_of(name))
        rows = array[..., slice(*columns), :]
        return rows if packed else self._packed(rows)

    def _rows_of(self, name: str) -> tuple[Array, bool]:
        """Return the keys or values that tiles are taken from, and whether they are packed."""
        array = self.key if name == "key" else self.value
        # Few blocks of rows share a tile under a window.
        if self.call.problem.span is None:
            array = self._packed(array)
        return array, self._is_packed(array)

    def folded(self, name: str, columns: tuple[int, int]) -> Array:
        """Return a tile in packed columns, which backwards end in ones."""
        array = self.key if name == "key" else self.value
        ones = 0 if self.forward else FOLDED
        made: Array = self._once(
            (name, columns), lambda: pack_columns(array[..., slice(*columns), :], self.dtype, ones)
        )
        return made

    def fold(self, query: Array, shift: Array, d_output: Array, inner: Array) -> Folded | None:
        bare = self.call.problem.softcap is None and self.call.bias is None
        if not (bare and self.in_columns and self.call.seed is None):
            return None
        return Folded(self.ops, self.folded, query, shift, d_output, inner)

    def _is_packed(self, array: Array) -> bool:
        rows = (array.shape[-1] * array.itemsize, array.itemsize)
        packed = array.dtype == self.dtype and array.strides[-2:] == rows
        return bool(packed and array.flags.aligned)

    def _packed(self, array: Array) -> Array:
        """Return an array in the dtype of the scores and in packed rows, aligned.

        BLAS wants them so, and gives other bits for other strides.
        """
        if self._is_packed(array):
            return array
        return np.require(array, self.dtype, ("C", "A"))

    @property
    def largest_keys(self) -> tuple[Array, Array]:
        """The largest norm of a head's keys, squared, and whether all are finite: (..., 1, 1)."""
        found: tuple[Array, Array] = self._once("norms", self._find_largest_keys)
        return found

    def ways_of_bias(self, rows: tuple[int, int]) -> Array:
        """Return the ways that suit the bias of some of these rows, by head: (..., 1, 1).

        They are a guess at the other rows. What is masked takes no part.
        """
        problem = self.call.problem
        step = max(1, (rows[1] - rows[0]) // _SAMPLED)
        row_numbers = np.arange(*rows)[::step, np.newaxis]
        found = plan.reach(self.limits, rows, problem.key_length)
        largest: Any = np.full((1, 1), -np.inf, self.dtype)
        smallest: Any = np.zeros((1, 1), self.dtype)
        for columns in self.columns(found, self.block_k):
            bias, mask = (
                block if block is None or block.shape[-2] == 1 else block[..., ::step, :]
                for block in (
                    masking.block(array, rows, columns) for array in (self.bias, self.mask)
                )
            )
            bias = np.asarray(masking.bias_block(self.call.backend, bias, self.dtype))
            conditions = [mask]
            if not found.covers(*columns):
                column_numbers = np.arange(*columns)
                conditions += masking.within_limits(self.limits, row_numbers, column_numbers)
            allowed = masking.both(conditions)
            above = bias if allowed is None else np.where(allowed, bias, -np.inf)
            below = bias if allowed is None else np.where(allowed, bias, 0.0)
            largest = np.maximum(largest, above.max(axis=-1, keepdims=True))
            smallest = np.minimum(smallest, below.min(axis=(-1, -2), keepdims=True))
        # Rows that are all masked are empty, which any way finds.
        near_0 = (largest > _LOW_BIAS) & (largest < _HIGH_BIAS) | (largest == -np.inf)
        far = smallest < _FAR_BELOW if self.ops.exponent_unit(self.dtype) != 1.0 else np.False_
        bounded = np.where(far, Way.BOUNDED_ABOVE, Way.BOUNDED)
        return np.where(near_0.all(axis=-2, keepdims=True), bounded, Way.ANY)

    def _find_largest_keys(self) -> tuple[Array, Array]:
        length = self.call.problem.key_length
        if self._is_packed(self.key):
            return largest_norm(self.key)
        found = [
            largest_norm(self._packed(self.key[..., first : first + self.block_k, :]))
            for first in range(0, length, self.block_k)
        ]
        shape = (*self.key.shape[:-2], 1, 1)
        largest, finite = np.zeros(shape, self.dtype), np.ones(shape, bool)
        for norm, whole in found:
            np.maximum(largest, norm, out=largest)
            finite &= whole
        return largest, finite


def in_columns(problem: Problem) -> bool:
    """Whether enough rows meet the same keys for these to be packed in columns."""
    rows: int = numpy_backend().ops.rows_for_columns(np.dtype(problem.compute_dtype))
    return problem.query_length >= rows and problem.span is None


def largest_norm(rows: Array, squares: Array | None = None) -> tuple[Array, Array]:
    """Return the largest norm of rows, squared, and whether all of them are finite: (..., 1, 1).

    The squares of all norms may be given.

    A row with NaN or infinities does not count. Where it is attended, the result is not finite
    whatever is done here; where it is masked, it must not decide anything.
    """
    if squares is None:
        squares = np.vecdot(rows, rows)
    largest = squares.max(axis=-1, initial=_SMALL_SQUARE)
    finite = np.isfinite(largest)
    if not finite.all():
        whole = np.isfinite(rows).all(axis=-1)
        largest = np.where(whole, squares, 0.0).max(axis=-1, initial=_SMALL_SQUARE)
        finite = whole.all(axis=-1)
    axes = (..., np.newaxis, np.newaxis)
    return largest[axes], finite[axes]
