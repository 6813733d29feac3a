"""Files as somebody with a kernel of their own would write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from portable_attention.cli import main

Arrays = dict[str, np.ndarray]


@pytest.fixture
def arrays() -> Arrays:
    """A padded batch with grouped heads, and everything else that a file can hold."""
    rng = np.random.default_rng(7)
    return {
        "query": rng.standard_normal((2, 4, 9, 8)).astype(np.float32),
        "key": rng.standard_normal((2, 2, 12, 8)).astype(np.float32),
        "value": rng.standard_normal((2, 2, 12, 5)).astype(np.float32),
        "mask": rng.random((9, 12)) < 0.8,
        "bias": rng.standard_normal((4, 1, 12)).astype(np.float32),
        "sinks": rng.standard_normal(4).astype(np.float32),
        "query_lengths": np.array([9, 7]),
        "key_lengths": np.array([12, 10]),
        "query_offset": np.array([3, 0]),
    }


@pytest.fixture
def bare(arrays: Arrays) -> Arrays:
    """The three inputs alone."""
    return {name: arrays[name] for name in ("query", "key", "value")}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write arrays to a file in a fresh directory and return its path."""

    def write(arrays: Arrays, name: str = "in.safetensors") -> Path:
        path = tmp_path / name
        if path.suffix == ".npz":
            np.savez(path, **arrays)
        else:
            save_file({n: np.ascontiguousarray(a) for n, a in arrays.items()}, path)
        return path

    return write


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Arrays]:
    """Run ``portable-attention run`` in this process and return the arrays of its output."""

    def run(path: Path, *options: str, output: str = "out.safetensors") -> Arrays:
        target = tmp_path / output
        status = main(["run", str(path), *options, "-o", str(target)])
        assert status == 0, capsys.readouterr().err
        return read(target)

    return run


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must be refused, and return what it said."""

    def refused(*argv: object) -> str:
        before = {path.name for path in tmp_path.iterdir()}
        status = main([str(argument) for argument in argv])
        captured = capsys.readouterr()
        assert status == 2
        assert captured.out == ""
        assert captured.err.startswith("portable-attention: error: ")
        assert captured.err.count("\n") == 1
        assert "Traceback" not in captured.err
        assert {path.name for path in tmp_path.iterdir()} == before
        return captured.err

    return refused


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.safetensors"


def read(path: Path) -> Arrays:
    """Return the arrays of a file."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            return dict(file.items())
    loaded: dict[str, Any] = load_file(path)
    return loaded
