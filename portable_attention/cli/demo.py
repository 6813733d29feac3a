"""``portable-attention demo``: a real model's attention, on every installed library."""

from __future__ import annotations

import json
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from portable_attention import __version__, attention
from portable_attention.cli import long_head
from portable_attention.cli.attention_map import attention_map, draw_png, draw_terminal
from portable_attention.cli.errors import CommandError, require
from portable_attention.cli.libraries import NAMES, Library, devices_of, open_library
from portable_attention.cli.oracle import exact_attention

if TYPE_CHECKING:
    from rich.console import Console

Array = NDArray[Any]

PICTURE: Final = Path("portable-attention-map.png")
HEAD: Final = 9  # a head that looks for the same word elsewhere
# The whole demonstration keeps within half a minute; the long head comes last and takes what the
# rest has left of this. The start of Python and a check against the oracle stand outside.
SECONDS: Final = 23.0
# A sum of 32-bit roundings varies with its order: twice the error of the plain formula is no
# fault, ten times is.
TOLERATED: Final = 10.0
LONG_TOLERATED: Final = 2e-5  # ten times what was measured, relative to the largest of a row


@dataclass(frozen=True)
class Capture:
    """Queries, keys and values (texts, heads, tokens, width) of a model, and their origin."""

    query: NDArray[np.float32]
    key: NDArray[np.float32]
    value: NDArray[np.float32]
    key_lengths: NDArray[np.int64]
    tokens: list[list[str]]
    about: dict[str, str]


@dataclass(frozen=True)
class Trial:
    """What one library made of the capture."""

    library: Library
    output: Array
    lse: Array
    first_ms: float
    median_ms: float


def load_capture() -> Capture:
    """Return the capture that comes with the package."""
    safetensors = require("safetensors")
    with (
        resources.as_file(
            resources.files("portable_attention") / "data" / "minilm_attention.safetensors"
        ) as path,
        safetensors.safe_open(path, framework="numpy") as file,
    ):
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about: dict[str, str] = dict(file.metadata())
    return Capture(**arrays, tokens=json.loads(about["tokens"]), about=about)


def demo(args: Namespace) -> int:
    """Run the demonstration and return 0, or 1 where an answer was wrong."""
    until = time.time() + SECONDS
    _check_picture(args.picture, args.terminal)
    console: Console = require("rich.console").Console(highlight=False)
    capture = load_capture()
    texts, heads, tokens, width = capture.query.shape
    console.print(f"[bold]portable-attention {__version__}[/]")
    console.print(
        f"Input: queries, keys and values of {capture.about['model']}, layer "
        f"{capture.about['layer']}.\n"
        f"{texts} texts of {' and '.join(map(str, capture.key_lengths))} tokens, padded to "
        f"{tokens}; {heads} heads of width {width}; float32:",
        soft_wrap=True,
    )
    for text in json.loads(capture.about["texts"]):
        console.print(f"  {text}", soft_wrap=True)
    right = _compare(console, capture)
    _show_picture(console, capture, args.picture, args.terminal)
    right = _show_long_head(console, until) and right
    return 0 if right else 1


def _check_picture(picture: Path | None, terminal: bool) -> None:
    """Refuse a picture that cannot be written, before the half minute that precedes it."""
    if picture is None:
        return
    if terminal:
        raise CommandError("--picture and --terminal exclude one another: leave one of them out")
    if find_spec("matplotlib") is None:
        raise CommandError("--picture needs matplotlib: pip install 'portable-attention[plot]'")
    if picture.is_dir() or not picture.resolve().parent.is_dir():
        raise CommandError(
            f"--picture '{picture}': name a file in a directory that exists, such as map.png"
        )


def _compare(console: Console, capture: Capture) -> bool:
    """Print a line for each library; return whether every answer is right."""
    table_of = require("rich.table").Table
    exact, exact_lse = exact_attention(
        capture.query, capture.key, capture.value, key_lengths=capture.key_lengths
    )
    plain = _plain_float32(capture)
    allowed = TOLERATED * _distance(plain, exact)
    trials, failed, absent = _trials(console, capture)
    table = table_of(box=None, padding=(0, 2, 0, 0))
    for heading in ("library", "device"):
        table.add_column(heading, no_wrap=True)
    for heading in ("error", "lse error", "to NumPy", "first ms", "later ms"):
        table.add_column(heading, no_wrap=True, justify="right")
    wrong = list(failed)
    for trial in trials:
        error = _distance(trial.output, exact)
        if not error <= allowed:
            wrong.append(
                f"{trial.library.name} on {trial.library.device}: error {error:.1e} is above "
                f"{allowed:.1e}"
            )
        table.add_row(
            f"{trial.library.name} {trial.library.version.partition('+')[0]}",
            trial.library.device,
            f"{error:.1e}",
            f"{_distance(trial.lse, exact_lse):.1e}",
            f"{_distance(trial.output, trials[0].output):.1e}",
            f"{trial.first_ms:.1f}",
            f"{trial.median_ms:.1f}",
        )
    console.print("\n[bold]The same call on every library[/]")
    console.print(table)
    console.print(
        "Errors are the largest differences from the plain formula in float64, which errs by "
        f"{_distance(plain, exact):.1e} itself where it is computed in float32. Times are of the "
        "first call and the median of five more.",
        soft_wrap=True,
    )
    for reason in absent:
        console.print(f"not run: {reason}", soft_wrap=True, markup=False)
    for fault in wrong:
        console.print("[bold red]WRONG[/]:", require("rich.text").Text(fault), soft_wrap=True)
    return not wrong


