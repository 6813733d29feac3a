"""Attention functions of other libraries, as `judge_others.py` holds them against the kit.

Each is made when it is asked for, so that a process imports one library alone.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any


def _torch(backend: str | None) -> Callable[..., Any]:
    from portable_attention.dialects import torch

    return torch.native(backend)


def _jax() -> Callable[..., Any]:
    from portable_attention.dialects import jax

    return jax.native()


def _onnx(runtime: str) -> Callable[..., Any]:
    from portable_attention.dialects import onnx

    return onnx.native(runtime)


def _mlx() -> Callable[..., Any]:
    from portable_attention.dialects import mlx

    return mlx.native()


def _keras() -> Callable[..., Any]:
    os.environ.setdefault("KERAS_BACKEND", "numpy")
    from portable_attention.dialects import keras

    return keras.native()


def _flex() -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    def attention(
        query: Any,
        key: Any,
        value: Any,
        *,
        mask: Any = None,
        bias: Any = None,
        causal: bool = False,
        scale: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        if query.ndim != 4:
            raise NotImplementedError("flex_attention takes (B, H, L, D) alone")
        shape = (*query.shape[:-1], key.shape[-2])
        allowed = None if mask is None else mask.expand(shape)
        added = None if bias is None else bias.expand(shape)

        def change(score: Any, item: Any, head: Any, row: Any, column: Any) -> Any:
            if added is not None:
                score = score + added[item, head, row, column]
            if allowed is not None:
                score = torch.where(allowed[item, head, row, column], score, float("-inf"))
            return torch.where(row >= column, score, float("-inf")) if causal else score

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it would rather be compiled
            return flex_attention(
                query,
                key,
                value,
                score_mod=change,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
                return_lse=return_lse,
            )

    return attention


def _openvino() -> Callable[..., Any]:
    import numpy as np
    import openvino
    from openvino import opset13

    core = openvino.Core()

    def attention(
        query: Any,
        key: Any,
        value: Any,
        *,
        mask: Any = None,
        bias: Any = None,
        causal: bool = False,
        scale: float | None = None,
    ) -> Any:
        if mask is not None and bias is not None:
            raise NotImplementedError("ScaledDotProductAttention has no mask with bias")
        if query.dtype not in (np.float16, np.float32):
            raise NotImplementedError(f"its CPU plugin does not compute in {query.dtype}")
        given = [query, key, value]
        if mask is not None or bias is not None:
            given.append(np.atleast_2d(mask if bias is None else bias))
        nodes = [opset13.parameter(list(array.shape), array.dtype) for array in given]
        inputs = [*nodes, *([None] * (4 - len(nodes)))]
        number = None if scale is None else opset13.constant(np.array(scale, query.dtype))
        output = opset13.scaled_dot_product_attention(*inputs, number, causal=causal)
        model = openvino.Model([output], nodes, "attention")
        compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        return np.array(compiled([np.ascontiguousarray(array) for array in given])[0])

    return attention


_MAKERS: dict[str, Callable[[], Callable[..., Any]]] = {
    "torch_math": lambda: _torch("math"),
    "torch_flash": lambda: _torch("flash_attention"),
    "jax_nn": _jax,
    "onnx_reference": lambda: _onnx("reference"),
    "onnx_runtime": lambda: _onnx("onnxruntime"),
    "mlx_fast": _mlx,
    "keras_ops": _keras,
    "flex_eager": _flex,
    "openvino_cpu": _openvino,
}


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in _MAKERS:
        raise AttributeError(name)
    return _MAKERS[name]()
