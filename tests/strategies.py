"""Random calls of attention over the whole option space, all options together.

The space is written once, against a `Chooser`. A seeded generator walks it fast and far; Hypothesis
walks it with the same code, and shrinks what it finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from hypothesis import strategies as st

from . import oracle
from .dropout_reference import keep_mask
from .dtypes import numpy_dtype
from .memory import VIEWS, lay_out

INPUTS = ("query", "key", "value")


class Chooser(Protocol):
    """Where the choices come from."""

    def integer(self, low: int, high: int) -> int:
        """Return an integer of low..high."""

    def choice(self, options: Sequence[Any]) -> Any:
        """Return one of the options; the first is the plainest."""

    def chance(self, probability: float) -> bool:
        """Return True that often."""


class RandomChooser:
    """Choices of a seeded generator."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def integer(self, low, high):
        return int(self._generator.integers(low, high + 1))

    def choice(self, options):
        return options[self.integer(0, len(options) - 1)]

    def chance(self, probability):
        return bool(self._generator.random() < probability)


class HypothesisChooser:
    """Choices of Hypothesis, which decides itself how often a chance comes true."""

    def __init__(self, draw) -> None:
        self._draw = draw

    def integer(self, low, high):
        return self._draw(st.integers(low, high))

    def choice(self, options):
        return options[self.integer(0, len(options) - 1)]

    def chance(self, probability):
        del probability
        return self._draw(st.booleans())


@dataclass(frozen=True)
class Call:
    """One call, in NumPy: what `attention` gets, and what the oracle gets."""

    inputs: dict[str, np.ndarray]
    options: dict[str, Any]
    block_size: tuple[int, int] | None = None
    jit: bool = False  # on JAX: every array traced
    return_lse: bool = True
    expected: dict[str, Any] = field(default_factory=dict, repr=False)  # the oracle's options

    @property
    def arrays(self) -> Iterator[np.ndarray]:
        """Every array that the call reads."""
        for value in (*self.inputs.values(), *self.options.values()):
            if isinstance(value, np.ndarray):
                yield value

    def __str__(self) -> str:
        def short(value):
            if isinstance(value, np.ndarray):
                return f"{value.dtype}{list(value.shape)}"
            return repr(value)

        named = {**self.inputs, **self.options, "block_size": self.block_size}
        listed = ", ".join(f"{name}={short(value)}" for name, value in named.items())
        return f"attention({listed}){' under jit' if self.jit else ''}"


def random_call(chooser: Chooser, dtypes: Sequence[str], poison: bool = True) -> Call:
    """Return a call whose every part is chosen: shapes, dtypes, options, memory and poison.

    Without poison all numbers are finite, but for a bias of -inf.
    """
    return _CallMaker(chooser, dtypes).call(poison)


@st.composite
def calls(draw, dtypes):
    """Calls, as a Hypothesis strategy."""
    return random_call(HypothesisChooser(draw), dtypes)


