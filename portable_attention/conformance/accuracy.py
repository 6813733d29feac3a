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
- a *sum* over n keys costs 2 (n + 8) u relative to the sum of magnitudes. The factor 2 is for tiles,
  whose partial sums are rescaled.
- *half precision*: the weights may be rounded to the dtype of the inputs before they meet the
  values, as fused kernels do, and so may what the backward pass multiplies; sums and scores may not.
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
    tanh: Float  # (B..., Hq, Lq, Lk): of what the softcap is given, absolute
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
        kept = steps.kept / (1 - steps.rate if steps.rate < 1 else 1.0)
        output = (used * relative) @ values
        output = output + common[..., None] * (used @ values)
        output = output + row[..., None] * _finite(steps.output)
        output = output + _flushed(dtype) * (kept @ values)
        output = output + dtype_rounding.unit * _finite(steps.output) + dtype_rounding.smallest
        output = output / np.maximum(1 - row[..., None], 0.5)
        return cls(u, relative, row, raw, output, lse)


def _gradient_bounds(
    steps: Steps, gradient: Gradient, inputs: Mapping[str, Any], dtype: str
) -> dict[str, Float]:
    error = _Errors.of(steps, dtype)
    u, layout = error.unit, inputs.get("layout") or "bhld"
    half = _ROUNDING[dtype].unit if dtype in ("float16", "bfloat16") else 0.0
    d_output, d_lse = np.abs(gradient.d_output), np.abs(gradient.d_lse)
    value_width = steps.value.shape[-1]
    rate = 1 - steps.rate if steps.rate < 1 else 1.0
    weights = np.nan_to_num(steps.weights)
    columns = steps.allowed.sum(axis=-1)

    # The weights, made again from the lse, and from scores that need not be rounded as before.
    remade = error.weight + (error.row + 4 * u * _finite(steps.lse) + FUNCTION * u)[..., None]
    by_weight = _finite(gradient.by_weight)
    weight_error = (value_width + 6) * u * (d_output @ _finite(steps.value).swapaxes(-1, -2)) / rate
    weight_error = np.where(steps.kept, weight_error + half * by_weight, 0.0)
    # The row's mean, from the weights or from the output, which may have been rounded by then.
    mean = _finite(gradient.mean)
    mean_error = (d_output * error.output).sum(axis=-1)
    mean_error = mean_error + (weights * (weight_error + remade * by_weight)).sum(axis=-1)
    sizes = d_output * _finite(steps.output)
    mean_error = mean_error + 2 * (value_width + columns + 8) * u * (
        sizes.sum(axis=-1) + (weights * by_weight).sum(axis=-1)
    )
    difference = _finite(np.where(weights > 0, np.divide(gradient.by_score, weights), 0.0))
    score_error = weights * (
        remade * difference
        + weight_error
        + mean_error[..., None]
        + 4 * u * (by_weight + (mean + d_lse)[..., None])
    )
    score_error = score_error + half * _finite(gradient.by_score)

    slope_error: Any = 0.0
    if steps.softcap is not None:
        bounded = np.abs(np.tanh(steps.product / steps.softcap))
        slope_error = 2 * bounded * steps.slope * error.tanh / steps.softcap + 2 * FUNCTION * u
    size = _finite(gradient.by_product)
    product_error = score_error * steps.slope + _finite(gradient.by_score) * slope_error
    product_error = np.where(steps.allowed, product_error + half * size, 0.0)

    used, size_of_scale = np.nan_to_num(steps.used_weights), abs(steps.scale)
    value_error = used * (remade + half)
    flushed = np.where(steps.allowed, _flushed(dtype) / rate, 0.0)

    def summed(error_of_factor: Float, factor: Float, other: Float) -> tuple[Float, Float]:
        """Return the error of ``factor @ other``, and the size of what is summed."""
        terms = factor @ other
        count = factor.shape[-1]
        return (error_of_factor + flushed_of(factor)) @ other + 2 * (count + 8) * u * terms, terms

    def flushed_of(factor: Float) -> Float:
        return flushed if factor.shape == flushed.shape else flushed.swapaxes(-1, -2)

    per_head = {
        "query": summed(product_error, size, _finite(steps.key)),
        "key": summed(
            product_error.swapaxes(-1, -2), size.swapaxes(-1, -2), _finite(steps.query)
        ),
        "value": summed(value_error.swapaxes(-1, -2), used.swapaxes(-1, -2), d_output),
    }
    bounds = {}
    for name, (spread, terms) in per_head.items():
        factor = 1.0 if name == "value" else size_of_scale
        shape = np.shape(inputs[name])
        # Heads that share a key, and a batch that shares an array, are summed afterwards.
        shared = max(1, spread.size // max(1, int(np.prod(shape))))
        bound = like(spread * factor, shape, layout)
        bound = bound + 2 * shared * u * like(terms * factor, shape, layout)
        exact = np.abs(gradient.by_argument[name])
        parts = like(terms * factor, shape, layout) if shared > 1 else exact
        bounds[name] = bound + _last_rounding(dtype, 2 * parts if shared > 1 else exact)
    if "bias" in gradient.by_argument:
        shape = np.shape(inputs["bias"])
        shared = max(1, score_error.size // max(1, int(np.prod(shape))))
        sizes = summed_to(_finite(gradient.by_score), shape)
        bound = summed_to(np.where(steps.allowed, score_error, 0.0), shape) + 2 * shared * u * sizes
        bounds["bias"] = bound + _last_rounding(_name(inputs["bias"]), sizes)
    if "sinks" in gradient.by_argument:
        sink_weight = steps.sink_weight
        relative = error.row + 4 * u * (np.abs(steps.top) + _finite(steps.lse)) + FUNCTION * u
        bound = sink_weight * (relative * (mean + d_lse) + mean_error + 4 * u * (mean + d_lse))
        sizes = sink_weight * (mean + d_lse)
        heads = (sizes.shape[-2], 1, 1)
        shared = sizes.size // max(1, sizes.shape[-2])
        total = (bound + 2 * (shared + 8) * u * sizes)[..., None]
        bounds["sinks"] = summed_to(total, heads)[:, 0, 0] + _last_rounding(
            _name(inputs["sinks"]), summed_to(sizes[..., None], heads)[:, 0, 0]
        )
    return bounds


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
