"""Tiles: their sizes, which of them a block of rows needs, and how the heads are batched.

The plan sees shapes and host values only, and knows nothing of any library.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from portable_attention.core.problem import Call, Limits, Problem, is_host

# Measured with NumPy on two cores of an AMD EPYC (512 KiB of L2 each), d = 64 and 128: 512 x 512
# float32 scores are 1 MiB, where the products run at full speed and the passes over the scores
# still hit the cache.
BLOCK = 512
# The same in tile threads, on two cores with AVX-512 (1 MiB of L2 each), d = 64 and 128. Long rows
# of keys have more that no diagonal cuts off, and can afford taller tiles.
HOST_ROWS, HOST_KEYS = 512, 256
_TALL_ROWS, _TALL_FROM = 1024, 8192
# Under jax.jit on two cores of an AMD EPYC (Zen 4), 1 x 8 x 4096 x 64: tiles of 1024 x 512 for two
# heads took 0.92 to 0.96 of the time of 512 x 512 for four, forwards and with gradients. At a
# diagonal they lose more than that, with keys that no row of the tile's upper half reaches.
_TALL_SCAN_ROWS = 1024
_PROCESSOR = 1 << 20  # the budget of a tile in the caches of a processor
_WINDOW_ROWS = 128
FEW_ROWS = 32
# Numbers of the right factor at most, so that blocks of 24 rows (of those in columns) and of 16
# are small products for OpenBLAS: `backends.numpy_products`.
_SUMMED_ROWS, _SUMMED_KEYS = 41_600, 61_440
# Tiles for wider heads would be so small that more is lost around the products: twice the time at
# a width of 1024.
_NARROW, _NARROW_BACKWARD = 256, 128
_KEY_NUMBERS, _MOST_KEYS = 1 << 17, 4096  # half of the L2; for narrow keys, what buffers may hold
# Heads are batched until their tiles hold so many scores, if that leaves something for the other
# threads to do. It is more than the L2 holds, but one thread alone can be in Python at a time, and
# one that has to wait for the other sleeps for longer than many a pass takes: on two cores, 1 x 8 x
# 2048 x 64, four heads together took 0.86 of the time of one after the other, causal 0.78. Wider
# heads have more to do in each call, and more in the cache beside the scores.
BUDGET = 1 << 19
_BUDGET_BY_WIDTH = 1 << 25
_SHARES = 2  # of the work, to a thread
_WORTH_SHARING = 1 << 18
_ALIGNED = 16  # numbers in a vector

Index = tuple[slice, ...]  # into (*batch, Hkv, G)


def block_sizes(problem: Problem, rows: int = BLOCK) -> tuple[int, int]:
    """Return how many queries and keys make a tile; no more than there are."""
    queries, keys = problem.block_size or (rows, BLOCK)
    return min(queries, max(problem.query_length, 1)), min(keys, max(problem.key_length, 1))


def host_block_sizes(
    problem: Problem, *, backward: bool = False, diagonal: bool = False
) -> tuple[int, int]:
    """Return how many queries and keys make a tile in host memory.

    Backwards, a tile has all its rows, and at a `diagonal` those that do not reach it are lost.
    Lengths are cut evenly. Rows much longer than a window would mostly compute what is masked.
    """
    if problem.block_size is not None:
        return block_sizes(problem)
    width = max(problem.width, problem.value_width, 1)
    rows = HOST_ROWS if problem.query_length < _TALL_FROM else _TALL_ROWS
    most_keys = HOST_KEYS
    if width <= (_NARROW_BACKWARD if backward else _NARROW):
        if backward:  # which sums over the rows, too
            rows = min(rows, _aligned(_SUMMED_ROWS // width), BLOCK // 2 if diagonal else rows)
        most_keys = min(HOST_KEYS, _aligned(_SUMMED_KEYS // width))
    if problem.span is not None:
        rows = max(_WINDOW_ROWS, min(rows, problem.span))
    if problem.query_length < FEW_ROWS:
        # No product comes to use a tile of keys again: it is as long as the cache allows.
        most_keys = max(HOST_KEYS, min(_MOST_KEYS, _KEY_NUMBERS // width))
    keys = _even(problem.key_length, most_keys)
    rows = _even(problem.query_length, rows)
    if problem.span is None and problem.query_length > rows > keys:
        # Blocks of rows then meet the diagonal at the same few places of a tile.
        rows = rows // keys * keys if rows % keys < keys // 2 else -(-rows // keys) * keys
    return rows, keys


def _aligned(size: int) -> int:
    return max(_ALIGNED, size // _ALIGNED * _ALIGNED)


def whole_vectors(count: int) -> int:
    """Return the least multiple of the numbers in a vector that is not below a count."""
    return -(-count // _ALIGNED) * _ALIGNED


def _even(length: int, largest: int) -> int:
    """Return the size of the fewest equal blocks of at most `largest` that make up a length."""
    count = max(1, -(-length // largest))
    size = max(1, -(-length // count))
    return size if count == 1 else whole_vectors(size)


def batching(problem: Problem, budget: int, most_rows: int = BLOCK) -> tuple[tuple[int, int], int]:
    """Return the size of a tile, and how many key/value heads make tiles of `budget` scores."""
    keys = block_sizes(problem)[1]
    rows = min(most_rows, max(16, budget // (problem.groups * keys)))
    queries, keys = block_sizes(problem, rows)
    return (queries, keys), capacity(budget, problem.groups * queries * keys)


def scan_batching(problem: Problem, budget: int, *, limited: bool) -> tuple[tuple[int, int], int]:
    """Return the same for a compiled loop; `limited` where positions decide what is allowed."""
    tall = budget <= _PROCESSOR and not limited
    return batching(problem, budget, _TALL_SCAN_ROWS if tall else BLOCK)


def cuts(sizes: tuple[int, ...], capacity: int) -> list[list[slice]]:
    """Cut each of the leading axes so that a chunk has at most `capacity` items, or one.

    The last axes are taken whole while they fit, so that a chunk is one strided block.
    """
    steps = []
    for size in reversed(sizes):
        step = max(1, min(size, capacity))
        steps.append(step)
        capacity = capacity // size if step == size else 0
    return [
        [slice(first, min(first + step, size)) for first in range(0, size, step)]
        for size, step in zip(sizes, reversed(steps), strict=True)
    ]


def chunks(sizes: tuple[int, ...], capacity: int) -> Iterator[Index]:
    """Return the chunks that those cuts make, the last axis running fastest."""
    yield from itertools.product(*cuts(sizes, capacity))


def take(array: Any, index: Index) -> Any:
    """Return the part of an array (or of host values) that belongs to a chunk of its lead axes."""
    if array is None or isinstance(array, int):
        return array
    picked = tuple(
        slice(None) if size == 1 else part
        for size, part in zip(array.shape[: len(index)], index, strict=True)
    )
    return array[(*picked, ...)]


@dataclass(frozen=True)
class Reach:
    """The keys that a block of rows may attend: which to visit, and which need no limit check."""

    first: int  # keys below are not attended by any of the rows
    stop: int  # nor these and those above
    inner_first: int  # from here ...
    inner_stop: int  # ... to here every row may attend every key

    def covers(self, start: int, stop: int) -> bool:
        return self.inner_first <= start and stop <= self.inner_stop


def reach(limits: Limits, rows: tuple[int, int], key_length: int) -> Reach:
    """Return which keys the rows [start, stop) reach under limits of host values."""
    start, stop = rows
    first, end, inner_first, inner_end = 0, key_length, 0, key_length
    if not limits.items():
        return Reach(first, end, inner_first, inner_end)
    if not all(is_host(limit) for _, limit in limits.items()):
        return Reach(0, key_length, key_length, 0)
    if limits.low is not None:
        first = min(max(first, start + _least(limits.low)), key_length)
        inner_first = max(inner_first, stop - 1 + _greatest(limits.low))
    if limits.high is not None:
        end = min(end, stop - 1 + _greatest(limits.high))
        inner_end = min(inner_end, start + _least(limits.high))
    if limits.key_length is not None:
        end = min(end, _greatest(limits.key_length))
        inner_end = min(inner_end, _least(limits.key_length))
    if limits.query_length is not None:
        if start >= _greatest(limits.query_length):
            end = first
        if stop > _least(limits.query_length):
            inner_end = inner_first
    return Reach(first, max(first, end), inner_first, inner_end)


def _least(limit: Any) -> int:
    return limit if isinstance(limit, int) else int(np.min(limit))


def _greatest(limit: Any) -> int:
    return limit if isinstance(limit, int) else int(np.max(limit))


def rows_reaching(
    limits: Limits, rows: tuple[int, int], columns: tuple[int, int]
) -> tuple[int, int]:
    """Return those of the rows [start, stop) that may attend any of the keys, and some around."""
    start, stop = rows
    if not all(is_host(limit) for _, limit in limits.items()):
        return rows
    if limits.high is not None:
        start = max(start, columns[0] + 1 - _greatest(limits.high))
    if limits.low is not None:
        stop = min(stop, columns[1] - _least(limits.low))
    start = rows[0] + (start - rows[0]) // _ALIGNED * _ALIGNED
    stop = min(rows[1], rows[0] - (rows[0] - stop) // _ALIGNED * _ALIGNED)
    return (start, stop) if start < stop else rows


def tiles(
    found: Reach, block: int, key_length: int, *, free: bool = False
) -> Iterator[tuple[int, int]]:
    """Return the tiles of keys that a reach touches.

    They lie on the same grid for all rows or, if `free`, begin at the last multiple of 16 before
    the reach does.
    """
    first, stop = found.first, found.stop
    if free and stop > first:
        first -= first % _ALIGNED
        block = _even(stop - first, block)
    else:
        first = first // block * block
    for start in range(first, stop, block):
        yield start, min(start + block, key_length)


def take_limits(limits: Limits, index: Index) -> Limits:
    """Return the limits of one chunk; one item alone has plain numbers."""
    if not limits.items():
        return limits

    def part(limit: Any) -> Any:
        # Values over the batch have all their lead axes; the head axes are of size 1.
        chosen = take(limit, index)
        if isinstance(chosen, np.ndarray) and chosen.size == 1:
            return int(chosen.reshape(()))
        return chosen

    return Limits(**{name: part(limit) for name, limit in limits.items()})


def host_capacity(
    call: Call, tile: tuple[int, int], threads: int, *, whole_groups: bool = False
) -> int:
    """Return how many heads are done together: enough to fill a budget, few enough to share out.

    With `whole_groups`, sharing out splits no group: the gradients of a key are summed over its
    group, and the order of that sum must not depend on how many others are in the call.
    """
    problem = call.problem
    heads = math.prod((*problem.batch, *problem.heads))
    numbers = problem.key_length * (problem.width + problem.value_width)
    budget = min(BUDGET, _BUDGET_BY_WIDTH // max(problem.width, problem.value_width, 1))
    together = capacity(budget, math.prod(tile))
    if heads * numbers > _WORTH_SHARING:
        least = problem.groups if whole_groups else 1
        blocks = -(-problem.query_length // tile[0])
        together = min(together, max(least, heads * blocks // (_SHARES * threads)))
    by_item = {name for name, limit in call.limits.items() if isinstance(limit, np.ndarray)}
    cut = by_item & {"low", "high"} or (by_item and problem.span is not None)
    if cut or (by_item and problem.key_length > tile[1]):
        # Tiles are cut to what the rows reach, and an item gets the bits that it gets alone; and no
        # item is to visit keys that only another one reaches.
        together = min(together, math.prod(problem.heads))
    return together


def capacity(budget: int, tile: int) -> int:
    """Return how many heads of `tile` scores each fit into a budget."""
    return max(1, budget // max(tile, 1))
