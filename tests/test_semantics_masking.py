"""What is masked cannot be felt; what is attended is; and a row without keys is empty."""

from __future__ import annotations

import numpy as np
import pytest

from .accuracy import assert_accurate, assert_near, reference_of
from .backends import Backend
from .dtypes import numpy_dtype
from .problems import allowed_by, make_inputs, restrictions
from .running import attend

WAYS = restrictions()
POISONS = (np.nan, np.inf, -np.inf)


def attend_all(backend: Backend, tilings, inputs, **options):
    """Yield the results for every tiling."""
    for block_size in tilings:
        yield attend(backend, **inputs, **options, block_size=block_size)


def in_dtype(options, dtype):
    """Return options with their bias in that dtype."""
    if "bias" not in options:
        return options
    return {**options, "bias": options["bias"].astype(numpy_dtype(dtype))}


@pytest.mark.parametrize("way", WAYS)
def test_restrictions_agree_with_the_oracle(backend: Backend, dtype, tilings, way):
    """Each way to forbid pairs, alone and all together."""
    inputs, options = make_inputs(dtype=dtype), in_dtype(WAYS[way], dtype)
    reference = reference_of(**inputs, **options)
    for output, lse in attend_all(backend, tilings, inputs, **options):
        assert_accurate(output, lse, reference)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("way", WAYS)
def test_masked_keys_and_values_cannot_be_felt(backend: Backend, tilings, way, poison):
    """Garbage in one key: the rows that do not attend it are as without it."""
    inputs = make_inputs()
    options = in_dtype(WAYS[way], "float32")
    reference = reference_of(**inputs, **options)
    allowed = allowed_by(inputs, options)
    unseen_by_some = np.flatnonzero(~allowed.all((0, 1, 2)))
    for key in unseen_by_some[[0, -1]]:
        poisoned = {name: array.copy() for name, array in inputs.items()}
        poisoned["key"][:, :, key] = poison
        poisoned["value"][:, :, key] = poison
        blind = ~allowed[..., key]
        for output, lse in attend_all(backend, tilings, poisoned, **options):
            allowance = reference.output_allowance
            assert_near(output[blind], reference.output[blind], allowance, "output")
            assert_near(lse[blind], reference.lse[blind], reference.lse_allowance, "lse")


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("way", [way for way in WAYS if "bias" not in WAYS[way]])
def test_masked_bias_cannot_be_felt(backend: Backend, tilings, way, poison):
    """Garbage in the bias of pairs that something else forbids changes nothing."""
    inputs, options = make_inputs(), WAYS[way]
    bias = np.random.default_rng(2).standard_normal((2, 2, 5, 7)).astype(np.float32)
    reference = reference_of(**inputs, **options, bias=bias)
    bias[~allowed_by(inputs, options)] = poison
    for output, lse in attend_all(backend, tilings, inputs, **options, bias=bias):
        assert_accurate(output, lse, reference)


@pytest.mark.parametrize("poisoned", ["query", "key", "bias"])
def test_nan_that_is_attended_makes_its_rows_nan(backend: Backend, tilings, poisoned):
    """In the query, an attended key or an allowed bias: that row's output and lse, no other."""
    inputs = make_inputs()
    options = {"mask": np.random.default_rng(3).random((2, 1, 5, 7)) < 0.6}
    options["bias"] = np.zeros((2, 2, 5, 7), dtype=np.float32)
    reference = reference_of(**inputs, **options)
    allowed = allowed_by(inputs, options)
    felt = np.zeros((2, 2, 5), dtype=bool)
    if poisoned == "query":
        inputs["query"][1, 0, 2, 1] = np.nan
        felt[1, 0, 2] = True
    elif poisoned == "key":
        inputs["key"][1, 0, 2, 1] = np.nan
        felt[1, 0] = allowed[1, 0, :, 2]
    else:
        row, key = np.argwhere(allowed[1, 0])[0]
        options["bias"][1, 0, row, key] = np.nan
        felt[1, 0, row] = True
    assert felt.any()
    assert not felt.all()
    for output, lse in attend_all(backend, tilings, inputs, **options):
        assert np.isnan(output[felt]).all()
        assert np.isnan(lse[felt]).all()
        assert_near(output[~felt], reference.output[~felt], reference.output_allowance, "output")
        assert_near(lse[~felt], reference.lse[~felt], reference.lse_allowance, "lse")


