"""Rows without keys, sinks, and NaN and infinities, masked and attended."""

from __future__ import annotations

from typing import Final

from portable_attention.conformance.cases import (
    INF,
    NAN,
    Case,
    bell,
    bits,
    counts,
    equal_scores,
    inputs,
    poisoned,
)
from portable_attention.conformance.generator import Array

EMPTY: Final = (
    Case(
        "empty/by-mask",
        "A row whose keys are all masked is 0, and its lse -inf.",
        "empty-rows",
        inputs(300, queries=3, keys=5, mask=bits((3, 5), 300).with_put(((1, None), 0.0))),
    ),
    Case(
        "empty/by-bias",
        "A row whose bias is -inf throughout is just as empty.",
        "empty-rows",
        inputs(301, queries=3, keys=5, bias=bell((3, 5), 301).with_put(((1, None), -INF))),
    ),
    Case(
        "empty/by-position",
        "With more queries than keys the lower right diagonal leaves rows without keys.",
        "empty-rows",
        inputs(302, queries=6, keys=3),
        {"causal": True, "query_offset": "end"},
    ),
    Case(
        "empty/by-offset",
        "A negative offset puts the first queries before all keys.",
        "query-offset",
        inputs(309, heads=2, queries=5, keys=5),
        {"causal": True, "query_offset": -2},
    ),
    Case(
        "empty/by-window",
        "A window beyond the keys leaves rows without keys.",
        "empty-rows",
        inputs(303, queries=5, keys=5),
        {"window": (1, 1), "query_offset": 4},
    ),
    Case(
        "empty/no-valid-keys",
        "A key length of 0 leaves the whole item empty.",
        "empty-rows",
        inputs(304, batch=(3,), heads=2, queries=3, keys=5, key_lengths=counts(2, 0, 5)),
    ),
    Case(
        "empty/past-query-lengths",
        "Rows past the query length are empty.",
        "lengths",
        inputs(305, batch=(3,), heads=2, queries=4, keys=5, query_lengths=counts(4, 1, 0)),
    ),
    Case(
        "empty/all",
        "Every row may be empty.",
        "empty-rows",
        inputs(306, queries=3, keys=5, mask=Array((3, 5), "constant", "bool", gain=0.0)),
    ),
    Case(
        "empty/whatever-the-query",
        "An empty row is 0 even if its query holds NaN.",
        "empty-rows",
        poisoned(
            inputs(307, queries=3, keys=5, mask=bits((3, 5), 307).with_put(((1, None), 0.0))),
            NAN,
            query=(0, 0, 1, None),
        ),
        also=("nan-safety",),
    ),
    Case(
        "empty/not-by-size",
        "Rows with very negative scores are not empty: what is allowed decides.",
        "empty-rows",
        inputs(308, queries=2, keys=3, bias=Array((3,), "constant", gain=-1e20)),
    ),
)

SINKS: Final = (
    Case(
        "sinks/one-more-key",
        "A sink takes its share of the weights of its head, and counts in the lse.",
        "sinks",
        inputs(310, heads=3, queries=3, keys=5, sinks=bell((3,), 310, gain=2.0)),
    ),
    Case(
        "sinks/zero",
        "A sink of 0 is a sink: it adds 1 to the denominator.",
        "sinks",
        inputs(317, heads=2, sinks=Array((2,), "constant", gain=0.0)),
    ),
    Case(
        "sinks/once",
        "A sink counts once a row, however many tiles there are.",
        "sinks",
        inputs(311, heads=2, queries=3, keys=300, sinks=Array((2,), "constant", gain=5.0)),
    ),
    Case(
        "sinks/not-scaled",
        "A sink is neither scaled nor capped.",
        "sinks",
        inputs(312, heads=2, width=16, sinks=Array((2,), "constant", gain=3.0)),
        {"scale": 0.1, "softcap": 1.0},
    ),
    Case(
        "sinks/dominant",
        "A sink far above the scores takes nearly all the weight and does not overflow.",
        "sinks",
        inputs(313, heads=2, sinks=Array((2,), "index", gain=200.0)),
    ),
    Case(
        "sinks/negligible",
        "A sink far below the scores takes none.",
        "sinks",
        inputs(314, heads=2, gain=32.0, sinks=Array((2,), "constant", gain=-300.0)),
        {"scale": 1.0},
    ),
    Case(
        "sinks/of-empty-rows",
        "An empty row with a sink is 0, and its lse is the sink.",
        "sinks",
        inputs(
            315, heads=2, queries=3, keys=4, sinks=Array((2,), "index", gain=0.25),
            mask=bits((3, 4), 315).with_put(((1, None), 0.0)),
        ),
    ),
    Case(
        "sinks/of-groups",
        "With grouped heads each query head has its sink.",
        "sinks",
        inputs(316, batch=(2,), heads=4, kv_heads=2, sinks=Array((4,), "index")),
    ),
)  # fmt: skip


