"""Shapes, layouts, heads and what broadcasts; axes of size 0."""

from __future__ import annotations

import numpy as np
import pytest

from .accuracy import assert_accurate, reference_of
from .backends import Backend
from .problems import make_inputs
from .running import attend


def check(backend: Backend, tilings, inputs, **options):
    """Compare with the oracle for every tiling; return the last output and lse."""
    reference = reference_of(**inputs, **options)
    for block_size in tilings:
        output, lse = attend(backend, **inputs, **options, block_size=block_size)
        assert_accurate(output, lse, reference)
    return output, lse


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (1, 2, 1, 2)], ids=str)
def test_any_number_of_batch_axes(backend: Backend, tilings, batch):
    output, lse = check(backend, tilings, make_inputs(batch=batch))
    assert output.shape == (*batch, 2, 5, 3)
    assert lse.shape == (*batch, 2, 5)


def test_batch_axes_broadcast(backend: Backend, tilings):
    rng = np.random.default_rng(0)
    shapes = [(2, 1, 2, 5, 4), (3, 2, 7, 4), (2, 3, 2, 7, 3)]
    inputs = dict(
        zip(
            ("query", "key", "value"),
            (rng.standard_normal(shape).astype(np.float32) for shape in shapes),
            strict=True,
        )
    )
    output, _ = check(backend, tilings, inputs)
    assert output.shape == (2, 3, 2, 5, 3)
    inputs["value"] = inputs["value"][1, 0]  # (2, 7, 3): query and key alone have the batch
    check(backend, tilings, inputs)
    inputs["query"] = inputs["query"][0, 0]  # the batch is that of the key
    check(backend, tilings, inputs)


def test_two_dimensional_inputs_are_one_head(backend: Backend, tilings):
    inputs = {name: array[0] for name, array in make_inputs(batch=(), heads=1).items()}
    mask = np.random.default_rng(0).random((5, 7)) < 0.7
    output, lse = check(backend, tilings, inputs, mask=mask, sinks=np.zeros(1, np.float32))
    assert output.shape == (5, 3)
    assert lse.shape == (5,)


@pytest.mark.parametrize("flat", ["query", "key and value", "key", "value"])
def test_lower_rank_is_padded_with_leading_axes(backend: Backend, tilings, flat):
    heads = 1 if flat in ("key", "value") else 4
    inputs = make_inputs(batch=(2,), heads=heads, key_heads=1)
    if flat == "query":
        inputs["query"] = inputs["query"][0, 0]
    else:
        for name in flat.split(" and "):
            inputs[name] = inputs[name][0, 0]
    output, _ = check(backend, tilings, inputs)
    assert output.shape == (2, 1 if flat == "query" else heads, 5, 3)


def test_layout_blhd_is_bhld_with_axes_swapped(backend: Backend, tilings):
    """Inputs and output (..., L, H, D); mask, bias and lse keep heads first."""
    for batch in backend.few([(2,), (), (2, 2)], 1):
        inputs = make_inputs(batch=batch, heads=4, key_heads=2)
        options = {"mask": np.random.default_rng(0).random((4, 5, 7)) < 0.7}
        options["bias"] = np.random.default_rng(1).standard_normal((4, 1, 7)).astype(np.float32)
        swapped = {name: array.swapaxes(-3, -2) for name, array in inputs.items()}
        output, lse = check(backend, tilings, swapped, layout="blhd", **options)
        assert output.shape == (*batch, 5, 4, 3)
        assert lse.shape == (*batch, 4, 5)
        plain, plain_lse = check(backend, tilings, inputs, **options)
        np.testing.assert_allclose(output.swapaxes(-3, -2), plain, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(lse, plain_lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 2), (6, 2), (6, 3), (5, 1), (3, 3)])
