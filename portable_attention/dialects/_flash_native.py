"""FlashAttention's own kernel as a callable with the signature of `attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from portable_attention.backends import Array
from portable_attention.dialects._shared import adapter, check_offset, lacks

_NAME = "flash_attn_func of FlashAttention"


def native() -> Callable[..., Any]:
    """Make a callable with the signature of `attention` from FlashAttention's own function.

    Returns
    -------
    callable
        It takes tensors of rank 4 on a GPU, and causal, window, scale, softcap, return_lse and
        layout. Other options are a NotImplementedError that names them.

    References
    ----------
    https://github.com/Dao-AILab/flash-attention

    Examples
    --------
    >>> from portable_attention.dialects.flash import native
    >>> kernel = native()  # doctest: +SKIP
    """
    import flash_attn

    def kernel(query: Array, key: Array, value: Array, **options: Any) -> Any:
        if not query.ndim == key.ndim == value.ndim == 4:
            lacks(_NAME, f"arrays of ranks {query.ndim}, {key.ndim} and {value.ndim}")
        heads_first = options.pop("layout", "bhld") == "bhld"
        if heads_first:
            query, key, value = (array.swapaxes(1, 2) for array in (query, key, value))
        check_offset(_NAME, "end", options, query.shape[1], key.shape[1])
        window = options.get("window", (None, None))
        result = flash_attn.flash_attn_func(
            query,
            key,
            value,
            softmax_scale=options.get("scale"),
            causal=options.get("causal", False),
            window_size=tuple(-1 if side is None else side for side in window),
            softcap=options.get("softcap", 0.0),
            return_attn_probs=options.get("return_lse", False),
        )
        output, lse = result[:2] if options.get("return_lse") else (result, None)
        output = output.swapaxes(1, 2) if heads_first else output
        return output if lse is None else (output, lse)

    takes = {"causal", "window", "query_offset", "scale", "softcap", "return_lse", "layout"}
    return adapter(_NAME, takes, kernel)
