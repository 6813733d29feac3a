"""Files that cannot be read or written, or hold what cannot be run: one clear line, status 2."""

from __future__ import annotations

import pickle
import zipfile

import numpy as np
import pytest

from portable_attention.cli import files

from .conftest import read

# --- files that cannot be read


def test_missing_file(refused, tmp_path, out):
    said = refused("run", tmp_path / "absent.safetensors", "-o", out)
    assert "absent.safetensors" in said
    assert "No such file" in said


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_directory_as_input(refused, tmp_path, out, suffix):
    (tmp_path / f"in{suffix}").mkdir()
    assert "is a directory" in refused("run", tmp_path / f"in{suffix}", "-o", out)


@pytest.mark.parametrize("name", ["in.pt", "in", "in.npy", "in.safetensors.bak"])
def test_unknown_extension_of_input(refused, tmp_path, out, name):
    (tmp_path / name).write_bytes(b"something")
    said = refused("run", tmp_path / name, "-o", out)
    assert name in said
    assert ".safetensors or .npz" in said


@pytest.mark.parametrize("keep", [0, 4, 20, 200, -1])
@pytest.mark.parametrize("name", ["in.safetensors", "in.npz"])
def test_truncated_file(bare, write, refused, out, name, keep):
    path = write(bare, name)
    path.write_bytes(path.read_bytes()[:keep])
    said = refused("run", path, "-o", out)
    assert name in said
    assert "truncated" in said


@pytest.mark.parametrize("name", ["in.safetensors", "in.npz"])
@pytest.mark.parametrize("content", [b"hello, this is no such file\n" * 9, b"\0" * 300])
def test_something_else_under_the_extension(tmp_path, refused, out, name, content):
    (tmp_path / name).write_bytes(content)
    assert "is not a whole" in refused("run", tmp_path / name, "-o", out)


def test_damaged_archive(bare, write, refused, out):
    path = write(bare, "in.npz")
    content = bytearray(path.read_bytes())
    content[200:230] = b"\xff" * 30
    path.write_bytes(content)
    assert "damaged .npz" in refused("run", path, "-o", out)


