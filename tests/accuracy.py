"""How far a result may lie from the oracle.

No tolerance is chosen by hand. An honest dense implementation in the dtype of the call (the formula
as it stands, in float32 or wider, rounded at the end) is run on the same inputs, and a result may
err twice as much as that does, and two units in the last place at the size of what is summed. NaN
and infinities must be where the oracle has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import oracle
from .dtypes import dtype_name, lse_dtype, numpy_dtype, ulp


@dataclass(frozen=True)
class Reference:
    """What a call must give, and how far from it an honest implementation lies."""

    output: np.ndarray
    lse: np.ndarray
    output_allowance: float
    lse_allowance: float


class Gradient(NamedTuple):
    """What a gradient must be, and how far from it an honest implementation lies."""

    expected: np.ndarray
    allowance: float


def reference_of(query, key, value, **options: Any) -> Reference:
    """Return the oracle's result for a call, with the errors that it may have."""
    dtype = dtype_name(query.dtype)
    exact = oracle.attention(query, key, value, precision=_wide(dtype), **options)
    output_error = lse_error = 0.0
    for arguments in _honest_calls(query, key, value, options):
        honest = oracle.attention(**arguments)
        with np.errstate(over="ignore"):
            rounded = honest.output.astype(numpy_dtype(dtype))
        output_error = max(output_error, largest_difference(rounded, exact.output))
        lse_error = max(lse_error, largest_difference(honest.lse, exact.lse))
    # What is summed: the terms of the output, not what is left where they cancel.
    terms = oracle.attention(query, key, np.abs(_finite(value)), **options).output
    return Reference(
        exact.output,
        exact.lse,
        2 * output_error + 2 * ulp(dtype, largest(terms)),
        # An ulp of the denominator is an ulp of 1 in its logarithm.
        2 * lse_error + 2 * ulp(lse_dtype(dtype), max(1.0, largest(exact.lse))),
    )


def gradients_of_oracle(arguments: dict[str, Any], **cotangents: Any) -> dict[str, Gradient]:
    """Return the oracle's gradients of a call, by argument, with the errors that they may have.

    Memory that is linear in the lengths has no room for the weights, so an honest implementation
    makes them again, from scores that need not be rounded as they were before.
    """
    dtype = dtype_name(arguments["query"].dtype)
    exact = oracle.vjp(**arguments, **cotangents, precision=_wide(dtype))
    inputs = {name: arguments[name] for name in ("query", "key", "value")}
    options = {name: value for name, value in arguments.items() if name not in inputs}
    honest_calls = list(_honest_calls(**inputs, options=options, scale_first=False))
    forward = oracle.steps_of(**honest_calls[0])
    errors = dict.fromkeys(exact, 0.0)
    for honest in honest_calls:
        for name, gradient in oracle.vjp(**honest, **cotangents, forward=forward).items():
            rounded = gradient.astype(np.asarray(arguments[name]).dtype)
            errors[name] = max(errors[name], largest_difference(rounded, exact[name]))
    sizes = oracle.vjp(**arguments, **cotangents, sizes=True)
    return {
        name: Gradient(
            gradient,
            2 * errors[name]
            + 2 * ulp(dtype_name(arguments[name].dtype), largest(gradient))
            + 2 * ulp(lse_dtype(dtype), largest(sizes[name])),
        )
        for name, gradient in exact.items()
    }


def _wide(dtype: str) -> Any:
    """Return what the oracle computes in: more than float64 for a float64 call, where there is."""
    return np.longdouble if dtype == "float64" else np.float64


def _honest_calls(query, key, value, options, scale_first=True):
    """Yield calls of the oracle in working precision: the plain one, and some as honest as that.

    One of them alone may lose little, by luck, on a call of a few numbers. So the scale is applied
    to the scores or first to the query, and the products are made of numbers one unit in the last
    place off, which is what the rounding of a sum amounts to.
    """
    precision = np.float64 if dtype_name(query.dtype) == "float64" else np.float32
    query, key, value = (np.asarray(array).astype(precision) for array in (query, key, value))
    scale = options.get("scale")
    if scale is None:
        scale = 1 / np.sqrt(query.shape[-1]) if query.shape[-1] else 0.0
    rng = np.random.default_rng(0)

    def shaken(array):
        """Return the array with each number moved to one of its neighbours."""
        ordinary = np.isfinite(array) & (array != 0)
        way = np.where(rng.random(array.shape) < 0.5, -np.inf, np.inf).astype(precision)
        return np.nextafter(array, way, where=ordinary, out=array.copy())

    plain = {**options, "query": query, "key": key, "value": value, "precision": precision}
    yield plain
    if scale_first:
        with np.errstate(all="ignore"):
            yield {**plain, "query": query * precision(scale), "scale": 1.0}
    for _ in range(4):
        yield {**plain, "query": shaken(query), "key": shaken(key)}


def assert_accurate(output, lse, reference: Reference) -> None:
    """Check NumPy results against the reference; an lse of None was not asked for."""
    assert_near(output, reference.output, reference.output_allowance, "output")
    if lse is not None:
        assert_near(lse, reference.lse, reference.lse_allowance, "lse")


def assert_near(actual, expected, allowance: float, name: str) -> None:
    """Check one array: shape, places of NaN and infinities, and the largest error."""
    __tracebackhide__ = True
    assert actual.shape == expected.shape, f"{name}: shape {actual.shape}, not {expected.shape}"
    actual, expected = (np.asarray(array).astype(np.longdouble) for array in (actual, expected))
    for kind in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(
            kind(actual), kind(expected), err_msg=f"{name}: {kind.__name__}", strict=True
        )
    error = largest_difference(actual, expected)
    assert error <= allowance, f"{name}: error {error:.3g}, where {allowance:.3g} is allowed"


def largest(array) -> float:
    """Return the largest finite magnitude, 0 where there is none."""
    return float(np.max(np.abs(_finite(np.asarray(array))), initial=0.0))


def largest_difference(actual, expected) -> float:
    """Return the largest difference between finite numbers."""
    with np.errstate(invalid="ignore"):
        return largest(np.asarray(actual).astype(np.longdouble) - expected)


def _finite(array):
    return np.where(np.isfinite(array), array, np.zeros((), dtype=array.dtype))
