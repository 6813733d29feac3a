"""A call that is cut into slices of its rows, for the progress bar, gives the same answer."""

from __future__ import annotations

import numpy as np
import pytest

from portable_attention import Dropout, attention
from portable_attention.cli import main, slices
from portable_attention.cli.oracle import exact_attention

NOTHING = {
    **dict.fromkeys(("mask", "bias", "window", "query_offset", "query_lengths", "key_lengths")),
    **dict.fromkeys(("scale", "softcap", "sinks", "dropout")),
    "causal": False,
    "layout": "bhld",
}
RNG = np.random.default_rng(3)
OPTIONS = {
    "bare": {},
    "causal end": {"causal": True, "query_offset": "end"},
    "causal start": {"causal": True, "query_offset": "start"},
    "offset": {"causal": True, "query_offset": -2},
    "offsets": {"window": (2, 1), "query_offset": np.array([4, 1], dtype=np.uint8)},
    "far offset": {"window": (2, 1), "query_offset": 2**40},
    "window": {"window": (3, None), "query_offset": "end"},
    "mask": {"mask": RNG.random((2, 4, 9, 12)) < 0.7},
    "mask of rows": {"mask": RNG.random((9, 1)) < 0.7},
    "mask of keys": {"mask": RNG.random(12) < 0.7},
    "bias": {"bias": RNG.standard_normal((4, 9, 12))},
    "bias of heads": {"bias": RNG.standard_normal((4, 1, 1))},
    "lengths": {"query_lengths": np.array([9, 2]), "key_lengths": np.array([3, 12])},
    "end by lengths": {
        "causal": True,
        "query_offset": "end",
        "query_lengths": np.array([9, 5]),
        "key_lengths": np.array([11, 4]),
    },
    "end by one length": {"causal": True, "query_offset": "end", "key_lengths": 10},
    "sinks": {"sinks": RNG.standard_normal(4), "softcap": 2.0, "scale": 0.7},
}


@pytest.fixture(autouse=True)
def short_slices(monkeypatch):
    monkeypatch.setattr(slices, "ROWS_MULTIPLE", 2)


def cut(call, scores_per_slice=50):
    return slices.slices_of({**NOTHING, **call}, scores_per_slice)


def together(compute, parts):
    results = [compute(part) for part in parts]
    axis = slices.row_axis(parts[0]["layout"])
    return (
        slices.joined([output for output, _ in results], axis),
        slices.joined([lse for _, lse in results], -1),
    )


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("name", OPTIONS)
def test_slices_give_the_rows_of_the_whole(bare, name, layout):
    if layout == "blhd":
        bare = {name: array.swapaxes(1, 2) for name, array in bare.items()}
    call = {**bare, **OPTIONS[name], "layout": layout}
    parts = cut(call)
    assert len(parts) == (1 if name == "far offset" else 4)  # 2, 2, 2 and 3 of 9 rows
    given = together(lambda part: attention(**part, return_lse=True), parts)
    for one, whole in zip(given, attention(**call, return_lse=True), strict=True):
        np.testing.assert_allclose(one, whole, rtol=1e-5, atol=1e-6)
    given = together(lambda part: exact_attention(**part), parts)
    for one, whole in zip(given, exact_attention(**call), strict=True):
        np.testing.assert_allclose(one, whole, rtol=1e-13, atol=1e-15)


def test_equal_lengths_need_no_offset(bare):
    call = {**bare, "query": np.zeros((2, 4, 12, 8), np.float32), "causal": True}
    parts = cut(call)
    assert len(parts) == 6
    _, lse = together(lambda part: attention(**part, return_lse=True), parts)
    np.testing.assert_allclose(lse[0, 0], np.log(np.arange(1, 13)), rtol=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        {"dropout": Dropout(0.5, 1)},
        {"causal": True},  # ambiguous: attention has to refuse it
        {"mask": np.ones((5, 12), dtype=bool)},
        {"query_lengths": 10},
        {"query_lengths": np.array([1.5, 2.0])},
        {"query_offset": "middle", "causal": True},
        {"query_offset": np.array([0.5]), "causal": True},
        {"query_offset": "end", "causal": True, "key_lengths": np.array([0.5])},
        {"query": np.zeros(8, np.float32)},
    ],
    ids=str,
)
def test_calls_that_stay_whole(bare, call):
    (whole,) = cut({**bare, **call})
    assert all(whole[name] is value for name, value in call.items())


def test_short_calls_stay_whole(bare):
    assert len(cut(bare, slices.SCORES_PER_SLICE)) == 1


@pytest.mark.parametrize("backend", ["numpy", "oracle"])
def test_progress_is_shown_on_stderr(bare, write, run, capsys, monkeypatch, backend):
    whole = run(write(bare), "--backend", backend)
    monkeypatch.setattr(slices.slices_of, "__defaults__", (50,))
    capsys.readouterr()
    sliced = run(write(bare), "--backend", backend)
    captured = capsys.readouterr()
    assert "100%" in captured.err
    assert "%" not in captured.out
    for name, array in whole.items():
        np.testing.assert_allclose(sliced[name], array, rtol=1e-5, atol=1e-6)
    run(write(bare), "--backend", backend, "--quiet")
    assert capsys.readouterr() == ("", "")


def test_fault_within_a_slice_is_told_as_one(bare, write, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(slices.slices_of, "__defaults__", (50,))

    def no_memory(*args, **kwargs):
        raise MemoryError("1 TB")

    monkeypatch.setattr("portable_attention.cli.run.attention", no_memory)
    assert main(["run", str(write(bare)), "-o", str(tmp_path / "out.npz")]) == 2
    assert "error: not enough memory: 1 TB" in capsys.readouterr().err
    assert not (tmp_path / "out.npz").exists()


def test_the_default_tiles_are_not_cut():
    """At the lengths where slices are made, they give the very bits of one call."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((1, 5000, 16), dtype=np.float32) for _ in range(3))
    call = {"query": query, "key": key, "value": value, "causal": True}
    slices.ROWS_MULTIPLE = 1024
    parts = cut(call, 5_000_000)
    assert [len(part["query"][0]) for part in parts] == [2048, 2952]
    given = together(lambda part: attention(**part, return_lse=True), parts)
    for one, whole in zip(given, attention(**call, return_lse=True), strict=True):
        np.testing.assert_array_equal(one, whole)
