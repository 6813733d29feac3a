"""cuDNN by way of JAX: what it is offered, and what is made of what it gives.

A stand-in hands over what the real one would. tests/test_engines_gpu.py has the real one.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from portable_attention import attention, explain

from .accuracy import assert_accurate, reference_of
from .fused_kernels import OPTIONS, REFUSED, SIZES, formula
from .problems import make_inputs

jax = pytest.importorskip("jax", reason="needs jax")
HALF = {**SIZES, "dtype": "bfloat16", "queries": 20, "keys": 20}


@pytest.fixture
def on_cuda(monkeypatch):
    """Let arrays in host memory pass for ones on CUDA; return what was run, and traced."""
    from portable_attention.backends import jax_cudnn

    ran, traced = [], []

    def run(causal, scale, *arrays):
        ran.append(causal)
        return formula(*map(np.asarray, arrays), causal=causal, scale=float(scale))

    def kernel(query, key, value, *, scale, causal):
        traced.append(causal)
        kinds = (
            jax.ShapeDtypeStruct(query.shape, query.dtype),
            jax.ShapeDtypeStruct(query.shape[:-1], np.float32),
        )
        # `vmap` hands over one item after the other, as the real one flattens them.
        return jax.pure_callback(
            partial(run, causal, scale), kinds, query, key, value, vmap_method="sequential"
        )

    monkeypatch.setattr(jax_cudnn, "kernel", kernel)
    monkeypatch.setattr(jax_cudnn, "is_on_cuda", lambda _device: True)
    monkeypatch.setattr(jax_cudnn, "cudnn_version", lambda: 92000)
    forget(jax_cudnn)
    yield SimpleNamespace(module=jax_cudnn, ran=ran, traced=traced, monkeypatch=monkeypatch)
    forget(jax_cudnn)


def forget(module):
    module._attend.clear_cache()
    module._says_no.cache_clear()


def arrays_of(**sizes):
    inputs = make_inputs(**{**HALF, **sizes})
    return inputs, {name: jax.numpy.asarray(array) for name, array in inputs.items()}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sizes", [{"dtype": "float16"}, {"key_heads": 2, "batch": (2, 3)}])
def test_halves_are_only_for_those_who_demand_a_kernel(on_cuda, options, sizes):
    inputs, own = arrays_of(**sizes)
    options = OPTIONS[options]
    reasons = explain(**own, **options).passed_over
    assert "rounds the weights" in reasons["jax.nn.dot_product_attention (cuDNN)"]
    assert explain(**own, **options, engine="native").engine.endswith("(cuDNN)")
    for compiled in (False, True):
        call = partial(attention, **options, return_lse=True, engine="native")
        output, lse = (jax.jit(call) if compiled else call)(**own)
        assert output.dtype == own["query"].dtype
        assert lse.dtype == np.float32
        assert_accurate(np.asarray(output), np.asarray(lse), reference_of(**inputs, **options))
    assert len(on_cuda.ran) == 2
    on_cuda.ran.clear()
    attention(**own, **options)
    assert on_cuda.ran == []


@pytest.mark.parametrize("compiled", [False, True])
def test_garbage_is_left_to_the_portable_tiles_under_a_trace_too(on_cuda, compiled):
    call = partial(attention, causal=True, return_lse=True, engine="native")
    call = jax.jit(call) if compiled else call
    for name in ("query", "key", "value"):
        for poison in (np.nan, np.inf):
            inputs, _ = arrays_of()
            inputs[name][..., -1, 1] = poison
            output, lse = call(**{key: jax.numpy.asarray(array) for key, array in inputs.items()})
            reference = reference_of(**inputs, causal=True)
            assert_accurate(np.asarray(output), np.asarray(lse), reference)


def test_derivatives_are_those_of_the_portable_tiles(on_cuda):
    """To any order and in both modes, whatever the kernel has of its own."""
    _, own = arrays_of(queries=8, keys=8, width=8, value_width=8)
    key, value = own["key"], own["value"]

    def of(engine):
        def total(query):
            found = attention(query, key, value, causal=True, engine=engine)
            return found.astype("float32").sum()

        return total

    query = own["query"]
    for transform in (jax.grad, jax.jacfwd):
        native, portable = (transform(of(engine))(query) for engine in ("native", "portable"))
        assert np.array_equal(np.asarray(native), np.asarray(portable))
    direction = jax.numpy.ones_like(query)
    native, portable = (
        jax.jvp(jax.grad(of(engine)), (query,), (direction,))[1]
        for engine in ("native", "portable")
    )
    assert np.array_equal(np.asarray(native), np.asarray(portable))
    assert on_cuda.ran == []


def test_under_vmap(on_cuda):
    inputs, own = arrays_of()
    call = partial(attention, causal=True, return_lse=True, engine="native")
    output, lse = jax.vmap(call)(*own.values())
    reference = reference_of(**inputs, causal=True)
    assert_accurate(np.asarray(output), np.asarray(lse), reference)
    assert on_cuda.ran


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_cannot_do_is_named(on_cuda, name):
    sizes, options = REFUSED[name]
    with jax.enable_x64(True):
        _, own = arrays_of(**sizes)
        with pytest.raises(ValueError, match=name):
            attention(**own, **options, engine="native")
    assert on_cuda.ran == []


@pytest.mark.parametrize("what", ["float32", "one key", "9.15.1", "head dim"])
def test_what_cudnn_cannot_do_is_named(on_cuda, what):
    def unable(*_, **__):
        raise NotImplementedError("The head dim must be <= 128")

    _, own = arrays_of(
        **{"float32": {"dtype": "float32"}, "one key": {"keys": 1}}.get(what, {}),
    )
    reason = "bfloat16 alone" if what == "float32" else what
    if what == "9.15.1":
        on_cuda.monkeypatch.setattr(on_cuda.module, "cudnn_version", lambda: 91002)
    if what == "head dim":
        on_cuda.monkeypatch.setattr(on_cuda.module, "kernel", unable)
    with pytest.raises(ValueError, match=reason):
        attention(**own, engine="native")
    attention(**own)
    assert on_cuda.ran == []


def test_arrays_in_host_memory_never_meet_it():
    if jax.default_backend() != "cpu":
        pytest.skip("needs JAX on a CPU")
    _, own = arrays_of()
    found = explain(**own).passed_over
    assert found["jax.nn.dot_product_attention (cuDNN)"] == "it runs on CUDA devices alone"
    assert "(Lq, Lk)" in found["jax.nn.dot_product_attention (XLA)"]
    with pytest.raises(ValueError, match="CUDA devices alone"):
        attention(**own, engine="native")


def test_the_function_of_jax_is_where_it_is_looked_for():
    """It is not public: `jax.nn.dot_product_attention` rounds the lse to half precision."""
    from portable_attention.backends import jax_cudnn

    shapes = tuple((1, 2, 128, 64) for _ in range(3))
    jax_cudnn._says_no.cache_clear()
    reason = jax_cudnn._says_no(shapes, "bfloat16", 0.125, True)
    jax_cudnn._says_no.cache_clear()
    # It is found, called with options it has, and asks for cuDNN before all else.
    assert reason is None or "cuDNN is not detected" in reason
    assert jax_cudnn.cudnn_version() >= 0


@pytest.fixture
def lowered(monkeypatch):
    """Return what a function is lowered to for CUDA; that needs no GPU, only to pass for one."""
    from jax import export
    from jax._src.cudnn import fused_attention_stablehlo as theirs

    from portable_attention.backends import jax_cudnn

    monkeypatch.setattr(theirs, "check_cudnn_version", lambda: 92000)
    monkeypatch.setattr(theirs, "check_compute_capability", lambda _wanted: True)
    monkeypatch.setattr(theirs, "is_cuda_compute_capability_equal", lambda _wanted: False)
    monkeypatch.setattr(jax_cudnn, "is_on_cuda", lambda _device: True)
    forget(jax_cudnn)
    unchecked = [export.DisabledSafetyCheck.custom_call("__cudnn$fmhaSoftmax")]

    def lower(function, *arrays):
        exported = export.export(jax.jit(function), platforms=["cuda"], disabled_checks=unchecked)(
            *arrays
        )
        return exported, exported.mlir_module()

    yield lower
    forget(jax_cudnn)


def test_what_is_compiled_for_cuda(lowered):
    query = jax.ShapeDtypeStruct((2, 4, 200, 64), "bfloat16")
    key = jax.ShapeDtypeStruct((2, 2, 200, 64), "bfloat16")
    call = partial(attention, causal=True, scale=0.5, return_lse=True, engine="native")
    exported, text = lowered(call, query, key, key)
    output, lse = exported.out_avals
    assert (output.shape, output.dtype.name) == ((2, 4, 200, 64), "bfloat16")
    assert (lse.shape, lse.dtype.name) == ((2, 4, 200), "float32")
    assert text.count("@__cudnn$fmhaSoftmax(") == 1
    for said in (r"mask_type\22: \22CAUSAL", r"fmha_scale\22: 0.5", "tensor<2x2x200x64xbf16>"):
        assert said in text
    assert "stablehlo.case" in text  # the portable tiles, for what is not finite


def test_a_derivative_compiled_for_cuda_is_that_of_the_portable_tiles(lowered):
    def total(*arrays):
        return attention(*arrays, engine="native").astype("float32").sum()

    query = jax.ShapeDtypeStruct((1, 2, 32, 64), "float16")
    _, text = lowered(jax.grad(total), query, query, query)
    assert "__cudnn" not in text
    _, text = lowered(jax.vmap(partial(attention, engine="native")), query, query, query)
    assert text.count("@__cudnn$fmhaSoftmax(") == 1
