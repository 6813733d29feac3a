"""What JAX alone has: transformations, traced options, and its default of 32 bits."""

from __future__ import annotations

import numpy as np
import pytest

from portable_attention import (
    Dropout,
    attention,
    attention_vjp,
    merge_states,
    partial_attention,
)

from . import oracle
from .accuracy import assert_accurate, reference_of
from .backends import Backend
from .differentiate import gradients_of
from .dropout_reference import keep_mask
from .problems import make_inputs, restrictions
from .running import attend
from .strategies import RandomChooser, random_call

jax = pytest.importorskip("jax", reason="needs jax")
jnp = jax.numpy
pytestmark = pytest.mark.needs(library="jax")


def placed(backend: Backend, arguments):
    return {name: backend.asarray(array) for name, array in arguments.items()}


TRACED = {
    "key_lengths": np.array([3, 7], dtype=np.int32),
    "query_lengths": np.array([5, 2], dtype=np.int32),
    "query_offset": np.array([2, -1], dtype=np.int32),
}


def test_lengths_and_offsets_may_be_traced(backend: Backend):
    """Their values are not known when the call is compiled; the results are the same."""
    options = {**TRACED, "causal": True, "window": (3, 0)}
    inputs = make_inputs()
    reference = reference_of(**inputs, **options)
    assert_accurate(*attend(backend, **inputs, **options, jit=True, block_size=(3, 2)), reference)


def test_one_compilation_serves_all_lengths(backend: Backend):
    inputs = placed(backend, make_inputs())
    traces = []

    @jax.jit
    def call(lengths):
        traces.append(lengths)
        return attention(**inputs, key_lengths=lengths)

    for lengths in ([7, 7], [0, 3], [1, 5]):
        found = call(jnp.asarray(lengths, jnp.int32))
        expected = reference_of(**make_inputs(), key_lengths=np.array(lengths))
        assert_accurate(np.asarray(found), None, expected)
    assert len(traces) == 1


def test_end_follows_traced_lengths(backend: Backend):
    options = {"key_lengths": TRACED["key_lengths"], "causal": True, "query_offset": "end"}
    inputs = make_inputs()
    reference = reference_of(**inputs, **options)
    assert_accurate(*attend(backend, **inputs, **options, jit=True), reference)


def test_traced_lengths_out_of_range_do_not_read_beyond(backend: Backend):
    """They cannot be checked under a trace; what they say beyond the range is all or nothing."""
    inputs = make_inputs()
    found = attend(backend, **inputs, key_lengths=np.array([100, -5], np.int32), jit=True)
    reference = reference_of(**inputs, key_lengths=np.array([7, 0]))
    assert_accurate(*found, reference)


def test_seed_may_be_traced(backend: Backend):
    inputs = make_inputs()
    call = jax.jit(lambda own, seed: attention(**own, dropout=Dropout(0.5, seed)))
    for seed in (3, -4):
        found = np.asarray(call(placed(backend, inputs), jnp.asarray(seed, jnp.int32)))
        kept = keep_mask(0.5, seed, (2, 2, 5, 7))
        assert_accurate(found, None, reference_of(**inputs, keep=kept, rate=0.5))


@pytest.mark.parametrize("name", ["query", "mask", "sinks"])
def test_numpy_arrays_are_constants(backend: Backend, name):
    """Any of them, next to JAX's own; the result is JAX's."""
    arguments = {**make_inputs(), "mask": np.ones((5, 7), dtype=bool)}
    arguments |= {"bias": np.zeros((5, 7), np.float32), "sinks": np.zeros(2, np.float32)}
    own = {**placed(backend, arguments), name: arguments[name]}
    found = attention(**own)
    assert isinstance(found, jax.Array)
    assert_accurate(np.asarray(found), None, reference_of(**arguments))


def test_numpy_inputs_under_a_trace_are_constants(backend: Backend):
    """Where a mask is traced and the rest is NumPy's."""
    inputs = make_inputs()
    mask = restrictions()["mask"]["mask"]
    found = jax.jit(lambda mask: attention(**inputs, mask=mask))(mask)
    assert_accurate(np.asarray(found), None, reference_of(**inputs, mask=mask))


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_is_a_loop(backend: Backend, axis):
    """Over grouped heads, with a mask that is shared and lengths that are mapped."""
    inputs = make_inputs(batch=(3, 2), heads=4, key_heads=2)
    mask = np.random.default_rng(0).random((5, 7)) < 0.7
    lengths = np.array([[7, 1], [0, 3], [5, 5]])
    moved = {name: np.moveaxis(array, 0, axis) for name, array in inputs.items()}

    def call(inputs, lengths):
        return attention(**inputs, mask=mask, key_lengths=lengths, block_size=(3, 2))

    found = jax.vmap(call, in_axes=(axis, 0))(placed(backend, moved), jnp.asarray(lengths))
    reference = reference_of(**inputs, mask=mask, key_lengths=lengths)
    assert_accurate(np.asarray(found), None, reference)


