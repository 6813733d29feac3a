"""Memory grows with the length, not with its square, for every option on every backend.

Each backend is measured by what it reports truly: NumPy and array-api-strict by tracemalloc,
PyTorch by the resident memory of the process, JAX by the buffers that XLA plans.
"""

import importlib.util
import sys

import pytest
from fresh_process import answer
from memory_probe import CALLS


def lengths_of(library):
    return [4096, 8192] if library == "array_api_strict" else [8192, 16384]


# A dense row of scores takes 32 KiB at L = 8192 and 64 KiB at 16384, a dense row of booleans
# a quarter of that. Tiles and linear parts together stay under half of the smallest of these.
BYTES_PER_ROW = 4096

# Memory that is not the call's (interned objects; for resident memory whole pages and stacks).
SLACK = {"numpy": 2**18, "array_api_strict": 2**18, "jax": 2**18}
RESIDENT_SLACK = 2**22

# Two threads wherever it runs: each thread has tiles of its own.
THREADS = {
    "OPENBLAS_NUM_THREADS": "2",
    "OMP_NUM_THREADS": "2",
    "MKL_NUM_THREADS": "2",
    # Give freed memory back at once, so that resident memory shows what is in use.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}

# PyTorch has no negative strides, JAX has none at all.
NOT_THERE = {"torch": {"reversed"}, "jax": {"reversed", "broadcast"}}

# These share their schedule with a library that is measured with every option, so here are the
# ones that are likely to be treated otherwise; array-api-strict is slow, and has no halves.
CHOSEN = {
    "jax eager": ["bare", "causal", "all together"],
    "torch with gradients": ["bare", "grouped heads", "all together"],
    "array_api_strict": [
        *("bare", "causal", "mask over keys", "full mask", "bias over keys", "key lengths"),
        *("softcap", "sinks", "dropout", "grouped heads", "layout", "broadcast", "all together"),
    ],
}


def calls_of(library):
    return CHOSEN.get(library, [name for name in CALLS if name not in NOT_THERE.get(library, ())])


LIBRARIES = ["numpy", "torch", "torch with gradients", "array_api_strict", "jax", "jax eager"]
PAIRS = [(library, name) for library in LIBRARIES for name in calls_of(library)]


@pytest.fixture(scope="module")
def peaks_of():
    """Measure all the calls of a library in one process, when the first of them is asked for."""
    measured = {}

    def peaks(library):
        package = library.split()[0]
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package} installed")
        if library not in SLACK and sys.platform != "linux":
            pytest.skip("needs Linux, whose /proc tells the peak of the resident memory")
        if library not in measured:
            names = calls_of(library)
            measured[library] = answer(
                "memory_probe.peaks", library, names, lengths_of(library), timeout=500, env=THREADS
            )
        return measured[library]

    return peaks


@pytest.mark.parametrize(("library", "name"), PAIRS)
def test_memory_is_linear(peaks_of, library, name):
    first, second = peaks_of(library)[name]
    length = lengths_of(library)[1]
    assert second <= BYTES_PER_ROW * length
    assert second <= 2 * max(first, 0) + SLACK.get(library, RESIDENT_SLACK)


def test_a_million_tokens_with_a_window():
    """Seconds and tens of megabytes; without skipping it would take half an hour."""
    result = answer("memory_probe.million", timeout=120)
    assert result["error"] < 2e-6
    assert result["peak"] < 64 * 2**20


def test_calls_leave_nothing_behind():
    assert answer("memory_probe.retained", 100, timeout=120) < 2**16
