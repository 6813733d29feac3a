"""What one call asks for, once it has been validated.

Shapes inside: every array keeps all the batch axes, as size 1 where it is broadcast, and the heads
stand as two axes, key/value heads and the query heads that share one.

    query   (*batch, Hkv, G, Lq, D)      mask, bias  (*batch, Hkv, G, Lq, Lk), any of them 1
    key     (*batch, Hkv, 1, Lk, D)      sinks       (Hkv, G, 1, 1)
    value   (*batch, Hkv, 1, Lk, Dv)     lengths and offsets: a number, or (*batch, 1, 1, 1, 1)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from portable_attention.backends import Array, Backend

# A position limit: None (no limit), a number, host values over the batch, or an array that
# cannot be read (under a trace).
Limit = Any


@dataclass(frozen=True)
class Problem:
    """The part of a call that is known before any value is: hashable, so that it can be traced."""

    batch: tuple[int, ...]
    kv_heads: int
    groups: int  # query heads per key/value head
    query_length: int
    key_length: int
    width: int
    value_width: int
    dtype: str  # of query, key, value and the output
    compute_dtype: str  # of everything between, and of lse
    scale: float
    softcap: float | None
    dropout_rate: float
    block_size: tuple[int, int] | None
    span: int | None  # keys between both ends of the window, where both are bounded

    @property
    def heads(self) -> tuple[int, int]:
        return self.kv_heads, self.groups

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (*self.batch, *self.heads, self.query_length, self.value_width)


@dataclass(frozen=True)
class Limits:
    """Which keys a row may attend because of where it stands.

    Row i may attend key j iff low + i <= j < high + i, j < key_length and i < query_length.
    """

    low: Limit = None
    high: Limit = None
    key_length: Limit = None
    query_length: Limit = None

    def items(self) -> list[tuple[str, Limit]]:
        pairs = (
            ("low", self.low),
            ("high", self.high),
            ("key_length", self.key_length),
            ("query_length", self.query_length),
        )
        return [pair for pair in pairs if pair[1] is not None]


@dataclass(frozen=True)
class Call:
    """A validated call: the problem, and the arrays it is about."""

    problem: Problem
    backend: Backend
    query: Array
    key: Array
    value: Array
    mask: Array | None
    bias: Array | None
    sinks: Array | None
    limits: Limits
    seed: Array | None  # the two 32-bit words of the seed, low first
    device: Any
    headless: bool  # all inputs were 2-D
    layout: str
    engine: str

    def inner(self, array: Array, *, rows: bool = False) -> Array:
        """Bring what is like the output (or, with `rows`, the lse) to the inner axes and dtype."""
        backend, shape = self.backend, self.problem.output_shape
        if not rows and self.layout == "blhd":
            array = swap_heads(backend, array)
        array = backend.reshape(array, shape[:-1] if rows else shape)
        return backend.astype(array, backend.dtype(self.problem.compute_dtype))

    def outer(self, name: str, gradient: Array, like: Array) -> Array:
        """Bring a gradient from the inner axes to the shape and dtype of its argument."""
        backend, shape = self.backend, tuple(like.shape)
        swapped = self.layout == "blhd" and name in ("query", "key", "value")
        if swapped:
            shape = (*shape[:-3], shape[-2], shape[-3], shape[-1])
        gradient = backend.reshape(gradient, shape)
        if swapped:
            gradient = swap_heads(backend, gradient)
        return backend.astype(gradient, like.dtype)

    def restore(self, output: Array, lse: Array) -> tuple[Array, Array]:
        """Bring results (*batch, Hkv, G, Lq, Dv) and (*batch, Hkv, G, Lq) to the caller's axes."""
        problem, reshape = self.problem, self.backend.reshape
        lead = (*problem.batch, problem.kv_heads * problem.groups)
        if self.headless:
            lead = ()
        length = problem.query_length
        output = reshape(output, (*lead, length, problem.value_width))
        lse = reshape(lse, (*lead, length))
        return (swap_heads(self.backend, output) if self.layout == "blhd" else output), lse


def swap_heads(backend: Backend, array: Array) -> Array:
    """Exchange the axes of heads and length, (..., H, L, D) and (..., L, H, D)."""
    axes = tuple(range(array.ndim - 3))
    last = array.ndim
    return backend.xp.permute_dims(array, (*axes, last - 2, last - 3, last - 1))


def is_host(limit: Limit) -> bool:
    """Whether the values of a limit are known on the host."""
    return limit is None or isinstance(limit, int | np.ndarray)
