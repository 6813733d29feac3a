"""Random combinations of all options, against the oracle, on every backend.

The default is short; ``--combinations 5000`` goes far, ``--first-combination 137 --combinations 1``
runs one again. A failure names the combination by its number.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .accuracy import Reference, assert_accurate, reference_of
from .backends import BACKENDS, Backend
from .running import run
from .strategies import INPUTS, Call, RandomChooser, calls, random_call

COMBINATIONS = {False: 100, True: 20}  # by whether each has to be compiled
EXAMPLES = {False: 30, True: 4}  # of Hypothesis, which shrinks what it finds
CHUNK = 12
OPTIONS = (
    *("layout", "mask", "bias", "causal", "window", "query_offset", "query_lengths"),
    *("key_lengths", "scale", "softcap", "sinks", "dropout"),
)


def chunks(backend: Backend, config: pytest.Config) -> list[range]:
    """Return the numbers of the combinations that a backend runs, test by test."""
    first = config.getoption("--first-combination")
    last = first + (config.getoption("--combinations") or COMBINATIONS[backend.compiled])
    return [range(start, min(start + CHUNK, last)) for start in range(first, last, CHUNK)]


BACKEND_AXES = {"chunk": chunks}


@functools.lru_cache(maxsize=4096)
def combination(number: int, dtypes: tuple[str, ...]) -> tuple[Call, Reference]:
    """Return the call of that number, which is the same on every backend, and its reference."""
    call = random_call(RandomChooser(number), dtypes)
    return call, reference_of(**call.inputs, **call.expected)


def check(backend: Backend, call: Call, reference: Reference, described: str) -> None:
    try:
        output, lse = run(backend, call)
        assert_accurate(output, lse, reference)
    except Exception as error:
        raise AssertionError(f"{described}: {call}") from error


def test_combinations_agree_with_the_oracle(backend: Backend, chunk):
    for number in chunk:
        call, reference = combination(number, backend.dtypes)
        check(backend, call, reference, f"combination {number} on {backend}")


def test_examples_agree_with_the_oracle(backend: Backend):
    """The same space, searched by Hypothesis: what fails here is small."""

    @settings(max_examples=EXAMPLES[backend.compiled])
    @given(calls(backend.dtypes))
    def search(call):
        check(backend, call, reference_of(**call.inputs, **call.expected), str(backend))

    search()


def test_combinations_use_every_option():
    """The random space is as wide as it claims: each option is on, and off, often enough."""
    numbers = range(400)
    options = [random_call(RandomChooser(number), BACKENDS["numpy"].dtypes) for number in numbers]
    for name in OPTIONS:
        share = np.mean([name in call.options for call in options])
        assert 0.15 < share < 0.8, f"{name}: in {share:.0%} of the calls"
    for what, holds in {
        "a poisoned input": lambda c: any(
            not np.isfinite(a.astype(np.float64)).all() for a in c.inputs.values()
        ),
        "an empty axis": lambda c: any(0 in array.shape for array in c.inputs.values()),
        "inputs of rank 2": lambda c: all(array.ndim == 2 for array in c.inputs.values()),
        "ranks that differ": lambda c: len({array.ndim for array in c.inputs.values()}) > 1,
        "grouped heads": lambda c: (
            "layout" not in c.options
            and c.inputs["query"].ndim > 2
            and c.inputs["key"].ndim > 2
            and c.inputs["query"].shape[-3] > c.inputs["key"].shape[-3]
        ),
        "an array of lengths": lambda c: isinstance(c.options.get("key_lengths"), np.ndarray),
        "batch axes that differ": lambda c: len(set(_batches(c).values())) > 1,
        **{
            f"{name} alone with batch axes": lambda c, name=name: (
                [n for n, batch in _batches(c).items() if max(batch, default=1) > 1] == [name]
            )
            for name in INPUTS
        },
        "no options": lambda c: not c.options and c.block_size is None,
        "read-only memory": lambda c: any(not a.flags.writeable for a in c.inputs.values()),
        "negative strides": lambda c: any(min(a.strides) < 0 for a in c.inputs.values()),
    }.items():
        share = np.mean([bool(holds(call)) for call in options])
        assert share > 0.02, f"{what}: in {share:.0%} of the calls"


def _batches(call: Call) -> dict[str, tuple[int, ...]]:
    """Return the batch axes of each input, as many for all of them."""
    found = {name: array.shape[:-3] for name, array in call.inputs.items()}
    most = max(map(len, found.values()))
    return {name: (1,) * (most - len(batch)) + batch for name, batch in found.items()}


@settings(max_examples=100)
@given(st.data())
def test_drawn_calls_are_calls(data):
    """What Hypothesis draws is a call that the oracle takes, however it shrinks."""
    call = data.draw(calls(("float32", "float64")))
    reference = reference_of(**call.inputs, **call.expected)
    assert reference.output.shape[:-1] == _rows(call, reference)


def _rows(call: Call, reference: Reference) -> tuple[int, ...]:
    if call.options.get("layout") == "blhd":
        *batch, heads, rows = reference.lse.shape
        return (*batch, rows, heads)
    return reference.lse.shape
