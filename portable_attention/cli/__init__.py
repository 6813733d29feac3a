"""The command line: ``portable-attention demo``, ``run``, ``info``, ``conform`` and others."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from portable_attention.cli.errors import CommandError
from portable_attention.cli.parser import build_parser

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv
        The arguments after the program's name; None takes those of the process.

    Returns
    -------
    int
        The exit status: 0, 1 where the demo, ``conform`` or ``check`` found a wrong answer, 2 for a
        fault of the request or its files (told in one line on stderr), 130 after Ctrl-C.
    """
    try:
        args = build_parser().parse_args(argv)
        if args.command == "run":
            from portable_attention.cli.run import run as command
        elif args.command == "demo":
            from portable_attention.cli.demo import demo as command
        elif args.command == "conform":
            from portable_attention.cli.conform import conform as command
        elif args.command == "vectors":
            from portable_attention.cli.vectors import vectors as command
        elif args.command == "check":
            from portable_attention.cli.vectors import check as command
        else:
            from portable_attention.cli.info import info as command
        return command(args)
    except CommandError as error:
        print(f"portable-attention: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read the output has left; nothing more can be said to them.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("portable-attention: interrupted", file=sys.stderr)
        return 130
