"""The cases as files, for implementations in any language: docs/vectors.md is their format."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from portable_attention._version import __version__
from portable_attention.cli.files import read_arrays, write_arrays
from portable_attention.conformance.calls import INPUTS, Outcome
from portable_attention.conformance.capabilities import ALL, Conventions
from portable_attention.conformance.cases import Case, find, select
from portable_attention.conformance.judge import Answer, Finding, answers, judge_results
from portable_attention.conformance.oracle import Numbers
from portable_attention.conformance.report import CaseResult, Report
from portable_attention.conformance.translation import translated_back

MANIFEST: Final = "manifest.json"
FORMAT: Final = "portable_attention vectors 1"
# What checks beside plain calls do to a call cannot be written to a file.
WRITTEN: Final = frozenset(["call", "same-bits", "neighbours", "rows-alone", "decoding"])
RESULTS: Final = ("output", "lse", "d_query", "d_key", "d_value", "d_bias", "d_sinks")


class VectorsError(Exception):
    """A directory that holds no vectors, or results that cannot be read."""


@dataclass(frozen=True)
class Vector:
    """One entry of a manifest.

    Parameters
    ----------
    case
        The id of the case.
    file
        The name of its file; that of its results is the same.
    rule, shows, tags
        As in `cases.Case`.
    results
        What a program has to write: "output", and some of `RESULTS`.
    """

    case: str
    file: str
    rule: str
    shows: str
    tags: tuple[str, ...]
    results: tuple[str, ...]


def write_vectors(
    directory: str | Path,
    *,
    quick: bool = False,
    cases: Iterable[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> int:
    """Write the cases to a directory and return their number.

    Parameters
    ----------
    directory
        Made if it is not there; files of the same names are replaced.
    quick, cases
        As for `conform`.
    progress
        Called with the number of files written and their total.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [case for case in select(quick=quick, ids=cases) if case.check in WRITTEN]
    entries = []
    for number, case in enumerate(chosen):
        entries.append(_write_case(folder, case))
        if progress is not None:
            progress(number + 1, len(chosen))
    manifest = {
        "format": FORMAT,
        "portable_attention": __version__,
        "cases": entries,
    }
    text = json.dumps(manifest, indent=1, allow_nan=False) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
    return len(entries)


def _write_case(folder: Path, case: Case) -> dict[str, Any]:
    call, must = case.call(), answers(case.call())
    arrays: dict[str, Numbers] = {**call.arrays, **call.cotangents}
    for name, answer in must.items():
        arrays[f"expected.{name}"] = np.asarray(answer.expected, dtype=np.float64)
        arrays[f"bound.{name}"] = np.nan_to_num(
            np.broadcast_to(answer.bound, answer.expected.shape).astype(np.float64)
        )
    file = case.id.replace("/", "__") + ".safetensors"
    write_arrays(folder / file, arrays, {"case": case.id})
    described = case.described()
    described.pop("check")
    return {
        **described,
        "file": file,
        "results": list(must),
        "dtypes": {name: array.dtype.name for name, array in arrays.items()},
    }


