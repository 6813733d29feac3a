"""Where rows and keys stand: causal, window, query_offset, and the lengths."""

from __future__ import annotations

import numpy as np
import pytest

from .backends import Backend
from .problems import uniform_inputs
from .running import attend


def attended(backend: Backend, queries, keys, block_size=None, batch=(), **options):
    """Return which pairs get weight, seen from outside: equal scores, the identity as values."""
    inputs = uniform_inputs(queries, keys, batch)
    output, lse = attend(backend, **inputs, **options, block_size=block_size)
    found = output > 0
    # As many equal scores as there are keys, and nothing but them.
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse, np.log(found.sum(-1)), rtol=1e-6)
    return found[..., 0, :, :]


def pairs(queries, keys, holds):
    """Return the pairs of which a rule holds, by asking it of each."""
    table = [[holds(i, j) for j in range(keys)] for i in range(queries)]
    return np.array(table, dtype=bool).reshape(queries, keys)


OFFSETS = ["end", -3, 2, 0, "start", 100, -100]
WINDOWS = [(1, 2), (None, 1), (0, 0), (2, 0), (0, 3), (1, None), (None, None), (50, 50)]


def lengths(backend: Backend, _config) -> list[tuple[int, int]]:
    return backend.few([(5, 7), (7, 5), (6, 6), (1, 9), (9, 1)], 2)


def windows(backend: Backend, _config) -> list[tuple[int | None, int | None]]:
    return backend.few(WINDOWS, 2)


BACKEND_AXES = {"lengths": lengths, "window": windows}


def position(offset, queries, keys):
    return {"start": 0, "end": keys - queries}.get(offset, offset)


def test_causal_allows_keys_up_to_the_own_position(backend: Backend, tilings, lengths):
    queries, keys = lengths
    for offset in backend.few(OFFSETS, 3):
        p = position(offset, queries, keys)
        expected = pairs(queries, keys, lambda i, j, p=p: j <= i + p)
        for block in tilings:
            found = attended(backend, queries, keys, block, causal=True, query_offset=offset)
            np.testing.assert_array_equal(found, expected, err_msg=f"offset {offset}")


def test_window_counts_keys_beside_the_own_position(backend: Backend, tilings, window):
    left = np.inf if window[0] is None else window[0]
    right = np.inf if window[1] is None else window[1]
    for offset in backend.few(["end", 1, -2], 2):
        p = position(offset, 5, 7)
        expected = pairs(5, 7, lambda i, j, p=p: i + p - left <= j <= i + p + right)
        for block in tilings:
            found = attended(backend, 5, 7, block, window=window, query_offset=offset)
            np.testing.assert_array_equal(found, expected, err_msg=f"offset {offset}")


def test_causal_and_window_compose(backend: Backend, tilings):
    expected = pairs(6, 6, lambda i, j: i - 2 <= j <= i)
    for block in tilings:
        found = attended(backend, 6, 6, block, causal=True, window=(2, 3))
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("valid", [{}, {"key_lengths": 4}, {"query_lengths": 2}], ids=str)
def test_no_offset_means_zero_where_the_lengths_agree(backend: Backend, valid):
    """Whatever the valid lengths: it is Lq == Lk that counts."""
    found = attended(backend, 6, 6, causal=True, **valid)
    valid_keys, valid_queries = valid.get("key_lengths", 6), valid.get("query_lengths", 6)
    rule = pairs(6, 6, lambda i, j: j <= i and j < valid_keys and i < valid_queries)
    np.testing.assert_array_equal(found, rule)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window": (1, 0)}, {"window": (None, None)}]
)
@pytest.mark.parametrize(("queries", "keys"), [(3, 5), (5, 3), (1, 4), (0, 2), (2, 0)])
def test_unequal_lengths_need_an_offset(backend: Backend, options, queries, keys):
    """Both options depend on positions, whatever their values."""
    inputs = uniform_inputs(queries, keys)
    with pytest.raises(ValueError, match=r"(?s)start.*end|end.*start"):
        attend(backend, **inputs, **options)


