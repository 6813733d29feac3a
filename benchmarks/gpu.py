"""Test and time attention on a GPU: `python -m benchmarks.gpu`.

Runs the test suite on CuPy, PyTorch on CUDA and JAX on a GPU, as far as they are there, and then
times attention against what each library has of its own: with the engine that it chooses, with
the portable tiles, and with a native kernel, or why there is none. Without a GPU it says so and
exits 0.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.records import Call
from benchmarks.timing import alternate, check_agreement, table
from benchmarks.workloads import GPU
from portable_attention import attention

DTYPES = ("float32", "float16", "bfloat16")
TOLERANCES = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}  # of a check, not of a test
Ways = dict[str, Callable[[], Any]]
ENGINES = {"": "auto", " portable": "portable", " native": "native"}  # by what a name ends in


def inputs(work: Call) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(work.shape, dtype=np.float32) for _ in range(3)]


def cupy_ways(work: Call, dtype: str) -> Ways:
    import cupy

    arrays = [cupy.asarray(array).astype(_dtype(dtype)) for array in inputs(work)]

    def dense() -> Any:
        query, key, value = (array.astype(cupy.float32) for array in arrays)
        scores = query @ key.swapaxes(-1, -2) / np.sqrt(work.width).astype(np.float32)
        if work.options.get("causal"):
            scores = cupy.where(cupy.tri(work.length, dtype=bool), scores, -cupy.inf)
        weights = cupy.exp(scores - scores.max(axis=-1, keepdims=True))
        return (weights @ value / weights.sum(axis=-1, keepdims=True)).astype(arrays[0].dtype)

    def done(way: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            result = way()
            cupy.cuda.get_current_stream().synchronize()
            return result

        return run

    def ours(engine: str) -> Callable[[], Any]:
        return done(lambda: attention(*arrays, **work.options, engine=engine))

    ways = {f"cupy{name}": ours(engine) for name, engine in ENGINES.items()}
    return {**ways, "cupy, dense formula": done(dense)}


def torch_ways(work: Call, dtype: str) -> Ways:
    import torch

    arrays = [torch.from_numpy(array).to("cuda", getattr(torch, dtype)) for array in inputs(work)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    causal = work.options.get("causal", False)

    def done(way: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            result = way()
            torch.cuda.synchronize()
            return result

        return run

    def ours(engine: str) -> Callable[[], Any]:
        return done(lambda: attention(*arrays, **work.options, engine=engine))

    ways = {f"torch{name}": ours(engine) for name, engine in ENGINES.items()}
    return {**ways, "torch SDPA": done(lambda: sdpa(*arrays, is_causal=causal))}


def jax_ways(work: Call, dtype: str) -> Ways:
    import jax

    arrays = [jax.numpy.asarray(array, dtype) for array in inputs(work)]
    swapped = [jax.numpy.swapaxes(array, 1, 2) for array in arrays]
    causal = work.options.get("causal", False)

    def ours(engine: str) -> Callable[[], Any]:
        run = jax.jit(lambda *args: attention(*args, **work.options, engine=engine))
        return lambda: run(*arrays).block_until_ready()

    ways: Ways = {f"jax{name}": ours(engine) for name, engine in ENGINES.items()}
    for engine in ("xla", "cudnn") if dtype != "float32" else ("xla",):
        theirs = jax.jit(
            lambda *args, engine=engine: jax.numpy.swapaxes(
                jax.nn.dot_product_attention(*args, is_causal=causal, implementation=engine), 1, 2
            )
        )
        ways[f"jax.nn {engine}"] = lambda theirs=theirs: theirs(*swapped).block_until_ready()
    return ways


def _dtype(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def to_numpy(array: Any) -> np.ndarray:
    if hasattr(array, "get"):
        array = array.get()
    elif hasattr(array, "cpu"):
        array = array.float().cpu().numpy()
    return np.asarray(array).astype(np.float32)


def results_of(ways: Ways) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return what each way gives, and why a native kernel refused, where one did.

    The first way is this library's own: it has to work.
    """
    first, *others = ways
    results, refusals = {first: to_numpy(ways[first]())}, []
    for name in others:
        try:
            results[name] = to_numpy(ways[name]())
        except Exception as error:  # each library and driver has errors of its own
            reason = str(error).strip().partition("\n")[0]
            refusals.append(f"{name}: {type(error).__name__} {reason}"[:300])
    return results, refusals


def devices(found: Iterable[str]) -> list[str]:
    """Return what the libraries run on, with their versions."""
    lines = []
    if "cupy" in found:
        import cupy

        name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        lines.append(f"cupy {cupy.__version__}: {name}")
    if "torch-cuda" in found:
        import torch

        lines.append(f"torch {torch.__version__}: {torch.cuda.get_device_name(0)}")
    if "jax-gpu" in found:
        import jax

        lines.append(f"jax {jax.__version__}: {jax.devices()[0].device_kind}")
    return lines


def libraries() -> dict[str, Callable[[Call, str], Ways]]:
    """Return the libraries that have a GPU here, by the names the tests give them."""
    found: dict[str, Callable[[Call, str], Ways]] = {}
    if importlib.util.find_spec("cupy"):
        import cupy

        try:
            if cupy.cuda.runtime.getDeviceCount():
                found["cupy"] = cupy_ways
        except cupy.cuda.runtime.CUDARuntimeError:
            pass
    if importlib.util.find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            found["torch-cuda"] = torch_ways
    if importlib.util.find_spec("jax"):
        import jax

        if jax.default_backend() == "gpu":
            found["jax-gpu"] = jax_ways
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-tests", action="store_true", help="time only")
    parser.add_argument("--json", type=Path, help="also write the medians, in seconds, to a file")
    arguments = parser.parse_args()
    found = libraries()
    if not found:
        print("No GPU that CuPy, PyTorch or JAX can use: nothing to test or time here.")
        return 0
    print("\n".join(devices(found)), flush=True)
    status = 0
    if not arguments.no_tests:
        chosen = [word for name in found for word in ("--backend", name)]
        status = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *chosen], check=False
        ).returncode
    rows, medians = [], {}
    for work in GPU:
        for dtype in DTYPES:
            for make in found.values():
                try:
                    ways = make(work, dtype)
                except TypeError as error:  # CuPy has bfloat16 in some of its versions only
                    rows.append([str(work), dtype, "-", "-", str(error)[:100]])
                    continue
                results, refusals = results_of(ways)
                check_agreement(results, TOLERANCES[dtype])
                seconds = alternate({name: ways[name] for name in results}, 9)
                first, *others = seconds
                medians[f"{work} {dtype} {first}"] = seconds
                ratios = [f"{name}: {seconds[first] / seconds[name]:.2f}" for name in others]
                rows.append(
                    [
                        *(str(work), dtype, first, f"{1000 * seconds[first]:.2f}"),
                        ", ".join(ratios + refusals),
                    ]
                )
    print(table(["workload", "dtype", "library", "ms", "ratio to"], rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(medians, indent=1), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
