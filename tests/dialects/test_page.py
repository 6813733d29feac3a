"""The page on dialects: its examples run, its links lead somewhere, its tables are complete."""

from __future__ import annotations

import doctest
import re

import pytest

from portable_attention import dialects

from ..test_docs import ROOT, fenced_blocks, run_examples

PAGE = ROOT / "docs" / "dialects.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_examples_run_in_order() -> None:
    pytest.importorskip("onnx", reason="needs onnx, which one of the examples calls")
    examples = "\n".join(body for kind, _, body in fenced_blocks(TEXT) if kind == "python")
    test = doctest.DocTestParser().get_doctest(examples, {}, PAGE.name, str(PAGE), 0)
    assert run_examples(test) > 15


def test_links_lead_somewhere() -> None:
    for path, _, anchor in re.findall(r"\]\(([^)\s#]+)(#([\w-]+))?\)", TEXT):
        linked = (PAGE.parent / path).read_text(encoding="utf-8")
        assert not anchor or f'<a id="{anchor}">' in linked


@pytest.mark.parametrize("name", dialects.__all__)
def test_each_module_is_shown(name: str) -> None:
    module = getattr(dialects, name)
    functions = [
        n
        for n, f in vars(module).items()
        if callable(f) and f.__module__ == module.__name__ and not n.startswith("_")
    ]
    assert functions
    for function in functions:
        doc = getattr(module, function).__doc__
        assert f"`{function}`" in TEXT or f"dialects.{name}.{function}(" in TEXT
        assert ">>> " in doc
        assert "http" in doc
    assert f"`dialects.{name}.native(" in TEXT
