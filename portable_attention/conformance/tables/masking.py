"""Which pairs are allowed: masks, biases, positions and lengths."""

from __future__ import annotations

from typing import Any, Final

from portable_attention.conformance.cases import (
    INF,
    Case,
    bell,
    bits,
    counts,
    equal_scores,
    inputs,
    slow,
)
from portable_attention.conformance.generator import Array, words

_ALL_AXES: Final = {
    "full": (2, 4, 3, 5),
    "queries-and-keys": (3, 5),
    "keys": (5,),
    "each-item": (2, 1, 1, 5),
    "each-item-and-query": (2, 1, 3, 5),
    "each-head": (4, 1, 5),
    "each-head-and-query": (1, 4, 3, 5),
}


def _mask(shape: tuple[int, ...], seed: int) -> Array:
    """Return a mask whose rows all have a key."""
    return bits(shape, seed).with_put(((*(None for _ in shape[:-1]), 1), 1.0))


def _broadcast(name: str, shape: tuple[int, ...], seed: int) -> tuple[Case, ...]:
    arrays = inputs(seed, batch=(2,), heads=4, queries=3, keys=5)
    return (
        Case(
            f"mask/{name}",
            f"A mask of shape {shape} broadcasts from the right to (2, 4, 3, 5).",
            "mask-broadcasting",
            {**arrays, "mask": _mask(shape, seed)},
        ),
        Case(
            f"bias/{name}",
            f"A bias of shape {shape} broadcasts from the right to (2, 4, 3, 5).",
            "mask-broadcasting",
            {**arrays, "bias": bell(shape, seed, gain=2.0)},
        ),
    )


MASKS: Final = (
    Case(
        "mask/true-attends",
        "True in a mask lets a query attend; the others keys share the weight.",
        "mask",
        equal_scores(mask=bits((3, 4), 100).with_put(((0, None), 1.0), ((0, 3), 0.0))
                     .with_put(((1, None), 0.0), ((1, 2), 1.0), ((2, 0), 1.0), ((2, 1), 0.0))),
    ),
    Case(
        "mask/random",
        "Masked keys take no weight, and the softmax is over the others.",
        "mask",
        inputs(101, queries=4, keys=6, mask=_mask((4, 6), 101)),
    ),
    Case(
        "mask/large-masked-score",
        "The maximum that is taken off is that of the allowed keys: a masked 200 does not count.",
        "mask",
        {
            **equal_scores(queries=2, keys=3),
            "query": Array((1, 1, 2, 1), "constant", gain=1.0),
            "key": Array((1, 1, 3, 1), "constant", gain=0.0, put=(((0, 0, 1, 0), 200.0),)),
            "mask": Array((3,), "constant", "bool", put=(((1,), 0.0),)),
        },
    ),
    Case(
        "mask/selects",
        "A mask takes a pair out; no finite number does, however low the allowed scores are.",
        "mask",
        {
            **equal_scores(queries=2, keys=3),
            "query": Array((1, 1, 2, 1), "constant", gain=-1e6),
            "key": Array((1, 1, 3, 1), "constant", gain=1e6, put=(((0, 0, 1, 0), 0.0),)),
            "mask": Array((3,), "constant", "bool", put=(((1,), 0.0),)),
        },
    ),
    Case(
        "bias/added",
        "The bias is added to the scaled scores.",
        "bias",
        inputs(102, width=16, bias=bell((4, 4), 102, gain=2.0)),
    ),
    Case(
        "bias/infinite",
        "A bias of -inf takes the pair out.",
        "bias",
        inputs(
            103,
            bias=bell((4, 4), 103).with_put(((0, 1), -INF), ((2, None), -INF), ((2, 2), 0.0)),
        ),
    ),
    Case(
        "bias/very-negative",
        "A finite bias never masks, however negative: the pairs are unlikely, and equally so.",
        "bias",
        equal_scores(bias=Array((3, 4), "constant", gain=-1e30)),
    ),
    Case(
        "bias/one-column",
        "A bias of shape (Lq, 1) is the same for all keys and shows in the lse alone.",
        "mask-broadcasting",
        inputs(104, queries=4, keys=6, bias=bell((4, 1), 104, gain=3.0)),
    ),
    *(case for i, (name, shape) in enumerate(_ALL_AXES.items())
      for case in _broadcast(name, shape, 110 + i)),
    Case(
        "mask/of-items-in-groups",
        "With grouped heads the batch axis of a mask is that of the batch, not of the groups.",
        "mask-broadcasting",
        inputs(120, batch=(2,), heads=4, kv_heads=2, queries=3, keys=5,
               mask=_mask((2, 1, 1, 5), 120)),
    ),
    Case(
        "mask/of-heads-in-groups",
        "With grouped heads the head axis of mask and bias is that of the query heads.",
        "mask-broadcasting",
        inputs(121, batch=(2,), heads=6, kv_heads=2, queries=3, keys=5,
               mask=_mask((6, 1, 5), 121), bias=bell((1, 6, 3, 1), 121)),
    ),
    slow(Case(
        "mask/many-tiles",
        "Every query has its own row of the mask, in later tiles too.",
        "mask",
        inputs(122, heads=2, queries=150, keys=170, mask=_mask((150, 170), 122)),
    )),
    Case(
        "mask/one-tile-closed",
        "A row whose first keys are all masked comes out as if they were not there.",
        "mask",
        inputs(123, queries=5, keys=150,
               mask=Array((5, 150), "bits", "bool", seed=9, put=(
                   ((0, None), 0.0), ((0, 149), 1.0), ((1, None), 0.0), ((1, 70), 1.0),
                   ((2, None), 0.0), ((2, 0), 1.0)))),
    ),
)  # fmt: skip

