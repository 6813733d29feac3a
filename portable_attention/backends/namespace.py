"""From arrays to their library: the one module that imports array_api_compat.

A library is told by its arrays alone, so none is imported before an array of it is seen.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import array_api_compat as compat
import numpy as np

from portable_attention.backends.base import Array, Backend
from portable_attention.backends.numpy_backend import numpy_backend


def common_backend(arrays: dict[str, Array]) -> Backend:
    """Return the backend of all these arrays, or raise TypeError and name the odd one out."""
    found = {name: backend_of(name, array) for name, array in arrays.items()}
    chosen = next(
        (backend for backend in found.values() if backend.takes_numpy),
        next(iter(found.values())),
    )
    for name, backend in found.items():
        if backend is not chosen and not (chosen.takes_numpy and backend.name == "numpy"):
            first = next(other for other, one in found.items() if one is chosen)
            raise TypeError(
                f"{name} is an array of {backend.name}, but {first} is one of {chosen.name}: "
                "pass arrays of one library"
            )
    return chosen


def backend_of(name: str, array: Array) -> Backend:
    """Return the backend of one array, or raise TypeError."""
    if isinstance(array, np.ndarray | np.generic):
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(
                f"{name} is a numpy.ma.MaskedArray, whose mask would be lost: pass its data, and "
                "say what may be attended with mask="
            )
        return numpy_backend()
    if compat.is_torch_array(array):
        return _torch_backend()
    if compat.is_jax_array(array):
        return jax_backend()
    if compat.is_cupy_array(array):
        return _cupy_backend()
    if hasattr(array, "__array_namespace__") and not isinstance(array, type):
        return _standard_backend(compat.array_namespace(array))
    raise TypeError(
        f"{name} must be an array of NumPy, PyTorch, JAX, CuPy or another library that follows the "
        f"Array API standard, got {type(array).__module__}.{type(array).__qualname__}"
    )


@cache
def _torch_backend() -> Backend:
    import array_api_compat.torch

    from portable_attention.backends.torch_backend import TorchBackend

    return TorchBackend(array_api_compat.torch)


@cache
def jax_backend() -> Backend:
    """Return the backend of JAX, importing it."""
    import jax.numpy

    from portable_attention.backends.jax_backend import JaxBackend

    return JaxBackend(jax.numpy)


@cache
def _cupy_backend() -> Backend:
    import array_api_compat.cupy

    from portable_attention.backends.cupy_backend import CupyBackend

    return CupyBackend(array_api_compat.cupy)


@cache
def _standard_backend(xp: Any) -> Backend:
    return Backend(xp, xp.__name__)
