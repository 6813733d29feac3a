"""Makes a failing call small, and prints it as code to paste."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from portable_attention.conformance.calls import DIFFERENTIABLE, INPUTS, Call
from portable_attention.conformance.capabilities import Conventions
from portable_attention.conformance.cases import Case, find
from portable_attention.conformance.checks import CHECKS
from portable_attention.conformance.generator import numpy_dtype
from portable_attention.conformance.oracle import Numbers
from portable_attention.conformance.translation import translated

TRIES: Final = 40  # calls that making one call small may take
# Conventions by which a call is made otherwise, and not only judged otherwise.
_TRANSLATED: Final = ("layout", "mask_polarity", "head_order", "lse_base")
_PRINTED: Final = 64  # numbers in a call that is printed as numbers, where a case has it
_PRINTED_AT_MOST: Final = 2000  # and where none has
# Where an axis stands in each array that has it, counted from the end.
_AXES: Final[Mapping[str, Mapping[str, int]]] = {
    "batch": dict.fromkeys((*INPUTS, "mask", "bias", "d_output"), -4)
    | {"d_lse": -3, "query_lengths": -1, "key_lengths": -1, "query_offset": -1},
    "heads": dict.fromkeys((*INPUTS, "mask", "bias", "d_output"), -3) | {"d_lse": -2, "sinks": -1},
    "queries": {"query": -2, "mask": -2, "bias": -2, "d_output": -2, "d_lse": -1},
    "keys": {"key": -2, "value": -2, "mask": -1, "bias": -1},
    "width": {"query": -1, "key": -1},
    "value-width": {"value": -1, "d_output": -1},
}


def minimised(call: Call, still_wrong: Callable[[Call], bool]) -> Call:
    """Return a smaller call that is still wrong.

    Parameters
    ----------
    call
        One that is wrong.
    still_wrong
        Makes a call and says whether it is wrong in the same way.
    """
    if call.options.get("layout") == "blhd" or any(call.arrays[n].ndim != 4 for n in INPUTS):
        return call
    tries = TRIES
    shrinking = True
    while shrinking and tries > 0:
        shrinking = False
        for axis in _AXES:
            for size in (1, _size(call, axis) // 2, _size(call, axis) - 1):
                if not 0 < size < _size(call, axis) or tries <= 0:
                    continue
                smaller = _cut(call, axis, size)
                if smaller is None:
                    continue
                tries -= 1
                if still_wrong(smaller):
                    call, shrinking = smaller, True
                    break
    return call


def _size(call: Call, axis: str) -> int:
    name = {"keys": "key", "value-width": "value", "heads": "key"}.get(axis, "query")
    where = {"batch": -4, "heads": -3, "queries": -2, "keys": -2}.get(axis, -1)
    return int(call.arrays[name].shape[where])


def _cut(call: Call, axis: str, size: int) -> Call | None:
    """Return the call with the first few of an axis alone, or None where that makes no call."""
    positional = call.options.get("causal") or call.options.get("window") is not None
    if axis in ("queries", "keys") and positional and "query_offset" not in call.arguments:
        if _size(call, "queries") != _size(call, "keys"):
            return None
        both = _cut_axis(_cut_axis(call, "queries", size), "keys", size)
        return _with_lengths(both, size, size)
    cut = _cut_axis(call, axis, size)
    if axis == "queries":
        return _with_lengths(cut, size, None)
    return _with_lengths(cut, None, size) if axis == "keys" else cut


def _cut_axis(call: Call, axis: str, size: int) -> Call:
    full = _size(call, axis)
    group = call.arrays["query"].shape[-3] // call.arrays["key"].shape[-3]

    def cut(name: str, array: Numbers) -> Numbers:
        where = _AXES[axis].get(name)
        if where is None or array.ndim < -where or array.shape[where] == 1:
            return array
        many = size * group if axis == "heads" and array.shape[where] != full else size
        if array.shape[where] not in (full, full * group):
            return array
        return np.take(array, np.arange(many), axis=where)

    return replace(
        call,
        arrays={name: cut(name, array) for name, array in call.arrays.items()},
        cotangents={name: cut(name, array) for name, array in call.cotangents.items()},
    )


def _with_lengths(call: Call, queries: int | None, keys: int | None) -> Call:
    """Return the call with lengths that fit."""
    for name, most in (("query_lengths", queries), ("key_lengths", keys)):
        if most is not None and name in call.arrays:
            call = call.with_arrays(**{name: np.minimum(call.arrays[name], most)})
        elif most is not None and name in call.options:
            call = call.with_options(**{name: min(call.options[name], most)})
    return call


def code(
    name: str,
    backend: str,
    case: Case,
    call: Call,
    message: str,
    conventions: Conventions,
    lse: bool,
    own_vjp: bool = False,
) -> str:
    """Return Python code that makes a call and says what is wrong with it.

    Parameters
    ----------
    name, backend
        Those of the implementation.
    case
        The case that the call is of. A call of many numbers is taken from it, where it is its own.
    call, message
        The call, and what is wrong with its result.
    conventions
        Those of the implementation: it is called as they are.
    lse
        Whether the lse is asked for.
    own_vjp
        Whether its gradients are its own, and not those of the library's differentiation.
    """
    own = translated(call, conventions)
    arrays = {**own.arrays, **own.cotangents}
    numbers = sum(array.size for array in arrays.values())
    whole = all(call.arrays[n] is array for n, array in case.call().arrays.items() if n in INPUTS)
    literal = numbers <= (_PRINTED if whole else _PRINTED_AT_MOST)
    imports, lines = [], []
    if "dropout" in own.options:
        imports.append("from portable_attention import Dropout")
    if not literal:
        deviations = {n: c for n, c in conventions.deviations().items() if n in _TRANSLATED}
        names = "Conventions, cases" if deviations else "cases"
        imports.append(f"from portable_attention.conformance import {names}")
        plain = find(case.id).dtype == case.dtype
        lines.append(
            f"call = cases.find({case.id!r})"
            + ("" if plain else f".in_dtype({case.dtype!r})")
            + ".call()"
            + ("" if whole else f"  # and then a variation of it: {CHECKS[case.check].__doc__}")
        )
        if deviations:
            imports.append("from portable_attention.conformance.translation import translated")
            lines.append(f"call = translated(call, Conventions(**{deviations!r}))")
        lines.append("arrays = {**call.arrays, **call.cotangents}")
    for array_name, array in arrays.items():
        shown = _literal(array) if literal else None
        lines.append(f"{array_name} = {_as_array(array_name, array, shown, backend)}")
    if own.cotangents:
        lines += _differentiated(name, own, "" if own_vjp else backend)
    else:
        result = "output, lse" if lse else "output"
        lines += [f"{result} = {_call_of(name, own, lse)}", f"print({result})"]
    text = "\n".join([*imports, *_import_of(name), "", *lines, f"# {message}"])
    for module, mark in (
        ("import ml_dtypes", "ml_dtypes."),
        ("import jax", "jax.vjp"),
        ("import jax.numpy as jnp", "jnp."),
        ("import torch", "torch."),
        ("import numpy as np", " np."),
    ):
        if mark in text.replace("(np.", "( np."):
            text = f"{module}\n{text}"
    return text


def _call_of(name: str, own: Call, lse: bool) -> str:
    """Return the expression that makes the call."""
    options = [f"{n}={n}" for n in own.arrays if n not in INPUTS]
    options += [f"{n}={_option(n, given)}" for n, given in own.options.items()]
    options += ["return_lse=True"] if lse else []
    called = ", ".join([*INPUTS, *options])
    function = name.rpartition(":")[2].rpartition(".")[2]
    return f"{function if function.isidentifier() else 'function'}({called})"


def _differentiated(name: str, own: Call, backend: str) -> list[str]:
    """Return the lines that make the call and differentiate it, where a library does that."""
    called = _call_of(name, own, "d_lse" in own.cotangents)
    inputs = ", ".join(n for n in DIFFERENTIABLE if n in own.arrays)
    upstream = ", ".join(own.cotangents)
    results = upstream.replace("d_", "")
    if backend == "torch":
        return [
            f"inputs = [array.requires_grad_() for array in ({inputs})]",
            f"{results} = {called}",
            f"print(torch.autograd.grad([{results}], inputs, [{upstream}], allow_unused=True))",
        ]
    if backend == "jax":
        pulled = f"({upstream})"
        return [
            f"results, pullback = jax.vjp(lambda {inputs}: {called}, {inputs})",
            f"print(pullback({pulled}))",
        ]
    return [f"# the gradients of {called} with {upstream}"]


def _import_of(name: str) -> list[str]:
    where, _, function = name.rpartition(":")
    if where.endswith(".py") and function.isidentifier():
        path, stem = Path(where), Path(where).stem
        if stem.isidentifier():
            folder = [] if path.parent == Path() else [f"sys.path.insert(0, {str(path.parent)!r})"]
            return [*(["import sys", *folder] if folder else []), f"from {stem} import {function}"]
    if not re.fullmatch(r"[A-Za-z_][\w.]*", where) or not function.isidentifier():
        return [f"# function: {name}"]
    return [f"from {where} import {function}"]


def _option(name: str, given: Any) -> str:
    if name == "dropout":
        return f"Dropout({given['rate']!r}, seed={given['seed']!r})"
    return repr(given)


def _as_array(name: str, array: Numbers, literal: str | None, backend: str) -> str:
    dtype = array.dtype.name
    if backend == "torch":
        kind = f"torch.{dtype}"
        if literal is None:
            return f"torch.tensor(np.asarray(arrays[{name!r}], np.float64), dtype={kind})"
        return f"torch.tensor({literal}, dtype={kind})".replace("np.nan", 'float("nan")').replace(
            "np.inf", 'float("inf")'
        )
    kind = "ml_dtypes.bfloat16" if dtype == "bfloat16" else f"np.{dtype}".replace("bool", "bool_")
    if backend == "jax":
        kind = f"jnp.{dtype}".replace("bool", "bool_")
        return f"jnp.array({literal or f'arrays[{name!r}]'}, dtype={kind})"
    if literal is None:
        return f"np.asarray(arrays[{name!r}])"
    shape = f".reshape({array.shape})" if 0 in array.shape else ""
    return f"np.array({literal}, dtype={kind}){shape}"


def _literal(array: Numbers) -> str:
    """Return an array as nested lists of the shortest numbers that give it."""
    if array.ndim:
        return "[" + ", ".join(_literal(part) for part in array) + "]"
    if array.dtype.kind in "bi":
        return str(array.item())
    if not np.isfinite(array.astype(np.float64)):
        text = str(float(array))
        return text.replace("nan", "np.nan").replace("inf", "np.inf")
    if array.dtype == numpy_dtype("float64"):
        return repr(float(array))
    return str(array.astype(np.float32)[()])
