"""The public call."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from portable_attention.backends import Array
from portable_attention.core import schedules
from portable_attention.core.arguments import check_flag
from portable_attention.core.dropout import Dropout
from portable_attention.core.spec import validate


def attention(
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
) -> Any:
    """Compute exact scaled dot-product attention, softmax(scale * Q K^T + bias) V.

    The same call gives the same answer for the arrays of every library: NumPy, PyTorch, JAX, CuPy
    and any other that follows the Array API standard. Memory besides inputs and output is a few
    tiles, whatever the options: no array of size Lq x Lk is made.

    Letters: any number of batch axes, which broadcast; Hq query heads, a multiple of the Hkv
    key/value heads; Lq queries, Lk keys; D the width of query and key, Dv that of value.

    Parameters
    ----------
    query : array, shape (..., Hq, Lq, D)
        Query head h reads key/value head ``h // (Hq // Hkv)``. float16, bfloat16, float32 or
        float64, the same for query, key and value. Three 2-D arrays are one head, without an axis
        for it; an array of lower rank than the others gets leading axes of size 1.
    key : array, shape (..., Hkv, Lk, D)
    value : array, shape (..., Hkv, Lk, Dv)
    mask : bool array, broadcastable to (..., Hq, Lq, Lk), optional
        True where a query may attend a key.
    bias : floating array, broadcastable to (..., Hq, Lq, Lk), optional
        Added to the scores after `softcap`; -inf masks, a finite number never does.
    causal : bool, default False
        Let query i attend the keys j <= i + query_offset.
    window : (left, right), optional
        Let query i attend the keys from ``i + query_offset - left`` to
        ``i + query_offset + right``; None on a side is no bound there.
    query_offset : int, integer array over the batch axes, "start" or "end", optional
        The position of query 0 among the keys. "start" is 0; "end" puts the last valid query on the
        last valid key. By default 0 where Lq == Lk; where they differ, causal and window need it.
    query_lengths, key_lengths : int or integer array over the batch axes, optional
        How many queries and keys are valid, in 0..Lq and 0..Lk, by default all of them. Rows beyond
        are empty; keys beyond are not attended.
    scale : float, optional
        Multiplies the scores, by default 1 / sqrt(D). Any finite number.
    softcap : float, optional
        Replaces the scaled scores s by ``softcap * tanh(s / softcap)``, before bias and masking.
    sinks : floating array, shape (Hq,), optional
        ``exp(sinks[h])`` is added to the softmax denominator of each row of head h.
    dropout : Dropout, optional
        Drops weights after the softmax.
    return_lse : bool, default False
        Also return the log of the softmax denominator.
    layout : {"bhld", "blhd"}, default "bhld"
        "blhd" takes query, key and value, and returns the output, as (..., L, H, D); all three have
        the same rank then. mask, bias and lse keep the heads first.
    engine : {"auto", "portable", "native"}, default "auto"
        "portable" runs the tiles of this library, "native" demands a fused kernel of the arrays'
        library that keeps to the rules, and "auto" takes the faster one of those that can.
    block_size : (queries, keys), optional
        The size of a tile, by default from the shapes. It changes speed and memory alone.

    Returns
    -------
    output : array, shape (..., Hq, Lq, Dv)
        In the dtype of the query and on its device; scores, weights and sums are float32 at least.
        A row that may attend no key is 0.
    lse : array, shape (..., Hq, Lq), only if `return_lse`
        The natural log of the softmax denominator, sink included; float32, or float64 for float64.
        -inf (or the sink) for a row that may attend no key.

    Raises
    ------
    TypeError
        For what is not an array, arrays of different libraries, and wrong dtypes.
    ValueError
        For shapes that do not fit, values out of range, arrays on different devices, and a causal
        or windowed call with Lq != Lk that does not say where its queries stand.

    Notes
    -----
    A pair is attended iff mask, causal, window, both lengths and the bias all allow it. NaN and
    infinities in what is masked change nothing. `docs/semantics.md` has every rule.

    JAX calls may be traced (``jax.jit``, ``jax.vmap``, ``jax.grad``), and take NumPy arrays as
    constants.

    References
    ----------
    Vaswani et al., "Attention is all you need", 2017, for the operation; Rabe and Staats,
    "Self-attention does not need O(n^2) memory", 2021, and Dao et al., "FlashAttention: fast and
    memory-efficient exact attention with IO-awareness", 2022, for doing it in tiles.

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention import attention
    >>> rng = np.random.default_rng(0)
    >>> query = rng.standard_normal((2, 8, 128, 64), dtype=np.float32)
    >>> key, value = rng.standard_normal((2, 2, 2, 128, 64), dtype=np.float32)
    >>> output, lse = attention(query, key, value, causal=True, return_lse=True)
    >>> output.shape, output.dtype.name, lse.shape
    ((2, 8, 128, 64), 'float32', (2, 8, 128))
    """
    check_flag("return_lse", return_lse)
    options = {
        "mask": mask,
        "bias": bias,
        "causal": causal,
        "window": window,
        "query_offset": query_offset,
        "query_lengths": query_lengths,
        "key_lengths": key_lengths,
        "scale": scale,
        "softcap": softcap,
        "sinks": sinks,
        "dropout": dropout,
        "layout": layout,
        "engine": engine,
        "block_size": block_size,
    }
    operator = torch_operator(query, key, value, bias, sinks)
    if operator is not None:
        return operator.attend(query, key, value, options, return_lse=return_lse)
    call = validate(query, key, value, **options)
    output, lse = call.restore(*schedules.run(call))
    return (output, lse) if return_lse else output


def torch_operator(query: Array, *others: Array | None) -> ModuleType | None:
    """Return the module that makes a call one operator of PyTorch, None if it is not to be one."""
    # Tensors may be of a class that is another package's.
    if all(kind.__module__.partition(".")[0] != "torch" for kind in type(query).__mro__):
        return None
    from portable_attention.core import torch_op  # it imports PyTorch

    return torch_op if torch_op.takes(query, *others) else None
