"""How a fault is added to the zoo, and what several of them share."""

from __future__ import annotations

import numpy as np

from ..dense import Dense

ZOO = {}


def fault(*rules, of=Dense, method=None):
    """Add a fault: a function that replaces the method of its name, or the one that is named."""

    def add(function):
        name = function.__name__
        kind = type(name, (of,), {method or name.split("__")[0]: function})
        ZOO[name] = (kind, rules)
        return function

    return add


def tf32(array):
    """Round to 11 bits of significand, as tensor cores do."""
    bits = np.ascontiguousarray(array).view(np.uint32) + np.uint32(0x1000)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def rounded_to(array, dtype):
    return array.astype(dtype).astype(array.dtype)
