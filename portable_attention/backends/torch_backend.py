"""PyTorch: reading values that a transform may hide, and stopping gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from portable_attention.backends.base import Array, Backend


class TorchBackend(Backend):
    """Tensors of PyTorch, on any of its devices."""

    name = "torch"

    def asarray(self, values: np.ndarray[Any, Any], device: Any, dtype: str) -> Array:
        return torch.as_tensor(values.tolist(), dtype=self.dtype(dtype), device=device)

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

    def stop_gradient(self, array: Array) -> Array:
        return array.detach()

    def score_budget(self, device: Any) -> int:
        # A GPU wants products large enough to fill it: 128 MiB of float32 scores.
        return 1 << 20 if device.type == "cpu" else 1 << 25
