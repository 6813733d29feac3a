"""Run one workload: check that its entries agree, time them by turns, judge its bars.

What comes out is plain data, ready for JSON:

    {"name", "group", "date", "others",
     "entries": {name: {"peer", "call", "unit", "median", "low", "high", "runs", "error"}
                 or {"peer", "call", "missing"}},
     "bars": [{"bar", "limit", "measured", "unit", "met", "note"}]}

`error` is how far sampled rows of the answer are from the formula in float64 (of a backward call:
how far all of it is from the first entry's); `met` is None where a bar could not be judged;
`others` is the part of the cores' time that other programs took while it was timed, if known.
"""

from __future__ import annotations

import datetime
import functools
import gc
import time
from typing import Any

import numpy as np

from benchmarks import memory
from benchmarks.arrays import TOLERANCES, Inputs, largest_error, make_inputs
from benchmarks.peers import PEERS, Way
from benchmarks.records import Bar, Call, Entry, Workload
from benchmarks.timing import REST, Patience, Sample, samples
from benchmarks.workloads import OURS, TORCH_PRODUCT_SLOWER

Result = dict[str, Any]


def measure(work: Workload, rounds: int, patience: Patience | None = None) -> Result:
    """Run a workload and return what it gave."""
    entries: dict[str, Result] = {
        entry.name: {"peer": entry.peer, "call": _words(entry.call)} for entry in work.entries
    }
    timed = [entry for entry in work.entries if entry.measure == "seconds"]
    ways = _ready(timed, entries)
    repeats = {one.name: one.repeat for one in timed}
    taken, others = samples(ways, rounds, repeats, patience=patience, warm=True)
    for name, sample in taken.items():
        entries[name] |= {"unit": "s", **sample.as_dict()}
    ways.clear()
    gc.collect()
    for entry in work.entries:
        if entry.measure == "bytes":
            entries[entry.name] |= _memory(work, entry)
    return {
        "name": work.name,
        "group": work.group,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "others": others,
        "entries": entries,
        "bars": [judge(bar, entries) for bar in work.bars],
    }


def _words(call: Call) -> str:
    extra = [name for name in ("mask", "bias", "backward") if getattr(call, name)]
    extra += [call.dtype] * (call.dtype != "float32")
    extra += [f"inputs x {call.spread:g}"] * (call.spread != 1.0)
    return " ".join([str(call), *extra])


def _ready(timed: list[Entry], entries: dict[str, Result]) -> dict[str, Any]:
    """Return what to time, by name; note why the others are not, and how right each one is."""
    made: dict[str, Inputs] = {}
    ways: dict[str, Any] = {}
    first: np.ndarray | None = None
    for entry in timed:
        peer, call, found = PEERS[entry.peer], entry.call, entries[entry.name]
        if (reason := peer.missing(call)) is not None:
            found["missing"] = reason
            continue
        inputs = made.setdefault(repr(call), make_inputs(call))
        try:
            way = peer.prepare(call, inputs)
            answer = _answer(way)
            error = None
            if answer is not None and call.backward:
                first = answer if first is None else first
                error = float(np.max(np.abs(answer - first)))
            elif answer is not None:
                error = largest_error(call, inputs, answer)
            tolerance = TOLERANCES[call.dtype]
            if error is not None and not error <= tolerance * (10 if call.backward else 1):
                raise ValueError(f"wrong by {error:.3g}: not timed")
        except Exception as problem:
            if entry.peer in OURS:
                raise
            # Each library, driver and compiler has errors of its own.
            found["missing"] = f"{type(problem).__name__}: {_first_line(problem)}"
            continue
        found["error"] = error
        ways[entry.name] = way.run
    return ways


def _answer(way: Way) -> np.ndarray | None:
    result = way.run()
    return None if way.answer is None else way.answer(result)


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [""])[0][:120]


def _memory(work: Workload, entry: Entry) -> Result:
    reason = PEERS[entry.peer].missing(entry.call) or memory.missing()
    if reason is not None:
        return {"missing": reason}
    found = memory.in_child(work.name, entry.name)
    return {"unit": "bytes", "error": None, **Sample.of([found]).as_dict()}


def judge(bar: Bar, entries: dict[str, Result]) -> Result:
    """Return whether a bar is met by what was measured."""
    found: Result = {"bar": str(bar), "limit": bar.at_most, "unit": bar.unit or "x"}
    found |= {"measured": None, "met": None, "note": ""}
    medians = {name: one["median"] for name, one in entries.items() if "median" in one}
    if bar.entry not in medians:
        return found | {"note": entries[bar.entry].get("missing", "not measured")}
    value = medians[bar.entry]
    if not bar.over:
        measured = value * {"us": 1e6, "MB": 1e-6}[bar.unit]
        return found | {"measured": measured, "met": measured <= bar.at_most}
    others = {name: medians[name] for name in bar.over if name in medians}
    if not others:
        return found | {"note": "nothing to compare with is installed"}
    fastest = min(others, key=lambda name: others[name])
    ratio = value / (others[fastest] * bar.times)
    note = fastest if len(bar.over) > 1 else ""
    if bar.when == TORCH_PRODUCT_SLOWER and not torch_product_is_slower():
        return found | {"measured": ratio, "note": "does not apply: torch's product is as fast"}
    if bar.fraction:
        limit = 1.0 / bar.at_most
        return found | {"limit": limit, "measured": 1.0 / ratio, "met": 1.0 / ratio >= limit}
    return found | {"measured": ratio, "met": ratio <= bar.at_most, "note": note}


def torch_product_is_slower() -> bool:
    """Whether a matrix product of PyTorch takes at least a tenth longer than NumPy's."""
    seconds = product_seconds()
    return seconds["torch"] > 1.1 * seconds["NumPy"]


@functools.cache
def product_seconds(size: int = 1536) -> dict[str, float]:
    """Return the seconds of one square product of each library that is here."""
    matrix = np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)
    ways: dict[str, Any] = {"NumPy": lambda: matrix @ matrix}
    if PEERS["torch SDPA"].missing() is None:
        import torch

        tensor = torch.from_numpy(matrix)
        ways["torch"] = lambda: tensor @ tensor
    time.sleep(REST)
    found = {name: sample.median for name, sample in samples(ways, 9)[0].items()}
    return {"torch": found["NumPy"], **found}
