"""Shapes, heads, tiles and memory; what neighbours may not change; what is refused."""

from __future__ import annotations

from typing import Final

from portable_attention.conformance.cases import Case, bell, bits, counts, inputs, slow
from portable_attention.conformance.generator import Array

SHAPES: Final = (
    Case(
        "shapes/two-heads",
        "Each head attends on its own.",
        "shapes",
        inputs(200, heads=2, width=1),
    ),
    Case(
        "shapes/two-items",
        "Each batch item attends on its own.",
        "batch-axes",
        inputs(201, batch=(2,), width=1),
    ),
    Case(
        "shapes/all-different",
        "Every axis of another size: B = 2, Hq = 3, Lq = 4, Lk = 5, D = 8, Dv = 6.",
        "shapes",
        inputs(202, batch=(2,), heads=3, queries=4, keys=5, value_width=6),
        {"scale": 1.0},
    ),
    Case(
        "heads/grouped-in-order",
        "Query head h reads key/value head h // (Hq // Hkv), not h % Hkv.",
        "grouped-heads",
        inputs(203, heads=6, kv_heads=2, width=1),
    ),
    Case(
        "heads/multi-query",
        "A single key/value head serves all query heads.",
        "grouped-heads",
        inputs(204, batch=(2,), heads=4, kv_heads=1, width=1),
    ),
    Case(
        "heads/as-many-as-items",
        "As many groups as items: the two axes are not confused.",
        "grouped-heads",
        inputs(205, batch=(2,), heads=4, kv_heads=2, queries=2, width=1),
    ),
    Case(
        "batch/broadcast",
        "Batch axes of size 1 broadcast against those of the other inputs.",
        "batch-axes",
        {
            **inputs(206, batch=(3,), heads=2, width=1),
            "key": bell((1, 2, 4, 1), 206),
            "value": bell((1, 2, 4, 1), 207),
        },
    ),
    Case(
        "ranks/one-head",
        "Three matrices are one head, and give a matrix.",
        "rank",
        {"query": bell((4, 1), 208), "key": bell((5, 1), 209), "value": bell((5, 1), 210)},
    ),
    Case(
        "ranks/no-batch",
        "Arrays of three axes have heads and no batch.",
        "rank",
        inputs(211, batch=(), heads=3, width=1),
    ),
    Case(
        "ranks/two-batch-axes",
        "There may be several batch axes.",
        "batch-axes",
        inputs(212, batch=(2, 3), heads=2, width=1),
    ),
    Case(
        "ranks/unequal",
        "Arrays of lower rank get leading axes of size 1.",
        "rank",
        {
            "query": bell((2, 3, 4, 1), 213),
            "key": bell((3, 5, 1), 214),
            "value": bell((3, 5, 1), 215),
        },
    ),
)

LAYOUT: Final = (
    Case(
        "layout/heads-last-plain",
        'layout="blhd" takes and gives (B, L, H, D).',
        "layout",
        {
            "query": bell((1, 3, 4, 8), 230),
            "key": bell((1, 5, 4, 8), 231),
            "value": bell((1, 5, 4, 8), 232),
        },
        {"layout": "blhd"},
    ),
    Case(
        "layout/heads-last",
        'layout="blhd" takes and gives (B, L, H, D); the lse stays (B, H, L).',
        "layout",
        {
            "query": bell((2, 3, 4, 8), 216),
            "key": bell((2, 5, 2, 8), 217),
            "value": bell((2, 5, 2, 6), 218),
        },
        {"layout": "blhd"},
    ),
    Case(
        "layout/heads-last-masked",
        "In that layout a mask is still (B, H, Lq, Lk).",
        "layout",
        {
            "query": bell((1, 3, 3, 8), 219),
            "key": bell((1, 3, 3, 8), 220),
            "value": bell((1, 3, 3, 8), 221),
            "mask": bits((3, 3, 3), 219).with_put(((None, None, 0), 1.0)),
        },
        {"layout": "blhd"},
    ),
)

