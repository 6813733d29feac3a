"""What the command line takes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final, NoReturn

from portable_attention._version import __version__
from portable_attention.cli import options
from portable_attention.cli.errors import CommandError

BACKENDS: Final = ("numpy", "torch", "jax", "cupy", "strict", "oracle")
DTYPES: Final = ("float16", "bfloat16", "float32", "float64")


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        if message.endswith("expected one argument"):
            message += " (one that begins with '-' is written --option=VALUE)"
        raise CommandError(f"{message}; see {self.prog} --help")


def build_parser() -> Parser:
    """Return the parser of ``portable-attention``."""
    parser = Parser(
        prog="portable-attention",
        description="Exact attention for every array library.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help=_DEMO, description=_DEMO, allow_abbrev=False))
    _add_run(
        commands.add_parser(
            "run",
            help=_RUN,
            description=_RUN,
            epilog=_FILES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
    )
    commands.add_parser("info", help=_INFO, description=_INFO, allow_abbrev=False)
    return parser


_DEMO: Final = (
    "attention of a real model that reads a real text, on every installed library: errors, "
    "times, a 131072-token head, and a picture"
)
_RUN: Final = "compute attention from a file of arrays and write output and lse to another"
_INFO: Final = "versions, devices, BLAS kernels and threads, for a report of a fault"
_FILES: Final = """\
files: .safetensors or .npz, told by the extension; nothing is ever unpickled.
  in   query, key, value, and where present mask, bias, sinks, query_lengths,
       key_lengths, query_offset; other names are left out, and named on stderr
  out  output and lse (natural logarithm); the file appears whole or not at all
  An .npz file cannot name bfloat16: there it stands as 2-byte void, as numpy.savez
  writes it.

examples:
  portable-attention run in.safetensors --causal -o out.safetensors
  portable-attention run in.npz --window 512,0 --query-offset end --backend torch -o out.npz
  portable-attention run in.safetensors --backend oracle -o exact.safetensors
"""


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE.png",
        help="where the attention map goes (default: portable-attention-map.png here)",
    )
    parser.add_argument(
        "--terminal", action="store_true", help="draw the attention map in the terminal instead"
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", type=Path, help="a .safetensors or .npz file")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the file to write")
    where = parser.add_argument_group("where, and in which dtype")
    where.add_argument(
        "--backend",
        choices=BACKENDS,
        default="numpy",
        help="the array library that computes; strict is array-api-strict; oracle is the plain "
        "formula in float64 on NumPy, with a float64 result (default: numpy)",
    )
    where.add_argument("--device", help="as the library writes it: cuda:0, gpu:0, 0, device1")
    where.add_argument("--dtype", choices=DTYPES, help="cast query, key and value to this first")
    where.add_argument("-q", "--quiet", action="store_true", help="no progress bar, no summary")
    what = parser.add_argument_group("options of attention")
    what.add_argument("--causal", action="store_true", help="no key after the own position")
    what.add_argument(
        "--window",
        type=options.window,
        metavar="LEFT,RIGHT",
        help="only so many keys before and after the own position; none is no limit",
    )
    what.add_argument(
        "--query-offset",
        type=options.query_offset,
        metavar="OFFSET",
        help="the position of query row 0: an integer, one for each batch item (3,5), start or "
        "end; required with --causal or --window where the lengths differ",
    )
    what.add_argument(
        "--query-lengths", type=options.counts, metavar="N[,N...]", help="valid query rows"
    )
    what.add_argument("--key-lengths", type=options.counts, metavar="N[,N...]", help="valid keys")
    what.add_argument("--scale", type=float, help="of the scores (default: 1/sqrt(width))")
    what.add_argument("--softcap", type=float, metavar="C", help="scores become C*tanh(score/C)")
    what.add_argument("--dropout", type=options.dropout, metavar="RATE,SEED")
    what.add_argument(
        "--integer-mask",
        action="store_true",
        help="take an integer mask of 0 and 1, 1 = may attend (default: a mask must be bool)",
    )
    what.add_argument("--layout", choices=("bhld", "blhd"), default="bhld", help="order of axes")
    what.add_argument("--engine", default=None, help="auto or portable")
    what.add_argument(
        "--block-size", type=options.block_size, metavar="QUERIES,KEYS", help="force a tiling"
    )