def test_offset_without_positions_changes_nothing(backend: Backend):
    found = attended(backend, 3, 5, query_offset=-50)
    assert found.all()


def test_end_follows_the_lengths_of_each_item(backend: Backend, tilings):
    """The last valid query stands at the last valid key; a length not given is Lq or Lk."""
    keys, queries = np.array([3, 7, 0]), np.array([5, 2, 4])
    for given in backend.few(["both", "key_lengths", "query_lengths"], 2):
        options = {}
        valid_k, valid_q = [7, 7, 7], [5, 5, 5]
        if given != "query_lengths":
            options["key_lengths"], valid_k = keys, keys
        if given != "key_lengths":
            options["query_lengths"], valid_q = queries, queries
        expected = [
            pairs(5, 7, lambda i, j, q=q, k=k: i < q and j < k and j <= i + k - q)
            for q, k in zip(valid_q, valid_k, strict=True)
        ]
        for block in tilings:
            found = attended(backend, 5, 7, block, (3,), causal=True, query_offset="end", **options)
            np.testing.assert_array_equal(found, expected, err_msg=given)


def test_offset_may_differ_from_item_to_item(backend: Backend, tilings):
    offsets = np.array([0, 4, -2])
    expected = [pairs(5, 7, lambda i, j, p=p: i + p - 1 <= j <= i + p) for p in offsets]
    for block in tilings:
        found = attended(
            backend, 5, 7, block, (3,), causal=True, window=(1, 0), query_offset=offsets
        )
        np.testing.assert_array_equal(found, expected)


def test_lengths_count_what_is_valid(backend: Backend, tilings):
    for q, k in backend.few([(3, 2), (5, 0), (5, 7), (3, 7), (5, 2), (0, 7), (1, 1)], 2):
        expected = pairs(5, 7, lambda i, j, q=q, k=k: i < q and j < k)
        for block in tilings:
            found = attended(backend, 5, 7, block, query_lengths=q, key_lengths=k)
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", ["int8", "int16", "int32", "int64", "uint8"])
@pytest.mark.parametrize("of_numpy", [False, True], ids=["own array", "NumPy array"])
def test_lengths_and_offsets_of_every_integer_dtype(backend: Backend, kind, of_numpy):
    """As arrays of the call's library, or of NumPy."""
    lengths = np.array([2, 6], dtype=kind)
    expected = [pairs(4, 6, lambda i, j, n=n: j < n and j <= i + n) for n in (2, 6)]
    found = attend(
        backend,
        **uniform_inputs(4, 6, (2,)),
        causal=True,
        key_lengths=lengths,
        query_offset=lengths,
        keep_numpy=("key_lengths", "query_offset") if of_numpy else (),
    ).output
    np.testing.assert_array_equal(found[:, 0] > 0, expected)


def test_lengths_lie_over_the_batch_axes(backend: Backend):
    """Right-aligned, as NumPy broadcasts: any rank, any axis of size 1."""
    lengths = np.array([[1, 2, 3], [4, 5, 0]])
    shown_as = [lengths[0], lengths[:, :1], lengths, lengths[:1], np.array(3), np.array([4])]
    for shown in backend.few(shown_as, 2):
        whole = np.broadcast_to(shown, (2, 3))
        found = attended(backend, 2, 5, batch=(2, 3), key_lengths=shown)
        expected = np.arange(5) < whole[..., None, None]
        np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


def test_far_offsets_do_not_wrap(backend: Backend):
    """An offset or a window beyond 32 bits means what it says."""
    for offset, everything in ((2**31, True), (-(2**31), False), (2**40, True), (-(2**40), False)):
        found = attended(backend, 3, 5, causal=True, query_offset=offset)
        assert found.all() == everything
        assert found.any() == everything
    assert attended(backend, 4, 4, window=(2**40, 2**40)).all()
    assert attended(backend, 4, 4, window=(2**40, 0), query_offset=2**39).all()
