"""CuPy: tiles on cuBLAS, with no deep-learning framework."""

from __future__ import annotations

from typing import Any

import numpy as np

from portable_attention.backends.base import Array, Backend
from portable_attention.backends.cupy_cudnn import CudnnOfCupy


class CupyBackend(Backend):
    """Arrays of CuPy; halves are widened tile by tile, so that every product is float32."""

    name = "cupy"
    uses_host_blas = False
    kernels = (CudnnOfCupy(),)

    def dtype(self, name: str) -> Any:
        if name == "bfloat16":
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        return super().dtype(name)

    def read(self, array: Array) -> np.ndarray[Any, Any] | None:
        values: np.ndarray[Any, Any] = array.get()
        return values

    def score_budget(self, device: Any) -> int:
        return 1 << 25  # as for PyTorch on a GPU: 128 MiB of float32 scores
