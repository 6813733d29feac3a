"""JAX: traced arrays, the products' precision, and derivatives that NaN does not leak into."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from portable_attention.backends.base import Array, Backend, Ops
from portable_attention.backends.jax_cudnn import CudnnOfJax


class JaxBackend(Backend):
    """Arrays of JAX, eager or traced, run by one compiled loop over tiles."""

    name = "jax"
    schedule = "scan"
    takes_numpy = True
    uses_host_blas = False
    kernels = (CudnnOfJax(),)
    unconnected = {  # noqa: RUF012
        "jax.nn.dot_product_attention (XLA)": "not connected: it makes an array of shape (Lq, Lk)",
    }

    def make_ops(self) -> Ops:
        return JaxOps(jnp)

    def settings(self, device: Any) -> AbstractContextManager[None]:
        # Users may have forbidden themselves what tiles, rows and columns do all the time.
        allowed: AbstractContextManager[None] = jax.numpy_rank_promotion("allow")
        return allowed

    def copied(self, array: Array) -> Array:
        return array  # nobody can write to it

    def asarray(self, values: np.ndarray[Any, Any], device: Any, dtype: str) -> Array:
        return jnp.asarray(values, dtype=dtype)

    def as_operand(self, name: str, array: Array) -> Array:
        if name == "bias" and isinstance(array, np.ndarray) and array.dtype == np.float64:
            # Without 64-bit numbers a finite bias would become -inf, and so a mask.
            largest = jnp.finfo(jnp.asarray(0.0).dtype).max
            array = np.where(np.isfinite(array), np.clip(array, -largest, largest), array)
        return jnp.asarray(array)

    def reshaped(self, array: Array, shape: tuple[int, ...]) -> Array:
        return Reshaped(array, shape)

    def whole(self, array: Array | None) -> Array | None:
        return jnp.reshape(array.array, array.shape) if isinstance(array, Reshaped) else array

    def split_seed(self, seed: Array) -> Array:
        bits = 8 * seed.dtype.itemsize
        if bits <= 32:
            low = seed.astype(jnp.int32)
            high = jnp.zeros_like(low) if seed.dtype.kind == "u" else low >> 31
        else:
            low, high = seed.astype(jnp.int32), (seed >> 32).astype(jnp.int32)
        return jnp.stack([low, high])

    def device(self, array: Array) -> Any:
        if isinstance(array, jax.core.Tracer) or not getattr(array, "committed", False):
            return None
        devices = array.devices()
        return next(iter(devices)) if len(devices) == 1 else None  # sharded: JAX decides

    def read(self, array: Array) -> np.ndarray[Any, Any] | None:
        return None if isinstance(array, jax.core.Tracer) else np.asarray(array)

    def stop_gradient(self, array: Array) -> Array:
        return lax.stop_gradient(array)

    def safe_scores(self, query: Array, key: Array) -> Array:
        # The derivative of a masked score is 0, and 0 times a NaN in its key would be NaN: the
        # finite numbers carry the derivative, and what is not finite is added without one. (A
        # custom derivative rule would say the same, but a scan differentiated twice drops it.)
        scores = self.ops.scores(finite_or_zero(query), finite_or_zero(key))
        query, key = lax.stop_gradient(query), lax.stop_gradient(key)

        def rest() -> Array:
            found = self.ops.scores(query, key)
            return jnp.where(jnp.isfinite(found), 0.0, found)

        ordinary = jnp.all(jnp.isfinite(query)) & jnp.all(jnp.isfinite(key))
        return scores + lax.cond(ordinary, lambda: jnp.zeros_like(scores), rest)

    def as_finite(self, array: Array) -> Array:
        return _as_finite(array)

    def score_budget(self, device: Any) -> int:
        return 1 << 20 if jax.default_backend() == "cpu" else 1 << 25


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["shape"])
@dataclass(frozen=True)
class Reshaped:
    """An array that gets another shape where it is compiled: before, that would copy it."""

    array: Array
    shape: tuple[int, ...]

    @property
    def dtype(self) -> Any:
        return self.array.dtype


class JaxOps(Ops):
    """Products in full precision, which is not the default on accelerators."""

    def matmul(self, left: Array, right: Array) -> Array:
        return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)


def finite_or_zero(array: Array) -> Array:
    """Replace NaN and infinities by 0, and their derivatives, too."""
    return jnp.where(jnp.isfinite(array), array, 0.0)


@jax.custom_jvp
def _as_finite(array: Array) -> Array:
    return finite_or_zero(array)


@_as_finite.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    return _as_finite(*primals), tangents[0]
