"""The cases as files, and the results of other programs."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest

from portable_attention import Dropout, attention, attention_vjp
from portable_attention.cli import main
from portable_attention.conformance.capabilities import CAPABILITIES, KEYWORDS
from portable_attention.conformance.generator import Array
from portable_attention.conformance.vectors import (
    RESULTS,
    VectorsError,
    check_results,
    inputs_of,
    read_manifest,
    write_vectors,
)

PAGE = Path(__file__).parents[2] / "docs" / "vectors.md"
save_file = pytest.importorskip("safetensors.numpy", reason="needs safetensors").save_file


@pytest.fixture(scope="module")
def vectors(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    groups = ["scale", "mask", "window", "bfloat16", "float16", "gradient", "empty", "lengths"]
    write_vectors(folder, quick=True, cases=[*groups, "dropout", "sinks", "layout", "infinite"])
    return folder


@pytest.fixture
def results(vectors, tmp_path) -> Path:
    """The results of a program that is right, for all of the vectors."""
    run_program(vectors, tmp_path)
    return tmp_path


def run_program(vectors, folder, change=lambda results: results):
    """Do what docs/vectors.md tells a program to do."""
    manifest = json.loads((vectors / "manifest.json").read_text())
    for entry, vector in zip(manifest["cases"], read_manifest(vectors), strict=True):
        arrays = inputs_of(vectors, vector)
        upstream = [arrays.pop(name, None) for name in ("d_output", "d_lse")]
        options = dict(entry["options"])
        if "dropout" in options:
            options["dropout"] = Dropout(**options["dropout"])
        if "window" in options:
            options["window"] = tuple(options["window"])
        output, lse = attention(**arrays, **options, return_lse=True)
        found = {"output": output, "lse": lse}
        if upstream[0] is not None:
            _, pullback = attention_vjp(**arrays, **options)
            pulled = pullback(upstream[0], upstream[1])._asdict()
            found |= {f"d_{n}": array for n, array in pulled.items() if array is not None}
        found = {n: np.ascontiguousarray(array) for n, array in change(found).items()}
        save_file(found, folder / entry["file"])


def test_a_program_that_is_right_passes(vectors, results):
    report = check_results(results, vectors)
    assert report.ok, str(report)
    assert report.count("passed") == len(report.results) > 60
    assert {"d_query", "d_bias", "d_sinks"} <= {n for r in report.results for n in r.units}


def test_a_program_that_is_wrong_fails(vectors, tmp_path):
    run_program(vectors, tmp_path, lambda found: found | {"lse": found["lse"] / np.log(2)})
    report = check_results(tmp_path, vectors)
    assert report.rule == "lse"


def test_what_is_missing_or_damaged_is_told(vectors, results):
    (results / "scale__zero.safetensors").unlink()
    (results / "scale__given.safetensors").write_bytes(b"nothing")
    save_file({"other": np.zeros(3)}, results / "scale__negative.safetensors")
    report = check_results(results, vectors)
    told = {finding.case: finding.message for finding in report.findings}
    assert "there is no file" in told["scale/zero"]
    assert "cannot be read" in told["scale/given"]
    assert "holds no output" in told["scale/negative"]
    assert len(told) == 3
    report = check_results(results, vectors, partial=True)
    assert {finding.case for finding in report.findings} == {"scale/given", "scale/negative"}
    assert "not applicable: no results (1)" in str(report)


def test_a_program_that_wrote_nothing_is_told_so_once(vectors, tmp_path):
    report = check_results(tmp_path, vectors)
    assert len(report.findings) == len(report.results)
    assert str(report).count("there is no file") == 1
    assert f"the same in {len(report.results) - 1} more cases" in str(report)


def test_results_may_be_npz_files(vectors, tmp_path):
    expected = {"output": np.zeros((1, 1, 4, 8), np.float32)}
    np.savez(tmp_path / "scale__zero.npz", **expected)
    report = check_results(tmp_path, vectors, partial=True)
    assert [finding.case for finding in report.findings] == ["scale/zero"]


def test_the_output_has_the_dtype_of_the_query(vectors, tmp_path):
    run_program(vectors, tmp_path, lambda found: found | {"output": found["output"].astype("f4")})
    report = check_results(tmp_path, vectors)
    assert report.rule == "output-dtype"


def test_the_manifest_says_how_the_inputs_are_made(vectors):
    manifest = json.loads((vectors / "manifest.json").read_text())
    for entry, vector in zip(manifest["cases"], read_manifest(vectors), strict=True):
        arrays = inputs_of(vectors, vector)
        for name, told in entry["arrays"].items():
            put = tuple((tuple(p["index"]), float(p["number"])) for p in told["put"])
            recipe = {**told, "shape": tuple(told["shape"]), "put": put}
            recipe["gain"] = float(recipe["gain"])
            made = Array(**recipe).make()
            assert made.tobytes() == arrays[name].tobytes(), entry["id"]


def test_no_manifest(tmp_path):
    with pytest.raises(VectorsError, match="cannot read"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": "other"}')
    with pytest.raises(VectorsError, match="no manifest"):
        read_manifest(tmp_path)


def test_on_the_command_line(tmp_path, capsys):
    assert main(["vectors", str(tmp_path / "v"), "--case", "scale"]) == 0
    assert "cases in" in capsys.readouterr().out
    (tmp_path / "r").mkdir()
    run_program(tmp_path / "v", tmp_path / "r")
    report = tmp_path / "report.json"
    arguments = ["check", str(tmp_path / "r"), "--vectors", str(tmp_path / "v")]
    assert main([*arguments, "--report", str(report)]) == 0
    assert "conforms" in capsys.readouterr().out
    assert json.loads(report.read_text())["ok"]
    (tmp_path / "r" / "scale__zero.safetensors").unlink()
    assert main(arguments) == 1
    assert main([*arguments, "--partial"]) == 0
    assert main(["check", str(tmp_path / "none"), "--vectors", str(tmp_path / "v")]) == 2
    assert main(["check", str(tmp_path / "r"), "--vectors", str(tmp_path / "r")]) == 2
    assert main(["vectors", str(report)]) == 2
    assert main(["vectors", str(tmp_path / "w"), "--case", "nothing"]) == 2


def read_safetensors(path):
    """Read a file as docs/vectors.md describes it, with the standard library alone."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    codes = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "BOOL": "?"}
    arrays = {}
    for name, about in header.items():
        if name != "__metadata__" and about["dtype"] in codes:
            start, end = about["data_offsets"]
            part = data[8 + length + start : 8 + length + end]
            code = codes[about["dtype"]]
            numbers = struct.unpack(f"<{len(part) // struct.calcsize(code)}{code}", part)
            arrays[name] = (about["shape"], numbers)
    return arrays


