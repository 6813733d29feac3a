"""The command line's float64 oracle against the tests' own, which shares no line with it."""

from __future__ import annotations

import numpy as np
import pytest

from portable_attention import Dropout
from portable_attention.cli import oracle as cli_oracle

from .. import oracle
from ..strategies import RandomChooser, random_call

DTYPES = ("float16", "bfloat16", "float32", "float64")


def exact(call):
    options = dict(call.options)
    if "dropout" in options:
        options["dropout"] = Dropout(*options["dropout"])
    return cli_oracle.exact_attention(**call.inputs, **options)


@pytest.mark.parametrize("scores_at_once", [1 << 22, 8])
@pytest.mark.parametrize("first", range(0, 300, 50))
def test_random_calls(first, scores_at_once, monkeypatch):
    monkeypatch.setattr(cli_oracle, "_SCORES_AT_ONCE", scores_at_once)
    for number in range(first, first + 50):
        call = random_call(RandomChooser(number), DTYPES)
        wanted = oracle.attention(**call.inputs, **call.expected)
        for given, right in zip(exact(call), wanted, strict=True):
            np.testing.assert_allclose(
                given, right, rtol=1e-10, atol=1e-12, err_msg=f"{number}: {call}"
            )


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int64", "uint64"])
def test_counts_of_any_integer_dtype(dtype):
    inputs = dict.fromkeys(("query", "key", "value"), np.ones((2, 1, 3, 2)))
    given = np.array([3, 1], dtype=dtype)
    _, lse = cli_oracle.exact_attention(**inputs, key_lengths=given, scale=0.0)
    np.testing.assert_allclose(lse[:, 0, 0], np.log([3, 1]), atol=1e-15)


def test_positions_beyond_every_integer():
    inputs = dict.fromkeys(("query", "key", "value"), np.ones((3, 2)))
    far = 2**80
    for options in ({"query_offset": far, "causal": True}, {"window": (far, far)}):
        output, _ = cli_oracle.exact_attention(**inputs, **options)
        np.testing.assert_array_equal(output, np.ones((3, 2)))
    output, _ = cli_oracle.exact_attention(**inputs, query_offset=-far, causal=True)
    np.testing.assert_array_equal(output, np.zeros((3, 2)))
