"""``portable-attention vectors`` and ``check``: the cases as files, and the results of others."""

from __future__ import annotations

from argparse import Namespace

from portable_attention.cli.conform import check_report, parse_conventions, write_reports
from portable_attention.cli.errors import CommandError, require
from portable_attention.conformance.cases import select
from portable_attention.conformance.vectors import (
    MANIFEST,
    VectorsError,
    check_results,
    write_vectors,
)


def vectors(args: Namespace) -> int:
    """Write the cases and return the exit status."""
    require("safetensors")
    if args.directory.exists() and not args.directory.is_dir():
        raise CommandError(f"'{args.directory}' is a file; name a directory")
    if args.case and not select(ids=args.case):
        raise CommandError(f"there is no case {', '.join(args.case)}; write group or group/name")
    try:
        count = write_vectors(args.directory, quick=args.quick, cases=args.case)
    except OSError as error:
        raise CommandError(f"cannot write to '{args.directory}': {error}") from error
    print(f"{count} cases in {args.directory}; {MANIFEST} lists them")
    return 0


def check(args: Namespace) -> int:
    """Judge results, print the verdict, and return the exit status."""
    require("safetensors")
    for path in args.report:
        check_report(path)
    if not args.results.is_dir():
        raise CommandError(f"there is no directory '{args.results}' of results")
    conventions = parse_conventions(args.convention)
    try:
        report = check_results(
            args.results, args.vectors, partial=args.partial, conventions=conventions
        )
    except VectorsError as error:
        raise CommandError(str(error)) from error
    write_reports(report, args.report)  # first: whoever reads the text may leave early
    print(report)
    return 0 if report.ok else 1
