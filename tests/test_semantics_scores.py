"""Scores and weights: scale, softcap, bias, their order, sinks and the lse."""

from __future__ import annotations

import numpy as np
import pytest

from .accuracy import assert_accurate, reference_of
from .backends import Backend
from .dtypes import numpy_dtype
from .problems import make_inputs, uniform_inputs
from .running import attend


def check(backend: Backend, tilings, inputs, **options):
    reference = reference_of(**inputs, **options)
    for block_size in tilings:
        output, lse = attend(backend, **inputs, **options, block_size=block_size)
        assert_accurate(output, lse, reference)
    return output, lse


def one_score(score, bias=None):
    """Return a call whose first key scores that at scale 1, and whose second one 0."""
    return {
        "query": np.array([[[1.0]]], dtype=np.float32),
        "key": np.array([[[score], [0.0]]], dtype=np.float32),
        "value": np.array([[[1.0], [0.0]]], dtype=np.float32),
    } | ({} if bias is None else {"bias": np.array([bias, 0.0], dtype=np.float32)})


def logistic(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0, 1e-3, 1, np.float64(0.7), np.float32(0.7)])
def test_scale_is_any_number(backend: Backend, dtype, tilings, scale):
    """0 and negative ones too; a NumPy scalar widens nothing."""
    check(backend, tilings, make_inputs(dtype=dtype), scale=scale)


def test_scale_may_be_a_0d_array_that_can_be_read(backend: Backend):
    inputs = make_inputs()
    reference = reference_of(**inputs, scale=0.25)
    output, lse = attend(backend, **inputs, scale=np.array(0.25, dtype=np.float32))
    assert_accurate(output, lse, reference)


@pytest.mark.parametrize("width", [1, 3, 16, 100])
def test_default_scale_is_one_over_the_root_of_the_width(backend: Backend, width):
    inputs = {
        "query": np.ones((1, 1, width), dtype=np.float32),
        "key": np.stack([np.ones(width), np.zeros(width)])[None].astype(np.float32),
        "value": np.array([[[1.0], [0.0]]], dtype=np.float32),
    }
    output, _ = attend(backend, **inputs)
    np.testing.assert_allclose(output[0, 0, 0], logistic(np.sqrt(width)), rtol=1e-6)


@pytest.mark.parametrize("softcap", [0.5, 5, 100.0, np.float64(2)])
def test_softcap_bounds_the_scores(backend: Backend, tilings, softcap):
    check(backend, tilings, make_inputs(), softcap=softcap, scale=3.0)
    output, _ = attend(backend, **one_score(1000.0), scale=1.0, softcap=softcap)
    np.testing.assert_allclose(output[0, 0, 0], logistic(float(softcap)), rtol=1e-6)


def test_order_scale_softcap_bias(backend: Backend):
    """s = scale * (q . k), then c * tanh(s / c), then + bias, which is not capped."""
    arguments = one_score(3.0, bias=-1.5)
    output, lse = attend(backend, **arguments, scale=2.0, softcap=4.0)
    score = 4 * np.tanh(2 * 3 / 4) - 1.5
    np.testing.assert_allclose(output[0, 0, 0], logistic(score), rtol=1e-6)
    np.testing.assert_allclose(lse[0, 0], np.log1p(np.exp(score)), rtol=1e-6)