def read_manifest(directory: str | Path) -> tuple[Vector, ...]:
    """Return the entries of the manifest of a directory."""
    path = Path(directory) / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest.get("format") != FORMAT:
            raise VectorsError(f"'{path}' is no manifest of the format {FORMAT!r}")
        return tuple(
            Vector(
                entry["id"],
                entry["file"],
                entry["rule"].partition("#")[2],
                entry["shows"],
                tuple(entry["tags"]),
                tuple(entry["results"]),
            )
            for entry in manifest["cases"]
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise VectorsError(f"cannot read '{path}': {type(error).__name__}: {error}") from error


def check_results(
    results: str | Path,
    vectors: str | Path,
    *,
    partial: bool = False,
    conventions: Conventions | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Report:
    """Judge the results that a program wrote for the files of `write_vectors`.

    Parameters
    ----------
    results
        A directory with a file for each case, of the name of the case's file, .safetensors or
        .npz, that holds ``output``, and where it can be had ``lse``, ``d_query`` and so on.
    vectors
        The directory that `write_vectors` wrote.
    partial
        Whether cases without results are no fault.
    conventions
        `empty_rows`, `empty_lse` and `lse_base` count, where they deviate.
    progress
        Called with the number of cases judged and their total.
    """
    start = time.perf_counter()
    agreed = conventions or Conventions()
    entries = read_manifest(vectors)
    judged = []
    for number, entry in enumerate(entries):
        judged.append(_judged(Path(results), Path(vectors), entry, agreed, partial))
        if progress is not None:
            progress(number + 1, len(entries))
    return Report(
        implementation=str(results),
        library="files",
        device="any device",
        capabilities=ALL,
        declared=not partial,
        conventions=agreed,
        results=tuple(judged),
        isolated=True,
        quick=False,
        seconds=time.perf_counter() - start,
    )


def _judged(
    results: Path, vectors: Path, entry: Vector, conventions: Conventions, partial: bool
) -> CaseResult:
    def verdict(
        status: str,
        why: str = "",
        units: Mapping[str, float] | None = None,
        findings: tuple[Finding, ...] = (),
    ) -> CaseResult:
        return CaseResult(
            entry.case, entry.shows, entry.rule, entry.tags, status, why, units or {}, findings
        )

    def wrong(message: str, kind: str) -> CaseResult:
        finding = Finding(entry.case, entry.rule, message, kind=kind)
        return verdict("failed", findings=(finding,))

    stem = results / entry.file.removesuffix(".safetensors")
    files = [p for p in (stem.with_name(stem.name + s) for s in (".safetensors", ".npz"))
             if p.exists()]  # fmt: skip
    if not files:
        message = f"there is no file {entry.file} among the results"
        return verdict("not applicable", "no results") if partial else wrong(message, "no file")
    try:
        found, _ = read_arrays(files[0], frozenset(RESULTS))
    except Exception as error:  # whatever a damaged file makes of a reader
        return wrong(f"{files[0].name} cannot be read: {error}", "an unreadable file")
    if "output" not in found:
        return wrong(f"{files[0].name} holds no output", "no output")
    must = _expected(vectors, entry, conventions)
    call = find(entry.case).call()
    gradients = {name[2:]: array for name, array in found.items() if name.startswith("d_")}
    outcome = translated_back(
        call,
        Outcome("returned", found["output"], found.get("lse"), gradients),
        Conventions(lse_base=conventions.lse_base),
    )
    if outcome.lse is not None:
        found["lse"] = outcome.lse
    half = call.dtype in ("float16", "bfloat16")
    judged = judge_results(
        entry.case,
        entry.rule,
        found,
        must,
        lowest=conventions.empty_lse == "lowest",
        half=half,
    )
    findings = list(judged.findings)
    if (dtype := found["output"].dtype.name) != call.dtype:
        message = f"output has dtype {dtype}, not {call.dtype}"
        findings.insert(0, Finding(entry.case, "output-dtype", message, "output"))
    for name in must:
        if name not in found and name.startswith("d_") and gradients:
            rule = "derivatives"
            findings.append(Finding(entry.case, rule, f"there is no {name}", name))
    status = "failed" if findings else "passed"
    return verdict(status, "", judged.units, tuple(findings))


def _expected(vectors: Path, entry: Vector, conventions: Conventions) -> dict[str, Answer]:
    """Return what must come of a case, as the vectors have it."""
    names = [f"{kind}.{name}" for name in entry.results for kind in ("expected", "bound")]
    arrays, _ = read_arrays(vectors / entry.file, frozenset(names))
    try:
        must = {
            name: Answer(arrays[f"expected.{name}"], arrays[f"bound.{name}"])
            for name in entry.results
        }
    except KeyError as error:
        raise VectorsError(f"'{vectors / entry.file}' holds no {error}") from error
    if (conventions.empty_rows, conventions.empty_lse) != ("zero", "-inf"):
        own = answers(find(entry.case).call(), conventions)
        must |= {name: own[name] for name in ("output", "lse")}
    return must


def inputs_of(vectors: str | Path, entry: Vector) -> dict[str, Numbers]:
    """Return the arrays of a case that a program is given, as the file has them."""
    others = ("mask", "bias", "sinks", "query_offset", "query_lengths", "key_lengths")
    wanted = frozenset((*INPUTS, *others, "d_output", "d_lse"))
    arrays, _ = read_arrays(Path(vectors) / entry.file, wanted)
    return arrays
