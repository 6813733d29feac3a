"""Turn cases/reported_faults.json into NumPy arrays and keyword arguments.

Each case is a call that some attention implementation got wrong, with the report it comes from, the
kind of fault it stands for, and the right answer. An array is written as nested lists of numbers
(with "nan", "inf" and "-inf") or booleans, or as an object: ``values``, ``fill``, ``arange``,
``tril`` or ``random`` (a seed), with ``shape``, ``dtype``, ``set`` (index and number),
``broadcast_to`` and ``view`` (how it lies in memory).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .dtypes import numpy_dtype
from .memory import lay_out

INPUTS = ("query", "key", "value")
GRADIENTS = ("gradients", "lse_gradients", "second_gradients")


@dataclass(frozen=True)
class Case:
    """One call of attention, or one merge of states, and what must come of it."""

    id: str
    kind: str
    dtype: str
    inputs: dict[str, np.ndarray]  # query, key, value; empty for a merge
    states: list[tuple[np.ndarray, np.ndarray]]  # (output, lse) pairs of a merge
    options: dict[str, Any]  # keyword arguments of attention
    expect: dict[str, Any]  # expected arrays are float64
    rtol: float
    atol: float
    transform: str | None  # "jit" or "vmap": JAX alone
    mapped: tuple[str, ...]  # what vmap maps over, along axis 0
    backends: tuple[str, ...]  # the only libraries the case is for; empty for all
    keep_numpy: frozenset[str]  # options that stay NumPy arrays on every backend


def load_cases() -> list[Case]:
    """Return the cases of the file, in its order."""
    path = Path(__file__).parent / "cases" / "reported_faults.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    return [_read_case(case) for case in document["cases"]]


def _read_case(case: dict[str, Any]) -> Case:
    dtype = case["dtype"]
    options = case.get("options", {})
    return Case(
        id=case["id"],
        kind=case["kind"],
        dtype=dtype,
        inputs=_read_inputs(case, dtype),
        states=[_read_state(state, dtype) for state in case.get("states", [])],
        options=_read_options(options, dtype),
        expect=dict(_expectations(case["expect"], dtype)),
        rtol=case["tolerance"]["rtol"],
        atol=case["tolerance"]["atol"],
        transform=case.get("transform"),
        mapped=tuple(case.get("mapped", INPUTS)),
        backends=tuple(case.get("backends", ())),
        keep_numpy=frozenset(
            name
            for name, value in options.items()
            if isinstance(value, dict) and value.get("library") == "numpy"
        ),
    )


def _read_options(options: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return the keyword arguments of attention; bias and sinks default to `dtype`."""
    kwargs: dict[str, Any] = {}
    for name, value in options.items():
        if name == "mask":
            kwargs[name] = read_array(value, None)
        elif name in ("bias", "sinks"):
            kwargs[name] = read_array(value, dtype)
        elif name in ("window", "block_size"):
            kwargs[name] = tuple(value)
        elif name == "dropout":
            kwargs[name] = dict(value)
        elif isinstance(value, list | dict):  # lengths and offsets; a scale with a dtype
            array = read_array(value, "int64")
            kwargs[name] = array if array.ndim else array[()]
        else:
            kwargs[name] = value
    return kwargs


def read_array(spec: Any, dtype: str | None) -> np.ndarray:
    """Return the array that an entry describes; without a dtype, the numbers decide."""
    if not isinstance(spec, dict):
        return _cast(np.asarray(_numbers(spec)), dtype)
    dtype = spec.get("dtype", dtype)
    if "values" in spec:
        array = read_array(spec["values"], dtype)
    elif "fill" in spec:
        array = np.full(spec["shape"], _numbers(spec["fill"]))
    elif "arange" in spec:
        array = np.arange(spec["arange"]).reshape(spec.get("shape", -1))
    elif "tril" in spec:
        array = np.tril(np.ones(spec["tril"], dtype=bool))
    else:
        array = np.random.default_rng(spec["random"]).standard_normal(spec["shape"])
    array = _cast(np.asarray(array), dtype)
    for index, number in spec.get("set", ()):
        array[tuple(index)] = _numbers(number)
    if "broadcast_to" in spec:
        array = np.broadcast_to(array, spec["broadcast_to"])
    return lay_out(array, spec.get("view"))


def _numbers(spec: Any) -> Any:
    """Turn "nan", "inf" and "-inf" into numbers, at any depth."""
    if isinstance(spec, list):
        return [_numbers(item) for item in spec]
    return float(spec) if isinstance(spec, str) else spec


def _cast(array: np.ndarray, name: str | None) -> np.ndarray:
    return array if name is None else array.astype(numpy_dtype(name), copy=False)


def _read_inputs(case: dict[str, Any], dtype: str) -> dict[str, np.ndarray]:
    return {name: read_array(case[name], dtype) for name in INPUTS if name in case}


def _read_state(state: dict[str, Any], dtype: str) -> tuple[np.ndarray, np.ndarray]:
    lse_dtype = "float64" if dtype == "float64" else "float32"
    return read_array(state["output"], dtype), read_array(state["lse"], lse_dtype)


def _expectations(expect: dict[str, Any], dtype: str) -> Iterator[tuple[str, Any]]:
    for name, value in expect.items():
        if name in ("output", "output_or_zero", "lse"):
            yield name, read_array(value, "float64")
        elif name in GRADIENTS:
            yield name, {of: read_array(array, "float64") for of, array in value.items()}
        elif name == "equals":
            yield (
                name,
                (_read_inputs(value, dtype), _read_options(value.get("options", {}), dtype)),
            )
        else:
            yield name, value
