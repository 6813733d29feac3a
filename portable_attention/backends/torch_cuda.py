"""The fused kernels of PyTorch for CUDA, where they keep to the rules and are the faster choice.

Imported when the first tensor on such a device is seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from portable_attention.backends import fused
from portable_attention.backends.base import Array, Declined
from portable_attention.backends.torch_native import unplain

if TYPE_CHECKING:
    from portable_attention.core.problem import Call

_aten = torch.ops.aten
# Below so many scores starting the portable tiles costs more than the kernel does.
_FEW_SCORES = 1 << 22


class OnCuda:
    """One of what `scaled_dot_product_attention` runs on CUDA, with the lse that it throws away."""

    name: ClassVar[str]
    condition: ClassVar[str]  # the function of torch.backends.cuda that lets it run
    dtypes: ClassVar[tuple[str, ...]] = fused.HALVES

    def breaks(self, call: Call) -> str | None:
        return fused.rounds(call.problem)

    def refuses(self, call: Call) -> str | None:
        if not is_on_cuda(call):
            return "it runs on CUDA devices alone"
        reason = fused.lacks(call) or fused.misfits(call, self.dtypes) or self._misfits(call)
        reason = reason or unplain(call.query, call.key, call.value)
        if reason is not None:
            return reason
        arrays = self._operands(call)
        if not all(map(_is_packed, arrays)):
            return fused.UNPACKED
        if not lets_run(self.condition, arrays, causal=fused.is_causal(call)):
            return f"torch.backends.cuda.{self.condition} says no"
        return None

    def is_worse(self, call: Call) -> str | None:
        return None

    def run(self, call: Call) -> tuple[Array, Array] | None:
        problem, arrays = call.problem, self._operands(call)
        try:
            output, lse = self._attend(*arrays, fused.is_causal(call), problem.scale)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise Declined(str(error).partition("\n")[0]) from error
        if not _is_ordinary(call, arrays, output):
            return None
        # One of them rounds the rows of its lse up to a multiple of 32, one adds an axis.
        lse = torch.reshape(lse, (*output.shape[:2], -1))[..., : output.shape[2]]
        shape = problem.output_shape
        return torch.reshape(output, shape), torch.reshape(lse, shape[:-1])

    def _misfits(self, call: Call) -> str | None:
        return None

    def _operands(self, call: Call) -> tuple[Array, Array, Array]:
        """Return query (B, Hq, Lq, D), key and value (B, Hkv, Lk, D)."""
        count, heads = fused.items(call.problem), call.problem.kv_heads

        def flat(array: Array, number: int) -> Array:
            return torch.reshape(array, (count, number, *array.shape[-2:]))

        query = flat(call.query, heads * call.problem.groups)
        return query, flat(call.key, heads), flat(call.value, heads)

    def _attend(
        self, query: Array, key: Array, value: Array, causal: bool, scale: float
    ) -> tuple[Array, Array]:
        raise NotImplementedError


class CudnnOnCuda(OnCuda):
    """cuDNN's own, for half precision."""

    name = "torch cuDNN attention (CUDA)"
    condition = "can_use_cudnn_attention"

    def _misfits(self, call: Call) -> str | None:
        return fused.aged(cudnn_version(), call.problem)

    def _attend(
        self, query: Array, key: Array, value: Array, causal: bool, scale: float
    ) -> tuple[Array, Array]:
        output, lse, *_ = _aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )
        return output, lse


class FlashOnCuda(OnCuda):
    """FlashAttention, for half precision."""

    name = "torch flash attention (CUDA)"
    condition = "can_use_flash_attention"

    def _attend(
        self, query: Array, key: Array, value: Array, causal: bool, scale: float
    ) -> tuple[Array, Array]:
        output, lse, *_ = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return output, lse


class EfficientOnCuda(OnCuda):
    """The one that takes float32.

    It makes float32 products of three TF32 ones each, whatever `allow_tf32` says. Whether that is
    exact enough, and faster than the portable tiles, is found out once a device.
    """

    name = "torch memory-efficient attention (CUDA)"
    condition = "can_use_efficient_attention"
    dtypes = ("float32", *fused.HALVES)

    def is_worse(self, call: Call) -> str | None:
        problem = call.problem
        if (reason := _errs(call.device)) is not None:
            return reason
        heads = fused.items(problem) * problem.kv_heads * problem.groups
        if heads * problem.query_length * problem.key_length < _FEW_SCORES:
            return None
        ratio = _portable_to_native(call.device)
        if ratio >= 1.0:
            return None
        return f"the portable tiles took {ratio:.2f} of its time when both were measured"

    def _misfits(self, call: Call) -> str | None:
        if call.problem.groups != 1 and fused.is_causal(call):
            return "it has causal calls for as many key heads as query heads alone"
        return None

    def _operands(self, call: Call) -> tuple[Array, Array, Array]:
        problem = call.problem
        if problem.groups == 1:
            return super()._operands(call)
        # Without positions, the query heads that share a key head are rows of one head.
        lead = (fused.items(problem), problem.kv_heads)
        query = torch.reshape(call.query, (*lead, -1, problem.width))
        key, value = (
            torch.reshape(array, (*lead, *array.shape[-2:])) for array in (call.key, call.value)
        )
        return query, key, value

    def _attend(
        self, query: Array, key: Array, value: Array, causal: bool, scale: float
    ) -> tuple[Array, Array]:
        output, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        return output, lse


