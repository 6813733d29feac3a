"""Bad input: the error of the right kind, which names what was given and what would be right.

TypeError for the wrong kind of thing, ValueError for the wrong shape, value or device. Nothing is
half done: the inputs are as they were.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from portable_attention import Dropout, attention, partial_attention

from .backends import BACKENDS, Backend
from .problems import make_inputs
from .running import assert_unchanged


@dataclass(frozen=True)
class Bad:
    """A call that is refused: what is wrong with a good one, the error, and words it must say."""

    id: str
    error: type[Exception]
    changes: dict[str, Any]  # NumPy arrays are turned into the backend's
    words: tuple[str, ...]  # what was given, and the remedy
    good: dict[str, Any] = field(default_factory=dict)  # the shapes of the good call


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype=dtype)


def value_error(name, changes, *words, **good):
    return Bad(name, ValueError, changes, words, good)


def type_error(name, changes, *words, **good):
    return Bad(name, TypeError, changes, words, good)


# The good call: query (2, 4, 5, 8), key (2, 2, 7, 8), value (2, 2, 7, 3).
INPUTS = [
    type_error("no query", {"query": None}, "query", "None", "array"),
    type_error("a list", {"query": [[1.0, 2.0]]}, "query", "list", "array"),
    type_error("a number", {"value": 3.0}, "value", "float", "array"),
    type_error("a string as mask", {"mask": "causal"}, "mask", "str", "array"),
    type_error("a list as bias", {"bias": [0.0]}, "bias", "list", "array"),
    type_error("a list as sinks", {"sinks": [0.0] * 4}, "sinks", "list", "array"),
    value_error("rank 1", {"query": zeros(8)}, "query", "(8,)", "(..., H, L, D)"),
    value_error("rank 0", {"key": zeros()}, "key", "()", "(..., H, L, D)"),
    value_error("widths", {"query": zeros(2, 4, 5, 6)}, "width", "query", "key", "6", "8"),
    value_error("lengths", {"value": zeros(2, 2, 6, 3)}, "length", "key", "value", "7", "6"),
    value_error("batches", {"query": zeros(3, 4, 5, 8)}, "batch", "(3, 4, 5, 8)", "(2, 2, 7, 8)"),
    value_error("heads without divisor", {"query": zeros(2, 3, 5, 8)}, "heads", "multiple", "3"),
    value_error("more key heads", {"query": zeros(2, 1, 5, 8)}, "heads", "multiple", "1", "2"),
    value_error("no query heads", {"query": zeros(2, 0, 5, 8)}, "heads", "0"),
    value_error(
        "no key heads", {"key": zeros(2, 0, 7, 8), "value": zeros(2, 0, 7, 3)}, "heads", "0"
    ),
    value_error("heads of the value", {"value": zeros(2, 4, 7, 3)}, "heads", "key", "value", "4"),
    value_error("one head of the value", {"value": zeros(2, 1, 7, 3)}, "heads", "key", "value"),
]

LAYOUTS = [
    value_error("unknown layout", {"layout": "lbhd"}, "layout", "lbhd", "bhld", "blhd"),
    type_error("layout of another kind", {"layout": 3}, "layout", "3", "bhld", "blhd"),
    value_error("blhd of rank 2", {"layout": "blhd", "query": zeros(5, 8)}, "blhd", "(5, 8)"),
    value_error(
        "blhd of several ranks",
        {"layout": "blhd", "query": zeros(5, 4, 8), "key": zeros(1, 7, 2, 8)},
        *("blhd", "rank", "(5, 4, 8)", "(1, 7, 2, 8)"),
    ),
    value_error(
        "lengths where heads belong",
        {"query": zeros(2, 5, 4, 8), "key": zeros(2, 7, 4, 8), "value": zeros(2, 7, 4, 8)},
        *("heads", "layout='blhd'"),
    ),
]

DTYPES = [
    type_error("integer query", {"query": zeros(2, 4, 5, 8, dtype="int32")}, "query", "int32"),
    type_error("bool value", {"value": zeros(2, 2, 7, 3, dtype="bool")}, "value", "bool", "float"),
    type_error("complex key", {"key": zeros(2, 2, 7, 8, dtype="complex64")}, "key", "complex64"),
    type_error(
        "integers throughout",
        {name: array.astype("int32") for name, array in make_inputs(heads=2, width=8).items()},
        *("int32", "float"),
    ),
]

# Scores: (2, 4, 5, 7).
MASKS = [
    type_error("integer mask", {"mask": zeros(5, 7, dtype="int32")}, "mask", "int32", "bias"),
    type_error("float mask", {"mask": zeros(5, 7)}, "mask", "float32", "bias"),
    type_error("bool bias", {"bias": zeros(5, 7, dtype="bool")}, "bias", "bool", "mask"),
    type_error("integer bias", {"bias": zeros(5, 7, dtype="int32")}, "bias", "int32", "float"),
    *(
        value_error(f"{name} of {what}", {name: zeros(*shape, dtype=dtype)}, name, *words)
        for name, dtype in (("mask", "bool"), ("bias", "float32"))
        for what, shape, words in (
            ("too many keys", (5, 8), ("(5, 8)", "(2, 4, 5, 7)")),
            ("too few keys", (5, 6), ("(5, 6)", "(2, 4, 5, 7)")),
            ("too many queries", (6, 7), ("(6, 7)", "(2, 4, 5, 7)")),
            ("too many heads", (5, 5, 7), ("(5, 5, 7)", "(2, 4, 5, 7)")),
            ("the key heads", (2, 1, 7), ("(2, 1, 7)", "(2, 4, 5, 7)")),
            ("too many items", (3, 1, 1, 1), ("(3, 1, 1, 1)", "(2, 4, 5, 7)")),
            ("too high a rank", (1, 2, 4, 5, 7), ("(1, 2, 4, 5, 7)", "(2, 4, 5, 7)")),
            ("no keys", (5, 0), ("(5, 0)", "(2, 4, 5, 7)")),
            ("transposed axes", (7, 5), ("(7, 5)", "(2, 4, 5, 7)")),
        )
    ),
    value_error(
        "mask that would enlarge the batch",
        {"mask": zeros(2, 1, 1, 1, dtype="bool")},
        *("mask", "(2, 1, 1, 1)", "(1, 4, 5, 7)"),
        batch=(1,),
    ),
    value_error(
        "mask that would enlarge the keys",
        {"mask": zeros(5, 7, dtype="bool")},
        *("mask", "(5, 7)", "(2, 4, 5, 1)"),
        keys=1,
    ),
    value_error("too few sinks", {"sinks": zeros(2)}, "sinks", "(2,)", "(4,)"),
    value_error("one sink", {"sinks": zeros(1)}, "sinks", "(1,)", "(4,)"),
    value_error("a sink of rank 0", {"sinks": zeros()}, "sinks", "()", "(4,)"),
    value_error("sinks of rank 2", {"sinks": zeros(4, 1)}, "sinks", "(4, 1)", "(4,)"),
    type_error("integer sinks", {"sinks": zeros(4, dtype="int32")}, "sinks", "int32", "float"),
]

POSITIONS = [
    value_error("causal without offset", {"causal": True}, "start", "end", "5", "7"),
    value_error("window without offset", {"window": (1, 0)}, "start", "end", "5", "7"),
    value_error("open window without offset", {"window": (None, None)}, "start", "end", "5", "7"),
    type_error("causal as a string", {"causal": "end"}, "causal", "end", "True"),
    type_error("causal as a number", {"causal": 1}, "causal", "1", "True"),
    type_error("causal None", {"causal": None}, "causal", "None", "True"),
    type_error("window as a number", {"window": 3}, "window", "3", "left", "right"),
    type_error("window of three", {"window": (1, 2, 3)}, "window", "(1, 2, 3)", "left", "right"),
    type_error("window of floats", {"window": (1.5, 0)}, "window", "1.5", "int"),
    type_error("window of bools", {"window": (True, 0)}, "window", "True", "int"),
    value_error("negative window", {"window": (-1, 0)}, "window", "-1", "None"),
    value_error("negative right side", {"window": (0, -2)}, "window", "-2", "None"),
    value_error("unknown offset", {"query_offset": "middle"}, "query_offset", "middle", "start"),
    type_error("offset as a float", {"query_offset": 1.0}, "query_offset", "1.0", "int"),
    type_error("offset as a bool", {"query_offset": True}, "query_offset", "True", "int"),
    type_error("array of float offsets", {"query_offset": zeros(2)}, "query_offset", "float32"),
    value_error("offsets of a wrong shape", {"query_offset": zeros(3, dtype="int32")}, "(3,)"),
]

LENGTHS = [
    bad
    for name, length, wrong in (("query_lengths", 5, 6), ("key_lengths", 7, 8))
    for bad in (
        value_error(f"{name} too large", {name: wrong}, name, str(wrong), str(length)),
        value_error(f"{name} negative", {name: -1}, name, "-1", str(length)),
        value_error(
            f"{name} of one item too large",
            {name: np.array([0, wrong])},
            *(name, str(wrong), str(length)),
        ),
        value_error(f"{name} of one item negative", {name: np.array([-2, 1])}, name, "-2"),
        value_error(f"{name} of a wrong shape", {name: np.array([1, 1, 1])}, name, "(3,)", "(2,)"),
        value_error(
            f"{name} of too high a rank", {name: np.array([[1, 1]])}, name, "(1, 2)", "(2,)"
        ),
        type_error(f"{name} as a float", {name: 2.0}, name, "2.0", "int"),
        type_error(f"{name} as a bool", {name: True}, f"{name} must be an int or", "got True"),
        type_error(f"{name} as a list", {name: [1, 2]}, name, "[1, 2]", "int"),
        type_error(f"{name} as a string", {name: "all"}, name, "all", "int"),
        type_error(f"{name} of floats", {name: zeros(2)}, name, "float32", "int"),
        type_error(f"{name} of bools", {name: zeros(2, dtype="bool")}, name, "bool", "int"),
    )
]

NUMBERS = [
    type_error("scale as a string", {"scale": "auto"}, "scale", "auto", "number"),
    type_error("scale as a bool", {"scale": True}, "scale", "True", "number"),
    type_error("scale as a complex", {"scale": 1j}, "scale", "1j", "number"),
    type_error("scale as an array", {"scale": zeros(2)}, "scale", "(2,)", "number"),
    value_error("scale NaN", {"scale": float("nan")}, "scale", "nan", "finite"),
    value_error("scale infinite", {"scale": float("inf")}, "scale", "inf", "finite"),
    value_error("scale beyond a float", {"scale": 10**400}, "scale", "finite"),
    type_error("softcap as a string", {"softcap": "no"}, "softcap", "no", "number"),
    type_error("softcap as a bool", {"softcap": True}, "softcap", "True", "number"),
    value_error("softcap 0", {"softcap": 0}, "softcap", "0", "None"),
    value_error("softcap negative", {"softcap": -2.5}, "softcap", "-2.5", "> 0"),
    value_error("softcap NaN", {"softcap": float("nan")}, "softcap", "nan", "> 0"),
    value_error("softcap infinite", {"softcap": float("inf")}, "softcap", "inf", "None"),
]

DROPOUT = [
    type_error("a rate alone", {"dropout": 0.1}, "dropout", "0.1", "Dropout(rate, seed)"),
    type_error("a pair", {"dropout": (0.1, 3)}, "dropout", "(0.1, 3)", "Dropout(rate, seed)"),
    type_error("a rate as a string", {"dropout": Dropout("0.1", 3)}, "rate", "0.1"),
    type_error("a rate as a bool", {"dropout": Dropout(True, 3)}, "rate", "True"),
    value_error("a rate above 1", {"dropout": Dropout(1.5, 3)}, "rate", "1.5", "[0, 1]"),
    value_error("a negative rate", {"dropout": Dropout(-0.1, 3)}, "rate", "-0.1", "[0, 1]"),
    value_error("a rate NaN", {"dropout": Dropout(float("nan"), 3)}, "rate", "nan", "[0, 1]"),
    type_error("a seed as a float", {"dropout": Dropout(0.1, 3.0)}, "seed", "3.0", "int"),
    type_error("a seed as a bool", {"dropout": Dropout(0.1, True)}, "seed", "True", "int"),
    type_error("no seed", {"dropout": Dropout(0.1, None)}, "seed", "None", "int"),
    type_error("a seed of rank 1", {"dropout": Dropout(0.1, np.array([3]))}, "seed", "(1,)", "0-d"),
    value_error("a seed too large", {"dropout": Dropout(0.1, 2**64)}, "seed", str(2**64), "2**64"),
    value_error("a seed too small", {"dropout": Dropout(0.1, -(2**63) - 1)}, "seed", "2**63"),
]

THE_REST = [
    value_error("unknown engine", {"engine": "cuda"}, "engine", "cuda", "auto", "portable"),
    value_error("native engine", {"engine": "native"}, "native", "portable"),
    type_error("engine of another kind", {"engine": None}, "engine", "None", "auto"),
    type_error("block_size as a number", {"block_size": 64}, "block_size", "64", "pair"),
    type_error("block_size of three", {"block_size": (1, 2, 3)}, "block_size", "(1, 2, 3)"),
    type_error("block_size of floats", {"block_size": (8.0, 8)}, "block_size", "8.0", "int"),
    value_error("block_size 0", {"block_size": (0, 8)}, "block_size", "0", "1"),
    value_error("block_size negative", {"block_size": (8, -1)}, "block_size", "-1", "1"),
    type_error("unknown option", {"is_causal": True}, "is_causal"),
]

BAD = [*INPUTS, *LAYOUTS, *DTYPES, *MASKS, *POSITIONS, *LENGTHS, *NUMBERS, *DROPOUT, *THE_REST]


def refused(backend: Backend, bad: Bad, function=attention):
    """Make the call, and return the error that it must raise."""
    good = make_inputs(**{"heads": 4, "key_heads": 2, "width": 8, **bad.good})
    arguments = {**good, **bad.changes}
    arrays = {name: a for name, a in arguments.items() if isinstance(a, np.ndarray)}
    before = {name: array.tobytes() for name, array in arrays.items()}
    own = {name: backend.asarray(array) for name, array in arrays.items()}
    with pytest.raises(bad.error) as caught:
        function(**{**arguments, **own})
    assert type(caught.value) is bad.error
    for name, array in own.items():
        assert_unchanged(backend, name, before[name], arrays[name], array)
    return caught.value


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.id)
def test_bad_input_is_refused(backend: Backend, bad: Bad):
    message = str(refused(backend, bad))
    for word in bad.words:
        assert word in message, f"{word!r} is not in: {message}"


def test_partial_attention_refuses_alike(backend: Backend):
    for bad in BAD:
        if bad.id != "unknown option":  # of which the message names the function
            expected = str(refused(backend, bad))
            assert str(refused(backend, bad, partial_attention)) == expected


def test_errors_come_before_any_work(backend: Backend):
    """A call with an empty result is checked as any other."""
    bad = value_error("", {"mask": zeros(5, 9, dtype="bool")}, batch=(0,))
    refused(backend, bad)
    refused(backend, value_error("", {"scale": float("nan")}, keys=0))


@pytest.mark.parametrize(("name", "other"), [("query", 0), ("key", 1), ("value", 1)])
def test_dtypes_that_differ(backend: Backend, name, other):
    """Query, key and value share one dtype: nothing is promoted."""
    if len(backend.dtypes) == 1:
        pytest.skip(f"needs two dtypes: {backend} has {backend.dtypes[0]} alone")
    first, second = backend.dtypes[-2:]
    arguments = {n: a.astype(first) for n, a in make_inputs().items()}
    arguments[name] = arguments[name].astype(second)
    own = {n: backend.asarray(array) for n, array in arguments.items()}
    with pytest.raises(TypeError, match=f"(?s){first}.*{second}|{second}.*{first}"):
        attention(**own)


@pytest.mark.parametrize("name", ["query", "key", "value", "mask", "bias", "sinks"])
def test_arrays_of_two_libraries(backend: Backend, name):
    """The message names the odd one and both libraries.

    But for NumPy's among JAX's, which are constants there: see test_jax.py.
    """
    arguments = {**make_inputs(heads=2), "mask": zeros(5, 7, dtype="bool")}
    arguments |= {"bias": zeros(5, 7), "sinks": zeros(2)}
    for row in (BACKENDS["numpy"], BACKENDS["torch"], BACKENDS["strict"], BACKENDS["jax"]):
        if row.library == backend.library or row.missing():
            continue
        if {row.library, backend.library} == {"jax", "numpy"}:
            continue
        own = {n: backend.asarray(array) for n, array in arguments.items()}
        with row.active():
            own[name] = row.asarray(arguments[name])
        with pytest.raises(TypeError) as caught:
            attention(**own)
        for word in (name, row.library, backend.library):
            assert word in str(caught.value)


@pytest.mark.parametrize("name", ["query_lengths", "key_lengths", "query_offset"])
def test_lengths_of_another_library(backend: Backend, name):
    """They may be NumPy's or the call's own."""
    other = BACKENDS["strict" if backend.library == "torch" else "torch"]
    if other.missing():
        pytest.skip(f"needs {other.library}")
    own = {n: backend.asarray(array) for n, array in make_inputs().items()}
    with pytest.raises(TypeError) as caught:
        attention(**own, **{name: other.asarray(np.array([1, 2]))})
    for word in (name, other.library, backend.library):
        assert word in str(caught.value)


def test_masked_arrays_are_refused():
    """Their mask would be lost."""
    inputs = make_inputs()
    inputs["key"] = np.ma.masked_invalid(inputs["key"])
    with pytest.raises(TypeError, match=r"(?s)key.*MaskedArray.*mask="):
        attention(**inputs)


@pytest.mark.parametrize("name", ["query", "key", "value", "mask", "bias", "sinks", "key_lengths"])
def test_arrays_on_two_devices(name):
    """The message names both."""
    pytest.importorskip("array_api_strict", reason="needs array-api-strict")
    here, there = BACKENDS["strict"], BACKENDS["strict-device1"]
    arguments = {**make_inputs(heads=2), "mask": zeros(5, 7, dtype="bool")}
    arguments |= {"bias": zeros(5, 7), "sinks": zeros(2), "key_lengths": np.array([1, 2])}
    own = {n: (there if n == name else here).asarray(array) for n, array in arguments.items()}
    with pytest.raises(ValueError, match=name if name != "query" else "query|key") as caught:
        attention(**own)
    for word in ("CPU_DEVICE", "device1", "device"):
        assert word in str(caught.value)


def test_torch_tensors_on_two_devices():
    torch = pytest.importorskip("torch", reason="needs torch")
    here = {n: torch.from_numpy(array) for n, array in make_inputs().items()}
    with pytest.raises(ValueError, match=r"(?s)key.*meta.*cpu"):
        attention(here["query"], here["key"].to("meta"), here["value"])


def test_torch_scale_that_is_learned():
    """It would lose its gradient: the message says how to keep it."""
    torch = pytest.importorskip("torch", reason="needs torch")
    inputs = {n: torch.from_numpy(array) for n, array in make_inputs().items()}
    scale = torch.tensor(0.5, requires_grad=True)
    with pytest.raises(TypeError, match=r"multiply the query.*scale=1\.0"):
        attention(**inputs, scale=scale)


def test_jax_scale_that_is_traced():
    jax = pytest.importorskip("jax", reason="needs jax")
    inputs = make_inputs()
    with pytest.raises(TypeError, match=r"multiply the query.*scale=1\.0"):
        jax.jit(lambda scale: attention(**inputs, scale=scale))(0.5)


def test_options_are_named(backend: Backend):
    """A fourth positional argument, which would be a mask elsewhere, is refused."""
    own = [backend.asarray(array) for array in make_inputs().values()]
    with pytest.raises(TypeError, match="positional"):
        attention(*own, own[0])
