"""The schedule for libraries that compute at once: a loop over tiles, in any library's calls."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from portable_attention.backends import Array, Backend
from portable_attention.backends.base import dtype_name
from portable_attention.core import masking, plan, tile
from portable_attention.core.dropout import kept as kept_pairs
from portable_attention.core.dropout import row_keys
from portable_attention.core.problem import Call, Limits, Problem


class Tile(NamedTuple):
    """What rows of a block meet in a block of keys; None where there is nothing to apply."""

    rows: tuple[int, int]  # within the block
    columns: tuple[int, int]
    key: Array
    value: Array
    bias: Array | None
    allowed: Array | None
    kept: Array | None


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

    def query_rows(self, rows: tuple[int, int]) -> Array:
        """Return a block of the queries in the dtype of the scores."""
        backend = self.call.backend
        dtype = backend.dtype(self.call.problem.compute_dtype)
        return backend.astype(self.query[..., slice(*rows), :], dtype)

    def tile_of(self, name: str, columns: tuple[int, int]) -> Array:
        """Return a tile of the keys or values in the dtype of the scores."""
        backend = self.call.backend
        array = self.key if name == "key" else self.value
        dtype = backend.dtype(self.call.problem.compute_dtype)
        return backend.astype(array[..., slice(*columns), :], dtype)

    @cached_property
    def ordinary_values(self) -> bool:
        """Whether the values are known to be finite, and far enough from overflow to be summed."""
        backend = self.call.backend
        return backend.all_finite(self.value, masking.LARGE_VALUE) is True

    @cached_property
    def value_factor(self) -> Array:
        """A power of two by head, (..., Hkv, 1, 1, 1), that makes sums of its values safe."""
        dtype = self.call.backend.dtype(self.call.problem.compute_dtype)
        return masking.value_factor(self.call.backend, self.value, dtype)

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
        chosen = [cut.stop - cut.start for cut in self.index]
        return (*chosen, *sizes[len(chosen) :])

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

    def fold(self, query: Array, shift: Array, d_output: Array, inner: Array) -> Any:
        """Return what makes weights and their gradients in fewer passes, where there is such."""
        return None

    def columns(self, found: plan.Reach, block_k: int) -> Iterator[tuple[int, int]]:
        """Return the tiles of keys that a reach touches, which lie alike for all rows."""
        return plan.tiles(found, block_k, self.call.problem.key_length)

    def tiles(
        self,
        rows: tuple[int, int],
        block_k: int,
        *,
        trim: bool = False,
        narrow: bool = False,
        finite: bool = False,
    ) -> Iterator[Tile]:
        """Return the tiles of keys that a block of rows may attend.

        With `narrow`, the last one ends where the rows reach no more. With `trim`, a tile has only
        those rows of the block that reach it. With `finite`, a bias of -inf is left to do its work
        by itself, as it does beside finite scores.
        """
        backend, problem = self.call.backend, self.call.problem
        dtype = backend.dtype(problem.compute_dtype)
        keys_of_rows = None
        if self.call.seed is not None:
            row_numbers = backend.xp.reshape(backend.arange(*rows, self.call.device), (-1, 1))
            keys_of_rows = row_keys(self.call.seed, *self.dropout_indices, row_numbers)
        found = plan.reach(self.limits, rows, problem.key_length)
        limits = self.limits.items()
        limited = bool(limits)
        end = problem.key_length
        # What one item reaches must not decide about the tiles of another.
        if narrow and all(isinstance(limit, int) for _, limit in limits):
            end = plan.whole_vectors(found.stop)
        for start, stop in self.columns(found, block_k):
            columns = start, min(stop, end)
            here = rows
            conditions: list[Array | None] = []
            if limited and not found.covers(*columns):
                if trim:
                    here = plan.rows_reaching(self.limits, rows, columns)
                if here == rows or not self._covers(here, columns):
                    conditions += self.within_limits(here, columns)
            bias = None
            if self.mask is not None:
                conditions.append(masking.block(self.mask, here, columns))
            if self.bias is not None:
                bias = masking.block(self.bias, here, columns)
                if not finite:
                    conditions.append(masking.not_masked(bias))
                bias = masking.bias_block(backend, bias, dtype)
            local = (here[0] - rows[0], here[1] - rows[0])
            kept = None
            if keys_of_rows is not None:
                column_numbers = backend.arange(*columns, self.call.device)
                picked = tuple(part[..., slice(*local), :] for part in keys_of_rows)
                kept = kept_pairs(picked, column_numbers, problem.dropout_rate)
            yield Tile(
                local,
                columns,
                self.tile_of("key", columns),
                self.tile_of("value", columns),
                bias,
                masking.both(conditions) if conditions else None,
                kept,
            )

    def _covers(self, rows: tuple[int, int], columns: tuple[int, int]) -> bool:
        return plan.reach(self.limits, rows, self.call.problem.key_length).covers(*columns)

    def within_limits(self, rows: tuple[int, int], columns: tuple[int, int]) -> list[Array]:
        """Return which pairs of a tile its limits allow, as conditions that must all hold."""
        backend, device = self.call.backend, self.call.device
        row_numbers = backend.xp.reshape(backend.arange(*rows, device), (-1, 1))
        column_numbers = backend.arange(*columns, device)
        return masking.within_limits(self.device_limits, row_numbers, column_numbers)


def run(call: Call, dtype: Any) -> tuple[Array, Array]:
    """Return the output (*batch, Hkv, G, Lq, Dv) and the lse (*batch, Hkv, G, Lq) of a call."""
    problem, backend = call.problem, call.backend
    operands = {name: getattr(call, name) for name in ("query", "key", "value", "bias", "sinks")}
    if backend.may_differentiate(*operands.values()):
        call = widened(call, operands)
    (block_q, block_k), capacity = plan.batching(problem, backend.score_budget(call.device))
    cuts = plan.cuts((*problem.batch, problem.kv_heads), capacity)
    outputs, lses = [], []
    for index in itertools.product(*cuts):
        part = Part(call, index)
        pieces = [
            attend_rows(part, (start, min(start + block_q, problem.query_length)), block_k)
            for start in range(0, problem.query_length, block_q)
        ]
        outputs.append(backend.astype(join(backend, [piece[0] for piece in pieces], -2), dtype))
        lses.append(join(backend, [piece[1] for piece in pieces], -1))
    return assemble(backend, outputs, cuts), assemble(backend, lses, cuts)


def widened(call: Call, operands: dict[str, Array | None]) -> Call:
    """Return the call with what is of half precision widened as a whole, not tile by tile.

    Automatic differentiation then sums the gradients of the tiles in the dtype of the scores, and
    rounds each sum once, in the derivative of this cast.
    """
    backend = call.backend
    dtype = backend.dtype(call.problem.compute_dtype)
    wider = {
        name: backend.astype(array, dtype)
        for name, array in operands.items()
        if array is not None and dtype_name(array) in ("float16", "bfloat16")
    }
    return replace(call, **wider)


def attend_rows(part: Part, rows: tuple[int, int], block_k: int) -> tuple[Array, Array]:
    """Return the output and lse of a block of rows in the dtype of the scores.

    They are exact whatever the inputs hold.
    """
    call, backend = part.call, part.call.backend
    problem, xp = call.problem, backend.xp
    query, late_scale = scale_query(backend, part.query_rows(rows), problem)
    shape = (*part.lead, rows[1] - rows[0], 1)
    state = tile.start(backend, shape, problem.value_width, query)
    occupied: Any = False
    infinite: tuple[Array, Array] | None = None

    for met in part.tiles(rows, block_k):
        value = met.value
        if not part.ordinary_values:
            attended = masking.both([met.allowed, met.kept])
            size = met.columns[1] - met.columns[0]
            infinite = add_infinities(backend, infinite, value, attended, (*shape[:-1], size))
            value = backend.as_finite(value) * part.value_factor
        scores = tile.tile_scores(
            backend,
            query,
            met.key,
            scale=late_scale,
            softcap=problem.softcap,
            bias=met.bias,
            allowed=met.allowed,
        )
        state = tile.update(backend, state, scores, value, met.kept)
        occupied = any_allowed(xp, occupied, met.allowed)

    if occupied is False:
        occupied = xp.zeros(shape, dtype=xp.bool, device=call.device)
    output, lse = tile.finish(
        backend,
        state,
        occupied=None if occupied is True else occupied,
        sinks=part.sinks,
        keep_rate=1.0 - problem.dropout_rate,
    )
    if not part.ordinary_values:
        output = output / part.value_factor
    if infinite is not None:
        output = output + masking.infinite_part(backend, *infinite, lse)
    return output, lse


def scale_query(backend: Backend, query: Array, problem: Problem) -> tuple[Array, float]:
    """Return the query times the scale, and the scale that is left for the scores."""
    early, late = split_scale(problem.scale)
    return (query if early == 1.0 else query * early), late


def split_scale(scale: float, largest: float = 1.0) -> tuple[float, float]:
    """Return the parts of the scale to apply to the query and to the scores.

    Scaling the query costs a pass over it instead of one over the scores. A scale that could push
    a query out of range is left to the scores.
    """
    return (scale, 1.0) if 1e-4 <= abs(scale) <= largest or scale == 0.0 else (1.0, scale)


def any_allowed(xp: Any, occupied: Any, allowed: Array | None) -> Any:
    """Return which rows may attend any key so far; True and False stand for all and none."""
    if occupied is True or allowed is None:
        return True
    some = xp.any(allowed, axis=-1, keepdims=True)
    return some if occupied is False else occupied | some


def add_infinities(
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


def join(backend: Backend, pieces: list[Array], axis: int) -> Array:
    """Join pieces along an axis; a single piece is not copied."""
    return pieces[0] if len(pieces) == 1 else backend.xp.concat(pieces, axis=axis)


def assemble(backend: Backend, pieces: list[Array], cuts: list[list[slice]]) -> Array:
    """Join the results of all chunks again, from the last axis to the first."""
    for axis in reversed(range(len(cuts))):
        step = len(cuts[axis])
        pieces = [
            join(backend, pieces[first : first + step], axis)
            for first in range(0, len(pieces), step)
        ]
    return pieces[0]
