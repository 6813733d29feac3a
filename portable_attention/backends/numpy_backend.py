"""NumPy: arithmetic in buffers that are kept, so that a tile allocates nothing."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numpy as np

from portable_attention.backends.base import Array, Backend, Ops


@cache
def numpy_backend() -> NumpyBackend:
    """Return the backend of NumPy, which has the Array API standard in its own namespace."""
    return NumpyBackend(np)


class NumpyBackend(Backend):
    """Arrays in host memory, run by the schedule with tile threads."""

    name = "numpy"

    def dtype(self, name: str) -> Any:
        if name == "bfloat16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return np.dtype(name)

    def astype(self, array: Array, dtype: Any) -> Array:
        return array.astype(dtype, copy=False)

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


class HostOps(Ops):
    """In-place arithmetic. The tile-sized results lie in buffers that belong to the thread.

    Products are made head by head (NumPy's matmul calls BLAS once a matrix, and never copies a
    broadcast operand), so that no head's bits depend on how many heads share the call.
    """

    def __init__(self) -> None:
        super().__init__(np)
        self._local = threading.local()

    def buffer(self, slot: str, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return memory for one intermediate result; it is given out again for the next tile."""
        buffers: dict[str, Array] = self._local.__dict__
        size = int(np.prod(shape))
        key = f"{slot}-{np.dtype(dtype).char}"
        memory = buffers.get(key)
        if memory is None or memory.size < size:
            memory = buffers[key] = np.empty(size, dtype)
        return memory[:size].reshape(shape)

    def release(self) -> None:
        """Give this thread's buffers back."""
        self._local.__dict__.clear()

    def scores(self, query: Array, key: Array, slot: str = "scores") -> Array:
        return self._matmul(slot, query, np.swapaxes(key, -1, -2))

    def transposed_product(self, weights: Array, rows: Array) -> Array:
        product = self._matmul("transposed", np.swapaxes(weights, -1, -2), rows)
        return product if product.shape[-3] == 1 else product.sum(axis=-3, keepdims=True)

    def product(self, weights: Array, value: Array) -> Array:
        return self._matmul("product", weights, value)

    def _matmul(self, slot: str, left: Array, right: Array) -> Array:
        lead = np.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        out = self.buffer(slot, (*lead, left.shape[-2], right.shape[-1]), left.dtype)
        return np.matmul(left, right, out=out)

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

    def tanh(self, target: Array) -> Array:
        return np.tanh(target, out=target)

    def select(self, target: Array, condition: Array, fill: float) -> Array:
        if _reused(target, condition) is None:
            return np.where(condition, target, fill)
        np.copyto(target, fill, where=np.logical_not(condition))
        return target

    def row_sum(self, array: Array) -> Array:
        # A product with ones costs a quarter of a reduction along the rows.
        ones = np.ones((array.shape[-1], 1), array.dtype)
        return np.matmul(array, ones)


def _reused(target: Array, other: Array | float) -> Array | None:
    """Return `target`, or None where the result is larger: the batch may be that of `other`."""
    shape: tuple[int, ...] = np.shape(other)
    fits = len(shape) <= target.ndim and all(
        size in (1, full)
        for size, full in zip(reversed(shape), reversed(target.shape), strict=False)
    )
    return target if fits else None
