"""Whatever an implementation does, it gets a verdict."""

from __future__ import annotations

import multiprocessing
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest

from portable_attention import attention, attention_vjp
from portable_attention.conformance import ImplementationError, conform, discover

from .zoo import manners

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX system")
HERE = "tests.conformance.zoo.manners"


def held(function, **options):
    options = {"time_limit": 2.0, **options}
    return conform(function, cases=["plain", "shapes"], **options)


@posix
@pytest.mark.parametrize("isolate", [None, False])
def test_a_call_that_does_not_return(isolate):
    start = time.perf_counter()
    report = held(manners.never_returns, isolate=isolate, time_limit=0.5)
    assert not report.ok
    assert "did not return within 1.5 s" in report.findings[0].message, "the first may take longer"
    assert "did not return within 0.5 s" in report.findings[1].message
    assert len(report.findings) == 3, "and the rest is left"
    assert report.count("not run") > 3
    assert time.perf_counter() - start < 30


@posix
def test_discovery_of_what_does_not_return():
    start = time.perf_counter()
    found = discover(manners.never_returns, time_limit=0.5)
    assert not found.capabilities
    assert "hung or crashed" in str(found)
    assert time.perf_counter() - start < 30


@posix
def test_a_call_that_does_not_return_and_runs_no_python_code():
    report = held(manners.never_returns_from_c, time_limit=0.5)
    assert "did not return" in report.findings[0].message


@posix
@pytest.mark.parametrize(
    ("function", "says"),
    [(manners.ends_the_interpreter, "exit status 3"), (manners.aborts, "SIGABRT")],
    ids=["exit", "abort"],
)
def test_a_call_that_ends_the_interpreter(function, says):
    report = held(function)
    assert not report.ok
    assert says in report.findings[0].message


@pytest.mark.parametrize("isolate", [None, False])
def test_a_call_that_exits(isolate):
    report = held(manners.exits, isolate=isolate)
    assert "SystemExit: no attention today" in report.findings[0].message


@posix
@pytest.mark.parametrize("function", [manners.prints_megabytes, manners.closes_stdout])
def test_what_is_written_goes_nowhere(function, capfd):
    report = held(function)
    assert report.ok, str(report)
    assert capfd.readouterr() == ("", "")


@posix
def test_arrays_of_another_library():
    pytest.importorskip("torch", reason="needs torch")
    report = held(manners.of_another_library, time_limit=60.0)
    assert report.rule == "arrays"
    assert "torch.Tensor" in report.findings[0].message


def returns(result):
    def function(query, key, value, *, return_lse=False, **options):
        return result(query, key, value)

    return function


@pytest.mark.parametrize(
    ("result", "rule"),
    [
        (lambda q, k, v: None, "the-call"),
        (lambda q, k, v: 3, "the-call"),
        (lambda q, k, v: (None, None), "arrays"),
        (lambda q, k, v: (q[..., :1, :1, 0], q[..., 0]), "shapes"),
        (lambda q, k, v: (q.astype(object), q[..., 0]), "output-dtype"),
        (lambda q, k, v: (np.ma.masked_array(v), q[..., 0]), "arrays"),
        (lambda q, k, v: (q, q[..., 0]), "purity"),
        (lambda q, k, v: (q.astype(complex), q[..., 0]), "output-dtype"),
        (lambda q, k, v: (np.array(["a"]), q[..., 0]), "output-dtype"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*complex.*")
def test_results_of_the_wrong_kind(result, rule):
    report = held(returns(result), isolate=False)
    assert not report.ok
    assert rule in report.rules or report.rule == "order"


def test_a_buffer_that_is_returned_again_is_not_new():
    buffers = {}

    def function(query, key, value, *, return_lse=False, **options):
        output = attention(query, key, value, **options)
        buffer = buffers.setdefault(output.shape, output)
        buffer[...] = output
        return buffer

    report = conform(function, cases=["same/bits"], without=["lse"], isolate=False)
    assert "purity" in report.rules
    assert "the call before" in report.findings[0].message


@posix
def test_functions_that_cannot_be_imported_are_forked():
    def closure(query, key, value, **options):
        return attention(query, key, value, **options)

    report = held(closure)
    assert report.ok, str(report)
    assert report.isolated
    assert not multiprocessing.active_children(), "the process is ended"


@posix
def test_functions_of_a_module_that_only_this_process_has_are_forked(monkeypatch):
    module = ModuleType("only_here")
    module.__spec__ = ModuleSpec("only_here", None)
    exec("def function(query, key, value, **options): raise KeyError('here')", vars(module))
    monkeypatch.setitem(sys.modules, "only_here", module)
    report = held(module.function)
    assert report.isolated
    assert "KeyError: 'here'" in report.findings[0].message


@posix
def test_functions_are_taken_by_name():
    report = held(f"{HERE}:prints_megabytes")
    assert report.ok, str(report)
    assert report.implementation == f"{HERE}:prints_megabytes"


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module:attention", "No module named"),
        (f"{HERE}:no_such_function", "no_such_function"),
        (f"{HERE}:ZOO", "is a dict, not a function"),
        ("attention", "names no function"),
        ("no_such_file.py:attention", "there is no file"),
    ],
)
@posix
def test_what_cannot_be_imported_is_told(name, says, isolate):
    with pytest.raises(ImplementationError, match=says):
        conform(name, isolate=isolate)


@posix
def test_an_import_that_ends_the_interpreter(tmp_path):
    file = tmp_path / "leaves.py"
    file.write_text("import os\nos._exit(4)\n")
    with pytest.raises(ImplementationError, match="exit status 4"):
        conform(f"{file}:attention")


def test_a_device_that_is_not_there():
    with pytest.raises(ImplementationError, match="CPU"):
        conform(attention, device="cuda:7", isolate=False)


def test_unknown_names_are_told():
    with pytest.raises(ValueError, match="no capability 'flash'"):
        conform(attention, capabilities=["flash"], isolate=False)
    with pytest.raises(ValueError, match="no cases"):
        conform(attention, cases=["nothing"], isolate=False)
    with pytest.raises(ValueError, match="empty_rows must be one of"):
        conform(attention, conventions={"empty_rows": "one"}, isolate=False)


@pytest.mark.parametrize(
    ("pulled", "says"),
    [
        (lambda g: (g.query, g.key), "shorter"),
        (lambda g: {"query": g.query, "key": g.key}, "KeyError"),
        (lambda g: (g.query, g.key, None), "NoneType"),
        (lambda g: None, "TypeError"),
        (lambda g: (g.query, g.key, g.value.astype(np.float64)), "dtype float64"),
    ],
)
def test_gradients_of_the_wrong_kind(pulled, says):
    def vjp(query, key, value, **options):
        output, pullback = attention_vjp(query, key, value, **options)
        return output, lambda *upstream: pulled(pullback(*upstream))

    report = conform(attention, vjp=vjp, cases=["gradient/plain"], isolate=False)
    assert says in report.findings[0].message


@pytest.mark.parametrize("pulled", [tuple, lambda g: g._asdict(), lambda g: list(g)[:3]])
def test_gradients_may_come_in_order_or_by_name(pulled):
    def vjp(query, key, value, **options):
        output, pullback = attention_vjp(query, key, value, **options)
        return output, lambda *upstream: pulled(pullback(*upstream))

    report = conform(attention, vjp=vjp, cases=["gradient/plain"], isolate=False)
    assert report.ok, str(report)
