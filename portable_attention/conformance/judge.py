"""What a call has to give, and what is wrong with what it gave."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from portable_attention.conformance import accuracy, oracle
from portable_attention.conformance.calls import Call, Outcome
from portable_attention.conformance.capabilities import Conventions, expected_empty_lse
from portable_attention.conformance.oracle import Float, Numbers

# Small errors are those of the arithmetic, not of the rule that a case is about: below this share
# of the largest number. Where few of many keys go wrong an error is small, too.
_SMALL = 0.004
_COUNTING_RULES = frozenset(["block-size", "splitting-a-call", "merge-states", "dropout"])

# In the plainest cases a wrong lse beside a right output breaks the rule of the lse; in the others
# it breaks the rule that they are about.
_PLAIN_RULES = frozenset(["order", "the-call", "shapes", "batch-axes", "scale", "accuracy"])


# Numbers, and lists of them such as a shape; not those in names, such as float16.
_NUMBERS = re.compile(r"(?<!\w)-?\d[\d.e+-]*(, -?\d[\d.e+-]*)*,?(?!\w)")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Parameters
    ----------
    case
        The id of the case.
    rule
        The anchor of docs/semantics.md that is broken.
    message
        What is wrong, in a sentence.
    part
        "output", "lse", or the name of a gradient; "" where it is not about numbers.
    index
        Where the worst element is.
    found, expected
        That element, as it is and as it must be.
    units
        Its error in units of the bound; infinite where one of them is not finite.
    code
        Python code that shows the fault.
    kind
        What is wrong, in words that are the same wherever it shows: by default those of the
        message, without the numbers of the case. Findings of one kind are told as one.
    """

    case: str
    rule: str
    message: str
    part: str = ""
    index: tuple[int, ...] = ()
    found: float | None = None
    expected: float | None = None
    units: float | None = None
    code: str = field(default="", repr=False)
    kind: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not self.kind:
            object.__setattr__(self, "kind", _NUMBERS.sub("#", self.message))

    def __str__(self) -> str:
        return f"{self.case}: {self.message} (docs/semantics.md#{self.rule})"


@dataclass(frozen=True)
class Answer:
    """What one result must be: the numbers, and how far from them it may lie."""

    expected: Float
    bound: Float


def answers(call: Call, conventions: Conventions | None = None) -> dict[str, Answer]:
    """Return what a call must give: output, lse, and ``d_query`` and so on for gradients.

    Parameters
    ----------
    call
        The call. Gradients are those of its cotangents.
    conventions
        What empty rows must hold; None is as docs/semantics.md has it.

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention.conformance.calls import Call
    >>> from portable_attention.conformance.judge import answers
    >>> ones = np.ones((1, 1, 2, 4), dtype=np.float32)
    >>> answers(Call({"query": ones, "key": ones, "value": ones}))["lse"].expected
    array([[[2.69314718, 2.69314718]]])
    """
    agreed = conventions or Conventions()
    if agreed not in call.memo:
        call.memo[agreed] = _answers(call, agreed)
    known: dict[str, Answer] = call.memo[agreed]
    return known


def _answers(call: Call, conventions: Conventions) -> dict[str, Answer]:
    layout = call.options.get("layout", "bhld")
    steps = oracle.steps_of(**call.arguments)
    output_bound, lse_bound = accuracy.forward_bounds(steps, call.dtype)
    output, lse = steps.output, steps.lse
    bare = steps.empty & np.isneginf(steps.sink)
    lse = np.where(bare, expected_empty_lse(conventions), lse)
    # Without any keys the output is an empty sum, 0, in every convention.
    if conventions.empty_rows != "zero" and steps.value.shape[-2]:
        mean, mean_bound = accuracy.mean_of_values(steps, call.dtype)
        bare = (bare if conventions.empty_rows == "nan" else steps.empty)[..., None]
        output = np.where(bare, np.nan if conventions.empty_rows == "nan" else mean, output)
        output_bound = np.where(bare, mean_bound, output_bound)
    found = {"output": Answer(output, output_bound), "lse": Answer(lse, lse_bound)}
    if layout == "blhd":
        found["output"] = Answer(output.swapaxes(-3, -2), output_bound.swapaxes(-3, -2))
    elif all(call.arrays[name].ndim == 2 for name in ("query", "key", "value")):
        found = {n: Answer(a.expected[0], a.bound[0]) for n, a in found.items()}
    if call.cotangents:
        gradient = oracle.gradient_of(
            steps, call.arguments, call.cotangents["d_output"], call.cotangents.get("d_lse")
        )
        bounds = accuracy.gradient_bounds(steps, gradient, call.arguments, call.dtype)
        for name, array in gradient.by_argument.items():
            found[f"d_{name}"] = Answer(array, bounds[name])
    return found


