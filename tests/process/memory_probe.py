"""Peak memory of calls, above inputs and output, measured in the process that this runs in."""

import ctypes
import gc
import importlib
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from portable_attention import Dropout, attention, partial_attention
from portable_attention.backends.numpy_backend import HostOps, numpy_backend

WIDTH = 8  # narrow heads: here it is the scores that must not be kept, and they cost time


@dataclass(frozen=True)
class Call:
    """A call for any length: heads, dtype, options, and how the inputs lie in memory."""

    heads: int = 1
    key_heads: int = 1
    batch: int = 1
    dtype: str = "float32"
    options: Callable[[int], dict[str, Any]] = lambda length: {}
    function: Callable[..., Any] = attention
    view: Callable[[np.ndarray], np.ndarray] = field(default=lambda array: array)

    def arguments(self, length: int) -> tuple[list[np.ndarray], dict[str, Any]]:
        rng = np.random.default_rng(length)
        dtype = self.dtype
        if dtype == "bfloat16":
            dtype = importlib.import_module("ml_dtypes").bfloat16
        options = self.options(length)
        arrays = []
        for heads in (self.heads, self.key_heads, self.key_heads):
            shape = (self.batch, heads, length, WIDTH)
            array = rng.standard_normal(shape, dtype=np.float32).astype(dtype)
            if options.get("layout") == "blhd":
                array = np.ascontiguousarray(array.swapaxes(1, 2))
            arrays.append(self.view(array))
        return arrays, options


def _options(**options: Any) -> Callable[[int], dict[str, Any]]:
    return lambda length: options


def _key_padding(length: int) -> np.ndarray:
    return (np.arange(length) < length - 100)[None, None, None, :]


def _key_bias(length: int) -> np.ndarray:
    return np.linspace(-1, 1, length, dtype=np.float32)[None, None, None, :]


def _lengths(length: int) -> np.ndarray:
    return np.asarray([length - 100])


def _broadcast(array: np.ndarray) -> np.ndarray:
    """Repeat a batch item without a copy; writeable, as PyTorch wants its memory."""
    return np.lib.stride_tricks.as_strided(array, (2, *array.shape[1:]), (0, *array.strides[1:]))


def _everything(length: int, heads: int = 4, **more: Any) -> dict[str, Any]:
    return {
        "mask": _key_padding(length),
        "bias": _key_bias(length),
        "causal": True,
        "window": (1024, 0),
        "query_offset": "end",
        "query_lengths": _lengths(length),
        "key_lengths": _lengths(length),
        "scale": 0.3,
        "softcap": 20.0,
        "sinks": np.zeros(heads, dtype=np.float32),
        "dropout": Dropout(0.25, 3),
        "return_lse": True,
        **more,
    }


