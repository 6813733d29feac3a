"""partial_attention and merge_states: states are pairs that add up, in any order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from portable_attention import State, merge_states, partial_attention

from .accuracy import assert_accurate, reference_of
from .backends import Backend
from .dtypes import dtype_name, lse_dtype, numpy_dtype, ulp
from .problems import make_inputs
from .running import INPUTS, assert_owned, split_options


def partial(backend: Backend, arguments) -> State:
    """Return the state of a call on a backend, in the backend's arrays."""
    arrays, fixed = split_options(arguments)
    own = {name: backend.asarray(array) for name, array in arrays.items()}
    state = partial_attention(**own, **fixed)
    assert isinstance(state, State)
    assert_owned(backend, state.output, dtype_name(arguments["query"].dtype))
    assert_owned(backend, state.lse, lse_dtype(dtype_name(arguments["query"].dtype)))
    return state


def numpy_state(backend: Backend, state):
    output, lse = state
    return backend.to_numpy(output), backend.to_numpy(lse)


def own_state(backend: Backend, output, lse):
    return State(backend.asarray(output), backend.asarray(lse))


def some_states(dtype, count=3, shape=(2, 2, 5), width=3):
    """Return states of NumPy arrays, some rows of which are empty."""
    rng = np.random.default_rng(0)
    states = []
    for _ in range(count):
        lse = (3 * rng.standard_normal(shape)).astype(lse_dtype(dtype))
        output = rng.standard_normal((*shape, width)).astype(numpy_dtype(dtype))
        empty = rng.random(shape) < 0.3
        lse[empty], output[empty] = -np.inf, 0
        states.append((output, lse))
    return states


def merged_by_hand(states):
    """Return the weighted mean of the outputs and the log of the summed denominators."""
    lses = np.stack([lse.astype(np.float64) for _, lse in states])
    outputs = np.stack([output.astype(np.float64) for output, _ in states])
    with np.errstate(divide="ignore", invalid="ignore"):
        total = np.log(np.exp(lses).sum(0))
        weights = np.where(np.isneginf(lses), 0, np.exp(lses - total))
    return (weights[..., None] * outputs).sum(0), total


def assert_state_near(found, expected, dtype):
    """Compare within the rounding of a few operations: weights, products and a sum."""
    for one, other, name in zip(found, expected, (dtype, lse_dtype(dtype)), strict=True):
        infinite = ~np.isfinite(other)
        np.testing.assert_array_equal(one[infinite].astype(np.float64), other[infinite])
        error = np.abs(one[~infinite].astype(np.float64) - other[~infinite]).max(initial=0)
        assert error <= 4 * ulp(name, np.abs(other[~infinite]).max(initial=0))


def test_merge_is_the_weighted_mean(backend: Backend, dtype):
    for count in (1, 2, 3, 5):
        states = some_states(dtype, count)
        merged = merge_states(*(own_state(backend, *state) for state in states))
        assert isinstance(merged, State)
        assert_owned(backend, merged.output, dtype)
        assert_owned(backend, merged.lse, lse_dtype(dtype))
        assert_state_near(numpy_state(backend, merged), merged_by_hand(states), dtype)


def test_merge_is_commutative_and_associative(backend: Backend, dtype):
    """In any order, all at once or one by one."""
    states = some_states(dtype)
    expected = merged_by_hand(states)
    for order in itertools.permutations(own_state(backend, *state) for state in states):
        first, second, third = order
        for merged in (
            merge_states(first, second, third),
            merge_states(merge_states(first, second), third),
            merge_states(first, merge_states(second, third)),
        ):
            # Halves are rounded once more on the way.
            assert_state_near(numpy_state(backend, merged), expected, dtype)


def test_empty_state_is_the_identity_to_the_bit(backend: Backend, dtype):
    """(0, -inf) on either side, among others, and alone."""
    state = some_states(dtype, 1)[0]
    empty = (np.zeros_like(state[0]), np.full_like(state[1], -np.inf))
    own, nothing = own_state(backend, *state), own_state(backend, *empty)
    for states in ((own,), (own, nothing), (nothing, own), (nothing, own, nothing)):
        found = numpy_state(backend, merge_states(*states))
        for one, other in zip(found, state, strict=True):
            assert one.tobytes() == other.tobytes()
    for one, other in zip(numpy_state(backend, merge_states(nothing, nothing)), empty, strict=True):
        np.testing.assert_array_equal(one, other)


def test_garbage_in_an_empty_state_cannot_be_felt(backend: Backend):
    """Its weight is 0: what its output holds is selected away."""
    state = some_states("float32", 1)[0]
    empty = (np.full_like(state[0], np.nan), np.full_like(state[1], -np.inf))
    merged = merge_states(own_state(backend, *state), own_state(backend, *empty))
    found = numpy_state(backend, merged)
    np.testing.assert_array_equal(found[1], state[1])
    some = np.isfinite(state[1])
    np.testing.assert_array_equal(found[0][some], state[0][some])


def test_merge_of_far_apart_states(backend: Backend):
    """Denominators of exp(+-1e4) neither overflow nor vanish."""
    output = np.array([[[1.0, 2.0]]], dtype=np.float32)
    for lses in ((1e4, 1e4 + np.log(3)), (-1e4, -1e4 + np.log(3)), (1e4, -1e4), (-1e4, 1e4)):
        states = [
            (sign * output, np.array([[lse]], dtype=np.float32))
            for sign, lse in zip((1, -1), lses, strict=True)
        ]
        merged = merge_states(*(own_state(backend, *state) for state in states))
        found = numpy_state(backend, merged)
        difference = float(states[0][1][0, 0]) - float(states[1][1][0, 0])
        share = 1 / (1 + np.exp(-np.clip(difference, -700, 700)))
        np.testing.assert_allclose(found[0], (2 * share - 1) * output, rtol=1e-5)
        np.testing.assert_allclose(found[1], [[np.logaddexp(*lses)]], rtol=1e-6)