ZERO: Final = (
    Case(
        "zero/keys",
        "Without keys every row is empty.",
        "zero-sizes",
        inputs(222, batch=(2,), heads=2, queries=3, keys=0),
    ),
    Case(
        "zero/queries",
        "Without queries there is an output without rows.",
        "zero-sizes",
        inputs(223, queries=0, keys=3),
    ),
    Case(
        "zero/batch",
        "Without items there is an output without items.",
        "zero-sizes",
        inputs(224, batch=(0,), heads=2),
    ),
    Case(
        "zero/width",
        "With D = 0 every score is 0 and every weight the same.",
        "zero-sizes",
        inputs(225, width=0, value_width=3),
    ),
    Case(
        "zero/value-width",
        "With Dv = 0 there is an output without columns.",
        "zero-sizes",
        inputs(226, value_width=0),
    ),
)

_LENGTHS: Final = ((1, 5), (3, 7), (5, 17), (17, 33), (33, 65), (65, 129), (100, 257), (130, 1000))


def _with_a_loud_tail(arrays: dict[str, Array]) -> dict[str, Array]:
    """Return a call whose last value is large: among thousands of keys it must not get lost."""
    keys = arrays["value"].shape[-2]
    return {**arrays, "value": arrays["value"].with_put(((None, None, keys - 1, None), 64.0))}


TILES: Final = (
    *(
        Case(
            f"tiles/{queries}-by-{keys}",
            f"{queries} queries and {keys} keys: no tail is lost, and tiles are merged rightly.",
            "block-size",
            _with_a_loud_tail(inputs(240 + i, queries=queries, keys=keys, width=16)),
            quick=keys < 1000,
        )
        for i, (queries, keys) in enumerate(_LENGTHS)
    ),
    Case(
        "tiles/whole",
        "64 queries and 128 keys: sizes that tiles like.",
        "block-size",
        inputs(250, heads=2, queries=64, keys=128, width=32),
    ),
    slow(
        Case(
            "tiles/long",
            "3000 keys and a query: a long row.",
            "block-size",
            _with_a_loud_tail(inputs(251, heads=2, queries=1, keys=3001, width=32)),
        )
    ),
)

MEMORY: Final = (
    Case(
        "memory/layouts",
        "How an array lies in memory changes nothing, and read-only inputs are taken.",
        "purity",
        inputs(260, batch=(2,), heads=3, queries=4, keys=5),
        check="memory-layouts",
    ),
    Case(
        "memory/with-everything",
        "Inputs are left as they are, with every option in use.",
        "purity",
        inputs(
            261, batch=(2,), heads=2, queries=4, keys=4,
            mask=bits((4, 4), 261).with_put(((None, 0), 1.0)), bias=bell((4, 4), 261),
        ),
        {"causal": True},
    ),
)  # fmt: skip

INVARIANCE: Final = (
    Case(
        "same/bits",
        "The same call gives the same bits.",
        "determinism",
        inputs(270, batch=(2,), heads=2, queries=20, keys=45, width=16),
        check="same-bits",
    ),
    slow(
        Case(
            "same/bits-of-a-long-call",
            "The same long call gives the same bits.",
            "determinism",
            inputs(271, batch=(2,), heads=4, queries=128, keys=400, width=32),
            {"causal": True, "query_offset": "end"},
            check="same-bits",
        )
    ),
    Case(
        "same/neighbours",
        "What an item gets does not depend on the other items of the batch.",
        "determinism",
        inputs(
            272, batch=(3,), heads=2, queries=5, keys=9, key_lengths=counts(9, 2, 6),
        ),
        check="neighbours",
    ),
    Case(
        "same/neighbours-plain",
        "The same without lengths.",
        "determinism",
        inputs(273, batch=(4,), heads=2, kv_heads=1, queries=6, keys=20),
        check="neighbours",
    ),
    Case(
        "same/row-alone",
        "A row alone is a row of the whole: decoding continues a prefill.",
        "query-offset",
        inputs(274, heads=4, kv_heads=2, queries=9, keys=9),
        {"causal": True},
        check="rows-alone",
    ),
    Case(
        "same/row-alone-in-a-window",
        "The same in a window.",
        "query-offset",
        inputs(275, heads=2, queries=20, keys=20),
        {"causal": True, "window": (4, 0)},
        check="rows-alone",
    ),
    Case(
        "same/decoding",
        "One query at the end of a cache that is filled in part is a row of the prefill.",
        "query-offset",
        inputs(276, heads=2, queries=8, keys=8),
        {"causal": True},
        check="decoding",
    ),
    Case(
        "same/split-keys",
        "Two parts of the keys, merged by their lse, are the whole.",
        "splitting-a-call",
        inputs(277, heads=2, queries=5, keys=31),
        check="split-keys",
    ),
    Case(
        "same/split-keys-masked",
        "The same where some rows have no key in one of the parts, or in both.",
        "merge-states",
        inputs(
            278, queries=5, keys=12,
            mask=bits((5, 12), 278).with_put(
                ((0, None), 0.0), ((1, None), 0.0), ((1, 0), 1.0), ((2, None), 0.0), ((2, 11), 1.0)
            ),
        ),
        check="split-keys",
    ),
)  # fmt: skip


