"""The schedule under a JAX trace: one `lax.scan` over blocks of rows, one over tiles of keys.

The trace does not grow with the lengths. Both bodies are checkpointed, so that reverse mode keeps
nothing of the size of the scores. A ragged last tile is a whole tile that starts earlier; what it
shares with the one before is masked (keys) or computed twice and dropped (rows), so that nothing
is padded or copied.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from portable_attention.backends import Array
from portable_attention.backends.namespace import jax_backend
from portable_attention.core import masking, plan, tile
from portable_attention.core.backward import Cotangents
from portable_attention.core.dropout import kept as kept_pairs
from portable_attention.core.dropout import row_keys
from portable_attention.core.eager import scale_query
from portable_attention.core.problem import Call, Limits, Problem


def run(call: Call, dtype: Any) -> tuple[Array, Array]:
    """Return the output (*batch, Hkv, G, Lq, Dv) and the lse (*batch, Hkv, G, Lq) of a call."""
    arrays = {
        "query": call.query,
        "key": call.key,
        "value": call.value,
        "mask": call.mask,
        "bias": call.bias,
        "sinks": call.sinks,
        "seed": call.seed,
    }
    limits = {name: jnp.asarray(limit, jnp.int32) for name, limit in call.limits.items()}
    output, lse = _compiled(call.problem, jnp.dtype(dtype).name, arrays, limits)
    return output, lse


def run_backward(call: Call, given: Cotangents) -> dict[str, Array]:
    """Return the gradients of the call's operands, in their inner shapes and own dtypes."""
    names = ("query", "key", "value", "bias", "sinks")
    operands = {name: call.backend.whole(getattr(call, name)) for name in names}
    operands = {name: array for name, array in operands.items() if array is not None}

    def results(operands: dict[str, Array]) -> tuple[Array, Array]:
        return run(replace(call, **operands), call.problem.compute_dtype)

    d_lse = jnp.zeros_like(given.lse) if given.d_lse is None else given.d_lse
    _, pull = jax.vjp(results, operands)
    (found,) = pull((given.d_output, d_lse))
    return dict(found)


class _Operand(NamedTuple):
    """An array with (*batch, Hkv) as one axis, or the items of it that differ."""

    array: Array  # (n, G, rows, columns)
    table: np.ndarray[Any, Any] | None  # which of the n each head reads; None: its own

    def chunk(self, first: Array, count: int) -> Array:
        if self.array.shape[0] == 1:
            return self.array
        if self.table is None:
            return lax.dynamic_slice_in_dim(self.array, first, count)
        numbers = lax.dynamic_slice_in_dim(jnp.asarray(self.table), first, count)
        return jnp.take(self.array, numbers, axis=0)


def _operand(array: Array | None, problem: Problem) -> _Operand | None:
    array = jax_backend().whole(array)
    if array is None:
        return None
    full = (*problem.batch, problem.kv_heads)
    lead = array.shape[:-3]
    lead = (*([1] * (len(full) - len(lead))), *lead)
    count = int(np.prod(lead))
    flat = jnp.reshape(array, (count, *array.shape[-3:]))
    numbers = np.arange(count, dtype=np.int32).reshape(lead)
    table = np.broadcast_to(numbers, full).ravel()
    return _Operand(flat, None if table.size == count else table)


@partial(jax.jit, static_argnums=(0, 1))
def _compiled(
    problem: Problem, dtype: str, arrays: dict[str, Array | None], limits: dict[str, Array]
) -> tuple[Array, Array]:
    schedule = _Schedule(problem, arrays, limits)
    _, (output, lse) = lax.scan(
        jax.checkpoint(schedule.rows, prevent_cse=False),
        None,
        jnp.arange(schedule.steps, dtype=jnp.int32),
    )
    output = schedule.unite(output).astype(dtype)
    lse = schedule.unite(lse[..., jnp.newaxis])
    shape = problem.output_shape
    return jnp.reshape(output, shape), jnp.reshape(lse, shape[:-1])


