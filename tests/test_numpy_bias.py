"""Biases beside small scores in NumPy: no running maximum where they allow it, exact everywhere."""

from __future__ import annotations

import numpy as np
import pytest

from portable_attention import Dropout, attention
from portable_attention.backends.numpy_backend import HostOps
from portable_attention.core import heads, host

from .accuracy import assert_accurate, reference_of
from .dropout_reference import keep_mask
from .dtypes import numpy_dtype
from .problems import make_inputs

LENGTH = 300
HEADS = 3
ROW, KEY = np.arange(LENGTH)[:, np.newaxis], np.arange(LENGTH)
SLOPES = np.array([0.5, 0.03, 0.004])[:, np.newaxis, np.newaxis]
f = np.float32


def normal(*shape, size=1.0):
    return (size * np.random.default_rng(7).standard_normal(shape)).astype(f)


def where(condition, number, other=0.0):
    return np.where(condition, f(number), f(other))


# Those of which every block of rows is computed without a running maximum, ...
BOUNDED = {
    "normal": normal(HEADS, LENGTH, LENGTH),
    "of all heads": normal(LENGTH, LENGTH),
    "of keys": normal(HEADS, 1, LENGTH),
    "of rows": normal(HEADS, LENGTH, 1),
    "a number": normal(1, 1),
    "as T5 has it": 4 * np.log1p(np.abs(ROW - KEY), dtype=f) - 10,
    "distances": (-SLOPES * np.abs(ROW - KEY)).astype(f),
    "causal, -inf": where(ROW < KEY, -np.inf),
    "causal, -1e9": where(ROW < KEY, -1e9),
    "causal, smallest": where(ROW < KEY, np.finfo(f).min),
    "padded keys": where(KEY > 200, -1e9),
    "half of the pairs": where(normal(HEADS, LENGTH, LENGTH) < 0, -np.inf),
    "empty rows": where(ROW % 5 == 1, -np.inf) + normal(LENGTH, LENGTH),
}
# ... some, with rows that are computed again, ...
AGAIN = {
    "a row of -1e9": where(ROW == 133, -1e9),
    "a row of -100": where(ROW == 133, -100),
    "a row of -12": where(ROW == 133, -12),
    "one large": where((ROW == 133) & (KEY == 5), 60),
    "one huge": where((ROW == 133) & (KEY == 5), 1e30),
    "one infinite": where((ROW == 133) & (KEY == 5), np.inf),
    "one NaN": where((ROW == 133) & (KEY == 5), np.nan),
    "one key of opposite sign": where(ROW == 133, -np.inf) + where((ROW == KEY), 0, 1),
    "half of the rows": where(ROW % 16 > 8, -1e9),
}
# ... and none.
RUNNING = {
    "all -1e9": np.full((1, 1), -1e9, f),
    "all 1e30": np.full((LENGTH, LENGTH), 1e30, f),
    "growing": (2 * ROW + 0 * KEY).astype(f) + 30,
    "NaN in all rows": where(KEY == 5, np.nan) + 0 * ROW.astype(f),
}
BIASES = {**BOUNDED, **AGAIN, **RUNNING}
OPTIONS = {
    "alone": {},
    "causal": {"causal": True},
    "mask": {"mask": normal(HEADS, LENGTH, LENGTH) < 1},
    "lengths": {"query_lengths": 290, "key_lengths": 270},
    "window": {"window": (70, 20)},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": np.array([-1, 0, 2], f)},
}


@pytest.fixture
def ways(monkeypatch):
    """The ways that blocks of rows take, in the order in which they are begun."""
    seen = []
    for name in ("attend_bounded", "attend_any"):
        taken = getattr(host, name)

        def counting(*given, taken=taken, name=name, **named):
            seen.append(name)
            return taken(*given, **named)

        monkeypatch.setattr(host, name, counting)
    return seen


