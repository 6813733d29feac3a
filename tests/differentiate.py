"""Gradients of a call, by whatever the library differentiates with, from NumPy to NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from portable_attention import attention, attention_vjp

from .backends import Backend
from .dtypes import dtype_name
from .running import INPUTS, assert_unchanged, split_options


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
    explicit: bool = False,
) -> dict[str, np.ndarray]:
    """Return the gradients, by the arguments named and no other, of the sums of the results.

    That is of ``sum(output * cotangent) + sum(lse * lse_cotangent)``; a cotangent left out takes
    its result out of the sum, and where both are, it is ``sum(output)``. With `order` 2 they are
    gradients of the sum of the first gradient, argument by argument. They come from the library's
    own differentiation, and from `attention_vjp` where it has none or `explicit` asks for it.
    """
    arrays, fixed = split_options(arguments)
    before = {name: array.tobytes() for name, array in arrays.items()}
    own = {name: backend.asarray(array) for name, array in arrays.items()}
    cotangents = [
        None if array is None else backend.asarray(array) for array in (cotangent, lse_cotangent)
    ]
    if explicit or not backend.autodiff:
        assert order == 1, "attention_vjp gives first derivatives"
        found = _explicit_gradients(backend, own, fixed, names, *cotangents)
    else:
        total = _total(backend, own, fixed, cotangents, vmapped)
        differentiate = {"torch": _torch_gradients, "jax": _jax_gradients}[backend.library]
        found = differentiate(total, {name: own[name] for name in names}, order, jit)
    for name, gradient in found.items():
        assert tuple(gradient.shape) == arrays[name].shape, f"the gradient by {name}"
        assert dtype_name(gradient.dtype) == dtype_name(arrays[name].dtype), name
    for name, array in own.items():
        assert_unchanged(backend, name, before[name], arrays[name], array)
    return {name: backend.to_numpy(gradient) for name, gradient in found.items()}


def _explicit_gradients(backend, own, fixed, names, cotangent, lse_cotangent):
    (output, _), pullback = attention_vjp(**own, **fixed, return_lse=True)
    if cotangent is None:
        make = backend.xp.ones_like if lse_cotangent is None else backend.xp.zeros_like
        cotangent = make(output)
    gradients = pullback(cotangent, lse_cotangent)
    return {name: getattr(gradients, name) for name in names}


def _total(backend, own, fixed, cotangents, vmapped) -> Callable:
    """Return the sum that is differentiated, as a function of the arrays chosen."""

    def call(own):
        inputs = [own[name] for name in INPUTS]
        others = {name: array for name, array in own.items() if name not in INPUTS}
        return attention(*inputs, return_lse=True, **others, **fixed)

    def total(chosen):
        results = _mapped(call, {**own, **chosen}, vmapped)
        if all(weight is None for weight in cotangents):
            return results[0].sum()
        # Under a zero cotangent nothing may count, not even the -inf that an empty row has as lse.
        xp = backend.xp
        return sum(
            xp.where(weight == 0, xp.zeros_like(weight), result * weight).sum()
            for result, weight in zip(results, cotangents, strict=True)
            if weight is not None
        )

    return total


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
