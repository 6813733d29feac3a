"""Gradients of attention for libraries that have no automatic differentiation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from portable_attention.backends import Array, common_backend
from portable_attention.backends.base import dtype_name
from portable_attention.core import schedules
from portable_attention.core.arguments import FLOATS, check_flag
from portable_attention.core.backward import Cotangents
from portable_attention.core.dropout import Dropout
from portable_attention.core.problem import Call
from portable_attention.core.spec import validate


class Gradients(NamedTuple):
    """The gradients of one call, each in the shape and dtype of its argument, None if not given.

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention import attention_vjp
    >>> x = np.ones((2, 3))
    >>> output, pullback = attention_vjp(x, x, x)
    >>> gradients = pullback(np.ones_like(output))
    >>> gradients.value.shape, gradients.bias
    ((2, 3), None)
    """

    query: Array
    key: Array
    value: Array
    bias: Array | None
    sinks: Array | None


Pullback = Callable[..., Gradients]


def attention_vjp(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    query_offset: Any = None,
    query_lengths: Any = None,
    key_lengths: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: Dropout | None = None,
    return_lse: bool = False,
    layout: str = "bhld",
    engine: str = "auto",
    block_size: tuple[int, int] | None = None,
) -> tuple[Any, Pullback]:
    """Compute attention, and a function that pulls gradients of the output back to the inputs.

    The weights are made again tile by tile, so memory stays linear in the lengths, and what is
    masked is not felt: gradients through masked pairs and empty rows are exactly 0.

    All parameters are those of `attention`.

    Returns
    -------
    output : array, or (output, lse) with `return_lse`
        As `attention` returns it.
    pullback : function
        ``pullback(d_output, d_lse=None)`` takes the gradient of a scalar by the output, and
        optionally by the lse, both in the shapes of these, and returns `Gradients`: the gradients
        of that scalar by query, key, value, bias and sinks. Axes along which an argument was
        broadcast are summed. It may be called any number of times, with the same bits. It reads
        the inputs again, so they must still hold what they held; output and lse may be changed.

    Raises
    ------
    TypeError, ValueError
        As `attention` does; the pullback, for arrays that are not like the output or the lse.

    References
    ----------
    Rabe and Staats, "Self-attention does not need O(n^2) memory", 2021, and Dao et al.,
    "FlashAttention: fast and memory-efficient exact attention with IO-awareness", 2022.

    Examples
    --------
    One step of gradient descent on the values:

    >>> import numpy as np
    >>> from portable_attention import attention_vjp
    >>> rng = np.random.default_rng(0)
    >>> query, key, value, target = rng.standard_normal((4, 1, 2, 8, 4))
    >>> output, pullback = attention_vjp(query, key, value, causal=True)
    >>> gradients = pullback(output - target)
    >>> better, _ = attention_vjp(query, key, value - 0.1 * gradients.value, causal=True)
    >>> bool(((better - target) ** 2).sum() < ((output - target) ** 2).sum())
    True
    """
    check_flag("return_lse", return_lse)
    call = validate(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        causal=causal,
        window=window,
        query_offset=query_offset,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout=dropout,
        layout=layout,
        engine=engine,
        block_size=block_size,
    )
    given = {"query": query, "key": key, "value": value, "bias": bias, "sinks": sinks}
    wide_output, inner_lse = schedules.run(call, wide=True)
    with np.errstate(all="ignore"):
        # The caller may change what he gets in place; the pullback has its own.
        narrow = call.backend.astype(wide_output, call.backend.dtype(call.problem.dtype))
        if narrow is wide_output:
            narrow = call.backend.copied(wide_output)
        output, lse = call.restore(narrow, call.backend.copied(inner_lse))

    def pullback(d_output: Array, d_lse: Array | None = None) -> Gradients:
        _check_cotangent(call, "d_output", d_output, output)
        if d_lse is not None:
            _check_cotangent(call, "d_lse", d_lse, lse)
        cotangents = Cotangents(
            wide_output,
            inner_lse,
            call.inner(d_output),
            None if d_lse is None else call.inner(d_lse, rows=True),
        )
        found = schedules.run_backward(call, cotangents)
        with np.errstate(all="ignore"):
            return Gradients(
                *(
                    None if array is None else call.outer(name, found[name], array)
                    for name, array in given.items()
                )
            )

    return ((output, lse) if return_lse else output), pullback


def _check_cotangent(call: Call, name: str, array: Array, like: Array) -> None:
    backend = common_backend({"query": call.query, name: array})
    if dtype_name(array) not in FLOATS:
        raise TypeError(f"{name} must have a real floating dtype, got {dtype_name(array)}")
    if tuple(array.shape) != tuple(like.shape):
        raise ValueError(
            f"{name} must have the shape of what it is the gradient by, {tuple(like.shape)}, "
            f"got {tuple(array.shape)}"
        )
    if backend.device(array) != backend.device(like):
        raise ValueError(
            f"{name} is on device {backend.device(array)}, but query is on {backend.device(like)}"
        )
