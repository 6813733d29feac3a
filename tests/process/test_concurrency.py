"""Calls from many threads at once, under whatever the caller has set: the same bits."""

import asyncio
import importlib.util
import os
import signal
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fresh_process import answer
from threadpoolctl import threadpool_limits
from workloads import blas_threads, calls, digest

from portable_attention import attention
from portable_attention.core import threads

THREADS = 32
LIBRARIES = ["numpy", "array_api_strict", "torch", "jax"]


def need(library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library} installed")


def process_state():
    """Return what a call might set for the whole process and forget to set back."""
    return {
        "blas": blas_threads(),
        "warnings": list(warnings.filters),
        "numpy errors": np.geterr(),
        "numpy error call": np.geterrcall(),
        "numpy buffer": np.getbufsize(),
        "numpy print": np.get_printoptions(),
        "numpy random": np.random.get_state()[1].tobytes(),
        "interrupt": signal.getsignal(signal.SIGINT),
        "switch interval": sys.getswitchinterval(),
        "recursion": sys.getrecursionlimit(),
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "excepthooks": (sys.excepthook, threading.excepthook),
    }


def at_once(works):
    """Run every function in a thread of its own, all released at one moment."""
    barrier = threading.Barrier(len(works))

    def run(work):
        barrier.wait(timeout=60)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(run, works, timeout=300))


@pytest.mark.parametrize("library", LIBRARIES)
def test_many_threads_at_once_get_the_serial_bits(library):
    need(library)
    prepared = calls(library)
    expected = [digest(call) for call in prepared]
    before = process_state()
    rounds = [[(number + shift) % len(prepared) for shift in range(3)] for number in range(THREADS)]
    found = at_once([lambda ks=ks: [digest(prepared[k]) for k in ks] for ks in rounds])
    assert found == [[expected[k] for k in ks] for ks in rounds]
    assert process_state() == before


def test_threads_with_arrays_of_several_libraries_at_once():
    for library in LIBRARIES:
        need(library)
    prepared = [call for library in LIBRARIES for call in calls(library)[:2]]
    expected = [digest(call) for call in prepared]
    before = process_state()
    found = at_once([lambda call=call: digest(call) for call in prepared * 4])
    assert found == expected * 4
    assert process_state() == before


def test_no_threads_pile_up():
    prepared = calls()[0]
    at_once([prepared] * THREADS)
    before = threading.active_count()
    for _ in range(3):
        at_once([prepared] * THREADS)
    assert threading.active_count() <= before


def run_in_helpers(count=4):
    """Return what the helper threads of one run may run on, and whether all tasks were run."""
    met = threading.Barrier(2)  # no thread takes two tasks: each waits for another
    found = []

    def task():
        met.wait(timeout=60)
        found.append((threading.current_thread().name, os.sched_getaffinity(0)))

    threads.run_tasks(iter([task] * count), 2)
    return [cores for name, cores in found if name == "portable-attention"], len(found) == count


needs_two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or threads.usable_threads() < 2,
    reason="needs two cores and BLAS threads, and an affinity that can be set",
)


@needs_two_cores
def test_helper_threads_may_run_wherever_the_process_may():
    allowed = os.sched_getaffinity(0)
    helped, complete = run_in_helpers()
    assert complete
    assert helped == [allowed] * 2
    assert os.sched_getaffinity(0) == allowed


@needs_two_cores
def test_helper_threads_leave_the_core_of_the_caller(monkeypatch):
    allowed = os.sched_getaffinity(0)
    set_to = []
    monkeypatch.setattr(threads, "_current_core", lambda: min(allowed))
    monkeypatch.setattr(os, "sched_setaffinity", lambda who, cores: set_to.append((who, cores)))
    assert run_in_helpers()[1]
    assert set_to == [(0, allowed - {min(allowed)}), (0, allowed)]


@needs_two_cores
@pytest.mark.parametrize("name", ["sched_getaffinity", "sched_setaffinity"])
def test_where_the_affinity_is_forbidden_threads_stay_where_they_are(monkeypatch, name):
    real = getattr(os, name)

    def forbidden(*args):
        if threading.current_thread().name == "portable-attention" and not done:
            done.append(args)
            raise PermissionError("forbidden")
        return real(*args)

    done = []
    monkeypatch.setattr(os, name, forbidden)
    assert run_in_helpers()[1]
    assert len(done) == 1


