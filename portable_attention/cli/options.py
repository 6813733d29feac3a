"""The values of command-line options: text to what ``attention`` takes."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Any

import numpy as np

from portable_attention import Dropout


def window(text: str) -> tuple[int | None, int | None]:
    """Read ``LEFT,RIGHT``; ``none`` on a side is no limit there."""
    sides = [side.strip().lower() for side in text.split(",")]
    try:
        left, right = (None if side == "none" else int(side) for side in sides)
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is not LEFT,RIGHT, the keys before and after the own position: two "
            "integers such as 512,0, or none for no limit on a side"
        ) from None
    return left, right


def block_size(text: str) -> tuple[int, int]:
    """Read ``QUERIES,KEYS``."""
    try:
        queries, keys = (int(size) for size in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not QUERIES,KEYS, two integers") from None
    return queries, keys


def dropout(text: str) -> Dropout:
    """Read ``RATE,SEED``."""
    try:
        rate, seed = text.split(",")
        return Dropout(float(rate), int(seed, 0))
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} is not RATE,SEED, a fraction and an integer such as 0.1,42"
        ) from None


def counts(text: str) -> Any:
    """Read one integer, or several separated by commas, one for each batch item."""
    try:
        numbers = [int(number) for number in text.split(",")]
        return numbers[0] if len(numbers) == 1 else np.array(numbers, dtype=np.int64)
    except (ValueError, OverflowError):
        raise ArgumentTypeError(
            f"{text!r} is not an integer, or integers separated by commas, one for each batch item"
        ) from None


def query_offset(text: str) -> Any:
    """Read ``start``, ``end``, or what `counts` reads."""
    if text in ("start", "end"):
        return text
    try:
        return counts(text)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"{error}; or the word start or end") from None


def words(text: str) -> list[str]:
    """Read names separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]
