"""Numbers at the ends of their range, where a shortcut for ordinary numbers would show.

Each is run below and above the number of rows from which NumPy bounds the scores.
"""

from __future__ import annotations

import numpy as np
import pytest

from portable_attention import attention_vjp, merge_states

from .accuracy import assert_accurate, reference_of
from .backends import Backend
from .problems import make_inputs
from .running import attend

f = np.float32
ROWS = pytest.mark.parametrize("rows", [4, 40])


def full(rows: int, number: float) -> np.ndarray:
    return np.full((1, 1, rows, 1), number, f)


@ROWS
def test_many_weights_that_are_nearly_equal(backend: Backend, rows):
    """Each is rounded the same way where it is added to a long sum."""
    inputs = make_inputs(batch=(), queries=rows, keys=4096, width=1, value_width=1)
    found = attend(backend, **inputs, scale=1e-5)
    assert_accurate(*found, reference_of(**inputs, scale=1e-5))


@ROWS
def test_large_values_under_large_weights(backend: Backend, rows):
    root = np.sqrt(30.0)
    found = attend(backend, full(rows, root), full(4, root), full(4, 1e28), scale=1.0)
    np.testing.assert_allclose(found.output, full(rows, 1e28), rtol=1e-6)


@ROWS
def test_tiny_values_under_small_weights(backend: Backend, rows):
    root = np.sqrt(15.0)
    found = attend(backend, full(rows, root), full(4, -root), full(4, 1e-36), scale=1.0)
    np.testing.assert_allclose(found.output, full(rows, 1e-36), rtol=1e-6)


@ROWS
def test_scores_far_below_a_sink(backend: Backend, rows):
    """exp of the distance of a sink from 0 has few digits, or none; what it multiplies has all."""
    root = np.sqrt(30.0)
    sinks = np.array([110], f)
    found = attend(backend, full(rows, root), full(4, root), full(4, 1), scale=1.0, sinks=sinks)
    expected = 4 * np.exp(float(f(root)) ** 2 - 110)
    np.testing.assert_allclose(found.output, full(rows, expected), rtol=2e-5)
    np.testing.assert_allclose(found.lse, np.full((1, 1, rows), 110), rtol=1e-6)


@ROWS
def test_the_mean_of_values_near_the_largest_number(backend: Backend, rows):
    found = attend(backend, full(rows, 0), full(4, 0), full(4, 3e38))
    np.testing.assert_allclose(found.output, full(rows, 3e38), rtol=1e-6)


@ROWS
def test_tiny_queries_under_a_large_scale(backend: Backend, rows):
    key = np.array([1, 2, 3, 0], f).reshape(1, 1, 4, 1) * f(1e10)
    value = np.arange(4, dtype=f).reshape(1, 1, 4, 1)
    found = attend(backend, full(rows, 1e-23), key, value, scale=1e15)
    np.testing.assert_allclose(found.output, full(rows, 2), rtol=1e-5)
    np.testing.assert_allclose(found.lse, np.full((1, 1, rows), 300), rtol=1e-5)


@ROWS
@pytest.mark.parametrize("sink", [-100.0, -200.0, float(np.finfo(f).min)])
def test_a_very_low_sink_is_the_lse_of_an_empty_row(backend: Backend, rows, sink):
    mask = np.ones((rows, 8), bool)
    mask[0] = False
    found = attend(
        backend, full(rows, 0), full(8, 0), full(8, 1), mask=mask, sinks=np.array([sink], f)
    )
    expected = np.full((1, 1, rows), np.log(8))
    expected[0, 0, 0] = sink
    np.testing.assert_allclose(found.lse, expected, rtol=1e-6)
    assert found.output[0, 0, 0, 0] == 0


