"""`explain`: what a call will do, and why, without doing it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from portable_attention.attention import torch_operator
from portable_attention.backends import Array
from portable_attention.backends.base import dtype_name
from portable_attention.core import engines, plan, windows
from portable_attention.core.arguments import check_flag
from portable_attention.core.dropout import Dropout
from portable_attention.core.heads import in_columns
from portable_attention.core.problem import Call, Limits, is_host
from portable_attention.core.spec import validate
from portable_attention.core.threads import usable_threads

_ITEM = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Explanation:
    """What a call of `attention` will do. `str()` says it in words.

    A tile is a block of queries of one head against a block of keys.

    Attributes
    ----------
    engine : str
        "portable", or the name of the library's own kernel that takes the call.
    passed_over : dict of str to str
        The other engines, and why each is not taken.
    schedule : str
        How tiles are run: "host tiles" (a pool of threads over host memory), "eager tiles" (a loop
        in the library's own calls), "scan" (one compiled loop), or "native".
    tile : (int, int)
        Queries and keys of a tile.
    heads_per_tile : int
        Query heads that are computed together.
    threads : int
        Tile threads; 1 where the library decides.
    skipped, full, mixed : int or None
        Tiles that no pair of is allowed by the positions and lengths, so that they cost nothing;
        tiles without any masking; and the others, where a mask and a bias count as masking, since
        their values are not looked at. None where lengths or offsets cannot be read (a trace).
    flops : int
        Multiplications and additions of the two products over the tiles that are computed.
    bytes : int
        Inputs and outputs, each counted once.
    memory : int
        Estimated bytes at work besides inputs and outputs.

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention import explain
    >>> query = np.zeros((2, 100, 64), dtype=np.float32)
    >>> print(explain(query, query, query))  # doctest: +ELLIPSIS
    engine    portable, host tiles
    tiles     100 queries x 100 keys; heads at a time: 2, threads: ...
              0 skipped (0%), 2 full, 0 mixed
    work      0.00512 GFLOP
    in, out   200 KiB
    memory    about ... besides
    """

    engine: str
    passed_over: dict[str, str]
    schedule: str
    tile: tuple[int, int]
    heads_per_tile: int
    threads: int
    skipped: int | None
    full: int | None
    mixed: int | None
    flops: int
    bytes: int
    memory: int

    def __str__(self) -> str:
        lines = [
            f"engine    {self.engine}, {self.schedule}",
            *(f"          not {name}: {reason}" for name, reason in self.passed_over.items()),
        ]
        if self.engine == "portable":
            queries, keys = self.tile
            lines.append(
                f"tiles     {queries} queries x {keys} keys; heads at a time: "
                f"{self.heads_per_tile}, threads: {self.threads}"
            )
            if self.skipped is None or self.full is None or self.mixed is None:
                lines.append("          which are skipped is known when the call runs")
            else:
                count = max(1, self.skipped + self.full + self.mixed)
                lines.append(
                    f"          {self.skipped} skipped ({self.skipped / count:.0%}), "
                    f"{self.full} full, {self.mixed} mixed"
                )
        lines.append(f"work      {self.flops / 1e9:.3g} GFLOP")
        lines.append(f"in, out   {_size(self.bytes)}")
        lines.append(f"memory    about {_size(self.memory)} besides")
        return "\n".join(lines)


def explain(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    query_offset: Any = None,
    query_lengths: Any = None,
    key_lengths: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: Dropout | None = None,
    return_lse: bool = False,
    layout: str = "bhld",
    engine: str = "auto",
    block_size: tuple[int, int] | None = None,
) -> Explanation:
    """Say what `attention` would do with these arguments, without computing anything.

    All parameters are those of `attention`. The values of query, key, value, mask, bias and sinks
    are not looked at.

    Returns
    -------
    Explanation
        The engine and why each other was passed over, the tiles and how many of them are skipped,
        the work, and an estimate of the memory. Printed, it is text for people.

    Raises
    ------
    TypeError, ValueError
        As `attention` does.

    Notes
    -----
    Whether a native kernel is the faster choice is measured once a process, by the first call (or
    explanation) large enough for it to matter.

    Examples
    --------
    Nearly half of the tiles of a causal call lie beyond the diagonal:

    >>> import numpy as np
    >>> from portable_attention import explain
    >>> query = key = value = np.zeros((1, 8, 4096, 64), dtype=np.float32)
    >>> found = explain(query, key, value, causal=True)
    >>> found.engine, found.tile, (found.skipped, found.full, found.mixed)
    ('portable', (512, 256), (448, 448, 128))
    """
    check_flag("return_lse", return_lse)
    operator = torch_operator(query, key, value, bias, sinks)
    with nullcontext() if operator is None else operator.beneath_autograd():
        call = validate(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            causal=causal,
            window=window,
            query_offset=query_offset,
            query_lengths=query_lengths,
            key_lengths=key_lengths,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            dropout=dropout,
            layout=layout,
            engine=engine,
            block_size=block_size,
        )
        return _explain(call, return_lse=return_lse)


def _explain(call: Call, *, return_lse: bool) -> Explanation:
    kernel, passed_over = engines.choose(call, call.engine)
    problem = call.problem
    schedule, tile, together, memory = _tiling(call)
    heads = math.prod((*problem.batch, *problem.heads))
    counts = _count(call, tile, together, schedule)
    pairs = heads * problem.query_length * problem.key_length
    if counts is None:
        skipped = full = mixed = None
    else:
        (skipped, full, mixed), pairs = counts
    arrays = {
        name: getattr(call, name) for name in ("query", "key", "value", "mask", "bias", "sinks")
    }
    total = sum(
        math.prod(array.shape) * (1 if name == "mask" else _ITEM[dtype_name(array)])
        for name, array in arrays.items()
        if array is not None
    )
    total += math.prod(problem.output_shape) * _ITEM[problem.dtype]
    if return_lse:
        total += math.prod(problem.output_shape[:-1]) * _ITEM[problem.compute_dtype]
    return Explanation(
        engine="portable" if kernel is None else kernel.name,
        passed_over=passed_over
        if kernel is None
        else {**passed_over, "portable": _why_not_portable(call, kernel)},
        schedule=schedule if kernel is None else "native",
        tile=tile,
        heads_per_tile=together,
        threads=usable_threads() if schedule == "host tiles" else 1,
        skipped=skipped,
        full=full,
        mixed=mixed,
        flops=2 * pairs * (problem.width + problem.value_width),
        bytes=total,
        memory=memory,
    )


def _why_not_portable(call: Call, kernel: engines.Kernel) -> str:
    if call.engine != "native":
        return "slower here"
    broken = kernel.breaks(call)
    return "engine='native' asks for a kernel" + (f", although {broken}" if broken else "")


def _tiling(call: Call) -> tuple[str, tuple[int, int], int, int]:
    """Return the schedule, its tile, how many query heads share one, and the memory at work."""
    problem, backend = call.problem, call.backend
    item = _ITEM[problem.compute_dtype]
    if backend.schedule == "scan":
        name = "scan"
    else:
        name = "eager tiles" if (hosted := backend.host_call(call)) is None else "host tiles"
    heads = math.prod((*problem.batch, *problem.heads))
    if name == "host tiles":
        piece = windows.pieces(hosted)[0]
        tile, items = piece.tile, min(piece.capacity, heads * (piece.blocks or 1))
        # Blocks of rows that look alike are done together before heads are.
        together = max(1, items // (piece.blocks or 1))
        workers = usable_threads()
    else:
        budget = backend.score_budget(call.device)
        if name == "scan":
            tile, capacity = plan.scan_batching(problem, budget, limited=bool(call.limits.items()))
        else:
            tile, capacity = plan.batching(problem, budget)
        kv_heads = math.prod((*problem.batch, problem.kv_heads))
        together = items = min(capacity, kv_heads) * problem.groups
        workers = 1
    queries, keys = tile
    widths = problem.width + 2 * problem.value_width
    of_tile = items * (3 * queries * keys + queries * widths)
    of_head = problem.key_length * (problem.width + problem.value_width)
    widened = problem.dtype != problem.compute_dtype and problem.span is None
    copied = together * of_head if widened else 0
    if name == "host tiles" and in_columns(problem):
        copied += workers * problem.key_length * problem.width
    return name, tile, together, item * (workers * of_tile + copied)


def _count(
    call: Call, tile: tuple[int, int], together: int, schedule: str
) -> tuple[tuple[int, int, int], int] | None:
    """Return how many tiles are skipped, full and mixed, and the pairs in the latter two."""
    problem = call.problem
    if not all(is_host(limit) for _, limit in call.limits.items()):
        return None
    masked = call.mask is not None or call.bias is not None
    pieces = windows.pieces(call.backend.host_call(call)) if schedule == "host tiles" else []
    if len(pieces) > 1:
        parts = [(piece.call, piece.tile, piece.capacity) for piece in pieces]
    else:
        parts = [(call, tile, together)]
    skipped = full = mixed = pairs = 0
    for part, (size_q, size_k), most in parts:
        length = part.problem.query_length
        for limits, heads in _chunks(part, most, schedule):
            for start in range(0, length, size_q):
                rows = (start, min(start + size_q, length))
                some, complete, width = _count_row(limits, rows, size_k, part.problem.key_length)
                complete = 0 if masked else complete
                skipped += heads * (-(-problem.key_length // size_k) - some)
                full += heads * complete
                mixed += heads * (some - complete)
                pairs += heads * (rows[1] - rows[0]) * width
    return (skipped, full, mixed), pairs


def _count_row(
    limits: Limits, rows: tuple[int, int], block: int, length: int
) -> tuple[int, int, int]:
    """Return how many tiles a block of rows visits, how many need no masking, and their keys."""
    found = plan.reach(limits, rows, length)
    if found.stop <= found.first:
        return 0, 0, 0
    first, last = found.first // block, -(-found.stop // block)
    end = min(last * block, length)
    inner_first = max(first, -(-found.inner_first // block))
    inner_last = last if found.inner_stop >= end else found.inner_stop // block
    return last - first, max(0, inner_last - inner_first), end - first * block


def _chunks(call: Call, together: int, schedule: str) -> Iterator[tuple[Limits, int]]:
    """Yield the limits of the chunks that differ, and how many query heads have each."""
    problem = call.problem
    by_query_head = schedule == "host tiles"
    sizes = (*problem.batch, *(problem.heads if by_query_head else (problem.kv_heads,)))
    each = 1 if by_query_head else problem.groups
    different: dict[Any, tuple[Limits, int]] = {}
    for index in plan.chunks(sizes, max(1, together // each)):
        limits = plan.take_limits(call.limits, index)
        heads = each * math.prod(cut.stop - cut.start for cut in index)
        key = tuple((name, np.asarray(limit).tobytes()) for name, limit in limits.items())
        seen = different.get(key, (limits, 0))[1]
        different[key] = (limits, seen + heads)
    yield from different.values()


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"
