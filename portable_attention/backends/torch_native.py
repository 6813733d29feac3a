"""The fused kernel of PyTorch for CPUs, where it keeps to the rules and is the faster choice."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from portable_attention.backends import fused
from portable_attention.backends.base import Array

if TYPE_CHECKING:
    from portable_attention.core.backward import Cotangents
    from portable_attention.core.problem import Call, Problem

# Below so many scores the kernel is always as fast: starting tiles costs more than they do.
_FEW_SCORES = 1 << 22
# Beyond these a call takes a second and more on two cores, and Ctrl-C waits for its end.
_MANY_SCORES = 1 << 29
# Rows of a head that may be one task of it. A single task leaves its products to all threads.
_TASK_ROWS = 32
# The portable tiles must win by more than one short measurement errs.
_CLEARLY_FASTER = 0.9
# Beyond this an lse has lost digits that the weights made from it would lack.
_FAR_LSE = 64.0


class FlashOnCpu:
    """What `scaled_dot_product_attention` runs on a CPU, with the lse that it throws away.

    On x86 its products are those of MKL, which on some processors take twice the time of NumPy's
    OpenBLAS: whether it is faster is found out once a process.
    """

    name = "torch flash attention (CPU)"

    def breaks(self, call: Call) -> str | None:
        return None

    def refuses(self, call: Call) -> str | None:
        problem = call.problem
        if call.device.type != "cpu":
            return "it runs on the CPU alone"
        if (reason := fused.lacks(call)) is not None:
            return reason
        if problem.dtype not in ("float32", "float64"):
            return f"it rounds the weights to {problem.dtype}"
        if problem.groups != 1:
            return "it copies keys and values once a query head"
        if problem.width != problem.value_width:
            return "it wants values as wide as keys"
        if 0 in (*problem.output_shape, problem.key_length, problem.width):
            return "it stops the process where an axis is empty"
        lead = call.query.shape[:-3]
        if call.key.shape[:-3] != lead or call.value.shape[:-3] != lead:
            return "it copies what is broadcast"
        if _heads(problem) == 1 and problem.query_length <= _TASK_ROWS:
            return "the bits of so few rows would depend on the number of threads"
        return unplain(call.query, call.key, call.value)

    def is_worse(self, call: Call) -> str | None:
        problem = call.problem
        scores = problem.query_length * problem.key_length * _heads(problem)
        if scores > _MANY_SCORES:
            return "so long a call of it could not be interrupted"
        if scores < _FEW_SCORES:
            return None
        ratio = _portable_to_native("forward")
        if ratio >= _CLEARLY_FASTER:
            return None
        return f"the portable tiles took {ratio:.2f} of its time when both were measured"

    def run(self, call: Call) -> tuple[Array, Array] | None:
        problem = call.problem
        query, key, value = (_one_batch(problem, array) for array in _operands(call))
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, call.limits.high is not None, scale=problem.scale
        )
        # Before the kernel, a look at the inputs would wake OpenMP's threads for next to nothing,
        # and Linux then leaves all of them on one core for 10 ms: a call of 8 ms took 16.
        if not (_is_ordinary(call) and _all_finite(output)):
            return None
        shape = problem.output_shape
        return torch.reshape(output, shape), torch.reshape(lse, shape[:-1])

    def is_worse_backward(self, call: Call) -> str | None:
        """Return why the portable tiles are the better choice for the gradients, or None."""
        problem = call.problem
        heads = _heads(problem)
        if heads == 1:  # which is one task, whatever its length
            return "the bits of a single head would depend on the number of threads"
        scores = problem.query_length * problem.key_length * heads
        if scores > _MANY_SCORES // 2:
            return "so long a call of it could not be interrupted"
        if scores >= _FEW_SCORES and _portable_to_native("backward") < _CLEARLY_FASTER:
            return "the portable tiles were faster when both were measured"
        return None

    def run_backward(self, call: Call, given: Cotangents) -> dict[str, Array] | None:
        """Return the gradients of query, key and value, or None where it is not to be trusted."""
        problem, operands = call.problem, _operands(call)
        arrays = (*operands, given.output, given.d_output)
        # NumPy looks, which has no threads that this would wake.
        if given.d_lse is not None or not np.abs(given.lse.numpy()).max() <= _FAR_LSE:
            return None
        query, key, value, output, d_output = (_one_batch(problem, array) for array in arrays)
        lse = torch.reshape(given.lse, (-1, problem.kv_heads, problem.query_length)).contiguous()
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(d_output, query, key, value, output, lse, 0.0, call.limits.high is not None),
            scale=problem.scale,
        )
        # What is not finite in values, output or its gradient is not in these, either.
        if not (_is_ordinary(call) and _all_finite(*gradients)):
            return None
        names = ("query", "key", "value")
        return {
            name: torch.reshape(gradient, array.shape)
            for name, gradient, array in zip(names, gradients, operands, strict=True)
        }


def _operands(call: Call) -> tuple[Array, Array, Array]:
    return call.query, call.key, call.value


def _heads(problem: Problem) -> int:
    return math.prod((*problem.batch, problem.kv_heads))


def _one_batch(problem: Problem, array: Array) -> Array:
    return _in_rows(torch.reshape(array, (-1, problem.kv_heads, *array.shape[-2:])))


def _is_ordinary(call: Call) -> bool:
    """Whether queries and keys are finite and the scores are sure to be.

    Of a row of few queries that holds NaN the kernel makes zeros, which look like any others. The
    values need no look: what is not finite there, times whatever weight, is not in the output.
    """
    # No score is beyond the product of the norms of all queries and all keys.
    largest = _norm(call.query) * _norm(call.key) * abs(call.problem.scale)
    return largest < fused.FINITE_SCORE


def _all_finite(*arrays: Array) -> bool:
    # A finite sum of squares has finite terms; one of finite terms may still overflow.
    return all(math.isfinite(_norm(array)) or bool(torch.isfinite(array).all()) for array in arrays)


def _norm(array: Array) -> float:
    if not array.is_contiguous():  # but it may lie as packed, its axes in another order
        steps = array.stride()
        array = array.permute(sorted(range(array.ndim), key=steps.__getitem__, reverse=True))
    if array.is_contiguous():
        flat = array.view(-1)
        return math.sqrt(float(torch.dot(flat, flat)))  # in a third of the time of `vector_norm`
    return float(torch.linalg.vector_norm(array))


def _in_rows(array: Array) -> Array:
    """Return an array whose rows are packed and apart: of others the kernel makes nonsense."""
    *_, rows, columns = array.shape
    if array.stride(-1) == 1 and (rows == 1 or array.stride(-2) >= columns):
        return array
    copied: Array = array.contiguous()
    return copied


def unplain(*arrays: Array) -> str | None:
    """Return why tensors are not what a kernel may be given, or None."""
    from portable_attention.backends.torch_backend import is_plain, transforming

    if transforming():
        return "a transform of torch.func, or forward-mode differentiation, is at work"
    if torch.is_grad_enabled() and any(array.requires_grad for array in arrays):
        return "its derivative does not keep to the rules"
    if not all(is_plain(array) for array in arrays):
        return "the tensors are of a class of their own"
    return None


_measuring = threading.Lock()


def _after_fork() -> None:
    # Another thread of the parent may have been measuring, and is not there to let go.
    global _measuring
    _measuring = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _portable_to_native(direction: str) -> float:
    with _measuring:
        return _measured(direction)


@cache
def _measured(direction: str) -> float:
    """Return the time of the portable tiles over that of the kernel, on two heads of 1024."""
    from portable_attention.core import host, host_backward
    from portable_attention.core.backward import Cotangents
    from portable_attention.core.spec import validate

    query = torch.linspace(-1.0, 1.0, 2 * 1024 * 64).reshape(1, 2, 1024, 64)
    kernel, call = FlashOnCpu(), validate(query, query, query)
    hosted = call.backend.host_call(call)
    ways: dict[str, Callable[[], Any]] = {
        "portable": lambda: host.run(hosted, hosted.backend.dtype("float32")),
        "native": lambda: kernel.run(call),
    }
    if direction == "backward":
        output, lse = host.run(hosted, hosted.backend.dtype("float32"))
        on_host = Cotangents(output, lse, output, None)
        given = on_host.map(torch.from_numpy)
        ways = {
            "portable": lambda: host_backward.run(hosted, on_host),
            "native": lambda: kernel.run_backward(call, given),
        }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(4):
        for name, way in ways.items():
            time.sleep(0.004)  # OpenMP's threads keep the cores busy for a while after their work
            start = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - start)
    return best["portable"] / best["native"]
