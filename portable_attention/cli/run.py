"""``portable-attention run``: attention from a file to a file."""

from __future__ import annotations

import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from portable_attention import Dropout, __version__, attention
from portable_attention.cli import files, slices
from portable_attention.cli.errors import CommandError, require
from portable_attention.cli.libraries import Library, open_library
from portable_attention.cli.oracle import exact_attention
from portable_attention.core.spec import validate

Array = NDArray[Any]
Call = dict[str, Any]

_INPUTS: Final = ("query", "key", "value")
_ARRAYS: Final = (*_INPUTS, "mask", "bias", "sinks")  # what becomes an array of the library
_NUMBERS: Final = ("query_lengths", "key_lengths", "query_offset")  # by file or by option
_NAMES: Final = frozenset((*_ARRAYS, *_NUMBERS))


def run(args: Namespace) -> int:
    """Compute what the arguments ask for and return the exit status."""
    files.check_output(args.output, args.input)
    arrays, ignored = files.read_arrays(args.input, _NAMES)
    call = _call(args, arrays)
    if ignored:
        known = ", ".join((*_ARRAYS, *_NUMBERS))
        print(
            f"portable-attention: note: '{args.input}' also holds {', '.join(ignored)}, which "
            f"this does not read; it reads {known}",
            file=sys.stderr,
        )
    started = time.perf_counter()
    if args.backend == "oracle":
        where, output, lse = _on_oracle(args, call)
    else:
        library = open_library(args.backend, args.device)
        where = f"{library.name} {library.version} on {library.device}"
        output, lse = _on_library(args, library, call)
    seconds = time.perf_counter() - started
    files.write_arrays(args.output, {"output": output, "lse": lse}, _about(where, call))
    if not args.quiet:
        print(
            f"{args.output}: output {output.shape} {output.dtype}, lse {lse.shape} {lse.dtype}; "
            f"{where}, {seconds:.2f} s"
        )
    return 0


def _call(args: Namespace, arrays: files.Arrays) -> Call:
    """Return every argument of `attention`, from the file and the options."""
    missing = [name for name in _INPUTS if name not in arrays]
    if missing:
        raise CommandError(
            f"input '{args.input}' has no {' and no '.join(missing)}; it must hold query, key and "
            "value"
        )
    call: Call = {name: arrays.get(name) for name in (*_ARRAYS, *_NUMBERS)}
    for name in _NUMBERS:
        given = getattr(args, name)
        if given is not None and call[name] is not None:
            option = "--" + name.replace("_", "-")
            raise CommandError(
                f"{name} is in '{args.input}' and given as {option}, too: leave one of them out"
            )
        call[name] = call[name] if given is None else given
    _cast_inputs(args, call)
    if call["mask"] is not None:
        call["mask"] = _mask(call["mask"], args.integer_mask)
    for name in ("causal", "window", "scale", "softcap", "dropout", "layout", "block_size"):
        call[name] = getattr(args, name)
    return call


def _cast_inputs(args: Namespace, call: Call) -> None:
    dtypes = {name: str(call[name].dtype) for name in _INPUTS}
    if args.dtype is None and len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise CommandError(
            f"query, key and value must share one dtype, got {listed}: cast them with --dtype"
        )
    for name in _INPUTS:
        if np.issubdtype(call[name].dtype, np.integer) or call[name].dtype == np.bool_:
            raise CommandError(
                f"{name} has dtype {dtypes[name]}, not a floating one: store it as float16, "
                "bfloat16, float32 or float64"
            )
        if args.dtype is not None:
            call[name] = _cast(name, call[name], args.dtype)


def _cast(name: str, array: Array, dtype: str) -> Array:
    target = files.bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
    with np.errstate(over="ignore"):
        cast = array.astype(target)
    overflown = np.isinf(cast) & ~np.isinf(array)
    if overflown.any():
        worst = np.max(np.abs(array[overflown]))
        raise CommandError(
            f"--dtype {dtype}: {name} holds {worst:g}, which is too large for it; take a wider one"
        )
    return cast


