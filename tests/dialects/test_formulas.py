"""The dialects against the plain formula, on every library: positions, biases, layouts."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from portable_attention import dialects

from ..backends import Backend
from .formula import formula, places, problem

CLOSE = {"rtol": 1e-5, "atol": 3e-6}


def moved(backend: Backend, *arrays: np.ndarray) -> list[Any]:
    """Return arrays (B, H, L, D) as the backend's (B, L, H, D)."""
    return [backend.asarray(np.ascontiguousarray(np.swapaxes(array, 1, 2))) for array in arrays]


def check(backend: Backend, found: Any, expected: np.ndarray) -> None:
    assert backend.owns(found)
    found = backend.to_numpy(found)
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, **CLOSE)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_torch(backend: Backend, kind: str, is_causal: bool) -> None:
    """A mask and is_causal hold together, where the original refuses the pair."""
    query, key, value = problem(0)
    rng = np.random.default_rng(1)
    allowed = places(5, 7) <= 0 if is_causal else np.ones((5, 7), bool)
    options, bias = {}, 0.0
    if kind == "bool":
        mask = rng.random((5, 7)) > 0.5
        mask[1] = False  # an empty row
        allowed, options = allowed & mask, {"attn_mask": backend.asarray(mask)}
    elif kind == "float":
        bias = rng.random((5, 7)).astype(np.float32)
        options = {"attn_mask": backend.asarray(bias)}
    output, _, _ = formula(query, key, value, allowed=allowed, bias=bias)
    found = dialects.torch.scaled_dot_product_attention(
        *map(backend.asarray, (query, key, value)), is_causal=is_causal, enable_gqa=True, **options
    )
    check(backend, found, output)


def test_jax(backend: Backend) -> None:
    query, key, value = problem(1)
    lengths = np.array([3, 0], np.int32)
    distance = places(5, 7)
    allowed = (distance <= 1) & (distance >= -2) & (np.arange(7) < lengths[:, None, None, None])
    output, lse, _ = formula(query, key, value, allowed=allowed, scale=0.4)
    found, residual = dialects.jax.dot_product_attention(
        *moved(backend, query, key, value),
        scale=0.4,
        local_window_size=(2, 1),
        key_value_seq_lengths=backend.asarray(lengths),
        return_residual=True,
    )
    check(backend, found, np.swapaxes(output, 1, 2))
    check(backend, residual, np.swapaxes(lse, 1, 2))
    assert not np.any(backend.to_numpy(found)[1])  # empty rows, not the mean of the values


