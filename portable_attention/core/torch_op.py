"""Attention as one operator of PyTorch: for autograd, `torch.compile` and `torch.export`.

To the graph it is a single node, so a compiler neither unrolls the tiles nor sees them, and
autograd keeps the inputs, the output and the lse alone. Its gradient is an operator, too, which in
turn is differentiated through plain tensor operations (without the promise of linear memory).
Transforms of `torch.func` and forward mode go through plain tensor operations at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from portable_attention.backends.torch_backend import autocast, transforming
from portable_attention.core import eager, schedules
from portable_attention.core.arguments import SCALE_REMEDY, check_flag, real_number, whole_number
from portable_attention.core.backward import Cotangents
from portable_attention.core.dropout import Dropout
from portable_attention.core.problem import Call
from portable_attention.core.spec import validate

_FAR = 2**62
_DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks")


def takes(*arrays: Any) -> bool:
    """Whether a call of these tensors is to be one operator: recorded, or compiled."""
    if not isinstance(arrays[0], Tensor):
        return False
    if torch.compiler.is_compiling():
        return True
    recorded = torch.is_grad_enabled() and any(
        isinstance(array, Tensor) and array.requires_grad for array in arrays
    )
    return recorded and not transforming()


def beneath_autograd() -> AbstractContextManager[None]:
    """Return what surrounds a call within the operator: nothing is recorded there."""
    context: AbstractContextManager[None] = torch.no_grad()
    return context


def attend(
    query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], *, return_lse: bool
) -> Any:
    """Run `attention`, with its keyword arguments as `options`, through the operator."""
    query, key, value = autocast(query, key, value)
    if not torch.compiler.is_compiling():
        # An error is raised here in its own words, rather than in those of the dispatcher.
        validate(query, key, value, **options)
    # The operator's arguments have types, and a number of another kind would be made to fit.
    check_flag("causal", options["causal"])
    window = [
        None if side is None else _near("an entry of window", side)
        for side in options["window"] or (None, None)
    ]
    block_size = [
        _near("an entry of block_size", size) for size in options["block_size"] or ()
    ] or (None, None)
    dropout = options["dropout"]
    seed = None if dropout is None else dropout.seed
    if seed is not None and not isinstance(seed, Tensor):
        seed = whole_number("the seed of dropout", seed)
        seed -= 2**64 if seed >= 2**63 else 0  # the same 64 bits
    output, lse, _ = _attend(
        query,
        key,
        value,
        options["mask"],
        options["bias"],
        options["sinks"],
        options["causal"],
        options["window"] is not None,
        window[0],
        window[1],
        offset if isinstance(offset := options["query_offset"], str) else None,
        *_number_or_tensor("query_offset", offset, query.device),
        *_number_or_tensor("query_lengths", options["query_lengths"], query.device),
        *_number_or_tensor("key_lengths", options["key_lengths"], query.device),
        _real("scale", options["scale"], SCALE_REMEDY),
        _real("softcap", options["softcap"]),
        _real("the rate of dropout", None if dropout is None else dropout.rate),
        seed if isinstance(seed, int) else None,
        seed if isinstance(seed, Tensor) else None,
        options["layout"],
        options["engine"],
        block_size[0],
        block_size[1],
    )
    return (output, lse) if return_lse else output


def _real(name: str, given: Any, remedy: str = "") -> float | None:
    return None if given is None else real_number(name, given, remedy)


def _number_or_tensor(name: str, given: Any, device: Any) -> tuple[int | None, Tensor | None]:
    if given is None or isinstance(given, str):
        return None, None
    if isinstance(given, Tensor):
        return None, given
    if isinstance(given, np.ndarray):
        wide = given.astype(np.uint64 if given.dtype.kind == "u" else np.int64)
        near = np.minimum(wide, wide.dtype.type(_FAR))
        values = torch.tensor(near.tolist(), dtype=torch.int64, device=device)
        return None, values.reshape(near.shape)  # of which a list without numbers says nothing
    return _near(name, given), None


def _near(name: str, given: Any) -> int:
    """Return an int that the dispatcher takes, 64 bits at most; further ones mean the same."""
    return max(-_FAR, min(_FAR, whole_number(name, given)))


@torch.library.custom_op("portable_attention::attend", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    windowed: bool,
    left: int | None,
    right: int | None,
    offset_name: str | None,
    offset_number: int | None,
    offset: Tensor | None,
    query_length: int | None,
    query_lengths: Tensor | None,
    key_length: int | None,
    key_lengths: Tensor | None,
    scale: float | None,
    softcap: float | None,
    rate: float | None,
    seed_number: int | None,
    seed: Tensor | None,
    layout: str,
    engine: str,
    block_q: int | None,
    block_k: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output and lse, and the output as it was computed, for the backward pass."""
    inputs = tuple(locals().values())
    call = _validated(inputs)
    wide, inner_lse = schedules.run(call, wide=True)
    output, lse = call.restore(wide.to(query.dtype), inner_lse)
    # The output is the caller's, to change in place if he likes; the backward pass has its own.
    packed = torch.contiguous_format
    return output.clone(memory_format=packed), lse.clone(memory_format=packed), wide


def _validated(inputs: Sequence[Any]) -> Call:
    """Return the call that the operator's arguments mean."""
    query, key, value, mask, bias, sinks, causal, windowed, left, right, *rest = inputs
    offset_name, offset_number, offset, query_length, query_lengths, *rest = rest
    key_length, key_lengths, scale, softcap, rate, seed_number, seed, *rest = rest
    layout, engine, block_q, block_k = rest

    def first(*values: Any) -> Any:
        return next((value for value in values if value is not None), None)

    return validate(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        causal=causal,
        window=(left, right) if windowed else None,
        query_offset=first(offset_name, offset_number, offset),
        query_lengths=first(query_length, query_lengths),
        key_lengths=first(key_length, key_lengths),
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout=None if rate is None else Dropout(rate, first(seed_number, seed)),
        layout=layout,
        engine=engine,
        block_size=None if block_q is None else (block_q, block_k),
    )