def test_nan_in_one_row_of_a_state_stays_in_its_row(backend: Backend):
    states = some_states("float32", 2)
    states[0][0][0, 0, 1] = np.nan
    states[0][1][0, 0, 1] = np.nan
    found = numpy_state(backend, merge_states(*(own_state(backend, *s) for s in states)))
    spoiled = np.zeros((2, 2, 5), dtype=bool)
    spoiled[0, 0, 1] = True
    np.testing.assert_array_equal(np.isnan(found[1]), spoiled)
    np.testing.assert_array_equal(np.isnan(found[0]).all(-1), spoiled)


def test_pairs_are_states(backend: Backend):
    states = [own_state(backend, *state) for state in some_states("float32")]
    expected = numpy_state(backend, merge_states(*states))
    found = numpy_state(backend, merge_states(*(tuple(state) for state in states)))
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


def test_merge_leaves_its_inputs_alone(backend: Backend):
    states = some_states("float32")
    before = [array.copy() for state in states for array in state]
    for state in states:
        for array in state:
            array.flags.writeable = False
    own = [own_state(backend, *state) for state in states]
    merge_states(*own)
    after = [backend.to_numpy(array) for state in own for array in state]
    for one, other in zip(after, before, strict=True):
        np.testing.assert_array_equal(one, other)


def split_keys(arguments, cuts):
    """Return the parts of a call between cuts of its keys, each at its own offset."""
    for start, stop in itertools.pairwise(cuts):
        part = dict(arguments)
        for name in ("key", "value"):
            part[name] = arguments[name][..., start:stop, :]
        for name in ("mask", "bias"):
            if name in arguments:
                part[name] = arguments[name][..., start:stop]
        if "query_offset" in arguments:
            part["query_offset"] = arguments["query_offset"] - start
        yield part


SPLITS = {
    "plain": {},
    "causal": {"causal": True, "query_offset": 2},
    "window": {"window": (2, 1), "query_offset": 1},
    "mask": {"mask": np.random.default_rng(0).random((2, 1, 5, 7)) < 0.5},
    "bias": {"bias": np.random.default_rng(0).standard_normal((2, 5, 7)).astype(np.float32)},
    "softcap and scale": {"softcap": 2.0, "scale": -1.0},
}


@pytest.mark.parametrize("split", SPLITS)
def test_split_keys_add_up_to_the_whole(backend: Backend, split):
    """Split-K: states of disjoint keys merge to the attention over all of them."""
    arguments = {**make_inputs(heads=2, key_heads=1), **SPLITS[split]}
    reference = reference_of(**arguments)
    for cuts in ((0, 3, 7), (0, 1, 2, 3, 4, 5, 6, 7), (0, 0, 7)):
        states = [partial(backend, part) for part in split_keys(arguments, cuts)]
        output, lse = numpy_state(backend, merge_states(*states))
        # Each part loses what the whole may lose, and the merge some more.
        parts = len(states)
        scale = reference.output_allowance + ulp("float32", 4) * parts
        np.testing.assert_allclose(output, reference.output, rtol=0, atol=scale)
        np.testing.assert_allclose(
            lse, reference.lse, rtol=0, atol=reference.lse_allowance + ulp("float32", 8)
        )


def test_sinks_belong_to_one_part(backend: Backend):
    """They enter once a row: with the first part, they are in the whole."""
    arguments = make_inputs()
    sinks = np.array([0.5, -1.0], dtype=np.float32)
    reference = reference_of(**arguments, sinks=sinks)
    first, *others = split_keys(arguments, (0, 2, 5, 7))
    states = [partial(backend, {**first, "sinks": sinks})]
    states += [partial(backend, part) for part in others]
    output, lse = numpy_state(backend, merge_states(*states))
    np.testing.assert_allclose(output, reference.output, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse, reference.lse, rtol=1e-6, atol=1e-6)


def test_partial_attention_is_attention(backend: Backend, dtype):
    """The same options, the same output, and the lse with it."""
    arguments = make_inputs(dtype=dtype, heads=4, key_heads=2)
    arguments |= {"causal": True, "query_offset": "end", "key_lengths": np.array([0, 7])}
    state = numpy_state(backend, partial(backend, {**arguments, "block_size": (3, 2)}))
    assert_accurate(*state, reference_of(**arguments))


def test_partial_attention_of_layout_blhd(backend: Backend):
    """Its output is (..., L, H, D), its lse heads first."""
    arguments = make_inputs()
    swapped = {name: arguments[name].swapaxes(-3, -2) for name in INPUTS}
    state = partial(backend, {**swapped, "layout": "blhd"})
    assert tuple(state.output.shape) == (2, 5, 2, 3)
    assert tuple(state.lse.shape) == (2, 2, 5)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_sequence_of_states_is_told_to_be_unpacked(kind):
    x = np.ones((2, 3, 4), dtype=np.float32)
    with pytest.raises(TypeError, match=r"state 0 is a sequence of states: .*\*states"):
        merge_states(kind([partial_attention(x, x, x)] * 2))
