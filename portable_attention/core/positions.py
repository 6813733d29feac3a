"""Where rows and keys stand: causal, window, offset and lengths become limits on the keys.

Each limit is a number, host values over the batch, or, under a trace, an array that nobody can
read. Host values are exact at any size; they are clamped to where they stop mattering.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from portable_attention.backends import Backend, common_backend
from portable_attention.backends.base import dtype_name
from portable_attention.core.arguments import check_flag, described, whole_number
from portable_attention.core.problem import Limit, Limits

_UNLIMITED = Limits()
_WANTED = "an int or an integer array over the batch axes"
_FAR = 1 << 29  # beyond any length, and twice of it still fits into int32


def make_limits(
    backend: Backend,
    device: Any,
    batch: tuple[int, ...],
    lengths: tuple[int, int],
    *,
    causal: Any,
    window: Any,
    query_offset: Any,
    query_lengths: Any,
    key_lengths: Any,
) -> tuple[int | None, Limits]:
    """Return the keys between both ends of the window (None if open), and the limits."""
    length_q, length_k = lengths
    check_flag("causal", causal)
    if not causal and window is query_offset is query_lengths is key_lengths is None:
        return None, _UNLIMITED
    left, right = _check_window(window)
    if causal:
        right = 0 if right is None else min(right, 0)
    valid_q = _check_lengths(backend, device, "query_lengths", query_lengths, batch, length_q)
    valid_k = _check_lengths(backend, device, "key_lengths", key_lengths, batch, length_k)
    offset = _check_offset(backend, device, query_offset, batch)

    # Both options depend on positions, whatever their values: (None, None) is a window, too.
    if offset is None and (causal or window is not None) and length_q != length_k:
        raise ValueError(
            f"causal and window need a query_offset here, since Lq = {length_q} and "
            f"Lk = {length_k} differ and libraries disagree: pass query_offset='start' (row 0 "
            "stands at key 0) or 'end' (the last row stands at the last key), or an int"
        )
    if isinstance(offset, str) and offset == "end":
        end_k = length_k if valid_k is None else valid_k
        end_q = length_q if valid_q is None else valid_q
        offset = end_k - end_q
    elif offset is None or isinstance(offset, str):
        offset = 0

    low = None if left is None else _clamp(backend, offset, -left, length_q + length_k + 1)
    high = None if right is None else _clamp(backend, offset, right + 1, length_q + length_k + 1)
    if isinstance(low, int) and low <= 1 - length_q:
        low = None  # every row reaches back to key 0
    if isinstance(high, int) and high >= length_k:
        high = None  # every row reaches on to the last key
    span = None if left is None or right is None else left + right + 1
    return span, Limits(
        low, high, _unless_whole(valid_k, length_k), _unless_whole(valid_q, length_q)
    )


def _check_window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise TypeError(
            f"window must be a pair (left, right) of ints or None, got {described(window)}"
        )
    left, right = (
        None if side is None else whole_number("an entry of window", side) for side in window
    )
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise ValueError(
            f"the entries of window count keys and must be >= 0 (or None for no bound), "
            f"got {tuple(window)}"
        )
    return left, right


def _check_lengths(
    backend: Backend, device: Any, name: str, given: Any, batch: tuple[int, ...], length: int
) -> Limit:
    if given is None:
        return None
    limit = _integers(backend, device, name, given, batch)
    if isinstance(limit, int | np.ndarray):
        values = np.asarray(limit)
        wrong = values[(values < 0) | (values > length)]
        if wrong.size:
            raise ValueError(f"{name} must lie in 0..{length}, the length, got {int(wrong[0])}")
    return limit


def _check_offset(backend: Backend, device: Any, given: Any, batch: tuple[int, ...]) -> Any:
    if isinstance(given, str):
        if given not in ("start", "end"):
            raise ValueError(
                f"query_offset must be 'start', 'end', an int or an integer array, got {given!r}"
            )
        return given
    return None if given is None else _integers(backend, device, "query_offset", given, batch)


def _integers(
    backend: Backend, device: Any, name: str, given: Any, batch: tuple[int, ...]
) -> Limit:
    """Return an int, host values with axes (*batch, 1, 1, 1, 1), or such an unreadable array."""
    # NumPy's scalars are numbers here: before 2.1 they did not say where they lie.
    if isinstance(given, np.integer) or not (hasattr(given, "dtype") and hasattr(given, "shape")):
        return whole_number(name, given, _WANTED)
    if "int" not in dtype_name(given):
        raise TypeError(f"{name} must be {_WANTED}, got one of dtype {dtype_name(given)}")
    owner = common_backend({name: given})
    if owner is not backend and owner.name != "numpy":
        raise TypeError(
            f"{name} is an array of {owner.name}, but query is one of {backend.name}: "
            f"pass an int, or an array of {' or '.join(dict.fromkeys((backend.name, 'numpy')))}"
        )
    place = owner.device(given)
    if owner is backend and None not in (place, device) and place != device:
        raise ValueError(f"{name} is on device {place}, but query is on {device}")
    shape = tuple(given.shape)
    fits = len(shape) <= len(batch) and all(
        size in (1, full) for size, full in zip(reversed(shape), reversed(batch), strict=False)
    )
    if not fits:
        raise ValueError(f"{name} must broadcast to the batch axes {batch}, got shape {shape}")
    values = owner.read(given)
    axes = (*([1] * (len(batch) - len(shape))), *shape, 1, 1, 1, 1)
    if values is None:
        info = backend.xp.iinfo(given.dtype)
        near = backend.xp.clip(given, max(info.min, -_FAR), min(info.max, _FAR))
        return backend.astype(backend.xp.reshape(near, axes), backend.dtype("int32"))
    if values.dtype.kind == "u":
        values = np.minimum(values, np.uint64(1 << 62))
    wide = values.astype(np.int64)
    return int(wide) if wide.ndim == 0 else wide.reshape(axes)


def _unless_whole(limit: Limit, length: int) -> Limit:
    """Return None for a limit that lets every row or key through."""
    if isinstance(limit, int | np.ndarray) and np.all(np.asarray(limit) == length):
        return None
    return limit


def _clamp(backend: Backend, offset: Limit, shift: int, far: int) -> Limit:
    """Return offset + shift, clamped to [-far, far], beyond which nothing changes."""
    if not hasattr(offset, "dtype"):  # an int, or PyTorch's symbol of one
        return max(-far, min(far, offset + shift))
    shift = max(-_FAR, min(_FAR, shift))
    if isinstance(offset, np.ndarray):
        return np.clip(np.clip(offset, -(1 << 61), 1 << 61) + shift, -far, far)
    clip = backend.xp.clip
    return clip(clip(offset, -_FAR, _FAR) + shift, -far, far)
