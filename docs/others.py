"""Attention functions of other libraries, as `judge_others.py` holds them against the kit.

Each is made when it is asked for, so that a process imports one library alone.
"""

from __future__ import annotations

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
    from portable_attention.dialects import keras

    return keras.native()


_MAKERS: dict[str, Callable[[], Callable[..., Any]]] = {
    "torch_math": lambda: _torch("math"),
    "torch_flash": lambda: _torch("flash_attention"),
    "jax_nn": _jax,
    "onnx_reference": lambda: _onnx("reference"),
    "onnx_runtime": lambda: _onnx("onnxruntime"),
    "mlx_fast": _mlx,
    "keras_ops": _keras,
}


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in _MAKERS:
        raise AttributeError(name)
    return _MAKERS[name]()