def _poison(name: str, number: float, seed: int, shows: str, **options: object) -> tuple[Case, ...]:
    """Return cases with a number in the last key and value, which some option masks."""
    arrays = poisoned(inputs(seed, queries=4, keys=6), number, key=(0, 0, 5, 0), value=(0, 0, 5, 1))
    arrays |= {n: option for n, option in options.items() if isinstance(option, Array)}
    others = {n: option for n, option in options.items() if not isinstance(option, Array)}
    return (
        Case(f"poison/{name}", shows, "masked-is-not-felt", arrays, others, also=("nan-safety",)),
    )


MASKED: Final = (
    *_poison(
        "by-mask", NAN, 320, "NaN in a masked key and value is not felt.",
        mask=Array((6,), "constant", "bool", put=(((5,), 0.0),)),
    ),
    *_poison(
        "infinity-by-mask", INF, 321, "Infinity in a masked key and value is not felt.",
        mask=Array((6,), "constant", "bool", put=(((5,), 0.0),)),
    ),
    *_poison(
        "by-bias", NAN, 322, "NaN where the bias is -inf is not felt.",
        bias=bell((4, 6), 322).with_put(((None, 5), -INF)),
    ),
    *_poison(
        "by-causal", NAN, 323, "NaN beyond the diagonal is not felt.",
        causal=True, query_offset=1,
    ),
    *_poison(
        "by-window", NAN, 324, "NaN outside the window is not felt.",
        window=(2, 1), query_offset="start",
    ),
    *_poison(
        "by-length", NAN, 325, "NaN past the key length is not felt.", key_lengths=5
    ),
    Case(
        "poison/some-rows",
        "NaN in a value is felt by the rows that attend it, in its column, and by no other.",
        "masked-is-not-felt",
        poisoned(inputs(326, queries=5, keys=5), NAN, value=(0, 0, 3, 2)),
        {"causal": True},
        also=("nan-safety", "non-finite"),
    ),
    Case(
        "poison/masked-bias",
        "NaN in a bias entry that is masked is not felt.",
        "masked-is-not-felt",
        inputs(
            327, mask=bits((4, 4), 327).with_put(((None, 0), 1.0), ((1, 2), 0.0)),
            bias=bell((4, 4), 327).with_put(((1, 2), NAN)),
        ),
        also=("nan-safety",),
    ),
    Case(
        "poison/other-items",
        "NaN in one item is not felt by the others, nor in one head by the others.",
        "nan",
        poisoned(inputs(328, batch=(2,), heads=2), NAN, key=(0, 1, 2, 3)),
        also=("non-finite",),
    ),
    Case(
        "poison/past-the-lengths",
        "Whatever stands past the lengths of an item is not felt.",
        "masked-is-not-felt",
        poisoned(
            poisoned(
                inputs(329, batch=(2,), heads=2, queries=5, keys=6,
                       query_lengths=counts(5, 3), key_lengths=counts(6, 2)),
                NAN, query=(1, None, 4, None), key=(1, None, 3, None),
            ),
            INF, value=(1, None, 4, None),
        ),
        also=("nan-safety",),
    ),
)  # fmt: skip

SPECIAL: Final = (
    Case(
        "nan/query",
        "NaN in a query makes its row NaN, and no other.",
        "nan",
        poisoned(inputs(340), NAN, query=(0, 0, 1, 2)),
        also=("non-finite",),
    ),
    Case(
        "nan/key",
        "NaN in an attended key makes the rows NaN that attend it.",
        "nan",
        poisoned(inputs(341, queries=5, keys=5), NAN, key=(0, 0, 2, 1)),
        {"causal": True},
        also=("nan-safety", "non-finite"),
    ),
    Case(
        "nan/bias",
        "NaN in an allowed bias entry makes its row NaN.",
        "nan",
        inputs(342, bias=bell((4, 4), 342).with_put(((2, 1), NAN))),
        also=("non-finite",),
    ),
    Case(
        "infinite/bias",
        "A score of +inf makes its row NaN.",
        "infinite-scores",
        inputs(343, bias=bell((4, 4), 343).with_put(((2, 1), INF))),
        also=("non-finite",),
    ),
    Case(
        "infinite/capped",
        "A softcap makes an infinite score finite.",
        "infinite-scores",
        {
            **equal_scores(queries=1, keys=3),
            "query": Array((1, 1, 1, 1), "constant"),
            "key": Array((1, 1, 3, 1), "constant", put=(((0, 0, 1, 0), INF),)),
        },
        {"softcap": 1.0},
        also=("non-finite",),
    ),
    Case(
        "infinite/value",
        "An attended infinite value makes its column infinite, and no other.",
        "infinite-values",
        poisoned(inputs(344), INF, value=(0, 0, 2, 3)),
        also=("non-finite",),
    ),
    Case(
        "infinite/values-of-both-signs",
        "Infinities of both signs in a column make it NaN.",
        "infinite-values",
        poisoned(poisoned(inputs(345), INF, value=(0, 0, 2, 3)), -INF, value=(0, 0, 1, 3)),
        also=("non-finite",),
    ),
)