POSITIONS: Final = (
    Case(
        "causal/square",
        "Query i attends the keys up to i, itself included.",
        "causal",
        equal_scores(queries=4),
        {"causal": True},
    ),
    Case(
        "causal/random",
        "The same with scores that differ.",
        "causal",
        inputs(130, heads=2, queries=7, keys=7),
        {"causal": True},
    ),
    Case(
        "causal/start",
        'With "start" the diagonal begins in the upper left corner.',
        "query-offset",
        equal_scores(queries=3, keys=5),
        {"causal": True, "query_offset": "start"},
    ),
    Case(
        "causal/end",
        'With "end" the diagonal ends in the lower right corner.',
        "query-offset",
        equal_scores(queries=3, keys=5),
        {"causal": True, "query_offset": "end"},
    ),
    Case(
        "causal/offset",
        "Row 0 stands at the given offset.",
        "query-offset",
        equal_scores(queries=3, keys=6),
        {"causal": True, "query_offset": 2},
    ),
    Case(
        "causal/offsets-of-items",
        "An array of offsets has one for each item.",
        "query-offset",
        inputs(131, batch=(3,), heads=2, queries=3, keys=6, query_offset=counts(0, 3, 5)),
        {"causal": True},
    ),
    Case(
        "window/left-and-right",
        "A window counts the keys on each side of the own position.",
        "window",
        equal_scores(queries=7, keys=7),
        {"window": (2, 1)},
    ),
    Case(
        "window/own-position",
        "A window of (0, 0) is the own position alone.",
        "window",
        equal_scores(queries=4),
        {"window": (0, 0)},
    ),
    Case(
        "window/open-left",
        "None on the left is no limit there.",
        "window",
        equal_scores(queries=5, keys=5),
        {"window": (None, 1)},
    ),
    Case(
        "window/open-right",
        "None on the right is no limit there, and a window needs no causal flag.",
        "window",
        equal_scores(queries=5, keys=5),
        {"window": (1, None)},
    ),
    Case(
        "window/wider-than-the-call",
        "A window that is wider than the call restricts nothing, and a narrow side still does.",
        "window",
        equal_scores(queries=5, keys=5),
        {"window": (1_000_000, 0)},
    ),
    Case(
        "window/with-causal",
        "A window and the diagonal both hold.",
        "composition",
        inputs(132, queries=9, keys=9),
        {"window": (3, 3), "causal": True},
    ),
    Case(
        "window/at-an-offset",
        "A window moves with the positions.",
        "window",
        inputs(133, queries=4, keys=12),
        {"window": (3, 1), "query_offset": 5},
    ),
    Case(
        "lengths/keys",
        "Keys past the length of their item are not attended.",
        "lengths",
        inputs(134, batch=(3,), heads=2, queries=3, keys=6, key_lengths=counts(6, 1, 4)),
    ),
    Case(
        "lengths/one-for-all",
        "An int is the length of all items.",
        "lengths",
        inputs(135, batch=(2,), queries=3, keys=6),
        {"key_lengths": 4},
    ),
    Case(
        "lengths/of-two-batch-axes",
        "Lengths and offsets are arrays over all batch axes, and broadcast to them.",
        "lengths",
        inputs(
            140,
            batch=(2, 3),
            queries=3,
            keys=6,
            key_lengths=Array((2, 3), "index", "int64", put=(((0, 0), 6),)),
            query_offset=Array((2, 1), "index", "int64", gain=2),
        ),
        {"causal": True},
    ),
    Case(
        "lengths/of-the-whole-batch",
        "A length in an array of one number is that of all items.",
        "lengths",
        inputs(141, batch=(3,), queries=3, keys=6, key_lengths=counts(4)),
    ),
    Case(
        "causal/far-offset",
        "An offset beyond all keys lets every key be attended.",
        "query-offset",
        inputs(142, queries=3, keys=5),
        {"causal": True, "query_offset": 100_000},
    ),
    Case(
        "lengths/causal-end",
        'With "end" the last valid query stands at the last valid key of its item.',
        "query-offset",
        inputs(136, batch=(3,), queries=3, keys=7, key_lengths=counts(7, 4, 3)),
        {"causal": True, "query_offset": "end"},
    ),
    Case(
        "lengths/causal-square",
        "With equal lengths of the arrays the offset is 0, whatever the valid lengths are.",
        "ambiguous-corner",
        inputs(137, batch=(2,), queries=6, keys=6, key_lengths=counts(6, 4)),
        {"causal": True},
    ),
    slow(Case(
        "window/many-tiles",
        "A window that is narrower than a tile, over many tiles.",
        "window",
        inputs(138, heads=2, queries=300, keys=300),
        {"window": (37, 0)},
    )),
    slow(Case(
        "causal/many-tiles",
        "The diagonal crosses tiles at an offset that is no multiple of anything.",
        "causal",
        inputs(139, heads=2, queries=131, keys=257),
        {"causal": True, "query_offset": 97},
    )),
)  # fmt: skip


