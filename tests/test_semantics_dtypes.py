"""Dtypes: what comes out, what is widened, and what widens nothing."""

from __future__ import annotations

import numpy as np
import pytest

from .accuracy import assert_accurate, reference_of
from .backends import Backend
from .dtypes import dtype_name, lse_dtype, numpy_dtype
from .problems import make_inputs, uniform_inputs
from .running import attend


def test_output_has_the_dtype_of_the_query(backend: Backend, dtype):
    output, lse = attend(backend, **make_inputs(dtype=dtype))
    assert dtype_name(output.dtype) == dtype
    assert dtype_name(lse.dtype) == lse_dtype(dtype)


def test_bias_sinks_and_scale_of_every_dtype_widen_nothing(backend: Backend, dtype, tilings):
    """Each has its own dtype, and is read at its own precision."""
    inputs = make_inputs(dtype=dtype)
    rng = np.random.default_rng(0)
    bias, sinks = rng.standard_normal((5, 7)), rng.standard_normal(2)
    for other in backend.few(sorted(backend.dtypes, reverse=True), 1):  # float64
        options = {
            "bias": bias.astype(numpy_dtype(other)),
            "sinks": sinks.astype(numpy_dtype(other)),
            "scale": np.float64(0.3),
        }
        reference = reference_of(**inputs, **options)
        for block_size in tilings:
            output, lse = attend(backend, **inputs, **options, block_size=block_size)
            assert dtype_name(output.dtype) == dtype
            assert dtype_name(lse.dtype) == lse_dtype(dtype)
            assert_accurate(output, lse, reference)


def test_empty_and_masked_results_have_their_dtypes_too(backend: Backend, dtype):
    for options in ({"mask": np.zeros((1, 1), dtype=bool)}, {"key_lengths": 0}):
        output, lse = attend(backend, **make_inputs(dtype=dtype), **options)
        assert dtype_name(output.dtype) == dtype
        assert dtype_name(lse.dtype) == lse_dtype(dtype)
    output, lse = attend(backend, **make_inputs(dtype=dtype, keys=0))
    assert dtype_name(output.dtype) == dtype
    assert dtype_name(lse.dtype) == lse_dtype(dtype)


def halves(backend: Backend):
    return [name for name in backend.dtypes if name in ("float16", "bfloat16")]


def test_half_scores_beyond_the_range_of_half(backend: Backend, tilings):
    """A float16 holds no more than 65504; scores are float32."""
    for dtype in halves(backend):
        inputs = make_inputs(width=64, dtype=dtype)
        inputs["query"][...] = 150
        inputs["key"][...] = 150
        reference = reference_of(**inputs)
        assert reference.lse.min() > 65504
        for block_size in tilings:
            output, lse = attend(backend, **inputs, block_size=block_size)
            assert_accurate(output, lse, reference)


@pytest.mark.parametrize("keys", [3000, 5001])
def test_half_denominators_and_sums_of_many_keys(backend: Backend, keys):
    """A float16 sum of ones stops at 2048, one in bfloat16 at 256."""
    for dtype in halves(backend):
        inputs = make_inputs(
            batch=(), heads=1, queries=2, keys=keys, width=1, value_width=1, dtype=dtype
        )
        inputs["query"][...] = 0
        inputs["value"][...] = 1
        for block_size in (None, (2, 700)):
            output, lse = attend(backend, **inputs, block_size=block_size)
            np.testing.assert_array_equal(output.astype(np.float64), np.ones((1, 2, 1)))
            np.testing.assert_allclose(lse, np.full((1, 2), np.log(keys)), rtol=1e-6)


def test_half_products_accumulate_wide(backend: Backend):
    """Width 4096 of ones times 1/64: a half accumulator stops short of the sum."""
    for dtype in halves(backend):
        inputs = uniform_inputs(1, 2, dtype=dtype)
        inputs["query"] = np.ones((1, 1, 4096), numpy_dtype(dtype))
        inputs["key"] = np.zeros((1, 2, 4096), numpy_dtype(dtype))
        inputs["key"][0, 0] = 1 / 64
        _, lse = attend(backend, **inputs, scale=1.0)
        np.testing.assert_allclose(lse, [[64]], rtol=1e-6)


def test_half_masks_need_no_large_constant(backend: Backend, tilings):
    """-1e9 does not fit into float16; a masked score leaves no trace, however low the others."""
    for dtype in halves(backend):
        inputs = make_inputs(batch=(), heads=1, queries=2, keys=4, width=1, dtype=dtype)
        inputs["query"][...] = 200
        inputs["key"][...] = -300
        inputs["key"][0, 2] = 300
        mask = np.arange(4) != 2
        reference = reference_of(**inputs, mask=mask)
        for block_size in tilings:
            output, lse = attend(backend, **inputs, mask=mask, block_size=block_size)
            assert_accurate(output, lse, reference)


def test_half_output_beyond_its_range_is_infinite_and_nothing_else_is(backend: Backend):
    """Values near 65504: their mean is one of them, their sum is not."""
    for dtype in halves(backend):
        inputs = uniform_inputs(2, 8, dtype=dtype)
        inputs["value"] = np.full((1, 8, 3), 60000, numpy_dtype(dtype))
        output, _ = attend(backend, **inputs)
        np.testing.assert_array_equal(output, inputs["value"][:, :2])


def test_float64_is_float64_throughout(backend: Backend, tilings):
    """Differences of 1e-12 in the scores, the bias and the values arrive."""
    if "float64" not in backend.dtypes:
        pytest.skip(f"needs float64: {backend} has none")
    inputs = uniform_inputs(1, 2, dtype="float64")
    inputs["query"] = np.ones((1, 1, 1))
    inputs["key"] = np.array([[[1e-12], [0.0]]])
    inputs["value"] = np.array([[[1.0], [-1.0]]])
    for options in ({}, {"bias": np.array([2e-12, 0.0])}, {"softcap": 10.0}):
        expected = reference_of(**inputs, **options, scale=1.0)
        assert 0 < abs(expected.output[0, 0, 0]) < 1e-11
        for block_size in tilings:
            output, lse = attend(backend, **inputs, **options, scale=1.0, block_size=block_size)
            assert_accurate(output, lse, expected)


def test_tiny_values_are_not_lost(backend: Backend, dtype):
    """A value in the subnormal range of float16, and the smallest normal of the others."""
    smallest = {"float16": 6e-8, "bfloat16": 1e-30, "float32": 1e-30, "float64": 1e-300}[dtype]
    inputs = uniform_inputs(2, 3, dtype=dtype)
    inputs["value"] = np.full((1, 3, 1), smallest, numpy_dtype(dtype))
    output, _ = attend(backend, **inputs)
    np.testing.assert_allclose(
        output.astype(np.float64), inputs["value"][:, :2].astype(np.float64), rtol=1e-2
    )
