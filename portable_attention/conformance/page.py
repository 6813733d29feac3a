"""A report as one HTML page: a matrix of cases, and what is wrong with them."""

from __future__ import annotations

import math
from html import escape
from itertools import groupby
from typing import Final

from portable_attention._version import __version__
from portable_attention.conformance.report import STATUSES, CaseResult, Report

_COLUMNS: Final = ("output", "lse", "d_query", "d_key", "d_value", "d_bias", "d_sinks")
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem;
       color: #1b1b1b; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: .15rem .5rem; text-align: left; border-bottom: 1px solid #e4e4e4; }
th.part, td.part { text-align: right; width: 5rem; font-variant-numeric: tabular-nums; }
tr.rule th { background: #f3f3f3; padding-top: .5rem; }
td.failed { color: #a40000; font-weight: 600; } td.passed { color: #1c6b2a; }
td.other, .quiet { color: #767676; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; border-left: 3px solid #b33; }
.verdict { font-weight: 600; } .ok { color: #1c6b2a; } .bad { color: #a40000; }
.key span { display: inline-block; padding: 0 .5rem; margin-right: .25rem; }
"""


def page(report: Report) -> str:
    """Return a report as a page that needs no other file and no network."""
    verdict = (
        '<span class="verdict ok">conforms</span>'
        if report.ok
        else '<span class="verdict bad">does not conform</span>'
    )
    counts = ", ".join(f"{report.count(s)} {s}" for s in STATUSES if report.count(s))
    deviations = report.conventions.deviations()
    told = ", ".join(f"{name}={value}" for name, value in deviations.items()) or "none"
    broken = "".join(f"<li><code>docs/semantics.md#{escape(r)}</code></li>" for r in report.rules)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(report.implementation)}: conformance</title>",
        f"<style>{_STYLE}</style></head><body>",
        f"<h1><code>{escape(report.implementation)}</code> {verdict}</h1>",
        f"<p>{escape(report.library)} on {escape(report.device)}; portable_attention "
        f"{__version__}; {len(report.results)} cases: {counts}; {report.seconds:.1f} s.</p>",
        f"<p>Deviating conventions: {escape(told)}.</p>",
        f"<p>Rules broken, the likeliest cause first:</p><ol>{broken}</ol>" if broken else "",
        "<h2>Cases</h2>",
        f'<p class="key">Largest error in units of its rounding bound: {_key()}</p>',
        _matrix(report),
        "<h2>Findings</h2>" if report.findings else "",
        *(_finding(result) for result in report.results if result.findings),
        "</body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def _key() -> str:
    samples = (0.0, 0.01, 0.1, 0.5, 1.0, 10.0, math.inf)
    return "".join(f'<span style="background:{_colour(u)}">{_number(u)}</span>' for u in samples)


def _matrix(report: Report) -> str:
    shown = [c for c in _COLUMNS if any(c in result.units for result in report.results)]
    head = "".join(f'<th class="part">{escape(column)}</th>' for column in shown)
    lines = [f"<table><thead><tr><th>case</th><th>verdict</th>{head}</tr></thead><tbody>"]
    for group, results in groupby(report.results, key=lambda result: result.case.partition("/")[0]):
        lines.append(f'<tr class="rule"><th colspan="{2 + len(shown)}">{escape(group)}</th></tr>')
        lines += [_row(result, shown) for result in results]
    lines.append("</tbody></table>")
    return "\n".join(lines)


def _row(result: CaseResult, shown: list[str]) -> str:
    kind = result.status if result.status in ("passed", "failed") else "other"
    name = escape(result.case)
    if result.findings:
        name = f'<a href="#{escape(result.case)}">{name}</a>'
    cells = []
    for column in shown:
        units = result.units.get(column)
        if units is None:
            cells.append('<td class="part"></td>')
        else:
            cells.append(
                f'<td class="part" style="background:{_colour(units)}">{_number(units)}</td>'
            )
    title = escape(f"{result.shows} (#{result.rule})", quote=True)
    why = f' <span class="quiet">{escape(result.why)}</span>' if result.why else ""
    return (
        f'<tr title="{title}"><td>{name}</td><td class="{kind}">{result.status}{why}</td>'
        f"{''.join(cells)}</tr>"
    )


def _finding(result: CaseResult) -> str:
    lines = [
        f'<h3 id="{escape(result.case)}">{escape(result.case)}</h3>',
        f"<p>{escape(result.shows)} <code>docs/semantics.md#{escape(result.rule)}</code></p>",
    ]
    for finding in result.findings:
        lines.append(f"<p>{escape(finding.message)}</p>")
        if finding.code:
            lines.append(f"<pre>{escape(finding.code)}</pre>")
    return "\n".join(lines)


def _colour(units: float) -> str:
    """Return green for what is far below the bound, yellow near it, red beyond."""
    if not math.isfinite(units):
        return "#e07070"
    if units > 1:
        share = min(1.0, math.log10(units) / 4)
        return f"hsl({25 - 25 * share:.0f} 85% {78 - 12 * share:.0f}%)"
    share = 0.0 if units <= 1e-3 else 1 + math.log10(units) / 3
    return f"hsl({130 - 75 * share:.0f} 55% 88%)"


def _number(units: float) -> str:
    if not math.isfinite(units):
        return "&infin;"
    if units == 0:
        return "0"
    return f"{units:.1e}" if units >= 1000 or units < 0.001 else f"{units:.3g}"
