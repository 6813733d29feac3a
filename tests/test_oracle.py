"""The oracle and the rule of accuracy, against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from . import oracle
from .accuracy import assert_near, reference_of
from .dropout_reference import keep_mask
from .reported_cases import load_cases
from .strategies import RandomChooser, random_call

CALLS = [
    case
    for case in load_cases()
    if not case.states and "raises" not in case.expect and case.transform is None
]


def oracle_options(case):
    """Return a case's options as the oracle takes them; dropout has its own test."""
    return {
        name: value for name, value in case.options.items() if name not in ("block_size", "dropout")
    }


@pytest.mark.parametrize("case", CALLS, ids=lambda case: case.id)
def test_oracle_gives_what_the_reported_cases_expect(case):
    output, lse = oracle.attention(**case.inputs, **oracle_options(case))
    checked = 0
    for name, found in (("output", output), ("lse", lse)):
        if name in case.expect:
            np.testing.assert_allclose(found, case.expect[name], case.rtol, case.atol)
            checked += 1
    for kind, cotangents in (
        ("gradients", (np.ones_like(output), None)),
        ("lse_gradients", (None, np.ones_like(lse))),
    ):
        for name, expected in case.expect.get(kind, {}).items():
            found = oracle.vjp(**case.inputs, **oracle_options(case), **_named(cotangents))[name]
            np.testing.assert_allclose(found, expected, case.rtol, case.atol)
            checked += 1
    if "output_or_zero" in case.expect:
        checked += 1
        weights = oracle.attention(
            **case.inputs, **oracle_options(case), keep=np.ones((1, 1, 1, 2), bool), rate=0.5
        ).output
        np.testing.assert_allclose(weights, case.expect["output_or_zero"], case.rtol, case.atol)
    assert checked


def _named(cotangents):
    return dict(zip(("cotangent", "lse_cotangent"), cotangents, strict=True))


def test_one_query_by_hand():
    """Scores ln 3 and 0: weights 3/4 and 1/4, denominator 4."""
    output, lse = oracle.attention(
        np.array([[1.0]]), np.array([[np.log(3)], [0.0]]), np.array([[4.0, 0.0], [0.0, 4.0]])
    )
    np.testing.assert_allclose(output, [[3, 1]])
    np.testing.assert_allclose(lse, [np.log(4)])


def test_sink_by_hand():
    """Scores ln 3, 0 and a sink of ln 4: of the denominator 8 the sink takes half."""
    output, lse = oracle.attention(
        np.array([[1.0]]),
        np.array([[np.log(3)], [0.0]]),
        np.array([[8.0], [0.0]]),
        sinks=np.log([4.0]),
    )
    np.testing.assert_allclose(output, [[3]])
    np.testing.assert_allclose(lse, [np.log(8)])


def test_rows_of_infinite_scores_by_hand():
    """All scores -inf: 0/0 and log 0. One +inf: no softmax. With a sink: it takes all."""
    query = np.array([[1.0], [-1.0]])
    key, value = np.array([[-np.inf]]), np.array([[5.0]])
    output, lse = oracle.attention(query, key, value)
    np.testing.assert_array_equal(output, [[np.nan], [np.nan]])
    np.testing.assert_array_equal(lse, [-np.inf, np.nan])
    output, lse = oracle.attention(query[:1], key, value, sinks=np.array([0.5]))
    np.testing.assert_array_equal(output, [[0]])
    np.testing.assert_array_equal(lse, [0.5])


def test_infinite_values_by_hand():
    """Whatever the weight: +inf, -inf, NaN where both meet, and only in their column."""
    query, key = np.array([[1.0]]), np.array([[0.0], [-2000.0]])
    value = np.array([[1.0, np.inf, 1.0, np.nan], [np.inf, -np.inf, 1.0, 1.0]])
    output, _ = oracle.attention(query, key, value)
    np.testing.assert_array_equal(output, [[np.inf, np.nan, 1, np.nan]])


def test_window_and_causal_by_hand():
    allowed = oracle.allowed_pairs((4, 5), causal=True, window=(1, 3), query_offset="end")
    by_hand = [
        [1, 1, 0, 0, 0],  # at position 1
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    np.testing.assert_array_equal(allowed, np.array(by_hand, dtype=bool))


def test_end_follows_both_lengths_by_hand():
    """Item 0: 3 valid keys, 2 valid queries: the first stands at 1. Item 1: 1 and 3: at -2."""
    allowed = oracle.allowed_pairs(
        (2, 1, 3, 4),
        causal=True,
        query_offset="end",
        query_lengths=np.array([2, 3]),
        key_lengths=np.array([3, 1]),
    )
    by_hand = [
        [[1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]],
        [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0]],
    ]
    np.testing.assert_array_equal(allowed[:, 0], np.array(by_hand, dtype=bool))


def test_keep_mask_has_its_rate_and_depends_on_everything():
    shape = (2, 3, 40, 50)
    kept = keep_mask(0.3, 7, shape)
    assert kept.mean() == pytest.approx(0.7, abs=4 * np.sqrt(0.21 / kept.size))
    assert not np.array_equal(kept, keep_mask(0.3, 8, shape))
    assert not np.array_equal(kept, keep_mask(0.3, 7 + 2**32, shape))
    np.testing.assert_array_equal(kept[:1, :2, :5, :9], keep_mask(0.3, 7, (1, 2, 5, 9)))
    assert keep_mask(0.0, 7, shape).all()
    assert not keep_mask(1.0, 7, shape).any()


@pytest.mark.parametrize("number", range(60))
def test_gradients_of_the_oracle_are_its_differences(number):
    """The explicit formula against central differences along a random direction."""
    call = random_call(RandomChooser(number), ["float64"], poison=False)
    rng = np.random.default_rng(number)
    arguments = {**call.inputs, **call.expected}
    exact = oracle.attention(**arguments)
    cotangent = rng.standard_normal(exact.output.shape)
    lse_cotangent = np.where(np.isfinite(exact.lse), rng.standard_normal(exact.lse.shape), 0)

    def weighed(arguments):
        output, lse = oracle.attention(**arguments)
        return (output * cotangent).sum() + (
            np.where(np.isfinite(lse), lse, 0) * lse_cotangent
        ).sum()

    gradients = oracle.vjp(**arguments, cotangent=cotangent, lse_cotangent=lse_cotangent)
    for name, gradient in gradients.items():
        argument = np.asarray(arguments[name]).astype(np.float64)
        assert gradient.shape == argument.shape
        direction = rng.standard_normal(argument.shape)
        step = 1e-5 * direction
        along = weighed({**arguments, name: argument + step})
        against = weighed({**arguments, name: argument - step})
        expected = (along - against) / 2e-5
        size = np.abs(gradient[np.isfinite(argument)]).max(initial=1.0)
        np.testing.assert_allclose((gradient * direction).sum(), expected, atol=1e-6 * size * 30)


def test_accuracy_rule_refuses_a_small_fault():
    """A result that is off by four units in the last place fails; the honest one passes."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 1, 2, 8, 4)).astype(np.float32)
    reference = reference_of(query, key, value)
    honest = oracle.attention(query, key, value, precision=np.float32).output
    assert_near(honest, reference.output, reference.output_allowance, "output")
    wrong = honest.copy()
    wrong[0, 0, 0, 0] += 8e-7 * np.abs(value).max()
    with pytest.raises(AssertionError, match="error"):
        assert_near(wrong, reference.output, reference.output_allowance, "output")
