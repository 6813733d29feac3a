"""Bad requests: one clear line, exit status 2, and nothing half-written."""

from __future__ import annotations

import subprocess
import sys

import pytest

from portable_attention.cli import main

# --- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--window", "3"), ["--window", "LEFT,RIGHT", "'3'"]),
        (("--window", "a,b"), ["--window", "LEFT,RIGHT"]),
        (("--window=-1,0", "--query-offset", "end"), ["window", "-1"]),
        (("--window", "-1,0"), ["--window", "--option=VALUE"]),
        (("--block-size", "4"), ["--block-size", "QUERIES,KEYS"]),
        (("--block-size", "0,4"), ["block_size", "at least 1"]),
        (("--dropout", "0.5"), ["--dropout", "RATE,SEED"]),
        (("--dropout", "1.5,3"), ["rate", "1.5"]),
        (("--dropout", f"0.5,{2**64}"), ["seed", str(2**64)]),
        (("--query-offset", "middle"), ["--query-offset", "start or end"]),
        (("--key-lengths", "4,x"), ["--key-lengths", "integers"]),
        (("--key-lengths", "1,2,3"), ["key_lengths", "(3,)"]),
        (("--softcap", "0"), ["softcap", "> 0"]),
        (("--scale", "nan"), ["scale", "finite"]),
        (("--scale", "half"), ["--scale", "half"]),
        (("--layout", "lbhd"), ["--layout", "lbhd", "bhld"]),
        (("--engine", "native"), ["engine", "native", "portable"]),
        (("--engine", "fast"), ["engine", "fast", "portable"]),
        (("--backend", "tensorflow"), ["--backend", "tensorflow", "numpy"]),
        (("--dtype", "int8"), ["--dtype", "int8", "float16"]),
        (("--device", "cuda:0"), ["numpy", "cuda:0", "--device"]),
        (("--backend", "torch", "--device", "nowhere"), ["torch", "nowhere"]),
        (("--backend", "jax", "--device", "nowhere"), ["jax", "nowhere", "cpu:0"]),
        (("--backend", "jax", "--device", "cpu:99"), ["jax", "cpu:99"]),
        (("--backend", "strict", "--device", "nowhere"), ["nowhere", "device1"]),
        (("--backend", "strict", "--dtype", "float16"), ["strict", "float16", "--dtype"]),
        (("--backend", "oracle", "--dtype", "float32"), ["oracle", "float64"]),
        (("--backend", "oracle", "--device", "cpu"), ["oracle", "--device"]),
        (("--backend", "oracle", "--block-size", "4,4"), ["oracle", "--block-size"]),
        (("--masked",), ["--masked", "--help"]),
        (("--caus",), ["--caus"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_option(bare, write, refused, out, options, words):
    said = refused("run", write(bare), *options, "-o", out)
    assert all(word in said for word in words), said


def test_backend_that_has_no_device(bare, write, refused, out):
    cupy = pytest.importorskip("cupy", reason="needs CuPy", exc_type=ImportError)
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError:
        assert "CUDA" in refused("run", write(bare), "--backend", "cupy", "-o", out)
    else:
        said = refused("run", write(bare), "--backend", "cupy", "--device", "99", "-o", out)
        assert "'99'" in said


def test_no_command(refused):
    assert "COMMAND" in refused()


def test_unknown_command(refused):
    assert "atention" in refused("atention")


def test_output_is_required(bare, write, refused):
    assert "-o" in refused("run", write(bare))


# --- what is not installed


@pytest.mark.parametrize("package", ["safetensors", "ml_dtypes"])
def test_missing_extra_names_the_command_that_installs_it(
    bare, write, refused, out, monkeypatch, package
):
    path = write(bare)
    monkeypatch.setitem(sys.modules, package, None)
    said = refused("run", path, "-o", out)
    assert package in said
    assert "pip install 'portable-attention[cli]'" in said


def test_demo_without_rich(refused, monkeypatch):
    for name in ("rich", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "pip install 'portable-attention[cli]'" in refused("demo")


@pytest.mark.parametrize(
    ("backend", "module", "remedy"),
    [
        ("torch", "torch", "portable-attention[torch]"),
        ("jax", "jax", "portable-attention[jax]"),
        ("cupy", "cupy", "portable-attention[cupy-cuda12x]"),
        ("strict", "array_api_strict", "array-api-strict"),
    ],
)
def test_missing_backend(bare, write, refused, out, monkeypatch, backend, module, remedy):
    path = write(bare)
    monkeypatch.setitem(sys.modules, module, None)
    said = refused("run", path, "--backend", backend, "-o", out)
    assert f"pip install '{remedy}'" in said or f"pip install {remedy}" in said


def test_npz_needs_no_safetensors(bare, write, monkeypatch, tmp_path):
    path = write(bare, "in.npz")
    for name in ("safetensors", "rich", "ml_dtypes"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["run", str(path), "-o", str(tmp_path / "out.npz")]) == 0


def test_status_and_stderr_of_the_process(bare, write, tmp_path):
    del bare["key"]
    command = [sys.executable, "-m", "portable_attention", "run", str(write(bare))]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "out.npz")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("portable-attention: error: ")
    assert done.stderr.count("\n") == 1


def test_interrupt(bare, write, out, monkeypatch, capsys):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("portable_attention.cli.run.attention", interrupted)
    assert main(["run", str(write(bare)), "-o", str(out)]) == 130
    assert not out.exists()
    assert "interrupted" in capsys.readouterr().err
