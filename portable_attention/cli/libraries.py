"""The array libraries as the command line sees them: NumPy arrays in, NumPy arrays out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from portable_attention.cli.errors import CommandError

NAMES: Final = ("numpy", "torch", "jax", "cupy", "strict")
_INSTALL: Final = {
    "torch": "pip install 'portable-attention[torch]'",
    "jax": "pip install 'portable-attention[jax]'",
    "cupy": "pip install 'portable-attention[cupy-cuda12x]' (or cupy-cuda13x)",
    "array_api_strict": "pip install array-api-strict",
}


@dataclass(frozen=True)
class Library:
    """One array library on one device."""

    name: str
    version: str
    device: str
    from_numpy: Callable[[NDArray[Any]], Any]
    to_numpy: Callable[[Any], NDArray[Any]]
    wait: Callable[[Any], object]  # until an array that the library returned is computed
    # What to compute within, by whether float64 takes part.
    scope: Callable[[bool], AbstractContextManager[Any]] = lambda wide: nullcontext()


def open_library(name: str, device: str | None = None) -> Library:
    """Return a library by its name on the command line.

    Parameters
    ----------
    name
        One of `NAMES`.
    device
        As the library itself writes it: ``cuda:0`` for PyTorch, ``gpu:0`` or ``cpu`` for JAX, a
        number for CuPy, ``device1`` for array-api-strict. None is the library's default.

    Raises
    ------
    CommandError
        Where the library is not installed or does not have the device.
    """
    return _OPENERS[name](device)


def devices_of(name: str) -> list[str]:
    """Return the devices of an installed library that the demo runs on; CuPy may have none."""
    if name == "torch":
        torch = _load("torch")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return ["cpu", *(f"cuda:{index}" for index in range(count))]
    if name == "jax":
        jax = _load("jax")
        default = [f"{device.platform}:{device.id}" for device in jax.devices()]
        return default if jax.default_backend() == "cpu" else ["cpu:0", *default]
    if name == "cupy":
        cupy = _load("cupy")
        try:
            return [str(index) for index in range(cupy.cuda.runtime.getDeviceCount())]
        except cupy.cuda.runtime.CUDARuntimeError:
            return []
    if name == "strict":
        _load("array_api_strict")
        return ["CPU_DEVICE"]
    return ["cpu"]


def _load(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise CommandError(
            f"{module} cannot be imported ({error}): {_INSTALL.get(module, 'install it')}"
        ) from error


def _no_device(library: str, device: str | None, reason: object, remedy: str) -> CommandError:
    what = "its default device" if device is None else f"the device {device!r}"
    return CommandError(f"{library} cannot use {what} ({reason}); {remedy}")


def _numpy(device: str | None) -> Library:
    if device not in (None, "cpu"):
        raise _no_device("numpy", device, "NumPy computes on the CPU", "drop --device")
    return Library("numpy", np.__version__, "cpu", np.asarray, np.asarray, lambda array: None)


def _strict(device: str | None) -> Library:
    strict = _load("array_api_strict")
    device = device or "CPU_DEVICE"
    try:
        place = strict.Device(device)
    except ValueError as error:
        raise _no_device("array-api-strict", device, error, "use CPU_DEVICE or device1") from error

    def from_numpy(array: NDArray[Any]) -> Any:
        if array.dtype not in (np.bool_, np.float32, np.float64, np.int32, np.int64):
            raise CommandError(
                f"array-api-strict has no {array.dtype}: pass --dtype float32 or float64, or "
                "use another --backend"
            )
        return strict.asarray(array, device=place, copy=True)

    def to_numpy(array: Any) -> NDArray[Any]:
        return np.asarray(array.to_device(strict.Device("CPU_DEVICE")))

    version = str(strict.__version__)
    return Library("strict", version, device, from_numpy, to_numpy, lambda array: None)


def _torch(device: str | None) -> Library:
    torch = _load("torch")
    try:
        place = torch.device(device or "cpu")
        torch.empty(1, device=place)
    except Exception as error:  # RuntimeError, AssertionError, NotImplementedError by build
        raise _no_device("torch", device, error, "use cpu, or cuda:0 where there is one") from error

    def from_numpy(array: NDArray[Any]) -> Any:
        array = np.array(array, order="C", copy=True)  # writable, whatever it was mapped from
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(place)
        return torch.from_numpy(array).to(place)

    def to_numpy(array: Any) -> NDArray[Any]:
        host = array.detach().cpu().contiguous()
        if host.dtype == torch.bfloat16:
            import ml_dtypes

            return np.asarray(host.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
        return np.asarray(host.numpy())

    def wait(array: Any) -> None:
        if array.is_cuda:
            torch.cuda.synchronize(array.device)

    return Library("torch", str(torch.__version__), str(place), from_numpy, to_numpy, wait)


def _jax(device: str | None) -> Library:
    jax = _load("jax")
    platform, _, index = (device or "").partition(":")
    try:
        place = jax.devices(platform or None)[int(index or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        found = ", ".join(f"{d.platform}:{d.id}" for d in jax.devices())
        raise _no_device("jax", device, error, f"it has {found}") from error
    # Without x64, JAX would quietly make float32 of float64. The switch moved in jax 0.8.
    x64 = (jax if hasattr(jax, "enable_x64") else import_module("jax.experimental")).enable_x64

    return Library(
        "jax",
        str(jax.__version__),
        f"{place.platform}:{place.id}",
        lambda array: jax.device_put(array, place),
        np.asarray,
        lambda array: array.block_until_ready(),
        lambda wide: x64(True) if wide else nullcontext(),
    )


def _cupy(device: str | None) -> Library:
    cupy = _load("cupy")
    try:
        place = cupy.cuda.Device(int(device or 0))
        place.use()
        version = cupy.__version__
        cupy.zeros(1)
    except Exception as error:  # CUDARuntimeError, ImportError of a missing CUDA library
        raise _no_device("cupy", device, error, "it needs a CUDA device, by its number") from error
    return Library(
        "cupy",
        str(version),
        str(place.id),
        cupy.asarray,
        cupy.asnumpy,
        lambda array: cupy.cuda.get_current_stream().synchronize(),
        lambda wide: cupy.cuda.Device(place.id),
    )


_OPENERS: Final[dict[str, Callable[[str | None], Library]]] = {
    "numpy": _numpy,
    "torch": _torch,
    "jax": _jax,
    "cupy": _cupy,
    "strict": _strict,
}
