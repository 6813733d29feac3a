"""The documentation is run: its examples, those of the docstrings, the README's promises."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import portable_attention

ROOT = Path(__file__).resolve().parent.parent
SEMANTICS = ROOT / "docs" / "semantics.md"
README = ROOT / "README.md"
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w.-]*)\s*$")


def fenced_blocks(text: str) -> list[tuple[str, int, str]]:
    """Return (language, number of the first line, text) of each fenced block of a Markdown text."""
    blocks: list[tuple[str, int, str]] = []
    language, indent, start, body = "", 0, 0, None
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if fence and body is None:
            language, indent, start, body = fence["language"], len(fence["indent"]), number + 1, []
        elif fence and body is not None:
            blocks.append((language, start, "\n".join(body) + "\n"))
            body = None
        elif body is not None:
            body.append(line[indent:])
    assert body is None, f"the fenced block at line {start} is not closed"
    return blocks


def run_examples(test: doctest.DocTest) -> int:
    """Run one doctest, fail with its report, and return how many examples it held."""
    report: list[str] = []
    # The examples change NumPy's print options; this hands back the ones that stood before.
    with np.printoptions():
        runner = doctest.DocTestRunner(verbose=False, optionflags=FLAGS)
        result = runner.run(test, out=report.append)
    assert not result.failed, "".join(report)
    return result.attempted


def test_the_examples_of_the_specification_run_in_order() -> None:
    text = SEMANTICS.read_text(encoding="utf-8")
    # Blank lines in place of the prose keep the line numbers of the page in a report.
    lines = [""] * len(text.splitlines())
    for language, start, body in fenced_blocks(text):
        if language == "python":
            block = body.splitlines()
            lines[start - 1 : start - 1 + len(block)] = block
    examples = "\n".join(lines) + "\n"
    test = doctest.DocTestParser().get_doctest(examples, {}, SEMANTICS.name, str(SEMANTICS), 0)
    assert run_examples(test) > 100


def rules() -> list[tuple[str, str]]:
    """Return (anchor, text) of each rule of the specification: of every third-level section."""
    sections = re.split(r"^(?=##+ )", SEMANTICS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = []
    for section in sections:
        if section.startswith("### "):
            anchor = re.match(r'### <a id="([a-z0-9-]+)"></a>\S', section)
            assert anchor, f"a section without an anchor: {section.splitlines()[0]}"
            found.append((anchor[1], section))
    return found


@pytest.mark.parametrize(("anchor", "section"), rules(), ids=[anchor for anchor, _ in rules()])
def test_each_rule_has_a_runnable_example(anchor: str, section: str) -> None:
    examples = [body for language, _, body in fenced_blocks(section) if language == "python"]
    assert any(">>> " in body for body in examples), f"#{anchor} has no example"


DOCS = ROOT / "docs"
PAGES = [README, SEMANTICS, ROOT / "CHANGELOG.md"]
PAGES += [DOCS / name for name in ("design.md", "testing-a-kernel.md", "vectors.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor:
            linked = file.read_text(encoding="utf-8")
            headings = {
                re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
                for heading in re.findall(r"^#+ (.+)$", linked, flags=re.MULTILINE)
            }
            found = f'<a id="{anchor}">' in linked or anchor in headings
            assert found, f"{page.name} links to {target}"


def test_anchors_are_unique() -> None:
    anchors = re.findall(r'<a id="([^"]+)">', SEMANTICS.read_text(encoding="utf-8"))
    assert len(anchors) == len(set(anchors))


@pytest.mark.parametrize("option", list(inspect.signature(portable_attention.attention).parameters))
def test_the_specification_names_every_option(option: str) -> None:
    assert f"`{option}" in SEMANTICS.read_text(encoding="utf-8")


PUBLIC = [name for name in portable_attention.__all__ if not name.startswith("__")]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_specification_names_every_public_name(name: str) -> None:
    assert re.search(rf"\b{name}\b", SEMANTICS.read_text(encoding="utf-8"))


def test_the_specification_shows_the_signature_as_it_is() -> None:
    """The defaults shown in the specification are those of the function."""
    blocks = fenced_blocks(SEMANTICS.read_text(encoding="utf-8"))
    block = next(body for _, _, body in blocks if body.startswith("attention(query"))
    shown = re.findall(r"(\w+)=([^,)\s]+)", block)
    parameters = inspect.signature(portable_attention.attention).parameters.values()
    assert [(n, d.strip("\"'")) for n, d in shown] == [
        (p.name, str(p.default)) for p in parameters if p.default is not p.empty
    ]


def blocks_of_the_readme(language: str) -> list[tuple[int, str]]:
    text = README.read_text(encoding="utf-8")
    return [(start, body) for found, start, body in fenced_blocks(text) if found == language]


@pytest.mark.parametrize(
    ("start", "block"),
    [
        pytest.param(start, block, id=f"line{start}")
        for start, block in blocks_of_the_readme("python")
    ],
)
def test_the_examples_of_the_readme_run(start: int, block: str) -> None:
    """Each Python block runs by itself; one that needs a backend says so in its first line."""
    needs = re.match(r"(?:>>> )?# needs: (\w+)", block)
    if needs:
        reason = f"needs {needs[1]}, which this README example imports"
        module = pytest.importorskip(needs[1], reason=reason)
        if needs[1] == "cupy":
            try:
                devices = module.cuda.runtime.getDeviceCount()
            except module.cuda.runtime.CUDARuntimeError:
                devices = 0
            if not devices:
                pytest.skip("needs a CUDA device, on which CuPy can make an array")
    if ">>> " in block:
        test = doctest.DocTestParser().get_doctest(block, {}, README.name, str(README), start - 1)
        assert run_examples(test) > 0
    else:
        exec(compile("\n" * (start - 1) + block, str(README), "exec"), {"__name__": "readme"})


@pytest.mark.parametrize(
    "command",
    [
        "python -m pip install '.[cli]' && portable-attention demo",
        "python -m pip install -e '.[test]' && python -m pytest",
    ],
)
def test_the_readme_has_the_set_up_command(command: str) -> None:
    """Each command is all that its block holds, so that it can be copied as it stands."""
    assert [body.strip() for _, body in blocks_of_the_readme("bash")].count(command) == 1


def test_the_readme_names_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = README.read_text(encoding="utf-8")
    assert [extra for extra in project["optional-dependencies"] if f"`{extra}`" not in text] == []


def test_the_changelog_has_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = re.escape(portable_attention.__version__)
    assert re.search(rf"^## \[{version}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE)


def run_command(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command line of the documentation, with the Python and the package of the tests."""
    program, *others = shlex.split(command)
    words = {"python": [], "portable-attention": ["-m", "portable_attention"]}[program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *words, *others],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_smoke_test_of_the_vectors_runs(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="needs safetensors")
    text = (DOCS / "vectors.md").read_text(encoding="utf-8")
    (_, _, kernel), (_, _, commands), (_, _, printed) = fenced_blocks(text)
    (tmp_path / "kernel.py").write_text(kernel, encoding="utf-8")
    *before, check = commands.splitlines()
    for command in before:
        done = run_command(command, tmp_path)
        assert done.returncode == 0, done.stderr
    done = run_command(check, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    # Errors and times differ from one machine to the next, and the names of nearly equal ones.
    first, second, worst, last = printed.splitlines()
    said = done.stdout.splitlines()
    assert said[0] == first
    assert said[1].partition(";")[0] == second.partition(";")[0]
    assert said[2].startswith(worst.partition(":")[0])
    assert said[3:] == [last]

    (tmp_path / "kernel.py").write_text(kernel.replace("-0.5", "-1.0"), encoding="utf-8")
    assert run_command(before[-1], tmp_path).returncode == 0
    done = run_command(check, tmp_path)
    assert done.returncode == 1
    found = next(line for line in done.stdout.splitlines() if re.match(r"[\w-]+/[\w-]+: ", line))
    assert found.startswith("scale/default: ")
    assert found.endswith("(docs/semantics.md#scale)")


def test_the_guide_runs_as_a_reader_would_follow_it(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs torch")
    blocks = fenced_blocks((DOCS / "testing-a-kernel.md").read_text(encoding="utf-8"))
    kernel, first, said, more, in_python, in_pytest = (body for _, _, body in blocks)
    (tmp_path / "kernel.py").write_text(kernel, encoding="utf-8")
    (tmp_path / "judge.py").write_text(in_python, encoding="utf-8")

    done = run_command(first, tmp_path)
    assert done.returncode == 1, done.stderr
    assert said in done.stdout
    done = run_command("python judge.py", tmp_path)
    assert said in done.stderr, "the assertion tells the report"
    done = run_command(f"{in_pytest.strip()} -p no:cacheprovider", tmp_path)
    assert re.search(r"\b11 failed, \d+ passed", done.stdout), done.stdout

    report, discovery = more.splitlines()
    assert run_command(report, tmp_path).returncode == 1
    assert "#empty-rows" in (tmp_path / "report.html").read_text(encoding="utf-8")
    advice = run_command(discovery, tmp_path).stdout.splitlines()[-1]
    assert "--convention empty_rows=nan --convention diagonal=start" in advice
    done = run_command(advice, tmp_path)
    rules = re.findall(r"^ +docs/semantics.md#([\w-]+) ", done.stdout, flags=re.MULTILINE)
    assert rules == ["errors"], done.stdout


def test_the_page_of_the_vectors_says_what_is_left_out() -> None:
    from portable_attention.conformance.cases import select
    from portable_attention.conformance.vectors import WRITTEN

    text = " ".join((DOCS / "vectors.md").read_text(encoding="utf-8").split())
    left_out = [case.id for case in select() if case.check not in WRITTEN]
    refusals = [name for name in left_out if name.startswith("refused/")]
    others = [name for name in left_out if name not in refusals]
    assert f"These are {len(select()) - len(left_out)} of its {len(select())} cases." in text
    assert f"the {len(refusals)} about validation" in text
    assert f"{len(others)} that need a caller in Python" in text
    assert [name for name in others if f"`{name}`" not in text] == []


def modules_with_examples() -> list[str]:
    """Return the name of every module of the package whose source has an example."""
    package = Path(portable_attention.__file__).parent
    names = []
    for file in sorted(package.rglob("*.py")):
        if ">>> " in file.read_text(encoding="utf-8"):
            parts = file.relative_to(package.parent).with_suffix("").parts
            names.append(".".join(part for part in parts if part != "__init__"))
    return names


def import_or_skip(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("portable_attention"):
            raise
        pytest.skip(f"needs {error.name}, which {name} imports")


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_of_the_docstrings_run(name: str) -> None:
    module = import_or_skip(name)
    tests = doctest.DocTestFinder(exclude_empty=True).find(module, name)
    assert sum(run_examples(test) for test in tests if test.examples) > 0


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_docstring_has_an_example(name: str) -> None:
    assert ">>> " in (inspect.getdoc(getattr(portable_attention, name)) or "")