def inputs_of(dtype="float32", **shape):
    inputs = make_inputs(
        batch=(), queries=LENGTH, keys=LENGTH, width=16, **{"heads": HEADS, **shape}
    )
    return {name: (array / 2).astype(numpy_dtype(dtype)) for name, array in inputs.items()}


def bits(result):
    return [array.tobytes() for array in result]


@pytest.mark.parametrize("name", BIASES)
def test_the_way_that_is_taken(ways, name):
    attention(**inputs_of(), bias=BIASES[name])
    assert "attend_any" not in ways or name not in BOUNDED
    assert "attend_bounded" not in ways or name not in RUNNING


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", BIASES)
def test_results(name, options):
    inputs = inputs_of()
    bias = BIASES[name]
    given = bias.copy()
    given.flags.writeable = False
    output, lse = attention(**inputs, bias=given, **OPTIONS[options], return_lse=True)
    np.testing.assert_array_equal(given, bias)
    reference = reference_of(**inputs, bias=bias, **OPTIONS[options])
    assert_accurate(output, lse, reference)


@pytest.mark.parametrize("name", BIASES)
def test_dropout(name):
    inputs, bias = inputs_of(), BIASES[name]
    found = attention(**inputs, bias=bias, dropout=Dropout(0.3, 5), return_lse=True)
    kept = keep_mask(0.3, 5, (HEADS, LENGTH, LENGTH))
    assert_accurate(*found, reference_of(**inputs, bias=bias, keep=kept, rate=0.3))


@pytest.mark.parametrize("block_size", [(64, 64), (17, 300), (300, 33)], ids=str)
@pytest.mark.parametrize("name", BIASES)
def test_tilings(name, block_size):
    inputs = inputs_of()
    options = {"bias": BIASES[name], "causal": True}
    found = attention(**inputs, **options, block_size=block_size, return_lse=True)
    assert_accurate(*found, reference_of(**inputs, **options))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("of_bias", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes(ways, dtype, of_bias):
    pytest.importorskip("ml_dtypes", reason="needs ml_dtypes")
    inputs = inputs_of(dtype)
    bias = normal(HEADS, LENGTH, LENGTH).astype(numpy_dtype(of_bias))
    found = attention(**inputs, bias=bias, return_lse=True)
    assert set(ways) == {"attend_bounded"}
    assert_accurate(*found, reference_of(**inputs, bias=bias))


@pytest.mark.parametrize("number", [1e300, -1e300])
def test_a_finite_bias_beyond_float32_is_no_mask(number):
    bias = np.zeros((LENGTH, LENGTH))
    bias[::50] = number
    inputs = inputs_of()
    output, lse = attention(**inputs, bias=bias, return_lse=True)
    plain = attention(**inputs)
    np.testing.assert_allclose(output[:, 1:50], plain[:, 1:50], 1e-5, 1e-6)
    mean = inputs["value"].mean(axis=1)
    np.testing.assert_allclose(output[:, 50], mean, 1e-4, 1e-5)
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30, 90.0])
@pytest.mark.parametrize("options", ["causal", "mask", "window", "lengths"])
def test_a_masked_bias_decides_no_bits(options, poison):
    inputs, options = inputs_of(), OPTIONS[options]
    bias = normal(HEADS, LENGTH, LENGTH)
    clean = attention(**inputs, bias=bias, **options, return_lse=True)
    masked = attention(
        np.zeros_like(inputs["query"]),
        inputs["key"],
        np.broadcast_to(np.eye(LENGTH, dtype=f), (HEADS, LENGTH, LENGTH)),
        **options,
    )
    dirty = np.where(masked == 0, f(poison), bias)
    assert bits(attention(**inputs, bias=dirty, **options, return_lse=True)) == bits(clean)


