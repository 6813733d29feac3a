"""Gradients: of every argument, through every option, by whatever the library differentiates with.

On PyTorch and JAX that is their own differentiation; everywhere, attention_vjp. The oracle has
them from the explicit formula, which its own tests compare with differences.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

from portable_attention import attention_vjp

from . import oracle
from .accuracy import assert_near, gradients_of_oracle
from .backends import Backend
from .differentiate import gradients_of
from .dropout_reference import keep_mask
from .dtypes import lse_dtype, numpy_dtype
from .problems import allowed_by, make_inputs, restrictions
from .strategies import RandomChooser, random_call


def ways(backend: Backend, _config: pytest.Config) -> list[bool]:
    """Return whether attention_vjp gives the gradients: always where the library has no way."""
    return [False, True] if backend.autodiff else [True]


def bias_shapes(backend: Backend, _config: pytest.Config) -> list[tuple[int, ...]]:
    return backend.few(SHAPES, 3)


def chunks(backend: Backend, _config: pytest.Config) -> list[range]:
    count = 6 if backend.compiled else 60
    return [range(start, start + 6) for start in range(5000, 5000 + count, 6)]


SHAPES = [(5, 1), (7,), (2, 1, 1), (1,), (1, 7), (3, 1, 1, 7), (3, 2, 5, 7)]
BACKEND_AXES = {"explicit": ways, "shape": bias_shapes, "chunk": chunks}


def cotangents_of(arguments, seed=0):
    """Return random cotangents of the output and the lse, the latter 0 in rows without keys."""
    exact = oracle.attention(**arguments)
    dtype = arguments["query"].dtype
    rng = np.random.default_rng(seed)
    cotangent = rng.standard_normal(exact.output.shape).astype(dtype)
    lse_cotangent = np.where(np.isfinite(exact.lse), rng.standard_normal(exact.lse.shape), 0)
    lse_name = lse_dtype("float64" if dtype == np.float64 else "float32")
    return {"cotangent": cotangent, "lse_cotangent": lse_cotangent.astype(lse_name)}


def check(backend: Backend, arguments, *, expected=None, names=None, how=None, **cotangents):
    """Compare the gradients with the oracle's; `expected` holds its options where they differ."""
    expected = {**arguments, **(expected or {})}
    expected = {name: value for name, value in expected.items() if name in ORACLE_OPTIONS}
    references = gradients_of_oracle(expected, **cotangents)
    names = list(references) if names is None else names
    found = gradients_of(backend, arguments, names, **cotangents, **(how or {}))
    for name in names:
        assert_near(found[name], *references[name], f"gradient by {name}")
    return found


ORACLE_OPTIONS = (
    *("query", "key", "value", "mask", "bias", "causal", "window", "query_offset", "layout"),
    *("query_lengths", "key_lengths", "scale", "softcap", "sinks", "rate", "keep"),
)


@functools.lru_cache(maxsize=256)
def combination(number, dtypes):
    return random_call(RandomChooser(number), dtypes, poison=False)


def test_random_combinations(backend: Backend, chunk):
    """All options together; every other time by attention_vjp where there are two ways."""
    for number in chunk:
        call = combination(number, backend.dtypes)
        arguments = {**call.inputs, **call.options}
        expected = {**call.inputs, **call.expected}
        cotangents = cotangents_of(expected, number)
        try:
            check(
                backend,
                {**arguments, "block_size": call.block_size},
                expected=call.expected,
                how={"explicit": bool(number % 2)},
                **cotangents,
            )
        except Exception as error:
            raise AssertionError(f"combination {number} on {backend}: {call}") from error


@pytest.mark.parametrize("way", restrictions())
def test_restrictions(backend: Backend, explicit, way):
    arguments = {**make_inputs(heads=2, key_heads=1), **restrictions()[way]}
    check(
        backend,
        {**arguments, "block_size": (3, 2)},
        how={"explicit": explicit},
        **cotangents_of(arguments),
    )


