"""Calls so small that what surrounds the arithmetic is what they cost: a few rows and one tile.

The arithmetic is that of `host.attend_any` for one tile, so that a head gets the same bits here as
in a larger call.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from portable_attention.backends import Array
from portable_attention.backends.numpy_backend import ones
from portable_attention.core import eager
from portable_attention.core.plan import FEW_ROWS, HOST_KEYS
from portable_attention.core.problem import Call

# Products of at most these sizes OpenBLAS makes in one thread, whatever it may use (its
# interface/gemm.c and gemv.c); they need no guard.
_SCORES = 1 << 13
_MULTIPLICATIONS = 1 << 18


def attend_small(call: Call, dtype: Any) -> tuple[Array, Array] | None:
    """Return output and lse, or None for a call that is not small, not bare, or not finite."""
    problem = call.problem
    query, key, value = call.query, call.key, call.value
    shape_of_lse = problem.output_shape[:-1]
    scores_of_head = problem.query_length * problem.key_length
    bare = (
        problem.query_length < FEW_ROWS
        and 0 < problem.key_length <= HOST_KEYS
        and scores_of_head <= _SCORES
        and scores_of_head * max(problem.width, problem.value_width) <= _MULTIPLICATIONS
        and math.prod(shape_of_lse[:-1]) * scores_of_head <= _SCORES
        and problem.softcap is None
        and call.mask is None
        and call.bias is None
        and call.sinks is None
        and call.seed is None
        and problem.block_size is None
        and not call.limits.items()
        and problem.dtype == problem.compute_dtype
        and query.dtype == dtype
        and problem.value_width > 0
        and query.flags.c_contiguous
        and key.flags.c_contiguous
        and value.flags.c_contiguous
        and query.flags.aligned
        and key.flags.aligned
        and value.flags.aligned
    )
    if not bare:
        return None
    ops = call.backend.ops
    early, late = eager.split_scale(problem.scale)
    scores = np.matmul(query if early == 1.0 else query * early, key.swapaxes(-1, -2))
    if late != 1.0:
        np.multiply(scores, late, out=scores)
    maximum = np.maximum.reduce(scores, axis=-1, keepdims=True)
    np.subtract(scores, maximum, out=scores)
    weights = ops.exp(scores)
    total = np.matmul(weights, ones(problem.key_length, dtype))
    sums = np.matmul(weights, value)
    sums += 0.0  # -0.0 becomes 0.0, as in a sum that begins with 0
    # Weights that are not finite make no sums that are; a sum that overflows goes the other way.
    if not math.isfinite(np.add.reduce(sums, axis=None)) or sums.shape[:-1] != shape_of_lse:
        return None
    lse = np.log(total)
    lse += maximum
    lse = lse[..., 0]
    np.divide(sums, total, out=sums)
    if lse.shape != shape_of_lse:  # the values alone have all batch axes
        lse = np.array(np.broadcast_to(lse, shape_of_lse))
    return sums, lse