@pytest.mark.parametrize(
    ("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (True, (2, -1)), (False, (1, 2))]
)
@pytest.mark.parametrize("alibi", [None, "heads", "batch"])
@pytest.mark.parametrize("rows", [5, 9])
def test_flash(backend: Backend, causal: bool, window: Any, alibi: str | None, rows: int) -> None:
    query, key, value = problem(2, rows=rows)
    distance = places(rows, 7, 7 - rows)
    left, right = window
    allowed = np.ones_like(distance, bool)
    allowed &= (distance <= 0) | (not causal)
    allowed &= (distance >= -left) | (left < 0)
    allowed &= (distance <= right) | (right < 0)
    options, bias = {}, 0.0
    if alibi:
        slopes = np.random.default_rng(3).random((4,) if alibi == "heads" else (2, 4))
        slopes = slopes.astype(np.float32)
        options["alibi_slopes"] = backend.asarray(slopes)
        bias = -slopes[..., None, None] * np.abs(distance)
    output, lse, _ = formula(query, key, value, allowed=allowed, bias=bias, softcap=3.0)
    found, found_lse, nothing = dialects.flash.flash_attn_func(
        *moved(backend, query, key, value),
        causal=causal,
        window_size=window,
        softcap=3.0,
        return_attn_probs=True,
        **options,
    )
    check(backend, found, np.swapaxes(output, 1, 2))
    check(backend, found_lse, lse)
    assert nothing is None


def test_flash_alibi_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias of a few rows at a time gives what the whole one does."""
    arrays = [np.swapaxes(array, 1, 2) for array in problem(3, rows=13, columns=17)]
    slopes = np.array([1.0, 0.5, 0.25, 0.125])
    whole = dialects.flash.flash_attn_func(*arrays, causal=True, alibi_slopes=slopes)
    monkeypatch.setattr("portable_attention.dialects._alibi._BIASES", 17 * 4 * 3)
    found = dialects.flash.flash_attn_func(*arrays, causal=True, alibi_slopes=slopes)
    np.testing.assert_allclose(found, whole, **CLOSE)


def test_flash_of_packed_sequences(backend: Backend) -> None:
    rng = np.random.default_rng(4)
    starts_q, starts_k = np.array([0, 2, 2, 7], np.int32), np.array([0, 4, 6, 6], np.int32)
    q = rng.standard_normal((7, 4, 8), dtype=np.float32)
    k, v = rng.standard_normal((2, 6, 2, 8), dtype=np.float32)
    slopes = rng.random((3, 4)).astype(np.float32)
    outputs, lses = [], []
    for item in range(3):
        rows, columns = (slice(*starts[item : item + 2]) for starts in (starts_q, starts_k))
        parts = (np.swapaxes(a, 0, 1) for a in (q[rows], k[columns], v[columns]))
        lengths = rows.stop - rows.start, columns.stop - columns.start
        distance = places(*lengths, lengths[1] - lengths[0])
        bias = -slopes[item][:, None, None] * np.abs(distance)
        output, lse, _ = formula(*parts, allowed=distance <= 0, bias=bias)
        outputs.append(np.swapaxes(output, 0, 1))
        lses.append(lse)
    found, lse, _ = dialects.flash.flash_attn_varlen_func(
        *map(backend.asarray, (q, k, v, starts_q, starts_k)),
        5,
        4,
        causal=True,
        alibi_slopes=backend.asarray(slopes),
        return_attn_probs=True,
    )
    check(backend, found, np.concatenate(outputs))
    check(backend, lse, np.concatenate(lses, axis=-1))


def test_flash_with_a_cache(backend: Backend) -> None:
    query, key, value = problem(5, rows=2)
    lengths = np.array([4, 7], np.int32)
    allowed = np.stack([places(2, 7, length - 2) <= 0 for length in lengths])[:, None]
    output, lse, _ = formula(query, key, value, allowed=allowed)
    found, found_lse = dialects.flash.flash_attn_with_kvcache(
        *moved(backend, query, key, value),
        cache_seqlens=backend.asarray(lengths),
        causal=True,
        return_softmax_lse=True,
    )
    check(backend, found, np.swapaxes(output, 1, 2))
    check(backend, found_lse, lse)


@pytest.mark.parametrize("kind", ["none", "causal", "bool", "float"])
def test_mlx(backend: Backend, kind: str) -> None:
    query, key, value = problem(6, rows=9)
    rng = np.random.default_rng(7)
    sinks = rng.standard_normal(4).astype(np.float32)
    array = rng.random((9, 7))
    allowed = {"causal": places(9, 7, -2) <= 0, "bool": array > 0.5}.get(kind, True)
    bias = array if kind == "float" else 0.0
    mask: Any = {"none": None, "causal": "causal"}.get(kind)
    if kind in ("bool", "float"):
        mask = backend.asarray(array > 0.5 if kind == "bool" else array.astype(np.float32))
    output, _, _ = formula(query, key, value, allowed=allowed, bias=bias, scale=0.3, sinks=sinks)
    found = dialects.mlx.scaled_dot_product_attention(
        *map(backend.asarray, (query, key, value)),
        scale=0.3,
        mask=mask,
        sinks=backend.asarray(sinks),
    )
    check(backend, found, output)


def test_keras(backend: Backend) -> None:
    query, key, value = problem(8)
    rng = np.random.default_rng(9)
    mask, bias = rng.random((2, 1, 5, 7)) > 0.5, rng.random((4, 5, 7)).astype(np.float32)
    allowed = mask & (places(5, 7) <= 0)
    output, _, _ = formula(query, key, value, allowed=allowed, bias=bias, softcap=2.0)
    found = dialects.keras.dot_product_attention(
        *moved(backend, query, key, value),
        bias=backend.asarray(bias),
        mask=backend.asarray(mask),
        is_causal=True,
        attn_logits_soft_cap=2.0,
    )
    check(backend, found, np.swapaxes(output, 1, 2))


SIGNATURES = {
    "flash.flash_attn_func": "q k v dropout_p softmax_scale causal window_size softcap "
    "alibi_slopes deterministic return_attn_probs",
    "flash.flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
    "return_attn_probs block_table",
    "flash.flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens "
    "cache_batch_idx cache_leftpad block_table softmax_scale causal window_size softcap "
    "rotary_interleaved alibi_slopes num_splits return_softmax_lse",
    "mlx.scaled_dot_product_attention": "q k v",
    "keras.dot_product_attention": "query key value bias mask scale is_causal flash_attention "
    "attn_logits_soft_cap",
    "onnx.attention": "Q K V attn_mask past_key past_value nonpad_kv_seqlen",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_positional_parameters_are_those_of_the_original(name: str) -> None:
    module, function = name.split(".")
    parameters = inspect.signature(getattr(getattr(dialects, module), function)).parameters
    positional = [p.name for p in parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert " ".join(positional) == SIGNATURES[name]
