"""The adapters to the originals: where they take a call, they agree with `attention`."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from portable_attention import Dropout, attention, dialects

from .formula import problem

RNG = np.random.default_rng(5)
MASK = RNG.random((2, 4, 5, 7)) > 0.3
MASK[..., 0] = True
BIAS = RNG.standard_normal((2, 4, 5, 7), dtype=np.float32)
LENGTHS = np.array([4, 7], np.int32)
SINKS = RNG.standard_normal(4).astype(np.float32)

CALLS: dict[str, dict[str, Any]] = {
    "bare": {},
    "scale": {"scale": 0.2},
    "mask": {"mask": MASK},
    "bias": {"bias": BIAS},
    "mask and bias": {"mask": MASK, "bias": BIAS},
    "causal from the start": {"causal": True, "query_offset": "start"},
    "causal from 0": {"causal": True, "query_offset": 0},
    "causal to the end": {"causal": True, "query_offset": "end"},
    "causal from 1": {"causal": True, "query_offset": 1},
    "mask and causal": {"mask": MASK, "causal": True, "query_offset": "start"},
    "window": {"window": (2, 1), "query_offset": "start"},
    "window to the end": {"window": (2, None), "query_offset": "end"},
    "key lengths": {"key_lengths": LENGTHS},
    "query lengths": {"query_lengths": np.array([2, 5], np.int32)},
    "causal lengths": {"causal": True, "key_lengths": LENGTHS, "query_offset": "end"},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": SINKS},
    "lse": {"return_lse": True},
    "layout": {"layout": "blhd"},
    "dropout": {"dropout": Dropout(0.5, 1)},
    "engine": {"engine": "portable"},
    "block size": {"block_size": (2, 2)},
    "one head": {"rank": 2},
}
POSITIONS = {"causal from the start", "causal from 0"}
TAKES = {
    "torch": {"bare", "scale", "mask", "bias", *POSITIONS},
    "jax": {
        *("bare", "scale", "mask", "bias", "mask and bias", "mask and causal", "window", "lse"),
        *("key lengths", "query lengths", "layout", *POSITIONS),
    },
    "onnx": {
        *("bare", "scale", "mask", "bias", "mask and causal", "window", "window to the end"),
        *("key lengths", "causal lengths", "causal to the end", "softcap", *POSITIONS),
    },
    "flash": {
        *("bare", "scale", "causal to the end", "window to the end", "softcap", "lse", "layout"),
    },
    "mlx": {"bare", "scale", "mask", "bias", "causal to the end", "sinks"},
    "keras": {
        *("bare", "scale", "mask", "bias", "mask and bias", "mask and causal", "softcap"),
        *("layout", *POSITIONS),
    },
}


def stand_ins() -> dict[str, ModuleType]:
    """Return packages that are not installed here, whose functions are our dialects of them."""
    flash, mlx, core, keras = (ModuleType(n) for n in ("flash_attn", "mlx", "mlx.core", "keras"))
    flash.flash_attn_func = dialects.flash.flash_attn_func
    core.fast = SimpleNamespace(
        scaled_dot_product_attention=dialects.mlx.scaled_dot_product_attention
    )
    core.array, core.bfloat16, core.float32 = np.asarray, "bfloat16", np.float32
    mlx.core = core
    keras.ops = SimpleNamespace(
        dot_product_attention=dialects.keras.dot_product_attention, convert_to_numpy=np.asarray
    )
    return {"flash_attn": flash, "mlx": mlx, "mlx.core": core, "keras": keras}


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the adapter of a dialect, with what brings arrays there and back."""
    name = request.param
    if name in ("flash", "mlx", "keras"):
        for module, stand_in in stand_ins().items():
            monkeypatch.setitem(sys.modules, module, stand_in)
    there: Any = np.asarray
    if name == "torch":
        import torch

        there = torch.asarray
    elif name == "jax":
        import jax

        there = jax.numpy.asarray
    elif name == "onnx":
        pytest.importorskip("onnx", reason="needs onnx, whose reference implementation is called")
    return name, getattr(dialects, name).native(), there


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kernel", TAKES, indirect=True)
def test_it_agrees_or_names_what_is_missing(kernel: Any, call: str) -> None:
    name, function, there = kernel
    options = dict(CALLS[call])
    arrays = problem(7)
    if name == "jax" and "mask" in options:  # of a whole group of heads, or of each
        arrays = problem(7, kv_heads=4)
    if options.pop("rank", 4) == 2:
        arrays = tuple(array[0, 0] for array in arrays)
    if options.get("layout") == "blhd":
        arrays = tuple(np.swapaxes(array, 1, 2) for array in arrays)
    moved = {n: there(o) if isinstance(o, np.ndarray) else o for n, o in options.items()}
    if call not in TAKES[name] and not (call == "one head" and name == "torch"):
        with pytest.raises(NotImplementedError, match=" has no "):
            function(*map(there, arrays), **moved)
        return
    found = function(*map(there, arrays), **moved)
    expected = attention(*arrays, **options)
    pairs = zip(found, expected, strict=True) if "lse" in call else [(found, expected)]
    for one, other in pairs:
        np.testing.assert_allclose(np.asarray(one), other, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("kernel", TAKES, indirect=True)
def test_the_signature_names_what_it_takes(kernel: Any) -> None:
    name, function, there = kernel
    shown = inspect.signature(function).parameters
    full = inspect.signature(attention).parameters
    assert all(shown[option] == full[option] for option in shown)
    assert list(shown)[:3] == ["query", "key", "value"]
    assert ("softcap" in shown) == ("softcap" in TAKES[name])
    assert ("return_lse" in shown) == ("lse" in TAKES[name])
    with pytest.raises(TypeError, match="colour"):
        function(*map(there, problem(1)), colour="red")


def test_arrays_of_mlx() -> None:
    mx = pytest.importorskip("mlx.core", reason="needs mlx, to make arrays of its own")
    arrays = problem(3)
    for dtype, atol in ((mx.float32, 1e-5), (mx.bfloat16, 2e-2)):
        own = [mx.array(array).astype(dtype) for array in arrays]
        found = dialects.mlx.scaled_dot_product_attention(*own, scale=0.3, mask="causal")
        original = mx.fast.scaled_dot_product_attention(*own, scale=0.3, mask="causal")
        assert isinstance(found, mx.array)
        assert found.dtype == dtype
        assert mx.allclose(found.astype(mx.float32), original.astype(mx.float32), atol=atol)


def test_the_message_names_the_option() -> None:
    import torch

    x = torch.ones(1, 1, 4, 8)
    with pytest.raises(NotImplementedError, match=r"PyTorch has no softcap"):
        dialects.torch.native()(x, x, x, softcap=3.0)
    with pytest.raises(NotImplementedError, match=r"has no mask with causal"):
        dialects.torch.native("math")(x, x, x, mask=x[..., :4] > 0, causal=True)


@pytest.mark.parametrize("opset", [23, 24])
def test_older_opsets_have_no_windows(opset: int) -> None:
    pytest.importorskip("onnx", reason="needs onnx, whose reference implementation is called")
    arrays = problem(2)
    kernel = dialects.onnx.native(opset=opset)
    with pytest.raises(NotImplementedError, match=f"opset {opset}, has no window"):
        kernel(*arrays, window=(1, 1), query_offset="start")
    if opset == 23:
        with pytest.raises(NotImplementedError, match="key_lengths"):
            kernel(*arrays, key_lengths=LENGTHS)
    np.testing.assert_allclose(kernel(*arrays), attention(*arrays), rtol=1e-5, atol=3e-6)


def test_unknown_kernels() -> None:
    with pytest.raises(ValueError, match="runtime must be"):
        dialects.onnx.native("tvm")
    with pytest.raises(ValueError, match=r"backend must be one of .*math.*'fastest'"):
        dialects.torch.native("fastest")


LIBRARIES = "torch jax onnx onnxruntime mlx keras flash_attn cupy tensorflow"


@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("portable_attention", "portable_attention.dialects"),
        ("portable_attention.dialects", LIBRARIES),
    ],
)
def test_nothing_is_imported_before_it_is_needed(imported: str, absent: str) -> None:
    code = f"import sys, {imported}; print([n for n in {absent.split()} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
