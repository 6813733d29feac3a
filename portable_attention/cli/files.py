"""Named arrays from and to ``.safetensors`` and ``.npz`` files; nothing is ever unpickled."""

from __future__ import annotations

import os
import secrets
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from portable_attention.cli.errors import CommandError, require

Array = NDArray[Any]
Arrays = dict[str, Array]

SUFFIXES: Final = (".safetensors", ".npz")
_SAFETENSORS_DTYPES: Final = frozenset(
    ["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"]
)
_NPZ_KINDS: Final = "fiub"  # float, int, unsigned, bool


def bfloat16() -> np.dtype[Any]:
    """Return NumPy's bfloat16, which is that of ml_dtypes."""
    dtype: np.dtype[Any] = np.dtype(require("ml_dtypes").bfloat16)
    return dtype


def suffix_of(path: Path, what: str) -> str:
    """Return the suffix that says the format of a file, or refuse the path."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise CommandError(
            f"{what} '{path}': the extension {path.suffix or '(none)'!r} says no known format; "
            f"use {' or '.join(SUFFIXES)}"
        )
    return suffix


def read_arrays(path: Path, names: frozenset[str]) -> tuple[Arrays, list[str]]:
    """Return the arrays of a file that are among `names`, and the names of the others.

    Parameters
    ----------
    path
        A ``.safetensors`` file, or an ``.npz`` file without pickled members.
    names
        What to read; the rest of the file is left unread.

    Raises
    ------
    CommandError
        Where the file cannot be opened, is malformed or truncated, or holds something else
        than plain numbers under one of the names.
    """
    suffix = suffix_of(path, "input")
    if path.is_dir():
        raise CommandError(f"input '{path}' is a directory; name a {suffix} file")
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CommandError(
            f"cannot read input '{path}': {reason}; check the path and its permissions"
        ) from error
    return (_read_safetensors if suffix == ".safetensors" else _read_npz)(path, names)


def _read_safetensors(path: Path, names: frozenset[str]) -> tuple[Arrays, list[str]]:
    safetensors = require("safetensors")
    bfloat16()  # safetensors returns BF16 tensors only where ml_dtypes has been imported
    arrays: Arrays = {}
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            present = list(file.keys())
            for name in names.intersection(present):
                dtype = file.get_slice(name).get_dtype()
                if dtype not in _SAFETENSORS_DTYPES:
                    raise CommandError(
                        f"input '{path}': tensor {name!r} has dtype {dtype}, which attention does "
                        "not take; store it as F64, F32, F16 or BF16 (a mask as BOOL)"
                    )
                arrays[name] = file.get_tensor(name)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise CommandError(
            f"input '{path}' is not a whole safetensors file ({error}); it may be truncated or "
            "of another format: write it again with safetensors"
        ) from error
    return arrays, sorted(set(present) - names)


def _read_npz(path: Path, names: frozenset[str]) -> tuple[Arrays, list[str]]:
    if not zipfile.is_zipfile(path):
        raise CommandError(
            f"input '{path}' is not a whole .npz file (no zip archive); it may be truncated, a "
            "single .npy array or a pickle: write it again with numpy.savez"
        )
    arrays: Arrays = {}
    try:
        with np.load(path, allow_pickle=False) as file:
            present = list(file.files)
            for name in names.intersection(present):
                arrays[name] = _plain(path, name, file[name])
    except CommandError:
        raise
    except Exception as error:  # zipfile, zlib and numpy each raise their own for a bad archive
        if "pickle" in str(error) or "Object arrays" in str(error):
            raise CommandError(
                f"input '{path}' holds Python objects, which are never unpickled ({error}); save "
                "plain numeric arrays with numpy.savez"
            ) from error
        raise CommandError(
            f"input '{path}' is a damaged .npz file ({type(error).__name__}: {error}); write it "
            "again with numpy.savez"
        ) from error
    return arrays, sorted(set(present) - names)


def _plain(path: Path, name: str, array: Any) -> Array:
    """Return a member of an .npz archive as numbers in the machine's byte order."""
    if not isinstance(array, np.ndarray):
        raise CommandError(
            f"input '{path}': member {name!r} is no NumPy array; write it with numpy.savez"
        )
    if array.dtype.kind == "V" and array.dtype.names is None and array.dtype.itemsize == 2:
        # What numpy.savez makes of bfloat16: the format cannot name the dtype.
        return array.view(bfloat16())
    if array.dtype.kind not in _NPZ_KINDS or array.dtype.itemsize > 8:
        raise CommandError(
            f"input '{path}': array {name!r} has dtype {array.dtype}, which attention does not "
            "take; store float64, float32 or float16 (a mask as bool)"
        )
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def check_output(path: Path, source: Path) -> None:
    """Refuse an output that could not be written, before anything is computed."""
    suffix_of(path, "output")
    parent = path.resolve().parent
    if path.is_dir():
        raise CommandError(f"output '{path}' is a directory; name a file in it")
    if not parent.is_dir():
        raise CommandError(f"output '{path}': there is no directory '{parent}'; make it first")
    if not os.access(parent, os.W_OK):
        raise CommandError(f"output '{path}': the directory '{parent}' cannot be written to")
    with suppress(OSError):
        if path.samefile(source):
            raise CommandError(
                f"output '{path}' is the input file '{source}'; name another file with -o"
            )


def write_arrays(path: Path, arrays: Mapping[str, Array], about: Mapping[str, str]) -> None:
    """Write arrays to a file that appears whole or not at all.

    Parameters
    ----------
    path
        A ``.safetensors`` or ``.npz`` file; one that is there is replaced.
    arrays
        What to write, by name.
    about
        Strings for the metadata of a ``.safetensors`` file; an ``.npz`` file has no place for
        them.
    """
    whole = {name: np.ascontiguousarray(a).reshape(a.shape) for name, a in arrays.items()}
    if suffix_of(path, "output") == ".safetensors":
        save = require("safetensors.numpy").save_file
        _replace(path, lambda part: save(whole, part, metadata=dict(about)))
    else:
        _replace(path, lambda part: _save_npz(part, whole))


def _save_npz(path: Path, arrays: Arrays) -> None:
    with path.open("wb") as file:  # savez would add its own extension to a path
        np.savez(file, allow_pickle=False, **arrays)


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    target = path.resolve()  # through a symbolic link, not in place of it
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        part.touch(exist_ok=False)
        mode = part.stat().st_mode  # what the umask gives; safetensors would make it private
        write(part)
        part.chmod(mode)
        part.replace(target)
    except Exception as error:
        raise CommandError(
            f"cannot write output '{path}' ({error}); nothing was written there"
        ) from error
    finally:
        part.unlink(missing_ok=True)
