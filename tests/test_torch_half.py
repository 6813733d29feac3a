"""Half-precision gradients through PyTorch's plain operations: sums in float32, rounded once."""

from __future__ import annotations

import numpy as np
import pytest

from portable_attention import attention

from .accuracy import assert_near, gradients_of_oracle
from .backends import BACKENDS
from .dtypes import numpy_dtype
from .problems import make_inputs

torch = pytest.importorskip("torch", reason="needs torch")

NAMES = ("query", "key", "value", "bias", "sinks")


def gradients_by(transform, total, arrays, cotangent):
    """Return the gradients of `total`, a sum over the items of a batch, by a transform."""
    by_all = tuple(range(len(arrays)))
    item = (0, 0, 0, None, None)  # bias and sinks are those of all items
    if transform == "grad":
        return torch.func.grad(total, by_all)(*arrays, cotangent)
    if transform == "vjp":
        _, pullback = torch.func.vjp(lambda *arrays: total(*arrays, cotangent), *arrays)
        return pullback(torch.ones((), dtype=torch.float32))
    if transform == "grad of vmap":
        mapped = torch.func.vmap(total, in_dims=(*item, 0))
        return torch.func.grad(lambda *arrays: mapped(*arrays, cotangent).sum(), by_all)(*arrays)
    # What is summed over the items is summed after their gradients have been rounded.
    found = torch.func.vmap(torch.func.grad(total, (0, 1, 2)), in_dims=(*item, 0))
    return found(*arrays, cotangent)


@pytest.mark.parametrize("transform", ["grad", "vjp", "grad of vmap", "vmap of grad"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_gradients_under_transforms_are_summed_wide(dtype, transform):
    """Over tiles, heads of a group and items, and rounded once, at the end."""
    arguments = make_inputs(batch=(2,), heads=2, key_heads=1, queries=400, keys=9, dtype=dtype)
    narrow = numpy_dtype(dtype)
    rng = np.random.default_rng(1)
    arguments["bias"] = rng.standard_normal((2, 1, 9)).astype(narrow)
    arguments["sinks"] = rng.standard_normal(2).astype(narrow)
    cotangent = np.ones((2, 2, 400, 3), narrow)  # so that sums grow, and what is lost in them
    references = gradients_of_oracle(arguments, cotangent=cotangent)

    def total(query, key, value, bias, sinks, cotangent):
        output = attention(query, key, value, bias=bias, sinks=sinks, block_size=(2, 9))
        return (output.float() * cotangent.float()).sum()

    backend = BACKENDS["torch"]
    arrays = [backend.asarray(arguments[name]) for name in NAMES]
    found = gradients_by(transform, total, arrays, backend.asarray(cotangent))
    for name, gradient in zip(NAMES, found, strict=False):
        assert gradient.dtype == getattr(torch, dtype)
        assert_near(backend.to_numpy(gradient), *references[name], f"gradient by {name}")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_second_derivatives_are_summed_wide(dtype):
    """Those of autograd, too, go through plain tensor operations."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((4, 160, 8), (2, 48, 8), (2, 48, 3))
    exact = [torch.randn(shape, generator=generator).to(dtype).double() for shape in shapes]

    def formula(query, key, value):
        key, value = (array.repeat_interleave(2, 0) for array in (key, value))
        return torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, -1) @ value

    def second(function, narrow, wide):
        """Return second derivatives by the key, that of the first ones by all the queries."""
        query, key, value = (array.to(narrow).requires_grad_() for array in exact)
        output = function(query.to(wide), key.to(wide), value.to(wide))
        (first,) = torch.autograd.grad(output.double().square().sum(), query, create_graph=True)
        return torch.autograd.grad(first.double().square().sum(), key)[0].double()

    right = second(formula, torch.float64, torch.float64)
    honest, found = (
        (second(function, dtype, wide) - right).abs().max()
        for function, wide in (
            (formula, torch.float32),
            (lambda *arrays: attention(*arrays, block_size=(4, 6)), dtype),
        )
    )
    assert found <= 2 * honest
