"""The arrays of a call, and what a few rows of its answer must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.records import Call

Array = Any
# What an answer may be off by: inputs are of size 1, and so are outputs at most.
TOLERANCES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Inputs:
    """Random arrays in NumPy, of the dtype of the call; those that it does not take are None."""

    query: Array
    key: Array
    value: Array
    mask: Array | None
    bias: Array | None
    d_output: Array | None

    @property
    def options(self) -> dict[str, Array]:
        given = {"mask": self.mask, "bias": self.bias}
        return {name: array for name, array in given.items() if array is not None}


def make_inputs(call: Call) -> Inputs:
    """Return the inputs of a call, always the same ones."""
    rng = np.random.default_rng(0)
    dtype = numpy_dtype(call.dtype)

    def normal(shape: tuple[int, ...], spread: float = 1.0) -> Array:
        array = rng.standard_normal(shape, dtype=np.float32)
        if spread != 1.0:
            array *= np.float32(spread)
        return array.astype(dtype, copy=False)

    scores = (*call.shape[:-1], call.key_shape[2])
    return Inputs(
        normal(call.shape, call.spread),
        normal(call.key_shape, call.spread),
        normal(call.key_shape),
        rng.random(scores, dtype=np.float32) < 0.5 if call.mask else None,
        normal(scores) if call.bias else None,
        normal(call.shape) if call.backward else None,
    )


def numpy_dtype(name: str) -> Any:
    """Return the NumPy dtype of a name."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def largest_error(call: Call, inputs: Inputs, output: Array) -> float:
    """Return how far some rows of an output are from the formula in float64.

    The rows are of the first and the last head; all of an answer must be finite.
    """
    output = np.asarray(output)
    if output.shape != call.shape:
        raise ValueError(f"the answer has the shape {output.shape}, not {call.shape}")
    rows = np.unique(np.linspace(0, call.length - 1, 7).astype(int))
    errors = [0.0 if np.isfinite(np.sum(output, dtype=np.float64)) else np.inf]
    for item, head in ((0, 0), (call.batch - 1, call.heads - 1)):
        expected = _rows(call, inputs, item, head, rows)
        errors.append(float(np.max(np.abs(output[item, head, rows].astype(float) - expected))))
    return max(errors)


def _rows(call: Call, inputs: Inputs, item: int, head: int, rows: np.ndarray) -> np.ndarray:
    """Compute some rows of one head by the formula, in float64."""
    kv_head = head // (call.heads // call.key_shape[1])
    query = inputs.query[item, head, rows].astype(np.float64)
    key, value = (array[item, kv_head].astype(np.float64) for array in (inputs.key, inputs.value))
    scores = query @ key.T / np.sqrt(call.width)
    if "softcap" in call.options:
        cap = call.options["softcap"]
        scores = cap * np.tanh(scores / cap)
    if inputs.bias is not None:
        scores = scores + inputs.bias[item, head, rows]
    columns, position = np.arange(len(key)), rows[:, np.newaxis]
    allowed = np.ones(scores.shape, dtype=bool)
    if inputs.mask is not None:
        allowed &= inputs.mask[item, head, rows]
    if call.options.get("causal"):
        allowed &= columns <= position
    if "window" in call.options:
        left, right = call.options["window"]
        allowed &= (columns >= position - left) & (columns <= position + right)
    weights = np.exp(np.where(allowed, scores, -np.inf) - scores.max(axis=1, keepdims=True))
    return (weights @ value) / weights.sum(axis=1, keepdims=True)
