"""The `Attention` operator of ONNX (opsets 23, 24 and 25), for the arrays of any library."""

from __future__ import annotations

from typing import Any

from portable_attention.attention import attention as attend
from portable_attention.backends import Array, Backend, common_backend
from portable_attention.backends.base import dtype_name
from portable_attention.core.arguments import check_flag, described, whole_number
from portable_attention.dialects._onnx_native import native
from portable_attention.dialects._onnx_scores import MODES, explicit_scores
from portable_attention.dialects._shared import cap_of, mask_or_bias, window_of

__all__ = ["attention", "native"]

_PRECISIONS = {1: "float32", 10: "float16", 11: "float64", 16: "bfloat16"}  # TensorProto.DataType


def attention(
    Q: Array,
    K: Array,
    V: Array,
    attn_mask: Array | None = None,
    past_key: Array | None = None,
    past_value: Array | None = None,
    nonpad_kv_seqlen: Array | None = None,
    *,
    is_causal: int = 0,
    kv_num_heads: int | None = None,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    softmax_precision: int | None = None,
    left_window_size: int = -1,
    right_window_size: int = -1,
    return_qk_matmul_output: bool = False,
) -> tuple[Array, Array | None, Array | None, Array | None]:
    """Compute attention as the operator `Attention` of ONNX does.

    The inputs of the operator are positional, its attributes keywords. Letters: B batch, Hq query
    heads, a multiple of the Hkv key/value heads, Lq queries, Lk keys of this call, P keys of the
    cache, D and Dv widths.

    Parameters
    ----------
    Q : array, shape (B, Hq, Lq, D) or (B, Lq, Hq * D)
    K : array, shape (B, Hkv, Lk, D) or (B, Lk, Hkv * D)
    V : array, shape (B, Hkv, Lk, Dv) or (B, Lk, Hkv * Dv)
    attn_mask : array, broadcastable to (B, Hq, Lq, P + Lk), optional
        Bool, True where a query may attend a key; or floating, added to the scores. Its last axis
        may be shorter: keys beyond it are not attended. So a last axis of size 1 is key 0 alone.
    past_key, past_value : array, shape (B, Hkv, P, D) and (B, Hkv, P, Dv), optional
        A cache, which stands before K and V.
    nonpad_kv_seqlen : integer array, shape (B,), optional
        How many keys of each item are valid, if K and V are a whole cache.
    is_causal : int, default 0
        If 1, query i attends the keys j <= i + offset; the offset is P with a cache,
        ``nonpad_kv_seqlen - Lq`` with that, and 0 otherwise.
    kv_num_heads, q_num_heads : int, optional
        Needed for inputs of rank 3; for others they have to agree with the shapes.
    qk_matmul_output_mode : {0, 1, 2, 3}, default 0
        What the last output is: the scaled scores; these after the softcap; after bias and masks,
        too; or the weights after the softmax.
    scale : float, optional
        By default 1 / sqrt(D).
    softcap : float, default 0.0
        Replaces the scaled scores s by ``softcap * tanh(s / softcap)``; 0 is off.
    softmax_precision : {1, 10, 11, 16}, optional
        A ``TensorProto.DataType``. float32 is the least that is used; 11 (double) makes the whole
        call float64.
    left_window_size, right_window_size : int, default -1
        How many keys besides its own position, offset included, a query may attend on each side;
        -1 is no bound.
    return_qk_matmul_output : bool, default False
        Whether the last output is wanted. It alone takes memory of Lq x Lk; a graph asks for it by
        naming the output.

    Returns
    -------
    Y : array, shape (B, Hq, Lq, Dv) or (B, Lq, Hq * Dv)
        Of the rank, library, dtype and device of `Q`.
    present_key, present_value : array, shape (B, Hkv, P + Lk, D) and (B, Hkv, P + Lk, Dv), or None
        The keys and values that were attended; None with `nonpad_kv_seqlen`, where the operator
        must not have these outputs. Without a cache they are K and V themselves.
    qk_matmul_output : array, shape (B, Hq, Lq, P + Lk), or None

    Raises
    ------
    TypeError, ValueError
        As `portable_attention.attention` does; and where inputs may not be combined, head counts
        are missing or do not fit, and attributes are out of range.

    Notes
    -----
    As in the operator since its erratum of ONNX 1.23: a row that may attend no key is 0. Different
    from the reference implementation: products accumulate in float32 at the least, NaN in masked
    keys and values is not felt, negative scales work, and mode 0 is without the softcap.

    References
    ----------
    https://onnx.ai/onnx/operators/onnx__Attention.html

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention.dialects.onnx import attention
    >>> Q, K, V = np.random.default_rng(0).standard_normal((3, 2, 6, 32))
    >>> Y, *_ = attention(Q, K, V, is_causal=1, q_num_heads=4, kv_num_heads=4)
    >>> Y.shape
    (2, 6, 32)
    """
    causal = _check_flags(is_causal, qk_matmul_output_mode, return_qk_matmul_output)
    window = window_of("window", (left_window_size, right_window_size))
    packed = getattr(Q, "ndim", None) == 3
    arrays = {"Q": Q, "K": K, "V": V}
    caches = {"past_key": past_key, "past_value": past_value}
    arrays |= {name: array for name, array in caches.items() if array is not None}
    backend = common_backend(arrays)
    query = _heads_first(backend, "Q", Q, q_num_heads, "q_num_heads")
    key = _heads_first(backend, "K", K, kv_num_heads, "kv_num_heads")
    value = _heads_first(backend, "V", V, kv_num_heads, "kv_num_heads")
    if len({(array.ndim, array.shape[0]) for array in (Q, K, V)}) > 1:
        shapes = ", ".join(str(tuple(array.shape)) for array in (Q, K, V))
        raise ValueError(f"Q, K and V must have the same rank and batch, got {shapes}")

    offset: Any = "start"
    _check_cache(past_key, past_value, nonpad_kv_seqlen)
    if past_key is not None and past_value is not None:
        offset = past_key.shape[-2]
        key = _after(backend, "past_key", past_key, key)
        value = _after(backend, "past_value", past_value, value)
    elif nonpad_kv_seqlen is not None:
        offset = "end"
    masks = mask_or_bias("attn_mask", attn_mask)
    masks = {name: _padded(backend, mask, key.shape[-2]) for name, mask in masks.items()}

    computed = [_in_precision(backend, array, softmax_precision) for array in (query, key, value)]
    cap = cap_of("softcap", softcap)
    output, lse = attend(
        *computed,
        **masks,
        causal=causal,
        window=window,
        query_offset=offset if causal or window is not None else None,
        key_lengths=nonpad_kv_seqlen,
        scale=scale,
        softcap=cap,
        return_lse=True,
    )
    output = backend.astype(output, query.dtype)
    scores = None
    if return_qk_matmul_output:
        left, right = (None, None) if window is None else window
        right = (0 if right is None else min(right, 0)) if causal else right
        scores = explicit_scores(
            backend,
            computed[0],
            computed[1],
            lse,
            mode=qk_matmul_output_mode,
            scale=scale,
            softcap=cap,
            **masks,
            limits=(offset if isinstance(offset, int) else 0, left, right),
            key_lengths=nonpad_kv_seqlen,
        )
        scores = backend.astype(scores, query.dtype)
    if packed:
        batch, heads, length, width = output.shape
        output = backend.xp.permute_dims(output, (0, 2, 1, 3))
        output = backend.xp.reshape(output, (batch, length, heads * width))
    present = (None, None) if nonpad_kv_seqlen is not None else (key, value)
    return output, *present, scores


