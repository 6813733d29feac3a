"""Scores, their softmax, and the arithmetic between."""

from __future__ import annotations

from typing import Final

from portable_attention.conformance.cases import Case, bell, bits, equal_scores, inputs, slow
from portable_attention.conformance.generator import Array

PLAIN: Final = (
    Case(
        "plain/one-key",
        "With a single key the output is its value.",
        "order",
        inputs(1, queries=1, keys=1, width=1),
    ),
    Case(
        "plain/equal-scores",
        "With equal scores the output is the mean of the values.",
        "order",
        equal_scores(),
    ),
    Case(
        "plain/width-one",
        "With D = 1 the weights are softmax(q k), with nothing to scale.",
        "order",
        inputs(2, width=1),
    ),
    Case(
        "plain/without-lse",
        "The output alone is returned where no lse is asked for.",
        "the-call",
        inputs(3, width=1),
        check="output-alone",
    ),
)

SCALE: Final = (
    Case(
        "scale/default",
        "Scores are multiplied by 1/sqrt(D), before the softmax.",
        "scale",
        inputs(10, width=16),
    ),
    Case(
        "scale/of-the-query-width",
        "D of the default scale is the width of query and key, not that of value.",
        "scale",
        inputs(11, width=16, value_width=4),
    ),
    Case(
        "scale/odd-width",
        "The default scale is that of the true width, where kernels pad it.",
        "scale",
        inputs(12, width=13, value_width=5),
    ),
    Case(
        "scores/wide-head",
        "Every number of a wide head counts: D = 160, and Dv = 136.",
        "shapes",
        inputs(21, queries=3, keys=5, width=160, value_width=136),
    ),
    Case("scale/given", "A given scale replaces the default.", "scale", inputs(13), {"scale": 0.7}),
    Case(
        "scale/zero",
        "A scale of 0 is a scale: all weights are equal.",
        "scale",
        inputs(14),
        {"scale": 0.0},
    ),
    Case(
        "scale/negative",
        "A negative scale turns the order of the scores round.",
        "scale",
        inputs(15),
        {"scale": -0.5},
    ),
    Case(
        "scores/large",
        "Scores of thousands do not overflow, in no arithmetic: the maximum is taken off.",
        "accuracy",
        inputs(16, gain=512.0),
        {"scale": 1.0},
    ),
    Case(
        "scores/far-apart",
        "One score far above the others takes all the weight.",
        "accuracy",
        inputs(18, keys=9, gain=2048.0),
        {"scale": 1.0},
    ),
)

# Made by a bias, and long: after those of the bias and of the tiles.
SLOPES: Final = (
    Case(
        "scores/very-negative",
        "Scores far below 0 do not underflow: the maximum is taken off.",
        "accuracy",
        {
            **inputs(17, queries=3, keys=5),
            "bias": bell((3, 5), 17).with_put(((0, None), -500.0), ((1, None), -5000.0)),
        },
    ),
    Case(
        "scores/rising",
        "Scores that rise along the keys change the running maximum in every tile.",
        "accuracy",
        {
            **inputs(19, keys=70),
            "bias": Array((70,), "index", gain=1.5),
        },
    ),
    Case(
        "scores/falling",
        "Scores that fall along the keys leave all the weight in the first tile.",
        "accuracy",
        {
            **inputs(20, keys=70),
            "bias": Array((70,), "index", gain=-1.5),
        },
    ),
)

SOFTCAP: Final = (
    Case(
        "softcap/plain",
        "Scores become c tanh(s / c).",
        "softcap",
        inputs(30, gain=4.0),
        {"softcap": 2.0},
    ),
    Case(
        "softcap/after-the-scale",
        "The softcap sees the scaled scores.",
        "order",
        inputs(31, gain=4.0),
        {"softcap": 3.0, "scale": 0.9},
    ),
    Case(
        "softcap/before-the-bias",
        "The softcap does not see the bias.",
        "order",
        inputs(32, bias=bell((4, 4), 32, gain=4.0)),
        {"softcap": 1.5},
    ),
    Case(
        "softcap/before-the-mask",
        "The softcap does not see the mask: a masked key stays masked.",
        "softcap",
        inputs(33, mask=bits((4, 4), 33).with_put(((None, 0), 1.0))),
        {"softcap": 2.0},
    ),
    Case(
        "softcap/large-scores",
        "Scores far beyond the cap are bounded by it.",
        "softcap",
        inputs(34, gain=256.0),
        {"softcap": 30.0},
    ),
)


