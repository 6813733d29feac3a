"""The bounds hold for honest arithmetic on any inputs, and not for dishonest one."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from portable_attention import attention, attention_vjp
from portable_attention.conformance import accuracy, oracle
from portable_attention.conformance.calls import Call
from portable_attention.conformance.judge import answers, judge_results

from .variations import HalfWeights, LateHalfWeights, SequentialSums, TwoPass
from .zoo.faults import tf32

DTYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}


def random_call(seed, dtype, *, keys=None, gain=None):
    rng = np.random.default_rng(seed)
    queries, width, own = rng.integers(1, 24), rng.integers(1, 80), rng.integers(1, 3)
    keys = rng.integers(1, 200) if keys is None else keys
    gain = 10.0 ** rng.uniform(-2, 1.5) if gain is None else gain
    shapes = {
        "query": (own * 2, queries, width),
        "key": (own, keys, width),
        "value": (own, keys, 5),
    }
    arrays = {
        name: rng.standard_normal((2, *shape)).astype(np.float32) for name, shape in shapes.items()
    }
    arrays["query"] *= np.float32(gain)
    arrays = {name: array.astype(DTYPES[dtype]) for name, array in arrays.items()}
    options = {}
    if seed % 2:
        options |= {"causal": True, "query_offset": int(rng.integers(0, keys + 1))}
    if seed % 3 == 0:
        options["softcap"] = 5.0
    if seed % 5 == 0:
        arrays["bias"] = rng.standard_normal((queries, keys)).astype(np.float32)
        arrays["sinks"] = rng.standard_normal(own * 2).astype(np.float32)
    return Call(arrays, options)


def units_of(call, function, vjp=None):
    output, lse = function(**call.arguments, return_lse=True)
    results = {"output": output, "lse": lse}
    if vjp is not None:
        _, pullback = vjp(**call.arguments)
        pulled = pullback(call.cotangents["d_output"], call.cotangents["d_lse"])
        pulled = pulled if isinstance(pulled, dict) else pulled._asdict()
        results |= {f"d_{n}": array for n, array in pulled.items() if array is not None}
    return judge_results("", "", results, answers(call)).units


def with_cotangents(call, seed):
    rng = np.random.default_rng(seed)
    query, value = call.arrays["query"], call.arrays["value"]
    d_output = rng.standard_normal((*query.shape[:-1], value.shape[-1])).astype(query.dtype)
    wide = np.float64 if query.dtype == np.float64 else np.float32
    d_lse = rng.standard_normal(query.shape[:-1]).astype(wide)
    return Call(call.arrays, call.options, {"d_output": d_output, "d_lse": d_lse})


HONEST = [TwoPass, SequentialSums, HalfWeights, LateHalfWeights]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", HONEST, ids=lambda kind: kind.__name__)
def test_honest_arithmetic_stays_within_the_bounds(kind, dtype):
    function = kind()
    for seed in range(24):
        call = with_cotangents(random_call(seed, dtype), seed)
        units = units_of(call, function, function.vjp)
        assert max(units.values()) <= 1, (seed, units)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_library_stays_within_the_bounds(dtype):
    for seed in range(24):
        call = with_cotangents(random_call(seed, dtype), seed)
        units = units_of(call, attention, attention_vjp)
        assert max(units.values()) <= 1, (seed, units)


def rounded_inputs(round_to):
    def function(query, key, value, **options):
        return attention(round_to(query), round_to(key), value, **options)

    return function


@pytest.mark.parametrize("seed", range(10))
def test_tf32_products_are_seen(seed):
    call = random_call(seed, "float32", gain=1.0)
    assert max(units_of(call, rounded_inputs(tf32)).values()) > 2


@pytest.mark.parametrize("seed", range(10))
def test_scores_of_half_precision_are_seen(seed):
    call = random_call(2 * seed + 1, "bfloat16", gain=8.0)

    def function(query, key, value, return_lse, **options):
        wide = [array.astype(np.float32) for array in (query, key, value)]
        scale = query.shape[-1] ** -0.5
        score = (scale * wide[0] @ np.repeat(wide[1], 2, -3).swapaxes(-1, -2)).astype(query.dtype)
        bias = score.astype(np.float32) + options.pop("bias", np.float32(0))
        output, lse = attention(0 * query, key, value, bias=bias, return_lse=True, **options)
        return output, lse

    call = Call(call.arrays, {n: o for n, o in call.options.items() if n != "softcap"})
    assert units_of(call, function)["lse"] > 2


@pytest.mark.parametrize("keys", [17, 100, 1000])
def test_a_key_that_is_dropped_is_seen(keys):
    call = random_call(2, "float32", keys=keys, gain=1.0)

    def function(query, key, value, **options):
        return attention(query, key[..., :-1, :], value[..., :-1, :], **options)

    assert max(units_of(call, function).values()) > 2


def test_a_bound_is_a_few_roundings_of_a_plain_call():
    ones = np.ones((1, 4), np.float32)
    output, lse = accuracy.forward_bounds(oracle.steps_of(ones, ones, ones), "float32")
    eps = np.finfo(np.float32).eps
    assert (output < 100 * eps).all()
    assert (lse < 100 * eps).all()
    half, lse = accuracy.forward_bounds(oracle.steps_of(ones, ones, ones), "float16")
    assert (half < 4 * np.finfo(np.float16).eps).all()
    assert (lse < 100 * eps).all(), "the lse of half precision is float32"


def test_units_are_infinite_where_nan_and_infinity_do_not_match():
    expected = np.array([np.nan, np.inf, -np.inf, 1.0, 1.0])
    found = np.array([np.nan, np.inf, np.inf, np.nan, 1.5])
    units = accuracy.in_units(found, expected, np.full(5, 0.5))
    np.testing.assert_array_equal(units, [0, 0, np.inf, np.inf, 1])
