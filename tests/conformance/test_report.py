"""Reports: what they say, as text, JSON and a page; and the code that they print."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from portable_attention import attention, attention_vjp
from portable_attention.conformance import Conventions, cases, conform, discover
from portable_attention.conformance.calls import Call
from portable_attention.conformance.judge import answers, judge_results
from portable_attention.conformance.report import STATUSES
from portable_attention.conformance.reproduce import _import_of

from .dense import Dense
from .variations import CONVENTIONS
from .zoo import ZOO


def without_scale(query, key, value, *, return_lse=False, **options):
    """A fault that can be imported by name."""
    return attention(query, key, value, return_lse=return_lse, **{"scale": 1.0, **options})


def half_a_function(query, key, value, *, causal=False):
    """Softmax of causal scores, and nothing else; NaN where there is nothing to attend."""
    score = query @ key.swapaxes(-1, -2) / np.sqrt(query.shape[-1], dtype=query.dtype)
    if causal:
        score = np.where(np.tri(*score.shape[-2:], dtype=bool), score, -np.inf)
    part = np.exp(score - score.max(-1, keepdims=True))
    return part / part.sum(-1, keepdims=True) @ value


@pytest.fixture(scope="module")
def failed():
    return conform(without_scale, quick=True, isolate=False)


def test_the_text_names_the_rule_and_prints_code(failed):
    text = str(failed)
    assert "does not conform" in text
    assert failed.rule == "scale"
    assert "docs/semantics.md#scale" in text
    assert "from tests.conformance.test_report import without_scale" in text


def test_the_code_runs_and_shows_the_fault(failed):
    finding = failed.findings[0]
    names: dict = {}
    printed = []
    exec(finding.code, {"print": lambda *what: printed.append(what)}, names)
    arrays = {name: names[name] for name in ("query", "key", "value")}
    verdict = judge_results("", "", {"output": names["output"]}, answers(Call(arrays)))
    assert verdict.findings, "the call that was printed is wrong, too"
    assert printed


def test_the_code_of_the_first_findings_is_small(failed):
    for finding in failed.findings[:3]:
        numbers = re.findall(r"-?\d+\.\d+", finding.code)
        assert len(numbers) < 40, finding.code


def test_a_finding_has_its_worst_element_in_units(failed):
    finding = failed.findings[0]
    assert finding.units > 100
    assert finding.part == "output"
    assert len(finding.index) == 4


def as_lists(query, key, value):
    """A fault that hits every case in the same words."""
    return attention(query, key, value).tolist()


def shape_told(query, key, value, *, causal=False, mask=None):
    """A fault that hits every case of masks with other numbers in its message."""
    if mask is not None:
        raise RuntimeError(f"no kernel for a mask of shape {mask.shape}")
    return attention(query, key, value, causal=causal, query_offset="start" if causal else None)


def test_what_hits_many_cases_is_said_once_with_their_number():
    report = conform(as_lists, isolate=False, quick=True, cases=["plain", "shapes", "tiles"])
    cases = dict.fromkeys(finding.case for finding in report.findings)
    assert len(cases) > 10
    text = str(report)
    assert text.count(" (docs/semantics.md#arrays)") == 1
    assert f"docs/semantics.md#arrays ({len(cases)} cases)" in text
    assert f"the same in {len(cases) - 1} more cases" in text
    first, second, *_ = cases
    assert f"{first}: output is list, not an array of numpy" in text
    assert second in text, "some of the others are named"
    assert text.count("import numpy as np") == 1, "one example"
    assert len(text.splitlines()) < 25


def test_numbers_and_shapes_do_not_make_another_finding_of_it():
    report = conform(shape_told, isolate=False, quick=True, cases=["mask"])
    assert len({finding.message for finding in report.findings}) > 2
    assert str(report).count("no kernel for a mask of shape") == 2, "once said, once in the code"


def two_faults(query, key, value, *, mask=None, bias=None):
    """The second comes after the first has hit many cases."""
    output = attention(query, key, value, mask=mask, bias=bias)
    return output if mask is None and bias is None else -output if bias is None else 2 * output


def test_a_second_finding_is_said_after_many_cases_of_the_first():
    report = conform(two_faults, isolate=False, quick=True, cases=["mask", "bias"])
    assert sum(finding.rule.startswith("mask") for finding in report.findings) > 12
    said = str(report).split("\n\n")[1:]
    rules = [re.search(r"semantics.md#([\w-]+)\)", example)[1] for example in said]
    assert rules == list(report.rules), "each rule once: the same number is wrong in all its cases"
    assert "bias" in rules
    for example in said:  # not those of the first five findings alone, which are all the same
        assert len(re.findall(r"-?\d+\.\d+", example)) < 40, example


def test_nothing_is_left_unsaid_or_said_twice(failed):
    said = [finding for found in failed.distinct for finding in found]
    assert sorted(map(str, said)) == sorted(map(str, failed.findings))
    kinds = [found[0].kind for found in failed.distinct]
    assert len(kinds) == len(set(kinds)) < len(failed.findings) / 2


def test_json_says_all(failed, tmp_path):
    text = failed.to_json(tmp_path / "report.json")
    data = json.loads((tmp_path / "report.json").read_text())
    assert json.loads(text) == data
    assert data["ok"] is False
    assert data["rule"] == "scale"
    assert len(data["results"]) == len(failed.results)
    assert sum(data["counts"].values()) == len(failed.results)
    assert {result["status"] for result in data["results"]} <= set(STATUSES)


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.links, self.targets, self.colours = [], [], set(), 0

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        self.links += [found[name] for name in ("href", "src") if name in found]
        self.targets |= {found["id"]} if "id" in found else set()
        self.colours += "background" in found.get("style", "")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_no_network(failed, tmp_path):
    text = failed.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == text
    page = _Page()
    page.feed(text)
    assert not page.open
    assert all(link.startswith("#") and link[1:] in page.targets for link in page.links)
    assert page.links, "what failed is linked"
    assert page.colours > 300
    assert "://" not in text
    for result in failed.results:
        assert result.case in text


def test_a_good_report_is_short():
    report = conform(attention, cases=["scale"], isolate=False)
    assert "conforms" in str(report)
    assert len(str(report).splitlines()) < 8
    assert "Findings" not in report.to_html()


def test_progress_is_told():
    told = []
    conform(attention, cases=["scale"], isolate=False, progress=lambda *args: told.append(args))
    assert [done for done, _, _ in told] == list(range(1, len(told) + 1))
    assert {total for _, total, _ in told} == {len(told)}


def test_what_is_not_declared_must_raise():
    able = ["float32", "float64", "float16", "bfloat16", "lse", "value-width", "ranks"]
    able += ["zero-sizes", "batch-broadcast", "scale", "bias", "causal", "offsets"]
    report = conform(attention, capabilities=able, isolate=False, quick=True)
    undeclared = {finding.case for finding in report.findings}
    assert undeclared == {
        f"undeclared/{name}"
        for name in ("mask", "window", "lengths", "softcap", "sinks", "dropout", "layout", "gqa")
    }
    assert "declare window" in next(f for f in report.findings if "window" in f.case).message


def test_keywords_speak_for_a_function_that_declares_nothing():
    report = conform(half_a_function, isolate=False, quick=True)
    assert "mask" not in report.capabilities
    assert "causal" in report.capabilities
    assert "gqa" in str(report)
    assert report.count("refused") > 3


def test_what_was_refused_is_not_what_else_the_case_needs():
    """Grouped heads in float16 are refused for the heads, where float16 alone is taken."""

    def without_groups(query, key, value, **options):
        if query.ndim > 2 and query.shape[-3] != key.shape[-3]:
            raise ValueError("as many heads, please")
        return attention(query, key, value, **options)

    report = conform(without_groups, isolate=False, quick=True)
    reasons = {result.why.partition(":")[0] for result in report.results}
    assert "needs float16, gqa" in reasons
    assert "needs gqa" in reasons
    assert f"refused: gqa ({report.count('refused')})\n" in str(report)


def test_the_fingerprint_of_the_library():
    found = discover(attention, vjp=attention_vjp, isolate=False)
    assert found.conventions == Conventions()
    assert not found.missing
    assert not found.wrong


@pytest.mark.parametrize("kind", CONVENTIONS, ids=lambda kind: kind.__name__)
def test_conventions_are_discovered(kind):
    found = discover(kind(), isolate=False).conventions.deviations()
    # None of them refuses a call that does not say which corner it means.
    assert found == {"diagonal": "start", **kind.conventions}


def test_the_fingerprint_of_a_modest_function():
    found = discover(half_a_function, isolate=False)
    text = str(found)
    assert found.conventions.diagonal == "start"
    assert {"causal", "float32"} <= found.capabilities
    assert "no keyword for it" in found.missing["mask"]
    assert "--convention diagonal=start" in text
    report = conform(
        half_a_function, conventions=found.conventions, capabilities=found.capabilities,
        isolate=False, quick=True,
    )  # fmt: skip
    assert {finding.rule for finding in report.findings} <= {"wide-arithmetic", "errors"}


def test_a_fault_is_found_out_by_discovery_too():
    found = discover(ZOO["window_sides_swapped"][0](), isolate=False)
    assert "window" in found.wrong
    assert "mask" in found.capabilities


def test_the_bounds_are_used_up_by_rounding_alone():
    """An honest run stays below its bound, and not by orders of magnitude everywhere."""
    function = Dense()
    report = conform(function, vjp=function.vjp, isolate=False, quick=True)
    units = [u for result in report.results for u in result.units.values()]
    assert max(units) <= 1
    assert np.quantile([u for u in units if u], 0.9) > 0.02


def test_a_case_can_be_looked_at():
    case = cases.find("sinks/once")
    assert case.rule == "sinks"
    assert "sinks" in case.tags()
    assert case.described()["arrays"]["sinks"]["kind"] == "constant"


def shorter(query, key, value, *, return_lse=False, **options):
    """A fault in long calls alone."""
    cut = slice(None) if key.shape[-2] < 140 else slice(0, -1)
    return attention(
        query, key[..., cut, :], value[..., cut, :], return_lse=return_lse, **options
    )  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "conventions"),
    [("numpy", {}), ("torch", {}), ("numpy", {"lse_base": "2"})],
)
def test_the_code_of_large_calls_takes_them_from_the_cases(backend, conventions):
    if backend == "torch":
        pytest.importorskip("torch", reason="needs torch")
    report = conform(
        shorter, backend=backend, cases=["tiles"], conventions=conventions, isolate=False
    )
    finding = report.findings[-1]
    assert "cases.find(" in finding.code
    assert len(finding.code) < 1500
    exec(finding.code, {"print": lambda *what: None})


def value_counts_twice(query, key, value, **options):
    """The output is right, the gradient of the values is twice as large, on PyTorch and JAX."""
    if isinstance(value, np.ndarray):
        return attention(query, key, value, **options)
    if hasattr(value, "detach"):
        return attention(query, key, 2 * value - value.detach(), **options)
    from jax import lax

    return attention(query, key, 2 * value - lax.stop_gradient(value), **options)


@pytest.mark.parametrize("case", ["gradient/plain", "gradient/sinks", "gradient/empty-rows"])
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_code_of_a_gradient_runs_and_shows_the_fault(backend, case):
    pytest.importorskip(backend, reason=f"needs {backend}")
    report = conform(value_counts_twice, backend=backend, cases=[case], isolate=False)
    (finding,) = report.findings
    assert finding.part == "d_value"
    printed = []
    names: dict = {"print": printed.append}
    exec(finding.code, names)

    def those(*of):
        found = {name: names[name] for name in of if name in names}
        return {n: np.asarray(a.detach() if backend == "torch" else a) for n, a in found.items()}

    call = Call(
        those("query", "key", "value", "mask", "bias", "sinks"),
        cotangents=those("d_output", "d_lse"),
    )
    (pulled,) = printed
    right = answers(call)
    np.testing.assert_allclose(pulled[0], right["d_query"].expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(pulled[2], 2 * right["d_value"].expected, rtol=1e-4, atol=1e-6)


def test_code_of_bfloat16_and_of_special_numbers_runs():
    pytest.importorskip("ml_dtypes", reason="needs ml_dtypes")

    def nothing(query, key, value, **options):
        return 0 * query

    chosen = ["bfloat16/large-scores", "poison/by-bias", "infinite/bias", "zero/keys"]
    report = conform(nothing, cases=[*chosen, "dropout/which-pairs"], isolate=False)
    assert len(report.findings) > 1
    for finding in report.findings:
        exec(finding.code, {"print": lambda *what: None, "nothing": lambda *a, **o: (0, 0)})


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("package.module:function", ["from package.module import function"]),
        ("kernel.py:function", ["from kernel import function"]),
        ("a/b/kernel.py:f", ["import sys", "sys.path.insert(0, 'a/b')", "from kernel import f"]),
        ("my-kernel.py:function", ["# function: my-kernel.py:function"]),
    ],
)
def test_code_to_paste_imports_what_was_held(name, lines):
    assert _import_of(name) == lines
