"""Memory grows with the length, not with its square, for every option on every backend.

Each backend is measured by what it reports truly: NumPy and array-api-strict by tracemalloc,
PyTorch by the resident memory of the process, JAX by the buffers that XLA plans, and GPUs by
their allocators.
"""

import importlib.util
import sys
from dataclasses import dataclass, field

import pytest
from fresh_process import answer
from memory_probe import CALLS

MIB = 2**20
TOGETHER = 6  # calls measured in one process

# Two threads wherever it runs: each thread has tiles of its own.
THREADS = {
    "OPENBLAS_NUM_THREADS": "2",
    "OMP_NUM_THREADS": "2",
    "MKL_NUM_THREADS": "2",
    # Give freed memory back at once, so that resident memory shows what is in use.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}
CPU = {**THREADS, "JAX_PLATFORMS": "cpu"}

# On NumPy every option is measured; elsewhere those that another schedule, a copy or a library
# may treat otherwise. PyTorch has no negative strides, JAX none at all, array-api-strict no halves.
SOME = [
    *("bare", "causal", "window", "offset", "full mask", "bias over keys", "key lengths"),
    *("query lengths", "softcap", "sinks", "dropout", "grouped heads", "batch", "layout"),
    *("block size", "partial", "all together"),
]
FEW = ["bare", "causal", "full mask", "all together"]


@dataclass(frozen=True)
class Measured:
    """What is measured, at which lengths (the second twice the first), and what may be used.

    The limit lies far under the scores of one head at the greater length, in float32 and even as
    booleans; tiles are larger on a GPU, so lengths and limit are, too. The slack is for memory that
    is not the call's: interned objects, and where resident memory is measured whole pages.
    """

    calls: list[str]
    lengths: tuple[int, int] = (8192, 16384)
    limit: int = 64 * MIB  # the booleans of one head are 256
    slack: int = MIB // 4
    env: dict[str, str] = field(default_factory=lambda: CPU)


RESIDENT = {"slack": 4 * MIB}
ON_GPU = {"lengths": (32768, 65536), "limit": 1024 * MIB, "slack": MIB, "env": THREADS}

LIBRARIES = {
    "numpy": Measured(list(CALLS)),
    "torch": Measured([*SOME, "float16", "bfloat16", "broadcast"], **RESIDENT),
    "torch with gradients": Measured(["bare", "grouped heads", "all together"], **RESIDENT),
    "array_api_strict": Measured([*SOME, "broadcast"], (4096, 8192), 32 * MIB),
    "jax": Measured([*SOME, "float16", "bfloat16", "float64"]),
    "jax eager": Measured(FEW, **RESIDENT),
    "torch cuda": Measured(FEW, **ON_GPU),
    "jax gpu": Measured(FEW, **ON_GPU),
    "cupy": Measured(FEW, **ON_GPU),
}


def groups():
    """Yield a few calls of a library at a time: importing it anew for each would cost minutes."""
    for library, row in LIBRARIES.items():
        for first in range(0, len(row.calls), TOGETHER):
            names = row.calls[first : first + TOGETHER]
            yield pytest.param(library, names, id=f"{library}: {', '.join(names)}")


@pytest.mark.parametrize(("library", "names"), list(groups()))
def test_memory_is_linear(library, names):
    row = LIBRARIES[library]
    package = library.split()[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package} installed")
    if row.slack == RESIDENT["slack"] and sys.platform != "linux":
        pytest.skip("needs Linux, whose /proc tells the peak of the resident memory")
    found = answer("memory_probe.peaks", library, names, row.lengths, timeout=500, env=row.env)
    if found is None:
        pytest.skip(f"needs a GPU that {package} can use")
    assert list(found) == names
    too_much = {
        name: (first, second)
        for name, (first, second) in found.items()
        if second > row.limit or second > 2 * max(first, 0) + row.slack
    }
    assert too_much == {}, f"bytes at L = {row.lengths}; at most {row.limit}, and twice as much"


def test_a_million_tokens_with_a_window():
    """Seconds and tens of megabytes; without skipping it would take half an hour."""
    result = answer("memory_probe.million", timeout=120)
    assert result["error"] < 2e-6
    assert result["peak"] < 64 * 2**20


def test_calls_leave_nothing_behind():
    assert answer("memory_probe.retained", 100, timeout=120) < 2**16