class _Schedule:
    """The static sizes of a call, and the bodies of its two loops."""

    def __init__(
        self, problem: Problem, arrays: dict[str, Array | None], limits: dict[str, Array]
    ) -> None:
        self.problem = problem
        self.backend = jax_backend()
        self.dtype = jnp.dtype(problem.compute_dtype)
        # Widened as a whole, not tile by tile: the gradients of the tiles are summed in this dtype.
        arrays = {name: self._widened(name, array) for name, array in arrays.items()}
        self.operands = {
            name: _operand(array, problem) for name, array in arrays.items() if name != "seed"
        }
        # A limit without batch axes is one number for every head.
        self.limits = {
            name: limit if limit.ndim == 0 else _operand(limit, problem)
            for name, limit in limits.items()
        }
        self.seed = arrays["seed"]
        value: Array = arrays["value"]
        self.values_finite = jnp.all(jnp.isfinite(value))
        # What a weight is worth as a derivative does not depend on the value, not even on NaN.
        # (Outside of the scan, because a scan differentiated twice drops derivative rules.)
        self.operands["value"] = _operand(self.backend.as_finite(value), problem)
        self.operands["infinite"] = _operand(lax.stop_gradient(value), problem)
        factor = lax.stop_gradient(masking.value_factor(self.backend, value, self.dtype))
        self.operands["factor"] = _operand(
            jnp.broadcast_to(factor, (*value.shape[:-2], 1, 1)), problem
        )

        budget = self.backend.score_budget(None)
        (self.block_q, self.block_k), capacity = plan.batching(problem, budget)
        self.heads = int(np.prod(problem.batch)) * problem.kv_heads
        self.chunk = _largest_divisor(self.heads, capacity)
        self.row_blocks = -(-problem.query_length // self.block_q)
        self.key_blocks = -(-problem.key_length // self.block_k)
        self.steps = self.heads // self.chunk * self.row_blocks
        # A window of one width for all heads reaches a fixed number of tiles.
        self.visits = self.key_blocks
        if problem.span is not None and "low" in limits and limits["low"].ndim == 0:
            reach = -(-(problem.span + self.block_q - 1) // self.block_k) + 1
            self.visits = min(self.key_blocks, reach)

    def _widened(self, name: str, given: Array | None) -> Array | None:
        array = self.backend.whole(given)
        if array is None or name in ("mask", "seed") or array.dtype == self.dtype:
            return given
        if name == "bias" and (1 not in array.shape[-2:] or array.dtype == jnp.float64):
            return given  # as large as the scores, or to be clipped
        return array.astype(self.dtype)

    def rows(self, carry: None, step: Array) -> tuple[None, tuple[Array, Array]]:
        """Compute one block of rows for one chunk of heads."""
        problem, backend = self.problem, self.backend
        first_head = step // self.row_blocks * self.chunk
        first_row = jnp.minimum(
            step % self.row_blocks * self.block_q, problem.query_length - self.block_q
        )
        block = _RowBlock(self, first_head, first_row)
        query = lax.dynamic_slice_in_dim(block.part("query"), first_row, self.block_q, axis=-2)
        query, late_scale = scale_query(backend, query, problem)

        shape = (self.chunk, problem.groups, self.block_q, 1)
        state = tile.SoftmaxState(
            jnp.zeros((*shape[:-1], problem.value_width), self.dtype),
            jnp.full(shape, -jnp.inf, self.dtype),
            jnp.zeros(shape, self.dtype),
        )
        factor = block.part("factor")
        always = problem.key_length > 0 and not block.restricted

        def visit(carried: Any, visited: Array) -> Any:
            state, occupied = carried
            columns, allowed, kept = block.pairs(visited)
            key = block.keys("key", columns)
            value = block.keys("value", columns) * factor
            bias = block.tile_of("bias", columns)
            scores = tile.tile_scores(
                backend,
                query,
                key,
                scale=late_scale,
                softcap=problem.softcap,
                bias=masking.bias_block(backend, bias, self.dtype),
                allowed=allowed,
            )
            state = tile.update(backend, state, scores, value, kept)
            if not always:
                occupied = occupied | jnp.any(allowed, axis=-1, keepdims=True)
            return state, occupied

        occupied = jnp.zeros(shape, bool)
        state, occupied = block.over_keys(visit, (state, occupied))
        output, lse = tile.finish(
            backend,
            state,
            occupied=None if always else occupied,
            sinks=block.part("sinks"),
            keep_rate=1.0 - problem.dropout_rate,
        )
        infinite = lax.cond(
            self.values_finite,
            lambda lse: jnp.zeros(output.shape, self.dtype),
            lambda lse: self.infinite_part(block, shape, lse),
            lse,
        )
        return carry, (output / factor + infinite, lse)

    def infinite_part(self, block: _RowBlock, shape: tuple[int, ...], lse: Array) -> Array:
        """Return what infinite and NaN values do to the rows that attend them."""
        counts = jnp.zeros((*shape[:-1], self.problem.value_width), self.dtype)

        def visit(carried: Any, visited: Array) -> Any:
            columns, allowed, kept = block.pairs(visited)
            value = block.keys("infinite", columns)
            attended = masking.both([allowed, kept])
            attended = jnp.ones((), bool) if attended is None else attended
            weights = jnp.broadcast_to(attended, (*shape[:-1], self.block_k)).astype(self.dtype)
            return tuple(
                seen + self.backend.ops.product(weights, part)
                for seen, part in zip(
                    carried, masking.infinities(self.backend, value, self.dtype), strict=True
                )
            )

        positive, negative = block.over_keys(visit, (counts, counts))
        return masking.infinite_part(self.backend, positive, negative, lse)

    def unite(self, blocks: Array) -> Array:
        """Turn (steps, chunk, G, block_q, columns) into (heads, G, Lq, columns)."""
        problem = self.problem
        groups, columns = problem.groups, blocks.shape[-1]
        count = self.heads // self.chunk
        shape = (count, self.row_blocks, self.chunk, groups, self.block_q, columns)
        blocks = jnp.moveaxis(jnp.reshape(blocks, shape), 1, 3)
        blocks = jnp.reshape(blocks, (self.heads, groups, self.row_blocks, self.block_q, columns))
        whole = problem.query_length // self.block_q
        if whole == self.row_blocks:
            return jnp.reshape(blocks, (self.heads, groups, problem.query_length, columns))
        rest = problem.query_length - whole * self.block_q
        return jnp.concatenate(
            [
                jnp.reshape(
                    blocks[:, :, :whole], (self.heads, groups, whole * self.block_q, columns)
                ),
                blocks[:, :, whole, self.block_q - rest :],
            ],
            axis=2,
        )


class _RowBlock:
    """One block of rows of one chunk of heads: its part of every operand, and its loop."""

    def __init__(self, schedule: _Schedule, first_head: Array, first_row: Array) -> None:
        self.schedule = schedule
        self.first_head = first_head
        self.first_row = first_row
        self.row_numbers = (first_row + jnp.arange(schedule.block_q, dtype=jnp.int32))[:, None]
        self.limits = {
            name: limit.chunk(first_head, schedule.chunk) if isinstance(limit, _Operand) else limit
            for name, limit in schedule.limits.items()
        }
        operands = schedule.operands
        self.ragged = schedule.problem.key_length % schedule.block_k != 0
        self.restricted = bool(self.limits) or any(
            operands[name] is not None for name in ("mask", "bias")
        )
        self.keys_of_rows = self._keys_of_rows()

    def part(self, name: str) -> Array | None:
        operand = self.schedule.operands[name]
        return None if operand is None else operand.chunk(self.first_head, self.schedule.chunk)

    def keys(self, name: str, columns: Array) -> Array:
        return lax.dynamic_slice_in_dim(self.part(name), columns[0], self.schedule.block_k, axis=-2)

    def tile_of(self, name: str, columns: Array) -> Array | None:
        """Return the tile of a mask or bias; its axes of size 1 stay so."""
        array = self.part(name)
        if array is None:
            return None
        if array.shape[-2] != 1:
            array = lax.dynamic_slice_in_dim(array, self.first_row, self.schedule.block_q, axis=-2)
        if array.shape[-1] != 1:
            array = lax.dynamic_slice_in_dim(array, columns[0], self.schedule.block_k, axis=-1)
        return array

    def pairs(self, visited: Array) -> tuple[Array, Array | None, Array | None]:
        """Return the columns of a tile, and which of its pairs are allowed and kept."""
        schedule = self.schedule
        nominal = visited * schedule.block_k
        start = jnp.minimum(nominal, schedule.problem.key_length - schedule.block_k)
        columns = start + jnp.arange(schedule.block_k, dtype=jnp.int32)
        allowed = masking.both(
            [
                columns >= nominal if self.ragged else None,
                *masking.within_limits(Limits(**self.limits), self.row_numbers, columns),
                self.tile_of("mask", columns),
                masking.not_masked(self.tile_of("bias", columns)),
            ]
        )
        kept = None
        if self.keys_of_rows is not None:
            kept = kept_pairs(self.keys_of_rows, columns, schedule.problem.dropout_rate)
        return columns, allowed, kept

    def over_keys(self, visit: Any, initial: Any) -> Any:
        """Run `visit(carried, tile number)` over the tiles that these rows may attend."""
        schedule = self.schedule
        if not schedule.visits:
            return initial
        first = jnp.int32(0)
        if schedule.visits < schedule.key_blocks:
            low = (self.limits["low"] + self.first_row) // schedule.block_k
            first = jnp.clip(low, 0, schedule.key_blocks - schedule.visits)

        def body(carried: Any, step: Array) -> Any:
            visited = first + step
            if not self.limits:
                return visit(carried, visited), None
            return lax.cond(
                self._reaches(visited), visit, lambda carried, _: carried, carried, visited
            ), None

        steps = jnp.arange(schedule.visits, dtype=jnp.int32)
        return lax.scan(jax.checkpoint(body, prevent_cse=False), initial, steps)[0]

    def _reaches(self, visited: Array) -> Array:
        """Whether any of the rows may attend any key of a tile."""
        schedule = self.schedule
        start = visited * schedule.block_k
        last_row = self.first_row + schedule.block_q - 1
        limits = self.limits
        needed = jnp.bool_(True)
        if "low" in limits:
            needed &= start + schedule.block_k > self.first_row + jnp.min(limits["low"])
        if "high" in limits:
            needed &= start < last_row + jnp.max(limits["high"])
        if "key_length" in limits:
            needed &= start < jnp.max(limits["key_length"])
        if "query_length" in limits:
            needed &= self.first_row < jnp.max(limits["query_length"])
        return needed

    def _keys_of_rows(self) -> tuple[Array, Array] | None:
        schedule = self.schedule
        if schedule.seed is None:
            return None
        problem = schedule.problem
        numbers = self.first_head + jnp.arange(schedule.chunk, dtype=jnp.int32)
        batch = (numbers // problem.kv_heads)[:, None, None, None]
        kv_head = (numbers % problem.kv_heads)[:, None, None, None]
        group = jnp.arange(problem.groups, dtype=jnp.int32)[:, None, None]
        head = kv_head * problem.groups + group
        return row_keys(schedule.seed, batch, head, self.row_numbers)


def _largest_divisor(number: int, limit: int) -> int:
    return next(size for size in range(min(number, limit), 0, -1) if number % size == 0)
