"""Ways to compute attention: this library, and what people would otherwise pick.

Each is one small function from a call and its arrays to a `Way`; it imports what it is about, so
that nothing that is not measured is ever loaded. What a way cannot do, it is not asked to.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import floors
from benchmarks.arrays import Inputs
from benchmarks.environment import cores
from benchmarks.records import Call
from benchmarks.workloads import (
    JAX,
    JAX_NN,
    NAIVE,
    NUMPY,
    OPENVINO,
    ORT,
    READING,
    SDPA,
    SEVEN,
    TORCH,
    TWO,
)

Array = Any


@dataclass(frozen=True)
class Way:
    """One way, ready to run: what is timed, and what turns its result into (..., H, L, D)."""

    run: Callable[[], Any]
    answer: Callable[[Any], Array] | None = np.asarray
    planned_bytes: Callable[[], int] | None = None  # temporary memory, where a compiler says it


@dataclass(frozen=True)
class Peer:
    """A way by name: the modules it needs, the features that it has, and how it is made ready."""

    name: str
    prepare: Callable[[Call, Inputs], Way]
    needs: tuple[str, ...] = ()
    takes: frozenset[str] = frozenset()
    only: str = ""  # the feature without which there is nothing to do

    def missing(self, call: Call | None = None) -> str | None:
        """Return why this way cannot run (the call) here, or None."""
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        if absent:
            return f"not installed: {', '.join(absent)}"
        if call is not None and (lacks := sorted(call.features - self.takes)):
            return f"does not take {', '.join(lacks)} here"
        if call is not None and self.only and self.only not in call.features:
            return f"does not take calls without {self.only}"
        return None


def of_numpy(call: Call, inputs: Inputs) -> Way:
    from portable_attention import attention, attention_vjp

    arrays, options = _arrays(inputs), {**_options(call), **inputs.options}
    if not call.backward:
        return Way(lambda: attention(*arrays, **options))

    def run() -> tuple[Array, ...]:
        output, pullback = attention_vjp(*arrays, **options)
        return (output, *pullback(inputs.d_output)[:3])

    return Way(run, _joined)


def of_torch(call: Call, inputs: Inputs) -> Way:
    from portable_attention import attention

    options = {**_options(call), **_tensors(inputs.options)}
    return _torch_way(call, inputs, lambda *tensors: attention(*tensors, **options))


def of_jax(call: Call, inputs: Inputs) -> Way:
    import jax

    from portable_attention import attention

    arrays = [jax.numpy.asarray(array) for array in _arrays(inputs)]
    options = _options(call)
    function = jax.jit(lambda *args: attention(*args, **options))

    def planned() -> int:
        return int(function.lower(*arrays).compile().memory_analysis().temp_size_in_bytes)

    return Way(lambda: function(*arrays).block_until_ready(), planned_bytes=planned)


def two_products(call: Call, inputs: Inputs) -> Way:
    return Way(floors.two_products(call, inputs), None)


def seven_products(call: Call, inputs: Inputs) -> Way:
    return Way(floors.seven_products(call, inputs), None)


def reading(call: Call, inputs: Inputs) -> Way:
    return Way(floors.reading(call, inputs), None)


def torch_sdpa(call: Call, inputs: Inputs) -> Way:
    import torch

    sdpa = torch.nn.functional.scaled_dot_product_attention
    causal, grouped = _causal(call), call.kv_heads is not None
    extra = _tensors(inputs.options)
    mask = extra.get("mask", extra.get("bias"))
    return _torch_way(
        call,
        inputs,
        lambda *tensors: sdpa(*tensors, attn_mask=mask, is_causal=causal, enable_gqa=grouped),
    )


def flex_attention(call: Call, inputs: Inputs) -> Way:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tensors = [torch.from_numpy(array) for array in _arrays(inputs)]
    mask = None
    if _causal(call):
        mask = create_block_mask(
            lambda b, h, row, column: row >= column,
            *(None, None, call.length, call.length),
            device="cpu",
        )
    compiled = torch.compile(flex_attention)  # needs a C++ compiler, and says so
    return Way(lambda: compiled(*tensors, block_mask=mask))


def jax_nn(call: Call, inputs: Inputs) -> Way:
    import jax

    causal = _causal(call)
    return _jax_way(inputs, lambda *args: jax.nn.dot_product_attention(*args, is_causal=causal))


def tokamax(call: Call, inputs: Inputs) -> Way:
    import tokamax
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["benchmarks"])  # it would read the command line, and refuse ours
    causal = _causal(call)
    return _jax_way(inputs, lambda *args: tokamax.dot_product_attention(*args, is_causal=causal))


def memory_efficient(call: Call, inputs: Inputs) -> Way:
    from memory_efficient_attention import efficient_dot_product_attention_jax

    return _jax_way(inputs, efficient_dot_product_attention_jax)


def mlx(call: Call, inputs: Inputs) -> Way:
    import mlx.core as mx

    arrays = [mx.array(array) for array in _arrays(inputs)]
    scale, mask = 1.0 / np.sqrt(call.width), "causal" if _causal(call) else None

    def run() -> Array:
        output = mx.fast.scaled_dot_product_attention(*arrays, scale=scale, mask=mask)
        mx.eval(output)
        return output

    return Way(run)


def onnx_runtime(call: Call, inputs: Inputs) -> Way:
    """Run the fastest of ONNX Runtime's fused operators, on arrays in its own layout.

    That is MultiHeadAttention and, since its tiled path is not for causal calls,
    GroupQueryAttention, which is always causal; both ahead of the Attention of ONNX itself.
    """
    import onnxruntime
    from onnx import TensorProto, helper

    batch, heads, length, width = call.shape
    feeds = {
        name: np.ascontiguousarray(array.swapaxes(1, 2)).reshape(batch, array.shape[2], -1)
        for name, array in zip("qkv", _arrays(inputs), strict=True)
    }
    if _causal(call):
        feeds["last"] = np.full(batch, length - 1, np.int32)
        feeds["total"] = np.full(1, length, np.int32)
        node = helper.make_node(
            "GroupQueryAttention",
            ["q", "k", "v", "", "", "last", "total"],
            ["output", "keys", "values"],
            domain="com.microsoft",
            num_heads=heads,
            kv_num_heads=call.key_shape[1],
        )
    else:
        node = helper.make_node(
            "MultiHeadAttention", [*"qkv"], ["output"], domain="com.microsoft", num_heads=heads
        )
    types = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32}
    graph = helper.make_graph(
        [node],
        "attention",
        [
            helper.make_tensor_value_info(name, types[array.dtype.name], array.shape)
            for name, array in feeds.items()
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output],
    )
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=sets, ir_version=10)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = cores()
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), settings, providers=["CPUExecutionProvider"]
    )
    return Way(
        lambda: session.run(None, feeds)[0],
        lambda output: output.reshape(batch, length, heads, width).swapaxes(1, 2),
    )


def openvino(call: Call, inputs: Inputs) -> Way:
    import openvino
    from openvino import opset13

    arrays = [np.ascontiguousarray(array) for array in _arrays(inputs)]
    nodes = [opset13.parameter(list(array.shape), np.float32) for array in arrays]
    output = opset13.scaled_dot_product_attention(*nodes, causal=_causal(call))
    compiled = openvino.Core().compile_model(
        openvino.Model([output], nodes),
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": "f32",  # it would take bfloat16 where the processor has it
            "INFERENCE_NUM_THREADS": cores(),
            "PERFORMANCE_HINT": "LATENCY",
        },
    )
    request = compiled.create_infer_request()
    for place, array in enumerate(arrays):
        request.set_input_tensor(place, openvino.Tensor(array, shared_memory=True))

    def run() -> Array:
        request.infer()
        return request.get_output_tensor().data

    return Way(run)


def naive_numpy(call: Call, inputs: Inputs) -> Way:
    """Compute the formula as it stands, with an array of all scores."""
    query, key, value = _arrays(inputs)
    scale = np.float32(1.0 / np.sqrt(call.width))

    def run() -> Array:
        scores = query @ key.swapaxes(-1, -2) * scale
        if _causal(call):
            scores = np.where(np.tri(call.length, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return (weights / weights.sum(axis=-1, keepdims=True)) @ value

    return Way(run)


def _arrays(inputs: Inputs) -> tuple[Array, Array, Array]:
    return inputs.query, inputs.key, inputs.value


def _options(call: Call) -> dict[str, Any]:
    offset = {"query_offset": "end"} if call.key_shape[2] != call.length else {}
    return {**call.options, **offset}


def _causal(call: Call) -> bool:
    return bool(call.options.get("causal", False))


def _tensors(arrays: dict[str, Array]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _torch_way(call: Call, inputs: Inputs, function: Callable[..., Any]) -> Way:
    """Return a way over tensors, with PyTorch's own differentiation if the call is backward."""
    import torch

    tensors = [torch.from_numpy(array) for array in _arrays(inputs)]
    if not call.backward:
        return Way(lambda: function(*tensors))
    tensors = [tensor.requires_grad_() for tensor in tensors]
    d_output = torch.from_numpy(inputs.d_output)

    def run() -> tuple[Any, ...]:
        output = function(*tensors)
        return (output.detach(), *torch.autograd.grad(output, tensors, d_output))

    return Way(run, _joined)