def _mask(mask: Array, integers: bool) -> Array:
    if mask.dtype == np.bool_:
        return mask
    if not np.issubdtype(mask.dtype, np.integer):
        raise CommandError(
            f"mask has dtype {mask.dtype}, but must be bool (True = may attend); numbers that are "
            "added to the scores are named bias"
        )
    if not integers:
        raise CommandError(
            f"mask has dtype {mask.dtype}, but must be bool (True = may attend): store it as "
            "bool, or pass --integer-mask where 1 means may attend and 0 may not"
        )
    if not np.isin(mask, (0, 1)).all():
        raise CommandError("--integer-mask: the mask holds other numbers than 0 and 1")
    return mask.astype(np.bool_)


def _on_library(args: Namespace, library: Library, call: Call) -> tuple[Array, Array]:
    engine = "auto" if args.engine is None else args.engine

    def compute(part: Call, kept: Call) -> tuple[Array, Array]:
        native = {
            name: kept[name] if name in kept else library.from_numpy(part[name])
            for name in _ARRAYS
            if part[name] is not None
        }
        options = {name: value for name, value in part.items() if name not in _ARRAYS}
        output, lse = attention(**native, **options, engine=engine, return_lse=True)
        return library.to_numpy(output), library.to_numpy(lse)

    wide = any(call[name] is not None and call[name].dtype == np.float64 for name in _ARRAYS)
    with library.scope(wide), _plain_errors():
        # The same for every slice, and so moved to the device once.
        kept = {
            name: library.from_numpy(call[name])
            for name in ("key", "value", "sinks")
            if call[name] is not None
        }
        return _in_slices(call, args.quiet, lambda part: compute(part, kept))


def _on_oracle(args: Namespace, call: Call) -> tuple[str, Array, Array]:
    for option in ("device", "engine", "block_size"):
        if getattr(args, option) is not None:
            raise CommandError(
                f"--{option.replace('_', '-')} means nothing to the oracle, the plain formula on "
                "NumPy: leave it out, or take another --backend"
            )
    if args.dtype not in (None, "float64"):
        raise CommandError(
            f"--backend oracle computes in float64, not {args.dtype}: leave --dtype out"
        )
    with _plain_errors():
        validate(**call)
        options = {name: value for name, value in call.items() if name != "block_size"}
        output, lse = _in_slices(options, args.quiet, lambda part: exact_attention(**part))
    return f"float64 oracle, numpy {np.__version__}", output, lse


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Say in one line what a computation raised: a bad argument, or a device that gave up."""
    try:
        yield
    except MemoryError as error:
        raise CommandError(f"not enough memory: {error}") from error
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise CommandError(str(error) or type(error).__name__) from error


def _in_slices(
    call: Call, quiet: bool, compute: Callable[[Call], tuple[Array, Array]]
) -> tuple[Array, Array]:
    parts = slices.slices_of(call)
    results = [compute(part) for part in _progress(parts, quiet)]
    return (
        slices.joined([output for output, _ in results], slices.row_axis(call["layout"])),
        slices.joined([lse for _, lse in results], -1),
    )


def _progress(parts: list[Call], quiet: bool) -> Iterable[Call]:
    if quiet or len(parts) == 1:
        return parts
    return _shown(parts)


def _shown(parts: list[Call]) -> Iterator[Call]:
    progress = require("rich.progress")
    console = require("rich.console").Console(stderr=True)
    yield from progress.track(parts, description="attention", console=console)


def _about(where: str, call: Call) -> dict[str, str]:
    """Return what a reader of the output should know, as one string of JSON.

    One, since safetensors writes several in an order that changes from run to run.
    """
    options = {
        name: _told(value)
        for name, value in call.items()
        if name not in _INPUTS and value is not None and value is not False
    }
    about = {
        "made_by": f"portable-attention {__version__} run",
        "computed_by": where,
        "options": options,
        "lse": "natural logarithm of the softmax denominator",
    }
    return {"portable_attention": json.dumps(about)}


def _told(value: Any) -> Any:
    if isinstance(value, Dropout):
        return {"rate": value.rate, "seed": value.seed}
    if isinstance(value, np.ndarray):
        return value.tolist() if value.dtype.kind == "i" else f"{value.dtype} {value.shape}"
    return value
