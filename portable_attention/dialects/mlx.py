"""`mlx.core.fast.scaled_dot_product_attention`, for the arrays of any library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portable_attention.attention import attention
from portable_attention.backends import Array
from portable_attention.dialects._shared import adapter, check_offset, lacks, mask_or_bias

_NAME = "scaled_dot_product_attention of MLX"


def scaled_dot_product_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float,
    mask: str | Array | None = None,
    sinks: Array | None = None,
    force_fused: bool = False,
    stream: Any = None,
) -> Array:
    """Compute attention as the function of this name in ``mlx.core.fast`` does.

    Parameters
    ----------
    q : array, shape (B, Hq, Lq, D)
    k : array, shape (B, Hkv, Lk, D)
    v : array, shape (B, Hkv, Lk, Dv)
        Hq is a multiple of Hkv.
    scale : float
        Multiplies the scores, typically 1 / sqrt(D). It has no default.
    mask : "causal" or array, broadcastable to (B, Hq, Lq, Lk), optional
        "causal" puts the last query on the last key: the diagonal ends in the lower right corner.
        An array is bool, True where a query may attend a key, or floating, added to the scores.
    sinks : floating array, shape (Hq,), optional
        ``exp(sinks[h])`` is added to the softmax denominator of each row of head h.
    force_fused, stream
        Accepted, and make no difference.

    Returns
    -------
    array, shape (B, Hq, Lq, Dv)
        Of the library, dtype and device of `q`. Arrays of MLX, too, are computed on the CPU, by
        way of NumPy, without derivatives.

    Raises
    ------
    TypeError, ValueError
        As `portable_attention.attention` does; and for another word than "causal".

    Notes
    -----
    Different from the original: a row that may attend no key is 0, where the original gives the
    mean of the values or NaN. NaN in what is masked is not felt.

    References
    ----------
    https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.fast.scaled_dot_product_attention.html

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention.dialects.mlx import scaled_dot_product_attention
    >>> key, value = np.random.default_rng(0).standard_normal((2, 1, 4, 8, 16))
    >>> scaled_dot_product_attention(key[..., -1:, :], key, value, scale=0.25, mask="causal").shape
    (1, 4, 1, 16)
    """
    if scale is None:
        raise TypeError("scale must be a number, as in MLX: typically 1 / sqrt(D)")
    own = _is_mlx(q)
    if own:
        q, k, v, sinks = (_to_numpy(array) for array in (q, k, v, sinks))
        mask = mask if isinstance(mask, str) else _to_numpy(mask)
    options: dict[str, Any] = {"causal": True, "query_offset": "end"}
    if not isinstance(mask, str):
        options = mask_or_bias("mask", mask)
    elif mask != "causal":
        raise ValueError(f"mask must be 'causal', an array or None, got {mask!r}")
    output = attention(q, k, v, scale=scale, sinks=sinks, **options)
    return _to_mlx(output) if own else output


def native() -> Callable[..., Any]:
    """Make a callable with the signature of `attention` from MLX's own function.

    Returns
    -------
    callable
        It takes arrays of MLX, or of NumPy and returns the same; and mask or bias or causal, scale
        and sinks. Other options are a NotImplementedError that names them.

    References
    ----------
    https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.fast.scaled_dot_product_attention.html

    Examples
    --------
    >>> from portable_attention.dialects.mlx import native
    >>> kernel = native()  # doctest: +SKIP
    """
    import mlx.core as mx

    def kernel(query: Array, key: Array, value: Array, **options: Any) -> Any:
        if not query.ndim == key.ndim == value.ndim == 4:
            lacks(_NAME, f"arrays of ranks {query.ndim}, {key.ndim} and {value.ndim}")
        if "float64" in str(query.dtype):
            lacks(_NAME, "float64")
        check_offset(_NAME, "end", options, query.shape[-2], key.shape[-2])
        if len(restrictions := [n for n in ("mask", "bias", "causal") if n in options]) > 1:
            lacks(_NAME, " with ".join(restrictions))
        mask = "causal" if options.get("causal") else options.get("mask", options.get("bias"))
        scale = options.get("scale", query.shape[-1] ** -0.5 if query.shape[-1] else 1.0)
        own = isinstance(query, np.ndarray)
        output = mx.fast.scaled_dot_product_attention(
            _to_mlx(query),
            _to_mlx(key),
            _to_mlx(value),
            scale=float(scale),
            mask=_to_mlx(mask),
            sinks=_to_mlx(options.get("sinks")),
        )
        return _to_numpy(output).astype(query.dtype, copy=False) if own else output

    return adapter(_NAME, {"mask", "bias", "causal", "query_offset", "scale", "sinks"}, kernel)


def _is_mlx(array: Any) -> bool:
    return type(array).__module__.partition(".")[0] == "mlx"


def _to_mlx(array: Any) -> Any:
    """Return an array of NumPy as one of MLX; anything else as it is."""
    import mlx.core as mx

    if not isinstance(array, np.ndarray):
        return array
    if array.dtype.name == "bfloat16":  # NumPy's is foreign to MLX
        return mx.array(array.astype(np.float32)).astype(mx.bfloat16)
    return mx.array(array)


def _to_numpy(array: Any) -> Any:
    """Return an array of MLX as one of NumPy; anything else as it is."""
    if not _is_mlx(array):
        return array
    import mlx.core as mx

    if array.dtype == mx.bfloat16:
        import ml_dtypes

        return np.array(array.astype(mx.float32)).astype(ml_dtypes.bfloat16)
    return np.array(array)