def _jax_way(inputs: Inputs, function: Callable[..., Any]) -> Way:
    """Return a way over the arrays of JAX, length before heads, under jit."""
    import jax

    arrays = [jax.numpy.asarray(array.swapaxes(1, 2)) for array in _arrays(inputs)]
    compiled = jax.jit(function)
    return Way(
        lambda: compiled(*arrays).block_until_ready(),
        lambda output: np.asarray(output).swapaxes(1, 2),
    )


def _joined(arrays: tuple[Any, ...]) -> Array:
    return np.stack([np.asarray(array) for array in arrays])


_EVERYTHING = frozenset(
    {"causal", "window", "softcap", "mask", "bias", "grouped heads", "Lq != Lk", "backward"}
)
_HALF = frozenset({"float16", "bfloat16"})
_CAUSAL = frozenset({"causal"})
_GROUPED = frozenset({"causal", "grouped heads"})
PEERS = {
    peer.name: peer
    for peer in (
        Peer(NUMPY, of_numpy, takes=_EVERYTHING | _HALF),
        Peer(TORCH, of_torch, ("torch",), _EVERYTHING),
        Peer(JAX, of_jax, ("jax",), _EVERYTHING - {"mask", "bias", "backward"}),
        Peer(TWO, two_products, takes=_CAUSAL),
        Peer(SEVEN, seven_products, takes=frozenset({"backward"}), only="backward"),
        Peer(READING, reading, takes=frozenset({"grouped heads", "Lq != Lk"})),
        Peer(
            SDPA,
            torch_sdpa,
            ("torch",),
            frozenset({"causal", "mask", "bias", "grouped heads", "Lq != Lk", "backward"}),
        ),
        Peer(ORT, onnx_runtime, ("onnxruntime", "onnx"), _CAUSAL),
        Peer(OPENVINO, openvino, ("openvino",), _CAUSAL),
        Peer("flex_attention", flex_attention, ("torch",), _CAUSAL),
        Peer(JAX_NN, jax_nn, ("jax",), _GROUPED),
        Peer("tokamax", tokamax, ("tokamax",), _GROUPED),
        Peer(
            "memory-efficient-attention",
            memory_efficient,
            ("memory_efficient_attention", "jax"),
        ),
        Peer("MLX", mlx, ("mlx",), _GROUPED),
        Peer(NAIVE, naive_numpy, takes=_CAUSAL),
    )
}
