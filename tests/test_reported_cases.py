"""The calls that attention implementations got wrong: each case, on every backend and tiling.

A case stands for a kind of fault; the tests of the semantics cover the kinds with other numbers.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from portable_attention import attention, merge_states

from . import oracle
from .backends import Backend
from .differentiate import gradients_of
from .dtypes import dtype_name, lse_dtype
from .reported_cases import GRADIENTS, Case, load_cases
from .running import attend, split_options

CASES = load_cases()
CALLS = [case for case in CASES if not case.states]
MERGES = [case for case in CASES if case.states]
DIFFERENTIATED = [case for case in CALLS if {*GRADIENTS, "linear_in_value"} & case.expect.keys()]
# The library's own, odd ones, and one that is larger than any case.
BLOCKS = {"default": None, "1x1": (1, 1), "3x2": (3, 2), "7x5": (7, 5), "5000x5000": (5000, 5000)}


def blocks(backend: Backend, config: pytest.Config) -> list[str]:
    """Return the names of the tilings that a backend runs the cases with."""
    # A tiling takes a compilation of each case: the jit test has another one.
    short = backend.compiled and config.getoption("--combinations") is None
    return ["default"] if short else list(BLOCKS)


BACKEND_AXES = {"block": blocks}


def by_id(case: Case) -> str:
    return case.id


def arguments_of(case: Case, block: str) -> dict[str, Any]:
    """Return the call of a case; one that fixes its block size keeps it."""
    return {"block_size": BLOCKS[block], **case.options, **case.inputs}


def skip_unless_meant_for(case: Case, backend: Backend) -> None:
    """Skip what the backend cannot hold, and say so."""
    if case.backends and backend.library not in case.backends:
        pytest.skip(f"needs one of {', '.join(case.backends)}")
    for array in (*case.inputs.values(), *case.options.values()):
        if isinstance(array, np.ndarray) and array.dtype.kind in "fV":
            name = dtype_name(array.dtype)
            if name not in backend.dtypes:
                pytest.skip(f"needs {name}: {backend} has none")


def assert_close(found, expected, case: Case, name: str, half: bool = False) -> None:
    """Compare within the tolerance of the case; NaN and infinities where they are expected."""
    rtol, atol = case.rtol, case.atol
    if half and case.dtype in ("float16", "bfloat16"):
        rtol, atol = 2e-5, 5e-6  # the lse of a half-precision call is float32
    assert found.shape == expected.shape, name
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol, atol, err_msg=name)


def results_of(case: Case, backend: Backend, arguments: dict[str, Any], jit: bool):
    """Return output and lse; a case for vmap is a vmap on JAX, and a loop elsewhere."""
    if case.transform == "vmap":
        if backend.library == "jax":
            return _vmapped(case, backend, arguments)
        items = [
            attend(backend, **{**arguments, **{n: arguments[n][item] for n in case.mapped}})
            for item in range(len(arguments[case.mapped[0]]))
        ]
        return [np.stack(results) for results in zip(*items, strict=True)]
    jit = jit or case.transform == "jit"
    return attend(backend, **arguments, keep_numpy=case.keep_numpy, jit=jit)


def _vmapped(case: Case, backend: Backend, arguments: dict[str, Any]):
    import jax

    arrays, fixed = split_options(arguments)
    own = {name: backend.asarray(array) for name, array in arrays.items()}
    axes = {name: 0 if name in case.mapped else None for name in own}
    results = jax.vmap(lambda own: attention(**own, **fixed, return_lse=True), in_axes=(axes,))(own)
    return [backend.to_numpy(result) for result in results]


def assert_expected(case: Case, backend: Backend, block: str, jit: bool = False) -> None:
    """Check everything that a case says of the results of its call."""
    arguments, expect = arguments_of(case, block), case.expect
    if "raises" in expect:
        kinds = [expect["raises"]] if isinstance(expect["raises"], str) else expect["raises"]
        errors = tuple({"ValueError": ValueError, "TypeError": TypeError}[kind] for kind in kinds)
        with pytest.raises(errors) as caught:
            results_of(case, backend, arguments, jit)
        for word in expect.get("mentions", ()):
            assert word in str(caught.value)
        return
    output, lse = results_of(case, backend, arguments, jit)
    if "output" in expect:
        assert_close(output, expect["output"], case, "output")
    if "lse" in expect:
        assert_close(lse, expect["lse"], case, "lse", half=True)
    if "finite" in expect:
        assert np.isfinite(output.astype(np.float64)).all()
    if "output_dtype" in expect:
        assert dtype_name(output.dtype) == expect["output_dtype"]
    if "equals" in expect:
        other_inputs, other_options = expect["equals"]
        # Options are those of the other call, not these ones changed.
        other = {"block_size": BLOCKS[block], **case.inputs, **other_inputs, **other_options}
        same = attend(backend, **other, jit=jit).output
        assert_close(output, same.astype(np.float64), case, "the output of the equal call")
    if "output_or_zero" in expect:
        full = expect["output_or_zero"]
        kept = output != 0
        assert_close(output, np.where(kept, full, 0), case, "output or zero")


@pytest.mark.parametrize("case", CALLS, ids=by_id)
def test_call(backend: Backend, case: Case, block):
    skip_unless_meant_for(case, backend)
    assert_expected(case, backend, block)


@pytest.mark.needs(compiled=True)
@pytest.mark.parametrize("case", CALLS, ids=by_id)
def test_call_under_jit(backend: Backend, case: Case):
    """Every array traced: masks, lengths and offsets, too."""
    skip_unless_meant_for(case, backend)
    assert_expected(case, backend, "3x2", jit=True)


@pytest.mark.parametrize("case", DIFFERENTIATED, ids=by_id)
def test_gradients(backend: Backend, case: Case, block):
    """By the library's own differentiation, and by attention_vjp where it has none."""
    skip_unless_meant_for(case, backend)
    vmapped = case.mapped if case.transform == "vmap" and backend.library == "jax" else ()
    assert_gradients(case, backend, arguments_of(case, block), vmapped=vmapped)


