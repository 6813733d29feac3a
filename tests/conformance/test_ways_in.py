"""The command line, the pytest plugin, and the import of the package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from portable_attention.cli import main
from portable_attention.conformance import CAPABILITIES, Conventions, conform, discover
from portable_attention.conformance.capabilities import choices_of

ROOT = Path(__file__).parents[2]
KERNEL = """
from portable_attention import attention as right, attention_vjp

def attention(query, key, value, **options):
    return right(query, key, value, **options)

attention.vjp = attention_vjp

def wrong(query, key, value, *, scale=None, return_lse=False):
    return right(query, key, value, scale=1.0, return_lse=return_lse)
"""


@pytest.fixture
def kernel(tmp_path) -> Path:
    file = tmp_path / "kernel.py"
    file.write_text(KERNEL)
    return file


def test_a_kernel_that_conforms(kernel, capsys, tmp_path):
    page, data = tmp_path / "report.html", tmp_path / "report.json"
    arguments = ["conform", f"{kernel}:attention", "--quick", "--capabilities", "all"]
    assert main([*arguments, "--report", str(page), "--report", str(data)]) == 0
    assert "conforms" in capsys.readouterr().out
    assert json.loads(data.read_text())["ok"]
    assert page.read_text().startswith("<!doctype html>")


def test_a_kernel_that_does_not(kernel, capsys):
    assert main(["conform", f"{kernel}:wrong", "--case", "scale", "--case", "plain"]) == 1
    told = capsys.readouterr().out
    assert "does not conform" in told
    assert "docs/semantics.md#scale" in told


def test_the_report_is_written_whoever_reads_the_text(kernel, tmp_path):
    """As in `portable-attention conform ... | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "portable_attention", "conform", f"{kernel}:wrong"]
    report = tmp_path / "report.html"
    subprocess.run(
        [*command, "--case", "scale", "--report", str(report)], stdout=writer, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    os.close(writer)
    assert "does not conform" in report.read_text(encoding="utf-8")


def test_discovery(kernel, capsys):
    assert main(["conform", f"{kernel}:attention", "--discover", "--no-isolation"]) == 0
    told = capsys.readouterr().out
    assert "empty_rows      zero" in told
    assert "portable-attention conform" in told


def test_conventions_and_capabilities(kernel):
    arguments = ["conform", f"{kernel}:attention", "--case", "empty", "--no-isolation"]
    assert main(arguments) == 0
    assert main([*arguments, "--convention", "empty_rows=nan"]) == 1
    assert main([*arguments, "--without", "bias,mask", "-q"]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["no_such_module:attention"],
        ["KERNEL:attention", "--device", "cuda:9"],
        ["KERNEL:attention", "--capabilities", "flash"],
        ["KERNEL:attention", "--convention", "empty_rows=maybe"],
        ["KERNEL:attention", "--convention", "colour=red"],
        ["KERNEL:attention", "--case", "nothing"],
        ["KERNEL:attention", "--report", "report.pdf"],
        ["KERNEL:attention", "--report", "/no/such/place/report.html"],
        ["KERNEL:attention", "--backend", "oracle"],
    ],
)
def test_what_cannot_be_done_is_one_line(kernel, arguments, capsys):
    arguments = [argument.replace("KERNEL", str(kernel)) for argument in arguments]
    assert main(["conform", *arguments]) == 2
    told = capsys.readouterr()
    assert not told.out
    assert told.err.startswith("portable-attention: error: ")
    assert told.err.count("\n") == 1


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run the kit's tests from somewhere else, as its users do."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "portable_attention.pytest_entry", "--pyargs",
         "portable_attention.conformance", "-p", "no:cacheprovider", "-q", "-rN", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # fmt: skip


def test_the_plugin_makes_an_item_of_each_case(kernel):
    done = run_pytest(
        kernel.parent, "--implementation", "kernel:attention", "--quick", "--capabilities", "all"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split(" passed")[0].rpartition("\n")[2].split()[-1]) > 200


def test_the_plugin_fails_by_case_and_says_why(kernel):
    done = run_pytest(
        kernel.parent, "--implementation", "kernel.py:wrong", "-k", "scale or lengths", "-x"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "test_case[scale/default]" in done.stdout
    assert "docs/semantics.md#scale" in done.stdout
    assert "query = np.array(" in done.stdout


def test_the_plugin_reads_options_that_a_conftest_has_taken(kernel):
    (kernel.parent / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--backend', action='append')\n"
    )
    done = run_pytest(
        kernel.parent,
        "--implementation",
        "kernel.py:attention",
        "--backend",
        "numpy",
        "-k",
        "sinks",
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [((), "--implementation"), (("--implementation", "nothing:here"), "cannot import")],
)
def test_the_plugin_says_what_is_missing(kernel, arguments, says):
    done = run_pytest(kernel.parent, *arguments)
    assert done.returncode == 4
    assert says in done.stdout + done.stderr


def test_the_plugin_leaves_other_runs_alone(kernel):
    (kernel.parent / "test_other.py").write_text("def test_nothing():\n    pass\n")
    code = (
        "import sys, pytest; status = pytest.main(['-q', '-p', 'portable_attention.pytest_entry', "
        "'test_other.py']); "
        "sys.exit(status or bool({'portable_attention.conformance', 'torch', 'jax'} & "
        "set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=kernel.parent, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_the_package_does_not_import_the_kit():
    code = (
        "import sys, portable_attention; "
        "assert 'portable_attention.conformance' not in sys.modules; "
        "portable_attention.conformance.conform; "
        "assert not {'torch', 'jax', 'pytest', 'safetensors', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


GUIDE = ROOT / "docs" / "testing-a-kernel.md"


@pytest.mark.parametrize("name", [*CAPABILITIES, *vars(Conventions())])
def test_the_guide_names_every_capability_and_convention(name):
    assert f"`{name}`" in GUIDE.read_text(encoding="utf-8")


def test_the_guide_names_every_value_of_a_convention():
    text = GUIDE.read_text(encoding="utf-8")
    for name in vars(Conventions()):
        line = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        assert all(f"`{choice}`" in line for choice in choices_of(name))


def test_the_function_of_the_guide_gets_a_verdict(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="needs torch")
    code = GUIDE.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    (tmp_path / "kernel.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    options = {"backend": "torch", "isolate": False}
    report = conform("kernel.py:attention", quick=True, **options)
    assert report.rules[0] == "empty-rows"
    assert report.count("passed") > 60
    found = discover("kernel.py:attention", **options)
    less = [*found.missing, *found.wrong]
    again = conform(
        "kernel.py:attention", conventions=found.conventions, without=less, quick=True, **options
    )
    assert {finding.rule for finding in again.findings} <= {"errors"}, str(again)
