"""``portable-attention conform``: hold an implementation against the specification."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from portable_attention.cli.errors import CommandError, require
from portable_attention.conformance import (
    CAPABILITIES,
    CaseResult,
    Conventions,
    ImplementationError,
    Report,
    discover,
)
from portable_attention.conformance import conform as hold
from portable_attention.conformance.cases import select


def conform(args: Namespace) -> int:
    """Run the cases, print the verdict, write the reports, and return the exit status."""
    for path in args.report:
        check_report(path)
    without = frozenset(args.without)
    _check_names({*(args.capabilities or ()), *without})
    if args.case and not select(ids=args.case):
        raise CommandError(f"there is no case {', '.join(args.case)}; write group or group/name")
    common: dict[str, Any] = {
        "backend": args.backend,
        "device": args.device,
        "vjp": args.vjp,
        "isolate": False if args.no_isolation else None,
        "time_limit": args.time_limit,
    }
    try:
        if args.discover:
            print(discover(args.implementation, **common))
            return 0
        conventions = parse_conventions(args.convention)
        with _Bar(quiet=args.quiet) as bar:
            report = hold(
                args.implementation,
                capabilities=args.capabilities,
                without=without,
                conventions=conventions,
                quick=args.quick,
                cases=args.case,
                progress=bar.show,
                **common,
            )
    except ImplementationError as error:
        raise CommandError(str(error)) from error
    write_reports(report, args.report)  # first: whoever reads the text may leave early
    print(report)
    return 0 if report.ok else 1


def parse_conventions(pairs: list[str]) -> Conventions:
    """Return what ``--convention`` says."""
    try:
        return Conventions.parse(pairs)
    except ValueError as error:
        raise CommandError(f"--convention: {error}") from error


def check_report(path: Path) -> None:
    """Refuse a report that could not be written, before anything is run."""
    if path.suffix.lower() not in (".html", ".json"):
        raise CommandError(f"--report '{path}': name a .html or a .json file")
    if not path.resolve().parent.is_dir():
        raise CommandError(f"--report '{path}': there is no directory '{path.resolve().parent}'")


def write_reports(report: Report, paths: Iterable[Path]) -> None:
    """Write a report to files, each in the format that its extension says."""
    for path in paths:
        try:
            (report.to_html if path.suffix.lower() == ".html" else report.to_json)(path)
        except OSError as error:
            raise CommandError(f"cannot write --report '{path}': {error}") from error


def _check_names(names: set[str]) -> None:
    if unknown := sorted(names - {*CAPABILITIES, "all"}):
        raise CommandError(
            f"there is no capability {', '.join(unknown)}; there are {', '.join(CAPABILITIES)}"
        )


class _Bar:
    """A progress bar on stderr, where that is a terminal."""

    def __init__(self, *, quiet: bool) -> None:
        self._progress: Any = None
        if not quiet and sys.stderr.isatty():
            rich_progress = require("rich.progress")
            console = require("rich.console").Console(stderr=True)
            self._progress = rich_progress.Progress(console=console, transient=True)
            self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> _Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, done: int, total: int, result: CaseResult) -> None:
        """Show how far the run is."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total, description=result.case)
