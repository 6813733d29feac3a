"""The schedule under a JAX trace: one `lax.scan` over blocks of rows, one over tiles of keys.

The trace does not grow with the lengths. Both bodies are checkpointed, so that reverse mode keeps
nothing of the size of the scores. A ragged last tile is a whole tile that starts earlier; what it
shares with the one before is masked (keys) or computed twice and dropped (rows), so that nothing
is padded or copied.

What keeps NaN, infinities and huge values where they belong costs passes over the scores. It is
compiled beside a way without it, which is taken where all numbers of a call are ordinary.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from portable_attention.backends import Array
from portable_attention.backends.namespace import jax_backend
from portable_attention.core import masking, plan, tile
from portable_attention.core.backward import Cotangents
from portable_attention.core.dropout import kept as kept_pairs
from portable_attention.core.dropout import row_keys
from portable_attention.core.eager import scale_query
from portable_attention.core.problem import Call, Limits, Problem
from portable_attention.core.scan_operands import (
    Operand,
    all_finite,
    operand,
    true_for_all,
    unite,
)

# Of a block of rows, reverse mode keeps the last state. It is as small as the output, and saves
# making the sums of values again: 8 in place of 9 products a tile.
_STATE = "softmax state"
_KEPT = jax.checkpoint_policies.save_only_these_names(_STATE)


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


@partial(jax.jit, static_argnums=(0, 1))
def _compiled(
    problem: Problem, dtype: str, arrays: dict[str, Array | None], limits: dict[str, Array]
) -> tuple[Array, Array]:
    schedule = _Schedule(problem, arrays, limits)
    _, (output, lse) = lax.scan(
        jax.checkpoint(schedule.rows, prevent_cse=False, policy=_KEPT),
        None,
        jnp.arange(schedule.steps, dtype=jnp.int32),
    )
    output = unite(output, schedule.heads, problem).astype(dtype)
    lse = unite(lse[..., jnp.newaxis], schedule.heads, problem)
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
            name: operand(array, problem) for name, array in arrays.items() if name != "seed"
        }
        # A limit without batch axes is one number for every head.
        self.limits = {
            name: limit if limit.ndim == 0 else operand(limit, problem)
            for name, limit in limits.items()
        }
        self.seed = arrays["seed"]
        value: Array = self.backend.whole(arrays["value"])
        factor = lax.stop_gradient(masking.value_factor(self.backend, value, self.dtype))
        finite = {name: all_finite(arrays[name]) for name in ("query", "key", "value")}
        self.values_finite = true_for_all(finite["value"])
        self.ordinary = true_for_all(
            finite["query"] & finite["key"] & finite["value"] & jnp.all(factor == 1.0)
        )
        self.operands["plain value"] = self.operands["value"]
        # What a weight is worth as a derivative does not depend on the value, not even on NaN.
        # (Outside of the scan, because a scan differentiated twice drops derivative rules.)
        self.operands["value"] = operand(self.backend.as_finite(value), problem)
        self.operands["infinite"] = operand(lax.stop_gradient(value), problem)
        self.operands["factor"] = operand(
            jnp.broadcast_to(factor, (*value.shape[:-2], 1, 1)), problem
        )

        budget = self.backend.score_budget(None)
        (self.block_q, self.block_k), capacity = plan.scan_batching(
            problem, budget, limited=bool(limits)
        )
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
        array, problem = self.backend.whole(given), self.problem
        if array is None or name in ("mask", "seed") or array.dtype == self.dtype:
            return given
        whole = array.shape == (*problem.output_shape[:-1], problem.key_length)
        if name == "bias" and (whole or array.dtype == jnp.float64):
            return given  # nothing is added up in its gradient, or it is to be clipped
        return array.astype(self.dtype)

    def rows(self, carry: None, step: Array) -> tuple[None, tuple[Array, Array]]:
        """Compute one block of rows for one chunk of heads."""
        problem = self.problem
        first_head = step // self.row_blocks * self.chunk
        first_row = jnp.minimum(
            step % self.row_blocks * self.block_q, problem.query_length - self.block_q
        )
        block = _RowBlock(self, first_head, first_row)
        found = lax.cond(
            self.ordinary,
            lambda: self.results(block, ordinary=True),
            lambda: self.results(block, ordinary=False),
        )
        return carry, found

    def results(self, block: _RowBlock, *, ordinary: bool) -> tuple[Array, Array]:
        """Return output and lse of a block of rows.

        In an `ordinary` call all inputs are finite and no sum of values can overflow.
        """
        problem, backend, first_row = self.problem, self.backend, block.first_row
        query = lax.dynamic_slice_in_dim(block.part("query"), first_row, self.block_q, axis=-2)
        query, late_scale = scale_query(backend, query, problem)

        shape = (self.chunk, problem.groups, self.block_q, 1)
        state = tile.SoftmaxState(
            jnp.zeros((*shape[:-1], problem.value_width), self.dtype),
            jnp.full(shape, -jnp.inf, self.dtype),
            jnp.zeros(shape, self.dtype),
        )
        factor = None if ordinary else block.part("factor")
        always = problem.key_length > 0 and not block.restricted
        occupied = None if always else block.occupied()
        count = not always and occupied is None

        def visit(carried: Any, visited: Array, whole: bool = False) -> Any:
            state, occupied = carried
            columns, allowed, kept = block.pairs(visited, whole=whole)
            key = block.keys("key", columns)
            value = block.keys("plain value" if ordinary else "value", columns)
            value = value if factor is None else value * factor
            bias = block.tile_of("bias", columns)
            scores = tile.tile_scores(
                backend,
                query,
                key,
                scale=late_scale,
                softcap=problem.softcap,
                bias=masking.bias_block(backend, bias, self.dtype),
                allowed=allowed,
                finite=ordinary,
            )
            state = tile.update(backend, state, scores, value, kept)
            if count:
                occupied = occupied | jnp.any(allowed, axis=-1, keepdims=True)
            return state, occupied

        whole = partial(visit, whole=True) if ordinary and not block.listed else None
        counted = jnp.zeros(shape, bool) if count else None
        state, counted = block.over_keys(visit, (state, counted), whole)
        state = tile.SoftmaxState(*(checkpoint_name(part, _STATE) for part in state))
        output, lse = tile.finish(
            backend,
            state,
            occupied=counted if count else occupied,
            sinks=block.part("sinks"),
            keep_rate=1.0 - problem.dropout_rate,
        )
        if factor is None:
            return output, lse
        infinite = lax.cond(
            self.values_finite,
            lambda lse: jnp.zeros(output.shape, self.dtype),
            lambda lse: self.infinite_part(block, shape, lse),
            lse,
        )
        return output / factor + infinite, lse

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


class _RowBlock:
    """One block of rows of one chunk of heads: its part of every operand, and its loop."""

    def __init__(self, schedule: _Schedule, first_head: Array, first_row: Array) -> None:
        self.schedule = schedule
        self.first_head = first_head
        self.first_row = first_row
        self.row_numbers = (first_row + jnp.arange(schedule.block_q, dtype=jnp.int32))[:, None]
        self.limits = {
            name: limit.chunk(first_head, schedule.chunk) if isinstance(limit, Operand) else limit
            for name, limit in schedule.limits.items()
        }
        operands = schedule.operands
        self.ragged = schedule.problem.key_length % schedule.block_k != 0
        # Whether pairs are allowed one by one, not because of where they stand.
        self.listed = any(operands[name] is not None for name in ("mask", "bias"))
        self.restricted = bool(self.limits) or self.listed
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

    def occupied(self) -> Array | None:
        """Return which rows may attend any key, or None where the pairs have to be looked at."""
        if self.listed:
            return None
        length = self.schedule.problem.key_length
        return masking.rows_within(Limits(**self.limits), self.row_numbers, length, jnp)

    def pairs(
        self, visited: Array, *, whole: bool = False
    ) -> tuple[Array, Array | None, Array | None]:
        """Return the columns of a tile, and which of its pairs are allowed and kept.

        In a `whole` tile, all of them are allowed.
        """
        schedule = self.schedule
        nominal = visited * schedule.block_k
        start = jnp.minimum(nominal, schedule.problem.key_length - schedule.block_k)
        columns = start + jnp.arange(schedule.block_k, dtype=jnp.int32)
        allowed = None
        if not whole:
            allowed = self._allowed(columns, nominal)
        kept = None
        if self.keys_of_rows is not None:
            kept = kept_pairs(self.keys_of_rows, columns, schedule.problem.dropout_rate)
        return columns, allowed, kept

    def _allowed(self, columns: Array, nominal: Array) -> Array | None:
        return masking.both(
            [
                columns >= nominal if self.ragged else None,
                *masking.within_limits(Limits(**self.limits), self.row_numbers, columns),
                self.tile_of("mask", columns),
                masking.not_masked(self.tile_of("bias", columns)),
            ]
        )

    def over_keys(self, visit: Any, initial: Any, whole: Any = None) -> Any:
        """Run `visit(carried, tile number)` over the tiles that these rows may attend.

        `whole` is the same for tiles in which all pairs are allowed.
        """
        schedule = self.schedule
        if not schedule.visits:
            return initial
        first = jnp.int32(0)
        if schedule.visits < schedule.key_blocks:
            low = (self.limits["low"] + self.first_row) // schedule.block_k
            first = jnp.clip(low, 0, schedule.key_blocks - schedule.visits)

        if not (self.limits or self.ragged):
            whole = None  # as all of them are
        ways = [visit] if whole is None else [visit, whole]
        if self.limits:
            ways.insert(0, lambda carried, _: carried)

        def body(carried: Any, step: Array) -> Any:
            visited = first + step
            chosen = jnp.int32(0)
            if self.limits:
                chosen += self._reaches(visited)
            if whole is not None:
                chosen += self._covers(visited)
            return lax.switch(chosen, ways, carried, visited), None

        steps = jnp.arange(schedule.visits, dtype=jnp.int32)
        return lax.scan(jax.checkpoint(body, prevent_cse=False), initial, steps)[0]

    def _reaches(self, visited: Array) -> Array:
        """Whether any of the rows may attend any key of a tile."""
        schedule, limits = self.schedule, self.limits
        start = visited * schedule.block_k
        last_row = self.first_row + schedule.block_q - 1
        needed = jnp.bool_(True)
        if "low" in limits:
            needed &= start + schedule.block_k > self.first_row + jnp.min(limits["low"])
        if "high" in limits:
            needed &= start < last_row + jnp.max(limits["high"])
        if "key_length" in limits:
            needed &= start < jnp.max(limits["key_length"])
        if "query_length" in limits:
            needed &= self.first_row < jnp.max(limits["query_length"])
        return ~true_for_all(~needed)

    def _covers(self, visited: Array) -> Array:
        """Whether all of the rows may attend all keys of a tile that they reach."""
        schedule, limits = self.schedule, self.limits
        start, stop = visited * schedule.block_k, (visited + 1) * schedule.block_k
        last_row = self.first_row + schedule.block_q - 1
        covered = stop <= schedule.problem.key_length
        if "low" in limits:
            covered &= start >= last_row + jnp.max(limits["low"])
        if "high" in limits:
            covered &= stop <= self.first_row + jnp.min(limits["high"])
        if "key_length" in limits:
            covered &= stop <= jnp.min(limits["key_length"])
        if "query_length" in limits:
            covered &= last_row < jnp.min(limits["query_length"])
        return true_for_all(covered)

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
