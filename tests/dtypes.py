"""Dtypes by name, on the NumPy side of the tests."""

from __future__ import annotations

import ml_dtypes
import numpy as np

DTYPES = ("float16", "bfloat16", "float32", "float64")


def numpy_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype of that name; bfloat16 is that of ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def dtype_name(dtype: object) -> str:
    """Return the name of any library's dtype: "float32" for torch.float32."""
    text = str(getattr(dtype, "name", dtype))
    return text.rpartition(".")[2]


def lse_dtype(name: str) -> str:
    """Return the dtype of the lse of a call in that dtype."""
    return "float64" if name == "float64" else "float32"


def ulp(name: str, size: float) -> float:
    """Return the distance between two neighbouring numbers of that dtype at that size."""
    info = ml_dtypes.finfo(numpy_dtype(name))
    size = max(abs(size), float(info.smallest_normal))
    return 2.0 ** np.floor(np.log2(size)) * float(info.eps)
