"""Gradients of a call, by whatever the library differentiates with, from NumPy to NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import portable_attention
from portable_attention import attention

from .backends import Backend
from .dtypes import dtype_name
from .running import INPUTS, split_options


def require_autodiff(backend: Backend) -> None:
    """Skip where the library does not differentiate itself and the package does not yet."""
    if backend.autodiff:
        return
    if not hasattr(portable_attention, "attention_vjp"):
        pytest.skip(f"needs attention_vjp: {backend.library} has no automatic differentiation")
    pytest.fail("attention_vjp is here: call it in gradients_of, for libraries without autodiff")


def gradients_of(
    backend: Backend,
    arguments: dict[str, Any],
    names: Sequence[str],
    *,
    cotangent: np.ndarray | None = None,
    lse_cotangent: np.ndarray | None = None,
    order: int = 1,
    jit: bool = False,
    vmapped: Sequence[str] = (),
) -> dict[str, np.ndarray]:
    """Return the gradients, by the arguments named and no other, of the sums of the results.

    That is of ``sum(output * cotangent) + sum(lse * lse_cotangent)``; a cotangent left out takes
    its result out of the sum, and where both are, it is ``sum(output)``. With `order` 2 they are
    gradients of the sum of the first gradient, argument by argument.
    """
    require_autodiff(backend)
    arrays, fixed = split_options(arguments)
    own = {name: backend.asarray(array) for name, array in arrays.items()}
    cotangents = [
        None if array is None else backend.asarray(array) for array in (cotangent, lse_cotangent)
    ]

    def total(chosen):
        def call(own):
            inputs = [own[name] for name in INPUTS]
            others = {name: array for name, array in own.items() if name not in INPUTS}
            return attention(*inputs, return_lse=True, **others, **fixed)

        output, lse = _mapped(call, {**own, **chosen}, vmapped)
        if cotangent is None and lse_cotangent is None:
            return output.sum()
        parts = zip((output, lse), cotangents, strict=True)
        # Under a zero cotangent nothing may count, not even the -inf that an empty row has as lse.
        xp = backend.xp
        return sum(
            xp.where(weight == 0, xp.zeros_like(weight), result * weight).sum()
            for result, weight in parts
            if weight is not None
        )

    differentiate = {"torch": _torch_gradients, "jax": _jax_gradients}[backend.library]
    found = differentiate(total, {name: own[name] for name in names}, order, jit)
    for name, gradient in found.items():
        assert tuple(gradient.shape) == arrays[name].shape, f"the gradient by {name}"
        assert dtype_name(gradient.dtype) == dtype_name(arrays[name].dtype), name
    return {name: backend.to_numpy(gradient) for name, gradient in found.items()}


def _mapped(call: Callable, own: dict[str, Any], names: Sequence[str]) -> Any:
    """Call once, or under jax.vmap over axis 0 of the arrays named."""
    if not names:
        return call(own)
    import jax

    return jax.vmap(call, in_axes=({name: 0 if name in names else None for name in own},))(own)


def _torch_gradients(total: Callable, chosen: dict[str, Any], order: int, _jit: bool) -> dict:
    import torch

    for array in chosen.values():
        array.requires_grad_()
    found = torch.autograd.grad(total(chosen), list(chosen.values()), create_graph=order == 2)
    if order == 2:
        found = [
            torch.autograd.grad(first.sum(), array, retain_graph=True)[0]
            for first, array in zip(found, chosen.values(), strict=True)
        ]
    return dict(zip(chosen, found, strict=True))


def _jax_gradients(total: Callable, chosen: dict[str, Any], order: int, jit: bool) -> dict:
    import jax

    gradient = jax.grad(total)
    if order == 2:
        first = gradient

        def gradient(chosen):
            def first_alone(array, name):
                return first({**chosen, name: array})[name].sum()

            return {name: jax.grad(first_alone)(array, name) for name, array in chosen.items()}

    return (jax.jit(gradient) if jit else gradient)(chosen)