@pytest.mark.parametrize("poison", POISONS)
def test_value_that_is_attended_is_felt_in_its_column_alone(backend: Backend, tilings, poison):
    """In the rows that attend it, and the lse never sees a value."""
    inputs = make_inputs()
    options = {"mask": np.random.default_rng(3).random((2, 1, 5, 7)) < 0.6}
    reference = reference_of(**inputs, **options)
    inputs["value"][1, 0, 2, 1] = poison
    felt = np.zeros(reference.output.shape, dtype=bool)
    felt[1, 0, :, 1] = allowed_by(inputs, options)[1, 0, :, 2]
    assert felt.any()
    for output, lse in attend_all(backend, tilings, inputs, **options):
        np.testing.assert_array_equal(output[felt], np.full(felt.sum(), poison))
        assert_near(output[~felt], reference.output[~felt], reference.output_allowance, "output")
        assert_near(lse, reference.lse, reference.lse_allowance, "lse")


def test_infinite_values_that_meet(backend: Backend, tilings):
    """Both signs make NaN, infinity with NaN makes NaN, and neither needs a weight to show."""
    inputs = make_inputs(batch=(1,), heads=1, queries=3, keys=5, value_width=4)
    inputs["query"][...] = 1
    inputs["key"][...] = 0
    inputs["key"][..., 3, :] = -1e4  # exp underflows to a weight of exactly 0
    inputs["value"][0, 0, 1] = [np.inf, np.inf, np.inf, 1]
    inputs["value"][0, 0, 3] = [1, -np.inf, np.nan, -np.inf]
    for output, _ in attend_all(backend, tilings, inputs):
        np.testing.assert_array_equal(output[0, 0], [[np.inf, np.nan, np.nan, -np.inf]] * 3)


EMPTY = {
    "mask": {"mask": np.array([[True], [False], [True], [True], [True]])},
    "bias": {"bias": np.array([[0], [-np.inf], [0], [0], [0]], dtype=np.float32)},
    "mask and bias": {
        "mask": np.arange(7) < np.array([[7], [3], [7], [7], [7]]),
        "bias": np.where(np.arange(7) < np.array([[0], [3], [0], [0], [0]]), -np.inf, 0).astype(
            np.float32
        ),
    },
    "causal": {"causal": True, "query_offset": -2},
    "window": {"window": (0, 0), "query_offset": 3},
    "window on the left": {"window": (2, None), "query_offset": 6},
    "key_lengths": {"key_lengths": np.array([0, 7])},
    "query_lengths": {"query_lengths": np.array([1, 3])},
    "window and lengths": {"window": (1, 0), "query_offset": "start", "key_lengths": 2},
}


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("way", EMPTY)
def test_empty_rows(backend: Backend, dtype, tilings, way, with_sinks):
    """Output 0 and lse -inf, or the sink, whatever the row's query holds."""
    inputs, options = make_inputs(dtype=dtype), in_dtype(EMPTY[way], dtype)
    empty = ~allowed_by(inputs, options).any(-1)
    assert empty.any()
    assert not empty.all()
    sinks = np.array([0.25, -1.5])
    if with_sinks:
        options = {**options, "sinks": sinks.astype(numpy_dtype(dtype))}
    reference = reference_of(**inputs, **options)
    expected = np.broadcast_to(sinks[:, None] if with_sinks else -np.inf, empty.shape)
    for poison in (0.0, np.nan, np.inf):
        inputs["query"][empty] = poison
        for output, lse in attend_all(backend, tilings, inputs, **options):
            assert (output[empty] == 0).all()
            np.testing.assert_array_equal(lse[empty], expected[empty])
            assert_near(
                output[~empty], reference.output[~empty], reference.output_allowance, "output"
            )