def test_vmap_over_the_bias_alone(backend: Backend):
    inputs = make_inputs()
    bias = np.random.default_rng(0).standard_normal((3, 1, 1, 5, 7)).astype(np.float32)
    found = jax.vmap(lambda bias: attention(**placed(backend, inputs), bias=bias))(bias)
    for item, own_bias in zip(np.asarray(found), bias, strict=True):
        assert_accurate(item, None, reference_of(**inputs, bias=own_bias))


def test_vmap_over_lengths_that_differ(backend: Backend):
    """Tiles that one item skips, another reaches in part and a third has whole."""
    inputs = make_inputs(batch=(4,), queries=12, keys=12)
    lengths = np.array([0, 3, 7, 12])
    options = {"causal": True, "window": (6, 0), "block_size": (4, 3)}
    found = jax.vmap(lambda own, length: attention(**own, key_lengths=length, **options))(
        placed(backend, inputs), jnp.asarray(lengths)
    )
    reference = reference_of(**inputs, causal=True, window=(6, 0), key_lengths=lengths)
    assert_accurate(np.asarray(found), None, reference)


def test_vmap_chooses_one_way_for_all(backend: Backend):
    """Whatever is mapped: no branch becomes a selection between the results of all of them.

    But one in the way that calls with NaN or infinities take, tile by tile.
    """
    inputs = placed(backend, make_inputs(batch=(3,)))
    lengths = jnp.asarray([7, 0, 3])

    def call(own, length):
        return attention(**own, causal=True, query_offset=2, key_lengths=length, block_size=(3, 2))

    plain = jax.make_jaxpr(call)({name: array[0] for name, array in inputs.items()}, lengths[0])
    mapped = jax.make_jaxpr(jax.vmap(call))(inputs, lengths)
    assert str(mapped).count("cond[") == str(plain).count("cond[") - 1


@pytest.mark.parametrize("where", ["key", "value"])
def test_vmap_with_garbage_in_one_item(backend: Backend, where):
    """Behind the valid keys, where it is not felt: nor by the others, nor in any gradient."""
    inputs = make_inputs(batch=(3,), keys=9)
    inputs[where][1, :, 5:] = np.nan
    inputs[where][2, :, 5] = np.inf
    lengths = np.array([9, 5, 5])

    def loss(own, length):
        return (attention(**own, key_lengths=length, block_size=(3, 2)) ** 2).sum()

    own = placed(backend, inputs)
    found = jax.vmap(lambda own, n: attention(**own, key_lengths=n, block_size=(3, 2)))(
        own, jnp.asarray(lengths)
    )
    assert_accurate(np.asarray(found), None, reference_of(**inputs, key_lengths=lengths))
    gradients = jax.vmap(jax.grad(loss))(own, jnp.asarray(lengths))
    clean = {name: np.nan_to_num(array, posinf=0.0) for name, array in inputs.items()}
    expected = jax.vmap(jax.grad(loss))(placed(backend, clean), jnp.asarray(lengths))
    for name, gradient in expected.items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=1e-5, atol=1e-6)


def test_huge_values_among_ordinary_numbers(backend: Backend):
    """Their sums would overflow: such a call does not go the short way."""
    inputs = make_inputs(dtype="float32", keys=12)
    inputs["value"] = np.full_like(inputs["value"], 3e38)
    found = attend(backend, **inputs, jit=True, block_size=(3, 4))
    assert_accurate(*found, reference_of(**inputs))


def test_gradient_under_jit_and_of_vmap(backend: Backend):
    arguments = {**make_inputs(heads=4, key_heads=2), **restrictions(heads=4)["mask"]}
    plain = gradients_of(backend, arguments, ["query", "key", "value"])
    compiled = gradients_of(backend, arguments, ["query", "key", "value"], jit=True)
    for name, gradient in plain.items():
        np.testing.assert_allclose(compiled[name], gradient, rtol=1e-5, atol=1e-6)


def test_attention_vjp_under_transforms(backend: Backend):
    """Traced, mapped and differentiated again."""
    query, key, value = (backend.asarray(array) for array in make_inputs().values())
    bias = backend.asarray(np.zeros((5, 7), np.float32))

    def gradients(query):
        output, pullback = attention_vjp(query, key, value, bias=bias, key_lengths=5)
        return pullback(output)

    expected = gradients(query)
    for found in (jax.jit(gradients)(query), jax.vmap(gradients)(query[None])):
        for one, other in zip(found, expected, strict=True):
            if other is not None:
                np.testing.assert_allclose(jnp.reshape(one, other.shape), other, atol=1e-6)
    second = jax.jit(jax.grad(lambda query: gradients(query).key.sum()))(query)
    assert bool(jnp.isfinite(second).all())


