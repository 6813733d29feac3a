"""Which schedule runs a call, forwards and backwards."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from portable_attention.backends import Array, Backend
from portable_attention.core import eager, eager_backward, host, host_backward
from portable_attention.core.backward import Cotangents
from portable_attention.core.engines import run_native, run_native_backward
from portable_attention.core.problem import Call
from portable_attention.core.threads import one_blas_thread


def run(call: Call, *, wide: bool = False) -> tuple[Array, Array]:
    """Run a validated call; return output and lse.

    They are (*batch, Hkv, G, Lq, Dv), in the dtype of the query or, if `wide`, of the scores, and
    (*batch, Hkv, G, Lq).
    """
    problem, backend = call.problem, call.backend
    name = problem.compute_dtype if wide else problem.dtype
    found = None
    if backend.kernels or call.engine != "auto":
        with np.errstate(all="ignore"), backend.settings(call.device):
            found = run_native(call, call.engine)
    if found is not None:
        if wide and problem.dtype != name:  # a kernel makes outputs in the dtype of the query
            return backend.astype(found[0], backend.dtype(name)), found[1]
        return found
    if 0 in problem.output_shape[:-1]:
        return (
            _zeros(call, problem.output_shape, name),
            _zeros(call, problem.output_shape[:-1], problem.compute_dtype),
        )
    with np.errstate(all="ignore"), backend.settings(call.device):
        if backend.schedule == "scan":
            from portable_attention.core import scan  # it imports JAX

            return scan.run(call, backend.dtype(name))
        hosted = backend.host_call(call)
        if hosted is None:
            with _guard(backend):
                return eager.run(call, backend.dtype(name))
        output, lse = host.run(hosted, hosted.backend.dtype(name))
        return backend.from_host(output), backend.from_host(lse)


def run_backward(call: Call, given: Cotangents) -> dict[str, Array]:
    """Return the gradients of the call's operands, in their inner shapes and compute dtype."""
    backend = call.backend
    if 0 in call.problem.output_shape[:-1]:
        return {
            name: _zeros(call, tuple(array.shape), call.problem.compute_dtype)
            for name, array in given.wanted(call).items()
        }
    with np.errstate(all="ignore"), backend.settings(call.device):
        if backend.schedule == "scan":
            from portable_attention.core import scan  # it imports JAX

            return scan.run_backward(call, given)
        found = run_native_backward(call, given)
        if found is not None:
            return found
        hosted = backend.host_call(call)
        if hosted is None:
            with _guard(backend):
                return eager_backward.run(call, given)
        on_host = host_backward.run(hosted, given.map(backend.to_host))
        return {name: backend.from_host(array) for name, array in on_host.items()}


def _guard(backend: Backend) -> AbstractContextManager[None]:
    """Hold BLAS to one thread where its number of threads would decide the bits."""
    return one_blas_thread() if backend.uses_host_blas else nullcontext()


def _zeros(call: Call, shape: tuple[int, ...], dtype: str) -> Array:
    options: dict[str, Any] = {"dtype": call.backend.dtype(dtype), "device": call.device}
    return call.backend.xp.zeros(shape, **options)