def test_a_window_over_several_tiles_of_the_own_size(backend: Backend, explicit):
    """Tiles that begin where the window does: they end beyond it, and overlap those of others."""
    arguments = make_inputs(batch=(), heads=1, queries=721, keys=721)
    arguments |= {"window": (16, 119), "key_lengths": 700}
    check(backend, arguments, how={"explicit": explicit}, **cotangents_of(arguments))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("way", ["mask", "bias", "together"])
def test_masked_garbage_has_no_gradient_and_spoils_none(backend: Backend, explicit, way, poison):
    """NaN in keys and values that nothing attends, and in the queries of empty rows."""
    arguments = {**make_inputs(), **restrictions()[way]}
    arguments["key_lengths"], arguments["query_lengths"] = 5, np.array([4, 2])
    cotangents = cotangents_of(arguments)
    allowed = allowed_by(
        {n: arguments[n] for n in ("query", "key", "value")}, restricted(arguments)
    )
    seen, empty = allowed.any(-2), ~allowed.any(-1)
    assert not seen.all()
    assert empty.any()
    arguments["key"][~seen] = poison
    arguments["value"][~seen] = poison
    arguments["query"][empty] = poison
    found = check(
        backend, {**arguments, "block_size": (3, 2)}, how={"explicit": explicit}, **cotangents
    )
    assert (found["key"][~seen] == 0).all()
    assert (found["value"][~seen] == 0).all()
    assert (found["query"][empty] == 0).all()
    for gradient in found.values():
        assert np.isfinite(gradient).all()


def restricted(arguments):
    return {n: v for n, v in arguments.items() if n not in ("query", "key", "value")}


def test_gradient_of_lse_of_empty_rows(backend: Backend, explicit):
    """0 without a sink, 1 by the sink of an empty row."""
    arguments = {**make_inputs(batch=(1,)), "query_lengths": 2}
    sinks = np.array([0.5, -0.5], dtype=np.float32)
    ones = np.ones((1, 2, 5), dtype=np.float32)
    ones[..., :2] = 0  # of the empty rows alone
    how = {"lse_cotangent": ones, "explicit": explicit}
    with_sinks = {**arguments, "sinks": sinks}
    found = gradients_of(backend, with_sinks, ["query", "key", "value", "sinks"], **how)
    np.testing.assert_array_equal(found.pop("sinks"), [3, 3])
    for gradient in found.values():
        assert (gradient == 0).all()


def test_gradient_of_a_broadcast_bias_is_summed(backend: Backend, explicit, shape):
    """To its own shape, also where nothing else is differentiated."""
    arguments = make_inputs(batch=(3,))
    arguments["bias"] = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    check(
        backend,
        {**arguments, "block_size": (3, 2)},
        names=["bias"],
        how={"explicit": explicit},
        **cotangents_of(arguments),
    )


def test_gradients_of_broadcast_inputs_are_summed(backend: Backend, explicit):
    """Over batch axes, over the query heads that share a key head, and into a lower rank."""
    arguments = make_inputs(batch=(2, 3), heads=4, key_heads=2)
    arguments["key"] = arguments["key"][:1]
    arguments["value"] = arguments["value"][0, 0]
    check(backend, arguments, how={"explicit": explicit}, **cotangents_of(arguments))


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_one_input_is_broadcast_over_a_batch_of_many_rows(backend: Backend, explicit, name):
    """The rows of one query may meet the keys of several items, and have an lse with each."""
    arguments = make_inputs(batch=(2,), heads=2, key_heads=1, queries=300)
    arguments[name] = arguments[name][:1]
    check(backend, arguments, how={"explicit": explicit}, **cotangents_of(arguments))


@pytest.mark.parametrize("widths", [(0, 0), (0, 3), (3, 0)])
def test_no_width_and_many_rows(backend: Backend, explicit, widths):
    arguments = make_inputs(heads=2, key_heads=1, queries=300, width=widths[0])
    arguments["value"] = arguments["value"][..., : widths[1]]
    check(backend, arguments, how={"explicit": explicit}, **cotangents_of(arguments))


