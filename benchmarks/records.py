"""The kinds of things that a benchmark is made of: calls, entries, bars and workloads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Call:
    """One call of attention, by its shapes and options; the arrays are random."""

    batch: int
    heads: int
    length: int
    width: int
    options: dict[str, Any] = field(default_factory=dict)
    kv_heads: int | None = None
    key_length: int | None = None
    dtype: str = "float32"
    mask: bool = False  # an arbitrary bool mask, one for every score
    bias: bool = False  # the same of numbers to add
    backward: bool = False  # the gradients, too
    spread: float = 1.0  # the standard deviation of queries and keys

    def __str__(self) -> str:
        words = [f"{key}={value}" for key, value in self.options.items()]
        if self.kv_heads is not None:
            words.append(f"kv_heads={self.kv_heads}")
        if self.key_length is not None:
            words.append(f"key_length={self.key_length}")
        return " ".join([f"{self.batch}x{self.heads}x{self.length}x{self.width}", *words])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.length, self.width

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        heads = self.heads if self.kv_heads is None else self.kv_heads
        length = self.length if self.key_length is None else self.key_length
        return self.batch, heads, length, self.width

    @property
    def features(self) -> frozenset[str]:
        """What a way must be able to do to take this call."""
        found = {name for name in ("mask", "bias", "backward") if getattr(self, name)}
        found |= set(self.options)
        if self.kv_heads is not None:
            found.add("grouped heads")
        if self.key_shape[2] != self.length:
            found.add("Lq != Lk")
        if self.dtype != "float32":
            found.add(self.dtype)
        return frozenset(found)

    def but(self, **changes: Any) -> Call:
        """Return the same call with some fields changed."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Entry:
    """One way to compute one call."""

    peer: str
    call: Call
    label: str = ""
    repeat: int = 1  # calls in a row, where one is too short for the clock
    measure: str = "seconds"  # or "bytes": peak memory above inputs and output

    @property
    def name(self) -> str:
        return self.label or self.peer


@dataclass(frozen=True)
class Bar:
    """What must be true: one entry's median against that of the fastest of others, or a number."""

    entry: str
    over: tuple[str, ...] = ()
    at_most: float = 1.0
    times: float = 1.0  # multiplies the others
    fraction: bool = False  # the other way round: at least 1 / at_most of the others' speed
    unit: str = ""  # of a bar without others: "us" or "MB"
    when: str = ""

    def __str__(self) -> str:
        if not self.over:
            return f"{self.entry}: at most {self.at_most:g} {self.unit}"
        others = self.over[0]
        if len(self.over) > 1:
            others = f"the fastest of {', '.join(self.over[:-1])} and {self.over[-1]}"
        if self.times != 1.0:
            others = f"{self.times:g} x {others}"
        limit = f"at most {self.at_most:g} x {others}"
        if self.fraction:
            limit = f"at least {1 / self.at_most:g} of the speed of {others}"
        return f"{self.entry}: {limit}" + (f", {self.when}" if self.when else "")


@dataclass(frozen=True)
class Workload:
    """Entries that take turns in one run, and the bars between them."""

    name: str
    group: str
    entries: tuple[Entry, ...]
    bars: tuple[Bar, ...] = ()
    quick: bool = False
