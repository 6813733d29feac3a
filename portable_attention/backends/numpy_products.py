"""Matrix products of NumPy arrays, cut to where the BLAS behind them is fastest."""

from __future__ import annotations

from functools import cache

import numpy as np
from threadpoolctl import ThreadpoolController

from portable_attention.backends.base import Array

# OpenBLAS's kernels for small products take at most so many multiplications, and no left factor
# in columns beside a right one in columns (kernel/x86_64/sgemm_small_kernel_permit_skylakex.c).
# They pack nothing and write the result once. Measured on two cores of an AMD EPYC with AVX-512, in
# tiles of 640 x 320, d = 64 and 128: 113 GFLOP/s a core instead of 98 and 104.
_MOST_MULTIPLICATIONS = 1_000_000
# Rows of a block: those that were fastest, from a multiple of the kernel's own.
_ROWS = (32, 24, 16)
_WITH_SMALL_KERNELS = frozenset({"SkylakeX", "Cooperlake", "SapphireRapids"})


@cache
def has_small_kernels() -> bool:
    """Whether the BLAS of NumPy is an OpenBLAS with fast kernels for small float32 products."""
    found = ThreadpoolController().select(user_api="blas").info()
    own = [library for library in found if "numpy" in library["filepath"]]
    return bool(found) and all(
        library["internal_api"] == "openblas" and library["architecture"] in _WITH_SMALL_KERNELS
        for library in own or found
    )


def matmul(left: Array, right: Array, out: Array) -> Array:
    """Write the product of (..., M, K) and (..., K, N) to `out`, (..., M, N), and return it.

    It is made in blocks of rows that are small enough for the fast kernels, all in one call.
    """
    rows, inner = left.shape[-2:]
    block = _block(rows, inner, right.shape[-1])
    if not (block and _in_rows(right) and right.dtype == np.float32 and has_small_kernels()):
        return np.matmul(left, right, out=out)
    if block == _ROWS[-1] and not _in_rows(left):
        return np.matmul(left, right, out=out)  # is the faster one then
    whole = rows // block * block
    np.matmul(
        _cut(left[..., :whole, :], block),
        right[..., np.newaxis, :, :],
        out=_cut(out[..., :whole, :], block),
    )
    if whole < rows:
        np.matmul(left[..., whole:, :], right, out=out[..., whole:, :])
    return out


def _block(rows: int, inner: int, columns: int) -> int:
    """Return how many rows make a block, or 0 where the product is best made at once."""
    multiplications = inner * columns
    if rows * multiplications <= _MOST_MULTIPLICATIONS or min(inner, columns) < _ROWS[-1]:
        return 0
    return next((size for size in _ROWS if size * multiplications <= _MOST_MULTIPLICATIONS), 0)


def _in_rows(array: Array) -> bool:
    return bool(array.strides[-1] == array.itemsize)


def _cut(array: Array, block: int) -> Array:
    """Return (..., M, N) as (..., M / block, block, N), without a copy."""
    *lead, rows, columns = array.shape
    return array.reshape((*lead, rows // block, block, columns))
