"""What is timed, and the bar for it: one table, for the benchmarks, their tests and the docs.

Everything here is data. A workload is a few entries, each a way to compute (a name of
`benchmarks.peers.PEERS`) and a call; its bars compare medians of one run with one another.
"""

from __future__ import annotations

from benchmarks.records import Bar, Call, Entry, Workload

NUMPY, TORCH, JAX = "NumPy", "PyTorch tensors", "JAX, jit"  # this library's, by what it is given
SDPA, ORT, OPENVINO, JAX_NN = "torch SDPA", "ONNX Runtime", "OpenVINO", "jax.nn"
TWO, SEVEN, READING = "two products alone", "seven products alone", "reading alone"
NAIVE = "naive NumPy"
FUSED = (SDPA, ORT, OPENVINO)
OURS = (NUMPY, TORCH, JAX)

# What a condition of a bar means: for the tables, and for `benchmarks.measure`, which looks.
TORCH_PRODUCT_SLOWER = "where torch's own matrix product is the slower one"

GROUPS = {
    "forward": "Forward",
    "causal": "Forward, causal",
    "backward": "Forward and backward",
    "jax": "Under `jax.jit`",
    "window": "A window",
    "options": "Masks, biases and softcap",
    "half": "Half precision",
    "heads": "Grouped heads",
    "decoding": "Decoding, overhead, many small heads",
    "memory-bars": "Memory above inputs and output",
    "scores": "Large scores",
    "peers": "Every peer",
    "dense-lengths": "Time against length, dense",
    "window-lengths": "Time against length, window (256, 0)",
    "memory-lengths": "Memory against length",
}
CAUSAL = {"causal": True}
WINDOW = {"window": (256, 0)}
MAIN = (Call(1, 8, 1024, 64), Call(1, 8, 4096, 64), Call(1, 4, 4096, 128), Call(1, 2, 16384, 64))


def _dense(call: Call) -> Workload:
    ways = (NUMPY, TORCH, TWO, *FUSED)
    return Workload(
        f"dense-{call}",
        "forward",
        tuple(Entry(way, call) for way in ways),
        (
            Bar(NUMPY, (TWO,), 1.20),
            Bar(NUMPY, FUSED, 1.10),
            Bar(NUMPY, (SDPA,), 0.65, when=TORCH_PRODUCT_SLOWER),
            Bar(TORCH, (SDPA,), 1.02),
        ),
        quick=call.length == 1024,
    )


def _causal(call: Call) -> Workload:
    ways = (NUMPY, TORCH, TWO, *FUSED)
    dense = Entry(NUMPY, call, "NumPy, dense")
    return Workload(
        f"causal-{call}",
        "causal",
        (*(Entry(way, call.but(options=CAUSAL)) for way in ways), dense),
        (
            Bar(NUMPY, (dense.name,), 0.60),
            Bar(NUMPY, FUSED, 1.10),
            Bar(TORCH, (SDPA,), 1.02),
        ),
        quick=call.length == 1024,
    )


def _backward(width: int) -> Workload:
    call = Call(1, 8, 2048, width, backward=True)
    return Workload(
        f"backward-{call}",
        "backward",
        tuple(Entry(way, call) for way in (NUMPY, TORCH, SEVEN, SDPA)),
        (
            Bar(NUMPY, (SEVEN,), 1.35),
            Bar(NUMPY, (SDPA,), 0.65),
            Bar(TORCH, (SDPA,), 1.02),
        ),
        quick=width == 64,
    )


def _jax() -> tuple[Workload, ...]:
    call = Call(1, 8, 4096, 64)
    causal, dense = call.but(options=CAUSAL), Entry(JAX, call, "JAX, jit, dense")
    short, long = "JAX, jit, L = 4096", "JAX, jit, L = 16384"
    return (
        Workload(
            f"jax-{call}",
            "jax",
            (Entry(JAX, call), Entry(JAX_NN, call)),
            (Bar(JAX, (JAX_NN,), 0.30),),
        ),
        Workload(
            f"jax-causal-{call}",
            "jax",
            (Entry(JAX, causal), dense, Entry(JAX_NN, causal)),
            (Bar(JAX, (dense.name,), 0.65),),
        ),
        Workload(
            "memory-jax",
            "memory-bars",
            (
                Entry(JAX, call, short, measure="bytes"),
                Entry(JAX, call.but(length=16384), long, measure="bytes"),
            ),
            (Bar(long, (short,), 1.1, times=4.0),),
        ),
    )


def _window() -> Workload:
    call = Call(1, 1, 65536, 64, WINDOW)
    short = Entry(NUMPY, call.but(length=8192), "NumPy, L = 8192")
    long = Entry(NUMPY, call, "NumPy, L = 65536")
    dense = Entry(NUMPY, call.but(options=CAUSAL), "NumPy, L = 65536, causal")
    return Workload(
        "window-256",
        "window",
        (short, long, dense),
        (Bar(long.name, (short.name,), 1.3, times=8.0), Bar(long.name, (dense.name,), 0.025)),
    )


def _options() -> Workload:
    call = Call(1, 8, 2048, 64)
    bare = Entry(NUMPY, call, "bare")
    return Workload(
        f"options-{call}",
        "options",
        (
            bare,
            Entry(NUMPY, call.but(mask=True), "mask"),
            Entry(NUMPY, call.but(bias=True), "bias"),
            Entry(NUMPY, call.but(options={"softcap": 30.0}), "softcap"),
        ),
        (
            Bar("mask", (bare.name,), 1.3),
            Bar("bias", (bare.name,), 1.4),
            Bar("softcap", (bare.name,), 1.4),
        ),
        quick=True,
    )


