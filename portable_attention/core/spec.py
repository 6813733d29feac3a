"""Validation, once, at the boundary: from what the caller passed to a `Call`, or a clear error."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from portable_attention.backends import Array, Backend, common_backend
from portable_attention.backends.base import dtype_name
from portable_attention.core.arguments import FLOATS, SCALE_REMEDY, real_number, whole_number
from portable_attention.core.dropout import Dropout, check_dropout
from portable_attention.core.positions import make_limits
from portable_attention.core.problem import Call, Problem, swap_heads
from portable_attention.core.sizes import known_sizes, sizes_of, split_heads

LAYOUTS = ("bhld", "blhd")
ENGINES = ("auto", "portable", "native")
_known_problem = lru_cache(maxsize=256)(Problem)  # to make one takes longer than to find it
_FAR_CAP = 1e-8  # of the largest number: scores that near it would be alone in their softmax


def validate(
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
    layout: str = "bhld",
    engine: str = "auto",
    block_size: tuple[int, int] | None = None,
) -> Call:
    """Check one call of attention and bring its arrays to the axes the algorithm works on."""
    check_choice("layout", layout, LAYOUTS)
    check_choice("engine", engine, ENGINES)
    given = {"query": query, "key": key, "value": value, "mask": mask, "bias": bias, "sinks": sinks}
    arrays = {name: array for name, array in given.items() if array is not None}
    for name in ("query", "key", "value"):
        if given[name] is None:
            raise TypeError(f"{name} must be an array, got None")
    backend = common_backend(arrays)
    arrays = {name: backend.as_operand(name, array) for name, array in arrays.items()}
    device = common_device(backend, arrays)
    arrays["query"], arrays["key"], arrays["value"] = backend.autocast(
        arrays["query"], arrays["key"], arrays["value"]
    )

    dtype = _common_dtype(arrays)
    compute_dtype = "float64" if dtype == "float64" else "float32"
    shape_q, shape_k, shape_v = (tuple(arrays[name].shape) for name in ("query", "key", "value"))
    # Symbolic sizes cannot be looked up.
    known = all(type(size) is int for size in (*shape_q, *shape_k, *shape_v))
    sizes = (known_sizes if known else sizes_of)(shape_q, shape_k, shape_v, layout)
    batch, query_length, key_length = sizes.batch, sizes.query_length, sizes.key_length
    kv_heads, groups, rank = sizes.kv_heads, sizes.groups, sizes.rank

    span, limits = make_limits(
        backend,
        device,
        batch,
        (query_length, key_length),
        causal=causal,
        window=window,
        query_offset=query_offset,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
    )
    lead = () if sizes.headless else (*batch, kv_heads * groups)
    scores = (*lead, query_length, key_length)
    rate, seed = check_dropout(backend, device, dropout)
    make = _known_problem if known else Problem
    problem = make(
        batch=batch,
        kv_heads=kv_heads,
        groups=groups,
        query_length=query_length,
        key_length=key_length,
        width=sizes.width,
        value_width=sizes.value_width,
        dtype=dtype,
        compute_dtype=compute_dtype,
        scale=_check_scale(scale, sizes.width, compute_dtype),
        softcap=_check_softcap(softcap, compute_dtype),
        dropout_rate=rate,
        block_size=_check_block_size(block_size),
        span=span,
    )
    return Call(
        problem=problem,
        backend=backend,
        query=_to_inner(backend, arrays["query"], sizes.query, layout),
        key=_to_inner(backend, arrays["key"], sizes.key, layout),
        value=_to_inner(backend, arrays["value"], sizes.value, layout),
        mask=_check_mask(backend, arrays.get("mask"), scores, kv_heads, rank),
        bias=_check_bias(backend, arrays.get("bias"), scores, kv_heads, rank),
        sinks=_check_sinks(backend, arrays.get("sinks"), kv_heads, groups),
        limits=limits,
        seed=seed,
        device=device,
        headless=sizes.headless,
        layout=layout,
        engine=engine,
    )


def check_choice(name: str, given: Any, allowed: tuple[str, ...]) -> None:
    """Check an option that is one of a few words."""
    if isinstance(given, str) and given in allowed:
        return
    words = ", ".join(repr(choice) for choice in allowed)
    kind = ValueError if isinstance(given, str) else TypeError
    raise kind(f"{name} must be one of {words}, got {given!r}")


def common_device(backend: Backend, arrays: dict[str, Array]) -> Any:
    """Return the device of all these arrays, or raise ValueError."""
    if backend.on_host:
        return "cpu"
    placed = {name: backend.device(array) for name, array in arrays.items()}
    first, device = next(
        ((name, device) for name, device in placed.items() if device is not None), ("", None)
    )
    for name, other in placed.items():
        if other is not None and other != device:
            raise ValueError(
                f"{name} is on device {other}, but {first} is on {device}: "
                f"move them to one device of {backend.name}"
            )
    return device


def _common_dtype(arrays: dict[str, Array]) -> str:
    query, key, value = arrays["query"], arrays["key"], arrays["value"]
    names = {"query": dtype_name(query), "key": dtype_name(key), "value": dtype_name(value)}
    for name, dtype in names.items():
        if dtype not in FLOATS:
            raise TypeError(
                f"{name} must have a real floating dtype ({', '.join(FLOATS)}), got {dtype}"
            )
    if len(set(names.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in names.items())
        raise TypeError(f"query, key and value must share one dtype, got {listed}: cast them first")
    return names["query"]


def _to_inner(backend: Backend, array: Array, shape: tuple[int, ...], layout: str) -> Array:
    """Turn query, key or value into (*batch, Hkv, G, rows, columns), a view."""
    return backend.reshape(swap_heads(backend, array) if layout == "blhd" else array, shape)


def _per_head(backend: Backend, array: Array, rank: int, kv_heads: int) -> Array:
    """Turn a mask or bias, of any rank, into (*batch, Hkv, G, rows, columns)."""
    shape = tuple(array.shape)
    padded = (*([1] * (rank - len(shape))), *shape)
    return backend.reshaped(array, split_heads(padded, kv_heads))


def _broadcastable(name: str, array: Array, scores: tuple[int, ...]) -> None:
    shape = tuple(array.shape)
    fits = len(shape) <= len(scores) and all(
        size in (1, full) for size, full in zip(reversed(shape), reversed(scores), strict=False)
    )
    if not fits:
        axes = "(Lq, Lk)" if len(scores) == 2 else "(..., Hq, Lq, Lk)"
        raise ValueError(
            f"{name} must broadcast to the scores {axes} = {scores} without enlarging them, "
            f"got shape {shape}"
        )


def _check_mask(
    backend: Backend, mask: Array | None, scores: tuple[int, ...], kv_heads: int, rank: int
) -> Array | None:
    if mask is None:
        return None
    dtype = dtype_name(mask)
    if dtype not in ("bool", "bool_"):
        raise TypeError(
            f"mask must be bool (True = may attend), got {dtype}: "
            "pass numbers that are added to the scores as bias=, or compare first (mask != 0)"
        )
    _broadcastable("mask", mask, scores)
    return _per_head(backend, mask, rank, kv_heads)


def _check_bias(
    backend: Backend, bias: Array | None, scores: tuple[int, ...], kv_heads: int, rank: int
) -> Array | None:
    if bias is None:
        return None
    dtype = dtype_name(bias)
    if dtype not in FLOATS:
        remedy = "pass a bool array as mask=" if dtype.startswith("bool") else "cast it first"
        raise TypeError(
            f"bias must have a real floating dtype ({', '.join(FLOATS)}), got {dtype}: {remedy}"
        )
    _broadcastable("bias", bias, scores)
    return _per_head(backend, bias, rank, kv_heads)


def _check_sinks(backend: Backend, sinks: Array | None, kv_heads: int, groups: int) -> Array | None:
    if sinks is None:
        return None
    dtype = dtype_name(sinks)
    if dtype not in FLOATS:
        raise TypeError(f"sinks must have a real floating dtype ({', '.join(FLOATS)}), got {dtype}")
    if tuple(sinks.shape) != (kv_heads * groups,):
        raise ValueError(
            f"sinks must have shape (Hq,) = ({kv_heads * groups},), got {tuple(sinks.shape)}"
        )
    return backend.reshape(sinks, (kv_heads, groups, 1, 1))


def _check_scale(scale: Any, width: int, compute_dtype: str) -> float:
    if scale is None:
        return 1.0 / math.sqrt(width) if width else 1.0
    number = real_number("scale", scale, SCALE_REMEDY)
    largest = float(np.finfo(compute_dtype).max)
    if not abs(number) <= largest:
        raise ValueError(
            f"scale must be a finite number of {compute_dtype}, the dtype of the scores, "
            f"at most {largest:.3g} in magnitude, got {number}"
        )
    return number


def _check_softcap(softcap: Any, compute_dtype: str) -> float | None:
    if softcap is None:
        return None
    number = real_number("softcap", softcap)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(
            f"softcap must be a finite number > 0, got {number}: leave it None for no cap"
        )
    # A cap that is tiny makes all scores 0, and one that no score comes near changes none; the
    # quotient of score and cap would leave the range of normal numbers.
    limits = np.finfo(compute_dtype)
    if number > _FAR_CAP * float(limits.max):
        return None
    return max(number, float(limits.tiny))


def _check_block_size(block_size: Any) -> tuple[int, int] | None:
    if block_size is None:
        return None
    if not isinstance(block_size, tuple | list) or len(block_size) != 2:
        raise TypeError(f"block_size must be a pair (queries, keys) of ints, got {block_size!r}")
    sizes = tuple(whole_number("an entry of block_size", size) for size in block_size)
    if min(sizes) < 1:
        raise ValueError(f"the entries of block_size must be at least 1, got {block_size!r}")
    return sizes[0], sizes[1]
