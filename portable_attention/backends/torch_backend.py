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

    def all_finite(self, array: Array) -> bool | None:
        finite = self.read(torch.isfinite(array).all())
        return None if finite is None else bool(finite)

    def stop_gradient(self, array: Array) -> Array:
        return array.detach()

    def score_budget(self, device: Any) -> int:
        # A GPU wants products large enough to fill it: 128 MiB of float32 scores.
        return 1 << 20 if device.type == "cpu" else 1 << 25


def _finite_or_zero(array: Array) -> Array:
    return torch.where(torch.isfinite(array), array, 0.0)
