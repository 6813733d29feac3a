"""Ctrl-C, os.fork and the end of the interpreter: right results, no hang, BLAS as before."""

import importlib.util
import json
import os
import signal
import subprocess
import time

import pytest
from fresh_process import HERE, answer, command, environment

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals and os.fork")

# Promptly: a tile is done in milliseconds. The rest is room for a busy machine; the calls that
# are interrupted would take minutes.
PROMPT = 2.0


@pytest.fixture
def start():
    """Start a child that says when it is in its call; whatever happens, it is gone at the end."""
    children = []

    def start(function, *arguments, env=None):
        child = subprocess.Popen(
            command(function, *arguments),
            cwd=HERE,
            env=environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert child.stdout.readline() == "calling\n", child.stderr.read()
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def need(library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library} installed")


@pytest.mark.parametrize("delay", [0.01, 0.3, 1.5])
@pytest.mark.parametrize("library", ["numpy", "torch", "array_api_strict"])
def test_ctrl_c_ends_a_long_call_and_leaves_nothing(start, library, delay):
    """JAX is not here: a program that XLA runs cannot be interrupted, by anybody."""
    need(library)
    child = start("process_probe.interrupted", library)
    time.sleep(delay)
    sent = time.monotonic()
    child.send_signal(signal.SIGINT)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    result = json.loads(output.splitlines()[-1])
    assert result["caught"] - sent < PROMPT
    assert result["busy_afterwards"] < 0.25, "threads go on working for nobody"
    assert result["blas_as_before"]
    assert result["next_calls_right"]


@pytest.mark.parametrize("threads", ["1", "2"])
def test_ctrl_c_that_nobody_catches_ends_the_process(start, threads):
    child = start(
        "process_probe.interrupted_uncaught", "numpy", env={"OPENBLAS_NUM_THREADS": threads}
    )
    time.sleep(0.5)
    sent = time.monotonic()
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert time.monotonic() - sent < PROMPT
    assert child.returncode == -signal.SIGINT, errors
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert "ignored" not in errors, errors


def test_ctrl_c_pressed_again_and_again(start):
    child = start("process_probe.interrupted_uncaught", "numpy")
    time.sleep(0.3)
    for _ in range(20):
        child.send_signal(signal.SIGINT)
        time.sleep(0.002)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == -signal.SIGINT, errors


@pytest.mark.parametrize("beside", [0, 3])
def test_interrupts_at_any_moment_leave_the_next_call_right(beside):
    result = answer("process_probe.interrupted_anywhere", 150, beside, timeout=200)
    assert result["caught"] > 30
    assert result["wrong"] == 0
    assert result["throttled"] == 0
    assert result["others_failed"] == []


# From Python 3.12 on, a fork with threads warns that it may deadlock: that is what is tested.
FORK = {"PYTHONWARNINGS": "ignore::DeprecationWarning"}


@pytest.mark.parametrize("beside", [0, 1, 4])
def test_calls_in_a_forked_child(beside):
    """Also forked while other threads are inside calls."""
    assert answer("process_probe.forked", 12, beside, timeout=400, env=FORK) == []


def test_a_forked_child_ends_as_any_process():
    answer("process_probe.forked_to_the_end", timeout=60, env=FORK)


@pytest.mark.parametrize(
    "moment",
    [
        "idle",
        "daemon thread in a long call",
        "thread outlives the main thread",
        "atexit",
        "sys.exit",
    ],
)
def test_the_interpreter_ends(moment):
    """Calls made while it ends are right too."""
    result = subprocess.run(
        command("process_probe.exits", moment),
        cwd=HERE,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    answers = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert answers == [{"moment": moment, "right": True}], result.stderr
    assert result.stderr == ""
