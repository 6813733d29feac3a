"""The kit's oracle against arithmetic of 60 digits, and against the tests' own oracle."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from portable_attention import Dropout
from portable_attention.conformance import oracle
from portable_attention.conformance.cases import bell, bits, counts, find
from portable_attention.conformance.kept import kept_pairs

from .. import oracle as tests_oracle
from ..dropout_reference import keep_mask
from ..strategies import RandomChooser, random_call

DTYPES = ("float16", "bfloat16", "float32", "float64")
DIGITS = 60


def exactly(query, key, value, *, scale=None, softcap=None, bias=None, sinks=None, allowed=None,
            kept=None, rate=0.0):  # fmt: skip
    """Return output and lse of one head: numbers of many digits in, numbers of many digits out."""
    rows, width = len(query), len(query[0])
    scale = 1 / mpmath.sqrt(width) if scale is None else mpmath.mpf(scale)
    output, lses = [], []
    for i in range(rows):
        denominator = mpmath.exp(sinks) if sinks is not None else mpmath.mpf(0)
        total = [mpmath.mpf(0)] * len(value[0])
        for j in range(len(key)):
            if allowed is not None and not allowed[i][j]:
                continue
            score = scale * mpmath.fdot(query[i], key[j])
            if softcap is not None:
                score = softcap * mpmath.tanh(score / softcap)
            if bias is not None:
                score += bias[i][j]
            weight = mpmath.exp(score)
            denominator += weight
            if kept is None or kept[i][j]:
                total = [t + weight * v / (1 - rate) for t, v in zip(total, value[j], strict=True)]
        output.append([t / denominator if denominator else mpmath.mpf(0) for t in total])
        lses.append(mpmath.log(denominator) if denominator else mpmath.mpf("-inf"))
    return output, lses


def many_digits(array):
    return [[mpmath.mpf(float(number)) for number in row] for row in array]


OPTIONS = {
    "plain": {},
    "scale": {"scale": -0.3},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": True},
    "sinks": {"sinks": True},
    "mask": {"mask": True},
    "causal": {"causal": True, "query_offset": "end"},
    "dropout": {"dropout": {"rate": 0.4, "seed": 11}},
    "everything": {"scale": 0.4, "softcap": 3.0, "bias": True, "sinks": True, "mask": True,
                   "causal": True, "query_offset": 2, "dropout": {"rate": 0.3, "seed": 5}},
}  # fmt: skip


def problem(chosen):
    """Return the arrays of a call of one head, and its options."""
    arrays = {
        "query": bell((3, 4), 1, "float64").make(),
        "key": bell((5, 4), 2, "float64").make(),
        "value": bell((5, 3), 3, "float64").make(),
    }
    options = dict(chosen)
    if "bias" in options:
        options["bias"] = bell((3, 5), 4, "float64").make()
    if "mask" in options:
        mask = bits((3, 5), 5).make()
        mask[1] = False  # an empty row
        options["mask"] = mask
    if "sinks" in options:
        options["sinks"] = bell((1,), 6, "float64").make()
    return arrays, options


def in_many_digits(arrays, options):
    steps = oracle.steps_of(**arrays, **options)  # for what is allowed and kept alone
    own = {name: options.get(name) for name in ("scale", "softcap")}
    if options.get("bias") is not None:
        own["bias"] = many_digits(options["bias"])
    if options.get("sinks") is not None:
        own["sinks"] = mpmath.mpf(float(options["sinks"][0]))
    rate = mpmath.mpf(float(options.get("dropout", {}).get("rate", 0.0)))
    numbers = [many_digits(arrays[name]) for name in ("query", "key", "value")]
    return exactly(*numbers, allowed=steps.allowed[0], kept=steps.kept[0], rate=rate, **own)


@pytest.mark.parametrize("name", OPTIONS)
def test_forward_against_sixty_digits(name):
    arrays, options = problem(OPTIONS[name])
    with mpmath.workdps(DIGITS):
        output, lse = in_many_digits(arrays, options)
        found = oracle.attention(**arrays, **options)
        np.testing.assert_allclose(found.output, np.array(output, float), rtol=1e-13, atol=1e-15)
        np.testing.assert_allclose(found.lse, np.array(lse, float), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_against_difference_quotients_of_sixty_digits(name):
    """Steps of 1e-20 leave quotients with some 20 right digits."""
    arrays, options = problem(OPTIONS[name])
    d_output, d_lse = bell((3, 3), 7, "float64").make(), bell((3,), 8, "float64").make()
    found = oracle.gradients(**arrays, d_output=d_output, d_lse=d_lse, **options)
    differentiable = {**arrays, **{n: options[n] for n in ("bias", "sinks") if n in options}}
    with mpmath.workdps(DIGITS):
        for which, array in differentiable.items():
            for index in [(0,) * array.ndim, tuple(n - 1 for n in array.shape)]:
                quotient = _quotient(arrays, options, which, index, d_output, d_lse)
                np.testing.assert_allclose(
                    found[which][index], quotient, rtol=1e-12, atol=1e-15, err_msg=which
                )


def _quotient(arrays, options, which, index, d_output, d_lse):
    step = mpmath.mpf(10) ** -20
    steps = oracle.steps_of(**arrays, **options)
    rate = mpmath.mpf(float(options.get("dropout", {}).get("rate", 0.0)))

    def loss(shift):
        numbers = {name: many_digits(arrays[name]) for name in arrays}
        own = {name: options.get(name) for name in ("scale", "softcap")}
        if options.get("bias") is not None:
            numbers["bias"] = many_digits(options["bias"])
        sink = None
        if options.get("sinks") is not None:
            sink = mpmath.mpf(float(options["sinks"][0]))
        if which == "sinks":
            sink += shift
        else:
            numbers[which][index[0]][index[1]] += shift
        output, lse = exactly(
            numbers["query"], numbers["key"], numbers["value"], bias=numbers.get("bias"),
            sinks=sink, allowed=steps.allowed[0], kept=steps.kept[0], rate=rate, **own,
        )  # fmt: skip
        total = mpmath.mpf(0)
        for i, row in enumerate(output):
            total += sum(mpmath.mpf(float(d)) * o for d, o in zip(d_output[i], row, strict=True))
            if mpmath.isfinite(lse[i]):
                total += mpmath.mpf(float(d_lse[i])) * lse[i]
        return total

    return float((loss(step) - loss(-step)) / (2 * step))


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_random_calls_as_the_other_oracle(first):
    for number in range(first, first + 50):
        call = random_call(RandomChooser(number), DTYPES)
        options = dict(call.options)
        if "dropout" in options:
            options["dropout"] = Dropout(*options["dropout"])
        wanted = tests_oracle.attention(**call.inputs, **call.expected)
        found = oracle.attention(**call.inputs, **options)
        for given, right in zip(found, wanted, strict=True):
            np.testing.assert_allclose(given, right, rtol=1e-10, atol=1e-12, err_msg=str(number))


def test_random_gradients_as_the_other_oracle():
    for number in range(60):
        call = random_call(RandomChooser(number), DTYPES)
        if not all(np.isfinite(array).all() for array in call.inputs.values()):
            continue  # the sign of an infinite gradient is nobody's rule
        options = dict(call.options)
        if "dropout" in options:
            options["dropout"] = Dropout(*options["dropout"])
        shape = oracle.attention(**call.inputs, **options)
        rng = np.random.default_rng(number)
        upstream = rng.standard_normal(shape.output.shape), rng.standard_normal(shape.lse.shape)
        wanted = tests_oracle.vjp(
            **call.inputs, cotangent=upstream[0], lse_cotangent=upstream[1], **call.expected
        )
        found = oracle.gradients(*call.inputs.values(), *upstream, **options)
        for name, right in wanted.items():
            np.testing.assert_allclose(
                found[name], right, rtol=1e-9, atol=1e-11, err_msg=f"{number} {name}"
            )


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("seed", [0, 7, -1, 2**63])
def test_kept_pairs_as_the_other_reference(rate, seed):
    shape = (2, 3, 4, 5, 6)
    np.testing.assert_array_equal(kept_pairs(rate, seed, shape), keep_mask(rate, seed, shape))


def test_lengths_and_offsets_of_items():
    arrays = find("lengths/causal-end").call().arguments
    lengths = counts(7, 4, 3).make()
    whole = oracle.attention(**arrays)
    for item, length in enumerate(lengths):
        alone = oracle.attention(
            arrays["query"][item], arrays["key"][item, :, :length],
            arrays["value"][item, :, :length], causal=True, query_offset=int(length) - 3,
        )  # fmt: skip
        np.testing.assert_allclose(whole.output[item], alone.output, rtol=1e-13)
