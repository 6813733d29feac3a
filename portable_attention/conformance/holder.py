"""Holds one implementation against one case after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from portable_attention.conformance import reproduce
from portable_attention.conformance.calls import Call, Outcome
from portable_attention.conformance.capabilities import (
    ALL,
    CAPABILITIES,
    DTYPES,
    MAY_REFUSE,
    Conventions,
    check_capabilities,
    implied,
    unexpressible,
    without_offset,
)
from portable_attention.conformance.cases import Case, select
from portable_attention.conformance.checks import CHECKS, Trial
from portable_attention.conformance.generator import has_dtype
from portable_attention.conformance.implementation import Implementation, name_of
from portable_attention.conformance.judge import Finding, judge
from portable_attention.conformance.oracle import steps_of
from portable_attention.conformance.report import SHOWN, CaseResult
from portable_attention.conformance.sessions import open_session
from portable_attention.conformance.translation import translated, translated_back

LIMIT: Final = 20.0  # seconds for a call: compilers and cold devices are slow
_ENDS: Final = 3  # calls that may hang or crash before the rest is left
_MINIMISED: Final = 5  # findings that are made small, besides the first of each kind
# What shows in behaviour and cannot be asked for in a call: not declaring it need not raise.
_NOT_ASKED_FOR: Final = frozenset(
    ["nan-safety", "non-finite", "determinism", "gradients", "validation", "strides", "lse"]
)


class Holder:
    """One implementation, started once: a context that ends what it started.

    Parameters
    ----------
    function, backend, device, capabilities, without, conventions, vjp, isolate, time_limit
        As for `conform`.

    Examples
    --------
    >>> from portable_attention import attention
    >>> from portable_attention.conformance import cases
    >>> from portable_attention.conformance.holder import Holder
    >>> with Holder(attention, isolate=False) as holder:
    ...     holder.case(cases.find("scale/default")).status
    'passed'
    """

    def __init__(
        self,
        function: Callable[..., Any] | str,
        *,
        backend: str = "numpy",
        device: str | None = None,
        capabilities: Iterable[str] | None = None,
        without: Iterable[str] = (),
        conventions: Conventions | None = None,
        vjp: Callable[..., Any] | str | None = None,
        isolate: bool | None = None,
        time_limit: float = LIMIT,
    ) -> None:
        self.name = name_of(function)
        self.backend = backend
        self.conventions = conventions or Conventions()
        self.declared = capabilities is not None
        named = frozenset() if capabilities is None else frozenset(capabilities)
        asked = ALL if "all" in named else check_capabilities(named)
        left_out = check_capabilities(without)
        implementation = Implementation(function, backend, device, vjp)
        self._session = open_session(implementation, isolate, time_limit)
        about = self._session.describe()
        self.library: str = about["library"]
        self.device: str = about["device"]
        self.isolated = self._session.isolated
        self._own_vjp: bool = about["own_vjp"]
        if not self.declared:
            asked = implied(about["keywords"], gradients=about["gradients"])
        self.capabilities = asked - left_out
        self._ends = 0
        self._minimised: list[str] = []  # the kinds of the findings that were made small

    def __enter__(self) -> Holder:
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    def why_not_applicable(self, case: Case) -> str:
        """Return why a case says nothing about the implementation, or ""."""
        case = self.prepared(case)
        if not has_dtype(case.dtype):
            return "needs the package ml_dtypes"
        call = case.call()
        if not case.is_in_range():
            return f"{case.dtype} cannot hold its numbers"
        missing = case.needs() - self.capabilities
        said = "offsets" in missing and case.check == "call"
        if said and without_offset(call, self.conventions) is not None:
            missing -= {"offsets"}
        if missing:
            return f"needs {', '.join(sorted(missing))}"
        differs = call.cotangents and self.conventions.empty_rows != "zero"
        if differs and steps_of(**call.arguments).empty.any():
            return "gradients through empty rows follow no convention but 0"
        return unexpressible(call, self.conventions, offsets="offsets" in self.capabilities)

    def probes(self) -> list[Case]:
        """Return a case for each capability that is not declared, that needs nothing else."""
        found = []
        for capability in CAPABILITIES:
            if capability in self.capabilities or capability in _NOT_ASKED_FOR:
                continue
            for case in map(self.prepared, select()):
                if case.check != "call" or case.needs() - self.capabilities != {capability}:
                    continue
                if not has_dtype(case.dtype):
                    continue
                call = case.call()
                said = without_offset(call, self.conventions)
                if capability == "offsets" and said is not None:
                    continue
                why = unexpressible(call, self.conventions, offsets=capability == "offsets")
                if why or not case.is_in_range():
                    continue
                shows = f"{capability} is not declared: {case.id} must raise."
                found.append(
                    replace(case, id=f"undeclared/{capability}", shows=shows, rule="errors")
                )
                break
        return found

    def case(self, case: Case) -> CaseResult:
        """Return the verdict on one case."""
        case = self.prepared(case)
        if why := self.why_not_applicable(case):
            return CaseResult.of(case, "not applicable", why)
        if self._ends >= _ENDS:
            return CaseResult.of(case, "not run", f"{_ENDS} calls before it hung or crashed")
        trial = Trial(case.id, case.rule, self._call, self.conventions)
        start = time.perf_counter()
        CHECKS[case.check](trial, case.call())
        seconds = time.perf_counter() - start
        may_refuse = case.needs() & MAY_REFUSE
        if not self.declared and may_refuse and trial.outcomes:
            refused = all(outcome.refused for outcome in trial.outcomes)
            if refused and len(trial.findings) <= len(trial.outcomes):
                why = f"needs {', '.join(sorted(may_refuse))}: {trial.outcomes[0].error}"
                return CaseResult.of(case, "refused", why, seconds=seconds)
        findings = tuple(self._with_code(case, trial, finding) for finding in trial.findings)
        status = "failed" if findings else "passed"
        return CaseResult.of(case, status, "", trial.units, findings, seconds)

    def undeclared(self, case: Case) -> CaseResult:
        """Return the verdict on a case that needs what is not declared: it must raise."""
        case = self.prepared(case)
        if self._ends >= _ENDS:
            return CaseResult.of(case, "not run", f"{_ENDS} calls before it hung or crashed")
        outcome = self._call(case.call())
        if outcome.refused:
            return CaseResult.of(case, "passed")
        capability = case.id.partition("/")[2]
        message = f"{capability} is not declared; the call must raise: {outcome.error}"
        if outcome.kind == "returned":
            verdict = judge(case.id, case.rule, case.call(), outcome, self.conventions)
            told = "wrong" if verdict.findings else f"right: declare {capability}"
            message = f"{capability} is not declared, yet the call did not raise; it is {told}"
        return CaseResult.of(case, "failed", findings=(Finding(case.id, "errors", message),))

    def _call(self, call: Call) -> Outcome:
        return self.run(self._asked(call))

    def _asked(self, call: Call) -> Call:
        """Return a call without what is not declared and need not be said."""
        if call.lse and "lse" not in self.capabilities:
            call = replace(call, lse=False)
        if "offsets" not in self.capabilities and "query_offset" in call.arguments:
            call = without_offset(call, self.conventions) or call
        return call

    def _with_code(self, case: Case, trial: Trial, finding: Finding) -> Finding:
        """Return a finding with code that shows it, made small for the first few."""
        call = trial.failing
        if call is None:
            return finding
        worst = finding
        small = case.check != "refusal" and self._ends == 0
        done = self._minimised
        if small and len(done) < (_MINIMISED if finding.kind in done else SHOWN):
            done.append(finding.kind)

            def wrong(smaller: Call) -> list[Finding]:
                outcome = self._call(smaller)
                found = judge(case.id, case.rule, smaller, outcome, self.conventions).findings
                same = (finding.part, finding.rule)
                return [other for other in found if (other.part, other.rule) == same]

            call = reproduce.minimised(call, lambda smaller: bool(wrong(smaller)))
            worst = next(iter(wrong(call)), finding) if call is not trial.failing else finding
        lse = call.lse and "lse" in self.capabilities
        text = reproduce.code(
            self.name,
            self.backend,
            case,
            self._asked(call),
            worst.message,
            self.conventions,
            lse,
            self._own_vjp,
        )
        return replace(finding, code=text)

    def run(self, call: Call, conventions: Conventions | None = None) -> Outcome:
        """Make one call, in conventions that need not be those that are held."""
        if self._ends >= _ENDS:
            return Outcome("crashed", error=f"{_ENDS} calls before it hung or crashed")
        agreed = conventions or self.conventions
        outcome = self._session.run(translated(call, agreed))
        self._ends += outcome.kind in ("hung", "crashed")
        return translated_back(call, outcome, agreed)

    def prepared(self, case: Case) -> Case:
        """Return a float32 case in another dtype, where float32 is not to be had."""
        if case.dtype != "float32" or "float32" in self.capabilities:
            return case
        others = [dtype for dtype in DTYPES if dtype in self.capabilities]
        return case.in_dtype(others[0]) if others else case
