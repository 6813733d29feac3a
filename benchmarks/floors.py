"""What no implementation on the same BLAS can be faster than: the work without the attention.

The products are those of the tiles that the library cuts a call into, made in the way that it makes
them (`portable_attention.backends.numpy_products`), with keys that lie in columns already and
results in memory that is there already, in as many threads as the process has cores, each with one
BLAS thread.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.arrays import Inputs
from benchmarks.environment import cores
from benchmarks.records import Call
from portable_attention.backends.numpy_products import matmul
from portable_attention.core.plan import host_block_sizes
from portable_attention.core.spec import validate
from portable_attention.core.threads import run_tasks

Array = Any
Piece = tuple[int, slice, slice]  # head, rows, columns
Work = Callable[[Piece], None]


def tile_sizes(call: Call, inputs: Inputs, *, backward: bool = False) -> tuple[int, int]:
    """Return the tile that the library would take."""
    options = {**call.options, **inputs.options}
    problem = validate(inputs.query, inputs.key, inputs.value, **options).problem
    return host_block_sizes(problem, backward=backward)


def two_products(call: Call, inputs: Inputs) -> Callable[[], None]:
    """Return what multiplies queries by keys and weights by values, tile by tile."""
    rows, columns = tile_sizes(call, inputs)
    query, key, value = (_flat(array) for array in (inputs.query, inputs.key, inputs.value))
    turned = _turned(key, columns)

    def worker() -> Work:
        scores = np.zeros(rows * columns, np.float32)
        sums = np.zeros((rows, call.width), np.float32)

        def work(piece: Piece) -> None:
            head, down, across = piece
            q, k, v = query[head, down], turned[head, across.start], value[head, across]
            tile = _part(scores, len(q), len(v))
            matmul(q, k, tile)
            matmul(tile, v, sums[: len(q)])

        return work

    return partial(_run, call, rows, columns, [worker() for _ in range(cores())])


def seven_products(call: Call, inputs: Inputs) -> Callable[[], None]:
    """Return the same for forward and backward: the two, and the five of the gradients.

    All are made at the tile size of the gradients.
    """
    rows, columns = tile_sizes(call, inputs, backward=True)
    arrays = (inputs.query, inputs.key, inputs.value, inputs.d_output)
    query, key, value, d_output = (_flat(array) for array in arrays)
    turned_keys, turned_values = _turned(key, columns), _turned(value, columns)

    def worker() -> Work:
        scores, d_scores = np.zeros((2, rows * columns), np.float32)
        by_rows = np.zeros((rows, call.width), np.float32)
        by_columns = np.zeros((columns, call.width), np.float32)

        def work(piece: Piece) -> None:
            head, down, across = piece
            q, k, v = query[head, down], key[head, across], value[head, across]
            d, place = d_output[head, down], (head, across.start)
            tile, d_tile = _part(scores, len(q), len(k)), _part(d_scores, len(q), len(k))
            for _ in range(2):  # forward; and the weights once more for the gradients
                matmul(q, turned_keys[place], tile)
            matmul(tile, v, by_rows[: len(q)])
            matmul(d, turned_values[place], d_tile)
            matmul(tile.T, d, by_columns[: len(k)])
            matmul(d_tile, k, by_rows[: len(q)])
            matmul(d_tile.T, q, by_columns[: len(k)])

        return work

    return partial(_run, call, rows, columns, [worker() for _ in range(cores())])


def reading(call: Call, inputs: Inputs) -> Callable[[], None]:
    """Return what reads keys and values once: a dot product of each with itself, in all threads."""
    parts = [
        part
        for array in (inputs.key, inputs.value)
        for part in np.array_split(array.reshape(-1), cores())
    ]

    def read() -> None:
        run_tasks(iter([partial(np.dot, part, part) for part in parts]), len(parts))

    return read


def _turned(array: Array, columns: int) -> dict[tuple[int, int], Array]:
    """Return the tiles of keys or values by head and first row, each packed in columns."""
    return {
        (head, start): np.ascontiguousarray(rows[start : start + columns].T)
        for head, rows in enumerate(array)
        for start in range(0, len(rows), columns)
    }


def _part(memory: Array, rows: int, columns: int) -> Array:
    return memory[: rows * columns].reshape(rows, columns)


def _flat(array: Array) -> Array:
    return array.reshape(-1, *array.shape[-2:])


def _run(call: Call, rows: int, columns: int, workers: list[Work]) -> None:
    pieces, lock = _pieces(call, rows, columns), threading.Lock()

    def task(work: Work) -> None:
        while True:
            with lock:
                taken = next(pieces, None)
            if taken is None:
                return
            for piece in taken:
                work(piece)

    run_tasks(iter([partial(task, work) for work in workers]), len(workers))


def _pieces(call: Call, rows: int, columns: int) -> Iterator[list[Piece]]:
    """Yield the tiles of a block of rows, or of as many small heads as make up a large tile."""
    heads = range(call.batch * call.heads)
    starts = range(0, call.length, rows)
    per_task = max(1, 2**17 // (rows * columns))
    everything = (
        [
            (head, slice(start, start + rows), slice(column, column + columns))
            for column in range(0, _stop(call, start + rows), columns)
        ]
        for head in heads
        for start in reversed(starts)
    )
    while taken := list(itertools.islice(everything, per_task)):
        yield list(itertools.chain.from_iterable(taken))


def _stop(call: Call, stop: int) -> int:
    return min(stop, call.length) if call.options.get("causal") else call.key_shape[2]
