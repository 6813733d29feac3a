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
    for name, says, epilog, add in (
        ("conform", _CONFORM, _CONFORM_MORE, _add_conform),
        ("vectors", _VECTORS, None, _add_vectors),
        ("check", _CHECK, None, _add_check),
    ):
        add(
            commands.add_parser(
                name,
                help=says,
                description=says,
                epilog=epilog,
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
_CONFORM: Final = "hold an implementation of attention against the specification"
_CONFORM_MORE: Final = """\
The implementation is called as function(query, key, value, **options), with the options of
portable_attention.attention that it names, on arrays of the chosen library.

exit status: 0 it conforms, 1 it does not, 2 it cannot be imported or called as asked

examples:
  portable-attention conform mypkg.mod:attention
  portable-attention conform kernel.py:attention --backend torch --device cuda --quick
  portable-attention conform mypkg.mod:attention --discover
  portable-attention conform mypkg.mod:attention --convention empty_rows=nan \\
      --without dropout,sinks --report report.html
"""
_VECTORS: Final = (
    "write the cases as files, with what must come of them and how far from it a result may lie: "
    "docs/vectors.md says how to use them from any language"
)
_CHECK: Final = "judge the results that another program wrote for the files of vectors"
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
    what.add_argument("--engine", default=None, help="auto, portable or native")
    what.add_argument(
        "--block-size", type=options.block_size, metavar="QUERIES,KEYS", help="force a tiling"
    )


def _add_conform(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "implementation",
        metavar="FUNCTION",
        help="package.module:function, or path/to/file.py:function",
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS[:-1],
        default="numpy",
        help="the library of the arrays that it takes (default: numpy)",
    )
    parser.add_argument("--device", help="as the library writes it: cuda, cuda:0, gpu:0")
    parser.add_argument("--vjp", metavar="FUNCTION", help="its gradients, as attention_vjp's")
    parser.add_argument("--quick", action="store_true", help="the quick cases alone")
    parser.add_argument(
        "--case",
        action="append",
        metavar="CASE",
        help="only this case, or this group of cases (may be repeated)",
    )
    parser.add_argument(
        "--capabilities",
        type=options.words,
        metavar="NAME[,NAME...]",
        help="what it can do, or all: this must be right, and everything else must raise",
    )
    parser.add_argument(
        "--without",
        type=options.words,
        default=[],
        metavar="NAME[,NAME...]",
        help="what it cannot do: this must raise (may be given with or without --capabilities)",
    )
    parser.add_argument(
        "--convention",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="where it deviates by intention, such as empty_rows=nan (may be repeated)",
    )
    parser.add_argument(
        "--discover",
        action="store_true",
        help="find out its conventions and capabilities, and print them",
    )
    parser.add_argument(
        "--report",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="write the report to a .html or .json file (may be repeated)",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="for one call (default: 20); the first one may take thrice as long",
    )
    parser.add_argument(
        "--no-isolation", action="store_true", help="make the calls in this process"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar")


def _add_vectors(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write the files")
    parser.add_argument("--quick", action="store_true", help="the quick cases alone")
    parser.add_argument(
        "--case",
        action="append",
        metavar="CASE",
        help="only this case, or this group of cases (may be repeated)",
    )


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results", type=Path, metavar="RESULTS", help="the directory of the results"
    )
    parser.add_argument(
        "--vectors", type=Path, required=True, metavar="DIR", help="what `vectors` wrote"
    )
    parser.add_argument(
        "--partial", action="store_true", help="results that are missing are no fault"
    )
    parser.add_argument(
        "--convention",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="empty_rows, empty_lse or lse_base, where they deviate by intention",
    )
    parser.add_argument(
        "--report",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="write the report to a .html or .json file (may be repeated)",
    )