def test_a_program_without_numpy(vectors):
    """Loops over plain numbers, written from docs/vectors.md: one head, a mask, no gradients."""
    entries = json.loads((vectors / "manifest.json").read_text())["cases"]
    entry = next(entry for entry in entries if entry["id"] == "mask/random")
    assert entry["options"] == {}
    arrays = read_safetensors(vectors / entry["file"])
    (_, _, rows, width), query = arrays["query"]
    (_, _, columns, _), key = arrays["key"]
    (_, _, _, value_width), value = arrays["value"]
    _, mask = arrays["mask"]
    for i in range(rows):
        q = query[i * width : (i + 1) * width]
        allowed = [j for j in range(columns) if mask[i * columns + j]]
        scores = {
            j: sum(a * b for a, b in zip(q, key[j * width : (j + 1) * width], strict=True))
            / math.sqrt(width)
            for j in allowed
        }
        total = sum(math.exp(score) for score in scores.values())
        for name, place, found in [
            ("lse", i, math.log(total)),
            *(
                ("output", i * value_width + c,
                 sum(math.exp(s) * value[j * value_width + c] for j, s in scores.items()) / total)
                for c in range(value_width)
            ),
        ]:  # fmt: skip
            expected = arrays[f"expected.{name}"][1][place]
            assert abs(found - expected) <= arrays[f"bound.{name}"][1][place]


@pytest.mark.parametrize("word", [*CAPABILITIES, *KEYWORDS, *RESULTS, "manifest.json"])
def test_the_page_names_everything(word):
    if word not in ("return_lse", "strides", "validation"):  # those are of calls in Python
        assert f"`{word}`" in PAGE.read_text(encoding="utf-8") or f"/{word}`" in PAGE.read_text()
