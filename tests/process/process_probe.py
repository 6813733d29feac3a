"""Interrupts, forks and exits, carried out in the process that this runs in."""

import atexit
import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from contextlib import contextmanager
from typing import Any

from workloads import blas_threads, calls, digest, digests, long_call


def _say(message: str) -> None:
    print(message, flush=True)


def interrupted(library: str) -> dict[str, Any]:
    """Wait for Ctrl-C in a call of minutes; return when it came through and what it left."""
    expected = digests(library)
    before = blas_threads()
    call = long_call(library)
    _say("calling")
    try:
        call()
    except KeyboardInterrupt:
        caught = time.monotonic()
    else:
        raise AssertionError("the call ended before it was interrupted")
    busy = time.process_time()
    time.sleep(0.5)
    return {
        "caught": caught,
        "busy_afterwards": time.process_time() - busy,
        "blas_as_before": blas_threads() == before,
        "next_calls_right": digests(library) == expected,
    }


def interrupted_uncaught(library: str) -> None:
    call = long_call(library)
    _say("calling")
    call()


def interrupted_anywhere(trials: int, beside: int) -> dict[str, Any]:
    """Interrupt short calls at moments all over them, with `beside` threads in calls too."""
    call = calls()[0]
    expected = digest(call)
    before = blas_threads()
    started = time.perf_counter()
    call()
    duration = time.perf_counter() - started
    armed = False

    def interrupt(signum: int, frame: object) -> None:
        if armed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    caught = wrong = throttled = 0
    rng = random.Random(0)
    with _busy_threads(beside) as others:
        for _ in range(trials):
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1.5 * duration))
                call()
                signal.setitimer(signal.ITIMER_REAL, 0)
                armed = False
            except KeyboardInterrupt:
                armed = False
                caught += 1
            if not beside:
                throttled += blas_threads() != before
            wrong += digest(call) != expected
    return {
        "caught": caught,
        "wrong": wrong,
        "throttled": throttled + (blas_threads() != before),
        "others_failed": others,
    }


@contextmanager
def _busy_threads(count: int) -> Any:
    """Keep `count` threads in calls; yield a list of what went wrong in them."""
    call = calls()[1]
    expected = digest(call)
    failures: list[str] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                if digest(call) != expected:
                    failures.append("other bits")
            except BaseException:
                failures.append(traceback.format_exc())
                return

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield failures
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def forked(children: int, beside: int) -> list[str]:
    """Fork, with `beside` threads inside calls, and call in the child; return what went wrong."""
    expected = digests()
    before = blas_threads()
    problems = []
    with _busy_threads(beside) as others:
        for child in range(children):
            time.sleep(0.003 * child)  # at another moment of the other threads' calls
            pid = os.fork()
            if pid == 0:
                _child(expected, before)
            problem = _outcome(pid)
            if problem:
                problems.append(problem)
    return problems + others


def _child(expected: list[str], before: dict[str, int]) -> None:
    status = 1
    try:
        faulthandler.dump_traceback_later(25)  # tells where a child hangs
        right = digests() == expected
        status = 0 if right and blas_threads() == before else 2 if right else 3
    finally:
        os._exit(status)


def _outcome(pid: int) -> str:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return {0: "", 2: "BLAS threads changed", 3: "other bits"}.get(code, f"status {code}")
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"


def forked_to_the_end() -> None:
    """Fork, call in both, and let both end as an interpreter does."""
    expected = digests()
    pid = os.fork()
    assert digests() == expected
    if pid:
        _, status = os.waitpid(pid, 0)
        assert status == 0


def _check_at(moment: str, expected: list[str]) -> None:
    try:
        right = digests() == expected
    except BaseException:
        right = False
        traceback.print_exc()
    _say(json.dumps({"moment": moment, "right": right}))


def exits(moment: str) -> None:
    """Let the interpreter end at a moment when calls are being made, or still to be made."""
    expected = digests()
    if moment == "idle":
        _check_at(moment, expected)
    elif moment == "daemon thread in a long call":
        threading.Thread(target=long_call(), daemon=True).start()
        time.sleep(0.5)
        _check_at(moment, expected)
    elif moment == "thread outlives the main thread":
        main = threading.main_thread()

        def later() -> None:
            while main.is_alive():  # a call from when the interpreter is on its way out
                time.sleep(0.01)
            time.sleep(0.2)
            _check_at(moment, expected)

        threading.Thread(target=later).start()
    elif moment == "atexit":
        atexit.register(_check_at, moment, expected)
    elif moment == "sys.exit":
        _check_at(moment, expected)
        sys.exit(0)
    else:
        raise ValueError(moment)
