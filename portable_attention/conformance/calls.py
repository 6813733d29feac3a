"""One call of an implementation, as data that can be sent elsewhere, and what came back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from portable_attention.conformance.oracle import Numbers

INPUTS: Final = ("query", "key", "value")
DIFFERENTIABLE: Final = (*INPUTS, "bias", "sinks")


@dataclass(frozen=True)
class Call:
    """Arguments of `portable_attention.attention`, as NumPy arrays and plain values.

    Parameters
    ----------
    arrays
        query, key, value, and those options that are arrays.
    options
        The other options. Dropout is a mapping with ``rate`` and ``seed``.
    cotangents
        ``d_output``, and ``d_lse`` if wanted: what to pull back, where gradients are asked for.
    view
        How query, key and value lie in memory: "", "reversed", "stepped", "swapped", "broadcast"
        or "readonly".
    lse
        Whether to ask for the lse.
    memo
        What has been worked out for this call; not an argument.
    """

    arrays: Mapping[str, Numbers]
    options: Mapping[str, Any] = field(default_factory=dict)
    cotangents: Mapping[str, Numbers] = field(default_factory=dict)
    view: str = ""
    lse: bool = True
    memo: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def dtype(self) -> str:
        """The dtype of the query, by name."""
        return str(self.arrays["query"].dtype.name)

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments of the call."""
        return {**self.arrays, **self.options}

    def argument(self, name: str, default: Any = None) -> Any:
        """Return one argument, or a default where it is not given."""
        return self.arguments.get(name, default)

    def with_arrays(self, **arrays: Numbers) -> Call:
        """Return the same call with some arrays exchanged."""
        return replace(self, arrays={**self.arrays, **arrays})

    def with_options(self, **options: Any) -> Call:
        """Return the same call with some options added."""
        return replace(self, options={**self.options, **options})

    def without(self, *names: str) -> Call:
        """Return the same call without some arguments."""
        return replace(
            self,
            arrays={name: array for name, array in self.arrays.items() if name not in names},
            options={name: given for name, given in self.options.items() if name not in names},
        )


@dataclass(frozen=True)
class Outcome:
    """What became of a call: results as NumPy arrays in the axes of the call.

    Parameters
    ----------
    kind
        "returned", "raised", "hung" or "crashed".
    output, lse, gradients
        What was returned; None where it was not, or was not an array that can be read.
    problems
        (rule, message) for each thing that is wrong with the results or was done to the inputs,
        beside the numbers.
    error
        What was raised, or how the process ended.
    error_types
        The names of the classes of what was raised.
    seconds
        How long it took.
    """

    kind: str
    output: Numbers | None = None
    lse: Numbers | None = None
    gradients: Mapping[str, Numbers] = field(default_factory=dict)
    problems: tuple[tuple[str, str], ...] = ()
    error: str = ""
    error_types: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def refused(self) -> bool:
        """Whether the call was refused in an orderly way."""
        return self.kind == "raised"
