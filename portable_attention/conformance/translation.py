"""From this library's conventions to those of an implementation, and back."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from portable_attention.conformance.calls import INPUTS, Call, Outcome
from portable_attention.conformance.capabilities import Conventions
from portable_attention.conformance.oracle import Numbers


def translated(call: Call, conventions: Conventions) -> Call:
    """Return a call as an implementation of these conventions has to be asked."""
    arrays, cotangents = dict(call.arrays), dict(call.cotangents)
    if conventions.mask_polarity == "ignore" and "mask" in arrays:
        arrays["mask"] = ~arrays["mask"]
    if (order := _their_heads(call, conventions)) is not None:
        for name in ("query", "mask", "bias", "sinks"):
            if name in arrays:
                arrays[name] = _heads_taken(call, name, arrays[name], order)
        for name, array in cotangents.items():
            cotangents[name] = _heads_taken(call, name, array, order)
    if _transposes(call, conventions):
        for name in INPUTS:
            arrays[name] = _swapped(arrays[name])
        if "d_output" in cotangents:
            cotangents["d_output"] = _swapped(cotangents["d_output"])
    if conventions.lse_base == "2" and "d_lse" in cotangents:
        d_lse = cotangents["d_lse"]
        cotangents["d_lse"] = (d_lse * math.log(2)).astype(d_lse.dtype)
    return Call(arrays, call.options, cotangents, call.view, call.lse)


def translated_back(call: Call, outcome: Outcome, conventions: Conventions) -> Outcome:
    """Return an outcome in this library's conventions, but for the values of empty rows."""
    output, lse, gradients = outcome.output, outcome.lse, dict(outcome.gradients)
    try:
        if _transposes(call, conventions):
            output = None if output is None else _swapped(output)
            gradients = {n: _swapped(g) if n in INPUTS else g for n, g in gradients.items()}
        if lse is not None and conventions.lse_base == "2":
            lse = lse.astype(np.float64) * math.log(2)
        if (order := _their_heads(call, conventions)) is not None:
            back = np.argsort(order)
            output = None if output is None else _heads_taken(call, "output", output, back)
            lse = None if lse is None else _heads_taken(call, "d_lse", lse, back)
            for name in gradients.keys() & {"query", "bias", "sinks"}:
                gradients[name] = _heads_taken(call, name, gradients[name], back)
    except (ValueError, IndexError):  # of a wrong shape, which is told as such
        pass
    return replace(outcome, output=output, lse=lse, gradients=gradients)


def _transposes(call: Call, conventions: Conventions) -> bool:
    ranks = {call.arrays[name].ndim for name in INPUTS}
    return conventions.layout == "blhd" and "layout" not in call.options and ranks != {2}


def _their_heads(call: Call, conventions: Conventions) -> Numbers | None:
    """Return which of our query heads stands at each of their places, if not the same one."""
    if conventions.head_order == "grouped" or call.arrays["query"].ndim < 3:
        return None
    axis = -2 if call.options.get("layout") == "blhd" else -3
    heads = call.arrays["query"].shape[axis]
    own = call.arrays["key"].shape[axis] if call.arrays["key"].ndim > 2 else 1
    return np.arange(heads).reshape(own, heads // own).T.reshape(-1)


def _heads_taken(call: Call, name: str, array: Numbers, order: Numbers) -> Numbers:
    last = call.options.get("layout") == "blhd" and name in ("query", "output", "d_output")
    axis = -2 if last else {"sinks": -1, "d_lse": -2}.get(name, -3)
    if array.ndim < -axis or array.shape[axis] != len(order):
        return array
    return np.take(array, order, axis=axis)


def _swapped(array: Numbers) -> Numbers:
    return np.ascontiguousarray(array.swapaxes(-3, -2)) if array.ndim > 2 else array
