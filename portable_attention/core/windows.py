"""Windows in host memory: blocks of rows that all look alike are one batched call.

Under a window with two ends, the rows between the ends of the keys reach equally many keys, at
the same places beside them. Blocks of those rows become an axis of the batch, over which the keys
and values are views that overlap. So one call of NumPy does many blocks, and these can be so small
that they reach few keys beyond the window. The rows at both ends are calls of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from portable_attention.backends import Array
from portable_attention.core import plan
from portable_attention.core.blocks import Blocks, overlapping
from portable_attention.core.heads import Heads
from portable_attention.core.problem import Call, Limits
from portable_attention.core.threads import usable_threads

# Measured on two cores of an AMD EPYC with AVX-512, one head of 65536 rows, d = 64 and 128: spans
# of up to 257 take a fifth to two thirds of the time that they take in tiles of the common size,
# 513 takes 0.8 to 0.9, 1025 takes 1.1. Blocks of 96 and 128 rows take 1 to 1.5 times as long.
_ROWS = 64
_WIDEST = 768
# Scores of a chunk. Python between the calls counts as much as the cache here: half of it takes 1.1
# times as long, a quarter 1.8 times, and more than this saves 3 %.
_BUDGET = plan.BUDGET
# Shared out among the threads, but for a few blocks, which take less together.
_TOGETHER, _SHARES = 4, 8
# Rows between the ends, in windows, that make up for what the ends cost as calls of their own.
_FEWEST = 3


@dataclass(frozen=True)
class Piece:
    """Rows of a call, as a call: with `blocks`, (*batch, blocks, Hkv, G, R, D) in its axes."""

    call: Call
    rows: tuple[int, int]
    blocks: int | None = None

    @cached_property
    def tile(self) -> tuple[int, int]:
        return plan.host_block_sizes(self.call.problem)

    @property
    def blocks_of_rows(self) -> list[tuple[int, int]]:
        length, size = self.call.problem.query_length, self.tile[0]
        return [(start, min(start + size, length)) for start in range(0, length, size)]

    @property
    def capacity(self) -> int:
        problem = self.call.problem
        if self.blocks is None:
            return plan.host_capacity(self.call, self.tile, usable_threads())
        most = plan.capacity(_BUDGET, math.prod(self.tile))
        shared = math.prod((*problem.batch, *problem.heads)) // _SHARES
        return min(most, max(shared, _TOGETHER))

    @cached_property
    def cuts(self) -> list[list[slice]]:
        """The cuts of (*batch, [blocks,] Hkv, G); neighbouring blocks, which share keys, first."""
        problem = self.call.problem
        sizes = (*problem.batch, *problem.heads)
        if self.blocks is None:
            return plan.cuts(sizes, self.capacity)
        *lead, blocks, kv_heads, groups = sizes
        *cuts, of_heads, of_groups, of_blocks = plan.cuts(
            (*lead, kv_heads, groups, blocks), self.capacity
        )
        return [*cuts, of_blocks, of_heads, of_groups]

    def heads(self, index: plan.Index, bands: dict[tuple[object, ...], Array]) -> Heads:
        kind = Heads if self.blocks is None else Blocks
        return kind(self.call, index, self.tile[1], forward=True, bands=bands)

    def of_output(self, output: Array, lse: Array) -> tuple[Array, Array]:
        """Return views of these rows in an output and an lse, in the axes of the piece."""
        rows = slice(*self.rows)
        output, lse = output[..., rows, :], lse[..., rows]
        if self.blocks is None:
            return output, lse
        lse = _in_blocks(lse[..., np.newaxis], self.blocks)[..., 0]
        return _in_blocks(output, self.blocks), lse


def pieces(call: Call) -> list[Piece]:
    """Return what a call falls into: itself, or blocks that look alike and the rows around."""
    problem, limits = call.problem, call.limits
    length = problem.query_length
    whole = Piece(call, (0, length))
    alike = (
        problem.span is not None
        and problem.span <= _WIDEST
        and problem.block_size is None
        and isinstance(limits.low, int)
        and isinstance(limits.high, int)
        and limits.key_length is None
        and limits.query_length is None
        and call.mask is None
        and call.bias is None
        and call.seed is None
    )
    if not alike:
        return [whole]
    # The limits of an offset that is far out are clamped, with no such row between the ends.
    span = limits.high - limits.low
    rows = _ROWS
    keys = -(-(span + rows - 1) // 16) * 16  # whole vectors
    first = max(0, -limits.low)
    reached = first + limits.low
    blocks = min((length - first) // rows, (problem.key_length - reached - keys) // rows + 1)
    if blocks * rows < _FEWEST * max(span, rows):
        return [whole]
    stop = first + blocks * rows
    of_blocks = replace(
        call,
        problem=replace(
            problem,
            batch=(*problem.batch, blocks),
            query_length=rows,
            key_length=keys,
            block_size=(rows, keys),
        ),
        query=_in_blocks(call.query[..., first:stop, :], blocks),
        key=overlapping(call.key[..., reached:, :], blocks, rows, keys),
        value=overlapping(call.value[..., reached:, :], blocks, rows, keys),
        limits=Limits(low=0, high=span),
    )
    ends = [_end(call, part) for part in ((0, first), (stop, length)) if part[0] < part[1]]
    return [Piece(of_blocks, (first, stop), blocks), *ends]


def _end(call: Call, rows: tuple[int, int]) -> Piece:
    """Return some rows of a call, with the keys that they reach."""
    start, stop = rows
    found = plan.reach(call.limits, rows, call.problem.key_length)
    keys = slice(found.first, max(found.stop, found.first))
    moved = start - keys.start
    problem = replace(call.problem, query_length=stop - start, key_length=keys.stop - keys.start)
    return Piece(
        replace(
            call,
            problem=problem,
            query=call.query[..., start:stop, :],
            key=call.key[..., keys, :],
            value=call.value[..., keys, :],
            limits=Limits(low=call.limits.low + moved, high=call.limits.high + moved),
        ),
        rows,
    )


def _in_blocks(array: Array, blocks: int) -> Array:
    """Return (*batch, Hkv, G, rows, D) as (*batch, blocks, Hkv, G, rows / blocks, D), a view."""
    *lead, rows, width = array.shape
    return np.moveaxis(array.reshape(*lead, blocks, rows // blocks, width), -3, -5)
