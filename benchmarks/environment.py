"""The process that measures: what is set before NumPy loads, and what it then ran on."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

# A setting of the environment may hold OpenBLAS to an older kernel; NumPy reads it when it loads.
_UNSET = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
_PACKAGES = (
    *("portable-attention", "numpy", "torch", "jax", "onnxruntime", "openvino", "mlx"),
    *("tokamax", "memory-efficient-attention", "ml_dtypes", "threadpoolctl"),
)
QUIET = 0.05  # the part of the cores that other programs may take
_FEATURES = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "asimd", "sve")


def prepare(threads: int | None) -> None:
    """Set up this process; it must not have imported NumPy yet.

    Holding the process to some cores is the one way to say to every library at once how many
    threads to run.
    """
    for name in _UNSET:
        os.environ.pop(name, None)
    os.environ["JAX_PLATFORMS"] = "cpu"  # the GPU has a command of its own
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if threads is not None:
        if not hasattr(os, "sched_setaffinity"):
            raise SystemExit("--threads needs an operating system that can hold a process to cores")
        cores = sorted(os.sched_getaffinity(0))
        if not 1 <= threads <= len(cores):
            raise SystemExit(f"--threads must be between 1 and {len(cores)}, got {threads}")
        os.sched_setaffinity(0, cores[:threads])


def cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Watch:
    """Tells how much of the cores' time went to other programs since it was made."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.start = _seconds()

    def disturbed(self) -> bool:
        """Whether others took more than a twentieth, and more than the clock of the system errs."""
        total, others = self.since()
        return others > QUIET * total + 0.02

    def since(self) -> tuple[float, float]:
        """Return the seconds that there were on all cores, and those that others took.

        Both are 0 where the system does not tell: it must be Linux.
        """
        now = _seconds()
        if self.start is None or now is None:
            return 0.0, 0.0
        total, busy, own = (after - before for before, after in zip(self.start, now, strict=True))
        return total, min(total, max(0.0, busy - own))


def _seconds() -> tuple[float, float, float] | None:
    """Return the seconds of all cores, those that were busy, and those of this process."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            numbers = [int(word) for word in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    hertz = os.sysconf("SC_CLK_TCK")
    idle = numbers[3] + numbers[4]
    return sum(numbers) / hertz, (sum(numbers) - idle) / hertz, sum(os.times()[:4])


def describe() -> dict[str, Any]:
    """Return the machine and the versions, with no name of a host or a user."""
    model, flags = _processor()
    return {
        "processor": model,
        "cores": cores(),
        "memory_gib": _memory(),
        "caches": _caches(),
        "instructions": [name for name in _FEATURES if name in flags],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": _versions(),
        "blas": _blas(),
        "threads": _threads(),
    }


def lines(found: dict[str, Any]) -> list[str]:
    """Return the same for people."""
    blas = [f"{one['name']} {one['version']}, kernel {one['kernel']}" for one in found["blas"]]
    counts = [f"{name} {count}" for name, count in found["threads"].items()]
    return [
        f"{found['processor']}, {found['cores']} cores, {found['memory_gib']} GiB of memory, "
        f"{found['system']}",
        f"instruction sets: {', '.join(found['instructions']) or 'unknown'}; "
        f"caches: {', '.join(found['caches']) or 'unknown'}",
        f"Python {found['python']}, "
        + ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
        f"BLAS of NumPy: {'; '.join(blas) or 'unknown'}",
        f"threads: {', '.join(counts)}",
    ]


def _processor() -> tuple[str, set[str]]:
    """Return the model, with its numbers, since some have no more than a family name; the flags."""
    found: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in itertools.takewhile(str.strip, file):  # the first core
                name, _, value = line.partition(":")
                found[name.strip()] = value.strip()
    except OSError:
        pass  # not Linux
    model = found.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in found and "model" in found:
        model += f" (family {found['cpu family']}, model {found['model']})"
    return model, set(found.get("flags", found.get("Features", "")).split())


def _caches() -> list[str]:
    """Return the caches of the first core, where Linux tells: "32K of L1"."""
    found = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            kind, level, size = (
                (index / name).read_text(encoding="ascii").strip()
                for name in ("type", "level", "size")
            )
        except OSError:
            continue
        if kind != "Instruction":
            found.append(f"{size} of L{level}")
    return found


def _memory() -> int | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (AttributeError, OSError, ValueError):
        return None


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    import portable_attention

    # What is imported, which an older installed version may not be.
    return found | {"portable-attention": portable_attention.__version__}


def _blas() -> list[dict[str, Any]]:
    import numpy  # noqa: F401  its BLAS is to be loaded
    from threadpoolctl import threadpool_info

    return [
        {
            "name": one["internal_api"],
            "version": one["version"],
            "kernel": one.get("architecture"),
            "threads": one["num_threads"],
        }
        for one in threadpool_info()
        if one["user_api"] == "blas" and "numpy" in one["filepath"]
    ]


def _threads() -> dict[str, int]:
    found = {"NumPy's BLAS": max((one["threads"] for one in _blas()), default=1)}
    if "torch" in sys.modules:
        found["torch"] = sys.modules["torch"].get_num_threads()
    return found | {"others": cores()}
