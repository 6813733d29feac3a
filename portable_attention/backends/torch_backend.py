"""PyTorch: host memory seen as NumPy arrays, values that a transform may hide, and gradients."""

from __future__ import annotations

import importlib.util
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from portable_attention.backends.base import Array, Backend
from portable_attention.backends.numpy_backend import numpy_backend
from portable_attention.backends.torch_native import FlashOnCpu


class TorchBackend(Backend):
    """Tensors of PyTorch, on any of its devices."""

    name = "torch"
    uses_host_blas = False
    kernels = (FlashOnCpu(),)
    unconnected = {  # noqa: RUF012
        "torch cuDNN attention (CUDA)": "it runs on CUDA devices alone",
        "torch flash attention (CUDA)": "it runs on CUDA devices alone",
        "torch memory-efficient attention (CUDA)": "it runs on CUDA devices alone",
        "torch flex_attention": "not connected: it must be compiled for each kind of call",
    }

    def kernels_on(self, device: Any) -> tuple[Any, ...]:
        if device.type != "cuda":
            return self.kernels
        from portable_attention.backends import torch_cuda

        return (*torch_cuda.KERNELS, *self.kernels)

    def copied(self, array: Array) -> Array:
        return array.clone()  # asarray would leave the graph behind

    def asarray(self, values: np.ndarray[Any, Any], device: Any, dtype: str) -> Array:
        return torch.as_tensor(values.tolist(), dtype=self.dtype(dtype), device=device)

    def settings(self, device: Any) -> AbstractContextManager[None]:
        # Autocast would round the operands of each product.
        if not _is_autocast(device.type):
            return nullcontext()
        context: AbstractContextManager[None] = torch.autocast(device.type, enabled=False)
        return context

    def autocast(self, *arrays: Array) -> tuple[Array, ...]:
        return autocast(*arrays)

    def reshape(self, array: Array, shape: tuple[int, ...]) -> Array:
        return array.reshape(shape)

    def as_operand(self, name: str, array: Array) -> Array:
        if array.is_nested or array.layout != torch.strided:
            kind = "nested" if array.is_nested else "sparse"
            raise TypeError(f"{name} is a {kind} tensor: pass a dense one, {name}.to_dense()")
        return array

    def host_call(self, call: Any) -> Any:
        operands = ("query", "key", "value", "mask", "bias", "sinks", "seed")
        arrays = {name: getattr(call, name) for name in operands}
        given = {name: array for name, array in arrays.items() if array is not None}
        if (
            call.device.type != "cpu"
            or transforming()
            or self.needs_gradient(*given.values())
            or not all(_has_memory(array) for array in given.values())
            or not all(isinstance(limit, int | np.ndarray) for _, limit in call.limits.items())
        ):
            return None
        views = {name: self.to_host(array) for name, array in given.items()}
        return replace(call, backend=numpy_backend(), device="cpu", **views)

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        array = array.detach().resolve_neg()
        if array.dtype == torch.bfloat16:
            bits: np.ndarray[Any, Any] = array.view(torch.int16).numpy()
            return bits.view(numpy_backend().dtype("bfloat16"))
        values: np.ndarray[Any, Any] = array.numpy()
        return values

    def from_host(self, array: np.ndarray[Any, Any]) -> Array:
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def read(self, array: Array) -> np.ndarray[Any, Any] | None:
        try:
            values: np.ndarray[Any, Any] = array.detach().cpu().numpy()
        except (RuntimeError, NotImplementedError):  # batched by vmap, fake, or on meta
            return None
        return values

    def needs_gradient(self, *arrays: Array | None) -> bool:
        return torch.is_grad_enabled() and any(
            isinstance(array, torch.Tensor) and array.requires_grad for array in arrays
        )

    def may_differentiate(self, *arrays: Array | None) -> bool:
        # Within a transform, what an outer one differentiates need not show.
        return transforming() or self.needs_gradient(*arrays)

    def safe_scores(self, query: Array, key: Array) -> Array:
        if not self.needs_gradient(query, key):
            return self.ops.scores(query, key)
        if self.all_finite(query) and self.all_finite(key):
            return self.ops.scores(query, key)
        # The derivative of a masked score is 0, and 0 times a NaN in its key would be NaN: the
        # finite numbers carry the derivative, and what is not finite is added without one.
        scores = self.ops.scores(_finite_or_zero(query), _finite_or_zero(key))
        with torch.no_grad():
            found = self.ops.scores(query, key)
            rest = torch.where(torch.isfinite(found), 0.0, found)
        return scores + rest

    def as_finite(self, array: Array) -> Array:
        found: Array = _AsFinite.apply(array)
        return found

    def stop_gradient(self, array: Array) -> Array:
        return array.detach()

    def score_budget(self, device: Any) -> int:
        # A GPU wants products large enough to fill it: 128 MiB of float32 scores.
        return 1 << 20 if device.type == "cpu" else 1 << 25


def _finite_or_zero(array: Array) -> Array:
    return torch.where(torch.isfinite(array), array, 0.0)


class _AsFinite(torch.autograd.Function):
    """Replaces NaN and infinities by 0; the derivative does not depend on them."""

    @staticmethod
    def forward(array: Array) -> Array:
        return _finite_or_zero(array)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Array) -> None:
        """Keep nothing: both derivatives are the identity."""

    @staticmethod
    def backward(ctx: Any, gradient: Array) -> Array:
        return gradient

    @staticmethod
    def jvp(ctx: Any, tangent: Array) -> Array:
        return tangent.clone()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None], array: Array) -> tuple[Array, int | None]:
        return _AsFinite.apply(array), in_dims[0]


def autocast(*arrays: Any) -> tuple[Any, ...]:
    """Return query, key and value in the dtype of autocast where that is on, as PyTorch's own."""
    device = arrays[0].device.type
    if not _is_autocast(device):
        return arrays
    dtype = torch.get_autocast_dtype(device)
    cast = (torch.float16, torch.bfloat16, torch.float32)
    return tuple(
        array.to(dtype) if isinstance(array, torch.Tensor) and array.dtype in cast else array
        for array in arrays
    )


def _is_autocast(device: str) -> bool:
    """Whether autocast is on for a kind of device, and whether it is known there at all."""
    known: bool = torch.amp.is_autocast_available(device)
    return known and torch.is_autocast_enabled(device)


def transforming() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is at work."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def has_tangent(array: Array) -> bool:
    """Whether forward-mode differentiation carries a derivative with this tensor."""
    forward = torch.autograd.forward_ad
    return forward._current_level >= 0 and forward.unpack_dual(array, level=0).tangent is not None


def _has_memory(array: Array) -> bool:
    """Whether a CPU tensor is plain memory that NumPy can see."""
    return is_plain(array) and (array.dtype != torch.bfloat16 or _has_bfloat16())


def is_plain(array: Array) -> bool:
    """Whether a tensor is nothing but strided memory."""
    plain = type(array) in (torch.Tensor, torch.nn.Parameter)
    return plain and array.layout == torch.strided and not torch.compiler.is_compiling()


@cache
def _has_bfloat16() -> bool:
    return importlib.util.find_spec("ml_dtypes") is not None