class _CallMaker:
    """The steps of one random call, in the order in which they depend on one another."""

    def __init__(self, chooser: Chooser, dtypes: Sequence[str]) -> None:
        self.pick = chooser
        self.dtypes = dtypes
        self.dtype = chooser.choice(dtypes)
        self.numbers = np.random.default_rng(chooser.integer(0, 2**32 - 1))

    def call(self, poison: bool) -> Call:
        # Calls without options take ways of their own, which all options together never meet.
        self.bare = self.pick.chance(0.2)
        self._choose_shapes()
        self.options = {} if self.layout == "bhld" else {"layout": self.layout}
        if not self.bare:
            self._choose_options()
        self._choose_numbers()
        if poison and self.pick.chance(0.5):
            self._poison()
        self._lay_out()
        expected = {name: value for name, value in self.options.items() if name != "dropout"}
        if self.kept is not None:
            expected |= {"keep": self.kept, "rate": self.options["dropout"][0]}
        return Call(
            inputs=self.inputs,
            options=self.options,
            block_size=self._block_size(),
            jit=self.pick.chance(0.5),
            return_lse=self.pick.chance(0.9),
            expected=expected,
        )

    # Shapes

    def _size(self, high: int) -> int:
        """Return a length or a width: mostly 1 to high, now and then 0."""
        return 0 if self.pick.chance(0.04) else self.pick.integer(1, high)

    def _length(self) -> int:
        """Return a length: mostly short; long enough for other ways to compute now and then."""
        return self.pick.integer(32, 70) if self.pick.chance(0.12) else self._size(17)

    def _choose_shapes(self) -> None:
        pick = self.pick
        self.layout = pick.choice(["bhld", "bhld", "blhd"])
        rank = pick.choice([1, 1, 0, 2, 3]) if self.layout == "bhld" else pick.choice([1, 0, 2])
        self.batch = tuple(0 if pick.chance(0.02) else pick.integer(1, 3) for _ in range(rank))
        self.key_heads = pick.integer(1, 3)
        self.heads = self.key_heads * pick.choice([1, 1, 2, 3])
        self.query_length = self._length()
        same = pick.chance(0.4)
        self.key_length = self.query_length if same else self._length()
        self.width = pick.choice([4, 1, 2, 8, 17, 0] if pick.chance(0.3) else [4, 8])
        self.value_width = self.width if pick.chance(0.5) else self._size(9)
        # 2-D inputs have one head; one alone among others of higher rank is padded.
        two_dimensional = self.layout == "bhld" and pick.chance(0.1)
        if two_dimensional:
            self.batch, self.heads, self.key_heads = (), 1, 1
        shapes = {
            "query": (self.heads, self.query_length, self.width),
            "key": (self.key_heads, self.key_length, self.width),
            "value": (self.key_heads, self.key_length, self.value_width),
        }
        lead = self._batch_axes()
        self.shapes = {name: lead[name] + shape for name, shape in shapes.items()}
        self.flat = two_dimensional
        if two_dimensional:
            self.shapes = {name: shape[-2:] for name, shape in self.shapes.items()}
        elif self.layout == "bhld" and pick.chance(0.2):
            # A head axis of 1 may be left out too, where another input shows the rank.
            name = pick.choice(INPUTS)
            shape = self.shapes[name]
            others = [self.shapes[other] for other in INPUTS if other != name]
            if shape[:-2] == (1,) * len(shape[:-2]) and any(len(s) > 2 for s in others):
                self.shapes[name] = shape[-2:]
        if self.layout == "blhd":
            self.shapes = {name: self._one_rank(shape) for name, shape in self.shapes.items()}
        self.batch = np.broadcast_shapes(*(shape[:-3] for shape in self.shapes.values()))
        self.scores = (*self.batch, self.heads, self.query_length, self.key_length)

    def _batch_axes(self) -> dict[str, tuple[int, ...]]:
        """Return the batch axes of each input: alike, or each axis that of some inputs only."""
        pick = self.pick
        if not self.batch or 0 in self.batch or not pick.chance(0.75 if self.bare else 0.45):
            return {name: self._narrowed(self.batch) for name in INPUTS}
        sizes = [pick.integer(2, 3) for _ in self.batch]
        # One input alone has an axis, or two have it and the third does not: mostly the same ones
        # of all axes, so that the others have no batch.
        alone = [{name} for name in INPUTS]
        having = [*alone, *alone, *(set(INPUTS) - one for one in alone)]
        together = pick.choice(having)
        owners = [together if pick.chance(0.7) else pick.choice(having) for _ in sizes]
        axes = {}
        for name in INPUTS:
            own = tuple(n if name in has else 1 for n, has in zip(sizes, owners, strict=True))
            ones = next((i for i, n in enumerate(own) if n != 1), len(own))
            axes[name] = own[pick.integer(0, ones) if pick.chance(0.3) else 0 :]
        return axes

    def _narrowed(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a shape that broadcasts to this one: some axes of size 1, leading ones left out.

        An axis of size 0 is kept where no other input would show it.
        """
        pick = self.pick
        narrowed = tuple(1 if pick.chance(0.15) and n else n for n in shape)
        dropped = pick.integer(0, len(shape)) if pick.chance(0.15) and 0 not in shape else 0
        return narrowed[dropped:]

    def _one_rank(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (1,) * (len(self.batch) + 3 - len(shape)) + shape

    def _broadcastable(self) -> tuple[int, ...]:
        """Return a shape of any rank that broadcasts to the scores."""
        pick = self.pick
        scores = self.scores[-2:] if self.flat else self.scores
        shape = tuple(1 if pick.chance(0.3) else n for n in scores)
        return shape[pick.integer(0, len(shape)) if pick.chance(0.5) else 0 :]

    # Options

    def _choose_options(self) -> None:
        pick, options = self.pick, self.options
        if pick.chance(0.4):
            density = pick.choice([0.7, 0.95, 0.3, 0.0, 1.0])
            options["mask"] = np.asarray(self.numbers.random(self._broadcastable()) < density)
        if pick.chance(0.4):
            options["bias"] = self._bias()
        positional = False
        if pick.chance(0.4):
            options["causal"] = positional = True
        if pick.chance(0.3):
            sides = [3, 0, 1, None, 20]
            options["window"] = (pick.choice(sides), pick.choice(sides))
            positional = True
        if pick.chance(0.3):
            options["query_lengths"] = self._per_item(0, self.query_length)
        if pick.chance(0.4):
            options["key_lengths"] = self._per_item(0, self.key_length)
        if (positional and self.query_length != self.key_length) or pick.chance(0.3):
            options["query_offset"] = self._offset()
        if pick.chance(0.4):
            options["scale"] = self._scale()
        if pick.chance(0.25):
            options["softcap"] = pick.choice([5.0, 0.5, 30])
        if pick.chance(0.25):
            options["sinks"] = self._sinks()
        if pick.chance(0.25):
            rate = pick.choice([0.5, 0.1, 0.9, 0.0, 1.0])
            options["dropout"] = (rate, pick.choice([0, 7, -1, 2**63 + 11, -(2**63)]))

    def _per_item(self, low: int, high: int) -> int | np.ndarray:
        """Return an int, or an integer array that broadcasts to the batch axes."""
        if self.pick.chance(0.4):
            return self.pick.integer(low, high)
        shape = self._narrowed(self.batch)
        dtype = self.pick.choice(["int64", "int32", "int16"])
        return self.numbers.integers(low, high + 1, shape).astype(dtype)

    def _offset(self) -> Any:
        named = self.pick.choice(["end", "start", None])
        return named or self._per_item(-self.query_length - 2, self.key_length + 2)

    def _scale(self) -> Any:
        scale = self.pick.choice([0.5, 1.0, -0.7, 0.0, 2])
        kind = self.pick.choice([lambda number: number, np.float64, np.float32])
        return kind(scale)

    def _own_dtype(self, array: np.ndarray) -> np.ndarray:
        """Return the array in any of the backend's dtypes, whatever that of the call."""
        dtype = self.dtype if self.pick.chance(0.5) else self.pick.choice(self.dtypes)
        return array.astype(numpy_dtype(dtype))

    def _bias(self) -> np.ndarray:
        shape = self._broadcastable()
        bias = np.asarray(2 * self.numbers.standard_normal(shape))
        if self.pick.chance(0.5):
            bias[self.numbers.random(shape) < self.pick.choice([0.3, 0.05, 1.0])] = -np.inf
        return self._own_dtype(bias)

    def _sinks(self) -> np.ndarray:
        sinks = 2 * self.numbers.standard_normal(self.heads)
        if self.pick.chance(0.1):
            sinks[0] = -np.inf  # adds nothing
        return self._own_dtype(sinks)

    def _block_size(self) -> tuple[int, int] | None:
        if self.bare or self.pick.chance(0.2):
            return None
        sizes = [3, 1, 2, 5, 16, 64]
        return self.pick.choice(sizes), self.pick.choice(sizes)

    # Numbers

    def _choose_numbers(self) -> None:
        spread = self.pick.choice([1.0, 0.1, 4.0])
        self.inputs = {}
        for name in INPUTS:
            numbers = spread * self.numbers.standard_normal(self.shapes[name])
            self.inputs[name] = numbers.astype(numpy_dtype(self.dtype))
        self.kept = None
        if "dropout" in self.options:
            rate, seed = self.options["dropout"]
            self.kept = keep_mask(rate, seed, self.scores)

    def _poison(self) -> None:
        """Write NaN and infinities where nothing may feel them, and now and then where it must."""
        pick = self.pick
        if 0 in self.scores:
            return
        restrictions = ("causal", "window", "query_offset", "query_lengths", "key_lengths", "mask")
        restricting = {name: self.options[name] for name in restrictions if name in self.options}
        possible = oracle.allowed_pairs(self.scores, **restricting)
        bias = self.options.get("bias")
        if bias is not None:
            unseen = ~_any_over(possible, bias.shape)
            self._spoil(bias, unseen & (self.numbers.random(bias.shape) < 0.5))
            possible = possible & ~np.isneginf(bias.astype(np.float64))
        attended = possible if self.kept is None else possible & self.kept
        groups = self.heads // self.key_heads
        by_key_head = (*self.batch, self.key_heads, groups, self.query_length, self.key_length)
        seen = {
            "query": possible.any(-1),
            "key": possible.reshape(by_key_head).any((-3, -2)),
            "value": attended.reshape(by_key_head).any((-3, -2)),
        }
        for name, rows in seen.items():
            array = self.inputs[name]
            self._spoil(array, ~_any_over(rows, array.shape[:-1]))
        if pick.chance(0.2):
            # One that is felt, and in no other row or column. Under dropout only a value: whether a
            # row of NaN that keeps no pair comes out NaN or 0 is nowhere said.
            array = self.inputs[pick.choice(INPUTS) if self.kept is None else "value"]
            if array.size:
                array.flat[pick.integer(0, array.size - 1)] = pick.choice([np.nan, np.inf, -np.inf])

    def _spoil(self, array: np.ndarray, where: np.ndarray) -> None:
        if where.any():
            array[where] = self.pick.choice([np.nan, np.inf, -np.inf])

    def _lay_out(self) -> None:
        """Give each array its place in memory, in the layout of the call."""
        for name, array in self.inputs.items():
            stated = array.swapaxes(-3, -2) if self.layout == "blhd" else array
            view = self.pick.choice(VIEWS) if self.pick.chance(0.1 if self.bare else 0.5) else None
            self.inputs[name] = lay_out(stated, view)
        for name in ("mask", "bias"):
            array = self.options.get(name)
            if array is not None and array.ndim >= 2 and self.pick.chance(0.3):
                self.options[name] = lay_out(array, self.pick.choice(VIEWS))


def _any_over(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Reduce by "any" to a shape that broadcasts to the array's."""
    padded = (1,) * (array.ndim - len(shape)) + tuple(shape)
    axes = tuple(axis for axis, size in enumerate(padded) if size == 1 != array.shape[axis])
    return array.any(axis=axes, keepdims=True).reshape(shape)
