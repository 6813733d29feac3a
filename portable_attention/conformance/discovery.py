"""Finds out, by asking, what an implementation could declare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from portable_attention.conformance.calls import Call, Outcome
from portable_attention.conformance.capabilities import (
    CAPABILITIES,
    DTYPES,
    Conventions,
    choices_of,
)
from portable_attention.conformance.cases import bits, find, inputs, select
from portable_attention.conformance.generator import has_dtype
from portable_attention.conformance.holder import LIMIT, Holder
from portable_attention.conformance.judge import answers, judge_results, results_of
from portable_attention.conformance.oracle import Numbers
from portable_attention.conformance.report import CaseResult

_TRIED: Final = 3  # cases for each capability


@dataclass(frozen=True)
class Fingerprint:
    """What was found out about an implementation.

    Parameters
    ----------
    implementation, backend, library, device
        What was asked.
    conventions
        Those that its answers follow.
    capabilities
        What it does rightly, by a few cases for each.
    missing
        What it refuses, with what it said.
    wrong
        What it accepts and does wrongly, with an example.
    """

    implementation: str
    backend: str
    library: str
    device: str
    conventions: Conventions
    capabilities: frozenset[str]
    missing: dict[str, str]
    wrong: dict[str, str]

    def command(self) -> str:
        """Return the command that holds the implementation to what was found."""
        parts = ["portable-attention conform", self.implementation]
        if self.backend != "numpy":
            parts += ["--backend", self.backend]
        for name, value in self.conventions.deviations().items():
            parts += ["--convention", f"{name}={value}"]
        # What has no keyword is not implied anyway, nor is validation.
        silent = {name for name, why in self.missing.items() if why.startswith("no ")}
        if left_out := sorted({*self.missing, *self.wrong} - silent - {"validation"}):
            parts += ["--without", ",".join(left_out)]
        return " ".join(parts)

    def __str__(self) -> str:
        """Return the fingerprint as text."""
        plain = Conventions()
        lines = [f"{self.implementation} ({self.library} on {self.device})", "  conventions"]
        for name in vars(plain):
            value = getattr(self.conventions, name)
            mark = "" if value == getattr(plain, name) else "  (deviates)"
            lines.append(f"    {name:<15} {value}{mark}")
        lines.append("  capabilities")
        known = [name for name in CAPABILITIES if name in self.capabilities]
        lines += [f"    {name:<15} {CAPABILITIES[name]}" for name in known]
        for title, told in (("missing", self.missing), ("wrong", self.wrong)):
            if told:
                lines.append(f"  {title}")
                lines += [f"    {name:<15} {why}" for name, why in told.items()]
        return "\n".join([*lines, "", self.command()])


def discover(
    function: Callable[..., Any] | str,
    *,
    backend: str = "numpy",
    device: str | None = None,
    vjp: Callable[..., Any] | str | None = None,
    isolate: bool | None = None,
    time_limit: float = LIMIT,
) -> Fingerprint:
    """Find out, by asking, the conventions and capabilities of an implementation.

    Parameters
    ----------
    function, backend, device, vjp, isolate, time_limit
        As for `conform`.

    Returns
    -------
    Fingerprint
        To be printed, or to be passed on: ``conform(function, conventions=found.conventions,
        capabilities=found.capabilities)``.

    Examples
    --------
    >>> from portable_attention import attention
    >>> from portable_attention.conformance import discover
    >>> discover(attention, isolate=False).conventions.empty_rows
    'zero'
    """
    options: dict[str, Any] = {
        "backend": backend,
        "device": device,
        "vjp": vjp,
        "isolate": isolate,
        "time_limit": time_limit,
    }
    with Holder(function, **options) as holder:
        holder.declared = True  # what it refuses is missing, and not forgiven
        able = holder.capabilities = holder.capabilities | {"validation"}
        dtypes = _dtypes(holder)
        holder.capabilities = able - {*DTYPES} | dtypes
        probe = _Probe(holder, sorted(dtypes, key=DTYPES.index)[-1] if dtypes else "float32")
        holder.conventions = probe.conventions()
        capabilities, missing, wrong = _capabilities(holder, able)
    for name in CAPABILITIES:
        if name not in able:
            missing.setdefault(name, "no keyword for it" if name != "gradients" else "no vjp")
    return Fingerprint(
        holder.name,
        backend,
        holder.library,
        holder.device,
        holder.conventions,
        capabilities,
        missing,
        wrong,
    )


def _dtypes(holder: Holder) -> frozenset[str]:
    """Return the dtypes in which a call is not refused that is a plain one in every layout."""
    found = set()
    for dtype in filter(has_dtype, DTYPES):
        arrays = {name: a.make() for name, a in inputs(1, heads=4, dtype=dtype).items()}
        if not holder.run(Call(arrays, lse=False)).refused:
            found.add(dtype)
    return frozenset(found)


def _capabilities(
    holder: Holder, able: frozenset[str]
) -> tuple[frozenset[str], dict[str, str], dict[str, str]]:
    """Return what is right, what is refused, and what is wrong."""
    found: set[str] = set()
    missing: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for dtype in {*DTYPES} - holder.capabilities:
        missing[dtype] = "a plain call is refused"
    # The dtypes first: every other case needs one of them.
    for capability in (*DTYPES[::-1], *CAPABILITIES):
        if capability in found or capability not in able or {capability} & {*missing, *wrong}:
            continue
        results = []
        for case in map(holder.prepared, select()):
            needed = case.needs()
            if capability not in needed or not needed - found <= {capability}:
                continue
            if not holder.why_not_applicable(case):
                results.append(holder.case(case))
            if len(results) == _TRIED:
                break
        _note(capability, results, found, missing, wrong)
    return frozenset(found), missing, wrong


def _note(
    capability: str,
    results: list[CaseResult],
    found: set[str],
    missing: dict[str, str],
    wrong: dict[str, str],
) -> None:
    findings = [finding for result in results for finding in result.findings]
    left = [result.why for result in results if result.status == "not run"]
    if left:
        wrong[capability] = left[0]
    elif not results:
        missing[capability] = "no case shows it without something else that is missing"
    elif not findings:
        found.add(capability)
    elif all(finding.message.startswith("raised ") for finding in findings):
        missing[capability] = findings[0].message
    else:
        wrong[capability] = str(findings[0])


class _Probe:
    """Asks which conventions an implementation follows."""

    def __init__(self, holder: Holder, dtype: str) -> None:
        self._holder = holder
        self._able = holder.capabilities
        self._dtype = dtype
        self._found = Conventions()

    def conventions(self) -> Conventions:
        """Return the conventions, one after another, each found with those before it."""
        plain = self._made(203, batch=(2,), heads=3, queries=4, keys=5)
        self._choose("layout", plain)
        groups = self._made(204, batch=(2,), heads=6, kv_heads=2, queries=4, keys=5)
        self._choose("head_order", groups)
        if "mask" in self._able:
            mask = bits((4, 5), 205).with_put(((None, 0), 1.0), ((None, 3), 0.0)).make()
            self._choose("mask_polarity", plain.with_arrays(mask=mask))
        if "lse" in self._able:
            self._choose("lse_base", replace(plain, lse=True), part="lse")
        if "causal" in self._able:
            self._find_diagonal()
        self._find_empty_rows()
        return self._found

    def _made(self, seed: int, **sizes: Any) -> Call:
        arrays = {
            name: array.make() for name, array in inputs(seed, dtype=self._dtype, **sizes).items()
        }
        return Call(arrays, lse=False)

    def _run(self, call: Call, conventions: Conventions) -> Outcome:
        return self._holder.run(call, conventions)

    def _choose(self, convention: str, call: Call, part: str = "output") -> None:
        """Take the first value of a convention under which the answer is right."""
        for choice in choices_of(convention):
            tried = replace(self._found, **{convention: choice})
            if self._right(call, tried, part):
                self._found = tried
                return

    def _right(self, call: Call, conventions: Conventions, part: str = "output") -> bool:
        results = results_of(self._run(call, conventions))
        expected = {part: answers(call, conventions)[part]}
        return part in results and not judge_results("", "", results, expected).findings

    def _find_diagonal(self) -> None:
        call = self._made(206, queries=3, keys=5).with_options(causal=True)
        outcome = self._run(call, self._found)
        if outcome.refused:
            return
        for corner in ("start", "end"):
            expected = answers(call.with_options(query_offset=corner))
            if not judge_results("", "", results_of(outcome), expected).findings:
                self._found = replace(self._found, diagonal=corner)

    def _find_empty_rows(self) -> None:
        """Look at a row whose keys are all out of reach, by whatever option there is."""
        ways = {
            "mask": "empty/by-mask",
            "lengths": "empty/no-valid-keys",
            "bias": "empty/by-bias",
        }
        needed = next((name for name in ways if name in self._able), None)
        if needed is None:
            return
        call = replace(find(ways[needed]).in_dtype(self._dtype).call(), lse="lse" in self._able)
        outcome = self._run(call, self._found)
        row = (1, 0, 0) if needed == "lengths" else (0, 0, 1)
        if outcome.output is not None and outcome.output.ndim == 4:
            self._found = replace(self._found, empty_rows=_kind_of(outcome.output[row]))
        if outcome.lse is not None and outcome.lse.ndim == 3:
            self._found = replace(self._found, empty_lse=_kind_of_lse(float(outcome.lse[row])))


def _kind_of(row: Numbers) -> str:
    if np.isnan(row).any():
        return "nan"
    return "zero" if not row.any() else "mean"


def _kind_of_lse(number: float) -> str:
    if np.isnan(number):
        return "nan"
    if np.isinf(number):
        return "inf" if number > 0 else "-inf"
    return "lowest" if number < -1e30 else "0"
