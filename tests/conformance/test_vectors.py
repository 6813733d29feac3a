"""The cases as files, and the results of other programs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from portable_attention import Dropout, attention, attention_vjp
from portable_attention.cli import main
from portable_attention.conformance.generator import Array
from portable_attention.conformance.vectors import (
    VectorsError,
    check_results,
    inputs_of,
    read_manifest,
    write_vectors,
)

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
