"""The backward pass for libraries that compute at once, in any library's calls."""

from __future__ import annotations

import itertools
from typing import Any

from portable_attention.backends import Array
from portable_attention.core import plan
from portable_attention.core.backward import Cotangents, row_gradients, sum_to
from portable_attention.core.eager import Part, assemble, join
from portable_attention.core.problem import Call

Columns = tuple[int, int]


def run(call: Call, given: Cotangents) -> dict[str, Array]:
    """Return the gradients of the call's operands, in their inner shapes and compute dtype."""
    problem, backend = call.problem, call.backend
    blocks, capacity = plan.batching(problem, backend.score_budget(call.device))
    cuts = plan.cuts((*problem.batch, problem.kv_heads), capacity)
    totals: dict[str, dict[Any, Array]] = {}
    operands = given.wanted(call)
    if call.sinks is not None:
        operands["sinks"] = call.sinks[(*([None] * len(problem.batch)), ...)]
    for index in itertools.product(*cuts):
        part = Part(call, index)
        for name, gradient in _chunk(part, given.part(index), blocks).items():
            # Chunks that read the same part of a broadcast operand add up.
            place = tuple(
                slice(0, 1) if size == 1 else cut
                for size, cut in zip(operands[name].shape, index, strict=False)
            )
            seen = totals.setdefault(name, {})
            key = tuple((cut.start, cut.stop) for cut in place)
            seen[key] = seen[key] + gradient if key in seen else gradient
    return {
        name: assemble(
            backend,
            list(totals[name].values()),
            [
                [slice(0, 1)] if size == 1 else cut
                for size, cut in zip(operand.shape, cuts, strict=False)
            ],
        )
        for name, operand in operands.items()
    }


def _chunk(part: Part, given: Cotangents, blocks: tuple[int, int]) -> dict[str, Array]:
    """Return the gradients of one chunk of heads."""
    call, backend = part.call, part.call.backend
    problem, xp = call.problem, backend.xp
    block_q, block_k = blocks
    # Whether NaN or infinities could reach rows that do not attend them.
    careful = not all(
        backend.all_finite(array)
        for array in (part.query, part.key, part.value, given.d_output, given.d_lse)
        if array is not None
    ) or bool(xp.any(xp.isnan(given.lse)))
    strips = {"key": _Strip(part, "key"), "value": _Strip(part, "value")}
    bias_strips: list[_Strip] = []
    d_query, d_sinks = [], []
    for start in range(0, problem.query_length, block_q):
        rows = (start, min(start + block_q, problem.query_length))
        if part.bias is not None and given.of_bias:
            if not bias_strips or part.bias.shape[-2] != 1:
                bias_strips.append(_Strip(part, "bias", rows[1] - rows[0]))
            strips["bias"] = bias_strips[-1]
        query, sink = row_gradients(
            part,
            rows,
            block_k,
            given,
            lambda name, columns, tile: strips[name].add(columns, tile),
            careful=careful,
        )
        d_query.append(query)
        if part.sinks is not None:
            shape = (*([1] * len(problem.batch)), *part.sinks.shape)
            d_sinks.append(sum_to(xp, sink, shape))
    gradients = {
        "query": sum_to(xp, join(backend, d_query, -2), part.query.shape),
        "key": strips["key"].join(block_k),
        "value": strips["value"].join(block_k),
    }
    if bias_strips:
        gradients["bias"] = join(backend, [strip.join(block_k) for strip in bias_strips], -2)
    if d_sinks:
        gradients["sinks"] = sum(d_sinks[1:], start=d_sinks[0])
    return gradients


class _Strip:
    """The gradient of an operand along all keys, tile by tile, summed to the operand's shape."""

    def __init__(self, part: Part, name: str, rows: int = 0) -> None:
        self.part = part
        self.rows = rows  # of a bias
        self.name = name
        self.operand = getattr(part, name)
        self.tiles: dict[Columns, Array] = {}

    def add(self, columns: Columns, gradient: Array) -> None:
        shape = list(self.operand.shape)
        if self.name == "bias":
            if shape[-1] == 1:
                columns = (0, 1)
            else:
                shape[-1] = gradient.shape[-1]
            if shape[-2] != 1:
                shape[-2] = gradient.shape[-2]
        else:
            shape[-2] = gradient.shape[-2]
        gradient = sum_to(self.part.call.backend.xp, gradient, tuple(shape))
        seen = self.tiles.get(columns)
        self.tiles[columns] = gradient if seen is None else seen + gradient

    def join(self, block_k: int) -> Array:
        """Return the whole strip, with zeros where no tile was visited."""
        call = self.part.call
        length = call.problem.key_length
        axis = -1 if self.name == "bias" else -2
        grid = [(first, min(first + block_k, length)) for first in range(0, length, block_k)]
        if self.operand.shape[axis] == 1:
            grid = [(0, 1)]
        pieces = []
        for columns in grid or [(0, 0)]:
            if columns not in self.tiles:
                shape = list(self.operand.shape)
                shape[axis] = columns[1] - columns[0]
                if self.name == "bias" and shape[-2] != 1:
                    shape[-2] = self.rows
                dtype = call.backend.dtype(call.problem.compute_dtype)
                options: dict[str, Any] = {"dtype": dtype, "device": call.device}
                pieces.append(call.backend.xp.zeros(tuple(shape), **options))
            else:
                pieces.append(self.tiles[columns])
        return join(call.backend, pieces, axis)