CALLS: dict[str, Call] = {
    "bare": Call(),
    "scale": Call(options=_options(scale=-0.7)),
    "causal": Call(options=_options(causal=True)),
    "window": Call(options=_options(window=(512, 512))),
    "wide window": Call(options=lambda length: {"window": (length // 2, None)}),
    "offset": Call(options=lambda length: {"causal": True, "query_offset": np.asarray([100])}),
    "mask over keys": Call(options=lambda length: {"mask": _key_padding(length)}),
    "mask over queries": Call(options=lambda length: {"mask": _key_padding(length).mT}),
    "full mask": Call(options=lambda length: {"mask": np.ones((length, length), dtype=bool)}),
    "bias over keys": Call(options=lambda length: {"bias": _key_bias(length)}),
    "bias over queries": Call(options=lambda length: {"bias": _key_bias(length).mT}),
    "full bias": Call(
        options=lambda length: {"bias": np.zeros((length, length), dtype=np.float16)}
    ),
    "key lengths": Call(options=lambda length: {"key_lengths": _lengths(length)}),
    "query lengths": Call(options=lambda length: {"query_lengths": _lengths(length)}),
    "softcap": Call(options=_options(softcap=5.0)),
    "sinks": Call(options=_options(sinks=np.zeros(1, dtype=np.float32))),
    "dropout": Call(options=_options(dropout=Dropout(0.25, 3), causal=True)),
    "lse": Call(options=_options(return_lse=True)),
    "grouped heads": Call(heads=4, key_heads=2, options=_options(causal=True)),
    "one key head": Call(heads=2, options=_options(causal=True)),
    "batch": Call(batch=2, options=_options(causal=True)),
    "float16": Call(dtype="float16"),
    "bfloat16": Call(dtype="bfloat16"),
    "float64": Call(dtype="float64"),
    "block size": Call(options=_options(block_size=(200, 320))),
    "layout": Call(heads=2, key_heads=2, options=_options(layout="blhd", causal=True)),
    "broadcast": Call(view=_broadcast, options=_options(causal=True)),
    "reversed": Call(view=lambda array: array[..., ::-1, ::-1]),
    "portable": Call(options=_options(engine="portable")),
    "partial": Call(function=partial_attention),
    "all together": Call(heads=4, key_heads=2, options=_everything),
    "all in float16": Call(
        heads=2, key_heads=1, dtype="float16", options=partial(_everything, heads=2, layout="blhd")
    ),
}


def peaks(library: str, names: list[str], lengths: list[int]) -> dict[str, list[int]] | None:
    """Return the peak in bytes of each call at each length, above inputs and output.

    None where the library is to run on a GPU and there is none that it can use.
    """
    if not _usable(library):
        return None
    measure = {
        "jax": _compiled,
        "jax eager": _resident_jax,
        "torch": _resident_torch,
        "jax gpu": _compiled,
        "torch with gradients": partial(_resident_torch, gradients=True),
        "torch cuda": _allocated_torch,
        "cupy": _allocated_cupy,
    }.get(library, partial(_traced, library))
    return {
        name: [_in_a_thread(partial(measure, CALLS[name], length)) for length in lengths]
        for name in names
    }


def _usable(library: str) -> bool:
    if library == "torch cuda":
        return bool(importlib.import_module("torch").cuda.is_available())
    if library == "jax gpu":
        return importlib.import_module("jax").default_backend() == "gpu"
    if library == "cupy":
        cupy = importlib.import_module("cupy")
        try:
            return bool(cupy.cuda.runtime.getDeviceCount())
        except cupy.cuda.runtime.CUDARuntimeError:
            return False
    return True


def _in_a_thread(measure: Callable[[], int]) -> int:
    """Measure in a new thread, with none of the buffers that earlier calls have left."""
    numpy_backend().ops = HostOps()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(measure).result()


def _size(output: Any) -> int:
    """Return the bytes of an output, or of output and lse."""
    leaves = output if isinstance(output, tuple) else (output,)
    return sum(
        int(np.asarray(leaf).nbytes if hasattr(leaf, "_array") else leaf.nbytes) for leaf in leaves
    )


def _convert(call: Call, length: int, array_of: Callable[[np.ndarray], Any]) -> Callable[[], Any]:
    """Return the call with its arrays made, ready to be made without arguments."""
    arrays, options = call.arguments(length)
    inputs = [array_of(array) for array in arrays]
    keywords = {
        name: array_of(value) if isinstance(value, np.ndarray) else value
        for name, value in options.items()
    }
    return lambda: call.function(*inputs, **keywords)


def _traced(library: str, call: Call, length: int) -> int:
    """Every array of NumPy, and so of array-api-strict, is reported to tracemalloc."""
    xp = importlib.import_module(library)
    prepared = _convert(call, length, (lambda array: array) if xp is np else xp.asarray)
    gc.collect()
    tracemalloc.start()
    output = prepared()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak - _size(output)


def _compiled(call: Call, length: int) -> int:
    """XLA plans all its buffers before it runs: nothing needs to be run."""
    jax = importlib.import_module("jax")
    jax.config.update("jax_enable_x64", call.dtype == "float64")
    arrays, options = call.arguments(length)
    traced = {name: value for name, value in options.items() if isinstance(value, np.ndarray)}
    static = {name: value for name, value in options.items() if name not in traced}

    def run(inputs: list[Any], options: dict[str, Any]) -> Any:
        return call.function(*inputs, **options, **static)

    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), traced)
    inputs = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    compiled = jax.jit(run).lower(inputs, shapes).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def _tensor(array: np.ndarray, device: str = "cpu", gradients: bool = False) -> Any:
    torch = importlib.import_module("torch")
    if array.dtype.name == "bfloat16":
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    tensor = tensor.to(device)
    return tensor.requires_grad_() if gradients and tensor.is_floating_point() else tensor


def _resident_torch(call: Call, length: int, gradients: bool = False) -> int:
    tensor = partial(_tensor, gradients=gradients)
    _convert(call, 128, tensor)()  # starts the threads and whatever else is made once
    return _resident(_convert(call, length, tensor))


def _allocated_torch(call: Call, length: int) -> int:
    cuda = importlib.import_module("torch").cuda
    tensor = partial(_tensor, device="cuda")
    _convert(call, 128, tensor)()  # cuBLAS keeps a workspace from its first product on
    prepared = _convert(call, length, tensor)
    before = cuda.memory_allocated()
    cuda.reset_peak_memory_stats()
    output = prepared()
    return int(cuda.max_memory_allocated()) - before - _size(output)


def _allocated_cupy(call: Call, length: int) -> int:
    cupy = importlib.import_module("cupy")
    _convert(call, 128, cupy.asarray)()
    prepared = _convert(call, length, cupy.asarray)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    output = prepared()
    return int(pool.total_bytes()) - before - _size(output)  # the pool keeps what was freed


def _resident_jax(call: Call, length: int) -> int:
    jax = importlib.import_module("jax")
    prepared = _convert(call, length, jax.numpy.asarray)
    jax.block_until_ready(prepared())  # the compiler's own memory is not the call's
    return _resident(lambda: jax.block_until_ready(prepared()))


def _resident(prepared: Callable[[], Any]) -> int:
    """Return how far the resident memory of the process rises above inputs and output."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else freed memory that is kept would hide new memory
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM := VmRSS
    before = _status("VmRSS")
    output = prepared()
    return _status("VmHWM") - before - _size(output)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise LookupError(f"/proc/self/status has no {name}")


def million() -> dict[str, Any]:
    """One head of 2**20 rows with a window of 512: what it takes, and whether it is right."""
    length, width, left = 2**20, 64, 512
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 1, length, width), dtype=np.float32)
    tracemalloc.start()
    output = attention(query, key, value, window=(left, 0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    errors = []
    for row in (0, 1, 511, 512, 513, length // 2 + 1, length - 1):
        keys = slice(max(row - left, 0), row + 1)
        scores = key[0, keys].astype(np.float64) @ query[0, row] / np.sqrt(width)
        weights = np.exp(scores - scores.max())
        exact = weights / weights.sum() @ value[0, keys]
        errors.append(float(np.abs(output[0, row] - exact).max()))
    return {"peak": peak - output.nbytes, "error": max(errors)}


def retained(calls: int) -> int:
    """Return how many bytes more are held after many calls than after a few."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 4, 700, 16), dtype=np.float32)
    held = []
    tracemalloc.start()
    for count in (5, calls):
        for _ in range(count):
            attention(query, key, value, causal=True, softcap=5.0, return_lse=True)
        gc.collect()
        held.append(tracemalloc.get_traced_memory()[0])
    return held[1] - held[0]
