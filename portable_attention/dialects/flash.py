"""The functions of the package `flash_attn`, for the arrays of any library."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from portable_attention.attention import attention
from portable_attention.backends import Array, common_backend
from portable_attention.backends.base import dtype_name
from portable_attention.core.arguments import check_flag, described
from portable_attention.dialects._alibi import attend_with_alibi
from portable_attention.dialects._flash_native import native
from portable_attention.dialects._shared import cap_of, dropout_of, window_of

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "native"]


def flash_attn_func(
    q: Array,
    k: Array,
    v: Array,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    seed: Any = None,
) -> Any:
    """Compute attention as FlashAttention-2's function of this name does.

    Parameters
    ----------
    q : array, shape (B, Lq, H, D)
    k : array, shape (B, Lk, Hkv, D)
    v : array, shape (B, Lk, Hkv, Dv)
        H is a multiple of Hkv.
    dropout_p : float, default 0.0
        The fraction of weights that is dropped. It needs `seed`.
    softmax_scale : float, optional
        By default 1 / sqrt(D).
    causal : bool, default False
        Query i stands at position i + Lk - Lq and attends no key after it: the diagonal ends in the
        lower right corner.
    window_size : (left, right), default (-1, -1)
        How many keys besides its own position a query may attend on each side; -1 is no bound.
    softcap : float, default 0.0
        Replaces the scaled scores s by ``softcap * tanh(s / softcap)``; 0 is off.
    alibi_slopes : floating array, shape (H,) or (B, H), optional
        ``-slope * |i + Lk - Lq - j|`` is added to the scores, for a block of rows at a time.
    deterministic : bool, default False
        Accepted, and makes no difference: the same call gives the same bits.
    return_attn_probs : bool, default False
        Also return the log of the softmax denominator, and None.
    seed : int or 0-d integer array, optional
        What is dropped depends on it alone. The original has no such parameter.

    Returns
    -------
    out : array, shape (B, Lq, H, Dv)
        Of the library, dtype and device of `q`.
    softmax_lse : array, shape (B, H, Lq), only if `return_attn_probs`
        -inf for a row that may attend no key.
    S_dmask : None, only if `return_attn_probs`
        The original returns (B, H, Lq, Lk) weights here, for its own tests.

    Raises
    ------
    TypeError, ValueError
        As `portable_attention.attention` does; and for `dropout_p` without `seed`.
    NotImplementedError
        For `alibi_slopes` with dropout.

    Notes
    -----
    Different from the original: any library, device, width and real floating dtype; the lse of a
    row that may attend no key is -inf, as in FlashAttention-3, where FlashAttention-2 has +inf.

    References
    ----------
    https://github.com/Dao-AILab/flash-attention; Dao, "FlashAttention-2: faster attention with
    better parallelism and work partitioning", 2023. ALiBi: Press, Smith and Lewis, "Train short,
    test long", 2022.

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention.dialects.flash import flash_attn_func
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 8, 4, 16))
    >>> flash_attn_func(q[:, -2:], k, v, causal=True, window_size=(4, 0)).shape
    (2, 2, 4, 16)
    """
    for name, flag in (("causal", causal), ("deterministic", deterministic)):
        check_flag(name, flag)
    check_flag("return_attn_probs", return_attn_probs)
    _check_rank({"q": q, "k": k, "v": v}, 4, "(batch, length, heads, width)")
    options = _options(softmax_scale, causal, window_size, softcap)
    dropout = dropout_of(dropout_p, seed)
    if alibi_slopes is None:
        out, lse = attention(q, k, v, dropout=dropout, return_lse=True, layout="blhd", **options)
    elif dropout is not None:
        raise NotImplementedError("alibi_slopes with dropout_p: rows are numbered by blocks")
    else:
        out, lse = attend_with_alibi(q, k, v, alibi_slopes, options)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Array,
    k: Array,
    v: Array,
    cu_seqlens_q: Array,
    cu_seqlens_k: Array,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Array | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Array | None = None,
    *,
    seed: int | None = None,
) -> Any:
    """Compute attention of packed sequences as FlashAttention-2's function of this name does.

    Parameters
    ----------
    q : array, shape (total_q, H, D)
    k : array, shape (total_k, Hkv, D)
    v : array, shape (total_k, Hkv, Dv)
        The sequences, one after the other.
    cu_seqlens_q, cu_seqlens_k : integer array, shape (B + 1,)
        Where each sequence begins, and where the last one ends. Their values have to be readable.
    max_seqlen_q, max_seqlen_k : int, optional
        Accepted, and not needed.
    block_table : None
        Paged caches are refused.
    dropout_p, softmax_scale, causal, window_size, softcap, deterministic
        As in `flash_attn_func`, for each sequence by itself.
    alibi_slopes : floating array, shape (H,) or (B, H), optional
    return_attn_probs : bool, default False
        Also return the log of the softmax denominator, and None.
    seed : int, optional
        Sequence number n drops what `seed` + n says.

    Returns
    -------
    out : array, shape (total_q, H, Dv)
    softmax_lse : array, shape (H, total_q), only if `return_attn_probs`
    S_dmask : None, only if `return_attn_probs`

    Raises
    ------
    TypeError, ValueError
        As `flash_attn_func` does; and for boundaries that cannot be read, decrease, or do not
        cover their arrays.
    NotImplementedError
        For `block_table`, and for `alibi_slopes` with dropout.

    References
    ----------
    https://github.com/Dao-AILab/flash-attention

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention.dialects.flash import flash_attn_varlen_func
    >>> x = np.random.default_rng(0).standard_normal((8, 4, 16))
    >>> starts = np.array([0, 3, 8], np.int32)
    >>> flash_attn_varlen_func(x, x, x, starts, starts, 5, 5, causal=True).shape
    (8, 4, 16)
    """
    if block_table is not None:
        raise NotImplementedError("block_table: paged caches are not taken")
    check_flag("return_attn_probs", return_attn_probs)
    _check_rank({"q": q, "k": k, "v": v}, 3, "(total length, heads, width)")
    backend = common_backend({"q": q, "k": k, "v": v})
    xp = backend.xp
    starts_q = _boundaries("cu_seqlens_q", cu_seqlens_q, q.shape[0])
    starts_k = _boundaries("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    if len(starts_q) != len(starts_k):
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must have one length, got {len(starts_q)} and "
            f"{len(starts_k)}"
        )
    outs, lses = [], []
    for number in range(len(starts_q) - 1):
        rows = slice(starts_q[number], starts_q[number + 1])
        columns = slice(starts_k[number], starts_k[number + 1])
        slopes: Any = alibi_slopes
        if getattr(slopes, "ndim", None) == 2:
            slopes = slopes[number, ...]
        out, lse, _ = flash_attn_func(
            q[None, rows, ...],
            k[None, columns, ...],
            v[None, columns, ...],
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            slopes,
            deterministic,
            True,
            seed=None if seed is None else seed + number,
        )
        outs.append(out[0, ...])
        lses.append(lse[0, ...])
    out, lse = xp.concat(outs, axis=0), xp.concat(lses, axis=-1)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    k: Array | None = None,
    v: Array | None = None,
    rotary_cos: Array | None = None,
    rotary_sin: Array | None = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Array | None = None,
    cache_leftpad: Array | None = None,
    block_table: Array | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Array | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attend a cache of keys and values as FlashAttention-2's function of this name does.

    Parameters
    ----------
    q : array, shape (B, Lq, H, D)
    k_cache : array, shape (B, Lk, Hkv, D)
    v_cache : array, shape (B, Lk, Hkv, Dv)
        Already updated with the keys and values of this step.
    cache_seqlens : int or integer array, shape (B,), optional
        How many keys of each item are valid, those of this step included; by default all.
    k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table, alibi_slopes : None
        Refused: inputs are never changed, so write new keys into the cache before the call.
    softmax_scale, causal, window_size, softcap
        As in `flash_attn_func`; the last query stands on the last valid key of its item.
    rotary_interleaved, num_splits
        Accepted, and make no difference.
    return_softmax_lse : bool, default False
        Also return the log of the softmax denominator.

    Returns
    -------
    out : array, shape (B, Lq, H, Dv)
    softmax_lse : array, shape (B, H, Lq), only if `return_softmax_lse`

    Raises
    ------
    TypeError, ValueError
        As `portable_attention.attention` does.
    NotImplementedError
        For what is refused above.

    References
    ----------
    https://github.com/Dao-AILab/flash-attention; Dao, Haziza, Massa, Sizov, "Flash-Decoding for
    long-context inference", 2023.

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention.dialects.flash import flash_attn_with_kvcache
    >>> k_cache, v_cache = np.random.default_rng(0).standard_normal((2, 2, 8, 4, 16))
    >>> q = k_cache[:, :1]
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=np.array([5, 8])).shape
    (2, 1, 4, 16)
    """
    refused = {
        "k": k,
        "v": v,
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "block_table": block_table,
        "alibi_slopes": alibi_slopes,
    }
    for name, given in refused.items():
        if given is not None:
            raise NotImplementedError(
                f"{name} is not taken: update, rotate and gather the cache before the call"
            )
    check_flag("causal", causal)
    check_flag("return_softmax_lse", return_softmax_lse)
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    _check_rank(arrays, 4, "(batch, length, heads, width)")
    return attention(
        q,
        k_cache,
        v_cache,
        key_lengths=cache_seqlens,
        return_lse=return_softmax_lse,
        layout="blhd",
        **_options(softmax_scale, causal, window_size, softcap),
    )


