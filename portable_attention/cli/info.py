"""``portable-attention info``: what a report of a fault should say about the machine."""

from __future__ import annotations

import os
import platform
from argparse import Namespace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distributions, version
from typing import Final

import numpy as np
from threadpoolctl import threadpool_info

from portable_attention import __version__
from portable_attention.cli.errors import CommandError
from portable_attention.cli.libraries import NAMES, devices_of

_PACKAGES: Final = (
    *("numpy", "array-api-compat", "threadpoolctl", "torch", "jax", "jaxlib", "cupy"),
    *("array-api-strict", "ml_dtypes", "safetensors", "rich", "matplotlib"),
)
_ENVIRONMENT: Final = (
    *(
        "OMP_",
        "OPENBLAS_",
        "GOTO_",
        "MKL_",
        "BLIS_",
        "VECLIB_",
        "KMP_AFFINITY",
        "CUDA_VISIBLE_DEVICES",
    ),
    *("JAX_", "XLA_", "PYTORCH_", "TORCH_", "PYTHONDEVMODE", "SCIPY_ARRAY_API"),
)


def info(args: Namespace) -> int:
    """Print it as plain lines, which paste well, and return the exit status."""
    del args
    environment = _environment()  # before the libraries are imported, which add to it
    for title, lines in (
        ("system", _system()),
        ("packages", _packages()),
        ("devices", _devices()),  # imports the libraries, which brings in their own BLAS
        ("BLAS and thread pools", _pools()),
        ("environment", environment),
    ):
        print(f"{title}")
        for name, text in lines:
            print(f"  {name:<20} {text}")
    return 0


def _system() -> list[tuple[str, str]]:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    simd = import_module("numpy._core._multiarray_umath").__cpu_features__
    found = [name for name, there in simd.items() if there]
    return [
        ("portable_attention", __version__),
        ("python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("platform", platform.platform()),
        ("processor", f"{_processor()}, {os.cpu_count()} threads, {available} for this process"),
        ("SIMD", " ".join(found)),
    ]


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _packages() -> list[tuple[str, str]]:
    return [(name, _version(name)) for name in _PACKAGES]


def _version(name: str) -> str:
    try:
        if name != "cupy":
            return version(name)
    except PackageNotFoundError:
        return "not installed"
    # CuPy's name says for which CUDA it was built.
    names = {found.metadata["Name"]: found.version for found in distributions()}
    cupy = [f"{number} ({name})" for name, number in names.items() if name.startswith("cupy")]
    return ", ".join(cupy) or "not installed"


def _devices() -> list[tuple[str, str]]:
    return [(name, _device_text(name)) for name in NAMES]


def _device_text(name: str) -> str:
    try:
        return ", ".join(devices_of(name)) or "none found"
    except CommandError as error:
        return f"not available: {error}"
    except Exception as error:  # a broken installation must not hide the rest of the report
        return f"not available: {type(error).__name__}: {error}"


def _pools() -> list[tuple[str, str]]:
    lines = [
        (
            str(pool["internal_api"]),
            f"{pool['version'] or 'version unknown'}, {pool['num_threads']} threads"
            + (f", kernel {pool['architecture']}" if pool.get("architecture") else "")
            + f", {os.path.basename(pool['filepath'])}",
        )
        for pool in threadpool_info()
    ]
    return lines or [("none found", f"NumPy {np.__version__} uses a BLAS that tells nothing")]


def _environment() -> list[tuple[str, str]]:
    set_here = sorted(name for name in os.environ if name.startswith(_ENVIRONMENT))
    return [(name, os.environ[name]) for name in set_here] or [("nothing relevant", "is set")]
