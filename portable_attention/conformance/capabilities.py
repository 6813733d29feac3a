"""What an implementation says of itself: what it can do, and which conventions it follows.

Both are declared, never guessed. What is declared has to be right; what is not declared has to
raise. `discover` finds out what could be declared.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from portable_attention.conformance.calls import Call
from portable_attention.conformance.generator import Array
from portable_attention.conformance.oracle import Numbers

CAPABILITIES: Final[Mapping[str, str]] = {
    # Keywords of the call.
    "mask": "takes `mask`, a bool array",
    "bias": "takes `bias`, a floating array",
    "causal": "takes `causal`",
    "window": "takes `window`",
    "offsets": "takes `query_offset`",
    "lengths": "takes `query_lengths` and `key_lengths`",
    "scale": "takes `scale`",
    "softcap": "takes `softcap`",
    "sinks": "takes `sinks`",
    "dropout": "takes `dropout`, with this library's rule for which pair is kept",
    "lse": "takes `return_lse`",
    "layout": "takes `layout`",
    # Inputs that not every implementation takes.
    "float16": "takes float16",
    "bfloat16": "takes bfloat16",
    "float32": "takes float32",
    "float64": "takes float64",
    "gqa": "takes fewer key/value heads than query heads",
    "value-width": "takes values of another width than queries and keys",
    "ranks": "takes any number of batch axes, none included, and single matrices",
    "batch-broadcast": "broadcasts batch axes of size 1",
    "zero-sizes": "takes batch axes, lengths and widths of 0",
    "strides": "takes arrays that are not packed in memory, and read-only ones",
    # Behaviour.
    "nan-safety": "does not feel NaN and infinities in what is masked",
    "non-finite": "lets NaN and infinities be felt exactly where they are attended",
    "determinism": "gives the same bits for the same call",
    "gradients": "has gradients, through its library or through `vjp`",
    "validation": "refuses, with TypeError or ValueError, what the specification refuses",
}

KEYWORDS: Final[Mapping[str, str]] = {
    "mask": "mask",
    "bias": "bias",
    "causal": "causal",
    "window": "window",
    "query_offset": "offsets",
    "query_lengths": "lengths",
    "key_lengths": "lengths",
    "scale": "scale",
    "softcap": "softcap",
    "sinks": "sinks",
    "dropout": "dropout",
    "return_lse": "lse",
    "layout": "layout",
}
DTYPES: Final = ("float16", "bfloat16", "float32", "float64")
# Where nothing was declared, refusing one of these is no fault, and is reported as refused.
MAY_REFUSE: Final = frozenset(
    ["float16", "bfloat16", "float64", "gqa", "value-width", "ranks", "batch-broadcast", "strides"]
)
ALL: Final = frozenset(CAPABILITIES)
_NEVER_IMPLIED: Final = frozenset(["validation"])

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "empty_rows": ("zero", "mean", "nan"),
    "diagonal": ("explicit", "start", "end"),
    "lse_base": ("e", "2"),
    "empty_lse": ("-inf", "inf", "0", "nan", "lowest"),
    "layout": ("bhld", "blhd"),
    "mask_polarity": ("attend", "ignore"),
    "head_order": ("grouped", "interleaved"),
}


@dataclass(frozen=True)
class Conventions:
    """What libraries do differently, where none of them is wrong by its own rules.

    The defaults are those of docs/semantics.md.

    Parameters
    ----------
    empty_rows : {"zero", "mean", "nan"}
        The output of a row without an allowed key: 0, the mean of all values, or NaN.
    diagonal : {"explicit", "start", "end"}
        Where the causal diagonal and the window sit if no `query_offset` is given and the lengths
        differ: such a call is refused, or it is the upper left or the lower right corner.
    lse_base : {"e", "2"}
        The base of the logarithm.
    empty_lse : {"-inf", "inf", "0", "nan", "lowest"}
        The lse of an empty row without a sink; "lowest" is any number below -1e30.
    layout : {"bhld", "blhd"}
        The axes of query, key, value and output, where no `layout` is given.
    mask_polarity : {"attend", "ignore"}
        What True in a mask means.
    head_order : {"grouped", "interleaved"}
        Whether query head h reads key/value head ``h // (Hq // Hkv)`` or ``h % Hkv``.

    Examples
    --------
    >>> from portable_attention.conformance import Conventions
    >>> Conventions(empty_rows="nan").diagonal
    'explicit'
    """

    empty_rows: str = "zero"
    diagonal: str = "explicit"
    lse_base: str = "e"
    empty_lse: str = "-inf"
    layout: str = "bhld"
    mask_polarity: str = "attend"
    head_order: str = "grouped"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                known = ", ".join(map(repr, choices))
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")

    @classmethod
    def parse(cls, pairs: Iterable[str]) -> Conventions:
        """Read ``key=value`` pairs, as the command line takes them."""
        given = {}
        for pair in pairs:
            name, _, choice = pair.partition("=")
            if name not in _CHOICES:
                known = ", ".join(_CHOICES)
                raise ValueError(f"there is no convention {name!r}; there are {known}")
            given[name] = choice
        return cls(**given)

    def deviations(self) -> dict[str, str]:
        """Return what differs from docs/semantics.md."""
        plain = Conventions()
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if value != getattr(plain, name)}


def choices_of(convention: str) -> tuple[str, ...]:
    """Return the values that a convention can have."""
    return _CHOICES[convention]


def check_capabilities(names: Iterable[str]) -> frozenset[str]:
    """Return a declaration as a set, or say which of its names is unknown."""
    declared = frozenset([names] if isinstance(names, str) else names)
    if unknown := sorted(declared - ALL):
        raise ValueError(
            f"there is no capability {', '.join(map(repr, unknown))}; there are "
            f"{', '.join(CAPABILITIES)}"
        )
    return declared


def keywords_of(function: Callable[..., Any]) -> frozenset[str] | None:
    """Return the keywords that a function names, or None if it takes any or does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function of an extension module
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    takes = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in takes)


