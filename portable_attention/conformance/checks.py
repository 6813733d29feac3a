"""What is done with a case: most are one call, held against the oracle; some are several.

A check is a function of a `Trial`, which makes calls and keeps what was found, and of the call of
the case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from portable_attention.conformance.calls import INPUTS, Call, Outcome
from portable_attention.conformance.capabilities import Conventions
from portable_attention.conformance.judge import (
    Answer,
    Finding,
    answers,
    judge,
    judge_results,
    outcome_findings,
    results_of,
)
from portable_attention.conformance.oracle import Numbers

Run = Callable[[Call], Outcome]


@dataclass
class Trial:
    """One case being tried: makes calls, compares, and remembers.

    Parameters
    ----------
    case, rule
        What findings name.
    run
        Makes a call.
    conventions
        Those of the implementation.
    """

    case: str
    rule: str
    run: Run
    conventions: Conventions
    units: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    failing: Call | None = None  # the first call with a wrong result
    outcomes: list[Outcome] = field(default_factory=list)

    def judged(self, call: Call, label: str = "") -> Outcome:
        """Make a call and hold it against the oracle."""
        outcome = self.run(call)
        self.outcomes.append(outcome)
        verdict = judge(self.case, self.rule, call, outcome, self.conventions)
        for name, units in verdict.units.items():
            self.units[name] = max(units, self.units.get(name, 0.0))
        if verdict.findings and self.failing is None:
            self.failing = call
        prefix = f"{label}: " if label else ""
        self.findings += [replace(f, message=prefix + f.message) for f in verdict.findings]
        return outcome

    def find(self, message: str, rule: str = "", call: Call | None = None) -> None:
        """Note something wrong."""
        self.findings.append(Finding(self.case, rule or self.rule, message))
        if call is not None and self.failing is None:
            self.failing = call

    def compare(self, label: str, results: dict[str, Numbers], expected: dict[str, Answer]) -> None:
        """Hold numbers that were made of several calls against what they must be."""
        verdict = judge_results(self.case, self.rule, results, expected)
        for name, units in verdict.units.items():
            self.units[name] = max(units, self.units.get(name, 0.0))
        for finding in verdict.findings:
            self.findings.append(replace(finding, message=f"{label}: {finding.message}"))


def one_call(trial: Trial, call: Call) -> None:
    """Hold that the call gives what the oracle gives."""
    trial.judged(call)


def output_alone(trial: Trial, call: Call) -> None:
    """Hold that the output is the same where no lse is asked for."""
    trial.judged(replace(call, lse=False))


def same_bits(trial: Trial, call: Call) -> None:
    """Hold that the same call, three times, gives the same bits."""
    first = trial.judged(call)
    for _ in range(2):
        again = trial.run(call)
        trial.findings += list(outcome_findings(trial.case, trial.rule, again))
        for name, array in results_of(first).items():
            other = results_of(again).get(name)
            if other is None or other.tobytes() != array.tobytes():
                trial.find(f"{name} has other bits when the call is made again", call=call)
                return


def memory_layouts(trial: Trial, call: Call) -> None:
    """Hold that nothing depends on how the inputs lie in memory, and read-only inputs are taken."""
    for view in ("swapped", "stepped", "reversed", "readonly", "broadcast"):
        if view == "broadcast":
            same = {name: _all_like_first(call.arrays[name]) for name in INPUTS}
            call = call.with_arrays(**same)
        trial.judged(replace(call, view=view), f"{view} inputs")


def neighbours(trial: Trial, call: Call) -> None:
    """Hold that an item gets the same alone, beside others, and beside large ones."""
    trial.judged(call, "all items")
    trial.judged(_item(call, -1), "the last item alone")
    loud = {name: _first_made_loud(call.arrays[name]) for name in INPUTS}
    trial.judged(call.with_arrays(**loud), "the first item 64 times as large")


def rows_alone(trial: Trial, call: Call) -> None:
    """Hold that a query row gets the same alone: decoding is the last row of a prefill."""
    trial.judged(call, "all rows")
    rows = call.arrays["query"].shape[-2]
    offset = int(call.argument("query_offset", 0))
    for row in {rows - 1, rows // 2}:
        alone = call.with_arrays(query=call.arrays["query"][..., row : row + 1, :])
        for name in ("mask", "bias"):
            array = call.arrays.get(name)
            if array is not None and array.shape[-2] > 1:
                alone = alone.with_arrays(**{name: array[..., row : row + 1, :]})
        trial.judged(alone.with_options(query_offset=offset + row), f"row {row} alone")


def rows_through_the_end(trial: Trial, call: Call) -> None:
    """Hold that one query at the end of the valid keys of a cache is a row of the prefill."""
    trial.judged(call, "prefill")
    query = call.arrays["query"]
    for length in (1, query.shape[-2] // 2, query.shape[-2]):
        step = call.with_arrays(query=query[..., length - 1 : length, :])
        step = step.with_options(query_offset="end", key_lengths=length)
        trial.judged(step, f"step {length - 1} of decoding")


def split_keys(trial: Trial, call: Call) -> None:
    """Hold that two parts of the keys, merged by their lse, are the whole."""
    keys = call.arrays["key"].shape[-2]
    cut = keys // 2 + 1
    parts = []
    for piece in (slice(0, cut), slice(cut, keys)):
        part = call.with_arrays(
            key=call.arrays["key"][..., piece, :], value=call.arrays["value"][..., piece, :]
        )
        if "mask" in call.arrays:
            part = part.with_arrays(mask=call.arrays["mask"][..., piece])
        outcome = trial.judged(part, f"keys {piece.start} to {piece.stop}")
        if trial.findings or outcome.output is None or outcome.lse is None:
            return
        parts.append((_empty_as_specified(outcome, answers(part)), answers(part)))
    whole, merged = answers(call), _merge([outcome for outcome, _ in parts])
    # A merge errs by what its parts err by, weighted as they are, and little more.
    slack = sum(
        (part["output"].bound + np.abs(part["output"].expected) * part["lse"].bound[..., None])
        for _, part in parts
    )
    output = Answer(whole["output"].expected, 2 * (whole["output"].bound + slack))
    lse = Answer(
        whole["lse"].expected,
        2 * (whole["lse"].bound + sum(np.nan_to_num(part["lse"].bound) for _, part in parts)),
    )
    trial.compare("two parts merged", merged, {"output": output, "lse": lse})


def refusal(trial: Trial, call: Call) -> None:
    """Hold that the call is refused with TypeError or ValueError."""
    outcome = trial.run(call)
    trial.outcomes.append(outcome)
    if outcome.kind in ("hung", "crashed"):
        trial.find(outcome.error, call=call)
    elif outcome.kind == "returned":
        trial.find("was accepted; it must be a TypeError or a ValueError", call=call)
    elif not {"TypeError", "ValueError"} & set(outcome.error_types):
        trial.find(f"raised {outcome.error}; it must be a TypeError or a ValueError", call=call)


CHECKS: Final[Mapping[str, Callable[[Trial, Call], None]]] = {
    "call": one_call,
    "output-alone": output_alone,
    "same-bits": same_bits,
    "memory-layouts": memory_layouts,
    "neighbours": neighbours,
    "rows-alone": rows_alone,
    "decoding": rows_through_the_end,
    "split-keys": split_keys,
    "refusal": refusal,
}

# What a check needs beside the arguments of its call.
CHECK_NEEDS: Final[Mapping[str, frozenset[str]]] = {
    "same-bits": frozenset(["determinism"]),
    "memory-layouts": frozenset(["strides"]),
    "rows-alone": frozenset(["offsets"]),
    "decoding": frozenset(["offsets", "lengths"]),
    "split-keys": frozenset(["lse"]),
    "refusal": frozenset(["validation"]),
}


@np.errstate(all="ignore")
def _merge(outcomes: list[Outcome]) -> dict[str, Numbers]:
    """Merge partial results as docs/semantics.md#merge-states has it, in float64."""
    lses = np.stack([np.asarray(o.lse).astype(np.float64) for o in outcomes])
    outputs = np.stack([np.asarray(o.output).astype(np.float64) for o in outcomes])
    top = lses.max(axis=0)
    top = np.where(np.isfinite(top), top, 0.0)
    shares = np.exp(lses - top)
    total = shares.sum(axis=0)
    weights = np.where(total > 0, shares / total, 0.0)
    return {
        "output": (weights[..., None] * outputs).sum(axis=0),
        "lse": top + np.log(total),
    }