def _in(dtype: str, seed: int) -> tuple[Case, ...]:
    """Return the cases that every dtype gets."""
    rule = "dtypes" if dtype == "float64" else "wide-arithmetic"
    return (
        Case(
            f"{dtype}/plain",
            f"A {dtype} call rounds where {dtype} may be rounded, and nowhere else.",
            rule,
            inputs(seed, heads=2, queries=5, keys=7, width=16, dtype=dtype),
        ),
        Case(
            f"{dtype}/large-scores",
            "Scores of tens are kept in float32 or wider: half precision would be 1% off.",
            rule,
            inputs(seed + 5, heads=2, queries=5, keys=9, width=16, gain=16.0, dtype=dtype),
        ),
        Case(
            f"{dtype}/wide-sums",
            "The products of a score are summed in float32 or wider.",
            rule,
            inputs(seed + 1, queries=3, keys=9, width=200, dtype=dtype),
        ),
        Case(
            f"{dtype}/many-keys",
            "Long sums over the keys are taken in float32 or wider.",
            rule,
            inputs(seed + 2, queries=2, keys=700, width=8, dtype=dtype),
        ),
        Case(
            f"{dtype}/causal-groups",
            "Heads in groups, a diagonal and a ragged length.",
            rule,
            inputs(
                seed + 3, batch=(2,), heads=4, kv_heads=2, queries=33, keys=33, width=16,
                dtype=dtype,
            ),
            {"causal": True},
        ),
        Case(
            f"{dtype}/bias-of-float32",
            "A float32 bias does not change the dtype of the output.",
            "output-dtype",
            inputs(seed + 4, queries=3, keys=5, dtype=dtype, bias=bell((3, 5), seed)),
        ),
    )  # fmt: skip


DTYPES: Final = (
    *_in("float16", 40),
    *_in("bfloat16", 50),
    *_in("float64", 60),
    Case(
        "float32/wide-sums",
        "Scores over a wide head are as exact as float32 products and sums are.",
        "accuracy",
        inputs(70, heads=2, queries=9, keys=17, width=256),
    ),
    slow(
        Case(
            "float32/long",
            "Two thousand keys, as exact as float32 sums are.",
            "accuracy",
            inputs(71, heads=2, queries=40, keys=2050, width=64),
        )
    ),
    Case(
        "float16/scores-beyond-65504",
        "Scores that float16 cannot hold are nothing special.",
        "wide-arithmetic",
        inputs(72, width=64, gain=8192.0, dtype="float16"),
    ),
    Case(
        "float16/4096-equal-weights",
        "4096 equal weights add up to 1; in float16 a sum stops at 2048.",
        "wide-arithmetic",
        {
            "query": Array((1, 1, 1, 1), "constant", "float16", gain=0.0),
            "key": Array((1, 1, 4096, 1), "constant", "float16", gain=0.0),
            "value": Array((1, 1, 4096, 1), "constant", "float16"),
        },
    ),
    Case(
        "bfloat16/1024-equal-weights",
        "1024 equal weights add up to 1; in bfloat16 a sum stops at 256.",
        "wide-arithmetic",
        {
            "query": Array((1, 1, 1, 1), "constant", "bfloat16", gain=0.0),
            "key": Array((1, 1, 1024, 1), "constant", "bfloat16", gain=0.0),
            "value": Array((1, 1, 1024, 1), "constant", "bfloat16"),
        },
    ),
    Case(
        "float16/masked",
        "A mask in float16: no constant stands for it.",
        "mask",
        inputs(
            73, queries=3, keys=5, gain=32.0, dtype="float16",
            mask=bits((3, 5), 73).with_put(((None, 0), 1.0), ((1, 2), 0.0)),
        ),
        {"scale": -8.0},
    ),
    Case(
        "float16/bias-and-sinks",
        "Bias and sinks may be of half precision, too.",
        "dtypes",
        inputs(
            75,
            heads=2,
            dtype="float16",
            bias=bell((4, 4), 75, "float16"),
            sinks=bell((2,), 76, "float16"),
        ),
    ),
    Case(
        "float32/bias-of-float64",
        "A float64 bias does not change the dtype of the output.",
        "output-dtype",
        inputs(74, bias=bell((4, 4), 74, "float64")),
    ),
)  # fmt: skip

DROPOUT: Final = (
    Case(
        "dropout/which-pairs",
        "Which pair is kept follows from the seed and the four indices; the rest is scaled up.",
        "dropout",
        equal_scores(queries=6, keys=16),
        {"dropout": {"rate": 0.5, "seed": 7}},
    ),
    Case(
        "dropout/after-the-softmax",
        "Dropped weights are not redistributed, and the lse is that of the full row.",
        "dropout",
        inputs(80, batch=(2,), heads=4, kv_heads=2, queries=5, keys=9),
        {"dropout": {"rate": 0.3, "seed": -12345678901}, "causal": True, "query_offset": "end"},
    ),
    Case(
        "dropout/everything",
        "Rate 1 gives 0.",
        "dropout",
        inputs(81),
        {"dropout": {"rate": 1.0, "seed": 1}},
    ),
    Case(
        "dropout/nothing",
        "Rate 0 drops nothing.",
        "dropout",
        inputs(82),
        {"dropout": {"rate": 0.0, "seed": 1}},
    ),
    slow(
        Case(
            "dropout/many-tiles",
            "Which pair is kept does not depend on the tiling.",
            "how-a-pair-is-kept",
            inputs(83, heads=2, queries=70, keys=150),
            {"dropout": {"rate": 0.2, "seed": 99}},
        )
    ),
)
