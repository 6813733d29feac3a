"""Numbers near the ends of their range: nothing overflows, vanishes or changes that need not.

Each with few query rows and with many, which may be computed another way.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from . import oracle
from .accuracy import assert_accurate, reference_of
from .backends import Backend
from .differentiate import gradients_of
from .dtypes import numpy_dtype
from .problems import make_inputs
from .running import attend


def row_counts(backend: Backend, _config) -> list[int]:
    return [40] if backend.compiled else [3, 40]


BACKEND_AXES = {"rows": row_counts}


def one_column(rows, scores, values, dtype="float32"):
    """Return a call whose rows all have these scores, at scale 1, and these values."""
    dtype = numpy_dtype(dtype)
    return {
        "query": np.ones((1, rows, 1), dtype),
        "key": np.asarray(scores, dtype=dtype).reshape(1, -1, 1),
        "value": np.asarray(values, dtype=dtype).reshape(1, -1, 1),
        "scale": 1.0,
    }


def check(backend: Backend, **arguments):
    """Compare with the oracle, in one tile of keys and in several."""
    reference = reference_of(**arguments)
    for block_size in [None] if backend.compiled else [None, (16, 2)]:
        output, lse = attend(backend, **arguments, block_size=block_size)
        assert_accurate(output, lse, reference)


@pytest.mark.parametrize("scores", [[0, 0, 0, 0], [30, 30, 29, 28], [-15, -15, -16, -20]], ids=str)
def test_mean_of_the_largest_values(backend: Backend, dtype, rows, scores):
    """A mean of numbers is no larger than they are, though their sum is."""
    most = float(ml_dtypes.finfo(numpy_dtype(dtype)).max) * 0.9
    values = np.full(4, most).astype(numpy_dtype(dtype))
    output, _ = attend(backend, **one_column(rows, scores, values, dtype))
    np.testing.assert_allclose(output.astype(np.float64), float(values[0]), rtol=2e-2)


@pytest.mark.parametrize("scores", [[0, 0, 0, 0], [30, 30, 29, 28], [-15, -15, -16, -20]], ids=str)
def test_mean_of_small_values(backend: Backend, rows, scores):
    """Products with small weights need not go through subnormal numbers."""
    check(backend, **one_column(rows, scores, [1e-36, 2e-36, 3e-36, 4e-36]))


def test_small_queries_and_a_large_scale(backend: Backend, rows):
    """And the other way round: what counts is their product."""
    arguments = one_column(rows, np.array([1, 2, 3, 0]) * 1e10, [0, 1, 2, 3])
    arguments["query"][...] = 1e-23
    check(backend, **{**arguments, "scale": 1e15})
    arguments["query"][...] = 1e18
    arguments["key"][...] = np.array([1, 2, 3, 0])[:, None]
    check(backend, **{**arguments, "scale": 1e-17})


def test_scores_close_to_zero_keep_their_digits(backend: Backend, rows):
    """One key: its score is the lse, to a few units of its own last place."""
    _, lse = attend(backend, **one_column(rows, [1.23456e-6], [1.0]))
    np.testing.assert_allclose(lse, np.full((1, rows), 1.23456e-6), rtol=1e-6, atol=0)


@pytest.mark.parametrize("softcap", [1e38, 1e300])
def test_softcap_that_caps_nothing(backend: Backend, rows, softcap):
    """Far above all scores it is as if it were off, in whatever precision."""
    inputs = make_inputs(batch=(), queries=rows)
    output, lse = attend(backend, **inputs, softcap=softcap)
    assert_accurate(output, lse, reference_of(**inputs))


@pytest.mark.parametrize("softcap", [1e-40, 1e-300])
def test_softcap_that_leaves_nothing(backend: Backend, rows, softcap):
    """Far below all scores it makes them equal."""
    inputs = make_inputs(batch=(), queries=rows)
    output, lse = attend(backend, **inputs, softcap=softcap)
    assert_accurate(output, lse, reference_of(**inputs, scale=0.0))


@pytest.mark.parametrize("sink", [-1e4, -200.0, -100.0, 100.0, 1e4])
def test_sink_of_an_empty_row_is_its_lse(backend: Backend, rows, sink):
    inputs = make_inputs(batch=(), heads=1, queries=rows)
    mask = np.ones((rows, 1), dtype=bool)
    mask[1] = False
    sinks = np.full(1, sink, np.float32)
    output, lse = attend(backend, **inputs, mask=mask, sinks=sinks)
    assert lse[0, 1] == np.float32(sink)
    assert (output[0, 1] == 0).all()
    assert_accurate(output, lse, reference_of(**inputs, mask=mask, sinks=sinks))


@pytest.mark.parametrize("sign", [1, -1])
def test_infinite_scores_are_as_in_few_rows(backend: Backend, rows, sign):
    """A row that attends a score of -inf alone is not empty; one of +inf is NaN."""
    inputs = make_inputs(batch=(), heads=1, queries=rows, keys=2, width=1)
    inputs["query"][...] = 1
    inputs["key"][0, 0] = sign * np.inf
    mask = np.ones((rows, 2), dtype=bool)
    mask[1] = [True, False]
    mask[2] = [False, True]
    output, lse = attend(backend, **inputs, mask=mask)
    assert_accurate(output, lse, reference_of(**inputs, mask=mask))
    assert np.isnan(output[0, 1]).all()


@pytest.mark.parametrize("bias", [-65504.0, -1e9, float(np.finfo(np.float32).min), 1e9])
def test_gradients_beside_a_large_bias(backend: Backend, rows, bias):
    """It is no mask: a row full of it has the gradients of equal scores."""
    arguments = one_column(rows, [0, 0, 0], [1, 0, 2])
    arguments["bias"] = np.full((rows, 3), bias, np.float32)
    cotangent = np.ones((1, rows, 1), np.float32)
    found = gradients_of(backend, arguments, ["query", "key", "value", "bias"], cotangent=cotangent)
    exact = oracle.vjp(**arguments, cotangent=cotangent)
    np.testing.assert_allclose(found["value"], np.full((1, 3, 1), rows / 3), rtol=1e-5)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, exact[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6])
def test_gradients_beside_large_scores(backend: Backend, rows, size):
    """Equal ones have equal weights, however large they are."""
    arguments = one_column(rows, [size, size, size], [1, 0, 2])
    found = gradients_of(backend, arguments, ["value", "query"])
    np.testing.assert_allclose(found["value"], np.full((1, 3, 1), rows / 3), rtol=1e-5)
    np.testing.assert_allclose(found["query"], np.zeros((1, rows, 1)), atol=1e-5 * size)


def test_infinite_cotangents_of_empty_rows_are_not_felt(backend: Backend, rows):
    """As (lse ** 2).sum() has them where the lse is -inf: the gradient through the row is 0."""
    arguments = make_inputs(batch=(), queries=rows)
    arguments["mask"] = np.ones((rows, 1), dtype=bool)
    arguments["mask"][1] = False
    cotangent = np.ones((2, rows, 3), np.float32)
    lse_cotangent = np.zeros((2, rows), np.float32)
    lse_cotangent[:, 1] = -np.inf
    found = gradients_of(
        backend,
        arguments,
        ["query", "key", "value"],
        cotangent=cotangent,
        lse_cotangent=lse_cotangent,
        explicit=True,
    )
    exact = oracle.vjp(**arguments, cotangent=cotangent)
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, exact[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_attended_garbage_is_felt_in_the_gradients_too(backend: Backend, rows, poison):
    """Those of the queries that attend it are not finite; the value's own does not depend on it."""
    arguments = make_inputs(batch=(), heads=1, queries=rows, keys=4)
    arguments["mask"] = np.ones((rows, 4), dtype=bool)
    arguments["mask"][0, 2] = False
    plain = gradients_of(backend, arguments, ["value"])["value"]
    arguments["value"][0, 2, 1] = poison
    found = gradients_of(backend, arguments, ["query", "key", "value"])
    np.testing.assert_allclose(found["value"], plain, rtol=1e-5)
    assert np.isfinite(found["query"][0, 0]).all()
    assert not np.isfinite(found["query"][0, 1:]).all(-1).any()
