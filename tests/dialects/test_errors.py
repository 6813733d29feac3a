"""What the dialects refuse, and what they say then. (ONNX's errors are in test_onnx.py.)"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from portable_attention import dialects

from .formula import problem

Q, K, V = problem(0)
SAME = (Q, Q, Q)
PACKED = Q[0].swapaxes(0, 1)
CU = np.array([0, 2, 5])

ERRORS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "torch dropout": (
        "torch.scaled_dot_product_attention",
        SAME,
        {"dropout_p": 0.1},
        ValueError,
        "needs seed=",
    ),
    "torch rate": (
        "torch.scaled_dot_product_attention",
        SAME,
        {"dropout_p": 2.0, "seed": 1},
        ValueError,
        "rate",
    ),
    "torch heads": (
        "torch.scaled_dot_product_attention",
        (Q, K, V),
        {},
        ValueError,
        "enable_gqa=True",
    ),
    "torch mask": (
        "torch.scaled_dot_product_attention",
        (*SAME, np.ones((5, 5), int)),
        {},
        TypeError,
        "attn_mask must be bool",
    ),
    "torch flag": (
        "torch.scaled_dot_product_attention",
        SAME,
        {"is_causal": 1},
        TypeError,
        "is_causal must be True or False",
    ),
    "torch list": (
        "torch.scaled_dot_product_attention",
        ([1.0], Q, Q),
        {},
        TypeError,
        "query must be an array",
    ),
    "jax mask": (
        "jax.dot_product_attention",
        SAME,
        {"mask": np.ones((4, 5, 5), np.float32)},
        TypeError,
        "mask",
    ),
    "jax rank": ("jax.dot_product_attention", (Q[0, 0], Q, Q), {}, ValueError, "query must have"),
    "jax list": (
        "jax.dot_product_attention",
        ([1.0], Q, Q),
        {},
        TypeError,
        "query must be an array",
    ),
    "jax window as a float": (
        "jax.dot_product_attention",
        SAME,
        {"local_window_size": 2.5},
        TypeError,
        r"local_window_size must be an int or a pair \(left, right\), got 2.5",
    ),
    "slopes of packed sequences as a list": (
        "flash.flash_attn_varlen_func",
        (PACKED, PACKED, PACKED, [0, 5], [0, 5]),
        {"alibi_slopes": [0.5, 0.5]},
        TypeError,
        "alibi_slopes must be an array",
    ),
    "jax kernel": (
        "jax.dot_product_attention",
        SAME,
        {"implementation": "flash"},
        ValueError,
        "implementation must be",
    ),
    "jax window": (
        "jax.dot_product_attention",
        SAME,
        {"local_window_size": (-1, 2)},
        ValueError,
        "window",
    ),
    "flash dropout": ("flash.flash_attn_func", SAME, {"dropout_p": 0.1}, ValueError, "needs seed="),
    "flash rank": ("flash.flash_attn_func", (Q[0], Q[0], Q[0]), {}, ValueError, "batch, length"),
    "flash window": (
        "flash.flash_attn_func",
        SAME,
        {"window_size": 3},
        TypeError,
        "window_size must be a pair",
    ),
    "flash slopes": (
        "flash.flash_attn_func",
        SAME,
        {"alibi_slopes": np.ones(3)},
        ValueError,
        "alibi_slopes must be",
    ),
    "flash slopes and dropout": (
        "flash.flash_attn_func",
        SAME,
        {"alibi_slopes": np.ones(5), "dropout_p": 0.5, "seed": 1},
        NotImplementedError,
        "alibi_slopes with dropout_p",
    ),
    "packed rank": (
        "flash.flash_attn_varlen_func",
        (*SAME, CU, CU),
        {},
        ValueError,
        "total length",
    ),
    "packed pages": (
        "flash.flash_attn_varlen_func",
        (PACKED,) * 3 + (CU, CU),
        {"block_table": CU},
        NotImplementedError,
        "block_table",
    ),
    "packed floats": (
        "flash.flash_attn_varlen_func",
        (PACKED,) * 3 + (CU * 1.0, CU),
        {},
        TypeError,
        "cu_seqlens_q must be an integer array",
    ),
    "packed order": (
        "flash.flash_attn_varlen_func",
        (PACKED,) * 3 + (CU, np.array([0, 6, 5])),
        {},
        ValueError,
        "cu_seqlens_k must rise from 0 to 5",
    ),
    "packed total": (
        "flash.flash_attn_varlen_func",
        (PACKED,) * 3 + (CU[:2], CU),
        {},
        ValueError,
        "cu_seqlens_q must rise",
    ),
    "packed counts": (
        "flash.flash_attn_varlen_func",
        (PACKED,) * 3 + (CU, np.array([0, 5])),
        {},
        ValueError,
        "one length",
    ),
    "cache update": (
        "flash.flash_attn_with_kvcache",
        (Q, Q, Q, Q, Q),
        {},
        NotImplementedError,
        "k is not taken",
    ),
    "cache rotation": (
        "flash.flash_attn_with_kvcache",
        SAME,
        {"rotary_cos": Q},
        NotImplementedError,
        "rotary_cos is not taken",
    ),
    "mlx word": (
        "mlx.scaled_dot_product_attention",
        SAME,
        {"scale": 1.0, "mask": "full"},
        ValueError,
        "'causal'",
    ),
    "mlx scale": (
        "mlx.scaled_dot_product_attention",
        SAME,
        {"scale": None},
        TypeError,
        "scale must be a number",
    ),
    "mlx integer mask": (
        "mlx.scaled_dot_product_attention",
        SAME,
        {"scale": 1.0, "mask": np.ones((5, 5), int)},
        TypeError,
        "mask must be",
    ),
    "keras rank": (
        "keras.dot_product_attention",
        (Q[0], Q[0], Q[0]),
        {},
        ValueError,
        "query must have axes",
    ),
    "keras flag": (
        "keras.dot_product_attention",
        SAME,
        {"flash_attention": "yes"},
        TypeError,
        "flash_attention must be True or False",
    ),
    "keras cap": (
        "keras.dot_product_attention",
        SAME,
        {"attn_logits_soft_cap": -1.0},
        ValueError,
        "softcap",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    path, arguments, options, error, message = ERRORS[name]
    module, function = path.split(".")
    with pytest.raises(error, match=message):
        getattr(getattr(dialects, module), function)(*arguments, **options)


def test_traced_boundaries() -> None:
    import jax

    packed = jax.numpy.asarray(PACKED)
    with pytest.raises(TypeError, match="readable, not traced"):
        jax.jit(
            lambda starts: dialects.flash.flash_attn_varlen_func(
                packed, packed, packed, starts, starts
            )
        )(CU)
