"""Time attention on the CPU against the libraries' own: `python -m benchmarks.cpu`.

Ratios within one run are what counts; below 1 this library is the faster. "products" are the two
matrix products alone, tile by tile at the same size, which no implementation can be faster than.
"""

from __future__ import annotations

import os

# A setting of the environment may hold OpenBLAS to an older kernel; NumPy reads it when it loads.
for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE"):
    os.environ.pop(name, None)

import argparse  # noqa: E402
import importlib.util  # noqa: E402
import time  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
from threadpoolctl import threadpool_info  # noqa: E402

from benchmarks.timing import alternate, check_agreement, table  # noqa: E402
from benchmarks.workloads import CPU, LONG, QUICK, Workload  # noqa: E402
from portable_attention import attention  # noqa: E402
from portable_attention.core.plan import BLOCK, BUDGET  # noqa: E402
from portable_attention.core.threads import run_tasks  # noqa: E402


def numpy_inputs(work: Workload) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(work.shape, dtype=np.float32) for _ in range(3))


def products(work: Workload, query: Any, key: Any, value: Any) -> None:
    """Multiply what attention multiplies, tile by tile over the same threads."""
    block = min(BLOCK, work.length)
    stack = max(1, BUDGET // block**2)
    flat = [array.reshape(-1, work.length, work.width) for array in (query, key, value)]

    def task(head: int, row: int) -> None:
        q, k, v = (array[head : head + stack] for array in flat)
        q = q[:, row : row + block]
        stop = row + block if work.options.get("causal") else work.length
        for column in range(0, stop, block):
            scores = q @ np.swapaxes(k[:, column : column + block], 1, 2)
            scores @ v[:, column : column + block]

    starts = [
        (head, row)
        for head in range(0, len(flat[0]), stack)
        for row in range(0, work.length, block)
    ]
    run_tasks(iter([lambda at=at: task(*at) for at in starts]), len(starts))


def ways_of(work: Workload) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the ways to compute a workload, and what each gives."""
    inputs = numpy_inputs(work)
    causal = work.options.get("causal", False)
    ways: dict[str, Any] = {"numpy": lambda: attention(*inputs, **work.options)}
    results = {"numpy": ways["numpy"]()}
    if importlib.util.find_spec("torch"):
        import torch

        sdpa = torch.nn.functional.scaled_dot_product_attention
        tensors = [torch.from_numpy(array) for array in inputs]
        ways["torch"] = lambda: attention(*tensors, **work.options)
        ways["torch SDPA"] = lambda: sdpa(*tensors, is_causal=causal)
        results |= {name: ways[name]().numpy() for name in ("torch", "torch SDPA")}
    if importlib.util.find_spec("jax"):
        import jax

        arrays = [jax.numpy.asarray(array) for array in inputs]
        swapped = [jax.numpy.swapaxes(array, 1, 2) for array in arrays]
        ours = jax.jit(lambda *args: attention(*args, **work.options))
        theirs = jax.jit(lambda *args: jax.nn.dot_product_attention(*args, is_causal=causal))
        ways["jax"] = lambda: ours(*arrays).block_until_ready()
        ways["jax.nn"] = lambda: theirs(*swapped).block_until_ready()
        results["jax"] = np.asarray(ways["jax"]())
        results["jax.nn"] = np.swapaxes(np.asarray(ways["jax.nn"]()), 1, 2)
    ways["products"] = lambda: products(work, *inputs)
    return ways, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two small workloads, few rounds")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    for library in threadpool_info():
        if library["user_api"] == "blas":
            print(
                f"BLAS: {library['internal_api']} {library['version']}, "
                f"kernel {library.get('architecture')}, {library['num_threads']} threads"
            )
    rows = []
    for work in QUICK if arguments.quick else CPU:
        ways, results = ways_of(work)
        check_agreement(results, 1e-4)
        seconds = alternate(ways, 3 if arguments.quick else arguments.rounds)

        def ratio(one: str, other: str, seconds: dict[str, float] = seconds) -> str:
            known = one in seconds and other in seconds
            return f"{seconds[one] / seconds[other]:.2f}" if known else "-"

        rows.append(
            [
                str(work),
                *(
                    f"{1000 * seconds[name]:.1f}" if name in seconds else "-"
                    for name in ("numpy", "torch", "jax")
                ),
                ratio("numpy", "products"),
                ratio("numpy", "torch SDPA"),
                ratio("torch", "torch SDPA"),
                ratio("jax", "jax.nn"),
            ]
        )
    header = [
        "workload",
        "NumPy, ms",
        "PyTorch, ms",
        "JAX, ms",
        "NumPy / products",
        "NumPy / torch SDPA",
        "PyTorch / torch SDPA",
        "JAX / jax.nn",
    ]
    print(table(header, rows))
    if not arguments.quick:
        inputs = numpy_inputs(LONG)
        start = time.perf_counter()
        attention(*inputs, **LONG.options)
        print(f"{LONG}, NumPy: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
