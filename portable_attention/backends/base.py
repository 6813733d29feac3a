"""The hooks that the Array API standard has no words for, each with a portable default.

Everything here runs on any library that follows the standard; `array-api-strict` runs these
defaults and nothing else. A library that can do better overrides single methods.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any  # of whichever library the call is made with


class Declined(Exception):
    """Raised by a fused kernel that finds only when it is to run that it cannot take a call."""


def dtype_name(array: Array) -> str:
    """Return the plain name of an array's dtype, such as "float32" or "bfloat16"."""
    dtype = array.dtype
    return _numpy_name(dtype) if isinstance(dtype, np.dtype) else str(dtype).rpartition(".")[2]


@lru_cache(maxsize=256)
def _numpy_name(dtype: np.dtype[Any]) -> str:
    return dtype.name


class Ops:
    """The arithmetic of a tile.

    A method whose first argument is named `target` may reuse that argument's memory for its result,
    so a caller must not read the argument afterwards. The defaults here make new arrays, which is
    what automatic differentiation and traced libraries need.
    """

    def __init__(self, xp: ModuleType) -> None:
        self.xp = xp

    def scores(self, query: Array, key: Array, slot: str = "scores") -> Array:
        """Return query (..., Hkv, G, q, D) times key (..., Hkv, 1, k, D): (..., Hkv, G, q, k).

        `slot` names the buffer of the result where buffers are kept.
        """
        return self._grouped(query, self.xp.matrix_transpose(key[..., 0, :, :]))

    def product(self, weights: Array, value: Array) -> Array:
        """Return weights (..., Hkv, G, q, k) times value (..., Hkv, 1, k, Dv)."""
        return self._grouped(weights, value[..., 0, :, :])

    def transposed_product(self, weights: Array, rows: Array) -> Array:
        """Return weights (..., Hkv, G, q, k), transposed, times rows (..., Hkv, G, q, D).

        The result (..., Hkv, 1, k, D) is summed over the heads of each group.
        """
        weights, rows = self._fold(weights), self._fold(rows)
        product = self.matmul(self.xp.matrix_transpose(weights), rows)
        return self.xp.expand_dims(product, axis=-3)

    def _fold(self, array: Array) -> Array:
        *lead, groups, rows, columns = array.shape
        return self.xp.reshape(array, (*lead, groups * rows, columns))

    def _grouped(self, left: Array, right: Array) -> Array:
        # The query heads of a group become rows of one product: a broadcasting matmul would
        # copy the keys once per query head on libraries that expand its operands.
        groups, rows = left.shape[-3:-1]
        result = self.matmul(self._fold(left), right)
        return self.xp.reshape(result, (*result.shape[:-2], groups, rows, result.shape[-1]))

    def matmul(self, left: Array, right: Array) -> Array:
        return self.xp.matmul(left, right)

    def add(self, target: Array, other: Array) -> Array:
        return target + other

    def subtract(self, target: Array, other: Array) -> Array:
        return target - other

    def multiply(self, target: Array, other: Array | float) -> Array:
        return target * other

    def divide(self, target: Array, other: Array | float) -> Array:
        return target / other

    def exp(self, target: Array) -> Array:
        return self.xp.exp(target)

    def tanh(self, target: Array) -> Array:
        return self.xp.tanh(target)

    def select(self, target: Array, condition: Array, fill: float) -> Array:
        """Keep `target` where the condition holds, whatever stands elsewhere."""
        return self.xp.where(condition, target, fill)

    def row_max(self, array: Array) -> Array:
        return self.xp.max(array, axis=-1, keepdims=True)

    def row_sum(self, array: Array) -> Array:
        return self.xp.sum(array, axis=-1, keepdims=True)


