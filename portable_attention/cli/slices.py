"""One call of attention as several, each of a slice of its query rows, with the same answer.

Rows of a softmax do not depend on one another, so a long call can show how far it has come. Every
option that speaks of rows is restated for the slice: the position of its first row, the rows that
are valid in it, its part of a mask or bias.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

# About a second of work a slice, where a score takes a few nanoseconds.
SCORES_PER_SLICE: Final = 1 << 29
# Slices start at multiples of this, so that they cut no tile in two.
ROWS_MULTIPLE: Final = 1024
_FAR: Final = 1 << 31  # farther than this, positions are left to the call itself to judge


def row_axis(layout: str) -> int:
    """Return the axis of the queries in query and output."""
    return -3 if layout == "blhd" else -2


def slices_of(
    call: Mapping[str, Any], scores_per_slice: int = SCORES_PER_SLICE
) -> list[dict[str, Any]]:
    """Return the keyword arguments of each slice of a call; only one where it cannot be cut.

    Parameters
    ----------
    call
        Every argument of `portable_attention.attention`, arrays being NumPy's.
    scores_per_slice
        How many scores (query, key) a slice has, about.

    Notes
    -----
    A call with dropout is not cut: which weights are kept depends on the index of the row. Nor is
    one that `attention` would refuse: it must see the fault as it was given.
    """
    query, key = call["query"], call["key"]
    axis = row_axis(call["layout"])
    if call["dropout"] is not None or query.ndim < -axis or key.ndim < -axis:
        return [dict(call)]
    rows, keys = query.shape[axis], key.shape[axis]
    offset = _resolved_offset(call, rows, keys)
    if offset is None or not _rows_fit(call, rows):
        return [dict(call)]
    size = _slice_rows(call, rows, keys, scores_per_slice)
    if size >= rows:
        return [dict(call)]
    # A short rest goes with the slice before it: few rows may take another path than many.
    starts = [start for start in range(0, rows, size) if rows - start >= ROWS_MULTIPLE]
    return [
        _slice(call, offset, start, stop)
        for start, stop in zip(starts, [*starts[1:], rows], strict=True)
    ]


def _resolved_offset(call: Mapping[str, Any], rows: int, keys: int) -> Any:
    """Return the position of row 0 as a number or an array, or None to leave the call whole."""
    offset = call["query_offset"]
    positional = call["causal"] or call["window"] is not None
    if offset is None:
        return None if positional and rows != keys else 0
    if isinstance(offset, str):
        if offset != "end":
            return 0 if offset == "start" else None
        counts = (call["key_lengths"], call["query_lengths"])
        if not all(_whole(count) for count in counts if count is not None):
            return None
        key_count, query_count = (
            np.int64(full) if count is None else np.asarray(count, dtype=np.int64)
            for count, full in zip(counts, (keys, rows), strict=True)
        )
        return key_count - query_count
    return np.asarray(offset, dtype=np.int64) if _whole(offset) else None


def _whole(number: int | NDArray[Any]) -> bool:
    """Whether these are integers of a size that positions can have."""
    array = np.asarray(number)
    return array.dtype.kind in "iu" and bool(np.all((array < _FAR) & (array > -_FAR)))


def _rows_fit(call: Mapping[str, Any], rows: int) -> bool:
    for name in ("mask", "bias"):
        array = call[name]
        if array is not None and array.ndim > 1 and array.shape[-2] not in (1, rows):
            return False
    lengths = call["query_lengths"]
    if lengths is None:
        return True
    array = np.asarray(lengths)
    return _whole(array) and bool(np.all((array >= 0) & (array <= rows)))


def _slice_rows(call: Mapping[str, Any], rows: int, keys: int, scores_per_slice: int) -> int:
    """Return how many rows a slice has."""
    reach = keys
    if call["causal"] and call["window"] is None:
        reach = keys // 2
    elif call["window"] is not None and None not in call["window"]:
        reach = min(keys, sum(call["window"]) + 1)
    scores: int = math.prod(call["query"].shape[:-1]) * reach
    count = -(-scores // scores_per_slice)
    return -(-rows // max(1, count) // ROWS_MULTIPLE) * ROWS_MULTIPLE


def _slice(call: Mapping[str, Any], offset: Any, start: int, stop: int) -> dict[str, Any]:
    part = dict(call)
    axis = row_axis(call["layout"])
    query = call["query"]
    at = [slice(None)] * query.ndim
    at[axis] = slice(start, stop)
    part["query"] = query[tuple(at)]
    for name in ("mask", "bias"):
        array = call[name]
        if array is not None and array.ndim > 1 and array.shape[-2] != 1:
            part[name] = array[..., start:stop, :]
    if call["query_lengths"] is not None:
        part["query_lengths"] = np.clip(
            np.asarray(call["query_lengths"], dtype=np.int64) - start, 0, stop - start
        )
    part["query_offset"] = offset + start
    return part


def joined(parts: list[NDArray[Any]], axis: int) -> NDArray[Any]:
    """Return the slices of a result as one array."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=axis)
