"""The kit bites: it finds every fault of the zoo and names the rule; it passes what is right."""

from __future__ import annotations

import numpy as np
import pytest

from portable_attention import attention, attention_vjp
from portable_attention.conformance import conform

from .dense import Dense, Tiled
from .variations import CONVENTIONS, VARIATIONS, HalfWeights, only_half
from .zoo import ZOO


def test_the_zoo_is_large():
    assert len(ZOO) >= 100


@pytest.mark.parametrize("name", ZOO)
def test_every_fault_is_found_and_its_rule_named(name):
    kind, rules = ZOO[name]
    function = kind()
    report = conform(function, vjp=function.vjp, quick=True, isolate=False)
    assert not report.ok
    assert report.rule in rules, report.findings[0]


@pytest.mark.parametrize("kind", VARIATIONS, ids=lambda kind: kind.__name__)
def test_every_correct_variation_passes(kind):
    function = kind()
    whole = kind in (Dense, Tiled, HalfWeights)
    report = conform(function, vjp=function.vjp, quick=not whole, isolate=False)
    assert report.ok, str(report)
    assert not report.count("refused")
    assert report.count("passed") > 200


@pytest.mark.parametrize("kind", CONVENTIONS, ids=lambda kind: kind.__name__)
def test_every_convention_passes_where_it_is_declared(kind):
    function = kind()
    options = {"quick": True, "isolate": False, "without": getattr(kind, "without", ())}
    report = conform(function, conventions=kind.conventions, **options)
    assert report.ok, str(report)
    if "diagonal" not in kind.conventions:  # without offsets there is no call that would show it
        assert not conform(function, **options).ok, "and fails where it is not"


def test_the_library_passes_every_case_on_numpy():
    report = conform(attention, vjp=attention_vjp, capabilities=["all"], isolate=False)
    assert report.ok, str(report)
    assert report.count("passed") == len(report.results)


def test_a_kernel_for_half_precision_alone():
    able = ["causal", "scale", "lse", "float16", "bfloat16", "gqa", "ranks", "batch-broadcast"]
    able += ["value-width", "zero-sizes", "determinism", "strides", "nan-safety", "non-finite"]
    report = conform(
        only_half, capabilities=able, conventions={"diagonal": "end"}, isolate=False, quick=True
    )
    assert report.ok, str(report)
    assert report.count("passed") > 60


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", reason="needs torch")


def test_the_library_passes_on_torch(torch):
    report = conform(attention, backend="torch", capabilities=["all"], isolate=False, quick=True)
    assert report.ok, str(report)
    assert report.count("passed") == len(report.results)


def test_the_library_passes_on_jax():
    """A case of each group: each compiles."""
    pytest.importorskip("jax", reason="needs jax")
    chosen = ["plain/width-one", "scale/default", "mask/random", "window/left-and-right"]
    chosen += ["sinks/of-empty-rows", "poison/by-mask", "bfloat16/plain", "float64/plain"]
    chosen += ["gradient/lse", "heads/grouped-in-order"]
    report = conform(attention, backend="jax", cases=chosen, isolate=False)
    assert report.ok, str(report)
    assert report.count("passed") == len(chosen)


def dense_torch(query, key, value, *, mask=None, causal=False, scale=None, return_lse=False):
    """A dense function as one writes it in PyTorch, with automatic differentiation."""
    import torch

    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    score = scale * (query.to(wide) @ key.to(wide).transpose(-1, -2))
    allowed = torch.ones(score.shape[-2:], dtype=torch.bool)
    if causal:
        allowed = allowed.tril()
    if mask is not None:
        allowed = allowed & mask
    lse = torch.logsumexp(score.masked_fill(~allowed, -torch.inf), dim=-1)
    shift = torch.where(torch.isneginf(lse), 0, lse)
    weights = torch.exp(score.masked_fill(~allowed, -torch.inf) - shift[..., None])
    output = (weights @ value.to(wide)).to(query.dtype)
    return (output, lse) if return_lse else output


def test_a_dense_torch_function_with_its_own_gradients(torch):
    less = ["nan-safety", "gqa", "non-finite"]
    report = conform(
        dense_torch, backend="torch", without=less, conventions={"diagonal": "start"},
        isolate=False, quick=True,
    )  # fmt: skip
    assert report.ok, str(report)
    assert report.count("passed") > 70


def test_bits_are_compared_as_bits():
    """0 and -0 are equal numbers and other bits."""
    signs = iter([1.0, -1.0] * 1000)

    def function(query, key, value):
        return attention(query, key, value) * np.asarray(next(signs), query.dtype)

    report = conform(function, cases=["same/bits"], isolate=False)
    assert "determinism" in report.rules
