"""The cases, as data: what is called, what it shows, and which rule it holds.

The order matters: from the plainest call to the most composed one, so that the first case that
fails names the rule that is broken, and not one that merely depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Final

import numpy as np

from portable_attention.conformance.calls import INPUTS, Call
from portable_attention.conformance.capabilities import needs
from portable_attention.conformance.checks import needs_of_check
from portable_attention.conformance.generator import Array, plain

NAN: Final = float("nan")
INF: Final = float("inf")


@dataclass(frozen=True)
class Case:
    """One case.

    Parameters
    ----------
    id
        Its name, ``group/name``.
    shows
        What it shows, in a sentence.
    rule
        The anchor in docs/semantics.md of the rule that it holds.
    arrays
        query, key, value, those options that are arrays, and ``d_output`` and ``d_lse`` where
        gradients are asked for.
    options
        The other options of `portable_attention.attention`. Dropout is a mapping.
    check
        What is done with the call, by its name in `checks.CHECKS`.
    quick
        Whether it is among the quick cases.
    also
        Capabilities that it needs beside those that its arguments tell.

    Examples
    --------
    >>> from portable_attention.conformance import cases
    >>> cases.find("scale/zero").rule
    'scale'
    """

    id: str
    shows: str
    rule: str
    arrays: Mapping[str, Array]
    options: Mapping[str, Any] = field(default_factory=dict)
    check: str = "call"
    quick: bool = True
    also: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        """The dtype of the query."""
        return self.arrays["query"].dtype

    def call(self) -> Call:
        """Return the call, with its arrays made."""
        return self._call

    def needs(self) -> frozenset[str]:
        """Return the capabilities that it needs."""
        return self._needs

    @cached_property
    def _call(self) -> Call:
        made = {name: array.make() for name, array in self.arrays.items()}
        upstream: list[str] = [name for name in ("d_output", "d_lse") if name in made]
        cotangents = {name: made.pop(name) for name in upstream}
        return Call(made, self.options, cotangents)

    @cached_property
    def _needs(self) -> frozenset[str]:
        return needs(self.arrays, self.options) | needs_of_check(self.check) | frozenset(self.also)

    def in_dtype(self, dtype: str) -> Case:
        """Return the case with query, key and value, and their gradients, in another dtype."""
        recast = {
            name: replace(array, dtype=dtype) if name in (*INPUTS, "d_output") else array
            for name, array in self.arrays.items()
        }
        return replace(self, arrays=recast)

    def is_in_range(self) -> bool:
        """Return whether the dtypes hold all numbers: whether none became infinite."""
        return all(
            array.dtype == "float64"
            or bool((np.isinf(array.make()) == np.isinf(array.numbers())).all())
            for name, array in self.arrays.items()
            if name in INPUTS
        )

    def tags(self) -> tuple[str, ...]:
        """Return its tags: capabilities, dtype among them, and its size."""
        return (*sorted(self.needs()), "quick" if self.quick else "full")

    def described(self) -> dict[str, Any]:
        """Return the case as plain data, for JSON."""
        return {
            "id": self.id,
            "shows": self.shows,
            "rule": f"docs/semantics.md#{self.rule}",
            "tags": list(self.tags()),
            "check": self.check,
            "arrays": {name: array.described() for name, array in self.arrays.items()},
            "options": {
                name: plain(given) if isinstance(given, float) else given
                for name, given in self.options.items()
            },
        }


@cache
def all_cases() -> tuple[Case, ...]:
    """Return all cases, in their order."""
    from portable_attention.conformance.tables import gradients, inputs, masking, rows, scores

    groups = (
        *(scores.PLAIN, inputs.SHAPES, scores.SCALE, inputs.TILES),
        *(masking.MASKS, scores.SLOPES, inputs.LAYOUT, scores.SOFTCAP, masking.POSITIONS),
        *(masking.COMPOSED, rows.EMPTY, inputs.ZERO, rows.SINKS, rows.MASKED, rows.SPECIAL),
        *(masking.TOGETHER, scores.DTYPES, scores.DROPOUT, inputs.MEMORY, gradients.GRADIENTS),
        *(inputs.INVARIANCE, inputs.REFUSALS),
    )
    return tuple(case for group in groups for case in group)


def select(*, quick: bool = False, ids: Iterable[str] | None = None) -> tuple[Case, ...]:
    """Return the cases of a run.

    Parameters
    ----------
    quick
        Only the quick ones.
    ids
        Only these: whole ids, or groups.
    """
    wanted = None if ids is None else set(ids)
    return tuple(
        case
        for case in all_cases()
        if (case.quick or not quick)
        and (wanted is None or case.id in wanted or case.id.partition("/")[0] in wanted)
    )


def find(case_id: str) -> Case:
    """Return one case by its id."""
    for case in all_cases():
        if case.id == case_id:
            return case
    raise KeyError(f"there is no case {case_id!r}")


def inputs(
    seed: int,
    *,
    batch: tuple[int, ...] = (1,),
    heads: int = 1,
    kv_heads: int | None = None,
    queries: int = 4,
    keys: int = 4,
    width: int = 8,
    value_width: int | None = None,
    dtype: str = "float32",
    gain: float = 1.0,
    **others: Array,
) -> dict[str, Array]:
    """Return query, key and value of a call, and what else is given."""
    kv_heads = heads if kv_heads is None else kv_heads
    value_width = width if value_width is None else value_width
    return {
        "query": Array((*batch, heads, queries, width), dtype=dtype, seed=3 * seed, gain=gain),
        "key": Array((*batch, kv_heads, keys, width), dtype=dtype, seed=3 * seed + 1),
        "value": Array((*batch, kv_heads, keys, value_width), dtype=dtype, seed=3 * seed + 2),
        **others,
    }


def equal_scores(
    *, queries: int = 3, keys: int = 4, dtype: str = "float32", **others: Array
) -> dict[str, Array]:
    """Return a call whose weights are equal and whose value j is j + 1."""
    value = Array((1, 1, keys, 1), "index", dtype)
    return {
        "query": Array((1, 1, queries, 1), "constant", dtype, gain=0.0),
        "key": Array((1, 1, keys, 1), "constant", dtype, gain=0.0),
        "value": value.with_put(*(((0, 0, j, 0), j + 1.0) for j in range(min(keys, 64)))),
        **others,
    }


def poisoned(
    arrays: Mapping[str, Array], number: float, **where: tuple[int | None, ...]
) -> dict[str, Array]:
    """Return arrays with a number put somewhere into some of them."""
    put = {name: arrays[name].with_put((index, number)) for name, index in where.items()}
    return {**arrays, **put}


def bits(shape: tuple[int, ...], seed: int, share: float = 0.6) -> Array:
    """Return a random mask."""
    return Array(shape, "bits", "bool", seed=1_000_000 + seed, share=share)


def bell(shape: tuple[int, ...], seed: int, dtype: str = "float32", gain: float = 1.0) -> Array:
    """Return random numbers."""
    return Array(shape, "bell", dtype, seed=2_000_000 + seed, gain=gain)


def counts(*numbers: int) -> Array:
    """Return integers, one for each item of a batch with one axis."""
    return Array(
        (len(numbers),),
        "constant",
        "int64",
        put=tuple(((i,), number) for i, number in enumerate(numbers)),
    )


def with_cotangents(
    arrays: Mapping[str, Array], seed: int, *, lse: bool = False, layout: str = "bhld"
) -> dict[str, Array]:
    """Return arrays with random gradients of the output, and of the lse, to pull back."""
    query, value = arrays["query"], arrays["value"]
    batch = query.shape[:-3]
    for name in INPUTS:  # batch axes of size 1 broadcast
        own = arrays[name].shape[:-3]
        batch = tuple(max(a, b) for a, b in zip(batch, own, strict=True))
    *_, one, other, _ = (1, *query.shape)
    heads, rows = (other, one) if layout == "blhd" else (one, other)
    output = (*batch, *((rows, heads) if layout == "blhd" else (heads, rows)), value.shape[-1])
    if len(query.shape) == 2:
        output = (rows, value.shape[-1])
    found = {**arrays, "d_output": bell(output, seed + 7000, query.dtype)}
    if lse:
        wide = "float64" if query.dtype == "float64" else "float32"
        shape = output[:-2] if layout == "bhld" else (*batch, heads, rows)
        found["d_lse"] = bell((*shape, rows) if layout == "bhld" else shape, seed + 8000, wide)
    return found


def slow(case: Case) -> Case:
    """Return a case as one of the full run alone."""
    return replace(case, quick=False)