def test_emptiness_is_what_is_allowed_not_the_size_of_scores(backend: Backend, tilings):
    """A finite bias, however negative, is not masking: the weights are as without it."""
    inputs = make_inputs()
    reference = reference_of(**inputs)
    for size in (-1e4, -3e38):
        bias = np.full((2, 1, 5, 1), size, dtype=np.float32)
        for output, lse in attend_all(backend, tilings, inputs, bias=bias):
            assert np.isfinite(lse).all()
            assert (np.abs(output).sum(-1) > 0).all()
            if size == -3e38:  # no score shows beside it: the mean of the values
                mean = np.broadcast_to(inputs["value"].mean(-2, keepdims=True), output.shape)
                assert_near(output, mean, reference.output_allowance, "output")


def test_mask_before_softcap_would_give_masked_keys_weight(backend: Backend, tilings):
    """The softcap bounds the scores, then pairs are masked, by the bias as by the mask."""
    inputs = make_inputs()
    mask = np.random.default_rng(4).random((5, 7)) < 0.5
    mask[:, 0] = True
    as_bias = np.where(mask, 0, -np.inf).astype(np.float32)
    for options in ({"mask": mask}, {"bias": as_bias}):
        reference = reference_of(**inputs, **options, softcap=0.5)
        for output, lse in attend_all(backend, tilings, inputs, **options, softcap=0.5):
            assert_accurate(output, lse, reference)


def test_scores_of_plus_infinity_make_the_row_nan(backend: Backend, tilings):
    """After the softcap and the bias; a softcap makes an infinite product finite."""
    inputs = make_inputs(batch=(1,), heads=1, queries=3, keys=5)
    inputs["query"][...] = np.array([1, -1, 1])[:, None]
    inputs["key"][0, 0, 2] = np.inf
    options = {"mask": np.array([[True], [True], [False]]) | (np.arange(5) != 2)}
    for output, lse in attend_all(backend, tilings, inputs, **options):
        # Row 0 scores +inf there, row 1 -inf, row 2 does not attend it.
        np.testing.assert_array_equal(np.isnan(output[0, 0]).any(-1), [True, False, False])
        np.testing.assert_array_equal(np.isnan(lse[0, 0]), [True, False, False])
        assert np.isfinite(lse[0, 0, 1:]).all()
    reference = reference_of(**inputs, **options, softcap=2.0)
    assert np.isfinite(reference.lse).all()
    for output, lse in attend_all(backend, tilings, inputs, **options, softcap=2.0):
        assert_accurate(output, lse, reference)
    bias = np.zeros((3, 5), dtype=np.float32)
    bias[1, 0] = np.inf
    inputs = make_inputs(batch=(1,), heads=1, queries=3, keys=5)
    for output, lse in attend_all(backend, tilings, inputs, bias=bias):
        np.testing.assert_array_equal(np.isnan(output[0, 0]).all(-1), [False, True, False])
        np.testing.assert_array_equal(np.isnan(lse[0, 0]), [False, True, False])


def test_row_whose_scores_are_all_minus_infinity_is_not_empty(backend: Backend, tilings):
    """0/0 and log 0: output NaN, lse -inf; with a sink, which takes all the weight, 0."""
    inputs = make_inputs(batch=(1,), heads=1, queries=2, keys=3)
    inputs["query"][...] = np.array([1, -1])[:, None]
    inputs["key"][...] = -np.inf
    mask = np.array([[True], [False]])
    for output, lse in attend_all(backend, tilings, inputs, mask=mask):
        assert np.isnan(output[0, 0, 0]).all()
        assert (output[0, 0, 1] == 0).all()
        np.testing.assert_array_equal(lse[0, 0], [-np.inf, -np.inf])
    sinks = np.array([0.5], dtype=np.float32)
    for output, lse in attend_all(backend, tilings, inputs, mask=mask, sinks=sinks):
        assert (output == 0).all()
        np.testing.assert_array_equal(lse[0, 0], [0.5, 0.5])
