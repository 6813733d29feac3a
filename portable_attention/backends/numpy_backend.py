"""NumPy: arithmetic in buffers that are kept, so that a tile allocates nothing."""

from __future__ import annotations

import math
import os
import sys
import threading
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any

import numpy as np

from portable_attention.backends.base import Array, Backend, Ops
from portable_attention.backends.numpy_products import has_small_kernels, matmul

_LOG2_E = 1.0 / math.log(2.0)
# Sums of more numbers than this would lose digits in a product, which adds one after the other.
_LONG_ROW = 512
# Between calls, buffers for this many threads are kept, if a set is not larger than the default
# tiles make it.
_KEPT_SETS = min(8, os.cpu_count() or 1)
_KEPT_BYTES = 1 << 23
_MOST_VIEWS = 256  # of a thread during one call, which has few shapes unless its lengths are odd


def _has_fast_exp2() -> bool:
    """Whether NumPy takes exp2 of float32 from Intel's SVML: on Linux, with AVX-512.

    It then takes half the time of exp within the normal range, and is exact to 1 unit in the last
    place instead of 2.5; everywhere else it is the slower one.
    """
    found: Any = np.show_config(mode="dicts")
    names = found.get("SIMD Extensions", {}).get("found", [])
    return sys.platform == "linux" and bool({"X86_V4", "AVX512_SKX"} & set(names))


@cache
def numpy_backend() -> NumpyBackend:
    """Return the backend of NumPy, which has the Array API standard in its own namespace."""
    return NumpyBackend(np)


class NumpyBackend(Backend):
    """Arrays in host memory, run by the schedule with tile threads."""

    name = "numpy"
    on_host = True

    def dtype(self, name: str) -> Any:
        if name == "bfloat16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(name)

    def astype(self, array: Array, dtype: Any) -> Array:
        return array.astype(dtype, copy=False)

    def reshape(self, array: Array, shape: tuple[int, ...]) -> Array:
        return array.reshape(shape)

    def as_operand(self, name: str, array: Array) -> Array:
        return np.asarray(array)

    def asarray(self, values: np.ndarray[Any, Any], device: Any, dtype: str) -> Array:
        return np.asarray(values, dtype=dtype)

    def read(self, array: Array) -> np.ndarray[Any, Any] | None:
        return np.asarray(array)

    def host_call(self, call: Any) -> Any:
        return call

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        return np.asarray(array)

    def from_host(self, array: np.ndarray[Any, Any]) -> Array:
        return array

    def make_ops(self) -> Ops:
        return HostOps()


class _Buffers(threading.local):
    """The memory of a thread for intermediate results, by slot and dtype, and views of it."""

    def __init__(self) -> None:
        self.memory: dict[str, Array] = {}
        self.views: dict[Any, Array] = {}