def test_bias_is_added_after_the_scale(backend: Backend, tilings):
    """It is not scaled; with a scale of 0 it alone decides."""
    inputs = make_inputs()
    bias = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    output, lse = check(backend, tilings, inputs, bias=bias, scale=0.0)
    weights = np.exp(bias) / np.exp(bias).sum(-1, keepdims=True)
    np.testing.assert_allclose(output, weights @ inputs["value"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[0, 0], np.log(np.exp(bias).sum(-1)), rtol=1e-5)


@pytest.mark.parametrize("size", [1e3, 3e4, 1e18])
def test_large_scores_neither_overflow_nor_vanish(backend: Backend, tilings, size):
    """The largest allowed score takes all the weight, on either side, in whichever tile."""
    rng = np.random.default_rng(0)
    inputs = make_inputs(batch=(), heads=1, queries=4, keys=9, width=1)
    inputs["query"][...] = np.array([1, -1, 1, -1])[:, None]
    keys = rng.permutation(9).astype(np.float32)
    inputs["key"][0, :, 0] = size * (keys - 4)
    mask = np.array([[True], [True], [False], [False]]) | (keys != 8) & (keys != 0)
    top = [np.argmax(keys), np.argmin(keys), np.argmax(keys == 7), np.argmax(keys == 1)]
    for block_size in tilings:
        output, lse = attend(backend, **inputs, scale=1.0, mask=mask, block_size=block_size)
        np.testing.assert_array_equal(output[0], inputs["value"][0, top])
        np.testing.assert_allclose(lse[0], size * np.array([4, 4, 3, 3]), rtol=1e-6)


def test_masked_scores_take_no_part_in_the_maximum(backend: Backend, tilings):
    """One far above or below all others is masked: the weights are those of the others."""
    for score in (200.0, -200.0, 1e30):
        inputs = make_inputs(batch=(), heads=1, queries=2, keys=5, width=1)
        inputs["query"][...] = 1
        inputs["key"][0, 3] = score
        check(backend, tilings, inputs, scale=1.0, mask=np.arange(5) != 3)


def test_lse_is_the_natural_log_of_the_denominator(backend: Backend, dtype):
    """float32 (float64 for float64), also where the caller's dtype is half."""
    inputs = uniform_inputs(2, 7, dtype=dtype)
    _, lse = attend(backend, **inputs)
    np.testing.assert_allclose(lse, np.full((1, 2), np.log(7)), rtol=1e-6)
    _, lse = attend(backend, **inputs, sinks=np.zeros(1, dtype=numpy_dtype(dtype)))
    np.testing.assert_allclose(lse, np.full((1, 2), np.log(8)), rtol=1e-6)


def test_output_alone_is_the_same_output(backend: Backend):
    inputs = make_inputs()
    alone = attend(backend, **inputs, return_lse=False)
    assert alone.lse is None
    both = attend(backend, **inputs)
    np.testing.assert_allclose(alone.output, both.output, rtol=1e-5, atol=1e-6)


def test_sinks_enter_once_unscaled_and_per_query_head(backend: Backend, dtype, tilings):
    inputs = make_inputs(heads=4, key_heads=2, dtype=dtype)
    sinks = np.array([0.0, 2.0, -3.0, 30.0]).astype(numpy_dtype(dtype))
    check(backend, tilings, inputs, sinks=sinks)
    check(backend, tilings, inputs, sinks=sinks, scale=0.0, softcap=0.1)


def test_sink_of_minus_infinity_is_none(backend: Backend, tilings):
    inputs = make_inputs()
    plain = reference_of(**inputs, key_lengths=np.array([0, 7]))
    sinks = np.full(2, -np.inf, dtype=np.float32)
    for block_size in tilings:
        output, lse = attend(
            backend, **inputs, key_lengths=np.array([0, 7]), sinks=sinks, block_size=block_size
        )
        assert_accurate(output, lse, plain)


@pytest.mark.parametrize("sink", [np.inf, np.nan])
def test_a_sink_that_has_no_softmax(backend: Backend, tilings, sink):
    """NaN for its head alone, but for the output of rows that attend nothing."""
    inputs = make_inputs(batch=(2,), queries=9, keys=11)
    sinks = np.array([0.5, sink], dtype=np.float32)
    lengths = np.array([0, 11])
    output, lse = check(backend, tilings, inputs, sinks=sinks, key_lengths=lengths)
    assert np.isnan(lse[:, 1]).all()
    assert np.isnan(output[1, 1]).all()
    assert (output[0] == 0).all()
    assert np.isfinite(lse[:, 0]).all()
    assert np.isfinite(output[:, 0]).all()


def test_large_sinks_and_large_scores(backend: Backend, tilings):
    """Whichever is larger, nothing overflows."""
    inputs = make_inputs(width=1)
    for size in (1.0, 300.0):
        for sink in (-500.0, 0.0, 500.0):
            sinks = np.array([sink, sink + 1], dtype=np.float32)
            check(backend, tilings, inputs, sinks=sinks, scale=size)


def test_every_restriction_composes_with_every_other(backend: Backend):
    """Pair by pair of options, none replaces or drops another."""
    inputs = make_inputs(heads=4, key_heads=2, queries=6, keys=6)
    rng = np.random.default_rng(0)
    options = {
        "mask": {"mask": rng.random((6, 6)) < 0.7},
        "bias": {"bias": np.where(rng.random((6, 6)) < 0.3, -np.inf, 0.5).astype(np.float32)},
        "causal": {"causal": True},
        "window": {"window": (2, 1)},
        "query_lengths": {"query_lengths": 4},
        "key_lengths": {"key_lengths": np.array([3, 5])},
        "softcap": {"softcap": 1.0},
        "sinks": {"sinks": np.array([0, 1, 2, -1], dtype=np.float32)},
        "scale": {"scale": -1.0},
    }
    names = list(options)
    for number, first in enumerate(names):
        others = names[number + 1 :]
        for second in backend.few(others, number % 2):
            check(backend, [(3, 2)], inputs, **options[first], **options[second])
