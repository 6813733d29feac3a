"""The backends of the suite: one row each, with what it can do and how NumPy arrays get there.

Inputs and references are NumPy everywhere; the tested call alone sees the backend's arrays.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .dtypes import DTYPES, numpy_dtype


@dataclass(frozen=True)
class Backend:
    """An array library on one of its devices."""

    name: str
    library: str  # "numpy", "array_api_strict", "torch", "jax" or "cupy"
    device: str  # as the library spells it
    dtypes: tuple[str, ...] = DTYPES
    int64: bool = True  # whether the device has 64-bit integers
    compiled: bool = False  # whether each new shape is compiled: fewer examples
    autodiff: bool = False  # whether the library differentiates calls itself
    strides: bool = True  # whether its arrays keep the strides of NumPy ones
    strict_flags: dict[str, Any] = field(default_factory=dict)

    def missing(self) -> str | None:
        """Return what is missing to run here, or None."""
        try:
            importlib.import_module(self.library)
        except ImportError:
            return f"needs the package {self.library}"
        return _MISSING_DEVICE.get(self.name, lambda: None)()

    @property
    def xp(self) -> Any:
        """The library's array namespace."""
        return importlib.import_module("jax.numpy" if self.library == "jax" else self.library)

    @contextlib.contextmanager
    def active(self) -> Iterator[Backend]:
        """Set the library up for the tests that follow, and put it back."""
        if self.library == "array_api_strict":
            with self.xp.ArrayAPIStrictFlags(**self.strict_flags):
                yield self
        elif self.library == "jax":
            import jax

            # float64, and int64 lengths, need it; test_jax.py runs what users have by default.
            with jax.enable_x64(True):
                yield self
        else:
            yield self

    def few(self, items: Sequence[Any], count: int) -> list[Any]:
        """Return all of these, or the first few where each has to be compiled."""
        return list(items)[:count] if self.compiled else list(items)

    def device_object(self) -> Any:
        """Return the device as the library's own functions take it."""
        return _DEVICES[self.library](self)

    def asarray(self, array: Any) -> Any:
        """Return a NumPy array as this backend's, on its device, laid out alike where it can be."""
        array = np.asarray(array)
        if not self.int64 and array.dtype == np.int64:
            array = array.astype(np.int32)
        return _FROM_NUMPY[self.library](self, array)

    def to_numpy(self, array: Any) -> np.ndarray:
        """Return this backend's array as a NumPy array of the same dtype."""
        return _TO_NUMPY[self.library](array)

    def owns(self, array: Any) -> bool:
        """Return whether an array is this library's, on this device."""
        kind = {"torch": "Tensor", "jax": "Array", "array_api_strict": "_array_object.Array"}
        wanted = importlib.import_module(self.library)
        for part in kind.get(self.library, "ndarray").split("."):
            wanted = getattr(wanted, part)
        return isinstance(array, wanted) and self.is_here(array)

    def is_here(self, array: Any) -> bool:
        """Return whether an array lies on this backend's device."""
        device = array.device
        return device == self.device_object() if self.library != "numpy" else device == "cpu"

    def __str__(self) -> str:
        return self.name


