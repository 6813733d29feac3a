"""The benchmarks: that they say what they measured. How fast anything is, no test says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import gpu, memory, timing
from benchmarks.arrays import largest_error, make_inputs
from benchmarks.environment import Watch
from benchmarks.measure import judge, measure
from benchmarks.peers import PEERS
from benchmarks.plots import draw
from benchmarks.records import Bar, Call, Entry, Workload
from benchmarks.report import BEGIN, END, generated, quantity, replace_generated, results_table
from benchmarks.timing import Patience, Sample, samples
from benchmarks.workloads import GROUPS, NUMPY, OURS, SDPA, TWO, WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
TINY = Call(1, 2, 40, 8)
CASES = {
    "bare": TINY,
    "causal": TINY.but(options={"causal": True}),
    "window": TINY.but(options={"window": (5, 0)}),
    "softcap": TINY.but(options={"softcap": 2.0}),
    "mask": TINY.but(mask=True),
    "bias": TINY.but(bias=True),
    "grouped": TINY.but(heads=4, kv_heads=2),
    "decoding": TINY.but(heads=4, kv_heads=2, length=1, key_length=40),
    "float16": TINY.but(dtype="float16"),
    "bfloat16": TINY.but(dtype="bfloat16"),
}


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", *arguments]
    return subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, **variables},
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )


def medians(**values: float) -> dict[str, Any]:
    return {name: {"median": value} for name, value in values.items()}


def test_workloads_have_names_of_their_own() -> None:
    names = [work.name for work in WORKLOADS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("work", WORKLOADS, ids=lambda work: work.name)
def test_a_workload_names_what_there_is(work: Workload) -> None:
    names = [entry.name for entry in work.entries]
    assert len(names) == len(set(names))
    assert work.group in GROUPS
    for entry in work.entries:
        assert entry.measure in {"seconds", "bytes"}
        assert entry.call.features <= PEERS[entry.peer].takes or entry.peer not in OURS
    for bar in work.bars:
        assert {bar.entry, *bar.over} <= set(names)
        assert bar.over or bar.unit in {"us", "MB"}


# flex_attention compiles for many seconds: the benchmark checks its answer before it is timed.
# OpenVINO starts a program when it is imported, and JAX may be running.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [name for name in PEERS if name != "flex_attention"])
def test_a_way_agrees_with_the_formula_or_says_what_it_lacks(name: str, case: str) -> None:
    peer, call = PEERS[name], CASES[case]
    if (reason := peer.missing(call)) is not None:
        assert reason.startswith(("not installed: ", "does not take "))
        return
    inputs = make_inputs(call)
    way = peer.prepare(call, inputs)
    result = way.run()
    if way.answer is not None:
        tolerance = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 3e-2}[call.dtype]
        assert largest_error(call, inputs, way.answer(result)) < tolerance


def test_gradients_agree() -> None:
    call = TINY.but(backward=True)
    inputs, answers = make_inputs(call), {}
    for name, peer in PEERS.items():
        if peer.missing(call) is None:
            way = peer.prepare(call, inputs)
            result = way.run()
            if way.answer is not None:
                answers[name] = way.answer(result)
    assert NUMPY in answers
    for answer in answers.values():
        assert answer.shape == (4, *call.shape)
        np.testing.assert_allclose(answer, answers[NUMPY], atol=1e-5)


def test_a_wrong_answer_is_seen() -> None:
    inputs = make_inputs(TINY)
    right = PEERS[NUMPY].prepare(TINY, inputs).run()
    assert largest_error(TINY, inputs, right) < 1e-6
    assert largest_error(TINY, inputs, right + 0.01) > 1e-3
    wrong = right.copy()
    wrong[0, 0, 1, 0] = np.nan  # a row that is not among those computed again
    assert largest_error(TINY, inputs, wrong) == np.inf
    with pytest.raises(ValueError, match="shape"):
        largest_error(TINY, inputs, right[:, :, 1:])


def test_ways_take_turns() -> None:
    order: list[str] = []
    ways = {name: lambda name=name: order.append(name) for name in "ab"}
    found, _ = samples(ways, 2, {"b": 2})
    assert "".join(order) == "ab" + "abb" * 2
    assert found["a"].runs == 2


def test_what_takes_long_gets_three_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LONGEST", 0.0)
    assert samples({"a": list}, 9)[0]["a"].runs == 3
    assert samples({"a": list}, 2)[0]["a"].runs == 2


def test_a_disturbed_round_is_done_over(monkeypatch: pytest.MonkeyPatch) -> None:
    # Rounds of 10 seconds on all cores; others take so many of them. A wait watches, too.
    shares = iter([0.0, 5.0, 5.0, 0.1, 0.0])
    seconds: dict[int, float] = {}
    monkeypatch.setattr(
        Watch, "since", lambda self: (10.0, seconds.setdefault(id(self), next(shares, 0.0)))
    )
    made: list[Watch] = []
    monkeypatch.setattr(timing, "Watch", lambda: made.append(Watch()) or made[-1])
    monkeypatch.setattr("time.sleep", lambda _: None)
    runs: list[int] = []
    patience = Patience(60.0)
    found, others = samples({"a": lambda: runs.append(1)}, 2, patience=patience, warm=True)
    assert (len(runs), found["a"].runs) == (3, 2)
    assert others == 0.0
    assert patience.left < 60.0
    assert not Patience(0.0).again(made[1])


def test_a_sample_is_the_median_and_the_quartiles() -> None:
    assert Sample.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Sample(3.0, 2.0, 4.0, 5)
    assert Sample.of([7.0]) == Sample(7.0, 7.0, 7.0, 1)


@pytest.mark.parametrize(
    ("bar", "measured", "met"),
    [
        (Bar("a", ("b",), 1.2), 2.0, False),
        (Bar("a", ("b", "c"), 1.2), 2.0, False),
        (Bar("a", ("c",), 1.2), 1.0, True),
        (Bar("a", ("b", "absent"), 2.0), 2.0, True),
        (Bar("a", ("b",), 1.2, times=2.0), 1.0, True),
        (Bar("a", ("b",), 1.25, fraction=True), 0.5, False),
        (Bar("b", ("a",), 1.25, fraction=True), 2.0, True),
        (Bar("a", at_most=40.0, unit="us"), 2e6, False),
        (Bar("a", at_most=40.0, unit="MB"), 2e-6, True),
        (Bar("a", ("absent",), 1.0), None, None),
    ],
    ids=str,
)
def test_a_bar_is_judged(bar: Bar, measured: float | None, met: bool | None) -> None:
    found = judge(bar, medians(a=2.0, b=1.0, c=2.0))
    assert found["measured"] == (None if measured is None else pytest.approx(measured))
    assert found["met"] is met


def test_a_workload_gives_the_stated_fields() -> None:
    entries = (Entry(NUMPY, TINY), Entry(TWO, TINY), Entry(SDPA, TINY.but(dtype="bfloat16")))
    work = Workload("tiny", "forward", entries, (Bar(NUMPY, (TWO,), 1e9), Bar(NUMPY, (SDPA,))))
    found = json.loads(json.dumps(measure(work, 2)))
    assert set(found) == {"name", "group", "date", "others", "entries", "bars"}
    ours, floor, theirs = found["entries"].values()
    fields = {"peer", "call", "unit", "median", "low", "high", "runs", "error"}
    assert set(ours) == set(floor) == fields
    assert 0 < ours["low"] <= ours["median"] <= ours["high"]
    assert ours["error"] < 1e-6
    assert floor["error"] is None
    assert set(theirs) == {"peer", "call", "missing"}
    assert [bar["met"] for bar in found["bars"]] == [True, None]
    for bar in found["bars"]:
        assert set(bar) == {"bar", "limit", "measured", "unit", "met", "note"}


def test_the_list_names_every_workload_and_every_way() -> None:
    done = run("benchmarks", "--list")
    assert done.returncode == 0, done.stderr
    for work in WORKLOADS:
        assert f"{work.name}: " in done.stdout
    for name in PEERS:
        assert f"    {name}: " in done.stdout


def test_one_workload_by_name(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    arguments = ["--only", "lengths-window-102?", "--rounds", "1", "--json", str(file)]
    done = run("benchmarks", *arguments)
    assert done.returncode == 0, done.stderr
    assert "BLAS of NumPy: " in done.stdout
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["format"] == 1
    assert [work["name"] for work in found["workloads"]] == ["lengths-window-1024"]
    machine = {"processor", "cores", "memory_gib", "instructions", "caches", "system", "python"}
    assert machine | {"versions", "blas", "threads"} <= set(found["environment"])


def test_an_unknown_workload_is_an_error() -> None:
    with pytest.raises(SystemExit, match="--list"):
        command.main(["--only", "no-such-workload"])


def test_earlier_results_are_shown_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps(RESULTS), encoding="utf-8")
    assert command.main(["--load", str(file), "--only"]) == 0
    assert "1 of 2 bars are met; 1 could not be judged." in capsys.readouterr().out


def test_without_a_gpu_the_gpu_benchmark_says_so() -> None:
    done = run("benchmarks.gpu", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("No GPU ")


def test_the_gpu_benchmark_names_the_engines_that_refuse() -> None:
    jax = pytest.importorskip("jax", reason="needs jax")
    if jax.default_backend() != "cpu":
        pytest.skip("needs JAX on a CPU, which has no kernel")
    ways = gpu.jax_ways(Call(1, 2, 16, 8, {"causal": True}), "float32")
    results, refusals = gpu.results_of(ways)
    assert list(results) == ["jax", "jax portable", "jax.nn xla"]
    timing.check_agreement(results, gpu.TOLERANCES["float32"])
    (refusal,) = refusals
    assert refusal.startswith("jax native: ValueError engine='native' cannot take this call")


def test_peak_memory_of_a_child() -> None:
    if (reason := memory.missing()) is not None:
        pytest.skip(reason)
    # Far less than the 4 MB of all scores; the naive formula makes several arrays of those.
    assert memory.in_child("lengths-memory-1024", NUMPY) < 16e6
    assert memory.in_child("lengths-memory-1024", "naive NumPy") > 4e6


def a_time(seconds: float, runs: int = 9) -> dict[str, Any]:
    return {
        **{"peer": NUMPY, "call": "1x8x1024x64", "unit": "s", "median": seconds},
        **{"low": 0.9 * seconds, "high": 1.1 * seconds, "runs": runs, "error": 1e-7},
    }


def a_bar(**values: Any) -> dict[str, Any]:
    bar = {"bar": "NumPy: at most 1.2 x two products alone", "limit": 1.2, "unit": "x"}
    return {**bar, "note": "", **values}


RESULTS: dict[str, Any] = {
    "format": 1,
    "environment": {
        **{"processor": "A Processor", "cores": 2, "memory_gib": 8, "instructions": ["avx2"]},
        "caches": ["32K of L1"],
        **{"system": "Linux", "python": "3.12.0", "versions": {"numpy": "2.4.6"}},
        "blas": [{"name": "openblas", "version": "0.3", "kernel": "Haswell", "threads": 2}],
        **{"threads": {"others": 2}, "product_seconds": {"NumPy": 0.02, "torch": 0.04}},
    },
    "workloads": [
        {
            **{"name": "dense-1x8x1024x64", "group": "forward", "date": "2026-01-02"},
            "others": 0.01,
            "entries": {
                NUMPY: a_time(0.008),
                TWO: a_time(0.006),
                SDPA: {"peer": SDPA, "call": "1x8x1024x64", "missing": "not installed: torch"},
            },
            "bars": [
                a_bar(measured=1.33, met=False),
                a_bar(measured=1.0, met=True),
                a_bar(measured=None, met=None, note="nothing to compare with is installed"),
            ],
        },
        *(
            {
                **{"name": f"lengths-{kind}-{length}", "group": f"{kind}-lengths"},
                **{"date": "2026-01-02", "others": None, "bars": []},
                "entries": {NUMPY: {**a_time(length / 1e6), "unit": unit}},
            }
            for kind, unit in (("dense", "s"), ("window", "s"), ("memory", "bytes"))
            for length in (1024, 2048)
        ),
    ],
}


def test_the_table_of_bars() -> None:
    lines = results_table(RESULTS).splitlines()
    bar = "NumPy: at most 1.2 x two products alone"
    assert lines[2] == f"| dense-1x8x1024x64 | {bar} | 1.33 | **no** |"
    assert lines[3] == f"| dense-1x8x1024x64 | {bar} | 1 | yes |"
    assert lines[4].endswith("| nothing to compare with is installed | - |")
    assert lines[-1] == "1 of 2 bars are met; 1 could not be judged."


def test_the_page_is_generated_between_its_marks() -> None:
    text = generated(RESULTS, {"benchmarks/time.svg": "Time"})
    assert "A Processor, 2 cores, 8 GiB of memory" in text
    assert "openblas 0.3, kernel Haswell" in text
    assert "| 8.00 ms (-10, +10 %) | 6.00 ms (-10, +10 %) | - | 1 % |" in text
    assert "- torch SDPA (dense-1x8x1024x64): not installed: torch" in text
    assert "![Time](benchmarks/time.svg)" in text
    page = replace_generated(f"before\n\n{BEGIN}\nold\n{END}\n\nafter\n", text)
    assert page == f"before\n\n{BEGIN}\n\n{text}\n\n{END}\n\nafter\n"
    with pytest.raises(ValueError, match="once each"):
        replace_generated("a page without marks", text)


def test_the_page_of_the_docs_has_the_marks() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert END in replace_generated(page, "new")


def test_plots_are_small_and_the_same_for_the_same_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    made = draw(RESULTS, tmp_path)
    assert set(made) == {"time.svg", "memory.svg", "floor.svg"}
    first = {name: (tmp_path / name).read_bytes() for name in made}
    draw(RESULTS, tmp_path)
    for name, content in first.items():
        assert (tmp_path / name).read_bytes() == content
        assert len(content) < 100_000


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1.5, "s", "1.50 s"),
        (0.1234, "s", "123 ms"),
        (12.3e-6, "s", "12.3 us"),
        (2e6, "bytes", "2.0 MB"),
    ],
)
def test_quantities(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text
