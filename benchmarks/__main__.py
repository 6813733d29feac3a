"""Measure this library against the floor of the machine and the other libraries on it.

    python -m benchmarks                 everything, in about a quarter of an hour
    python -m benchmarks --quick         a few workloads, in less than a minute
    python -m benchmarks --only 'dense*' causal-1x8x1024x64
    python -m benchmarks --docs          everything, and write the tables and plots of the docs

Ratios within one run are what counts: other programs move the times of all.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.environment import describe, lines, prepare

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    if "numpy" not in sys.modules:  # it reads the environment when it loads
        prepare(options.threads)
    elif options.threads is not None:
        raise SystemExit("--threads works in a process of its own: python -m benchmarks")
    from benchmarks.report import results_table, write_docs
    from benchmarks.workloads import WORKLOADS

    chosen = choose(options)
    if options.list:
        return _list(chosen)
    results = _load(options.load, {work.name for work in WORKLOADS})
    rounds = options.rounds or (3 if options.quick else 9)
    if chosen:
        results |= _measure(chosen, rounds, options.patience, results)
        order = [work.name for work in WORKLOADS]
        results["workloads"].sort(key=lambda one: order.index(one["name"]))
    print()
    print(results_table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.docs:
        for path in write_docs(results, DOCS):
            print(f"wrote {path}")
    return 0


def choose(options: argparse.Namespace) -> list[Any]:
    """Return the workloads that are asked for."""
    from benchmarks.workloads import WORKLOADS

    if options.only is None:
        return [work for work in WORKLOADS if work.quick or not options.quick]
    chosen = []
    for pattern in options.only:
        found = [work for work in WORKLOADS if fnmatch.fnmatchcase(work.name, pattern)]
        if not found:
            raise SystemExit(f"no workload is named {pattern!r}: see --list")
        chosen += found
    return [work for work in WORKLOADS if work in chosen]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="print the workloads, and what lacks")
    parser.add_argument("--quick", action="store_true", help="a few workloads, three rounds")
    parser.add_argument(
        "--only",
        nargs="*",
        metavar="NAME",
        help="these workloads; * and ? stand for any letters; no name at all measures nothing",
    )
    parser.add_argument("--rounds", type=int, help="runs of each entry (9; 3 with --quick)")
    parser.add_argument(
        "--patience",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="do a round over when other programs took more than 5 %% of the cores meanwhile, and "
        "wait until they are quiet, for so many seconds in all (0)",
    )
    parser.add_argument("--threads", type=int, help="cores to run on (all that there are)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to a file")
    parser.add_argument(
        "--load",
        type=Path,
        metavar="FILE",
        help="begin with the results of an earlier --json; what is measured now replaces them",
    )
    parser.add_argument("--docs", action="store_true", help="write docs/benchmarks.md and plots")
    return parser.parse_args(arguments)


def _list(chosen: list[Any]) -> int:
    from benchmarks.peers import PEERS

    for work in chosen:
        print(f"{work.name}: {', '.join(entry.name for entry in work.entries)}")
        for bar in work.bars:
            print(f"    {bar}")
    print("\nways:")
    for peer in PEERS.values():
        print(f"    {peer.name}: {peer.missing() or 'runs here'}")
    return 0


def _load(path: Path | None, known: set[str]) -> dict[str, Any]:
    if path is None:
        return {"workloads": []}
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    loaded["workloads"] = [one for one in loaded["workloads"] if one["name"] in known]
    return loaded


def _measure(
    chosen: list[Any], rounds: int, seconds: float, earlier: dict[str, Any]
) -> dict[str, Any]:
    """Measure workloads, and say so on the way; return all the results with those before."""
    from benchmarks.measure import measure, product_seconds
    from benchmarks.report import summary
    from benchmarks.timing import Patience

    start, patience = time.perf_counter(), Patience(seconds)
    products = product_seconds()  # first, so that the libraries it loads are counted
    environment = {**describe(), "product_seconds": products}
    print("\n".join(lines(environment)), flush=True)
    found = {one["name"]: one for one in earlier["workloads"]}
    for work in chosen:
        began = time.perf_counter()
        found[work.name] = measure(work, rounds, patience)
        print(f"\n{summary(found[work.name])}", flush=True)
        print(f"  ({time.perf_counter() - began:.0f} s)", flush=True)
    print(f"\n{time.perf_counter() - start:.0f} seconds in all")
    return {"format": 1, "environment": environment, "workloads": list(found.values())}


if __name__ == "__main__":
    sys.exit(main())