def _options(scale: Any, causal: bool, window_size: Any, softcap: Any) -> dict[str, Any]:
    window = window_of("window_size", window_size)
    return {
        "scale": scale,
        "causal": causal,
        "window": window,
        "query_offset": "end" if causal or window is not None else None,
        "softcap": cap_of("softcap", softcap),
    }


def _check_rank(arrays: dict[str, Any], rank: int, axes: str) -> None:
    for name, array in arrays.items():
        if hasattr(array, "ndim") and array.ndim != rank:
            raise ValueError(f"{name} must have axes {axes}, got shape {tuple(array.shape)}")


def _boundaries(name: str, given: Any, total: int) -> list[int]:
    """Return where sequences begin and end, as ints."""
    values = given
    if not isinstance(given, tuple | list):
        if not hasattr(given, "dtype") or "int" not in dtype_name(given):
            raise TypeError(f"{name} must be an integer array, got {described(given)}")
        values = common_backend({name: given}).read(given)
        if values is None:
            raise TypeError(f"the values of {name} have to be readable, not traced")
    numbers = [int(number) for number in np.asarray(values).ravel()]
    ordered = all(one <= other for one, other in pairwise(numbers))
    if len(numbers) < 2 or numbers[0] != 0 or numbers[-1] != total or not ordered:
        raise ValueError(f"{name} must rise from 0 to {total}, the total length, got {numbers}")
    return numbers
