"""`jax.nn.dot_product_attention`, for the arrays of any library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from portable_attention.attention import attention
from portable_attention.backends import Array
from portable_attention.core.arguments import check_flag, described, whole_number
from portable_attention.dialects._shared import adapter, check_offset, lacks

_NAME = "dot_product_attention of JAX"


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """Compute attention as JAX's function of this name does.

    Letters as there: B batch, T queries, S keys, N query heads, K key/value heads, H width.

    Parameters
    ----------
    query : array, shape (B, T, N, H) or (T, N, H)
    key, value : array, shape (B, S, K, H) or (S, K, H)
        N is a multiple of K. Here values may have another width than keys.
    bias : floating array, broadcastable to (B, N, T, S), optional
        Added to the scores.
    mask : bool array, broadcastable to (B, N, T, S), optional
        True where a query may attend a key.
    scale : float, optional
        By default 1 / sqrt(H).
    is_causal : bool, default False
        Let query i attend the keys j <= i: the diagonal begins in the upper left corner.
    query_seq_lengths, key_value_seq_lengths : integer array, shape (B,), optional
        How many queries and keys are valid.
    local_window_size : int or (left, right), optional
        Let query i attend the keys from i - left to i + right; an int stands for both sides.
    implementation : {None, "xla", "cudnn"}
        Accepted, and makes no difference.
    return_residual : bool, default False
        Also return the log of the softmax denominator.

    Returns
    -------
    output : array, shape (B, T, N, H) or (T, N, H)
        Of the library, dtype and device of the query.
    residual : array, shape (B, T, N) or (T, N), only if `return_residual`
        Here float32 (float64 for float64), and differentiable.

    Raises
    ------
    TypeError, ValueError
        As `portable_attention.attention` does.

    Notes
    -----
    Different from the original: a row that may attend no key is 0 with a residual of -inf, where
    the original gives the mean of all values (with `mask`) or NaN (with `bias`), and a large
    negative residual. NaN in a masked value is not felt. Lengths have to lie in 0..T and 0..S.

    References
    ----------
    https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention.dialects.jax import dot_product_attention
    >>> query, key, value = np.random.default_rng(0).standard_normal((3, 2, 8, 4, 16))
    >>> dot_product_attention(query, key, value, local_window_size=(2, 0)).shape
    (2, 8, 4, 16)
    """
    check_flag("is_causal", is_causal)
    check_flag("return_residual", return_residual)
    if implementation not in (None, "xla", "cudnn"):
        raise ValueError(f"implementation must be None, 'xla' or 'cudnn', got {implementation!r}")
    lifted = [_lift(name, a) for name, a in (("query", query), ("key", key), ("value", value))]
    options: dict[str, Any] = {}
    window = local_window_size
    if window is not None and not isinstance(window, tuple | list):
        side = whole_number("local_window_size", window, "an int or a pair (left, right)")
        window = (side, side)
    if is_causal or window is not None:
        options = {"causal": is_causal, "query_offset": "start", "window": window}
    result = attention(
        *lifted,
        bias=bias,
        mask=mask,
        scale=scale,
        query_lengths=query_seq_lengths,
        key_lengths=key_value_seq_lengths,
        return_lse=return_residual,
        layout="blhd",
        **options,
    )
    output, lse = result if return_residual else (result, None)
    if query.ndim == 3 and output.shape[0] == 1:
        output, lse = output[0, ...], None if lse is None else lse[0, ...]
    return (output, _swap(lse)) if return_residual else output


def native(implementation: str | None = None) -> Callable[..., Any]:
    """Make a callable with the signature of `attention` from JAX's own function.

    Parameters
    ----------
    implementation : {None, "xla", "cudnn"}
        As the original takes it.

    Returns
    -------
    callable
        It takes arrays of rank 3 and 4, mask, bias, causal, window, lengths over the batch, scale,
        return_lse and layout. Other options are a NotImplementedError that names them.

    References
    ----------
    https://docs.jax.dev/en/latest/_autosummary/jax.nn.dot_product_attention.html

    Examples
    --------
    >>> import jax.numpy as jnp  # doctest: +SKIP
    >>> from portable_attention.dialects.jax import native
    >>> x = jnp.ones((1, 2, 4, 8))  # doctest: +SKIP
    >>> native()(x, x, x, causal=True).shape  # doctest: +SKIP
    (1, 2, 4, 8)
    """
    import jax
    import jax.numpy as jnp

    def kernel(query: Array, key: Array, value: Array, **options: Any) -> Any:
        if not query.ndim == key.ndim == value.ndim or query.ndim not in (3, 4):
            lacks(_NAME, f"arrays of ranks {query.ndim}, {key.ndim} and {value.ndim}")
        heads_first = options.pop("layout", "bhld") == "bhld"
        if heads_first:
            query, key, value = (jnp.swapaxes(array, -3, -2) for array in (query, key, value))
        lengths = query.shape[-3], key.shape[-3]
        check_offset(_NAME, "start", options, *lengths)
        window = options.get("window")
        if window is not None:
            window = tuple(sum(lengths) if side is None else side for side in window)
        batch = query.shape[0] if query.ndim == 4 else 1
        valid = {
            f"{name}_seq_lengths": jnp.broadcast_to(jnp.asarray(given, jnp.int32), (batch,))
            for name, given in (
                ("query", options.get("query_lengths")),
                ("key_value", options.get("key_lengths")),
            )
            if given is not None
        }
        result = jax.nn.dot_product_attention(
            query,
            key,
            value,
            options.get("bias"),
            options.get("mask"),
            scale=options.get("scale"),
            is_causal=options.get("causal", False),
            local_window_size=window,
            implementation=implementation,
            return_residual=options.get("return_lse", False),
            **valid,
        )
        output, lse = result if options.get("return_lse") else (result, None)
        output = jnp.swapaxes(output, -3, -2) if heads_first else output
        return output if lse is None else (output, jnp.swapaxes(lse, -2, -1))

    takes = {"mask", "bias", "causal", "window", "query_offset", "query_lengths", "key_lengths"}
    return adapter(_NAME, takes | {"scale", "return_lse", "layout"}, kernel)


def _lift(name: str, array: Array) -> Array:
    """Give an array (L, heads, width) a batch of one."""
    if not hasattr(array, "ndim"):
        raise TypeError(f"{name} must be an array, got {described(array)}")
    if array.ndim not in (3, 4):
        raise ValueError(
            f"{name} must have axes (batch, length, heads, width), the batch if there is one, "
            f"got shape {tuple(array.shape)}"
        )
    return array[None, ...] if array.ndim == 3 else array


def _swap(lse: Array) -> Array:
    """Bring the rows of an lse (..., heads, length) to (..., length, heads)."""
    return lse.mT if hasattr(lse, "mT") else lse.swapaxes(-1, -2)
