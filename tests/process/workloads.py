"""Calls of a few tiles each, with what they did to the process told afterwards."""

import hashlib
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from threadpoolctl import threadpool_info

from portable_attention import Dropout, attention


def blas_threads() -> dict[str, int]:
    """Return how many threads each BLAS library of this process may use."""
    return {
        info["filepath"]: info["num_threads"]
        for info in threadpool_info()
        if info["user_api"] == "blas"
    }


def calls(library: str = "numpy") -> list[Callable[[], list[np.ndarray]]]:
    """Return calls with arrays of `library`; each returns its output and lse as NumPy arrays."""
    xp = importlib.import_module("jax.numpy" if library == "jax" else library)
    rng = np.random.default_rng(0)
    prepared = []
    double = "float32" if library == "jax" else "float64"  # JAX has it only where asked
    for shape, dtype, options in (
        ((2, 4, 700, 32), "float32", {"causal": True, "softcap": 4.0}),
        ((1, 2, 1100, 64), "float32", {"window": (200, 3), "block_size": (128, 96)}),
        ((3, 2, 257, 16), double, {"key_lengths": np.asarray([257, 0, 31])}),
        ((1, 4, 513, 8), "float32", {"dropout": Dropout(0.3, 11)}),
        ((600, 24), "float32", {"bias": rng.standard_normal((600, 600)).astype("float32")}),
    ):
        inputs = [xp.asarray(rng.standard_normal(shape).astype(dtype)) for _ in range(3)]
        keywords = {
            name: xp.asarray(value) if isinstance(value, np.ndarray) else value
            for name, value in options.items()
        }
        prepared.append(_prepare(inputs, keywords))
    return prepared


def _prepare(inputs: list[Any], options: dict[str, Any]) -> Callable[[], list[np.ndarray]]:
    def call() -> list[np.ndarray]:
        return [np.asarray(array) for array in attention(*inputs, return_lse=True, **options)]

    return call


def digest(call: Callable[[], list[np.ndarray]]) -> str:
    """Return a hash of every bit that a call returns."""
    return hashlib.sha256(b"".join(array.tobytes() for array in call())).hexdigest()


def digests(library: str = "numpy") -> list[str]:
    return [digest(call) for call in calls(library)]


def long_call(library: str = "numpy") -> Callable[[], Any]:
    """Return a call that would take minutes."""
    xp = importlib.import_module(library)
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((3, 1, 16, 2**17, 16), dtype=np.float32)
    query, key, value = (xp.asarray(array) for array in inputs)
    return lambda: attention(query, key, value)