@ROWS
@pytest.mark.parametrize("softcap", [1e31, 1e38, 1e39, 1e300])
def test_a_softcap_that_no_score_comes_near_changes_nothing(backend: Backend, rows, softcap):
    x = np.random.default_rng(0).standard_normal((1, 1, rows, 4)).astype(f)
    capped, bare = attend(backend, x, x, x, softcap=softcap), attend(backend, x, x, x)
    np.testing.assert_allclose(capped.output, bare.output, rtol=1e-6, atol=1e-7)


@ROWS
@pytest.mark.parametrize("softcap", [1e-40, 1e-50, 1e-300])
def test_a_tiny_softcap_makes_all_scores_equal(backend: Backend, rows, softcap):
    x = np.random.default_rng(0).standard_normal((1, 1, rows, 4)).astype(f)
    found = attend(backend, x, x, x, softcap=softcap)
    np.testing.assert_allclose(found.output[0, 0, 0], x[0, 0].mean(axis=0), rtol=1e-5, atol=1e-6)


def test_a_scale_beyond_the_dtype_of_the_scores_is_refused(backend: Backend):
    with pytest.raises(ValueError, match=r"scale must be a finite number of float32.*1e\+39"):
        attend(backend, full(2, 1), full(2, 1), full(2, 1), scale=1e39)


@ROWS
def test_a_row_of_infinitely_low_scores_is_not_empty(backend: Backend, rows):
    key = full(2, 0)
    key[0, 0, 0] = -np.inf
    mask = np.ones((rows, 2), bool)
    mask[1] = [True, False]
    found = attend(backend, full(rows, 1), key, full(2, 1), mask=mask)
    assert np.isnan(found.output[0, 0, 1, 0])
    assert found.lse[0, 0, 1] == -np.inf
    np.testing.assert_array_equal(found.output[0, 0, 2:], 1)


@ROWS
def test_an_lse_near_0_keeps_its_digits(backend: Backend, rows):
    found = attend(
        backend,
        full(rows, 1e-3),
        full(rows, 1e-3),
        full(rows, 1),
        mask=np.eye(rows, dtype=bool),
        scale=1.0,
    )
    np.testing.assert_allclose(found.lse, np.full((1, 1, rows), 1e-6), rtol=1e-6)


@ROWS
def test_garbage_in_masked_keys_decides_no_bits(backend: Backend, rows):
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 1, 2, rows, 8)).astype(f)
    mask = np.ones((rows, rows), bool)
    mask[:, -2:] = False
    clean = attend(backend, query, key, value, mask=mask)
    key, value = key.copy(), value.copy()
    key[..., -2:, :], value[..., -2:, :] = np.nan, np.inf
    poisoned = attend(backend, query, key, value, mask=mask)
    np.testing.assert_array_equal(poisoned.output, clean.output)
    np.testing.assert_array_equal(poisoned.lse, clean.lse)


def test_merging_large_outputs(backend: Backend):
    state = tuple(backend.asarray(array) for array in (np.array([[3e38]], f), np.zeros(1, f)))
    merged = merge_states(state, state)
    np.testing.assert_allclose(backend.to_numpy(merged.output), [[3e38]], rtol=1e-6)


@pytest.mark.parametrize("level", [-1e9, 1e6, float(np.finfo(f).min)])
def test_gradients_under_a_bias_beside_which_the_sum_is_lost(backend: Backend, level):
    arrays = [full(1, 0), full(3, 0), np.array([1, 0, 2], f).reshape(1, 1, 3, 1)]
    inputs = [backend.asarray(array) for array in arrays]
    bias = backend.asarray(np.full((1, 3), level, f))
    output, pullback = attention_vjp(*inputs, bias=bias)
    gradients = pullback(backend.xp.ones_like(output))
    np.testing.assert_allclose(
        backend.to_numpy(gradients.value).ravel(), np.full(3, 1 / 3), rtol=1e-6
    )
    np.testing.assert_allclose(
        backend.to_numpy(gradients.bias), [[0, -1 / 3, 1 / 3]], rtol=1e-6, atol=1e-7
    )
