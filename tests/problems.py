"""Small calls for the tests of single rules."""

from __future__ import annotations

import numpy as np

from . import oracle
from .dtypes import numpy_dtype


def make_inputs(
    *,
    batch=(2,),
    heads=2,
    key_heads=None,
    queries=5,
    keys=7,
    width=4,
    value_width=3,
    dtype="float32",
    seed=0,
) -> dict[str, np.ndarray]:
    """Return normal numbers as query, key and value."""
    key_heads = heads if key_heads is None else key_heads
    rng = np.random.default_rng(seed)
    shapes = {
        "query": (*batch, heads, queries, width),
        "key": (*batch, key_heads, keys, width),
        "value": (*batch, key_heads, keys, value_width),
    }
    return {
        name: rng.standard_normal(shape).astype(numpy_dtype(dtype))
        for name, shape in shapes.items()
    }


def uniform_inputs(queries, keys, batch=(), heads=1, dtype="float32") -> dict[str, np.ndarray]:
    """Return a call whose output tells the weights: equal scores, and the identity as values."""
    dtype = numpy_dtype(dtype)
    return {
        "query": np.zeros((*batch, heads, queries, 1), dtype),
        "key": np.zeros((*batch, heads, keys, 1), dtype),
        "value": np.broadcast_to(np.eye(keys, dtype=dtype), (*batch, heads, keys, keys)),
    }


def restrictions(queries=5, keys=7, batch=(2,), heads=2) -> dict[str, dict]:
    """Return every way to forbid pairs, alone and together, for calls of these lengths.

    Each leaves some rows with keys, and each leaves some key unseen by some row.
    """
    rng = np.random.default_rng(1)
    scores = (*batch, heads, queries, keys)
    bias = rng.standard_normal(scores).astype(np.float32)
    bias[rng.random(scores) < 0.4] = -np.inf
    one_by_one = {
        "mask": {"mask": rng.random(scores) < 0.5},
        "bias": {"bias": bias},
        "causal": {"causal": True, "query_offset": "end"},
        "window": {"window": (1, 1), "query_offset": "start"},
        "key_lengths": {"key_lengths": np.arange(2, 2 + batch[0])},
        "query_lengths": {"query_lengths": queries - 2},
    }
    together = {"mask": rng.random((queries, keys)) < 0.8, "bias": bias, "causal": True}
    together |= {"window": (4, 0), "query_offset": 2, "key_lengths": 6, "query_lengths": 4}
    return {**one_by_one, "together": together}


def allowed_by(inputs, options) -> np.ndarray:
    """Return the pairs that the options of a call allow, in the shape of the scores."""
    return oracle.steps_of(**inputs, **options).allowed