def test_every_dtype(backend: Backend, dtype, explicit):
    """Gradients have the dtype of their argument, whatever that of the others."""
    arguments = make_inputs(dtype=dtype, heads=4, key_heads=2)
    rng = np.random.default_rng(0)
    other = numpy_dtype("float32")
    arguments["bias"] = rng.standard_normal((5, 7)).astype(other)
    arguments["sinks"] = rng.standard_normal(4).astype(other)
    check(
        backend,
        {**arguments, "softcap": 2.0},
        how={"explicit": explicit},
        **cotangents_of({**arguments, "softcap": 2.0}),
    )


def test_gradients_of_many_tiles_are_summed_wide(backend: Backend, dtype, explicit):
    """Whatever the dtype of the argument: its rounding comes once, at the end."""
    arguments = make_inputs(batch=(), heads=2, key_heads=1, queries=400, keys=9, dtype=dtype)
    arguments["bias"] = np.zeros((2, 1, 9), arguments["query"].dtype)
    cotangents = {"cotangent": np.ones((2, 400, 3), arguments["query"].dtype)}
    check(backend, {**arguments, "block_size": (1, 9)}, how={"explicit": explicit}, **cotangents)


@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "sinks"])
def test_one_argument_alone(backend: Backend, name):
    """Where only that one is differentiated, the others get in no one's way."""
    arguments = make_inputs()
    arguments["bias"] = np.zeros((5, 7), dtype=np.float32)
    arguments["sinks"] = np.zeros(2, dtype=np.float32)
    check(backend, arguments, names=[name], **cotangents_of(arguments))


def test_dropout_is_the_same_in_the_backward_pass(backend: Backend, explicit):
    arguments = make_inputs()
    expected = {"keep": keep_mask(0.4, 6, (2, 2, 5, 7)), "rate": 0.4}
    check(
        backend,
        {**arguments, "dropout": (0.4, 6), "block_size": (3, 2)},
        expected=expected,
        how={"explicit": explicit},
        **cotangents_of({**arguments, **expected}),
    )


@pytest.mark.needs(autodiff=True)
def test_second_derivatives(backend: Backend):
    """Of the sum of the first gradient, against differences of the oracle's first."""
    arguments = make_inputs(batch=(), dtype="float64", queries=3, keys=4)
    arguments |= {"mask": np.random.default_rng(0).random((3, 4)) < 0.8, "softcap": 3.0}
    found = gradients_of(backend, {**arguments, "block_size": (2, 3)}, ["query", "key"], order=2)
    ones = np.ones((2, 3, 3))
    for name, second in found.items():
        for index in np.ndindex(second.shape):
            step = np.zeros(second.shape)
            step[index] = 1e-6
            along, against = (
                oracle.vjp(**{**arguments, name: arguments[name] + sign * step}, cotangent=ones)
                for sign in (1, -1)
            )
            difference = (along[name].sum() - against[name].sum()) / 2e-6
            np.testing.assert_allclose(second[index], difference, rtol=1e-6, atol=1e-8)


@pytest.mark.needs(compiled=False)  # arrays of JAX cannot be changed
@pytest.mark.parametrize("length", [6, 200])
def test_results_may_be_changed_before_the_pullback(backend: Backend, dtype, length):
    """As in `output -= target; pullback(output)`, which makes no array."""
    inputs = make_inputs(dtype=dtype, queries=length, keys=length)
    own = [backend.asarray(array) for array in inputs.values()]
    found = []
    for change in (False, True):
        (output, lse), pullback = attention_vjp(*own, return_lse=True)
        cotangents = [backend.xp.ones_like(result) for result in (output, lse)]
        if change:
            output -= 100.0
            lse *= 3.0
        found.append(pullback(*cotangents))
    for name in ("query", "key", "value"):
        kept, changed = (backend.to_numpy(getattr(gradients, name)) for gradients in found)
        np.testing.assert_array_equal(changed, kept)


def test_sum_of_output_is_linear_in_the_values(backend: Backend, explicit):
    """Its gradient by the values, times the values, is the sum again."""
    arguments = {**make_inputs(heads=4, key_heads=2), **restrictions(heads=4)["mask"]}
    gradient = gradients_of(backend, arguments, ["value"], explicit=explicit)["value"]
    total = oracle.attention(**arguments).output.sum()
    np.testing.assert_allclose((gradient * arguments["value"]).sum(), total, rtol=1e-5)
