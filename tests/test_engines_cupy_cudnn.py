"""cuDNN on CuPy arrays: what it is offered, and what is made of what it gives.

NumPy arrays pass for CuPy's, and a stand-in for the package nvidia-cudnn-frontend runs its graphs
by the plain formula. tests/test_engines_gpu.py has the real ones.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import array_api_compat.numpy
import numpy as np
import pytest

from portable_attention.backends import cupy_cudnn
from portable_attention.backends.cupy_backend import CupyBackend
from portable_attention.core import engines
from portable_attention.core.spec import validate

from .accuracy import assert_accurate, reference_of
from .fused_kernels import OPTIONS, REFUSED, SIZES, formula
from .problems import make_inputs

HALF = {**SIZES, "dtype": "float16"}
SCALE = 0.25  # that of 16 numbers


class Tensor:
    """A tensor of a graph."""

    def __init__(self, **known):
        self.known = known

    def __getattr__(self, name):
        def setter(value):
            self.known[name.removeprefix("set_")] = value
            return self

        return setter


class Graph:
    """A graph of one operation, which has to be built as the documentation says."""

    steps = ("validate", "build_operation_graph", "create_execution_plans", "check_support")

    def __init__(self, frontend, **options):
        self.frontend, self.options, self.done = frontend, options, []
        frontend.graphs.append(self)

    def __getattr__(self, name):
        if name not in (*self.steps, "build_plans"):
            raise AttributeError(name)
        return lambda *_: self.done.append(name)

    def tensor(self, **known):
        return Tensor(**known)

    def sdpa(self, q, k, v, **options):
        self.operands, self.asked = (q, k, v), options
        self.results = (Tensor(), Tensor())
        return self.results

    def get_workspace_size(self):
        if self.frontend.refusal:
            raise RuntimeError(self.frontend.refusal)
        assert self.done == [*self.steps, "build_plans"]
        return 1000

    def execute(self, given, workspace, handle):
        assert handle == "handle"
        assert Device.current is not None
        assert workspace.nbytes == 1000
        arrays = [given[tensor] for tensor in (*self.operands, *self.results)]
        for tensor, array in zip((*self.operands, *self.results), arrays, strict=True):
            strides = [stride // array.itemsize for stride in array.strides]
            assert tensor.known["dim"] == list(array.shape)
            assert tensor.known["stride"] == strides
            wide = {"float32": "FLOAT", "float16": "HALF"}[array.dtype.name]
            assert tensor.known["data_type"] == wide
        causal = self.asked.get("diagonal_band_right_bound") == 0
        assert causal == (self.asked.get("diagonal_alignment") == "TOP_LEFT")
        assert self.asked["generate_stats"] is True
        output, lse = formula(*arrays[:3], causal=causal, scale=self.asked["attn_scale"])
        arrays[3][...] = output
        arrays[4][..., 0] = lse
        self.frontend.ran.append(self)


@pytest.fixture
def frontend(monkeypatch):
    """Put a stand-in in the place of the package; return it."""
    made = SimpleNamespace(
        graphs=[],
        ran=[],
        streams=[],
        refusal=None,
        version=92000,
        data_type=SimpleNamespace(HALF="HALF", BFLOAT16="BFLOAT16", FLOAT="FLOAT"),
        diagonal_alignment=SimpleNamespace(TOP_LEFT="TOP_LEFT"),
        heur_mode=SimpleNamespace(A="A", FALLBACK="FALLBACK"),
        create_handle=lambda: Device.current and "handle",
    )
    made.backend_version = lambda: made.version
    made.set_stream = lambda handle, stream: made.streams.append((handle, stream))
    made.pygraph = lambda **options: Graph(made, **options)
    monkeypatch.setattr(cupy_cudnn, "is_installed", lambda: True)
    monkeypatch.setattr(cupy_cudnn, "frontend", lambda: made)
    monkeypatch.setattr(cupy_cudnn, "stream", lambda: 7)
    monkeypatch.setattr(cupy_cudnn, "address", Address)
    monkeypatch.setattr(CupyBackend, "read", lambda _self, array: np.asarray(array))
    kept = (cupy_cudnn._built, cupy_cudnn._handle)
    for cache in kept:
        cache.cache_clear()
    yield made
    for cache in kept:
        cache.cache_clear()


class Address(np.ndarray):
    """An address that still knows its array."""

    def __new__(cls, array):
        return array.view(cls)

    def __mod__(self, number):
        return self.ctypes.data % number


class Device:
    """As CuPy's: a context that is a number, and has no hash."""

    current = None
    __hash__ = None

    def __int__(self):
        return 3

    def __enter__(self):
        Device.current = self

    def __exit__(self, *_):
        Device.current = None


