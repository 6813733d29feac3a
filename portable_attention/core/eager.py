"""The schedule for libraries that compute at once: a loop over tiles, in any library's calls."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from portable_attention.backends import Array, Backend
from portable_attention.core import masking, plan, tile
from portable_attention.core.dropout import kept as kept_pairs
from portable_attention.core.dropout import row_keys
from portable_attention.core.problem import Call, Limits, Problem


@dataclass
class Part:
    """The heads of one chunk: a call restricted to an index into (*batch, Hkv[, G])."""

    call: Call
    index: plan.Index

    def _take(self, array: Array | None) -> Array | None:
        return plan.take(array, self.index)

    @cached_property
    def query(self) -> Array:
        return self._take(self.call.query)

    @cached_property
    def key(self) -> Array:
        return self._take(self.call.key)

    @cached_property
    def value(self) -> Array:
        return self._take(self.call.value)

    @cached_property
    def mask(self) -> Array | None:
        return self._take(self.call.mask)

    @cached_property
    def bias(self) -> Array | None:
        return self._take(self.call.bias)

    @cached_property
    def sinks(self) -> Array | None:
        if self.call.sinks is None:
            return None
        heads = plan.take(self.call.sinks, self.index[len(self.call.problem.batch) :])
        dtype = self.call.backend.dtype(self.call.problem.compute_dtype)
        return self.call.backend.astype(heads, dtype)

    @cached_property
    def finite_values(self) -> bool:
        """Whether the values are known to be finite, so that a weight of 0 takes them away."""
        return self.call.backend.all_finite(self.value) is True

    @cached_property
    def limits(self) -> Limits:
        return plan.take_limits(self.call.limits, self.index)

    @cached_property
    def device_limits(self) -> Limits:
        return masking.limits_on_device(self.call.backend, self.limits, self.call.device)

    @cached_property
    def lead(self) -> tuple[int, ...]:
        """The sizes of (*batch, Hkv, G) in this chunk."""
        sizes = (*self.call.problem.batch, *self.call.problem.heads)
        whole = [slice(0, size) for size in sizes[len(self.index) :]]
        return tuple(
            len(range(*cut.indices(size)))
            for cut, size in zip((*self.index, *whole), sizes, strict=True)
        )

    @cached_property
    def dropout_indices(self) -> tuple[Array, Array]:
        """The batch and head numbers of this chunk, (*batch, 1, 1, 1, 1) and (Hkv, G, 1, 1)."""
        problem = self.call.problem
        split = len(problem.batch)
        batch = np.arange(int(np.prod(problem.batch))).reshape(*problem.batch, 1, 1, 1, 1)
        heads = np.arange(problem.kv_heads * problem.groups).reshape(*problem.heads, 1, 1)
        picked = batch[self.index[:split]], heads[self.index[split:]]
        backend, device = self.call.backend, self.call.device
        return (
            backend.asarray(picked[0], device, "int32"),
            backend.asarray(picked[1], device, "int32"),
        )

    def keys_of_rows(self, rows: Array) -> tuple[Array, Array] | None:
        """Return the dropout keys of rows (q, 1), or None without dropout."""
        if self.call.seed is None:
            return None
        return row_keys(self.call.seed, *self.dropout_indices, rows)


def run(call: Call) -> tuple[Array, Array]:
    """Return the output (*batch, Hkv, G, Lq, Dv) and the lse (*batch, Hkv, G, Lq) of a call."""
    problem, backend = call.problem, call.backend
    sizes = (*problem.batch, problem.kv_heads)
    budget = backend.score_budget(call.device)
    keys = plan.block_sizes(problem)[1]
    cap = max(16, budget // (problem.groups * keys))
    block_q, block_k = plan.block_sizes(problem, cap)
    capacity = plan.capacity(budget, problem.groups * block_q * block_k)
    grid = plan.chunks(sizes, capacity)
    outputs, lses = [], []
    for index in grid:
        part = Part(call, index)
        pieces = [
            attend_rows(part, (start, min(start + block_q, problem.query_length)), block_k)
            for start in range(0, problem.query_length, block_q)
        ]
        outputs.append(_join(backend, [piece[0] for piece in pieces], -2))
        lses.append(_join(backend, [piece[1] for piece in pieces], -1))
    return (
        _assemble(backend, outputs, sizes, capacity),
        _assemble(backend, lses, sizes, capacity),
    )


def attend_rows(part: Part, rows: tuple[int, int], block_k: int) -> tuple[Array, Array]:
    """Return the output and lse of a block of rows; exact whatever the inputs hold."""
    call, backend = part.call, part.call.backend
    problem, xp = call.problem, backend.xp
    dtype = backend.dtype(problem.compute_dtype)
    query = backend.astype(part.query[..., slice(*rows), :], dtype)
    query, late_scale = scale_query(backend, query, problem)

    row_numbers = xp.reshape(backend.arange(*rows, call.device), (-1, 1))
    keys_of_rows = part.keys_of_rows(row_numbers)
    shape = (*part.lead, rows[1] - rows[0], 1)
    state = tile.start(backend, shape, problem.value_width, query)
    occupied: Any = False
    infinite: tuple[Array, Array] | None = None

    found = plan.reach(part.limits, rows, problem.key_length)
    for columns in plan.tiles(found, block_k, problem.key_length):
        column_numbers = backend.arange(*columns, call.device)
        raw_bias = masking.block(part.bias, rows, columns)
        limits = Limits() if found.covers(*columns) else part.device_limits
        allowed = masking.both(
            [
                *masking.within_limits(limits, row_numbers, column_numbers),
                masking.block(part.mask, rows, columns),
                masking.not_masked(raw_bias),
            ]
        )
        kept = None
        if keys_of_rows is not None:
            kept = kept_pairs(keys_of_rows, column_numbers, problem.dropout_rate)
        key = backend.astype(part.key[..., slice(*columns), :], dtype)
        value = backend.astype(part.value[..., slice(*columns), :], dtype)
        if not part.finite_values:
            infinite = _add_infinities(
                backend,
                infinite,
                value,
                masking.both([allowed, kept]),
                (*shape[:-1], columns[1] - columns[0]),
            )
            value = xp.where(xp.isfinite(value), value, 0.0)
        scores = tile.tile_scores(
            backend,
            query,
            key,
            scale=late_scale,
            softcap=problem.softcap,
            bias=masking.bias_block(backend, raw_bias, dtype),
            allowed=allowed,
        )
        state = tile.update(backend, state, scores, value, kept)
        occupied = _any_allowed(xp, occupied, allowed)

    if occupied is False:
        occupied = xp.zeros(shape, dtype=xp.bool, device=call.device)
    output, lse = tile.finish(
        backend,
        state,
        occupied=None if occupied is True else occupied,
        sinks=part.sinks,
        keep_rate=1.0 - problem.dropout_rate,
    )
    if infinite is not None:
        output = output + masking.infinite_part(backend, *infinite)
    return backend.astype(output, backend.dtype(problem.dtype)), lse


def scale_query(backend: Backend, query: Array, problem: Problem) -> tuple[Array, float]:
    """Return the query times the scale, and the scale that is left for the scores.

    Scaling the query costs a pass over it instead of one over the scores. A scale that could push
    a query out of range is left to the scores.
    """
    if 1e-4 <= abs(problem.scale) <= 1.0 or problem.scale == 0.0:
        return (query if problem.scale == 1.0 else query * problem.scale), 1.0
    return query, problem.scale


def _any_allowed(xp: Any, occupied: Any, allowed: Array | None) -> Any:
    if occupied is True or allowed is None:
        return True
    some = xp.any(allowed, axis=-1, keepdims=True)
    return some if occupied is False else occupied | some


def _add_infinities(
    backend: Backend,
    seen: tuple[Array, Array] | None,
    value: Array,
    attended: Array | None,
    shape: tuple[int, ...],
) -> tuple[Array, Array]:
    """Count the infinite values that each row attends, apart from the finite ones.

    0 times infinity is NaN, so they cannot be in the product with the weights.
    """
    xp = backend.xp
    if attended is None:
        ones = xp.ones(shape, dtype=value.dtype, device=backend.device(value))
    else:
        ones = backend.astype(xp.broadcast_to(attended, shape), value.dtype)
    counts = []
    for number, part in enumerate(masking.infinities(backend, value, value.dtype)):
        product = backend.ops.product(ones, part)
        counts.append(product + (0.0 if seen is None else seen[number]))
    return counts[0], counts[1]


def _join(backend: Backend, pieces: list[Array], axis: int) -> Array:
    return pieces[0] if len(pieces) == 1 else backend.xp.concat(pieces, axis=axis)


def _assemble(
    backend: Backend, pieces: list[Array], sizes: tuple[int, ...], capacity: int
) -> Array:
    """Join the results of all chunks again, from the last axis to the first."""
    cuts = plan.cuts(sizes, capacity)
    for axis in reversed(range(len(sizes))):
        step = len(cuts[axis])
        pieces = [
            _join(backend, pieces[first : first + step], axis)
            for first in range(0, len(pieces), step)
        ]
    return pieces[0]
