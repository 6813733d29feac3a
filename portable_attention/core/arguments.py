"""Single numbers among the arguments: what kinds are taken, and the errors for the rest."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from portable_attention.backends.base import dtype_name

SCALE_REMEDY = ": multiply the query by a traced or learned scale and pass scale=1.0"
FLOATS = ("float16", "bfloat16", "float32", "float64")


def real_number(name: str, given: Any, remedy: str = "") -> float:
    """Return a real number as a float; arrays of one value count where they can be read."""
    if isinstance(given, bool | np.bool_ | str | bytes | complex) or given is None:
        raise TypeError(f"{name} must be a real number, got {given!r}")
    if isinstance(given, float):
        return float(given)
    if getattr(given, "ndim", 0) != 0:
        raise TypeError(f"{name} must be a single real number, got {described(given)}{remedy}")
    if getattr(given, "requires_grad", False):
        raise TypeError(f"{name} cannot be differentiated, got {described(given)}{remedy}")
    if hasattr(given, "dtype") and dtype_name(given).startswith(("bool", "complex")):
        raise TypeError(f"{name} must be a real number, got {described(given)}")
    try:
        number = float(given)
    except (TypeError, ValueError, RuntimeError):
        remedy = remedy or static_remedy(given)
        raise TypeError(f"{name} must be a real number, got {described(given)}{remedy}") from None
    except OverflowError:
        raise ValueError(f"{name} must be a finite number, got {given!r}") from None
    if type(given).__module__.partition(".")[0] == "torch":
        from portable_attention.backends.torch_backend import has_tangent

        if has_tangent(given):
            raise TypeError(f"{name} cannot be differentiated, got {described(given)}{remedy}")
    return number


def described(given: Any) -> str:
    """Say what was given, for a message: an array by its kind and shape."""
    if hasattr(given, "dtype") and hasattr(given, "shape"):
        kind = type(given)
        return f"an array of {kind.__module__}.{kind.__qualname__} with shape {tuple(given.shape)}"
    return repr(given)


def static_remedy(given: Any) -> str:
    """Say what to do about a value that JAX traces, where its number is needed; else nothing."""
    if not (hasattr(given, "dtype") and hasattr(given, "shape")):
        return ""  # torch.compile cannot follow what is asked of a type below
    kind = type(given)  # by its name: JAX may not be imported here
    traced = kind.__module__.startswith("jax") and kind.__name__.endswith("Tracer")
    return ": make it static, as with jax.jit(..., static_argnames=...)" if traced else ""


def whole_number(name: str, given: Any, wanted: str = "an int") -> int:
    """Return an int, or raise TypeError; `wanted` says all that is taken where ints are not all."""
    if isinstance(given, bool | np.bool_):
        raise TypeError(f"{name} must be {wanted}, got {given!r}")
    try:
        return operator.index(given)
    except TypeError:
        remedy = static_remedy(given)
        raise TypeError(f"{name} must be {wanted}, got {described(given)}{remedy}") from None


def check_flag(name: str, given: Any) -> None:
    """Check an option that is True or False."""
    if not isinstance(given, bool | np.bool_):
        remedy = static_remedy(given)
        raise TypeError(f"{name} must be True or False, got {described(given)}{remedy}")
