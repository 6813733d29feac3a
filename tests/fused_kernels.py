"""Stand-ins for the kernels of GPUs: the plain formula, as they compute it, and calls for them."""

from __future__ import annotations

import numpy as np
import pytest

from portable_attention import Dropout

from .backends import BACKENDS

SIZES = {"heads": 4, "queries": 40, "keys": 40, "width": 16, "value_width": 16}
OPTIONS = {"bare": {}, "causal": {"causal": True}, "scale": {"scale": 0.7}}
REFUSED = {
    "window": ({}, {"window": (2, 0)}),
    "offset": ({}, {"causal": True, "query_offset": 1}),
    "lengths": ({}, {"key_lengths": 3}),
    "mask": ({}, {"mask": np.ones((40, 40), bool)}),
    "bias": ({}, {"bias": np.zeros((40, 40), np.float32)}),
    "sinks": ({}, {"sinks": np.zeros(4, np.float32)}),
    "softcap": ({}, {"softcap": 2.0}),
    "dropout": ({}, {"dropout": Dropout(0.5, 1)}),
    "block_size": ({}, {"block_size": (2, 2)}),
    "Lq = Lk": ({"keys": 48}, {"causal": True, "query_offset": "start"}),
    "above 0": ({}, {"scale": -1.0}),
    "as wide": ({"value_width": 8}, {}),
    "multiple of 8": ({"width": 12, "value_width": 12}, {}),
    "empty": ({"keys": 0}, {}),
    "grid": ({"batch": (65536,), "heads": 1, "queries": 1, "keys": 2, "width": 8}, {}),
    "alone": ({"dtype": "float64"}, {}),
}
REFUSED["grid"][0]["value_width"] = 8


GPUS = [
    pytest.param(name, marks=pytest.mark.skip(reason=f"{name} {missing}"))
    if (missing := BACKENDS[name].missing())
    else name
    for name in ("torch-cuda", "jax-gpu", "cupy")
]


def formula(query, key, value, *, causal, scale):
    """Return output and lse (B, Hq, Lq), with the weights in the dtype of the inputs."""
    half = query.dtype
    groups = query.shape[1] // key.shape[1]
    query, key, value = (
        np.asarray(array, np.float64)
        for array in (query, np.repeat(key, groups, 1), np.repeat(value, groups, 1))
    )
    with np.errstate(all="ignore"):
        scores = query @ key.swapaxes(-1, -2) * scale
        if causal:
            scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
        largest = scores.max(-1, keepdims=True)
        weights = np.exp(scores - largest)
        total = weights.sum(-1, keepdims=True)
        output = weights.astype(half).astype(np.float64) @ value / total
        return output.astype(half), (np.log(total) + largest)[..., 0].astype(np.float32)