def _check_flags(is_causal: Any, mode: Any, wanted: Any) -> bool:
    causal = is_causal if isinstance(is_causal, bool) else whole_number("is_causal", is_causal)
    if causal not in (0, 1):
        raise ValueError(f"is_causal must be 0 or 1, got {is_causal}")
    if whole_number("qk_matmul_output_mode", mode) not in MODES:
        raise ValueError(f"qk_matmul_output_mode must be 0, 1, 2 or 3, got {mode}")
    check_flag("return_qk_matmul_output", wanted)
    return bool(causal)


def _check_cache(past_key: Any, past_value: Any, nonpad_kv_seqlen: Any) -> None:
    if (past_key is None) != (past_value is None):
        given, other = ("past_key", "past_value")[:: 1 if past_value is None else -1]
        raise ValueError(f"{given} was given without {other}: pass both or none")
    if past_key is not None and nonpad_kv_seqlen is not None:
        raise ValueError(
            "nonpad_kv_seqlen says how much of a whole cache in K and V is valid; it cannot be "
            "combined with past_key and past_value"
        )


def _heads_first(backend: Backend, name: str, array: Array, heads: Any, option: str) -> Array:
    """Return an input as (B, heads, L, width)."""
    shape = tuple(array.shape)
    if len(shape) not in (3, 4):
        raise ValueError(f"{name} must have rank 3 or 4, got shape {shape}")
    if heads is None:
        if len(shape) == 3:
            raise ValueError(f"{name} has rank 3, shape {shape}, which needs {option}")
        return array
    if whole_number(option, heads) < 1:
        raise ValueError(f"{option} must be >= 1, got {heads}")
    if len(shape) == 4:
        if shape[1] != heads:
            raise ValueError(f"{option} is {heads}, but {name} has {shape[1]} heads: shape {shape}")
        return array
    if shape[2] % heads:
        raise ValueError(f"the width of {name} is no multiple of {option} = {heads}: shape {shape}")
    split = backend.xp.reshape(array, (*shape[:2], heads, shape[2] // heads))
    return backend.xp.permute_dims(split, (0, 2, 1, 3))


def _after(backend: Backend, name: str, past: Array, new: Array) -> Array:
    """Return a cache, and what is new after it."""
    shape, other = tuple(past.shape), tuple(new.shape)
    if len(shape) != 4 or (*shape[:2], shape[3]) != (*other[:2], other[3]):
        raise ValueError(
            f"{name} must have shape (batch, heads, length, width) like the {other} that it "
            f"precedes, got {shape}"
        )
    if past.dtype != new.dtype:
        raise TypeError(
            f"{name} must have the dtype {dtype_name(new)} of what it precedes, "
            f"got {dtype_name(past)}"
        )
    return backend.xp.concat([past, new], axis=2)


def _padded(backend: Backend, mask: Array, length: int) -> Array:
    """Return a mask whose keys beyond the last are not attended."""
    if mask.ndim < 1:
        raise ValueError(f"attn_mask must have rank 1 to 4, got {described(mask)}")
    missing = length - mask.shape[-1]
    if missing <= 0:
        return mask
    fill = False if dtype_name(mask) == "bool" else float("-inf")
    owner = common_backend({"attn_mask": mask})
    rest = owner.xp.full(
        (*mask.shape[:-1], missing), fill, dtype=mask.dtype, device=owner.device(mask)
    )
    return owner.xp.concat([mask, rest], axis=-1)


def _in_precision(backend: Backend, array: Array, precision: Any) -> Array:
    """Return an input in a dtype whose softmax has the precision that was asked for."""
    if precision is None:
        return array
    if whole_number("softmax_precision", precision) not in _PRECISIONS:
        raise ValueError(
            "softmax_precision must be 1 (float), 10 (float16), 11 (double) or 16 (bfloat16), "
            f"got {precision}"
        )
    if _PRECISIONS[precision] != "float64":
        return array
    known = backend.xp.__array_namespace_info__().dtypes(device=backend.device(array))
    if "float64" not in known:
        raise ValueError(
            f"softmax_precision = 11 (double) needs float64, which {backend.name} does not have "
            "here (in JAX: jax_enable_x64)"
        )
    return backend.astype(array, backend.dtype("float64"))