def _half() -> Workload:
    call = Call(1, 8, 4096, 64)
    names = ("float32", "float16", "bfloat16")
    return Workload(
        f"half-{call}",
        "half",
        tuple(Entry(NUMPY, call.but(dtype=name), name) for name in names),
        tuple(Bar(name, ("float32",), 1.25) for name in names[1:]),
    )


def _heads() -> tuple[Workload, ...]:
    call = Call(1, 32, 4096, 64)
    grouped = {"32/8": call.but(kv_heads=8), "32/1": call.but(kv_heads=1)}
    full = Entry(NUMPY, call, "32/32")
    return (
        Workload(
            f"heads-{call}",
            "heads",
            (full, *(Entry(NUMPY, one, name) for name, one in grouped.items())),
            tuple(Bar(name, (full.name,), 1.05) for name in grouped),
        ),
        Workload(
            f"memory-heads-{call}",
            "memory-bars",
            tuple(Entry(NUMPY, one, name, measure="bytes") for name, one in grouped.items()),
            # One copy of the 8 heads of keys and values is 17 MB.
            tuple(Bar(name, at_most=16.0, unit="MB") for name in grouped),
        ),
    )


def _decoding() -> tuple[Workload, ...]:
    step = Call(8, 32, 1, 128, kv_heads=8, key_length=4096)
    small, many = Call(1, 1, 4, 8), Call(32, 12, 128, 64)
    return (
        Workload(
            "decoding",
            "decoding",
            tuple(Entry(way, step) for way in (NUMPY, READING, SDPA)),
            (Bar(NUMPY, (READING,), 1.25, fraction=True),),
        ),
        Workload(
            f"overhead-{small}",
            "decoding",
            tuple(Entry(way, small, repeat=300) for way in (NUMPY, TORCH, SDPA)),
            (Bar(NUMPY, at_most=40.0, unit="us"),),
            quick=True,
        ),
        Workload(
            f"batch-{many}",
            "decoding",
            tuple(Entry(way, many) for way in (NUMPY, TORCH, TWO, *FUSED)),
            (Bar(NUMPY, (SDPA,), 1.0), Bar(TORCH, (SDPA,), 1.02)),
            quick=True,
        ),
    )


def _long() -> Workload:
    call = Call(1, 1, 1 << 20, 64, {"window": (1024, 0)})
    return Workload(
        "memory-window-1048576",
        "memory-bars",
        (Entry(NUMPY, call, measure="bytes"),),
        (Bar(NUMPY, at_most=64.0, unit="MB"),),
    )


def _scores() -> Workload:
    """Inputs of another size, where the running maximum is needed: no bar, but no secret either."""
    call = Call(1, 8, 2048, 64)
    large = call.but(spread=4.0)
    return Workload(
        f"large-scores-{call}",
        "scores",
        (
            Entry(NUMPY, call, "NumPy, small scores"),
            Entry(NUMPY, large, "NumPy, large scores"),
            Entry(SDPA, large, "torch SDPA, large scores"),
        ),
    )


def _peers() -> tuple[Workload, ...]:
    call = Call(1, 8, 1024, 64)
    ways = (*OURS, TWO, *FUSED, "flex_attention", JAX_NN, "tokamax", "memory-efficient-attention")
    ways = (*ways, "MLX", NAIVE)
    return (
        Workload(f"peers-{call}", "peers", tuple(Entry(way, call) for way in ways)),
        Workload(
            f"peers-causal-{call}",
            "peers",
            tuple(Entry(way, call.but(options=CAUSAL)) for way in ways),
        ),
    )


def _lengths() -> tuple[Workload, ...]:
    found = []
    for length in (1 << power for power in range(10, 16)):
        call = Call(1, 1, length, 64)
        ways = (NUMPY, TWO, SDPA, *((NAIVE,) if length <= 8192 else ()))
        entries = tuple(Entry(way, call) for way in ways)
        found.append(Workload(f"lengths-dense-{length}", "dense-lengths", entries))
    for length in (1 << power for power in range(10, 19)):
        entries = (Entry(NUMPY, Call(1, 1, length, 64, WINDOW)),)
        found.append(Workload(f"lengths-window-{length}", "window-lengths", entries))
    for length in (1 << power for power in range(10, 21, 2)):
        call = Call(1, 1, length, 64)
        window = Entry(NUMPY, call.but(options=WINDOW), "NumPy, window", measure="bytes")
        ways = (NUMPY, SDPA) if length <= 16384 else ()
        entries = tuple(Entry(way, call, measure="bytes") for way in ways)
        if length <= 8192:
            entries = (*entries, Entry(NAIVE, call, measure="bytes"))
        found.append(Workload(f"lengths-memory-{length}", "memory-lengths", (*entries, window)))
    return tuple(found)


WORKLOADS = (
    *map(_dense, MAIN),
    *map(_causal, MAIN),
    *map(_backward, (64, 128)),
    *_jax(),
    _window(),
    _options(),
    _half(),
    *_heads(),
    *_decoding(),
    _long(),
    _scores(),
    *_peers(),
    *_lengths(),
)

GPU = (
    Call(4, 16, 2048, 64),
    Call(4, 16, 2048, 64, CAUSAL),
    Call(1, 16, 8192, 128),
    Call(1, 16, 8192, 128, CAUSAL),
)