def test_forward_mode(backend: Backend):
    """The tangent agrees with the difference along a direction."""
    inputs = make_inputs(dtype="float64", queries=4, keys=5)
    directions = make_inputs(dtype="float64", queries=4, keys=5, seed=1)
    options = {"causal": True, "query_offset": "end"}

    def call(own):
        return attention(**own, **options, block_size=(3, 2))

    _, tangent = jax.jvp(call, (placed(backend, inputs),), (placed(backend, directions),))
    along, against = (
        oracle.attention(
            **{name: inputs[name] + sign * 1e-6 * directions[name] for name in inputs}, **options
        ).output
        for sign in (1, -1)
    )
    np.testing.assert_allclose(np.asarray(tangent), (along - against) / 2e-6, atol=1e-8)


def test_states_under_jit(backend: Backend):
    inputs = make_inputs()

    @jax.jit
    def split(own):
        parts = [slice(0, 3), slice(3, 7)]
        return merge_states(
            *(
                partial_attention(own["query"], own["key"][..., s, :], own["value"][..., s, :])
                for s in parts
            )
        )

    output, lse = split(placed(backend, inputs))
    reference = reference_of(**inputs)
    np.testing.assert_allclose(np.asarray(output), reference.output, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.asarray(lse), reference.lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("number", range(2000, 2004))
def test_combinations_without_64_bits(backend: Backend, number):
    """As JAX is by default: int64 lengths and offsets of NumPy are taken all the same."""
    call = random_call(RandomChooser(number), ("float32", "float16", "bfloat16"))
    numpy_options = tuple(
        name for name in ("query_lengths", "key_lengths", "query_offset") if name in call.options
    )
    with jax.enable_x64(False):
        output, lse = attend(
            backend,
            **call.inputs,
            **call.options,
            block_size=call.block_size,
            jit=call.jit and not numpy_options,
            keep_numpy=numpy_options,
        )
    assert_accurate(output, lse, reference_of(**call.inputs, **call.expected))


def test_rank_promotion_may_be_forbidden():
    """Whoever forbids it to find faults of his own gets none of ours."""
    x = jnp.ones((2, 4, 9, 8))
    y = jnp.ones((2, 2, 9, 8))
    options = {
        "causal": True,
        "query_offset": jnp.asarray([0, 2]),
        "key_lengths": np.array([3, 9]),
        "bias": jnp.ones((9,)),
        "sinks": jnp.ones((4,)),
        "dropout": Dropout(0.5, 1),
        "block_size": (4, 4),
    }
    plain = attention(x, y, y, **options)
    with jax.numpy_rank_promotion("raise"):
        found = jax.jit(lambda x, y: attention(x, y, y, **options))(x, y)
        jax.grad(lambda x, y: attention(x, y, y, **options).sum(), argnums=(0, 1))(x, y)
        _, pullback = attention_vjp(x, y, y, **options)
        pullback(x)
        merge_states(*[partial_attention(x, y, y, **options)] * 2)
    np.testing.assert_allclose(found, plain, rtol=1e-6)


def test_half_gradients_of_a_bias_that_items_share_are_summed_in_float32():
    """Summed in bfloat16, thousands of items would lose what each one adds."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((8192, 1, 32, 4)).astype("f") for _ in range(3)]
    arrays[2] += np.arange(32)[:, np.newaxis] % 8
    half = [jnp.asarray(array, jnp.bfloat16) for array in (*arrays, np.zeros((32, 32)))]

    @jax.jit
    def gradient(query, key, value, bias):
        def total(bias):
            found = attention(query, key, value, bias=bias, block_size=(32, 32))
            return found.astype(jnp.float32).sum()

        return jax.grad(total)(bias)

    exact = np.asarray(gradient(*(array.astype(jnp.float32) for array in half)))
    ulp = 2.0 ** (np.floor(np.log2(np.abs(exact).max())) - 7)
    assert np.abs(np.asarray(gradient(*half), np.float32) - exact).max() <= 0.75 * ulp


@pytest.mark.parametrize(
    "option",
    [
        lambda traced: {"causal": traced},
        lambda traced: {"window": (traced, 0)},
        lambda traced: {"softcap": traced},
        lambda traced: {"dropout": Dropout(traced, 1)},
    ],
)
def test_a_traced_option_that_must_be_known_is_told_to_be_static(option):
    x = jnp.ones((1, 2, 3))
    with pytest.raises(
        TypeError, match=r"got an array of jax.*: make it static, .*static_argnames"
    ):
        jax.jit(lambda traced: attention(x, x, x, **option(traced)))(1)
