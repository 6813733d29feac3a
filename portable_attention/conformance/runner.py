"""`conform`: holds an implementation against the cases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from portable_attention.conformance import reproduce
from portable_attention.conformance.calls import Call, Outcome
from portable_attention.conformance.capabilities import (
    CAPABILITIES,
    MAY_REFUSE,
    Conventions,
    check_capabilities,
    implied,
    unexpressible,
    without_offset,
)
from portable_attention.conformance.cases import Case, select
from portable_attention.conformance.checks import CHECKS, Trial
from portable_attention.conformance.judge import (
    Finding,
    answers,
    judge_results,
    outcome_findings,
    results_of,
)
from portable_attention.conformance.oracle import steps_of
from portable_attention.conformance.report import CaseResult, Report
from portable_attention.conformance.sessions import (
    Implementation,
    Session,
    name_of,
    open_session,
)
from portable_attention.conformance.translation import translated, translated_back

Progress = Callable[[int, int, CaseResult], object]

LIMIT: Final = 20.0  # seconds for a call: compilers and cold devices are slow
_ENDS: Final = 3  # calls that may hang or crash before the rest is left
_MINIMISED: Final = 5  # findings that are made small
# What shows in behaviour and cannot be asked for in a call, so that not declaring it raises nothing.
_NOT_ASKED_FOR: Final = frozenset(
    ["nan-safety", "non-finite", "determinism", "gradients", "validation", "strides", "lse"]
)


def conform(
    function: Callable[..., Any] | str,
    *,
    backend: str = "numpy",
    device: str | None = None,
    capabilities: Iterable[str] | None = None,
    conventions: Conventions | Mapping[str, str] | None = None,
    vjp: Callable[..., Any] | str | None = None,
    quick: bool = False,
    cases: Iterable[str] | None = None,
    progress: Progress | None = None,
    isolate: bool | None = None,
    time_limit: float = LIMIT,
) -> Report:
    """Hold an implementation of attention against every case.

    Parameters
    ----------
    function : callable or str
        Called as ``function(query, key, value, **options)``, with the options of
        `portable_attention.attention` that it declares, and only those that a case uses. A string
        names it: ``package.module:function`` or ``path/to/file.py:function``.
    backend : {"numpy", "torch", "jax", "cupy", "strict"}, default "numpy"
        The library of the arrays that it takes.
    device : str, optional
        As the library writes it.
    capabilities : iterable of str, optional
        What it can do: names of `CAPABILITIES`. What is declared has to be right, and what is not
        has to raise. By default its keywords speak for it, the rest is taken as declared, and
        where it refuses a dtype, grouped heads or a rank, that is reported and not held against it.
    conventions : Conventions or mapping, optional
        Where it deviates from docs/semantics.md by intention.
    vjp : callable or str, optional
        Gradients, called as `portable_attention.attention_vjp`. By default ``function.vjp``, or
        the automatic differentiation of PyTorch and JAX.
    quick : bool, default False
        Run the quick cases alone.
    cases : iterable of str, optional
        Only these cases, by id or by group.
    progress : callable, optional
        Called with the number of cases done, their total, and the last `CaseResult`.
    isolate : bool, optional
        Make the calls in a process of their own, that may hang or crash. By default where that is
        possible: for functions that can be imported, and for all others on NumPy.
    time_limit : float, default 20
        Seconds for one call.

    Returns
    -------
    Report
        ``report.ok``, ``report.findings``, ``print(report)``, ``report.to_html(path)``.

    Raises
    ------
    ImplementationError
        Where the implementation cannot be imported, or its library or device cannot be used.

    Examples
    --------
    >>> from portable_attention import attention
    >>> from portable_attention.conformance import conform
    >>> report = conform(attention, cases=["scale"], isolate=False)
    >>> report.ok
    True
    """
    start = time.perf_counter()
    agreed = _conventions(conventions)
    declared = None if capabilities is None else check_capabilities(capabilities)
    implementation = Implementation(function, backend, device, vjp)
    session = open_session(implementation, isolate, time_limit)
    try:
        about = session.describe()
        able = (
            declared
            if declared is not None
            else implied(about["keywords"], gradients=about["gradients"])
        )
        run = Run(session, name_of(function), backend, agreed, able, declared is not None)
        chosen = select(quick=quick, ids=cases)
        undeclared = [] if cases is not None else _probes(able, agreed)
        results = []
        for number, case in enumerate((*chosen, *undeclared)):
            expected_to_raise = number >= len(chosen)
            results.append(run.undeclared(case) if expected_to_raise else run.case(case))
            if progress is not None:
                progress(number + 1, len(chosen) + len(undeclared), results[-1])
    finally:
        session.close()
    return Report(
        implementation=name_of(function),
        library=about["library"],
        device=about["device"],
        capabilities=able,
        declared=declared is not None,
        conventions=agreed,
        results=tuple(results),
        isolated=session.isolated,
        quick=quick,
        seconds=time.perf_counter() - start,
    )


def _conventions(given: Conventions | Mapping[str, str] | None) -> Conventions:
    if given is None:
        return Conventions()
    return given if isinstance(given, Conventions) else Conventions(**given)


def why_not_applicable(case: Case, able: frozenset[str], conventions: Conventions) -> str:
    """Return why a case says nothing about an implementation, or ""."""
    call = case.call()
    missing = case.needs() - able
    if "offsets" in missing and case.check == "call":
        if without_offset(call, conventions) is not None:
            missing -= {"offsets"}
        elif missing == {"offsets"}:
            return "another corner than that of the convention, and offsets are not declared"
    if missing:
        return f"needs {', '.join(sorted(missing))}"
    if call.cotangents and conventions.empty_rows != "zero" and steps_of(**call.arguments).empty.any():
        return "gradients through empty rows follow no convention but 0"
    return unexpressible(call, conventions) if "offsets" not in able else ""


def _probes(able: frozenset[str], conventions: Conventions) -> list[Case]:
    """Return a case for each capability that is not declared, that needs nothing else."""
    probes = []
    for capability in CAPABILITIES:
        if capability in able or capability in _NOT_ASKED_FOR:
            continue
        for case in select():
            if case.check != "call" or case.needs() - able != {capability}:
                continue
            if capability == "offsets" and without_offset(case.call(), conventions) is not None:
                continue
            if unexpressible(case.call(), conventions):
                continue
            shows = f"{capability} is not declared: {case.id} must raise."
            probes.append(replace(case, id=f"undeclared/{capability}", shows=shows, rule="errors"))
            break
    return probes


class Run:
    """One implementation being held against cases."""

    def __init__(
        self,
        session: Session,
        name: str,
        backend: str,
        conventions: Conventions,
        able: frozenset[str],
        declared: bool,
    ) -> None:
        self._session = session
        self._name = name
        self._backend = backend
        self._conventions = conventions
        self._able = able
        self._declared = declared
        self._ends = 0
        self._minimised = 0

    def case(self, case: Case) -> CaseResult:
        """Return the verdict on one case."""
        if why := why_not_applicable(case, self._able, self._conventions):
            return CaseResult.of(case, "not applicable", why)
        if self._ends >= _ENDS:
            return CaseResult.of(case, "not run", f"{_ENDS} calls before it hung or crashed")
        trial = Trial(case.id, case.rule, self._call, self._conventions)
        start = time.perf_counter()
        trial.whole = case.call()
        CHECKS[case.check](trial, trial.whole)
        seconds = time.perf_counter() - start
        may_refuse = case.needs() & MAY_REFUSE
        if not self._declared and may_refuse and trial.outcomes:
            refused = all(outcome.refused for outcome in trial.outcomes)
            if refused and len(trial.findings) <= len(trial.outcomes):
                why = f"{', '.join(sorted(may_refuse))}: {trial.outcomes[0].error}"
                return CaseResult.of(case, "refused", why, seconds=seconds)
        findings = tuple(self._with_code(trial, finding) for finding in trial.findings)
        status = "failed" if findings else "passed"
        return CaseResult.of(case, status, "", trial.units, findings, seconds)

    def undeclared(self, case: Case) -> CaseResult:
        """Return the verdict on a case that needs what is not declared: it must raise."""
        if self._ends >= _ENDS:
            return CaseResult.of(case, "not run", f"{_ENDS} calls before it hung or crashed")
        outcome = self._call(case.call())
        if outcome.refused:
            return CaseResult.of(case, "passed")
        capability = case.id.partition("/")[2]
        message = f"{capability} is not declared, and the call did not raise: {outcome.error}"
        if outcome.kind == "returned":
            right = not self._findings(case.id, case.rule, case.call(), outcome)
            message = f"{capability} is not declared, and the call did not raise; its result is " + (
                f"right: declare {capability}" if right else "wrong"
            )
        return CaseResult.of(case, "failed", findings=(Finding(case.id, "errors", message),))

    def _call(self, call: Call) -> Outcome:
        if "lse" not in self._able:
            call = replace(call, lse=False)
        if "offsets" not in self._able and "query_offset" in call.arguments:
            call = without_offset(call, self._conventions) or call
        outcome = self._session.run(translated(call, self._conventions))
        self._ends += outcome.kind in ("hung", "crashed")
        return translated_back(call, outcome, self._conventions)

    def _findings(self, case: str, rule: str, call: Call, outcome: Outcome) -> list[Finding]:
        verdict = judge_results(
            case,
            rule,
            results_of(outcome),
            answers(call, self._conventions),
            lowest=self._conventions.empty_lse == "lowest",
        )
        return [*outcome_findings(case, rule, outcome), *verdict.findings]

    def _with_code(self, trial: Trial, finding: Finding) -> Finding:
        """Return a finding with code that shows it, made small for the first few."""
        call = trial.failing
        if call is None:
            return finding
        worst = finding
        if self._minimised < _MINIMISED and self._ends == 0:
            self._minimised += 1

            def wrong(smaller: Call) -> list[Finding]:
                found = self._findings(trial.case, trial.rule, smaller, self._call(smaller))
                same = (finding.part, finding.rule)
                return [other for other in found if (other.part, other.rule) == same]

            call = reproduce.minimised(call, lambda smaller: bool(wrong(smaller)))
            worst = next(iter(wrong(call)), finding) if call is not trial.failing else finding
        own = trial.case if call is trial.whole else None
        if "lse" not in self._able:
            call = replace(call, lse=False)
        text = reproduce.code(
            self._name, self._backend, own, call, worst.message, self._conventions
        )
        return replace(finding, code=text)

