"""`torch.nn.functional.scaled_dot_product_attention`, for the arrays of any library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from portable_attention.attention import attention
from portable_attention.backends import Array
from portable_attention.core.arguments import check_flag
from portable_attention.dialects._shared import (
    adapter,
    check_offset,
    dropout_of,
    lacks,
    mask_or_bias,
)

_NAME = "scaled_dot_product_attention of PyTorch"


def scaled_dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    seed: Any = None,
) -> Array:
    """Compute attention as PyTorch's function of this name does.

    Parameters
    ----------
    query : array, shape (..., Hq, L, E)
    key : array, shape (..., H, S, E)
    value : array, shape (..., H, S, Ev)
    attn_mask : array, broadcastable to (..., Hq, L, S), optional
        Bool, True where a query may attend a key; or floating, added to the scores.
    dropout_p : float, default 0.0
        The fraction of weights that is dropped. It needs `seed`.
    is_causal : bool, default False
        Let query i attend the keys j <= i: the diagonal begins in the upper left corner.
    scale : float, optional
        By default 1 / sqrt(E).
    enable_gqa : bool, default False
        Allow Hq to be a multiple of H. A single head of keys serves all query heads in any case.
    seed : int or 0-d integer array, optional
        What is dropped depends on it alone. The original has no such parameter: it draws from
        PyTorch's generator.

    Returns
    -------
    array, shape (..., Hq, L, Ev)
        Of the library, dtype and device of the query.

    Raises
    ------
    TypeError, ValueError
        As `portable_attention.attention` does; and for `dropout_p` without `seed`, and for heads
        that differ without `enable_gqa`.

    Notes
    -----
    Different from the original: a row that may attend no key is 0 in every release and backend
    (some give NaN). NaN in what is masked is not felt. `attn_mask` and `is_causal` may be given
    together, and both hold (the original refuses that).

    References
    ----------
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention.dialects.torch import scaled_dot_product_attention
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 2, 4, 8, 16))
    >>> scaled_dot_product_attention(query, key, value, is_causal=True).shape
    (2, 4, 8, 16)
    """
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    options: dict[str, Any] = mask_or_bias("attn_mask", attn_mask)
    if not enable_gqa:
        _check_heads(query, key)
    if is_causal:
        options |= {"causal": True, "query_offset": "start"}
    return attention(query, key, value, scale=scale, dropout=dropout_of(dropout_p, seed), **options)


def native(backend: str | None = None) -> Callable[..., Any]:
    """Make a callable with the signature of `attention` from PyTorch's own function.

    Parameters
    ----------
    backend : str, optional
        A member of ``torch.nn.attention.SDPBackend`` in lower case: "math", "flash_attention", ...
        By default PyTorch chooses.

    Returns
    -------
    callable
        It takes tensors, and mask or bias, causal and scale, one restriction at a time as the
        original does. Other options are a NotImplementedError that names them.

    Raises
    ------
    ValueError
        For a `backend` that PyTorch does not have.

    References
    ----------
    https://docs.pytorch.org/docs/stable/generated/torch.nn.attention.sdpa_kernel.html

    Examples
    --------
    >>> import torch  # doctest: +SKIP
    >>> from portable_attention.dialects.torch import native
    >>> x = torch.ones(1, 2, 4, 8)  # doctest: +SKIP
    >>> native("math")(x, x, x, causal=True).shape  # doctest: +SKIP
    torch.Size([1, 2, 4, 8])
    """
    from contextlib import nullcontext

    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    known = {name.lower(): one for name, one in SDPBackend.__members__.items()}
    if backend is not None and backend not in known:
        raise ValueError(f"backend must be one of {', '.join(known)}, got {backend!r}")
    chosen = None if backend is None else known[backend]

    def kernel(query: Array, key: Array, value: Array, **options: Any) -> Any:
        check_offset(_NAME, "start", options, query.shape[-2], key.shape[-2])
        if len(restrictions := [n for n in ("mask", "bias", "causal") if n in options]) > 1:
            lacks(_NAME, " with ".join(restrictions))
        gqa = query.ndim > 2 and query.shape[-3] != key.shape[-3]
        with nullcontext() if chosen is None else sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=options.get("mask", options.get("bias")),
                is_causal=options.get("causal", False),
                scale=options.get("scale"),
                enable_gqa=gqa,
            )

    return adapter(_NAME, {"mask", "bias", "causal", "scale", "query_offset"}, kernel)


def _check_heads(query: Array, key: Array) -> None:
    if not all(hasattr(array, "shape") for array in (query, key)):
        return  # which is said where arrays are checked
    heads, kv_heads = (a.shape[-3] if len(a.shape) > 2 else 1 for a in (query, key))
    if kv_heads not in (heads, 1):
        raise ValueError(
            f"query has {heads} heads and key {kv_heads}: heads are shared with enable_gqa=True"
        )