def results_of(outcome: Outcome) -> dict[str, Numbers]:
    """Return the results of an outcome by the names of `answers`."""
    found = {f"d_{name}": array for name, array in outcome.gradients.items()}
    if outcome.output is not None:
        found["output"] = outcome.output
    if outcome.lse is not None:
        found["lse"] = outcome.lse
    return found


@dataclass(frozen=True)
class Verdict:
    """How far each result is from its answer, in units of the bound, and what is wrong."""

    units: Mapping[str, float]
    findings: tuple[Finding, ...]


def judge(case: str, rule: str, call: Call, outcome: Outcome, conventions: Conventions) -> Verdict:
    """Hold what became of a call against what must come of it.

    Parameters
    ----------
    case, rule
        What findings name.
    call, outcome
        The call, and what became of it.
    conventions
        Those of the implementation.
    """
    must, results = answers(call, conventions), results_of(outcome)
    verdict = judge_results(
        case,
        rule,
        results,
        must,
        lowest=conventions.empty_lse == "lowest",
        half=call.dtype in ("float16", "bfloat16"),
    )
    findings = [*outcome_findings(case, rule, outcome), *verdict.findings]
    if not findings:
        findings = [
            Finding(case, "derivatives", f"there is no {name}", name)
            for name in must
            if name.startswith("d_") and name not in results
        ]
    return Verdict(verdict.units, tuple(findings))


def judge_results(
    case: str,
    rule: str,
    results: Mapping[str, Numbers],
    expected: Mapping[str, Answer],
    *,
    lowest: bool = False,
    half: bool = False,
) -> Verdict:
    """Compare results with answers.

    Parameters
    ----------
    case, rule
        What findings name. A wrong lse breaks the rule of the lse, where it is not the subject.
    results, expected
        By the same names; a result that is missing is not judged here.
    lowest
        Whether an lse of -inf may be any number below -1e30.
    half
        Whether the inputs are of half precision.
    """
    units: dict[str, float] = {}
    findings: list[Finding] = []
    for name in sorted(results.keys() & expected.keys(), key=list(expected).index):
        found, answer = np.asarray(results[name]), expected[name]
        plain = name == "lse" and not findings and rule in _PLAIN_RULES
        broken = "lse" if plain else rule
        if name == "lse" and lowest:
            wide = found.astype(np.float64)
            found = np.where(np.isneginf(answer.expected) & (wide < -1e30), -np.inf, wide)
        if found.shape != answer.expected.shape:
            units[name] = float("inf")
            message = f"{name} has shape {found.shape}, not {answer.expected.shape}"
            findings.append(
                Finding(
                    case,
                    "shapes" if name[:2] != "d_" else "derivatives",
                    message,
                    name,
                    kind=f"{name} has a wrong shape",
                )
            )
            continue
        error = accuracy.in_units(found, answer.expected, answer.bound)
        units[name] = float(error.max(initial=0.0))
        if units[name] > 1:
            if rule not in _COUNTING_RULES and _is_small(found, answer):
                broken = "wide-arithmetic" if half else "accuracy"
            findings.append(_worst(case, broken, name, found, answer, error))
    return Verdict(units, tuple(findings))


def _is_small(found: Numbers, answer: Answer) -> bool:
    """Return whether all numbers are nearly right."""
    with np.errstate(all="ignore"):
        error = np.abs(found.astype(np.float64) - answer.expected)
    same = (found == answer.expected) | (np.isnan(found) & np.isnan(answer.expected))
    error = np.where(same, 0.0, error)
    size = np.abs(answer.expected[np.isfinite(answer.expected)]).max(initial=0.0)
    return bool((error <= _SMALL * size).all())


def _worst(
    case: str, rule: str, name: str, found: Numbers, answer: Answer, error: Float
) -> Finding:
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(error)), error.shape))
    is_, must = float(found[index]), float(answer.expected[index])
    units = float(error[index])
    wrong = int((error > 1).sum())
    size = "" if np.isinf(units) else f", {units:.3g} times its bound {answer.bound[index]:.2g}"
    where = f"[{', '.join(map(str, index))}]"
    message = (
        f"{name}{where} is {is_:.9g}, must be {must:.9g}{size}; "
        f"{wrong} of {error.size} numbers are wrong"
    )
    kind = f"{rule}: {name} is wrong"
    return Finding(case, rule, message, name, index, is_, must, units, kind=kind)


def outcome_findings(case: str, rule: str, outcome: Outcome) -> Iterator[Finding]:
    """Yield what is wrong with an outcome beside its numbers."""
    if outcome.kind == "raised":
        yield Finding(case, rule, f"raised {outcome.error}")
    elif outcome.kind != "returned":
        yield Finding(case, rule, outcome.error)
    for broken, message in outcome.problems:
        yield Finding(case, broken, message)
