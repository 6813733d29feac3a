"""What the shapes of query, key and value say, and whether they fit together."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


class Sizes(NamedTuple):
    """The sizes of a call, and the inner shapes (*batch, Hkv, G, rows, columns) of its arrays."""

    batch: Shape
    kv_heads: int
    groups: int
    query_length: int
    key_length: int
    width: int
    value_width: int
    rank: int  # of the arrays with heads, once they all have the same
    headless: bool  # all inputs were 2-D
    query: Shape
    key: Shape
    value: Shape


def sizes_of(query: Shape, key: Shape, value: Shape, layout: str) -> Sizes:
    """Return the sizes of a call from the shapes as they were given, or raise ValueError."""
    given = {"query": query, "key": key, "value": value}
    ranks = {len(shape) for shape in given.values()}
    if layout == "blhd" and len(ranks) > 1:
        raise ValueError(
            "query, key and value must have the same rank with layout='blhd', got "
            + ", ".join(f"{name} {shape}" for name, shape in given.items())
        )
    shapes = {name: _heads_first(name, shape, layout) for name, shape in given.items()}
    rank = max(len(shape) for shape in shapes.values())
    shapes = {name: _padded(shape, rank) for name, shape in shapes.items()}
    batch = _check_shapes(shapes, given, layout)
    heads, query_length, width = shapes["query"][-3:]
    kv_heads, key_length, value_width = shapes["value"][-3:]
    return Sizes(
        batch,
        kv_heads,
        heads // kv_heads,
        query_length,
        key_length,
        width,
        value_width,
        rank,
        ranks == {2},
        *(split_heads(shape, kv_heads) for shape in shapes.values()),
    )


known_sizes = lru_cache(maxsize=256)(sizes_of)


def split_heads(shape: Shape, kv_heads: int) -> Shape:
    """Turn the shape (..., H, rows, columns) into (..., Hkv, G, rows, columns)."""
    *lead, heads, rows, columns = shape
    split = (kv_heads, heads // kv_heads) if heads > 1 else (1, 1)
    return (*lead, *split, rows, columns)


def _heads_first(name: str, shape: Shape, layout: str) -> Shape:
    """Return a shape of rank >= 3, heads before length."""
    if layout == "blhd":
        if len(shape) < 3:
            raise ValueError(
                f"{name} must have axes (..., L, H, D) with layout='blhd', got shape {shape}"
            )
        *lead, rows, heads, columns = shape
        return (*lead, heads, rows, columns)
    if len(shape) < 2:
        raise ValueError(f"{name} must have axes (..., H, L, D) or (L, D), got shape {shape}")
    return _padded(shape, 3)


def _padded(shape: Shape, rank: int) -> Shape:
    return (*([1] * (rank - len(shape))), *shape)


def _check_shapes(shapes: dict[str, Shape], given: dict[str, Shape], layout: str) -> Shape:
    """Check that query, key and value fit together; return their common batch axes."""
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


def _layout_hint(shapes: dict[str, Shape], layout: str) -> str:
    query, key = shapes["query"], shapes["key"]
    if layout == "bhld" and query[-2] == key[-2]:
        return "; if the axes are (..., L, H, D), say layout='blhd'"
    return ""
