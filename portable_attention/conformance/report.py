"""What `conform` returns: a verdict on every case, as text, JSON or a page."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from portable_attention._version import __version__
from portable_attention.conformance.capabilities import Conventions
from portable_attention.conformance.cases import Case
from portable_attention.conformance.judge import Finding

STATUSES: Final = ("passed", "failed", "refused", "not applicable", "not run")
SHOWN: Final = 12  # findings in the text
_NAMED: Final = 4  # cases that have the same finding


@dataclass(frozen=True)
class CaseResult:
    """The verdict on one case.

    Parameters
    ----------
    case, shows, rule, tags
        As in `cases.Case`.
    status
        One of "passed", "failed", "refused", "not applicable" and "not run".
    why
        The reason, where it neither passed nor failed.
    units
        The largest error of each result, in units of its bound.
    findings
        What is wrong.
    seconds
        How long it took.
    """

    case: str
    shows: str
    rule: str
    tags: tuple[str, ...]
    status: str
    why: str = ""
    units: Mapping[str, float] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0

    @classmethod
    def of(
        cls,
        case: Case,
        status: str,
        why: str = "",
        units: Mapping[str, float] | None = None,
        findings: tuple[Finding, ...] = (),
        seconds: float = 0.0,
    ) -> CaseResult:
        """Return the result of a case."""
        return cls(
            case.id, case.shows, case.rule, case.tags(), status, why, units or {}, findings, seconds
        )


@dataclass(frozen=True)
class Report:
    """The verdict on an implementation.

    Parameters
    ----------
    implementation, library, device
        What was called, with which arrays.
    capabilities, declared, conventions
        What it can do, whether it said so itself, and which conventions it was held to.
    results
        One for each case, in the order of the cases.
    isolated
        Whether it ran in a process of its own.
    quick
        Whether only the quick cases were run.
    seconds
        How long it took.

    Examples
    --------
    >>> from portable_attention import attention
    >>> from portable_attention.conformance import conform
    >>> report = conform(attention, cases=["plain/one-key"], isolate=False)
    >>> report.count("passed"), report.findings, report.rule
    (1, (), None)
    """

    implementation: str
    library: str
    device: str
    capabilities: frozenset[str]
    declared: bool
    conventions: Conventions
    results: tuple[CaseResult, ...]
    isolated: bool
    quick: bool
    seconds: float

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Everything that is wrong, in the order of the cases."""
        return tuple(finding for result in self.results for finding in result.findings)

    @property
    def distinct(self) -> tuple[tuple[Finding, ...], ...]:
        """The findings, those that are the same together, each first in its plainest case."""
        together: dict[str, list[Finding]] = {}
        for finding in self.findings:
            together.setdefault(finding.kind, []).append(finding)
        return tuple(map(tuple, together.values()))

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, and something was looked at."""
        return not self.findings and self.count("passed") > 0 and not self.count("not run")

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules that are broken, by their anchors in docs/semantics.md."""
        return tuple(dict.fromkeys(finding.rule for finding in self.findings))

    @property
    def rule(self) -> str | None:
        """The rule that the plainest failing case names: the likely cause of all the others."""
        return self.rules[0] if self.rules else None

    def count(self, status: str) -> int:
        """Return the number of cases with a status."""
        return sum(result.status == status for result in self.results)

    def __str__(self) -> str:
        """Return a summary with the first findings."""
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        counts = ", ".join(f"{self.count(s)} {s}" for s in STATUSES if self.count(s))
        verdict = "conforms" if self.ok else "does not conform"
        lines = [
            f"{self.implementation} {verdict} to portable_attention {__version__} "
            f"({self.library} on {self.device}{', quick' if self.quick else ''})",
            f"  {len(self.results)} cases: {counts}; {self.seconds:.1f} s",
        ]
        if deviations := self.conventions.deviations():
            told = ", ".join(f"{name}={value}" for name, value in deviations.items())
            lines.append(f"  by its conventions: {told}")
        if worst := self._worst():
            lines.append(f"  largest error that passed: {worst[0]:.2f} of its bound, in {worst[1]}")
        for status in ("refused", "not applicable", "not run"):
            if reasons := self._reasons(status):
                lines.append(f"  {status}: {reasons}")
        if self.findings:
            broken = Counter(rule for rule, _ in {(f.rule, f.case) for f in self.findings})
            lines.append("  rules broken, the likeliest cause first:")
            lines += [
                f"    docs/semantics.md#{rule} ({_counted(broken[rule], 'case')})"
                for rule in self.rules
            ]
        distinct = self.distinct
        for example, *others in distinct[:SHOWN]:
            lines += ["", f"{example}"]
            cases = list(dict.fromkeys(f.case for f in others if f.case != example.case))
            if cases:
                same = f"  the same in {_counted(len(cases), 'more case')}: "
                lines.append(same + ", ".join(cases[:_NAMED] + ["..."] * (len(cases) > _NAMED)))
            lines += [f"    {line}" for line in example.code.splitlines()]
        if len(distinct) > SHOWN:
            lines += ["", f"... and {_counted(len(distinct) - SHOWN, 'more finding')}"]
        return lines

    def _reasons(self, status: str) -> str:
        """Return why cases have a status, with the number of cases for each reason."""
        wanted: list[list[str]] = []
        others: Counter[str] = Counter()
        for result in self.results:
            if result.status == status:
                reason = result.why.partition(":")[0]
                if reason.startswith("needs "):
                    wanted.append(reason.removeprefix("needs ").split(", "))
                else:
                    others[reason] += 1
        if status == "refused":
            # Of several that a case needs, those are meant that are refused where they are alone.
            alone = {names[0] for names in wanted if len(names) == 1}
            wanted = [[n for n in names if n in alone] or names for names in wanted]
        wanting = Counter(name for names in wanted for name in names)
        told = [
            ", ".join(f"{reason} ({number})" for reason, number in counted.most_common())
            for counted in (wanting, others)
        ]
        if told[0] and status == "not applicable":
            told[0] = "for want of " + told[0]
        return "; ".join(filter(None, told))

    def _worst(self) -> tuple[float, str] | None:
        passed = [
            (units, f"{result.case} ({name})")
            for result in self.results
            if result.status == "passed"
            for name, units in result.units.items()
        ]
        return max(passed, default=None)

    def as_data(self) -> dict[str, Any]:
        """Return the report as plain data; what is infinite is the text "inf"."""
        return {
            "format": "portable_attention conformance report 1",
            "portable_attention": __version__,
            "implementation": self.implementation,
            "library": self.library,
            "device": self.device,
            "ok": self.ok,
            "rule": self.rule,
            "rules": list(self.rules),
            "counts": {status: self.count(status) for status in STATUSES},
            "declared": self.declared,
            "capabilities": sorted(self.capabilities),
            "conventions": asdict(self.conventions),
            "isolated": self.isolated,
            "quick": self.quick,
            "seconds": round(self.seconds, 3),
            "results": [_plain(asdict(result)) for result in self.results],
        }

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the report as JSON, and write it to a file if one is named."""
        text = json.dumps(self.as_data(), indent=1, allow_nan=False) + "\n"
        return _written(text, path)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the report as one page of its own, and write it to a file if one is named."""
        from portable_attention.conformance.page import page

        return _written(page(self), path)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _written(text: str, path: str | Path | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def _plain(data: Any) -> Any:
    """Return data that JSON can hold."""
    if isinstance(data, dict):
        return {name: _plain(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    return data