def implied(keywords: frozenset[str] | None, *, gradients: bool) -> frozenset[str]:
    """Return the capabilities of an implementation that declares none.

    Its keywords speak for themselves. Of the rest it has everything, except gradients where there
    is no way to ask for them, and validation.
    """
    known = ALL - _NEVER_IMPLIED - (frozenset() if gradients else {"gradients"})
    if keywords is None:
        return known
    missing = {capability for keyword, capability in KEYWORDS.items() if keyword not in keywords}
    return known - missing


def needs(arrays: Mapping[str, Array], options: Mapping[str, Any]) -> frozenset[str]:
    """Return the capabilities that a call needs, read off its arguments."""
    inputs = [arrays[name] for name in ("query", "key", "value")]
    shapes = [array.shape for array in inputs]
    found = {KEYWORDS[name] for name in (*arrays, *options) if name in KEYWORDS}
    found |= {inputs[0].dtype} & set(DTYPES)
    head_axis = -2 if options.get("layout") == "blhd" else -3
    heads = [shape[head_axis] if len(shape) > 2 else 1 for shape in shapes]
    if heads[0] != heads[1]:
        found.add("gqa")
    if {len(shape) for shape in shapes} != {4}:
        found.add("ranks")
    if len({shape[:-3] for shape in shapes}) > 1:
        found.add("batch-broadcast")
    if shapes[0][-1] != shapes[2][-1]:
        found.add("value-width")
    if any(0 in shape for shape in shapes):
        found.add("zero-sizes")
    if "d_output" in arrays:
        found.add("gradients")
    if "d_lse" in arrays:
        found.add("lse")
    return frozenset(found)


def without_offset(call: Call, conventions: Conventions) -> Call | None:
    """Return the call without `query_offset`, or None where no convention places it like that."""
    if conventions.diagonal == "explicit":
        return None if _lengths_differ(call) else _dropped(call, "start")
    return _dropped(call, conventions.diagonal)


def unexpressible(call: Call, conventions: Conventions, *, offsets: bool) -> str:
    """Return why a call cannot be made in other conventions, or "".

    Parameters
    ----------
    call, conventions
        The call, and the conventions of the implementation.
    offsets
        Whether the implementation takes offsets.
    """
    if "dropout" in call.options and conventions.head_order != "grouped":
        return "which pair dropout keeps follows from the order of the heads"
    if offsets:
        return ""
    positional = call.options.get("causal") or call.options.get("window") is not None
    if positional and "query_offset" not in {*call.arrays, *call.options}:
        wanted = _offset(call, 0)
        if conventions.diagonal == "end" and not np.array_equal(wanted, _offset(call, "end")):
            return "the diagonal is at the end of the valid keys by convention"
    return ""


def _dropped(call: Call, corner: str) -> Call | None:
    given = call.arrays.get("query_offset", call.options.get("query_offset"))
    positional = call.options.get("causal") or call.options.get("window") is not None
    if positional and not np.array_equal(_offset(call, given), _offset(call, corner)):
        return None
    return call.without("query_offset")


def _lengths_differ(call: Call) -> bool:
    axis = -3 if call.options.get("layout") == "blhd" else -2
    return bool(call.arrays["query"].shape[axis] != call.arrays["key"].shape[axis])


def _offset(call: Call, given: Any) -> Numbers:
    """Return an offset as a number for each item, or one for all."""
    if isinstance(given, str):
        if given == "start":
            return _offset(call, 0)
        axis = -3 if call.options.get("layout") == "blhd" else -2
        counts = []
        for name, array in (("key_lengths", "key"), ("query_lengths", "query")):
            length = call.arrays[array].shape[axis]
            counts.append(np.asarray(call.argument(name, length)).astype(np.int64))
        given = counts[0] - counts[1]
    offset = np.asarray(0 if given is None else given).astype(np.int64)
    shape = np.broadcast_shapes(*(call.arrays[name].shape[:-3] for name in ("query", "key")))
    return np.broadcast_to(offset, shape if offset.ndim <= len(shape) else offset.shape)


def expected_empty_lse(conventions: Conventions) -> float:
    """Return the lse of an empty row; -inf stands for "lowest", too."""
    if conventions.empty_lse == "lowest":
        return -math.inf
    return float(conventions.empty_lse)