def _together(number: int) -> Case:
    """Return a call with about half of the options, chosen by the words of a seed."""
    on = [bool(word >> 63) for word in words(9000 + number, 12)]
    queries, keys = 6 + number % 5, 7 + number % 4
    arrays = inputs(
        160 + number,
        batch=(2,),
        heads=4,
        kv_heads=2 if on[0] else 4,
        queries=queries,
        keys=keys,
        value_width=5 if on[1] else 8,
    )
    options: dict[str, Any] = {}
    if on[2]:
        arrays["mask"] = bits((2, 1, queries, keys), 160 + number, 0.75)
    if on[3]:
        arrays["bias"] = bell((4, queries, keys), 160 + number)
        arrays["bias"] = arrays["bias"].with_put(((None, None, number % keys), -INF))
    if on[4]:
        arrays["key_lengths"] = counts(keys, keys - 2)
    if on[5]:
        arrays["query_lengths"] = counts(queries - 1, queries)
    if on[6]:
        arrays["sinks"] = bell((4,), 660 + number)
    if on[7] or on[8]:
        options["query_offset"] = "end" if on[9] else 1
        options |= {"causal": True} if on[7] else {}
        options |= {"window": (3, 1)} if on[8] else {}
    if on[10]:
        options["softcap"] = 3.0
    if on[11]:
        options["scale"] = 0.6
    return Case(
        f"together/{number:02}",
        "Options that take part together: " + ", ".join([*list(arrays)[3:], *options]) + ".",
        "composition",
        arrays,
        options,
    )


TOGETHER: Final = tuple(_together(number) for number in range(24))

COMPOSED: Final = (
    Case(
        "composed/mask-and-causal",
        "A mask and the diagonal both hold.",
        "composition",
        inputs(150, queries=6, keys=6, mask=bits((6, 6), 150).with_put(((None, 0), 1.0))),
        {"causal": True},
    ),
    Case(
        "composed/mask-and-bias",
        "A mask and a bias both hold.",
        "composition",
        inputs(151, mask=bits((4, 4), 151).with_put(((None, 0), 1.0)), bias=bell((4, 4), 151)),
    ),
    Case(
        "composed/everything",
        "All options together: each takes part, none replaces another.",
        "composition",
        inputs(
            152, batch=(2,), heads=4, kv_heads=2, queries=9, keys=12, width=16, value_width=5,
            mask=bits((9, 12), 152, 0.8).with_put(((None, 3), 1.0)),
            bias=bell((2, 1, 1, 12), 152).with_put(((0, None, None, 2), -INF)),
            key_lengths=counts(12, 10),
        ),
        {"causal": True, "window": (5, 2), "query_offset": 3, "softcap": 4.0, "scale": 0.4},
    ),
)  # fmt: skip
