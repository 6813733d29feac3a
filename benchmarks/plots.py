"""The plots of docs/benchmarks.md, as SVG that is the same for the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.workloads import NUMPY, SDPA, SEVEN, TORCH, TWO

Result = dict[str, Any]
# Distinct for the colour-blind as well (Okabe and Ito), and by marker.
_STYLES = {
    NUMPY: ("#0072b2", "o"),
    "NumPy, window": ("#56b4e9", "s"),
    TORCH: ("#009e73", "D"),
    SDPA: ("#d55e00", "^"),
    "ONNX Runtime": ("#cc79a7", "v"),
    "OpenVINO": ("#e69f00", "P"),
    TWO: ("#000000", "_"),
    SEVEN: ("#000000", "_"),
    "naive NumPy": ("#999999", "x"),
}
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "benchmarks",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def draw(results: Result, folder: Path) -> dict[str, str]:
    """Draw what the results have the numbers for; return the files and what each shows."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    works = results["workloads"]
    times = _by_length(works, "lengths-dense-")
    times |= {
        f"{name}, window": line for name, line in _by_length(works, "lengths-window-").items()
    }
    memory = _by_length(works, "lengths-memory-", 1e-6)
    fractions = _fractions(works)
    made: dict[str, str] = {}
    with mpl.rc_context(_SETTINGS):
        if times:
            figure = _lines(pyplot, times, "seconds")
            made |= _save(figure, folder / "time.svg", "Time against length, one head of width 64")
        if memory:
            figure = _lines(pyplot, memory, "MB above inputs and output")
            made |= _save(figure, folder / "memory.svg", "Peak memory against length")
        if fractions:
            text = "Fraction of the floor: the time of the products alone by that of the call"
            made |= _save(_dots(pyplot, fractions), folder / "floor.svg", text)
    return made


def _by_length(works: list[Result], prefix: str, factor: float = 1.0) -> dict[str, Any]:
    """Return (lengths, values) by entry of the workloads that end in a length."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for work in works:
        if work["name"].startswith(prefix):
            for name, entry in work["entries"].items():
                if "median" in entry:
                    lengths, values = found.setdefault(name, ([], []))
                    lengths.append(int(work["name"].removeprefix(prefix)))
                    values.append(entry["median"] * factor)
    return found


def _fractions(works: list[Result]) -> dict[str, dict[str, float]]:
    """Return how fast each way is as a part of the products alone, by workload."""
    found: dict[str, dict[str, float]] = {}
    for work in works:
        medians = {
            name: entry["median"] for name, entry in work["entries"].items() if "median" in entry
        }
        floor = medians.get(TWO, medians.get(SEVEN))
        if floor is not None and work["group"] in {"forward", "causal", "backward"}:
            found[work["name"]] = {
                name: floor / value
                for name, value in medians.items()
                if name in _STYLES and name not in {TWO, SEVEN}
            }
    return found


def _lines(pyplot: Any, found: dict[str, Any], label: str) -> Any:
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    for name, (lengths, values) in found.items():
        color, marker = _STYLES.get(name, ("#666666", "."))
        axes.loglog(lengths, values, color=color, marker=marker, markersize=5, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("length")
    axes.set_ylabel(label)
    axes.legend()
    return figure


def _dots(pyplot: Any, found: dict[str, dict[str, float]]) -> Any:
    figure, axes = pyplot.subplots(figsize=(6.4, 1.6 + 0.3 * len(found)), layout="constrained")
    names = list(dict.fromkeys(name for row in found.values() for name in row))
    for name in names:
        color, marker = _STYLES[name]
        rows = [(row[name], place) for place, row in enumerate(found.values()) if name in row]
        axes.plot(*zip(*rows, strict=True), color=color, marker=marker, linestyle="", label=name)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlim(left=0.0)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("fraction of the speed of the products alone")
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def _save(figure: Any, path: Path, text: str) -> dict[str, str]:
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    # Matplotlib ends lines with spaces, which no repository wants.
    drawn = path.read_text(encoding="utf-8")
    path.write_text("\n".join(map(str.rstrip, drawn.splitlines())) + "\n", encoding="utf-8")
    return {path.name: text}