# In the order in which PyTorch itself prefers them where it has measured.
KERNELS = (CudnnOnCuda(), FlashOnCuda(), EfficientOnCuda())


def is_on_cuda(call: Call) -> bool:
    """Whether a call is on a device of NVIDIA; ROCm goes by the same name."""
    return call.device.type == "cuda" and torch.version.hip is None


def lets_run(condition: str, arrays: tuple[Array, ...], *, causal: bool) -> bool:
    """Whether PyTorch itself would run a kernel on these tensors and their device."""
    query, key, value = arrays
    grouped = query.shape[1] != key.shape[1]
    params = torch.backends.cuda.SDPAParams(query, key, value, None, 0.0, causal, grouped)
    with torch.cuda.device(query.device):
        return bool(getattr(torch.backends.cuda, condition)(params))


def cudnn_version() -> int:
    """Return the version of PyTorch's cuDNN, such as 91501 for 9.15.1; 0 if it has none."""
    return torch.backends.cudnn.version() or 0


def _is_packed(array: Array) -> bool:
    item = array.element_size()
    return fused.is_packed(array.data_ptr(), array.stride(), tuple(array.shape), item)


def _is_ordinary(call: Call, arrays: tuple[Array, ...], output: Array) -> bool:
    """Whether inputs and output are finite, and the scores are sure to be.

    The device is waited for once, after the kernel has been started: that is no harm if its result
    is thrown away.
    """
    ends = [end for array in (*arrays, output) for end in torch.aminmax(array)]
    numbers = torch.stack(ends).tolist()
    if not all(map(math.isfinite, numbers)):
        return False
    query, key = (max(map(abs, numbers[first : first + 2])) for first in (0, 2))
    return bool(fused.scores_are_finite(call.problem, query, key))


@cache
def _errs(device: Any) -> str | None:
    """Return by how much float32 products on a device miss what the rules allow, or None.

    They allow twice the error of the dense formula in float32, and two units in the last place.
    """
    from portable_attention.core.spec import validate

    shape, generator = (1, 2, 200, 64), torch.Generator().manual_seed(0)
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    exact = [torch.randn(shape, generator=generator, **options).double() for _ in range(3)]
    worst = 0.0
    for causal, scale in ((False, 0.125), (True, 1.0)):  # scores of a few units, and of dozens
        call = validate(
            *(array.to(device, torch.float32) for array in exact), causal=causal, scale=scale
        )
        try:
            found = EfficientOnCuda().run(call)
        except Declined as reason:
            return str(reason)
        if found is None:
            return "its output was not finite when it was tried"
        wanted = _dense(exact, causal, scale)
        honest = _dense([array.float() for array in exact], causal, scale)
        for ours, theirs, right in zip(found, honest, wanted, strict=True):
            error = (torch.reshape(ours, right.shape).cpu().double() - right).abs().max()
            unit = torch.finfo(torch.float32).eps * max(1.0, float(right.abs().max()))
            allowed = 2 * (theirs.double() - right).abs().max() + 2 * unit
            worst = max(worst, float(error / allowed))
    if worst <= 1.0:
        return None
    return f"its error was {worst:.1f} times what is allowed when it was tried"


def _dense(inputs: list[Array], causal: bool, scale: float) -> tuple[Array, Array]:
    """Return output and lse of the plain formula, in the dtype of the inputs."""
    query, key, value = inputs
    scores = query @ key.mT * scale
    if causal:
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return torch.softmax(scores, -1) @ value, torch.logsumexp(scores, -1)


@cache
def _portable_to_native(device: Any) -> float:
    """Return the time of the portable tiles over that of the float32 kernel, on 8 heads of 2048."""
    from portable_attention.core import eager
    from portable_attention.core.spec import validate

    query = torch.linspace(-1.0, 1.0, 8 * 2048 * 64, dtype=torch.float32, device=device)
    query = query.reshape(1, 8, 2048, 64)
    call = validate(query, query, query)
    ways: dict[str, Callable[[], Any]] = {
        "portable": lambda: eager.run(call, torch.float32),
        "native": lambda: EfficientOnCuda().run(call),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(4):  # the first of which also loads the code
        for name, way in ways.items():
            wait(device)
            start = time.perf_counter()
            way()
            wait(device)
            best[name] = min(best[name], time.perf_counter() - start)
    return best["portable"] / best["native"]


def wait(device: Any) -> None:
    """Wait until a device has done what it was given."""
    torch.cuda.synchronize(device)