class HostOps(Ops):
    """In-place arithmetic. The tile-sized results lie in buffers that belong to the thread.

    Products are made head by head (NumPy's matmul calls BLAS once a matrix, and never copies a
    broadcast operand), so that no head's bits depend on how many heads share the call.
    """

    def __init__(self) -> None:
        super().__init__(np)
        self._buffers = _Buffers()
        self._spare: list[dict[str, Array]] = []
        self._fast_exp2 = _has_fast_exp2()

    def buffer(self, slot: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return memory for one intermediate result; it is given out again for the next tile."""
        # Making the view anew takes microseconds, during which other threads wait for Python.
        views = self._buffers.views
        view = views.get((slot, shape, dtype))
        if view is not None:
            return view
        buffers = self._buffers.memory
        if not buffers and self._spare:
            with suppress(IndexError):  # another thread was faster
                buffers.update(self._spare.pop())
        size = math.prod(shape)
        key = f"{slot}-{np.dtype(dtype).char}"
        memory = buffers.get(key)
        if memory is None or memory.size < size:
            memory = buffers[key] = np.empty(size, dtype)
            views.clear()  # which may be of the memory that was too small
        elif len(views) >= _MOST_VIEWS:
            views.clear()
        view = views[slot, shape, dtype] = memory[:size].reshape(shape)
        return view

    def release(self) -> None:
        """Give back the buffers of this thread: new memory costs as much as a pass over it."""
        buffers, self._buffers.memory = self._buffers.memory, {}
        self._buffers.views.clear()
        size = sum(memory.nbytes for memory in buffers.values())
        if size <= _KEPT_BYTES and len(self._spare) < _KEPT_SETS:
            self._spare.append(buffers)

    def scores(self, query: Array, key: Array, slot: str = "scores") -> Array:
        return self._matmul(slot, query, np.swapaxes(key, -1, -2))

    def transposed_product(self, weights: Array, rows: Array) -> Array:
        product = self._matmul("transposed", np.swapaxes(weights, -1, -2), rows)
        return product if product.shape[-3] == 1 else product.sum(axis=-3, keepdims=True)

    def product(self, weights: Array, value: Array, slot: str = "product") -> Array:
        return self._matmul(slot, weights, value)

    def rows_for_columns(self, dtype: Any) -> int:
        """Return how many queries pay for keys that are packed in columns.

        Most products are 3 to 5 % faster with them, small ones need them.
        """
        return 128 if dtype == np.float32 and has_small_kernels() else 1536

    def _matmul(self, slot: str, left: Array, right: Array) -> Array:
        place = (slot, left.shape, right.shape, left.dtype)
        out = self._buffers.views.get(place)
        if out is None:
            lead = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
            out = self.buffer(slot, (*lead, left.shape[-2], right.shape[-1]), left.dtype)
            self._buffers.views[place] = out
        return matmul(left, right, out)

    def add(self, target: Array, other: Array) -> Array:
        return np.add(target, other, out=_reused(target, other))

    def subtract(self, target: Array, other: Array) -> Array:
        return np.subtract(target, other, out=_reused(target, other))

    def multiply(self, target: Array, other: Array | float) -> Array:
        return np.multiply(target, other, out=_reused(target, other))

    def divide(self, target: Array, other: Array | float) -> Array:
        return np.divide(target, other, out=_reused(target, other))

    def exp(self, target: Array) -> Array:
        return np.exp(target, out=target)

    def exponent_unit(self, dtype: Any) -> float:
        """Return the factor that turns exponents into those that `exp_of_units` takes."""
        return _LOG2_E if self._fast_exp2 and dtype == np.float32 else 1.0

    def exp_of_units(self, target: Array) -> Array:
        """Return the exponentials of exponents that are not far below 0, or are few.

        Powers of 2 below the normal range, 0 among them, take 20 to 150 times as long as others.
        """
        function = np.exp if self.exponent_unit(target.dtype) == 1.0 else np.exp2
        return function(target, out=target)

    def scaled(self, array: Array, factor: float, slot: str) -> Array:
        """Return the array times a factor, in packed rows."""
        return np.multiply(array, factor, out=self.buffer(slot, array.shape, array.dtype))

    def tanh(self, target: Array) -> Array:
        return np.tanh(target, out=target)

    def select(self, target: Array, condition: Array, fill: float) -> Array:
        if _reused(target, condition) is None:
            return np.where(condition, target, fill)
        # By bits, in a seventh of the time of a masked copy, whose branches nobody can predict.
        word = np.dtype(f"i{target.itemsize}")
        keep = self.buffer("keep", condition.shape, word)
        np.copyto(keep, condition)
        np.negative(keep, out=keep)
        bits = target.view(word)
        np.bitwise_and(bits, keep, out=bits)
        if fill != 0.0:
            np.invert(keep, out=keep)
            np.bitwise_and(keep, np.array(fill, target.dtype).view(word), out=keep)
            np.bitwise_or(bits, keep, out=bits)
        return target

    def row_sum(self, array: Array) -> Array:
        if array.shape[-1] > _LONG_ROW:
            total: Array = np.add.reduce(array, axis=-1, keepdims=True)  # pairwise
            return total
        # A product with ones costs a quarter of a reduction along the rows.
        return np.matmul(array, ones(array.shape[-1], array.dtype))


@lru_cache(maxsize=64)
def ones(count: int, dtype: Any) -> Array:
    """Return a column of ones, which is not to be written to."""
    return np.ones((count, 1), dtype)


def _reused(target: Array, other: Array | float) -> Array | None:
    """Return `target`, or None where the result is larger: the batch may be that of `other`."""
    shape: tuple[int, ...] = np.shape(other)
    if not shape or shape == target.shape:
        return target
    fits = len(shape) <= target.ndim and all(
        size in (1, full)
        for size, full in zip(reversed(shape), reversed(target.shape), strict=False)
    )
    return target if fits else None