class Backend:
    """One array library, as the algorithm sees it."""

    name = "array"  # as users know it, for messages
    schedule = "eager"  # how its arrays are run: "eager", or "scan" under a trace
    takes_numpy = False  # whether NumPy arrays are taken as constants
    on_host = False  # whether all its arrays lie in host memory
    uses_host_blas = True  # whether its products may be those of NumPy's BLAS

    kernels: tuple[Any, ...] = ()  # its fused attention kernels, `core.engines.Kernel`
    unconnected: dict[str, str] = {}  # noqa: RUF012, why others are not among them

    def __init__(self, xp: ModuleType, name: str | None = None) -> None:
        self.xp = xp
        self.name = name or self.name
        self.ops: Any = self.make_ops()

    def make_ops(self) -> Ops:
        return Ops(self.xp)

    def kernels_on(self, device: Any) -> tuple[Any, ...]:
        """Return the fused kernels that calls on a device are offered to, in this order."""
        return self.kernels

    def dtype(self, name: str) -> Any:
        """Return the library's own dtype of that name."""
        return getattr(self.xp, name)

    def astype(self, array: Array, dtype: Any) -> Array:
        return array if array.dtype == dtype else self.xp.astype(array, dtype)

    def copied(self, array: Array) -> Array:
        """Return the same numbers in memory of their own, where arrays can be written to."""
        return self.xp.asarray(array, copy=True)

    def asarray(self, values: np.ndarray[Any, Any], device: Any, dtype: str) -> Array:
        """Put small host values (lengths, offsets, seeds) on a device."""
        return self.xp.asarray(values.tolist(), dtype=self.dtype(dtype), device=device)

    def reshape(self, array: Array, shape: tuple[int, ...]) -> Array:
        return self.xp.reshape(array, shape)

    def autocast(self, *arrays: Array) -> tuple[Array, ...]:
        """Return query, key and value in the dtype that the library's user asked products to be."""
        return arrays

    def settings(self, device: Any) -> AbstractContextManager[None]:
        """Hold settings of the library that would change the arithmetic of a call."""
        return nullcontext()

    def host_call(self, call: Any) -> Any:
        """Return the same call on NumPy views of its arrays, or None where there are none."""
        return None

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """Return a NumPy view of an array in host memory."""
        raise TypeError(f"arrays of {self.name} are not seen as NumPy arrays")

    def from_host(self, array: np.ndarray[Any, Any]) -> Array:
        """Return an array over the memory of a NumPy array."""
        raise TypeError(f"arrays of {self.name} are not made from NumPy arrays")

    def read(self, array: Array) -> np.ndarray[Any, Any] | None:
        """Return the values of a small array, or None where they cannot be read."""
        return np.from_dlpack(array)

    def as_operand(self, name: str, array: Array) -> Array:
        """Return an array of this library, from one that `common_backend` let through."""
        return array

    def split_seed(self, seed: Array) -> Array:
        """Return the low and the high 32 bits of an integer that cannot be read, as int32."""
        wide = self.xp.astype(seed, self.xp.int64)
        low = (wide & 0xFFFFFFFF) ^ 0x80000000
        words = self.xp.stack([low - 0x80000000, wide >> 32])
        return self.xp.astype(words, self.xp.int32)

    def reshaped(self, array: Array, shape: tuple[int, ...]) -> Array:
        """Return a mask or bias, which may be as large as the scores, in another shape."""
        return self.reshape(array, shape)

    def whole(self, array: Array | None) -> Array | None:
        """Return the array that `reshaped` stands for."""
        return array

    def device(self, array: Array) -> Any:
        """Return where an array lies; None where it may still go anywhere."""
        return array.device

    def needs_gradient(self, *arrays: Array | None) -> bool:
        """Whether the library records this call in order to differentiate it."""
        return False

    def may_differentiate(self, *arrays: Array | None) -> bool:
        """Whether this call may be differentiated, by whatever means: True where none can tell."""
        return self.needs_gradient(*arrays)

    def safe_scores(self, query: Array, key: Array) -> Array:
        """Return the scores, with derivatives that do not feel what stands in masked pairs."""
        return self.ops.scores(query, key)

    def as_finite(self, array: Array) -> Array:
        """Replace NaN and infinities by 0, but leave the derivatives as they are."""
        return self.xp.where(self.xp.isfinite(array), array, 0.0)

    def all_finite(self, array: Array, below: float = float("inf")) -> bool | None:
        """Whether all magnitudes are finite, and below a bound; None where that cannot be read."""
        if 0 in array.shape:
            return True
        # Two reductions make no array; both of them give NaN where there is any.
        found = self.read((self.xp.max(array) < below) & (self.xp.min(array) > -below))
        return None if found is None else bool(found)

    def arange(self, start: int, stop: int, device: Any) -> Array:
        return self.xp.arange(start, stop, dtype=self.xp.int32, device=device)

    def stop_gradient(self, array: Array) -> Array:
        return array

    def score_budget(self, device: Any) -> int:
        """How many scores one tile of the eager schedule may hold, over all its heads."""
        return 1 << 20  # 4 MiB of float32: within the caches of a processor
