"""Attention weights as a picture: a PNG, or shades in the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from rich.console import Console

Float64 = NDArray[np.float64]

_SHADES: Final = " .:-=+*#%@"
_LABEL: Final = 12  # columns for the name of a token


def attention_map(query: NDArray[np.float32], key: NDArray[np.float32]) -> Float64:
    """Return the weights (heads, queries, keys) of a short text, by the plain formula."""
    scores = query.astype(np.float64) @ key.astype(np.float64).swapaxes(-1, -2)
    scores /= np.sqrt(query.shape[-1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    normalised: Float64 = weights / weights.sum(axis=-1, keepdims=True)
    return normalised


def draw_png(path: Path, weights: Float64, tokens: Sequence[str], head: int, title: str) -> None:
    """Write a PNG: one head large, with its tokens, and all heads small beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(17, 11), layout="constrained")
    figure.suptitle(title)
    grid = figure.add_gridspec(1, 2, width_ratios=(2.2, 1))
    left, right = (figure.add_subfigure(grid[side]) for side in range(2))
    large = left.subplots()
    # The square root shows the weak weights beside the strong ones.
    image = large.imshow(np.sqrt(weights[head]), cmap="magma", interpolation="nearest")
    places = range(len(tokens))
    large.set_xticks(places, tokens, rotation=90, fontsize=6)
    large.set_yticks(places, tokens, fontsize=6)
    large.set_xlabel("key")
    large.set_ylabel("query")
    large.set_title(f"head {head}")
    left.colorbar(image, ax=large, shrink=0.7, label="square root of the weight")
    rows = -(-len(weights) // 3)
    for index, axes in enumerate(right.subplots(rows, 3).flat):
        axes.set_axis_off()
        if index < len(weights):
            axes.imshow(np.sqrt(weights[index]), cmap="magma", interpolation="nearest")
            axes.set_title(f"head {index}", fontsize=8)
    figure.savefig(path, format="png", dpi=110)


def draw_terminal(
    console: Console, weights: Float64, tokens: Sequence[str], head: int, title: str
) -> None:
    """Print one head in shades of characters, in colour where the terminal has it."""
    from rich.text import Text

    shown = min(len(tokens), max(1, console.width - _LABEL - 1))
    part = np.sqrt(weights[head, :shown, :shown])
    levels = np.rint(part / part.max() * (len(_SHADES) - 1)).astype(int)
    cut = f" (the first {shown} of {len(tokens)} tokens)" if shown < len(tokens) else ""
    legend = f"{title}, head {head}: a row is a query, a column is a key{cut}"
    console.print(Text(legend), soft_wrap=True)
    for token, row in zip(tokens[:shown], levels.tolist(), strict=True):
        line = Text(token[:_LABEL].rjust(_LABEL) + " ", no_wrap=True)
        for level in row:
            line.append(_SHADES[level], style=f"color({232 + 2 * level + 5})")
        console.print(line, overflow="crop")