def _empty_as_specified(outcome: Outcome, must: Mapping[str, Answer]) -> Outcome:
    """Return an outcome whose empty rows, judged by their convention by now, are 0 and -inf."""
    assert outcome.output is not None
    assert outcome.lse is not None
    empty = np.isneginf(must["lse"].expected)
    return replace(
        outcome,
        output=np.where(empty[..., None], 0.0, outcome.output),
        lse=np.where(empty, -np.inf, outcome.lse),
    )


def _item(call: Call, index: int) -> Call:
    """Return the call with one batch item alone; the batch has one axis."""

    def taken(name: str, array: Numbers) -> Numbers:
        if name in ("query_lengths", "key_lengths", "query_offset"):
            return array[[index]] if array.ndim else array
        return array[[index]] if array.ndim == 4 and array.shape[0] > 1 else array

    arrays = {name: taken(name, array) for name, array in call.arrays.items()}
    return replace(call, arrays=arrays)


def _first_made_loud(array: Numbers) -> Numbers:
    loud = array.copy()
    loud[0] = loud[0] * array.dtype.type(64)
    return loud


def _all_like_first(array: Numbers) -> Numbers:
    return np.array(np.broadcast_to(array[:1], array.shape))


def needs_of_check(name: str) -> frozenset[str]:
    """Return what a check needs of an implementation, beside what its call needs."""
    return CHECK_NEEDS.get(name, frozenset())
