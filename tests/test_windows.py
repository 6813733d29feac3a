"""Sliding windows in host memory, long enough that blocks of rows are made a batch of their own."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from portable_attention import attention, explain
from portable_attention.core import eager, host, windows
from portable_attention.core.heads import Heads
from portable_attention.core.spec import validate

from . import oracle
from .dtypes import numpy_dtype
from .problems import make_inputs

WINDOWS = [(0, 0), (5, 0), (64, 0), (256, 0), (100, 50), (0, 130), (700, 5), (3000, 3000)]


def inputs_of(length=1500, keys=None, **shape):
    shape = {"batch": (), "heads": 1, "width": 16, "value_width": 8, **shape}
    return make_inputs(queries=length, keys=length if keys is None else keys, **shape)


def pieces_of(inputs, **options):
    return windows.pieces(validate(*inputs.values(), engine="auto", **options))


def check(inputs, tolerance=3e-6, *, blocks=True, **options):
    """Compare a call with the dense formula in float64."""
    position = {name: options[name] for name in ("window", "query_offset") if name in options}
    if blocks is not None:
        assert (len(pieces_of(inputs, **position)) > 1) == blocks
    before = {name: array.tobytes() for name, array in inputs.items()}
    output, lse = attention(**inputs, **options, return_lse=True)
    for name, array in inputs.items():
        assert array.tobytes() == before[name]
    expected = oracle.attention(**inputs, **options)
    for found, right in zip((output, lse), expected, strict=True):
        np.testing.assert_allclose(found.astype(np.float64), right, tolerance, tolerance)


def bits(result):
    return [array.tobytes() for array in result]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_windows(window):
    check(inputs_of(), window=window, blocks=sum(window) < 256 or None)


@pytest.mark.parametrize("length", [320, 383, 448, 511, 512, 513, 577, 1023, 1151])
def test_lengths_that_blocks_do_not_divide(length):
    check(inputs_of(length), window=(40, 0), blocks=None)
    check(inputs_of(length), window=(7, 20), blocks=None)


@pytest.mark.parametrize("offset", ["start", "end", 0, 17, 200, -100, -1190, 1190, 10**6, -(10**9)])
@pytest.mark.parametrize("lengths", [(1200, 1200), (1000, 1300), (1300, 1000)])
def test_offsets(offset, lengths):
    inputs = inputs_of(lengths[0], lengths[1])
    check(inputs, window=(40, 30), query_offset=offset, blocks=None)


def test_rows_without_keys_are_empty():
    inputs = inputs_of(1300, 700)
    output, lse = attention(**inputs, window=(10, 0), query_offset="start", return_lse=True)
    assert (output[0, 710:] == 0).all()
    assert (lse[0, 710:] == -np.inf).all()
    check(inputs, window=(10, 0), query_offset="start")


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"softcap": 2.0},
        {"softcap": 50.0},
        {"scale": 3.0},
        {"sinks": np.linspace(-2, 3, 6).astype(np.float32)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_options_in_grouped_heads_and_a_batch(options):
    inputs = inputs_of(700, batch=(2,), heads=6, key_heads=2)
    check(inputs, 5e-5 if "scale" in options else 1e-5, window=(30, 5), **options)


def test_batch_axes_that_are_broadcast():
    whole = inputs_of(640, batch=(2, 3), heads=2)
    inputs = {**whole, "key": whole["key"][:1], "value": whole["value"][:, :1]}
    output, lse = attention(**inputs, window=(50, 0), return_lse=True)
    inputs = {
        name: np.broadcast_to(array, (2, 3, *array.shape[2:])) for name, array in inputs.items()
    }
    expected = oracle.attention(**inputs, window=(50, 0))
    np.testing.assert_allclose(output, expected.output, 3e-6, 3e-6)
    np.testing.assert_allclose(lse, expected.lse, 3e-6, 3e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_dtypes(dtype):
    pytest.importorskip("ml_dtypes", reason="needs ml_dtypes")
    inputs = {name: array.astype(numpy_dtype(dtype)) for name, array in inputs_of(900).items()}
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2, "float64": 1e-13}[dtype]
    check(inputs, tolerance, window=(100, 20))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_strides(dtype):
    whole = {
        name: array.astype(dtype)
        for name, array in inputs_of(1800, heads=2, width=32, value_width=24).items()
    }
    expected = bits(
        attention(*(a[:, ::2].copy() for a in whole.values()), window=(60, 0), return_lse=True)
    )
    found = attention(*(a[:, ::2] for a in whole.values()), window=(60, 0), return_lse=True)
    assert bits(found) == expected
    expected = bits(attention(*(a[..., ::-1, ::-1].copy() for a in whole.values()), window=(60, 0)))
    assert (
        bits(attention(*(a[..., ::-1, ::-1] for a in whole.values()), window=(60, 0))) == expected
    )
    columns = [np.asfortranarray(a) for a in whole.values()]
    expected = bits(attention(*whole.values(), window=(60, 0)))
    assert bits(attention(*columns, window=(60, 0))) == expected
    heads_last = [np.ascontiguousarray(np.swapaxes(a, 0, 1)) for a in whole.values()]
    found = np.swapaxes(attention(*heads_last, window=(60, 0), layout="blhd"), 0, 1)
    assert bits(found) == expected


@pytest.mark.parametrize("size", [1.0, 12.0], ids=["small scores", "large scores"])
@pytest.mark.parametrize(
    ("name", "garbage"),
    [
        *(
            (name, found)
            for name in ("query", "key", "value")
            for found in (np.nan, np.inf, -np.inf)
        ),
        ("value", 3e38),  # in float32, the scores of such a key overflow
    ],
)
def test_garbage_is_felt_where_it_is_attended_alone(name, garbage, size):
    inputs = inputs_of(900, heads=2)
    inputs["query"] = inputs["query"] * np.float32(size)
    window = (70, 3)
    clean = attention(**inputs, window=window, return_lse=True)
    dirty = {**inputs, name: inputs[name].copy()}
    dirty[name][0, 400:402, :3] = garbage
    found = attention(**dirty, window=window, return_lse=True)
    rows = np.arange(900)
    felt = (rows >= 400 - 3) & (rows <= 401 + 70) if name != "query" else (rows // 2 == 200)
    for one, other in zip(found, clean, strict=True):
        # Bit for bit elsewhere; another way of counting may be taken in the same block.
        np.testing.assert_allclose(one[0, ~felt], other[0, ~felt], 1e-5, 1e-6)
        assert bits([one[1]]) == bits([other[1]])
    expected = oracle.attention(**dirty, window=window)
    with np.errstate(all="ignore"):
        for one, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, right.astype(np.float32), 1e-4, 1e-5)


@pytest.mark.parametrize("window", [(0, 0), (2, 0), (90, 10)], ids=str)
@pytest.mark.parametrize("loud", ["none", "a head", "blocks", "all"])
def test_a_head_has_the_same_bits_alone(window, loud):
    """Also where the scores of some blocks are large, so that these take another way."""
    inputs = inputs_of(1000, batch=(3,), heads=4, key_heads=2)
    if loud != "none":
        place = {"a head": (1, 2), "all": (...,), "blocks": (..., slice(0, 1, 1), slice(300, 600))}
        inputs["query"][place[loud]] *= 20
    inputs["value"][2, 0, 500] = np.nan
    together = attention(**inputs, window=window, return_lse=True)
    expected = oracle.attention(**inputs, window=window)
    np.testing.assert_allclose(together[0], expected.output, 1e-4, 2e-5)
    for item in range(3):
        for head in range(4):
            alone = attention(
                inputs["query"][item, head],
                inputs["key"][item, head // 2],
                inputs["value"][item, head // 2],
                window=window,
                return_lse=True,
            )
            assert bits(alone) == bits(array[item, head] for array in together)


def test_bits_do_not_depend_on_threads(monkeypatch):
    inputs = inputs_of(3000, heads=2)
    several = bits(attention(**inputs, window=(100, 0), return_lse=True))
    monkeypatch.setattr("portable_attention.core.threads.usable_threads", lambda: 1)
    assert bits(attention(**inputs, window=(100, 0), return_lse=True)) == several


@pytest.mark.parametrize("window", [(0, 0), (30, 0), (200, 100), (600, 0), (900, 0)], ids=str)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_tiles_that_are_explained_are_those_of_the_call(monkeypatch, window, batch):
    inputs = inputs_of(2300, heads=2, batch=batch)
    seen = {"full": [], "mixed": []}  # to lists, threads add without losing any
    pairs = []
    tiles = eager.Part.tiles

    def counting(self, rows, *rest, **named):
        for met in tiles(self, rows, *rest, **named):
            heads = int(np.prod(self.lead))
            seen["full" if met.allowed is None else "mixed"].append(heads)
            pairs.append(heads * (rows[1] - rows[0]) * (met.columns[1] - met.columns[0]))
            yield met

    monkeypatch.setattr(Heads, "tiles", counting)
    for again in ("_attend_exactly", "_attend_again", "_sum_again"):  # a second look at a few rows
        monkeypatch.setattr(host, again, lambda *_: None)
    found = explain(**inputs, window=window)
    attention(**inputs, window=window)
    if len(pieces_of(inputs, window=window)) > 1:
        assert (found.full, found.mixed) == (sum(seen["full"]), sum(seen["mixed"]))
        assert abs(found.flops / (2 * sum(pairs) * (16 + 8)) - 1) < 0.3
    assert found.skipped > 0


def test_memory_does_not_grow_with_the_length():
    foreseen = set()
    for length in (1 << 15, 1 << 17):
        query = np.zeros((1, length, 16), np.float16)
        foreseen.add(explain(query, query, query, window=(128, 0)).memory)
        tracemalloc.start()
        attention(query, query, query, window=(128, 0))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak - query.nbytes - 4 * length < max(foreseen)
    assert len(foreseen) == 1
    assert max(foreseen) < 16 << 20