def call_of(inputs, engine="native", **options):
    """Return the call, as if the arrays were CuPy's."""
    call = validate(**inputs, engine=engine, **options)
    return replace(call, backend=CupyBackend(array_api_compat.numpy), device=Device())


def run(inputs, engine="native", **options):
    call = call_of(inputs, engine, **options)
    found = engines.run_native(call, engine)
    return None if found is None else call.restore(*found)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sizes", [{}, {"key_heads": 2, "batch": (2, 3)}, {"batch": ()}])
def test_halves_are_only_for_those_who_demand_a_kernel(frontend, options, sizes):
    inputs, options = make_inputs(**{**HALF, **sizes}), OPTIONS[options]
    assert run(inputs, "auto", **options) is None
    _, passed_over = engines.choose(call_of(inputs, "auto", **options), "auto")
    assert "rounds the weights to float16" in passed_over[cupy_cudnn.CudnnOfCupy.name]
    output, lse = run(inputs, **options)
    assert (output.dtype, lse.dtype) == (np.float16, np.float32)
    assert_accurate(output, lse, reference_of(**inputs, **options))
    (graph,) = frontend.graphs
    kinds = {name: graph.options[name] for name in ("io_data_type", "compute_data_type")}
    assert kinds == {"io_data_type": "HALF", "compute_data_type": "FLOAT"}
    assert frontend.streams == [("handle", 7)]


def test_who_does_not_demand_it_does_not_import_it(frontend, monkeypatch):
    """The package takes seconds to import."""

    def unwanted():
        raise AssertionError("imported")

    monkeypatch.setattr(cupy_cudnn, "frontend", unwanted)
    assert run(make_inputs(**HALF), "auto") is None
    assert run(make_inputs(**SIZES), "auto") is None
    assert run(make_inputs(**HALF), "portable") is None


def test_graphs_are_kept_by_what_they_were_built_for(frontend):
    inputs = make_inputs(**HALF)
    apart = {name: np.concatenate([array, array], axis=1)[:, ::2] for name, array in inputs.items()}
    for given, options in (
        (inputs, {}),
        (inputs, {"causal": True}),
        (inputs, {"scale": 0.5}),
        (apart, {}),
        (make_inputs(**{**HALF, "queries": 8}), {}),
    ):
        before = len(frontend.graphs)
        for _ in range(2):
            output, lse = run(given, **options)
            assert_accurate(output, lse, reference_of(**given, **options))
        assert len(frontend.graphs) == before + 1
    assert len(frontend.ran) == 10


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_garbage_is_refused(frontend, name, poison):
    inputs = make_inputs(**HALF)
    inputs[name][..., -1, 1] = poison
    with pytest.raises(ValueError, match="not finite"):
        run(inputs, causal=True)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_cannot_do_is_named(frontend, name):
    sizes, options = REFUSED[name]
    with pytest.raises(ValueError, match=name):
        run(make_inputs(**{**HALF, **sizes}), **options)
    assert frontend.graphs == []


@pytest.mark.parametrize(
    "what", ["float32", "one key", "9.15.1", "no plan", "packed", "cudnn-cuda"]
)
def test_what_cudnn_cannot_do_is_named(frontend, monkeypatch, what):
    sizes = {"float32": {"dtype": "float32"}, "one key": {"keys": 1}}.get(what, {})
    inputs = make_inputs(**{**HALF, **sizes})
    reason = {"float32": "bfloat16 alone", "packed": "side by side"}.get(what, what)
    if what == "9.15.1":
        frontend.version = 91002
    elif what == "no plan":
        frontend.refusal = "[cudnn_frontend] Error: No execution plans support the graph."
    elif what == "packed":
        inputs["key"] = np.asfortranarray(inputs["key"])
    elif what == "cudnn-cuda":
        monkeypatch.setattr(cupy_cudnn, "is_installed", lambda: False)
    with pytest.raises(ValueError, match=reason):
        run(inputs)
    assert frontend.ran == []


def test_the_package_takes_the_graph():
    """The real one says whether it is valid, as far as it can without a device."""
    pytest.importorskip("cudnn", reason="needs the package nvidia-cudnn-frontend")
    rows = ((1, 4, 192, 64), (4 * 192 * 64, 192 * 64, 64, 1))
    shared = ((1, 2, 192, 64), (2 * 192 * 64, 192 * 64, 64, 1))
    lse = ((1, 4, 192, 1), (4 * 192, 192, 1, 1))
    for dtype in ("float16", "bfloat16"):
        for causal in (False, True):
            layouts = (rows, shared, shared, rows, lse)
            graph, tensors = cupy_cudnn.describe(None, layouts, dtype, SCALE, causal)
            assert len({id(tensor) for tensor in tensors}) == 5
            assert hasattr(graph, "execute")