def test_query_head_reads_key_head_by_integer_division(backend: Backend, heads, key_heads):
    """Query head h reads key/value head h // (Hq // Hkv): each value tells its head."""
    inputs = make_inputs(batch=(2,), heads=heads, key_heads=key_heads, value_width=1)
    inputs["value"][...] = np.arange(key_heads)[:, None, None]
    output, _ = attend(backend, **inputs, block_size=(3, 2))
    expected = np.arange(heads) // (heads // key_heads)
    np.testing.assert_allclose(output[0, :, 0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("head_axis", [1, 4])
@pytest.mark.parametrize("batch_axis", [1, 2])
def test_grouped_heads_with_masks_and_biases_of_query_heads(
    backend: Backend, tilings, head_axis, batch_axis
):
    """Their head axis is that of the query; a batch axis as long as Hkv stays a batch axis."""
    inputs = make_inputs(batch=(2,), heads=4, key_heads=2)
    rng = np.random.default_rng(0)
    shape = (batch_axis, head_axis, 5, 7)
    check(backend, tilings, inputs, mask=rng.random(shape) < 0.6)
    check(backend, tilings, inputs, bias=rng.standard_normal(shape).astype(np.float32))


MASK_SHAPES = [
    *((), (5, 1), (7,), (2, 1, 1), (3, 1, 5, 1), (1,), (1, 7), (5, 7), (1, 1), (2, 5, 7)),
    *((1, 5, 1), (3, 1, 1, 1), (3, 2, 1, 7), (1, 1, 5, 1), (3, 2, 5, 7)),
]


def mask_shapes(backend: Backend, _config) -> list[tuple[int, ...]]:
    return backend.few(MASK_SHAPES, 5)


BACKEND_AXES = {"shape": mask_shapes}


def test_mask_and_bias_broadcast_from_the_right(backend: Backend, tilings, shape):
    inputs = make_inputs(batch=(3,))
    rng = np.random.default_rng(0)
    mask = np.asarray(rng.random(shape) < 0.6)
    bias = np.asarray(rng.standard_normal(shape), dtype=np.float32)
    check(backend, tilings, inputs, mask=mask, bias=bias)


def test_value_width_is_its_own(backend: Backend, tilings):
    """The scale comes from the key width, the output width from the value."""
    for width, value_width in ((4, 1), (1, 9), (9, 4)):
        output, _ = check(backend, tilings, make_inputs(width=width, value_width=value_width))
        assert output.shape[-1] == value_width


EMPTY = {
    "no batch": {"batch": (0,)},
    "no batch among others": {"batch": (2, 0, 3)},
    "no queries": {"queries": 0},
    "no keys": {"keys": 0},
    "no queries and no keys": {"queries": 0, "keys": 0},
    "no width": {"width": 0},
    "no value width": {"value_width": 0},
    "no widths": {"width": 0, "value_width": 0},
    "nothing": {"batch": (0,), "queries": 0, "keys": 0, "width": 0, "value_width": 0},
}


@pytest.mark.parametrize("axes", EMPTY)
def test_axes_of_size_zero(backend: Backend, dtype, tilings, axes):
    """Rows without keys are empty rows; a width of 0 gives scores of 0; no axis is refused."""
    inputs = make_inputs(**EMPTY[axes], heads=4, key_heads=2, dtype=dtype)
    check(backend, tilings, inputs)
    if not backend.compiled:
        check(backend, tilings, inputs, sinks=np.zeros(4, dtype=inputs["query"].dtype))


@pytest.mark.parametrize("axes", EMPTY)
def test_axes_of_size_zero_with_every_option(backend: Backend, axes):
    inputs = make_inputs(**EMPTY[axes])
    *batch, heads, queries, _ = inputs["query"].shape
    keys = inputs["key"].shape[-2]
    scores = (*batch, heads, queries, keys)
    options = {
        "mask": np.ones(scores, dtype=bool),
        "bias": np.zeros(scores, dtype=np.float32),
        "causal": True,
        "window": (3, 0),
        "query_offset": "end",
        "key_lengths": np.full(batch, keys),
        "query_lengths": np.full(batch, queries),
        "softcap": 3.0,
        "sinks": np.zeros(heads, dtype=np.float32),
    }
    check(backend, [(3, 2)], inputs, **options)
    dropped = attend(backend, **inputs, **options, dropout=(0.5, 1))
    assert dropped.output.shape == (*batch, heads, queries, inputs["value"].shape[-1])


def test_no_width_makes_the_mean_whatever_the_scale(backend: Backend):
    inputs = make_inputs(width=0)
    for scale in (None, 2.0, 0.0):
        output, lse = attend(backend, **inputs, scale=scale)
        mean = inputs["value"].mean(-2, keepdims=True)
        np.testing.assert_allclose(output, np.broadcast_to(mean, output.shape), rtol=1e-5)
        np.testing.assert_allclose(lse, np.full(lse.shape, np.log(7)), rtol=1e-6)


@pytest.mark.parametrize(
    "names", [["query"], ["key"], ["value"], ["query", "key"], ["value", "key"]]
)
@pytest.mark.parametrize("queries", [1, 4, 40])
def test_any_of_the_inputs_may_have_all_the_batch_axes(backend: Backend, names, queries):
    """Also in calls so small that NumPy takes the short way."""
    inputs = make_inputs(batch=(3,), heads=2, queries=queries, keys=5, width=4)
    for name in set(inputs) - set(names):
        inputs[name] = inputs[name][:1]
    output, lse = attend(backend, **inputs)
    assert_accurate(output, lse, reference_of(**inputs))