def _trials(console: Console, capture: Capture) -> tuple[list[Trial], list[str], list[str]]:
    """Return what each library made of the capture, who failed, and who was not run, and why."""
    trials: list[Trial] = []
    failed: list[str] = []
    absent: list[str] = []
    for name in NAMES:
        with console.status(f"{name} ..."):
            try:
                libraries = [open_library(name, device) for device in devices_of(name)]
            except CommandError as error:
                absent.append(str(error))
                continue
            if not libraries:
                absent.append(f"{name} is installed, but has no device on this machine")
            for library in libraries:
                try:
                    trials.append(_trial(library, capture))
                except Exception as error:  # the other libraries still have their say
                    failed.append(f"{name} on {library.device}: {type(error).__name__}: {error}")
    return trials, failed, absent


def _trial(library: Library, capture: Capture) -> Trial:
    with library.scope(False):
        arrays = [library.from_numpy(a) for a in (capture.query, capture.key, capture.value)]
        times: list[float] = []
        while len(times) < 6:
            started = time.perf_counter()
            output, lse = attention(*arrays, key_lengths=capture.key_lengths, return_lse=True)
            library.wait(output)
            times.append(1e3 * (time.perf_counter() - started))
        return Trial(
            library, library.to_numpy(output), library.to_numpy(lse), times[0], median(times[1:])
        )


def _plain_float32(capture: Capture) -> NDArray[np.float32]:
    """Return the plain formula in float32: the error that nobody can complain of."""
    scores = capture.query @ capture.key.swapaxes(-1, -2) / np.float32(capture.key.shape[-1] ** 0.5)
    valid = np.arange(capture.key.shape[-2]) < capture.key_lengths[:, None, None, None]
    scores = np.where(valid, scores, np.float32(-np.inf))
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    output: NDArray[np.float32] = weights / weights.sum(axis=-1, keepdims=True) @ capture.value
    return output


def _distance(one: Array, other: Array) -> float:
    return float(np.abs(one.astype(np.float64) - other).max())


def _show_long_head(console: Console, until: float) -> bool:
    """Print what the long head took; return whether its answer is right."""
    with console.status(f"a causal head of {long_head.LENGTH} tokens on NumPy ..."):
        found = long_head.in_own_process(until)
    length, rows, width = found["length"], found["rows"], found["width"]
    console.print(
        f"\n[bold]A causal head of {length} tokens on NumPy[/]: random normal "
        f"numbers, width {width}, float32",
        soft_wrap=True,
    )
    if rows == length:
        done = f"all {length} queries, each against every key up to its own"
    else:
        done = (
            f"all {length} queries would take about {found['foretold']:.0f} s on this machine, so "
            f"only the last {rows} of them, each against every key up to its own"
        )
    console.print(f"  {done}: {found['seconds']:.1f} s", soft_wrap=True)
    console.print(
        f"  memory above the inputs ({_megabytes(found['inputs'])}): "
        f"{_megabytes(found['peak'])}, of which the output is {_megabytes(found['output'])} "
        f"({found['meter']});\n  the scores alone would be {4 * rows * length / 1e9:.1f} GB",
        soft_wrap=True,
    )
    right: bool = found["error"] <= LONG_TOLERATED
    console.print(
        f"  four of its rows against the float64 oracle: relative error {found['error']:.1e}"
        + ("" if right else f" [bold red]WRONG[/]: above {LONG_TOLERATED:.0e}")
    )
    return right


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _show_picture(console: Console, capture: Capture, picture: Path | None, terminal: bool) -> None:
    """Draw the attention map of the first text."""
    count = int(capture.key_lengths[0])
    weights = attention_map(capture.query[0, :, :count], capture.key[0, :, :count])
    tokens = capture.tokens[0]
    title = f"Attention of all-MiniLM-L6-v2, layer {capture.about['layer'].partition(' ')[0]}"
    console.print()
    if terminal or find_spec("matplotlib") is None:
        draw_terminal(console, weights, tokens, HEAD, title)
        if not terminal:
            console.print("(with matplotlib, pip install 'portable-attention\\[plot]', a PNG)")
        return
    with console.status("the picture ..."):
        path = _draw(picture, weights, tokens, title)
    console.print(f"Attention map written to {path.resolve()}", soft_wrap=True, markup=False)


def _draw(
    picture: Path | None, weights: NDArray[np.float64], tokens: list[str], title: str
) -> Path:
    if picture is not None:
        try:
            draw_png(picture, weights, tokens, HEAD, title)
        except OSError as error:
            raise CommandError(
                f"cannot write the picture '{picture}' ({error}); name another with --picture"
            ) from error
        return picture
    try:
        draw_png(PICTURE, weights, tokens, HEAD, title)
    except OSError:  # the current directory cannot be written to
        elsewhere = Path(tempfile.mkdtemp()) / PICTURE
        draw_png(elsewhere, weights, tokens, HEAD, title)
        return elsewhere
    return PICTURE
