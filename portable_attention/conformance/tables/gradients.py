"""Gradients: of every argument, through every option, and 0 through what is not attended."""

from __future__ import annotations

from typing import Final

from portable_attention.conformance.cases import (
    INF,
    NAN,
    Case,
    bell,
    bits,
    counts,
    inputs,
    poisoned,
    slow,
    with_cotangents,
)
from portable_attention.conformance.generator import Array

GRADIENTS: Final = (
    Case(
        "gradient/plain",
        "Gradients of query, key and value.",
        "derivatives",
        with_cotangents(inputs(400, queries=4, keys=5), 400),
    ),
    Case(
        "gradient/scale",
        "The scale is in the gradients of query and key.",
        "derivatives",
        with_cotangents(inputs(401, heads=2, width=16, value_width=5), 401),
        {"scale": 0.7},
    ),
    Case(
        "gradient/lse",
        "The lse has gradients, alone and beside those of the output.",
        "derivatives",
        with_cotangents(inputs(402, heads=2, queries=4, keys=5), 402, lse=True),
    ),
    Case(
        "gradient/groups",
        "Keys and values that heads share get the sum of the heads' gradients.",
        "derivatives",
        with_cotangents(inputs(403, batch=(2,), heads=6, kv_heads=2, queries=5, keys=5), 403),
        {"causal": True},
    ),
    Case(
        "gradient/broadcast-batch",
        "What a batch shares gets the sum over the batch.",
        "derivatives",
        with_cotangents(
            {
                **inputs(404, batch=(3,), heads=2),
                "key": bell((1, 2, 4, 8), 404),
                "value": bell((1, 2, 4, 8), 405),
            },
            404,
        ),
    ),
    Case(
        "gradient/bias",
        "A bias has a gradient.",
        "derivatives",
        with_cotangents(inputs(406, heads=2, bias=bell((1, 2, 4, 4), 406)), 406, lse=True),
    ),
    Case(
        "gradient/broadcast-bias",
        "The gradient of a bias that was broadcast is summed to its own shape.",
        "derivatives",
        with_cotangents(inputs(407, batch=(2,), heads=2, keys=6, bias=bell((2, 1, 6), 407)), 407),
    ),
    Case(
        "gradient/softcap",
        "The softcap's slope is in the gradients of query and key, not in that of the bias.",
        "derivatives",
        with_cotangents(inputs(408, gain=2.0, bias=bell((4, 4), 408)), 408),
        {"softcap": 2.0},
    ),
    Case(
        "gradient/sinks",
        "Sinks have gradients.",
        "sinks",
        with_cotangents(inputs(409, batch=(2,), heads=3, sinks=bell((3,), 409)), 409, lse=True),
    ),
    Case(
        "gradient/window",
        "Gradients stay within the window.",
        "derivatives",
        with_cotangents(inputs(410, heads=2, queries=9, keys=9), 410),
        {"window": (2, 1)},
    ),
    Case(
        "gradient/empty-rows",
        "Gradients through empty rows are 0, and the others are untouched.",
        "empty-rows",
        with_cotangents(
            inputs(411, queries=3, keys=5, mask=bits((3, 5), 411).with_put(((1, None), 0.0))),
            411,
            lse=True,
        ),
    ),
    Case(
        "gradient/lengths",
        "Padding has gradients of 0.",
        "derivatives",
        with_cotangents(
            inputs(
                412, batch=(3,), heads=2, queries=4, keys=5, query_lengths=counts(4, 2, 3),
                key_lengths=counts(3, 5, 0),
            ),
            412,
        ),
    ),
    Case(
        "gradient/sinks-of-empty-rows",
        "An empty row with a sink has a gradient of its lse by the sink, 1, and no other.",
        "sinks",
        with_cotangents(
            inputs(
                413, heads=2, queries=3, keys=5, sinks=bell((2,), 413),
                mask=bits((3, 5), 413).with_put(((1, None), 0.0)),
            ),
            413,
            lse=True,
        ),
    ),
    Case(
        "gradient/poison",
        "NaN in a masked key and value is not felt by any gradient; its own is 0.",
        "masked-is-not-felt",
        poisoned(
            with_cotangents(
                inputs(
                    414, queries=4, keys=6,
                    mask=Array((6,), "constant", "bool", put=(((5,), 0.0),)),
                ),
                414,
            ),
            NAN,
            key=(0, 0, 5, 0),
            value=(0, 0, 5, 1),
        ),
        also=("nan-safety",),
    ),
    Case(
        "gradient/poisoned-query",
        "NaN in the query of an empty row is not felt by the gradients of keys and values.",
        "masked-is-not-felt",
        poisoned(
            with_cotangents(
                inputs(
                    415, queries=3, keys=5, mask=bits((3, 5), 415).with_put(((1, None), 0.0))
                ),
                415,
            ),
            NAN,
            query=(0, 0, 1, None),
        ),
        also=("nan-safety",),
    ),
    Case(
        "gradient/bias-of-minus-infinity",
        "An entry of -inf in a bias has a gradient of 0.",
        "bias",
        with_cotangents(
            inputs(416, bias=bell((4, 4), 416).with_put(((0, 1), -INF), ((2, 3), -INF))), 416
        ),
    ),
    Case(
        "gradient/dropout",
        "The backward pass drops the pairs that the forward pass dropped.",
        "dropout",
        with_cotangents(inputs(417, heads=2, queries=5, keys=9), 417, lse=True),
        {"dropout": {"rate": 0.4, "seed": 5}},
    ),
    Case(
        "gradient/large-scores",
        "Scores of hundreds do not spoil the gradients.",
        "derivatives",
        with_cotangents(inputs(418, gain=64.0), 418),
        {"scale": 1.0},
    ),
    Case(
        "gradient/layout",
        "Gradients have the layout of their arguments.",
        "layout",
        with_cotangents(
            {
                "query": bell((2, 3, 4, 8), 419),
                "key": bell((2, 5, 2, 8), 420),
                "value": bell((2, 5, 2, 6), 421),
            },
            419,
            layout="blhd",
        ),
        {"layout": "blhd"},
    ),
    Case(
        "gradient/tiles",
        "Tails and tiles of the backward pass.",
        "derivatives",
        with_cotangents(inputs(422, heads=2, queries=70, keys=131, width=16), 422, lse=True),
        {"causal": True, "query_offset": "end"},
    ),
    Case(
        "gradient/float16",
        "Gradients in float16.",
        "wide-arithmetic",
        with_cotangents(
            inputs(423, heads=4, kv_heads=2, queries=9, keys=9, dtype="float16"), 423, lse=True
        ),
        {"causal": True},
    ),
    Case(
        "gradient/bfloat16",
        "Gradients in bfloat16.",
        "wide-arithmetic",
        with_cotangents(
            inputs(424, heads=4, kv_heads=2, queries=9, keys=9, dtype="bfloat16"), 424, lse=True
        ),
        {"causal": True},
    ),
    Case(
        "gradient/float64",
        "Gradients in float64.",
        "dtypes",
        with_cotangents(
            inputs(425, heads=2, queries=9, keys=9, dtype="float64", bias=bell((9, 9), 425)), 425
        ),
    ),
    slow(
        Case(
            "gradient/long",
            "A longer call, with groups and a window.",
            "derivatives",
            with_cotangents(
                inputs(426, batch=(2,), heads=4, kv_heads=2, queries=200, keys=200, width=32), 426
            ),
            {"causal": True, "window": (90, 0)},
        )
    ),
)  # fmt: skip
