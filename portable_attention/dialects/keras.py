"""`keras.ops.dot_product_attention`, for the arrays of any library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portable_attention.attention import attention
from portable_attention.backends import Array
from portable_attention.core.arguments import check_flag
from portable_attention.dialects._shared import adapter, cap_of, check_offset, lacks

_NAME = "dot_product_attention of Keras"


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
) -> Array:
    """Compute attention as the function of this name in ``keras.ops`` does.

    Letters as there: B batch, T queries, S keys, N query heads, K key/value heads, H width.

    Parameters
    ----------
    query : array, shape (B, T, N, H)
    key, value : array, shape (B, S, K, H)
        N is a multiple of K. Here values may have another width than keys.
    bias : floating array, broadcastable to (B, N, T, S), optional
        Added to the scores.
    mask : bool array, broadcastable to (B, N, T, S), optional
        True where a query may attend a key.
    scale : float, optional
        By default 1 / sqrt(H).
    is_causal : bool, default False
        Let query i attend the keys j <= i: the diagonal begins in the upper left corner.
    flash_attention : bool, optional
        Accepted, and makes no difference: memory is linear in the lengths in any case.
    attn_logits_soft_cap : float, optional
        Replaces the scaled scores s by ``cap * tanh(s / cap)``, before `bias` and masking. Here on
        every backend; in the original only some of JAX's kernels have it.

    Returns
    -------
    array, shape (B, T, N, H)
        Of the library, dtype and device of the query.

    Raises
    ------
    TypeError, ValueError
        As `portable_attention.attention` does. Tensors of TensorFlow are not taken.

    Notes
    -----
    Different from the original: a row that may attend no key is 0 on every backend. NaN in what is
    masked is not felt. `mask`, `bias` and `is_causal` may be given together, and all hold.

    References
    ----------
    https://keras.io/api/ops/nn/

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention.dialects.keras import dot_product_attention
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 2, 8, 4, 16))
    >>> dot_product_attention(query, key, value, is_causal=True, attn_logits_soft_cap=30.0).shape
    (2, 8, 4, 16)
    """
    check_flag("is_causal", is_causal)
    if flash_attention is not None:
        check_flag("flash_attention", flash_attention)
    for name, array in (("query", query), ("key", key), ("value", value)):
        if getattr(array, "ndim", 4) != 4:
            raise ValueError(
                f"{name} must have axes (batch, length, heads, width), "
                f"got shape {tuple(array.shape)}"
            )
    return attention(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        causal=is_causal,
        query_offset="start" if is_causal else None,
        scale=scale,
        softcap=cap_of("attn_logits_soft_cap", attn_logits_soft_cap),
        layout="blhd",
    )


def native(flash_attention: bool | None = None) -> Callable[..., Any]:
    """Make a callable with the signature of `attention` from Keras's own function.

    Parameters
    ----------
    flash_attention : bool, optional
        As the original takes it.

    Returns
    -------
    callable
        It takes tensors of Keras's backend, or arrays of NumPy and returns the same; and mask,
        bias, causal, scale, softcap and layout. Other options are a NotImplementedError that names
        them.

    References
    ----------
    https://keras.io/api/ops/nn/

    Examples
    --------
    >>> from portable_attention.dialects.keras import native
    >>> kernel = native()  # doctest: +SKIP
    """
    import keras

    def kernel(query: Array, key: Array, value: Array, **options: Any) -> Any:
        if not query.ndim == key.ndim == value.ndim == 4:
            lacks(_NAME, f"arrays of ranks {query.ndim}, {key.ndim} and {value.ndim}")
        heads_first = options.pop("layout", "bhld") == "bhld"
        if heads_first:
            query, key, value = (array.swapaxes(1, 2) for array in (query, key, value))
        check_offset(_NAME, "start", options, query.shape[1], key.shape[1])
        try:
            output = keras.ops.dot_product_attention(
                query,
                key,
                value,
                bias=options.get("bias"),
                mask=options.get("mask"),
                scale=options.get("scale"),
                is_causal=options.get("causal", False),
                flash_attention=flash_attention,
                attn_logits_soft_cap=options.get("softcap"),
            )
        except ValueError as error:
            # Backends differ: soft caps are for JAX on TPU, mask with bias is not for PyTorch.
            if "only supported for" in str(error) or "Only one of" in str(error):
                raise NotImplementedError(f"{_NAME} has no such option here: {error}") from error
            raise
        if isinstance(query, np.ndarray):
            output = keras.ops.convert_to_numpy(output)
        return output.swapaxes(1, 2) if heads_first else output

    takes = {"mask", "bias", "causal", "query_offset", "scale", "softcap", "layout"}
    return adapter(_NAME, takes, kernel)
