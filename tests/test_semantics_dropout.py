"""Dropout: a pure function of the seed and the indices, on the weights, after the softmax."""

from __future__ import annotations

import numpy as np
import pytest

from portable_attention import Dropout, attention

from .accuracy import assert_accurate, reference_of
from .backends import Backend
from .dropout_reference import keep_mask
from .problems import make_inputs, uniform_inputs
from .running import attend

SEEDS = [0, 1, 7, -1, 2**31, 2**32 + 5, -(2**63), 2**64 - 1]


def kept_pairs(backend: Backend, rate, seed, scores, **options):
    """Return which pairs are kept, seen from outside: the identity as values."""
    *batch, heads, queries, keys = scores
    inputs = uniform_inputs(queries, keys, tuple(batch), heads)
    return attend(backend, **inputs, dropout=(rate, seed), **options).output != 0


@pytest.mark.parametrize("seed", SEEDS)
def test_kept_pairs_are_those_of_the_documented_hash(backend: Backend, tilings, seed):
    """So they are the same on every backend and for every tiling."""
    scores = (2, 3, 2, 5, 7)
    expected = keep_mask(0.4, seed, scores)
    for block_size in tilings:
        found = kept_pairs(backend, 0.4, seed, scores, block_size=block_size)
        np.testing.assert_array_equal(found, expected)


def test_seed_may_be_a_0d_array(backend: Backend):
    scores = (2, 2, 5, 7)
    for kind in ("int32", "int64"):
        seed = np.array(12345, dtype=kind)
        inputs = uniform_inputs(5, 7, (2,), 2)
        own = {name: backend.asarray(array) for name, array in inputs.items()}
        output = attention(**own, dropout=Dropout(0.4, backend.asarray(seed)))
        found = backend.to_numpy(output) != 0
        np.testing.assert_array_equal(found, keep_mask(0.4, 12345, scores))
        output = attention(**own, dropout=Dropout(0.4, seed[()]))  # a NumPy scalar
        np.testing.assert_array_equal(backend.to_numpy(output) != 0, found)


def test_batch_index_is_that_of_the_broadcast_batch(backend: Backend, tilings):
    """Not that of an input that is broadcast: each item has pairs of its own."""
    expected = keep_mask(0.5, 3, (2, 3, 4, 5, 6))
    inputs = uniform_inputs(5, 6, (2, 3), 4)
    inputs["query"] = inputs["query"][:1]  # (1, 3, ...)
    inputs["key"] = inputs["key"][0, 0, :2]  # grouped heads, no batch axis
    inputs["value"] = inputs["value"][:, :1, :2]
    for block_size in tilings:
        output, _ = attend(backend, **inputs, dropout=(0.5, 3), block_size=block_size)
        np.testing.assert_array_equal(output != 0, expected)


def test_rows_count_from_the_start_whatever_their_positions(backend: Backend):
    """i and j are row indices: an offset, or a window, moves nothing."""
    scores = (2, 5, 7)
    for options in ({"query_offset": 3}, {"window": (50, 50), "query_offset": "end"}):
        found = kept_pairs(backend, 0.5, 3, scores, **options)
        np.testing.assert_array_equal(found, keep_mask(0.5, 3, scores))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_rate_is_the_share_that_is_dropped(backend: Backend, rate):
    """Within four standard deviations, over all pairs, every row and every column."""
    kept = kept_pairs(backend, rate, 11, (2, 2, 40, 50))
    sigma = np.sqrt(rate * (1 - rate))
    assert abs(kept.mean() - (1 - rate)) < 4 * sigma / np.sqrt(kept.size)
    for axis in (-1, -2):
        shares = kept.mean(axis)
        assert np.abs(shares - (1 - rate)).max() < 5 * sigma / np.sqrt(kept.shape[axis])


def test_neighbours_are_independent(backend: Backend):
    """Neither in a row or column, nor between heads, items and seeds."""
    first = kept_pairs(backend, 0.5, 5, (2, 2, 60, 60))
    second = kept_pairs(backend, 0.5, 6, (2, 2, 60, 60))
    off_diagonal = ~np.eye(60, dtype=bool)
    pairs = {
        "keys": (first[..., 1:], first[..., :-1]),
        "rows": (first[..., 1:, :], first[..., :-1, :]),
        "heads": (first[:, 0], first[:, 1]),
        "items": (first[0], first[1]),
        "seeds": (first, second),
        # The diagonal is its own transpose.
        "transposed": (first[..., off_diagonal], first.swapaxes(-1, -2)[..., off_diagonal]),
    }
    for name, (one, other) in pairs.items():
        agreement = (one == other).mean()
        assert abs(agreement - 0.5) < 5 * 0.5 / np.sqrt(one.size / 2), name


def test_weights_are_dropped_after_the_softmax(backend: Backend, dtype, tilings):
    """Kept ones are divided by 1 - rate; the lse never sees dropout; sinks and softcap stay."""
    inputs = make_inputs(dtype=dtype, heads=4, key_heads=2)
    kept = keep_mask(0.3, 9, (2, 4, 5, 7))
    for options in ({}, {"sinks": np.zeros(4, dtype=inputs["query"].dtype), "softcap": 2.0}):
        reference = reference_of(**inputs, **options, keep=kept, rate=0.3)
        undropped = reference_of(**inputs, **options)
        np.testing.assert_array_equal(reference.lse, undropped.lse)
        for block_size in tilings:
            output, lse = attend(
                backend, **inputs, **options, dropout=(0.3, 9), block_size=block_size
            )
            assert_accurate(output, lse, reference)


def test_rate_zero_is_no_dropout_and_rate_one_gives_zero(backend: Backend, dtype, tilings):
    inputs = make_inputs(dtype=dtype)
    reference = reference_of(**inputs)
    for block_size in tilings:
        output, lse = attend(backend, **inputs, dropout=(0.0, 1), block_size=block_size)
        assert_accurate(output, lse, reference)
        output, lse = attend(backend, **inputs, dropout=(1.0, 1), block_size=block_size)
        assert (output == 0).all()
        np.testing.assert_allclose(lse, reference.lse, rtol=1e-5, atol=reference.lse_allowance)


def test_dropped_values_cannot_be_felt(backend: Backend, tilings):
    """A dropped pair is selected away: NaN under it does not come through as 0 times NaN."""
    inputs = make_inputs()
    kept = keep_mask(0.5, 2, (2, 2, 5, 7))
    for poison in (np.nan, np.inf):
        inputs["value"][0, 1, 3] = poison
        reference = reference_of(**inputs, keep=kept, rate=0.5)
        felt = np.isfinite(reference.output[0, 1]).all(-1)
        assert felt.any()
        assert not felt.all()
        for block_size in tilings:
            output, lse = attend(backend, **inputs, dropout=(0.5, 2), block_size=block_size)
            assert_accurate(output, lse, reference)


def test_splitting_the_heads_or_rows_off_changes_no_pair(backend: Backend):
    """Of the leading heads, rows and keys: the hash knows indices, not sizes."""
    whole = kept_pairs(backend, 0.5, 4, (3, 4, 6, 8))
    part = kept_pairs(backend, 0.5, 4, (1, 2, 3, 5))
    np.testing.assert_array_equal(part, whole[:1, :2, :3, :5])
