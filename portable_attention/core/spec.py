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
    ranks = [arrays[name].ndim for name in ("query", "key", "value")]
    if layout == "blhd" and len(set(ranks)) > 1:
        raise ValueError(
            "query, key and value must have the same rank with layout='blhd', got "
            + ", ".join(f"{name} {tuple(arrays[name].shape)}" for name in ("query", "key", "value"))
        )
    headless = ranks == [2, 2, 2]
    given_shapes = {name: tuple(arrays[name].shape) for name in ("query", "key", "value")}
    for name in ("query", "key", "value"):
        arrays[name] = _with_heads(backend, name, arrays[name], layout)
    rank = max(3, *ranks)
    if ranks != [rank] * 3:
        for name in ("query", "key", "value"):
            arrays[name] = _pad(backend, arrays[name], rank)
    batch = _check_shapes(arrays, given_shapes, layout)
    heads, query_length, width = arrays["query"].shape[-3:]
    kv_heads, key_length, value_width = arrays["value"].shape[-3:]
    groups = heads // kv_heads

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
    scores = (query_length, key_length) if headless else (*batch, heads, query_length, key_length)
    rate, seed = check_dropout(backend, device, dropout)
    make = _known_problem if backend.on_host else Problem  # symbolic sizes cannot be looked up
    problem = make(
        batch=batch,
        kv_heads=kv_heads,
        groups=groups,
        query_length=query_length,
        key_length=key_length,
        width=width,
        value_width=value_width,
        dtype=dtype,
        compute_dtype=compute_dtype,
        scale=_check_scale(scale, width, compute_dtype),
        softcap=_check_softcap(softcap, compute_dtype),
        dropout_rate=rate,
        block_size=_check_block_size(block_size),
        span=span,
    )
    return Call(
        problem=problem,
        backend=backend,
        query=_split_heads(backend, arrays["query"], kv_heads),
        key=_split_heads(backend, arrays["key"], kv_heads),
        value=_split_heads(backend, arrays["value"], kv_heads),
        mask=_check_mask(backend, arrays.get("mask"), scores, kv_heads, rank),
        bias=_check_bias(backend, arrays.get("bias"), scores, kv_heads, rank),
        sinks=_check_sinks(backend, arrays.get("sinks"), kv_heads, groups),
        limits=limits,
        seed=seed,
        device=device,
        headless=headless,
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


def _with_heads(backend: Backend, name: str, array: Array, layout: str) -> Array:
    """Return an array of rank >= 3, heads before length."""
    shape = tuple(array.shape)
    if layout == "blhd":
        if len(shape) < 3:
            raise ValueError(
                f"{name} must have axes (..., L, H, D) with layout='blhd', got shape {shape}"
            )
        return swap_heads(backend, array)
    if len(shape) < 2:
        raise ValueError(f"{name} must have axes (..., H, L, D) or (L, D), got shape {shape}")
    return _pad(backend, array, 3)


def _pad(backend: Backend, array: Array, rank: int) -> Array:
    missing = rank - array.ndim
    if missing <= 0:
        return array
    return backend.reshape(array, (*([1] * missing), *array.shape))


def _check_shapes(
    arrays: dict[str, Array], given: dict[str, tuple[int, ...]], layout: str
) -> tuple[int, ...]:
    """Check that query, key and value fit together; return their common batch axes."""
    shapes = {name: tuple(arrays[name].shape) for name in ("query", "key", "value")}
    query, key, value = shapes.values()

    def error(message: str, hint: str = "") -> ValueError:
        axes = "(..., H, L, D)" if layout == "bhld" else "(..., L, H, D)"
        listed = ", ".join(f"{name} {shape}" for name, shape in given.items())
        listed += " as " + ("(L, D)" if all(len(shape) == 2 for shape in given.values()) else axes)
        return ValueError(f"{message}{listed}{hint}")

    if key[-3] != value[-3]:
        raise error("key and value must have the same number of heads, got ")
    if query[-3] == 0 or key[-3] == 0:
        raise error("the number of heads may not be 0, got ")
    if query[-3] % key[-3]:
        raise error(
            f"the query heads must be a multiple of the key/value heads, "
            f"got {query[-3]} and {key[-3]}: ",
            _layout_hint(shapes, layout),
        )
    if query[-1] != key[-1]:
        raise error("query and key must have the same width D, got ")
    if key[-2] != value[-2]:
        raise error("key and value must have the same length Lk, got ")
    if query[:-3] == key[:-3] == value[:-3]:
        return query[:-3]
    try:
        return np.broadcast_shapes(query[:-3], key[:-3], value[:-3])
    except ValueError:
        raise error("the batch axes must broadcast together, got ") from None


def _layout_hint(shapes: dict[str, tuple[int, ...]], layout: str) -> str:
    query, key = shapes["query"], shapes["key"]
    if layout == "bhld" and query[-2] == key[-2]:
        return "; if the axes are (..., L, H, D), say layout='blhd'"
    return ""


def _split_heads(backend: Backend, array: Array, kv_heads: int) -> Array:
    """Turn (..., H, rows, columns) into (..., Hkv, G, rows, columns), a view."""
    return backend.reshape(array, _split_shape(tuple(array.shape), kv_heads))


def _split_shape(shape: tuple[int, ...], kv_heads: int) -> tuple[int, ...]:
    *lead, heads, rows, columns = shape
    split = (kv_heads, heads // kv_heads) if heads > 1 else (1, 1)
    return (*lead, *split, rows, columns)


def _per_head(backend: Backend, array: Array, rank: int, kv_heads: int) -> Array:
    """Turn a mask or bias, of any rank, into (*batch, Hkv, G, rows, columns)."""
    shape = tuple(array.shape)
    padded = (*([1] * (rank - len(shape))), *shape)
    return backend.reshaped(array, _split_shape(padded, kv_heads))


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