@pytest.mark.parametrize("poisoned", ["key", "value"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, 3e38])
def test_what_a_bias_masks_decides_no_bits(poisoned, poison):
    inputs = inputs_of()
    bias = normal(HEADS, LENGTH, LENGTH)
    bias[..., 100:110] = -np.inf
    bias[1, 7] = -np.inf
    clean = attention(**inputs, bias=bias, return_lse=True)
    dirty = {**inputs, poisoned: inputs[poisoned].copy()}
    dirty[poisoned][:, 100:110] = poison
    found = attention(**dirty, bias=bias, return_lse=True)
    if poison != 3e38:  # a finite key counts where scores are bounded, so other ways may be taken
        assert bits(found) == bits(clean)
    assert_accurate(*found, reference_of(**dirty, bias=bias))
    assert (found[0][1, 7] == 0).all()
    assert found[1][1, 7] == -np.inf


@pytest.mark.parametrize("options", ["alone", "causal", "mask", "softcap"])
def test_a_head_has_the_same_bits_alone(options):
    """Also beside heads whose bias leads them another way."""
    kinds = list(BIASES.values())
    bias = np.stack([np.broadcast_to(kind, (HEADS, LENGTH, LENGTH))[1] for kind in kinds])
    inputs = inputs_of(heads=len(kinds))
    options = {**OPTIONS[options]}
    if "mask" in options:
        options["mask"] = options["mask"][0]
    together = attention(**inputs, bias=bias, **options, return_lse=True)
    for head in range(len(kinds)):
        own = {name: array[head] for name, array in inputs.items()}
        alone = attention(**own, bias=bias[head], **options, return_lse=True)
        assert bits(alone) == bits(part[head] for part in together)


def test_rows_that_are_computed_again_touch_no_other(ways):
    inputs = inputs_of()
    bias = normal(HEADS, LENGTH, LENGTH)
    clean = attention(**inputs, bias=bias, return_lse=True)
    bias[1, 133] = -1e9
    found = attention(**inputs, bias=bias, return_lse=True)
    others = np.ones((HEADS, LENGTH), bool)
    others[1, 133] = False
    assert bits(part[others] for part in found) == bits(part[others] for part in clean)
    assert set(ways) == {"attend_bounded"}


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_threads(monkeypatch, threads):
    inputs = inputs_of()
    options = {"bias": BOUNDED["distances"], "block_size": (60, 100), "return_lse": True}
    expected = bits(attention(**inputs, **options))
    monkeypatch.setattr("portable_attention.core.threads.usable_threads", lambda: threads)
    assert bits(attention(**inputs, **options)) == expected


def test_batch_axes_of_the_bias_alone_are_broadcast():
    inputs = inputs_of()
    inputs = {name: np.stack([array, array[::-1]]) for name, array in inputs.items()}
    bias = normal(2, 1, LENGTH, LENGTH)
    query = inputs["query"][:1]
    found = attention(query, inputs["key"], inputs["value"], bias=bias, return_lse=True)
    query = np.broadcast_to(query, inputs["query"].shape)
    expected = attention(query.copy(), inputs["key"], inputs["value"], bias=bias, return_lse=True)
    assert bits(found) == bits(expected)


@pytest.mark.parametrize(("smallest", "low"), [(-50.0, False), (-100.0, True), (-np.inf, True)])
def test_low_biases_are_kept_from_powers_of_2(monkeypatch, smallest, low):
    """NumPy takes 20 to 150 times as long for those below the range of float32."""
    monkeypatch.setattr(HostOps, "exponent_unit", lambda *_: 1.4427)
    seen = set()
    way_of = heads.Heads.ways_of_bias

    def noting(self, rows):
        found = way_of(self, rows)
        seen.update(np.unique(found).tolist())
        return found

    monkeypatch.setattr(heads.Heads, "ways_of_bias", noting)
    attention(**inputs_of(), bias=where(ROW < KEY, smallest))
    assert seen == {heads.Way.BOUNDED_ABOVE if low else heads.Way.BOUNDED}
