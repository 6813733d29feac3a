"""What surrounds the loops under a JAX trace: operands, conditions on them, and the results."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from portable_attention.backends import Array
from portable_attention.backends.namespace import jax_backend
from portable_attention.core.problem import Problem


class Operand(NamedTuple):
    """An array with (*batch, Hkv) as one axis, or the items of it that differ."""

    array: Array  # (n, G, rows, columns), without an axis G of size 1
    table: np.ndarray[Any, Any] | None  # which of the n each head reads; None: its own

    def chunk(self, first: Array, count: int) -> Array:
        array = self.array
        if array.shape[0] > 1:
            if self.table is None:
                array = lax.dynamic_slice_in_dim(array, first, count)
            else:
                numbers = lax.dynamic_slice_in_dim(jnp.asarray(self.table), first, count)
                array = jnp.take(array, numbers, axis=0)
        return array if array.ndim == 4 else array[:, jnp.newaxis]


def operand(array: Array | None, problem: Problem) -> Operand | None:
    """Return an array of a problem's shapes as one that is read by chunks of heads."""
    array = jax_backend().whole(array)
    if array is None:
        return None
    full = (*problem.batch, problem.kv_heads)
    lead = array.shape[:-3]
    lead = (*([1] * (len(full) - len(lead))), *lead)
    count = int(np.prod(lead))
    # XLA gives an axis of size 1 in the middle another place in memory, and copies the operand.
    own = array.shape[-2:] if array.shape[-3] == 1 else array.shape[-3:]
    flat = jnp.reshape(array, (count, *own))
    numbers = np.arange(count, dtype=np.int32).reshape(lead)
    table = np.broadcast_to(numbers, full).ravel()
    return Operand(flat, None if table.size == count else table)


def unite(blocks: Array, heads: int, problem: Problem) -> Array:
    """Turn (steps, chunk, G, block_q, columns) into (heads, G, Lq, columns)."""
    steps, chunk, groups, block_q, columns = blocks.shape
    count, length = heads // chunk, problem.query_length
    row_blocks = steps // count
    blocks = jnp.reshape(blocks, (count, row_blocks, chunk, groups, block_q, columns))
    blocks = jnp.reshape(jnp.moveaxis(blocks, 1, 3), (heads, groups, row_blocks, block_q, columns))
    whole = length // block_q
    if whole == row_blocks:
        return jnp.reshape(blocks, (heads, groups, length, columns))
    rest = length - whole * block_q
    first = jnp.reshape(blocks[:, :, :whole], (heads, groups, whole * block_q, columns))
    return jnp.concatenate([first, blocks[:, :, whole, block_q - rest :]], axis=2)


def all_finite(array: Array) -> Array:
    """Whether all numbers are finite. On a CPU, XLA is quicker at a sum than at `all`."""
    array = lax.stop_gradient(jax_backend().whole(array))
    return jnp.sum(array - array) == 0.0


def true_for_all(condition: Array) -> Array:
    """Return a condition that, under `vmap`, holds for everything that is mapped over.

    One that differed between them would not choose a branch any more, but run all of them.
    """
    found: Array = _true_for_all(condition)
    return found


def _all(condition: Array) -> Array:
    return jnp.all(condition)


_true_for_all: Any = jax.custom_batching.custom_vmap(_all)
_true_for_all.def_vmap(lambda size, batched, condition: (_true_for_all(condition), False))
