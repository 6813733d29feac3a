"""``portable-attention run`` gives what `attention` gives, from a file to a file."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from portable_attention import Dropout, attention
from portable_attention.cli import main
from portable_attention.cli.errors import CommandError
from portable_attention.cli.libraries import devices_of, open_library

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
EVERY_OPTION = (
    *("--causal", "--window", "5,2", "--scale", "0.3", "--softcap", "4"),
    *("--dropout", "0.25,11", "--block-size", "4,5"),
)
THE_SAME = {
    "causal": True,
    "window": (5, 2),
    "scale": 0.3,
    "softcap": 4.0,
    "dropout": Dropout(0.25, 11),
    "block_size": (4, 5),
}


def backends_here():
    """Return each backend and device as a test parameter, or as one that says what it needs."""
    for name in ("numpy", "torch", "jax", "cupy", "strict"):
        try:
            devices = devices_of(name)
        except CommandError as error:
            yield pytest.param(name, None, marks=pytest.mark.skip(reason=f"needs {error}"))
            continue
        if not devices:
            yield pytest.param(name, None, marks=pytest.mark.skip(reason=f"{name} needs a GPU"))
        for device in devices:
            yield pytest.param(name, device, id=f"{name}-{device}")
    yield pytest.param("strict", "device1", id="strict-device1")


HERE = list(backends_here())


def same(results, output, lse):
    assert results.keys() == {"output", "lse"}
    np.testing.assert_array_equal(results["output"], output)
    np.testing.assert_array_equal(results["lse"], lse)
    assert (results["output"].dtype, results["lse"].dtype) == (output.dtype, lse.dtype)


@pytest.mark.parametrize(("backend", "device"), HERE)
def test_every_input_and_option_reaches_attention(arrays, write, run, backend, device):
    results = run(write(arrays), *EVERY_OPTION, "--backend", backend, "--device", device)
    library = open_library(backend, device)
    with library.scope(False):
        native = {
            name: library.from_numpy(array) if array.dtype.kind in "fb" else array
            for name, array in arrays.items()
        }
        output, lse = attention(**native, **THE_SAME, return_lse=True)
    same(results, library.to_numpy(output), library.to_numpy(lse))


@pytest.mark.parametrize(("backend", "device"), HERE)
def test_backends_agree_with_the_oracle(arrays, write, run, backend, device):
    path = write(arrays)
    options = EVERY_OPTION[:-2]
    results = run(path, *options, "--backend", backend, "--device", device)
    exact = run(path, *options, "--backend", "oracle", output="exact.safetensors")
    assert exact["output"].dtype == exact["lse"].dtype == np.float64
    for name, array in exact.items():
        np.testing.assert_allclose(results[name], array, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("backend", "device"), HERE)
def test_float64_on_every_backend(bare, write, run, backend, device):
    options = ("--dtype", "float64", "--backend", backend, "--device", device)
    results = run(write(bare), *options)
    exact = run(write(bare), "--backend", "oracle", output="exact.safetensors")
    for name, array in exact.items():
        assert results[name].dtype == np.float64
        np.testing.assert_allclose(results[name], array, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_half_precision_from_file_to_file(bare, write, run, dtype, backend, suffix):
    wanted = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    half = {name: array.astype(wanted) for name, array in bare.items()}
    results = run(write(half, f"in{suffix}"), "--backend", backend, output=f"out{suffix}")
    output, lse = attention(**half, return_lse=True)
    given = results["output"]
    if suffix == ".npz" and dtype == "bfloat16":
        assert given.dtype == np.dtype("V2")  # as numpy.savez writes it
        given = given.view(BFLOAT16)
    assert given.dtype == wanted
    assert results["lse"].dtype == np.float32
    # One unit in the last place: libraries round the same float32 numbers.
    step = float(ml_dtypes.finfo(wanted).eps)
    np.testing.assert_allclose(
        given.astype(np.float64), output.astype(np.float64), rtol=step, atol=1e-6
    )
    np.testing.assert_allclose(results["lse"], lse, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtype_casts_the_three_inputs(bare, write, run, dtype):
    wanted = BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)
    mixed = {**bare, "key": bare["key"].astype(np.float64)}
    results = run(write(mixed), "--dtype", dtype)
    cast = {name: array.astype(wanted) for name, array in mixed.items()}
    same(results, *attention(**cast, return_lse=True))


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_both_formats_hold_everything(arrays, write, run, suffix):
    results = run(write(arrays, f"in{suffix}"), "--causal", output=f"out{suffix}")
    same(results, *attention(**arrays, causal=True, return_lse=True))


def test_big_endian_and_fortran_arrays(bare, write, run):
    odd = {name: np.asfortranarray(array.astype(">f4")) for name, array in bare.items()}
    same(run(write(odd, "in.npz")), *attention(**bare, return_lse=True))


def test_two_dimensional_inputs(bare, write, run):
    flat = {name: array[0, 0] for name, array in bare.items()}
    results = run(write(flat), "--causal", "--query-offset", "end")
    same(results, *attention(**flat, causal=True, query_offset="end", return_lse=True))


def test_other_layout(bare, write, run):
    swapped = {name: np.ascontiguousarray(a.swapaxes(1, 2)) for name, a in bare.items()}
    results = run(write(swapped), "--layout", "blhd")
    same(results, *attention(**swapped, layout="blhd", return_lse=True))
    assert results["output"].shape == (2, 9, 4, 5)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--window", "none,1"), {"window": (None, 1)}),
        (("--window", "2,None"), {"window": (2, None)}),
        (("--causal", "--query-offset", "start"), {"causal": True, "query_offset": "start"}),
        (("--causal", "--query-offset", "-2"), {"causal": True, "query_offset": -2}),
        (("--causal", "--query-offset", "3,1"), {"causal": True, "query_offset": np.array([3, 1])}),
        (("--key-lengths", "4"), {"key_lengths": 4}),
        (("--key-lengths", "4,0"), {"key_lengths": np.array([4, 0])}),
        (("--query-lengths", "4,9"), {"query_lengths": np.array([4, 9])}),
        (("--scale", "-0.5"), {"scale": -0.5}),
        (("--engine", "portable"), {"engine": "portable"}),
        (("--dropout", "1,0x10"), {"dropout": Dropout(1.0, 16)}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_values_of_options(bare, write, run, options, wanted):
    if "window" in wanted:
        options, wanted = (*options, "--query-offset", "end"), {**wanted, "query_offset": "end"}
    same(run(write(bare), *options), *attention(**bare, **wanted, return_lse=True))


def test_integer_mask_only_when_asked(arrays, write, run):
    mask = arrays["mask"]
    path = write({**arrays, "mask": mask.astype(np.uint8)})
    same(run(path, "--integer-mask"), *attention(**arrays, return_lse=True))


def test_output_tells_where_it_comes_from(bare, write, run, tmp_path):
    run(write(bare), "--window", "3,0", "--query-offset", "end")
    with safe_open(tmp_path / "out.safetensors", framework="numpy") as file:
        about = json.loads(file.metadata()["portable_attention"])
    assert about["computed_by"] == f"numpy {np.__version__} on cpu"
    assert about["options"]["window"] == [3, 0]
    assert about["options"]["query_offset"] == "end"
    assert "natural log" in about["lse"]


def test_same_call_gives_the_same_file(arrays, write, run, tmp_path):
    run(write(arrays), "--causal")
    first = (tmp_path / "out.safetensors").read_bytes()
    run(write(arrays), "--causal")
    assert (tmp_path / "out.safetensors").read_bytes() == first


def test_names_that_are_not_read_are_told(bare, write, run, capsys):
    run(write({**bare, "attn_mask": np.ones((9, 12), dtype=bool)}))
    captured = capsys.readouterr()
    assert "attn_mask" in captured.err
    assert captured.err.count("\n") == 1
    assert "output (2, 4, 9, 5) float32" in captured.out


def test_quiet(bare, write, run, capsys):
    run(write(bare), "--quiet")
    assert capsys.readouterr() == ("", "")


def test_input_is_left_as_it_was(arrays, write, run):
    path = write(arrays)
    before = path.read_bytes()
    run(path, "--causal")
    assert path.read_bytes() == before


def test_output_replaces_a_file_through_a_link(bare, write, run, tmp_path):
    (tmp_path / "real.safetensors").write_bytes(b"old")
    (tmp_path / "out.safetensors").symlink_to("real.safetensors")
    results = run(write(bare))
    assert (tmp_path / "out.safetensors").is_symlink()
    same(results, *attention(**bare, return_lse=True))


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX file modes")
@pytest.mark.parametrize("output", ["out.safetensors", "out.npz"])
def test_output_has_the_mode_that_the_umask_gives(bare, write, run, tmp_path, output):
    before = os.umask(0o027)
    try:
        run(write(bare), output=output)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / output).stat().st_mode) == 0o640


def test_empty_axes(bare, write, run):
    empty = {"query": bare["query"], "key": bare["key"][:, :, :0], "value": bare["value"][:, :, :0]}
    for options in ((), ("--backend", "oracle")):
        results = run(write(empty), *options)
        assert not results["output"].any()
        assert (results["lse"] == -np.inf).all()


def test_as_a_module_in_its_own_process(arrays, write, tmp_path):
    command = [sys.executable, "-m", "portable_attention", "run", str(write(arrays)), "--causal"]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "out.npz")], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    with np.load(tmp_path / "out.npz") as file:
        same(dict(file.items()), *attention(**arrays, causal=True, return_lse=True))


def test_help_and_version_need_no_extra():
    """The first thing that a user types works with the required dependencies alone."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys("
        "['rich', 'safetensors', 'ml_dtypes', 'matplotlib', 'torch', 'jax', 'cupy']));"
        "from portable_attention.cli import main; main(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(command in done.stdout for command in ("demo", "run", "info"))


def test_version(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("portable-attention 0.")
