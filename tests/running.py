"""Call the library with a backend's arrays, from NumPy to NumPy, and check what always holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from portable_attention import Dropout, attention

from .backends import Backend
from .dtypes import dtype_name, lse_dtype
from .strategies import Call

INPUTS = ("query", "key", "value")


class Result(NamedTuple):
    """Output and lse, as NumPy arrays; an lse of None was not asked for."""

    output: np.ndarray
    lse: np.ndarray | None


def attend(backend: Backend, query, key, value, *, jit: bool = False, **options: Any) -> Result:
    """Return the output and the lse of a call on a backend; all arrays are NumPy, in and out.

    Checks on the way that the results are new arrays of the library, dtype and device that they
    must be, and that every input is as it was.
    """
    return_lse = options.pop("return_lse", True)
    keep_numpy = options.pop("keep_numpy", ())
    arrays, fixed = split_options({"query": query, "key": key, "value": value, **options})
    before = {name: array.tobytes() for name, array in arrays.items()}
    own = {
        name: array if name in keep_numpy else backend.asarray(array)
        for name, array in arrays.items()
    }

    def call(own):
        inputs = [own[name] for name in INPUTS]
        others = {name: array for name, array in own.items() if name not in INPUTS}
        return attention(*inputs, return_lse=return_lse, **others, **fixed)

    if jit and backend.library == "jax":
        import jax

        call = jax.jit(call)
    results = call(own)
    output, lse = results if return_lse else (results, None)

    assert_owned(backend, output, dtype_name(query.dtype))
    if return_lse:
        assert_owned(backend, lse, lse_dtype(dtype_name(query.dtype)))
    for name, array in own.items():
        assert_unchanged(backend, name, before[name], arrays[name], array)
        assert_new(backend, output, name, array)
    return Result(
        backend.to_numpy(output).copy(), backend.to_numpy(lse).copy() if return_lse else None
    )


def split_options(options: dict[str, Any]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Part a call's arguments into the arrays, and the rest; make a Dropout of rate and seed."""
    arrays = {name: value for name, value in options.items() if isinstance(value, np.ndarray)}
    fixed = {name: value for name, value in options.items() if name not in arrays}
    dropout = fixed.get("dropout")
    if isinstance(dropout, dict):
        fixed["dropout"] = Dropout(**dropout)
    elif isinstance(dropout, tuple):
        fixed["dropout"] = Dropout(*dropout)
    return arrays, fixed


def run(backend: Backend, call: Call, **changes: Any) -> Result:
    """Return the result of a random call, with some options changed."""
    arguments = {
        **call.inputs,
        **call.options,
        "jit": call.jit,
        "block_size": call.block_size,
        "return_lse": call.return_lse,
        **changes,
    }
    return attend(backend, **arguments)


def assert_owned(backend: Backend, array: Any, dtype: str) -> None:
    """Check that a result is an array of the backend, on its device, of that dtype."""
    assert backend.owns(array), f"{type(array)} on {getattr(array, 'device', None)}"
    assert dtype_name(array.dtype) == dtype


def assert_unchanged(backend: Backend, name: str, before: bytes, given, own) -> None:
    """Check an input against the bytes that it had, where it came from and where it went."""
    assert given.tobytes() == before, f"{name} was changed"
    now = own if isinstance(own, np.ndarray) else backend.to_numpy(own)
    if now.dtype == given.dtype:  # not narrowed on a device without 64-bit integers
        assert now.tobytes() == before, f"{name} was changed"


def assert_new(backend: Backend, output: Any, name: str, own: Any) -> None:
    """Check that a result does not lie in the memory of an input."""
    if backend.library in ("numpy", "array_api_strict", "torch") and backend.device != "cuda":
        own = own if isinstance(own, np.ndarray) else backend.to_numpy(own)
        assert not np.may_share_memory(backend.to_numpy(output), own), f"output lies in {name}"
