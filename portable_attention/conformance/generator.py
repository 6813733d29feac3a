"""Arrays as data: a few numbers that say what an array holds, in any language.

Every array of the kit is described by an `Array`, and made from it by integer arithmetic that any
language repeats exactly. Nothing depends on the random numbers of a library or of its version.

Element i of an array, counted from 0 in row-major order, is made from the word

    z = seed + (i + 1) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    z = z ^ (z >> 31)

in unsigned integers of 64 bits that wrap. That is SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014), started at the seed. What becomes of the
word says the kind of the array:

- ``bell``: gain * (a + b + c + d - 131070) / 32768, with a to d the four 16-bit parts of z. It lies
  within gain * 4 and has a standard deviation of gain * 1.15. The sum is exact; the product with
  the gain is taken in float64, and the result rounded once, to nearest even, to the dtype.
- ``bits``: z >> 11 is below share * 2**53. True, for a mask.
- ``constant``: the gain.
- ``index``: gain * i.

After that, `put` replaces single entries or whole slices, in the order given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[Any]
Index = tuple[int | None, ...]

_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)


def words(seed: int, count: int) -> NDArray[np.uint64]:
    """Return the first words of SplitMix64 from a seed.

    Examples
    --------
    >>> from portable_attention.conformance.generator import words
    >>> [hex(word) for word in words(0, 2)]
    ['0xe220a8397b1dcdaf', '0x6e789e6aa1b965f4']
    """
    state = np.arange(1, count + 1, dtype=np.uint64) * _GAMMA + np.uint64(seed)
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))


@dataclass(frozen=True)
class Array:
    """What an array holds.

    Parameters
    ----------
    shape
        Its axes.
    kind
        ``bell``, ``bits``, ``constant`` or ``index``: see the module.
    dtype
        ``float16``, ``bfloat16``, ``float32``, ``float64``, ``int64`` or ``bool``.
    seed
        Where the words start, for ``bell`` and ``bits``.
    gain
        The factor, or the constant itself.
    share
        The probability of True, for ``bits``.
    put
        Pairs (index, number): the entries there become that number. None in an index is a whole
        axis, and an index may be shorter than the shape.

    Examples
    --------
    >>> from portable_attention.conformance.generator import Array
    >>> Array((2, 2), kind="index", dtype="float32", put=(((1, None), -1.0),)).make()
    array([[ 0.,  1.],
           [-1., -1.]], dtype=float32)
    """

    shape: tuple[int, ...]
    kind: str = "bell"
    dtype: str = "float32"
    seed: int = 0
    gain: float = 1.0
    share: float = 0.5
    put: tuple[tuple[Index, float], ...] = ()

    def make(self) -> Numbers:
        """Return the array."""
        with np.errstate(over="ignore"):
            return self.numbers().astype(numpy_dtype(self.dtype))

    def numbers(self) -> Numbers:
        """Return the numbers before they are rounded to the dtype."""
        numbers = _KINDS[self.kind](self).reshape(self.shape)
        for index, number in self.put:
            numbers[tuple(slice(None) if at is None else at for at in index)] = number
        return numbers

    def with_put(self, *entries: tuple[Index, float]) -> Array:
        """Return the same array with some more entries replaced."""
        return replace(self, put=(*self.put, *entries))

    def described(self) -> dict[str, Any]:
        """Return this as plain data, for JSON; what is not finite is written as text."""
        data = asdict(self)
        data["gain"] = plain(data["gain"])
        data["put"] = [{"index": list(index), "number": plain(n)} for index, n in self.put]
        return data


def plain(number: float) -> float | str:
    """Return a number as JSON has it: "nan", "inf" and "-inf" are text."""
    return number if np.isfinite(number) else str(float(number))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of that name; bfloat16 is that of the package ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return dtype
    return np.dtype(name)


def has_dtype(name: str) -> bool:
    """Return whether NumPy has a dtype here: bfloat16 needs the package ml_dtypes."""
    return name != "bfloat16" or find_spec("ml_dtypes") is not None


def _bell(array: Array) -> Numbers:
    word = words(array.seed, _size(array))
    low = np.uint64(0xFFFF)
    parts = [(word >> np.uint64(bits)) & low for bits in (0, 16, 32, 48)]
    total = np.asarray(np.sum(parts, axis=0, dtype=np.int64)) - 131070
    return np.asarray(array.gain * (total / 32768))


def _bits(array: Array) -> Numbers:
    uniform: Numbers = (words(array.seed, _size(array)) >> np.uint64(11)) * 2.0**-53
    return uniform < array.share


def _size(array: Array) -> int:
    return int(np.prod(array.shape, dtype=np.int64))


_KINDS: Final[dict[str, Callable[[Array], Numbers]]] = {
    "bell": _bell,
    "bits": _bits,
    "constant": lambda array: np.full(_size(array), array.gain),
    "index": lambda array: array.gain * np.arange(_size(array)),
}