@needs_two_cores
def test_where_the_core_is_not_known_threads_stay_where_they_are(monkeypatch):
    monkeypatch.setattr(threads, "_getcpu", lambda: None)
    monkeypatch.setattr(os, "sched_setaffinity", lambda who, cores: pytest.fail("moved"))
    assert run_in_helpers()[1]


def test_a_call_inside_the_callers_own_threads():
    prepared = calls()
    expected = [digest(call) for call in prepared]

    async def gather():
        return await asyncio.gather(*(asyncio.to_thread(digest, call) for call in prepared))

    assert asyncio.run(gather()) == expected
    with ThreadPoolExecutor(2) as outer:

        def nested(call):  # a pool of threads inside a thread of a pool
            with ThreadPoolExecutor(2) as inner:
                return inner.submit(digest, call).result(timeout=60)

        assert list(outer.map(nested, prepared, timeout=120)) == expected


def test_an_error_in_one_thread_is_felt_in_no_other():
    prepared = calls()[0]
    expected = digest(prepared)
    before = process_state()
    ones = np.ones((2, 4, 8), dtype=np.float32)

    def fail():
        with pytest.raises(ValueError, match="heads"):
            attention(ones, ones[:0], ones[:0])
        with pytest.raises(TypeError):
            attention(ones, ones, ones, mask=np.ones((4, 4)))
        return expected

    assert at_once([lambda: digest(prepared), fail] * 8) == [expected] * 16
    assert process_state() == before


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_the_callers_limit_on_blas_threads_is_kept(limit):
    prepared = calls()
    expected = [digest(call) for call in prepared]
    before = blas_threads()
    with threadpool_limits(limit, user_api="blas"):
        limited = blas_threads()
        assert [digest(call) for call in prepared] == expected
        assert blas_threads() == limited
        at_once([lambda call=call: digest(call) for call in prepared])
        assert blas_threads() == limited
    assert blas_threads() == before


@pytest.mark.parametrize("library", ["numpy", "array_api_strict", "torch"])
def test_the_number_of_threads_is_not_felt_in_the_bits(library):
    need(library)
    found = [
        answer(
            "workloads.digests",
            library,
            timeout=120,
            env={"OPENBLAS_NUM_THREADS": count, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count},
        )
        for count in ("1", "2", "3", "8")
    ]
    assert all(digests == found[0] for digests in found)


def extreme_calls():
    """Calls whose arithmetic overflows, underflows, divides by zero or meets NaN on its way."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 2, 300, 16))
    masked = np.ones((300, 300), dtype=bool)
    masked[7] = False
    minus_infinity = np.where(masked, 0.0, -np.inf)
    infinite = key.copy()
    infinite[:, 3] = np.inf
    not_a_number = value.copy()
    not_a_number[:, 5, 2] = np.nan
    for dtype in ("float16", "float32", "float64"):
        huge = 250.0 if dtype == "float16" else float(np.finfo(dtype).max) ** 0.5
        tiny = float(np.finfo(dtype).smallest_subnormal) * 4
        for name, (inputs, options) in {
            "plain": ((query, key, value), {}),
            "overflow": ((query * huge, key * huge, value), {}),
            "overflow with softcap": ((query * huge, key * huge, value), {"softcap": 3.0}),
            "underflow": ((query * 60, key * 60, value), {}),
            "subnormal": ((query * tiny, key * tiny, value * tiny), {}),
            "masked": ((query, key, value), {"mask": masked}),
            "bias": ((query, key, value), {"bias": minus_infinity.astype(dtype)}),
            "empty": ((query, key, value), {"key_lengths": 0}),
            "infinity": ((query, infinite, value), {"causal": True}),
            "NaN": ((query, key, not_a_number), {"window": (20, 20)}),
            "NaN masked": ((query, key, not_a_number), {"mask": np.arange(300) != 5}),
        }.items():
            arrays = [array.astype(dtype) for array in inputs]
            yield pytest.param(arrays, options, id=f"{name} {dtype}")


@pytest.mark.parametrize(("arrays", "options"), list(extreme_calls()))
def test_the_callers_error_state_changes_nothing(arrays, options):
    """Neither numpy.seterr nor a filter that makes warnings errors (both are on in here)."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = attention(*arrays, return_lse=True, **options)
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        before = process_state()
        found = attention(*arrays, return_lse=True, **options)
        assert process_state() == before
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