@_attend.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = _validated(inputs)
    query, shape = inputs[0], call.problem.output_shape
    dtype = call.backend.dtype(call.problem.compute_dtype)
    output, lse = call.restore(query.new_empty(shape), query.new_empty(shape[:-1], dtype=dtype))
    wide = query.new_empty(shape, dtype=dtype)
    return torch.empty_like(output, memory_format=torch.contiguous_format), lse, wide


@torch.library.custom_op("portable_attention::attend_backward", mutates_args=())
def _attend_backward(
    d_output: Tensor | None,
    d_lse: Tensor | None,
    lse: Tensor,
    wide: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    windowed: bool,
    left: int | None,
    right: int | None,
    offset_name: str | None,
    offset_number: int | None,
    offset: Tensor | None,
    query_length: int | None,
    query_lengths: Tensor | None,
    key_length: int | None,
    key_lengths: Tensor | None,
    scale: float | None,
    softcap: float | None,
    rate: float | None,
    seed_number: int | None,
    seed: Tensor | None,
    layout: str,
    engine: str,
    block_q: int | None,
    block_k: int | None,
    of_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, bias and sinks; of size 0 for what is absent.

    That of the bias is made only if `of_bias`.
    """
    inputs = tuple(locals().values())[4:-1]
    call = _validated(inputs)
    given = Cotangents(
        wide,
        call.inner(lse, rows=True),
        torch.zeros_like(wide) if d_output is None else call.inner(d_output),
        None if d_lse is None else call.inner(d_lse, rows=True),
        of_bias,
    )
    found = schedules.run_backward(call, given)
    operands = dict(zip(_DIFFERENTIABLE, (query, key, value, bias, sinks), strict=True))
    gradients = [
        call.outer(name, found[name], array).contiguous() if name in found else query.new_empty(0)
        for name, array in operands.items()
    ]
    return gradients[0], gradients[1], gradients[2], gradients[3], gradients[4]


@_attend_backward.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    query, key, value, _, bias, sinks = inputs[4:10]
    bias = bias if inputs[-1] else None
    return tuple(
        query.new_empty(0)
        if array is None
        else torch.empty_like(array, memory_format=torch.contiguous_format)
        for array in (query, key, value, bias, sinks)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep the tensors for autograd and everything else as it is."""
    everything = (*output[1:], *inputs)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(one for one in everything if isinstance(one, Tensor)))
    ctx.others = [None if isinstance(one, Tensor) else (one,) for one in everything]


def _saved(ctx: Any) -> list[Any]:
    tensors = iter(ctx.saved_tensors)
    return [next(tensors) if other is None else other[0] for other in ctx.others]


def _backward(
    ctx: Any, d_output: Tensor | None, d_lse: Tensor | None, _: Tensor | None
) -> tuple[Any, ...]:
    lse, wide, *inputs = _saved(ctx)
    if d_output is None and d_lse is None:
        return (None,) * len(inputs)
    of_bias = ctx.needs_input_grad[4]
    gradients = iter(_attend_backward(d_output, d_lse, lse, wide, *inputs, of_bias))
    query, key, value = next(gradients), next(gradients), next(gradients)
    bias, sinks = (
        gradient if wanted else None
        for gradient, wanted in zip(gradients, (of_bias, inputs[5] is not None), strict=True)
    )
    return (query, key, value, None, bias, sinks, *([None] * (len(inputs) - 6)))


_attend.register_autograd(_backward, setup_context=_save)


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs, ())


# Where the differentiable arguments of `_attend_backward` stand, and in which order it returns
# the gradients of the last five.
_COTANGENTS = (0, 1)
_OPERANDS = (4, 5, 6, 8, 9)


def _backward_of_backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
    """Differentiate the gradients, by way of the same call in plain tensor operations."""
    inputs = _saved(ctx)
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves: dict[int, Tensor] = {}
        for place in (*_COTANGENTS, *_OPERANDS):
            if inputs[place] is not None:
                known = again and inputs[place].requires_grad
                leaves[place] = inputs[place] if known else inputs[place].detach().requires_grad_()
        arguments = [leaves.get(place, one) for place, one in enumerate(inputs)]
        call = _validated(arguments[4:-1])
        results = call.restore(*eager.run(call, inputs[4].dtype))
        given = [place for place in _COTANGENTS if place in leaves]
        operands = [place for place in _OPERANDS if place in leaves]
        first = torch.autograd.grad(
            [results[place] for place in given],
            [leaves[place] for place in operands],
            [leaves[place] for place in given],
            create_graph=True,
            allow_unused=True,
        )
        pairs = [
            (gradient, cotangents[_OPERANDS.index(place)])
            for gradient, place in zip(first, operands, strict=True)
            if gradient is not None
            and gradient.requires_grad
            and cotangents[_OPERANDS.index(place)] is not None
        ]
        if not pairs:
            return (None,) * len(inputs)
        second = torch.autograd.grad(
            [gradient for gradient, _ in pairs],
            list(leaves.values()),
            [cotangent for _, cotangent in pairs],
            create_graph=again,
            allow_unused=True,
        )
    found = dict(zip(leaves, second, strict=True))
    return tuple(found.get(place) for place in range(len(inputs)))


_attend_backward.register_autograd(_backward_of_backward, setup_context=_save_backward)
