"""ONNX's operator: what its node tests leave open, and its errors."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from portable_attention.dialects.onnx import attention

from ..backends import Backend
from .formula import formula, problem

CLOSE = {"rtol": 1e-5, "atol": 3e-6}


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("cache", ["none", "past", "nonpad"])
def test_the_last_output(backend: Backend, mode: int, cache: str) -> None:
    """Every mode, with grouped heads, a cap, a mask, a window and each kind of cache."""
    query, key, value = problem(0)
    rng = np.random.default_rng(1)
    mask, bias = rng.random((4, 5, 7)) > 0.3, rng.random((1, 7)).astype(np.float32)
    lengths = np.array([4, 7])
    offset = {"none": 0, "past": 3, "nonpad": lengths[:, None, None] - 5}[cache]
    distance = np.arange(7) - np.arange(5)[:, None] - offset
    distance = distance[:, None] if cache == "nonpad" else distance
    allowed = (distance <= 0) & (distance >= -3)
    options: dict[str, Any] = {}
    if cache == "nonpad":
        allowed = allowed & (np.arange(7) < lengths[:, None, None, None])
        options["nonpad_kv_seqlen"] = backend.asarray(lengths)
    new = slice(3, None) if cache == "past" else slice(None)
    if cache == "past":
        options["past_key"] = backend.asarray(np.ascontiguousarray(key[..., :3, :]))
        options["past_value"] = backend.asarray(np.ascontiguousarray(value[..., :3, :]))
    for kind in ("bool", "float"):
        both = {"allowed": allowed & mask} if kind == "bool" else {"allowed": allowed, "bias": bias}
        output, _, weights = formula(query, key, value, **both, softcap=1.5, scale=0.6)
        found, present_key, present_value, last = attention(
            backend.asarray(query),
            backend.asarray(np.ascontiguousarray(key[..., new, :])),
            backend.asarray(np.ascontiguousarray(value[..., new, :])),
            backend.asarray(mask if kind == "bool" else bias),
            **options,
            is_causal=1,
            left_window_size=3,
            softcap=1.5,
            scale=0.6,
            qk_matmul_output_mode=mode,
            return_qk_matmul_output=True,
        )
        np.testing.assert_allclose(backend.to_numpy(found), output, **CLOSE)
        scores = query @ np.swapaxes(np.repeat(key, 2, axis=1), -1, -2) * 0.6
        scores = 1.5 * np.tanh(scores / 1.5) if mode else scores
        if mode == 2:
            scores = np.where(both["allowed"], scores + both.get("bias", 0), -np.inf)
        expected = weights if mode == 3 else scores
        assert backend.owns(last)
        np.testing.assert_allclose(backend.to_numpy(last), expected, **CLOSE)
        if cache == "nonpad":
            assert present_key is present_value is None
        else:
            np.testing.assert_array_equal(backend.to_numpy(present_key), key)
            np.testing.assert_array_equal(backend.to_numpy(present_value), value)


def test_a_short_mask_ends_the_keys() -> None:
    query, key, value = problem(1)
    mask = np.ones((5, 4), bool)
    expected = attention(query, key[..., :4, :], value[..., :4, :])[0]
    np.testing.assert_allclose(attention(query, key, value, mask)[0], expected, **CLOSE)
    zeros = mask * np.float32(0)
    np.testing.assert_allclose(attention(query, key, value, zeros)[0], expected, **CLOSE)
    first = attention(query, key, value, mask[:, :1])[0]  # key 0, not a mask to be repeated
    np.testing.assert_allclose(first, np.repeat(value[..., :1, :], 2, 1).repeat(5, 2), **CLOSE)


@pytest.mark.parametrize("heads", [True, False], ids=["with heads", "without"])
def test_head_counts_may_be_given_for_rank_4(heads: bool) -> None:
    """Opset 23 and 24 allowed it."""
    query, key, value = problem(2)
    counts = {"q_num_heads": 4, "kv_num_heads": 2} if heads else {}
    output = attention(query, key, value, **counts)[0]
    np.testing.assert_allclose(output, formula(query, key, value)[0], **CLOSE)


def test_double_softmax_of_float32(backend: Backend) -> None:
    arrays = problem(3)
    given = [backend.asarray(array) for array in arrays]
    if "float64" not in backend.dtypes:
        with pytest.raises(ValueError, match="needs float64"):
            attention(*given, softmax_precision=11)
        return
    output = backend.to_numpy(attention(*given, softmax_precision=11)[0])
    assert output.dtype == np.float32
    np.testing.assert_allclose(output, formula(*arrays)[0], rtol=1e-7, atol=1e-8)


def test_double_softmax_of_jax_without_float64() -> None:
    import jax

    arrays = [jax.numpy.asarray(array) for array in problem(3)]
    with jax.enable_x64(False), pytest.raises(ValueError, match="jax_enable_x64"):
        attention(*arrays, softmax_precision=11)


def test_jit() -> None:
    import jax

    arrays = [jax.numpy.asarray(array) for array in problem(4)]
    options = {"qk_matmul_output_mode": 3, "return_qk_matmul_output": True, "is_causal": 1}

    def call(query: Any, key: Any, value: Any, lengths: Any) -> Any:
        return attention(query, key, value, nonpad_kv_seqlen=lengths, **options)

    lengths = jax.numpy.asarray([2, 6])
    found, expected = jax.jit(call)(*arrays, lengths), call(*arrays, lengths)
    np.testing.assert_allclose(found[0], expected[0], **CLOSE)
    np.testing.assert_allclose(found[3], expected[3], **CLOSE)


def test_scores_are_not_made_unless_they_are_asked_for() -> None:
    length = 8192
    x = np.zeros((1, 1, length, 8), np.float32)
    tracemalloc.start()
    try:
        attention(x, x, x, is_causal=1, qk_matmul_output_mode=3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < length * length * 4 / 4


def test_nan_in_what_is_masked_is_not_felt() -> None:
    query, key, value = problem(5)
    lengths = np.array([3, 5])
    expected = attention(query, key, value, nonpad_kv_seqlen=lengths)[0]
    for item, length in enumerate(lengths):
        key[item, :, length:] = value[item, :, length:] = np.nan
    output, *_, weights = attention(
        query,
        key,
        value,
        nonpad_kv_seqlen=lengths,
        qk_matmul_output_mode=3,
        return_qk_matmul_output=True,
    )
    np.testing.assert_array_equal(output, expected)
    assert np.isfinite(weights).all()


Q, K, V = problem(6)
FLAT = Q.swapaxes(1, 2).reshape(2, 5, 32)

ERRORS: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "rank 2": ((Q[0, 0], K, V), {}, ValueError, "Q must have rank 3 or 4"),
    "no head count": ((FLAT, FLAT, FLAT), {}, ValueError, "needs q_num_heads"),
    "head count": ((Q, K, V), {"q_num_heads": 2}, ValueError, "q_num_heads is 2, but Q has 4"),
    "width": (
        (FLAT, FLAT, FLAT),
        {"q_num_heads": 5, "kv_num_heads": 4},
        ValueError,
        "no multiple of q_num_heads",
    ),
    "zero heads": ((FLAT, FLAT, FLAT), {"q_num_heads": 0}, ValueError, "must be >= 1"),
    "ranks": ((Q, FLAT, FLAT), {"kv_num_heads": 4}, ValueError, "same rank"),
    "batch": ((Q, K[:1], V), {}, ValueError, "same rank and batch"),
    "half a cache": ((Q, K, V, None, K), {}, ValueError, "past_key was given without past_value"),
    "the other half": (
        (Q, K, V),
        {"past_value": V},
        ValueError,
        "past_value was given without past_key",
    ),
    "two caches": ((Q, K, V, None, K, V, np.array([1, 2])), {}, ValueError, "cannot be combined"),
    "cache shape": ((Q, K, V, None, K[0], V[0]), {}, ValueError, "past_key must have shape"),
    "cache dtype": (
        (Q, K, V, None, K.astype(np.float64), V),
        {},
        TypeError,
        "dtype float32 of what it precedes",
    ),
    "integer mask": ((Q, K, V, np.ones((5, 7), int)), {}, TypeError, "attn_mask must be bool"),
    "scalar mask": ((Q, K, V, np.ones((), bool)), {}, ValueError, "rank 1 to 4"),
    "list as mask": ((Q, K, V, [True]), {}, TypeError, "attn_mask must be an array"),
    "causal": ((Q, K, V), {"is_causal": 2}, ValueError, "is_causal must be 0 or 1"),
    "mode": ((Q, K, V), {"qk_matmul_output_mode": 4}, ValueError, "qk_matmul_output_mode"),
    "window": ((Q, K, V), {"left_window_size": -2}, ValueError, ">= 0"),
    "precision": ((Q, K, V), {"softmax_precision": 7}, ValueError, "softmax_precision must be"),
    "softcap": ((Q, K, V), {"softcap": -1.0}, ValueError, "softcap"),
    "lengths": ((Q, K, V), {"nonpad_kv_seqlen": np.array([1, 8])}, ValueError, "key_lengths"),
    "None": ((Q, None, V), {}, TypeError, "K must be an array"),
    "not an array": (([[1.0]], K, V), {}, TypeError, "Q must be an array"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    arguments, options, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        attention(*arguments, **options)
