"""How far from the oracle an honest implementation may lie, element by element.

An error is reported in units of a bound, and a result is right where it is at most 1. The bound is
not tuned. It is what the rounding of every step may cost at most, to first order in the unit
roundoff u of the arithmetic (2**-24 for float32, which float16 and bfloat16 calls compute in,
2**-53 for float64), evaluated with the numbers of the oracle's own run:

- a *score* is a sum of D products, times the scale: (D + 4) u sum|q k| |scale|. The softcap passes
  it on by its slope and adds its own rounding. Bias, the shift by the maximum and a change to base
  2 are a few roundings of numbers of the size of score, bias and maximum.
- a *weight* is an exponential: it errs relatively by the absolute error of its score, and by the
  error of the function. Numerator and denominator may have been made in two passes that round
  differently, so nothing is taken to cancel between them.
- a *sum* over n keys costs 2 (n + 8) u relative to the sum of magnitudes. The factor 2 is for
  tiles, whose partial sums are rescaled.
- *half precision*: the weights may be rounded to the dtype of the inputs before they meet the
  values, as fused kernels do, and so may what the backward pass multiplies; sums and scores may
  not.
- the *last rounding* is that of the result to its dtype.

exp, log and tanh are taken to be right to 4 units in the last place. For float64 the oracle rounds
as the implementation does, so the bound is doubled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from portable_attention.conformance.oracle import (
    Float,
    Gradient,
    Numbers,
    Steps,
    like,
    summed_to,
)

FUNCTION: Final = 8.0  # exp, log and tanh, in units of u: 4 units in the last place

Found = NDArray[Any]


@dataclass(frozen=True)
class Rounding:
    """What one rounding costs in a dtype."""

    unit: float  # relative
    smallest: float  # absolute, where numbers become too small


_ROUNDING: Final[Mapping[str, Rounding]] = {
    # Numbers below the normal range may be flushed to 0. Not in float16, where they are needed.
    "float16": Rounding(2.0**-11, 2.0**-25),
    "bfloat16": Rounding(2.0**-8, 2.0**-126),
    "float32": Rounding(2.0**-24, 2.0**-126),
    "float64": Rounding(2.0**-53, 2.0**-1022),
}


def compute_dtype(dtype: str) -> str:
    """Return the dtype that a call computes in."""
    return "float64" if dtype == "float64" else "float32"


def forward_bounds(steps: Steps, dtype: str) -> tuple[Float, Float]:
    """Return the bounds of output and lse, heads first, for inputs of a dtype.

    Parameters
    ----------
    steps
        The oracle's run.
    dtype
        That of query, key and value.

    Returns
    -------
    output : array (B..., Hq, Lq, Dv)
    lse : array (B..., Hq, Lq)

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention.conformance import accuracy, oracle
    >>> ones = np.ones((2, 4))
    >>> output, lse = accuracy.forward_bounds(oracle.steps_of(ones, ones, ones), "float32")
    >>> bool((output < 1e-5).all() and (lse < 1e-5).all())
    True
    """
    error = _Errors.of(steps, dtype)
    return error.output, error.lse


def gradient_bounds(
    steps: Steps, gradient: Gradient, inputs: Mapping[str, Numbers], dtype: str
) -> dict[str, Float]:
    """Return the bounds of the gradients, by argument and in its shape.

    Parameters
    ----------
    steps, gradient
        The oracle's run, forwards and backwards.
    inputs
        The arguments of the call; the gradients of bias and sinks are rounded to their dtype.
    dtype
        That of query, key and value.
    """
    with np.errstate(all="ignore"):
        return _gradient_bounds(steps, gradient, inputs, dtype)


def mean_of_values(steps: Steps, dtype: str) -> tuple[Float, Float]:
    """Return the mean of all values, that some give to empty rows, and its bound."""
    u, keys = _ROUNDING[compute_dtype(dtype)].unit, steps.value.shape[-2]
    with np.errstate(all="ignore"):
        mean = np.broadcast_to(steps.value.mean(axis=-2, keepdims=True), steps.output.shape)
        size = _finite(steps.value).mean(axis=-2, keepdims=True)
    half = 2 * _ROUNDING[dtype].unit if dtype in ("float16", "bfloat16") else 0.0
    return mean, 2 * (keys + 8) * u * size + half * size + _last_rounding(dtype, mean)


def in_units(found: Found, expected: Found, bound: Float) -> Float:
    """Return the error of each element in units of its bound: right where at most 1.

    NaN and infinities have to be where they are expected; elsewhere the error is infinite.

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention.conformance.accuracy import in_units
    >>> in_units(np.array([1.0, np.nan]), np.array([1.5, np.nan]), np.array([0.25, 0.25]))
    array([2., 0.])
    """
    found, expected = (np.asarray(array).astype(np.float64) for array in (found, expected))
    with np.errstate(all="ignore"):
        units = np.abs(found - expected) / np.where(np.isnan(bound), np.inf, bound)
        ordinary = np.isfinite(found) & np.isfinite(expected)
        same = (found == expected) | (np.isnan(found) & np.isnan(expected))
    return np.where(same, 0.0, np.where(ordinary, units, np.inf))


@dataclass(frozen=True)
class _Errors:
    """What the steps of the forward pass may err by."""

    unit: float
    weight: Float  # (B..., Hq, Lq, Lk): of each weight, relative
    row: Float  # (B..., Hq, Lq): of the denominator, relative
    raw: Float  # (B..., Hq, Lq, Lk): of what the softcap is given, absolute
    output: Float
    lse: Float

    @classmethod
    @np.errstate(all="ignore")
    def of(cls, steps: Steps, dtype: str) -> _Errors:
        """Return the errors of a run of the oracle; see the module for where they come from."""
        u = _ROUNDING[compute_dtype(dtype)].unit * (2 if dtype == "float64" else 1)
        width = steps.query.shape[-1]
        sizes = _finite(steps.query) @ _finite(steps.key).swapaxes(-1, -2)
        raw = (width + 4) * u * abs(steps.scale) * sizes
        score = raw
        if steps.softcap is not None:
            capped = np.abs(steps.softcap * np.tanh(steps.product / steps.softcap))
            score = steps.slope * (raw + u * _finite(steps.product)) + 2 * FUNCTION * u * capped
        score = score + 4 * u * (_finite(steps.score) + _finite(steps.bias))
        score = np.where(steps.allowed, score, 0.0)
        top = np.abs(steps.top)
        relative = np.expm1(score + 4 * u * top[..., None] + 2 * FUNCTION * u)

        keys = steps.allowed.sum(axis=-1)
        weights = np.nan_to_num(steps.weights, posinf=0.0, neginf=0.0)
        size_of_lse = _finite(steps.lse)
        sink = np.where(np.isfinite(steps.sink), np.abs(steps.sink), 0.0)
        row = (weights * relative).sum(axis=-1)
        row = row + steps.sink_weight * np.expm1(4 * u * (sink + top) + FUNCTION * u)
        row = np.nan_to_num(row + 2 * (keys + 8) * u, posinf=0.0)

        log = np.abs(np.log(np.where(steps.denominator > 0, steps.denominator, 1.0)))
        lse = row + u * (FUNCTION * log + 4 * (top + size_of_lse) + 4 * sink)
        lse = lse + _ROUNDING[compute_dtype(dtype)].smallest

        half = dtype in ("float16", "bfloat16")
        dtype_rounding = _ROUNDING[dtype]
        weight_rounding = dtype_rounding.unit if half else 0.0
        common = 2 * (keys + 8) * u + 4 * u * size_of_lse + 2 * weight_rounding
        used = np.nan_to_num(steps.used_weights, posinf=0.0, neginf=0.0)
        values = _finite(steps.value)
        kept = steps.kept / _share(steps)
        output = (used * relative) @ values
        output = output + common[..., None] * (used @ values)
        output = output + row[..., None] * _finite(steps.output)
        output = output + _flushed(dtype) * (kept @ values)
        output = output + dtype_rounding.unit * _finite(steps.output) + dtype_rounding.smallest
        output = output / np.maximum(1 - row[..., None], 0.5)
        return cls(u, relative, row, raw, output, lse)


@dataclass(frozen=True)
class _BackwardErrors:
    """What the steps of the backward pass may err by."""

    by_score: Float  # (B..., Hq, Lq, Lk)
    by_product: Float  # (B..., Hq, Lq, Lk)
    weights: Float  # (B..., Hq, Lq, Lk): of the weights as they are made again
    by_sink: Float  # (B..., Hq, Lq)

    @classmethod
    def of(cls, steps: Steps, gradient: Gradient, error: _Errors, half: float) -> _BackwardErrors:
        """Return the errors; `half` is the rounding of what is multiplied in half precision."""
        u = error.unit
        d_output, d_lse = np.abs(gradient.d_output), np.abs(gradient.d_lse)
        width, keys = steps.value.shape[-1], steps.allowed.sum(axis=-1)
        weights = np.nan_to_num(steps.weights)

        # The weights, made again from the lse, and from scores that need not be rounded as before.
        of_lse = error.row + 4 * u * _finite(steps.lse) + FUNCTION * u
        remade = error.weight + of_lse[..., None]
        by_weight = _finite(gradient.by_weight)
        sizes = d_output @ _finite(steps.value).swapaxes(-1, -2) / _share(steps)
        by_weight_error = np.where(steps.kept, (width + 6) * u * sizes + half * by_weight, 0.0)
        # The row's mean, from the weights or from the output, which may have been rounded by then.
        mean = _finite(gradient.mean)
        mean_error = (d_output * error.output).sum(axis=-1)
        mean_error = mean_error + (weights * (by_weight_error + remade * by_weight)).sum(axis=-1)
        summed = (d_output * _finite(steps.output)).sum(axis=-1)
        summed = summed + (weights * by_weight).sum(axis=-1)
        mean_error = mean_error + 2 * (width + keys + 8) * u * summed

        inner = np.where(weights > 0, np.divide(gradient.by_score, weights), 0.0)
        by_score = weights * (
            remade * _finite(inner)
            + by_weight_error
            + mean_error[..., None]
            + 4 * u * (by_weight + (mean + d_lse)[..., None])
        )
        by_score = np.where(steps.allowed, by_score + half * _finite(gradient.by_score), 0.0)

        by_product = by_score * steps.slope + half * _finite(gradient.by_product)
        if steps.softcap is not None:
            bounded = np.abs(np.tanh(steps.product / steps.softcap))
            slope = 2 * bounded * steps.slope * error.raw / steps.softcap + 2 * FUNCTION * u
            by_product = by_product + _finite(gradient.by_score) * slope

        of_sink = error.row + 4 * u * (np.abs(steps.top) + _finite(steps.lse)) + FUNCTION * u
        by_sink = steps.sink_weight * ((of_sink + 4 * u) * (mean + d_lse) + mean_error)
        return cls(
            by_score,
            np.where(steps.allowed, by_product, 0.0),
            np.nan_to_num(steps.used_weights) * (remade + half),
            by_sink,
        )


def _gradient_bounds(
    steps: Steps, gradient: Gradient, inputs: Mapping[str, Any], dtype: str
) -> dict[str, Float]:
    half = _ROUNDING[dtype].unit if dtype in ("float16", "bfloat16") else 0.0
    forward = _Errors.of(steps, dtype)
    error = _BackwardErrors.of(steps, gradient, forward, half)
    u, layout = forward.unit, inputs.get("layout") or "bhld"
    by_product = _finite(gradient.by_product)
    by_score = _finite(gradient.by_score)
    weights, d_output = np.nan_to_num(steps.used_weights), np.abs(gradient.d_output)
    flushed = np.where(steps.allowed, _flushed(dtype) / _share(steps), 0.0)

    bounds = {}
    for name, factor, factor_error, other in (
        ("query", by_product, error.by_product, steps.key),
        ("key", _turned(by_product), _turned(error.by_product), steps.query),
        ("value", _turned(weights), _turned(error.weights), d_output),
    ):
        scale = 1.0 if name == "value" else abs(steps.scale)
        lost = flushed if name == "query" else _turned(flushed)
        terms = scale * (factor @ _finite(other))
        spread = scale * ((factor_error + lost) @ _finite(other))
        spread = spread + 2 * (factor.shape[-1] + 8) * u * terms
        # Heads that share a key, and a batch that shares an array, are summed afterwards, maybe
        # after each part has been rounded to the dtype.
        shape = np.shape(inputs[name])
        parts = _shared(spread, shape)
        sizes = like(terms, shape, layout)
        bound = like(spread, shape, layout) + 2 * parts * u * sizes
        last = 2 * sizes if parts > 1 else gradient.by_argument[name]
        bounds[name] = bound + _last_rounding(dtype, last)
    if "bias" in gradient.by_argument:
        shape = np.shape(inputs["bias"])
        sizes = summed_to(by_score, shape)
        bound = summed_to(error.by_score, shape) + 2 * _shared(by_score, shape) * u * sizes
        bounds["bias"] = bound + _last_rounding(_name(inputs["bias"]), sizes)
    if "sinks" in gradient.by_argument:
        sizes = steps.sink_weight * (_finite(gradient.mean) + np.abs(gradient.d_lse))
        rows = sizes.size // max(1, sizes.shape[-2])
        bound = _by_head(error.by_sink + 2 * (rows + 8) * u * sizes)
        bounds["sinks"] = bound + _last_rounding(_name(inputs["sinks"]), _by_head(sizes))
    return bounds


def _by_head(rows: Float) -> Float:
    """Sum (B..., Hq, Lq) over everything but the heads."""
    return summed_to(rows[..., None], (rows.shape[-2], 1, 1))[:, 0, 0]


def _shared(array: Float, shape: tuple[int, ...]) -> int:
    """Return how many numbers are summed into one, where an argument was broadcast."""
    return max(1, array.size // max(1, int(np.prod(shape))))


def _share(steps: Steps) -> float:
    """Return what dropout divides by."""
    return 1 - steps.rate if steps.rate < 1 else 1.0


def _turned(array: Float) -> Float:
    return array.swapaxes(-1, -2)


def _last_rounding(dtype: str, sizes: Float) -> Float:
    rounding = _ROUNDING[dtype]
    return rounding.unit * _finite(sizes) + rounding.smallest


def _flushed(dtype: str) -> float:
    """Return what a weight may lose where it is too small for the dtype that weights may have."""
    return _ROUNDING[dtype].smallest


def _name(array: Any) -> str:
    return str(array.dtype.name)


def _finite(array: Float) -> Float:
    """Return magnitudes, 0 where there is none."""
    return np.where(np.isfinite(array), np.abs(array), 0.0)