class Bomb:
    """Tells when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("the file was unpickled",)


def test_pickled_objects_are_never_loaded(bare, write, refused, out):
    objects = np.empty(1, dtype=object)
    objects[0] = Bomb()
    path = write({**bare, "query": objects}, "in.npz")
    assert "never unpickled" in refused("run", path, "-o", out)


def test_pickle_under_another_name(tmp_path, refused, out):
    path = tmp_path / "in.npz"
    path.write_bytes(pickle.dumps(Bomb()))
    assert "numpy.savez" in refused("run", path, "-o", out)


def test_archive_of_something_else(tmp_path, refused, out):
    with zipfile.ZipFile(tmp_path / "in.npz", "w") as file:
        file.writestr("query", b"no array")
    assert "no NumPy array" in refused("run", tmp_path / "in.npz", "-o", out)


# --- what the file holds


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_missing_tensor(bare, write, refused, out, name):
    del bare[name]
    said = refused("run", write(bare), "-o", out)
    assert f"has no {name};" in said


def test_all_missing(write, refused, out):
    said = refused("run", write({"q": np.ones((2, 2), np.float32)}), "-o", out)
    assert "has no query and no key and no value" in said


@pytest.mark.parametrize(
    ("name", "dtype", "words"),
    [
        ("query", np.int32, ["query", "int32", "float32"]),
        ("value", bool, ["value", "bool", "float32"]),
        ("mask", np.float32, ["mask", "float32", "bool", "bias"]),
        ("mask", np.uint8, ["mask", "uint8", "bool", "--integer-mask"]),
        ("bias", np.int64, ["bias", "int64"]),
        ("sinks", np.int64, ["sinks", "int64"]),
        ("key_lengths", np.float32, ["key_lengths", "float32"]),
        ("query_offset", np.float32, ["query_offset", "float32"]),
    ],
)
def test_wrong_dtype(arrays, write, refused, out, name, dtype, words):
    if name in ("query", "value"):
        arrays.update({n: arrays[n].astype(dtype) for n in ("query", "key", "value")})
        name = "query"
        words = ["query", *words[1:]]
    arrays[name] = arrays[name].astype(dtype)
    said = refused("run", write(arrays), "--causal", "-o", out)
    assert all(word in said for word in words), said


def test_dtypes_that_differ(bare, write, refused, out):
    bare["key"] = bare["key"].astype(np.float16)
    said = refused("run", write(bare), "-o", out)
    assert all(word in said for word in ("query float32", "key float16", "--dtype")), said


@pytest.mark.parametrize("dtype", [np.complex64, "U3", "datetime64[s]", "V4"])
def test_dtype_that_is_no_number(bare, write, refused, out, dtype):
    path = write({**bare, "key": np.zeros((2, 2, 12, 8), dtype=dtype)}, "in.npz")
    assert "'key' has dtype" in refused("run", path, "-o", out)


def test_float8_tensor(bare, write, refused, out):
    import torch
    from safetensors.torch import save_file

    path = out.with_name("in.safetensors")
    save_file({n: torch.from_numpy(a).to(torch.float8_e4m3fn) for n, a in bare.items()}, path)
    said = refused("run", path, "-o", out)
    assert "F8_E4M3" in said
    assert "BF16" in said


def test_integer_mask_of_other_numbers(arrays, write, refused, out):
    path = write({**arrays, "mask": arrays["mask"].astype(np.int8) * -1})
    assert "0 and 1" in refused("run", path, "--integer-mask", "-o", out)


def test_number_too_large_for_the_dtype(bare, write, refused, out):
    bare["value"][0, 0, 0, 0] = 1e6
    said = refused("run", write(bare), "--dtype", "float16", "-o", out)
    assert all(word in said for word in ("float16", "value", "1e+06")), said


@pytest.mark.parametrize("backend", ["numpy", "oracle", "torch", "strict"])
def test_shapes_that_do_not_fit(bare, write, refused, out, backend):
    bare["key"] = bare["key"][..., :5]
    said = refused("run", write(bare), "--backend", backend, "-o", out)
    assert all(word in said for word in ("width", "(2, 4, 9, 8)", "(2, 2, 12, 5)")), said


def test_mask_too_large(bare, write, refused, out):
    path = write({**bare, "mask": np.ones((3, 1, 1, 1), dtype=bool)})
    assert "mask" in refused("run", path, "-o", out)


def test_lengths_out_of_range(bare, write, refused, out):
    said = refused("run", write(bare), "--key-lengths", "13", "-o", out)
    assert all(word in said for word in ("key_lengths", "13", "0..12")), said


def test_ambiguous_causal(bare, write, refused, out):
    said = refused("run", write(bare), "--causal", "-o", out)
    assert all(word in said for word in ("start", "end", "9", "12")), said


@pytest.mark.parametrize("name", ["query_lengths", "key_lengths", "query_offset"])
def test_given_twice(arrays, write, refused, out, name):
    option = "--" + name.replace("_", "-")
    said = refused("run", write(arrays), option, "1", "-o", out)
    assert name in said
    assert option in said


# --- where the output goes


def test_no_output_directory(bare, write, refused, tmp_path):
    said = refused("run", write(bare), "-o", tmp_path / "absent" / "out.safetensors")
    assert "absent" in said
    assert "no directory" in said


def test_output_is_a_directory(bare, write, refused, tmp_path):
    (tmp_path / "out.npz").mkdir()
    assert "is a directory" in refused("run", write(bare), "-o", tmp_path / "out.npz")


def test_unknown_extension_of_output(bare, write, refused, tmp_path):
    said = refused("run", write(bare), "-o", tmp_path / "out.bin")
    assert all(word in said for word in ("out.bin", ".safetensors or .npz")), said


@pytest.mark.parametrize("how", ["same", "dotted", "symlink", "hardlink"])
def test_output_is_the_input(bare, write, refused, tmp_path, how):
    path = write(bare)
    before = path.read_bytes()
    output = tmp_path / "out.safetensors"
    if how == "same":
        output = path
    elif how == "dotted":
        output = tmp_path / "." / ".." / tmp_path.name / path.name
    elif how == "symlink":
        output.symlink_to(path)
    else:
        output.hardlink_to(path)
    assert "is the input" in refused("run", path, "-o", output)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["out.safetensors", "out.npz"])
def test_failure_while_writing_leaves_the_old_file(
    bare, write, refused, tmp_path, monkeypatch, name
):
    output = tmp_path / name
    output.write_bytes(b"old")

    def full_disk(path, *args, **kwargs):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_save_npz", full_disk)
    monkeypatch.setattr("safetensors.numpy.save_file", lambda _, path, **kw: full_disk(path))
    said = refused("run", write(bare), "-o", output)
    assert "No space left" in said
    assert output.read_bytes() == b"old"


def test_bad_input_leaves_the_old_output(bare, write, refused, out, run):
    del bare["value"]
    good = {"output": np.ones(3, np.float32)}
    write(good, out.name)
    refused("run", write(bare), "-o", out)
    np.testing.assert_array_equal(read(out)["output"], good["output"])
