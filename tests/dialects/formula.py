"""The plain formula, densely in float64, for heads first: what the dialects are held against."""

from __future__ import annotations

from typing import Any

import numpy as np


def formula(
    query: Any,
    key: Any,
    value: Any,
    *,
    allowed: Any = True,
    bias: Any = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return output, lse and weights of (..., H, L, D) arrays."""
    query, key, value = (np.asarray(array, np.float64) for array in (query, key, value))
    groups = query.shape[-3] // key.shape[-3]
    key, value = (np.repeat(array, groups, axis=-3) for array in (key, value))
    scores = (
        query @ np.swapaxes(key, -1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    )
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(allowed, scores + bias, -np.inf)
    total = np.exp(scores).sum(-1)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks, np.float64))[:, None]
    weights = np.exp(scores) / np.where(total == 0, 1, total)[..., None]
    with np.errstate(divide="ignore"):
        return weights @ value, np.log(total), weights


def places(rows: int, columns: int, offset: int = 0) -> np.ndarray:
    """Return how far each key lies after the position of each row."""
    return np.arange(columns) - np.arange(rows)[:, None] - offset


def problem(
    seed: int, rows: int = 5, columns: int = 7, heads: int = 4, kv_heads: int = 2, width: int = 8
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return query, key and value in float32, heads first, a batch of 2."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((2, heads, rows, width), dtype=np.float32)
    key, value = rng.standard_normal((2, 2, kv_heads, columns, width), dtype=np.float32)
    return query, key, value