def _refused(name: str, shows: str, rule: str, arrays: dict[str, Array], **options: object) -> Case:
    return Case(f"refused/{name}", shows, rule, arrays, options, check="refusal")


_PLAIN: Final = inputs(280, heads=2)

REFUSALS: Final = (
    _refused(
        "no-corner",
        "causal with Lq != Lk and no offset is refused: libraries disagree about the corner.",
        "ambiguous-corner",
        inputs(281, queries=3, keys=5),
        causal=True,
    ),
    _refused(
        "no-corner-of-a-window",
        "A window with Lq != Lk and no offset is refused, too.",
        "ambiguous-corner",
        inputs(282, queries=3, keys=5),
        window=(None, None),
    ),
    _refused(
        "integer-mask",
        "An integer mask is refused: in some libraries it is added.",
        "mask",
        {**_PLAIN, "mask": Array((4, 4), "constant", "int64")},
    ),
    _refused(
        "floating-mask",
        "A floating mask is refused: it is a bias.",
        "mask",
        {**_PLAIN, "mask": bell((4, 4), 283)},
    ),
    _refused(
        "mask-too-long",
        "A mask that is longer than the keys is refused.",
        "mask-broadcasting",
        {**_PLAIN, "mask": bits((4, 5), 284)},
    ),
    _refused(
        "bias-of-higher-rank",
        "A bias that would enlarge the scores is refused.",
        "mask-broadcasting",
        {**_PLAIN, "bias": bell((3, 1, 2, 4, 4), 285)},
    ),
    _refused(
        "value-of-other-length",
        "Keys and values of different length are refused.",
        "shapes",
        {**_PLAIN, "value": bell((1, 2, 5, 8), 286)},
    ),
    _refused(
        "key-of-other-width",
        "Queries and keys of different width are refused.",
        "shapes",
        {**_PLAIN, "key": bell((1, 2, 4, 7), 287)},
    ),
    _refused(
        "heads-that-do-not-divide",
        "Hq that is no multiple of Hkv is refused.",
        "grouped-heads",
        inputs(288, heads=3, kv_heads=2),
    ),
    _refused(
        "unequal-dtypes",
        "Inputs of unequal dtypes are refused.",
        "dtypes",
        {**_PLAIN, "value": bell((1, 2, 4, 8), 289, "float64")},
    ),
    _refused(
        "integer-inputs",
        "Integer inputs are refused.",
        "dtypes",
        {name: Array((1, 1, 4, 8), "index", "int64") for name in ("query", "key", "value")},
    ),
    _refused("softcap-of-zero", "A softcap of 0 is refused.", "softcap", _PLAIN, softcap=0.0),
    _refused(
        "infinite-scale",
        "An infinite scale is refused.",
        "scale",
        _PLAIN,
        scale=float("inf"),
    ),
    _refused(
        "negative-window",
        "A negative side of a window is refused.",
        "window",
        _PLAIN,
        window=(-1, 0),
    ),
    _refused(
        "length-out-of-range",
        "A length beyond the axis is refused.",
        "lengths",
        _PLAIN,
        key_lengths=5,
    ),
    _refused("unknown-layout", "An unknown layout is refused.", "errors", _PLAIN, layout="bshd"),
    _refused("unknown-option", "An unknown option is refused.", "errors", _PLAIN, masks=None),
)
