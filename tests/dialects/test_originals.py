"""The dialects of PyTorch and JAX against their originals, over their options."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from portable_attention import Dropout, attention, dialects

from .formula import problem

RNG = np.random.default_rng(7)
MASK = RNG.random((2, 4, 5, 7)) > 0.4
MASK[..., 2] = True  # no row is empty: there the originals differ from us, and say so nowhere
BIAS = RNG.standard_normal((2, 4, 5, 7), dtype=np.float32)
CLOSE = {"rtol": 1e-5, "atol": 2e-6}

SDPA_OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"scale": -0.3},
    {"scale": 0.0},
    {"attn_mask": MASK},
    {"attn_mask": MASK[0, 0]},
    {"attn_mask": MASK[:, :1]},
    {"attn_mask": BIAS},
    {"attn_mask": np.where(MASK, BIAS, -np.inf), "scale": 0.5},
    {"is_causal": True, "scale": 2.0},
]


@pytest.mark.parametrize("options", SDPA_OPTIONS, ids=lambda options: "-".join(options) or "bare")
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("shape", [(5, 7), (7, 7)])
def test_scaled_dot_product_attention_of_torch(
    options: dict[str, Any], kv_heads: int, shape: tuple[int, int]
) -> None:
    import torch

    rows, columns = shape
    if rows != 5 and "attn_mask" in options:
        options = {**options, "attn_mask": options["attn_mask"][..., :1, :]}
    arrays = [torch.from_numpy(a) for a in problem(1, rows, columns, kv_heads=kv_heads)]
    given = {
        name: torch.from_numpy(np.array(option)) if isinstance(option, np.ndarray) else option
        for name, option in options.items()
    }
    given["enable_gqa"] = kv_heads != 4
    found = dialects.torch.scaled_dot_product_attention(*arrays, **given)
    original = torch.nn.functional.scaled_dot_product_attention(*arrays, **given)
    torch.testing.assert_close(found, original, **CLOSE)


def test_torch_gradients_pass_through() -> None:
    import torch

    arrays = [torch.from_numpy(a).double().requires_grad_() for a in problem(2, kv_heads=4)]
    results = []
    for function in (
        dialects.torch.scaled_dot_product_attention,
        torch.nn.functional.scaled_dot_product_attention,
    ):
        output = function(*arrays, is_causal=True)
        results.append(torch.autograd.grad(output.square().sum(), arrays))
    for found, original in zip(*results, strict=True):
        torch.testing.assert_close(found, original)


@pytest.mark.parametrize("shape", [(2, 4, 5, 8), (3, 5, 8), (5, 8)], ids=str)
def test_torch_ranks(shape: tuple[int, ...]) -> None:
    import torch

    arrays = torch.randn(3, *shape)
    found = dialects.torch.scaled_dot_product_attention(*arrays, is_causal=True)
    original = torch.nn.functional.scaled_dot_product_attention(*arrays, is_causal=True)
    torch.testing.assert_close(found, original, **CLOSE)


def test_the_signature_is_that_of_torch() -> None:
    ours = inspect.signature(dialects.torch.scaled_dot_product_attention).parameters
    assert " ".join(ours) == ("query key value attn_mask dropout_p is_causal scale enable_gqa seed")
    assert ours["seed"].kind is inspect.Parameter.KEYWORD_ONLY


JAX_OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"local_window_size": 2},
    {"local_window_size": (3, 1), "scale": 0.7},
    {"local_window_size": (2, 2), "is_causal": True},
    {"mask": MASK},
    {"mask": MASK[:1, :1], "is_causal": True},
    {"bias": BIAS},
    {"bias": BIAS[0, 0], "mask": MASK},
    {"key_value_seq_lengths": np.array([3, 7], np.int32)},
    {"query_seq_lengths": np.array([5, 2], np.int32)},
    {
        "query_seq_lengths": np.array([1, 5], np.int32),
        "key_value_seq_lengths": np.array([6, 2], np.int32),
        "is_causal": True,
    },
]


@pytest.mark.parametrize("options", JAX_OPTIONS, ids=lambda options: "-".join(options) or "bare")
@pytest.mark.parametrize("compiled", [False, True], ids=["", "jit"])
def test_dot_product_attention_of_jax(options: dict[str, Any], compiled: bool) -> None:
    import jax

    arrays = [jax.numpy.asarray(np.swapaxes(array, 1, 2)) for array in problem(3)]

    def call(function: Any) -> Any:
        def bound(*arrays: Any) -> Any:
            return function(*arrays, **options, return_residual=True)

        return (jax.jit(bound) if compiled else bound)(*arrays)

    output, residual = call(dialects.jax.dot_product_attention)
    original, lse = call(jax.nn.dot_product_attention)
    assert isinstance(output, jax.Array)
    np.testing.assert_allclose(output, original, **CLOSE)
    some = np.asarray(residual) != -np.inf
    assert some.all() or "query_seq_lengths" in options
    np.testing.assert_allclose(residual[some], lse[some], **CLOSE)


def test_jax_without_a_batch_axis() -> None:
    import jax

    arrays = [jax.numpy.asarray(np.swapaxes(array[0], 0, 1)) for array in problem(4)]
    options = {"is_causal": True, "key_value_seq_lengths": np.array([3], np.int32)}
    output, residual = dialects.jax.dot_product_attention(*arrays, **options, return_residual=True)
    original, lse = jax.nn.dot_product_attention(*arrays, **options, return_residual=True)
    assert (output.shape, residual.shape) == (original.shape, lse.shape)
    np.testing.assert_allclose(output, original, **CLOSE)
    np.testing.assert_allclose(residual, lse, **CLOSE)


def test_the_signature_is_that_of_jax() -> None:
    import jax

    parameters = [
        [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
        for function in (
            dialects.jax.dot_product_attention,
            jax.nn.dot_product_attention,
        )
    ]
    ours, original = parameters
    assert sorted(ours, key=str) == sorted(original, key=str)
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert [p for p in ours if p[1] is positional] == [p for p in original if p[1] is positional]


@pytest.mark.parametrize("function", ["torch", "flash"])
def test_dropout_is_that_of_its_seed(function: str) -> None:
    query, key, value = problem(5, kv_heads=4)
    expected = attention(query, key, value, dropout=Dropout(0.4, 11))
    if function == "torch":
        found = dialects.torch.scaled_dot_product_attention(
            query, key, value, dropout_p=0.4, seed=11
        )
    else:
        swapped = [np.swapaxes(array, 1, 2) for array in (query, key, value)]
        found = np.swapaxes(dialects.flash.flash_attn_func(*swapped, 0.4, seed=11), 1, 2)
    np.testing.assert_allclose(found, expected, **CLOSE)