def _torch_from_numpy(backend: Backend, array: np.ndarray) -> Any:
    import torch

    half = array.dtype == numpy_dtype("bfloat16")
    numbers = array.view(np.int16) if half else array
    if any(stride < 0 for stride in numbers.strides):  # PyTorch has none
        numbers = numbers.copy(order="C")
    size = numbers.itemsize
    steps = [stride // size for stride in numbers.strides]
    extent = 1 + sum((n - 1) * step for n, step in zip(numbers.shape, steps, strict=True))
    if not numbers.size:
        tensor = torch.from_numpy(numbers.copy())
    else:  # the whole span of memory, gaps and all, seen with the same strides
        span = np.lib.stride_tricks.as_strided(numbers, (extent,), (size,)).copy()
        tensor = torch.from_numpy(span).to(backend.device)
        tensor = tensor.as_strided(numbers.shape, steps)
    tensor = tensor.view(torch.bfloat16) if half else tensor
    return tensor.to(backend.device)


def _torch_to_numpy(tensor: Any) -> np.ndarray:
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return tensor.numpy()


def _jax_device(backend: Backend) -> Any:
    import jax

    return jax.devices(backend.device)[0]


def _jax_from_numpy(backend: Backend, array: np.ndarray) -> Any:
    import jax

    return jax.device_put(array, _jax_device(backend))


def _strict_device(backend: Backend) -> Any:
    return backend.xp.Device(backend.device)


def _strict_from_numpy(backend: Backend, array: np.ndarray) -> Any:
    return backend.xp.asarray(array, device=_strict_device(backend))


def _cupy_device(backend: Backend) -> Any:
    return backend.xp.cuda.Device(0)


def _cupy_from_numpy(backend: Backend, array: np.ndarray) -> Any:
    with _cupy_device(backend):
        return backend.xp.asarray(array)


def _torch_device(backend: Backend) -> Any:
    import torch

    # As tensors report it: "cuda:0", not "cuda".
    return torch.empty(0, device=backend.device).device


_DEVICES: dict[str, Callable[[Backend], Any]] = {
    "numpy": lambda _backend: "cpu",
    "array_api_strict": _strict_device,
    "torch": _torch_device,
    "jax": _jax_device,
    "cupy": _cupy_device,
}

_FROM_NUMPY: dict[str, Callable[[Backend, np.ndarray], Any]] = {
    "numpy": lambda _backend, array: array,
    "array_api_strict": _strict_from_numpy,
    "torch": _torch_from_numpy,
    "jax": _jax_from_numpy,
    "cupy": _cupy_from_numpy,
}

_TO_NUMPY: dict[str, Callable[[Any], np.ndarray]] = {
    "numpy": np.asarray,
    # The strict library reaches no other device but through this door.
    "array_api_strict": lambda array: np.asarray(array._array),
    "torch": _torch_to_numpy,
    "jax": np.asarray,
    "cupy": lambda array: array.get(),
}


def _no_cuda_for_torch() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device and a CUDA build of torch"


def _no_gpu_for_jax() -> str | None:
    import jax

    try:
        jax.devices("gpu")
    except RuntimeError:
        return "needs a GPU and a GPU build of jax"
    return None


def _no_cuda_for_cupy() -> str | None:
    import cupy

    try:
        cupy.zeros(1)
    except Exception as error:  # CuPy has one class for each of the toolkit's libraries
        return f"needs a CUDA device ({type(error).__name__})"
    return None


_MISSING_DEVICE: dict[str, Callable[[], str | None]] = {
    "torch-cuda": _no_cuda_for_torch,
    "jax-gpu": _no_gpu_for_jax,
    "cupy": _no_cuda_for_cupy,
}

_BARE = {"boolean_indexing": False, "data_dependent_shapes": False, "enabled_extensions": ()}
_STANDARD = ("float32", "float64")  # the standard's floating dtypes: no half precision

BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("numpy", "numpy", "cpu"),
        Backend("strict", "array_api_strict", "CPU_DEVICE", dtypes=_STANDARD),
        Backend("strict-device1", "array_api_strict", "device1", dtypes=_STANDARD),
        Backend(
            "strict-bare", "array_api_strict", "CPU_DEVICE", dtypes=_STANDARD, strict_flags=_BARE
        ),
        Backend("strict-no-x64", "array_api_strict", "no_x64", dtypes=("float32",), int64=False),
        Backend("torch", "torch", "cpu", autodiff=True),
        Backend("torch-cuda", "torch", "cuda", autodiff=True),
        Backend("jax", "jax", "cpu", compiled=True, autodiff=True, strides=False),
        Backend("jax-gpu", "jax", "gpu", compiled=True, autodiff=True, strides=False),
        Backend("cupy", "cupy", "cuda:0", dtypes=("float16", "float32", "float64")),
    )
}
