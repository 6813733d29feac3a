"""cuDNN's attention on CuPy arrays, through the graphs of the package nvidia-cudnn-frontend.

For calls in half precision that ask for it by name. The package is imported by the first of them.
"""

from __future__ import annotations

import importlib.util
import math
import threading
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from portable_attention.backends import fused
from portable_attention.backends.base import Array, Declined

if TYPE_CHECKING:
    from portable_attention.core.problem import Call

_MISSING = (
    "it needs the package nvidia-cudnn-frontend: install portable-attention[cudnn-cuda12x] or "
    "portable-attention[cudnn-cuda13x]"
)
# A handle holds a stream, and a plan holds the workspace that it was last given.
_one_at_a_time = threading.Lock()


class CudnnOfCupy:
    """cuDNN's fused attention, forwards, with its softmax statistics, which are the lse."""

    name = "cuDNN attention (nvidia-cudnn-frontend)"

    def breaks(self, call: Call) -> str | None:
        return fused.rounds(call.problem)

    def refuses(self, call: Call) -> str | None:
        reason = fused.lacks(call) or fused.misfits(call, fused.HALVES)
        if reason is not None:
            return reason
        if call.problem.key_length == 1:
            return "cuDNN has no attention to one key"
        if not is_installed():
            return _MISSING
        try:
            version = int(frontend().backend_version())
        except (ImportError, OSError, RuntimeError) as error:
            return f"cuDNN cannot be loaded: {error}"
        reason = fused.aged(version, call.problem)
        if reason is None and not all(map(_is_packed, _operands(call))):
            return fused.UNPACKED
        return reason

    def is_worse(self, call: Call) -> str | None:
        return None

    def run(self, call: Call) -> tuple[Array, Array] | None:
        with call.device:
            return self._run(call)

    def _run(self, call: Call) -> tuple[Array, Array] | None:
        problem, xp = call.problem, call.backend.xp
        query, key, value = arrays = _operands(call)
        output = xp.empty((*query.shape[:-1], problem.value_width), dtype=query.dtype)
        lse = xp.empty((*query.shape[:-1], 1), dtype=xp.float32)
        plan = _plan(
            int(call.device),  # CuPy's devices have no hash
            tuple((tuple(array.shape), _strides(array)) for array in (*arrays, output, lse)),
            problem.dtype,
            problem.scale,
            fused.is_causal(call),
        )
        memory = xp.empty(max(plan.workspace, 1), dtype=xp.uint8)  # of CuPy's pool, and its stream
        plan.run([address(array) for array in (query, key, value, output, lse)], address(memory))
        if not _is_ordinary(call, arrays, output):
            return None
        shape = problem.output_shape
        return xp.reshape(output, shape), xp.reshape(lse, shape[:-1])


Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides, in numbers


def describe(
    handle: Any, layouts: tuple[Layout, ...], dtype: str, scale: float, causal: bool
) -> tuple[Any, tuple[Any, ...]]:
    """Return a graph that is valid but not built, with its tensors.

    The layouts are those of query, key, value, output and lse, and so are the tensors.
    """
    cudnn = frontend()
    half = cudnn.data_type.HALF if dtype == "float16" else cudnn.data_type.BFLOAT16
    wide = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=half, intermediate_data_type=wide, compute_data_type=wide, handle=handle
    )
    inputs = [
        graph.tensor(name=name, dim=list(shape), stride=list(strides), data_type=half)
        for name, (shape, strides) in zip(("query", "key", "value"), layouts[:3], strict=True)
    ]
    options: dict[str, Any] = {}
    if causal:
        options["diagonal_alignment"] = cudnn.diagonal_alignment.TOP_LEFT
        options["diagonal_band_right_bound"] = 0
    output, lse = graph.sdpa(
        q=inputs[0],
        k=inputs[1],
        v=inputs[2],
        attn_scale=scale,
        generate_stats=True,
        name="attention",
        **options,
    )
    for tensor, kind, (shape, strides) in ((output, half, layouts[3]), (lse, wide, layouts[4])):
        tensor.set_output(True).set_data_type(kind)
        tensor.set_dim(list(shape)).set_stride(list(strides))
    graph.validate()
    return graph, (*inputs, output, lse)


class _Plan:
    """A graph that is built for a device, and what it needs to run."""

    def __init__(
        self, device: int, layouts: tuple[Layout, ...], dtype: str, scale: float, causal: bool
    ) -> None:
        modes = frontend().heur_mode
        self.handle = _handle(device)
        self.graph, self.tensors = describe(self.handle, layouts, dtype, scale, causal)
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([modes.A, modes.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        self.workspace = int(self.graph.get_workspace_size())

    def run(self, addresses: list[Any], workspace: Any) -> None:
        """Start the kernel on CuPy's current stream."""
        with _one_at_a_time:
            frontend().set_stream(handle=self.handle, stream=stream())
            given = dict(zip(self.tensors, addresses, strict=True))
            self.graph.execute(given, workspace, handle=self.handle)


@lru_cache(maxsize=64)
def _built(*given: Any) -> _Plan:
    return _Plan(*given)


def _plan(*given: Any) -> _Plan:
    """Return the plan of a call, which takes a second to build, and is kept."""
    try:
        with _one_at_a_time:
            return _built(*given)
    except RuntimeError as error:  # which cuDNN's own errors are
        raise Declined(f"cuDNN has no plan for it: {error}") from error


@cache
def _handle(device: int) -> Any:
    return frontend().create_handle()  # of the current device, which `run` has made that one


@cache
def is_installed() -> bool:
    """Whether the package is there; it is not imported."""
    return importlib.util.find_spec("cudnn") is not None


@cache
def frontend() -> Any:
    """Return NVIDIA's module, importing it."""
    import cudnn

    return cudnn


def stream() -> int:
    """Return the address of CuPy's current stream."""
    import cupy

    return int(cupy.cuda.get_current_stream().ptr)


def address(array: Array) -> Any:
    """Return where an array begins on the device."""
    return int(array.data.ptr)


def _operands(call: Call) -> tuple[Array, Array, Array]:
    """Return query (B, Hq, Lq, D), key and value (B, Hkv, Lk, D)."""
    problem, reshape = call.problem, call.backend.reshape
    count, heads = fused.items(problem), problem.kv_heads
    query = reshape(
        call.query, (count, heads * problem.groups, problem.query_length, problem.width)
    )
    key = reshape(call.key, (count, heads, problem.key_length, problem.width))
    return query, key, reshape(call.value, (count, heads, problem.key_length, problem.value_width))


def _strides(array: Array) -> tuple[int, ...]:
    """Return the strides of an array in numbers, where a library gives bytes."""
    return tuple(stride // array.dtype.itemsize for stride in array.strides)


def _is_packed(array: Array) -> bool:
    item = array.dtype.itemsize
    return fused.is_packed(address(array), _strides(array), tuple(array.shape), item)


def _is_ordinary(call: Call, arrays: tuple[Array, ...], output: Array) -> bool:
    """Whether inputs and output are finite, and the scores are sure to be; waits once."""
    xp = call.backend.xp
    ends = [find(array) for array in (*arrays, output) for find in (xp.min, xp.max)]
    found = call.backend.read(xp.astype(xp.stack(ends), xp.float32))
    if found is None:  # never, on CuPy
        return False
    numbers = found.tolist()
    if not all(map(math.isfinite, numbers)):
        return False
    query, key = (max(map(abs, numbers[first : first + 2])) for first in (0, 2))
    return bool(fused.scores_are_finite(call.problem, query, key))
