"""What the dialects have in common: reading their options, and adapters to their originals."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

from portable_attention.attention import attention
from portable_attention.backends import Array
from portable_attention.backends.base import dtype_name
from portable_attention.core.arguments import FLOATS, described, real_number
from portable_attention.core.dropout import Dropout

_SIGNATURE = inspect.signature(attention)


def mask_or_bias(name: str, given: Array | None) -> dict[str, Array]:
    """Return a mask that may be bool or additive as the option of `attention` that it is."""
    if given is None:
        return {}
    if not hasattr(given, "dtype"):
        raise TypeError(f"{name} must be an array, got {described(given)}")
    dtype = dtype_name(given)
    if dtype == "bool":
        return {"mask": given}
    if dtype in FLOATS:
        return {"bias": given}
    raise TypeError(
        f"{name} must be bool (True may be attended) or floating (added to the scores), got {dtype}"
    )


def dropout_of(rate: Any, seed: Any) -> Dropout | None:
    """Return the dropout of a call, which needs a seed."""
    if real_number("dropout_p", rate) == 0:
        return None
    if seed is None:
        raise ValueError(
            f"dropout_p = {rate} needs seed=, an int: what is dropped depends on it alone, "
            "not on a hidden generator"
        )
    return Dropout(rate, seed)


def cap_of(name: str, given: Any) -> float | None:
    """Return a softcap where 0 (or None) means that there is none."""
    return None if given is None or real_number(name, given) == 0 else given


def window_of(name: str, given: Any) -> tuple[int | None, int | None] | None:
    """Return a window in which -1 stands for an open side."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TypeError(f"{name} must be a pair (left, right) of ints, got {described(given)}")
    left, right = (None if isinstance(side, int) and side == -1 else side for side in given)
    return None if left is None and right is None else (left, right)


def adapter(
    original: str, takes: Collection[str], kernel: Callable[..., Any]
) -> Callable[..., Any]:
    """Make a callable with the signature of `attention` from one that takes a few of its options.

    `kernel` is called with the three arrays and those options that differ from their defaults. The
    signature that is shown names only what the original takes, freely, which is what the
    conformance kit goes by: of `query_offset` no original has more than a corner.
    """

    def call(query: Array, key: Array, value: Array, **options: Any) -> Any:
        bound = _SIGNATURE.bind(query, key, value, **options)
        given = {
            name: option
            for name, option in bound.arguments.items()
            if name not in ("query", "key", "value") and not _is_default(name, option)
        }
        for name in given:
            if name not in takes:
                lacks(original, name)
        return kernel(query, key, value, **given)

    call.__name__ = call.__qualname__ = "attention"
    call.__doc__ = f"Compute attention with {original}, where it has the options of the call."
    shown = {"query", "key", "value", *takes} - {"query_offset"}
    call.__signature__ = _SIGNATURE.replace(  # type: ignore[attr-defined]
        parameters=[p for name, p in _SIGNATURE.parameters.items() if name in shown]
    )
    return call


def lacks(original: str, option: str) -> None:
    """Raise NotImplementedError for an option of `attention` that the original does not have."""
    raise NotImplementedError(f"{original} has no {option}")


def check_offset(
    original: str, corner: str, options: dict[str, Any], query_length: int, key_length: int
) -> None:
    """Take the offset out of the options, if it is where the original's diagonal sits anyway.

    `corner` is "start" or "end". Without an offset the original's own corner holds.
    """
    places = {"start": 0, "end": key_length - query_length}
    offset = options.pop("query_offset", None)
    positioned = options.get("causal", False) or "window" in options
    if offset is None or not positioned:
        return
    known = isinstance(offset, int | str) and not isinstance(offset, bool)
    if not known or places.get(offset, offset) != places[corner]:
        lacks(original, f"query_offset other than {corner!r}, the corner of its diagonal")


def _is_default(name: str, option: Any) -> bool:
    default = _SIGNATURE.parameters[name].default
    if name == "query_offset" or option is None:
        return option is None
    return isinstance(option, bool | str) and option == default