@pytest.mark.needs(autodiff=True)
@pytest.mark.parametrize("case", DIFFERENTIATED, ids=by_id)
def test_explicit_gradients(backend: Backend, case: Case):
    """By attention_vjp on the libraries that differentiate themselves, too."""
    skip_unless_meant_for(case, backend)
    arguments = arguments_of(case, "3x2")
    assert_gradients(case, backend, arguments, explicit=True)


def assert_gradients(case: Case, backend: Backend, arguments, **how: Any) -> None:
    """Check everything that a case says of gradients."""
    _, lse = oracle_shapes(case)
    for kind, changes in (
        ("gradients", {}),
        ("lse_gradients", {"lse_cotangent": np.ones(lse, dtype=lse_dtype(case.dtype))}),
        ("second_gradients", {"order": 2}),
    ):
        if kind == "second_gradients" and (how.get("explicit") or not backend.autodiff):
            continue  # of the library's own differentiation alone
        if expected := case.expect.get(kind):
            found = gradients_of(backend, arguments, list(expected), **changes, **how)
            for name, gradient in found.items():
                assert_close(gradient, expected[name], case, f"{kind} by {name}")
    if case.expect.get("linear_in_value"):
        gradient = gradients_of(backend, arguments, ["value"], **how)["value"]
        total = attend(backend, **arguments).output.astype(np.float64).sum()
        linear = (gradient.astype(np.float64) * case.inputs["value"]).sum()
        assert_close(np.asarray(linear), total, case, "the sum")


def oracle_shapes(case: Case) -> list[tuple[int, ...]]:
    """Return the shapes of the output and the lse of a case."""
    restricting = {"layout": case.options.get("layout", "bhld")}
    return [result.shape for result in oracle.attention(**case.inputs, **restricting)]


def nestings(states):
    """Yield every way to merge these states: in any order, all at once or pair by pair."""
    for order in itertools.permutations(states):
        yield merge_states(*order)
        left = order[0]
        for state in order[1:]:
            left = merge_states(left, state)
        yield left
        right = order[-1]
        for state in reversed(order[:-1]):
            right = merge_states(state, right)
        yield right


@pytest.mark.parametrize("case", MERGES, ids=by_id)
def test_merge(backend: Backend, case: Case):
    skip_unless_meant_for(case, backend)
    before = [tuple(array.copy() for array in state) for state in case.states]
    states = [tuple(backend.asarray(array) for array in state) for state in case.states]
    for output, lse in nestings(states):
        assert backend.owns(output)
        assert backend.owns(lse)
        assert_close(backend.to_numpy(output), case.expect["output"], case, "output")
        assert_close(backend.to_numpy(lse), case.expect["lse"], case, "lse", half=True)
    for state, kept in zip(case.states, before, strict=True):
        for array, copy in zip(state, kept, strict=True):
            np.testing.assert_array_equal(array, copy)
