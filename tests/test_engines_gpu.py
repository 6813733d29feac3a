"""The kernels of GPUs themselves. Without a GPU these tests are skipped, and say what they need."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from portable_attention import attention, explain
from portable_attention.core.spec import validate

from .accuracy import assert_accurate, reference_of
from .backends import BACKENDS
from .fused_kernels import GPUS, OPTIONS, SIZES
from .problems import make_inputs

LONG = {**SIZES, "queries": 256, "keys": 256, "width": 64, "value_width": 64}
NO_KERNEL = "no kernel of this device takes the call: "


def prepared(name, **sizes):
    backend = BACKENDS[name]
    inputs = make_inputs(**{**LONG, **sizes})
    return backend, inputs, {key: backend.asarray(array) for key, array in inputs.items()}


@contextlib.contextmanager
def skip_if_refused():
    """A device may be too old for a kernel: what it says is the reason of the skip."""
    try:
        yield
    except ValueError as error:
        if "engine='native'" not in str(error):
            raise
        pytest.skip(NO_KERNEL + str(error))


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("sizes", [{}, {"queries": 200, "keys": 200}, {"key_heads": 2}])
def test_each_kernel_is_right(name, dtype, options, sizes):
    """Half precision, too: to round the weights costs less than to round the output does."""
    if dtype not in BACKENDS[name].dtypes:
        pytest.skip(f"{name} has no {dtype}")
    backend, inputs, own = prepared(name, dtype=dtype, **sizes)
    options = OPTIONS[options]
    with backend.active():
        call = validate(**own, **options)
        found = [one for one in call.backend.kernels_on(call.device) if not one.refuses(call)]
        if not found:
            pytest.skip(NO_KERNEL + str(explain(**own, **options).passed_over))
        for kernel in found:
            if "allowed" in (worse := kernel.is_worse(call) or ""):
                pytest.skip(f"{kernel.name} is not taken here: {worse}")
            output, lse = call.restore(*kernel.run(call))
            assert backend.owns(output)
            output, lse = backend.to_numpy(output), backend.to_numpy(lse)
            assert_accurate(output, lse, reference_of(**inputs, **options))


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_auto_keeps_to_the_rules(name, dtype):
    """Whichever engine it takes, and it takes no kernel for half precision."""
    backend, inputs, own = prepared(name, dtype=dtype)
    with backend.active():
        output, lse = attention(**own, causal=True, return_lse=True)
        output, lse = backend.to_numpy(output), backend.to_numpy(lse)
        assert_accurate(output, lse, reference_of(**inputs, causal=True))
        if dtype == "float16":
            assert explain(**own, causal=True).engine == "portable"


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("poisoned", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_garbage_is_not_felt_where_it_is_masked(name, poison, poisoned, dtype):
    backend, inputs, own = prepared(name, dtype=dtype)
    inputs[poisoned][..., -1, 1] = poison
    own[poisoned] = backend.asarray(inputs[poisoned])
    with backend.active():
        output, lse = attention(**own, causal=True, return_lse=True)
        output, lse = backend.to_numpy(output), backend.to_numpy(lse)
    assert_accurate(output, lse, reference_of(**inputs, causal=True))


@pytest.mark.parametrize("name", GPUS)
def test_the_same_call_gives_the_same_bits(name):
    backend, _, own = prepared(name, dtype="float16")
    with backend.active(), skip_if_refused():
        first, second = (
            backend.to_numpy(attention(**own, causal=True, engine="native")) for _ in range(2)
        )
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("name", GPUS[1:2])
def test_jax_under_transforms(name):
    import jax

    backend, _, own = prepared(name, dtype="bfloat16")

    def total(query, engine):
        found = attention(query, own["key"], own["value"], causal=True, engine=engine)
        return found.astype("float32").sum()

    with backend.active(), skip_if_refused():
        attention(**own, engine="native")
        for transform in (jax.jit, jax.grad):
            native, portable = (
                np.asarray(
                    transform(lambda query, engine=engine: total(query, engine))(own["query"])
                )
                for engine in ("native", "portable")
            )
            np.testing.assert_allclose(
                native.astype(np.float32), portable.astype(np.float32), rtol=2e-2, atol=2e-2
            )
