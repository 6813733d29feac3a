"""`conform`: holds an implementation against all cases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from portable_attention.conformance.capabilities import Conventions
from portable_attention.conformance.cases import select
from portable_attention.conformance.holder import LIMIT, Holder
from portable_attention.conformance.report import CaseResult, Report

Progress = Callable[[int, int, CaseResult], object]


def conform(
    function: Callable[..., Any] | str,
    *,
    backend: str = "numpy",
    device: str | None = None,
    capabilities: Iterable[str] | None = None,
    without: Iterable[str] = (),
    conventions: Conventions | Mapping[str, str] | None = None,
    vjp: Callable[..., Any] | str | None = None,
    quick: bool = False,
    cases: Iterable[str] | None = None,
    progress: Progress | None = None,
    isolate: bool | None = None,
    time_limit: float = LIMIT,
) -> Report:
    """Hold an implementation of attention against every case.

    Parameters
    ----------
    function : callable or str
        Called as ``function(query, key, value, **options)``, with the options of
        `portable_attention.attention` that it declares, and only those that a case uses. A string
        names it: ``package.module:function`` or ``path/to/file.py:function``.
    backend : {"numpy", "torch", "jax", "cupy", "strict"}, default "numpy"
        The library of the arrays that it takes.
    device : str, optional
        As the library writes it.
    capabilities : iterable of str, optional
        What it can do: names of `CAPABILITIES`, or "all". What is declared has to be right, and
        what is not has to raise. By default its keywords speak for it, the rest is taken as
        declared, and where it refuses a dtype, grouped heads or a rank, that is reported and not
        held against it.
    without : iterable of str, optional
        What it cannot do: taken from `capabilities`, or from what they are by default.
    conventions : Conventions or mapping, optional
        Where it deviates from docs/semantics.md by intention.
    vjp : callable or str, optional
        Gradients, called as `portable_attention.attention_vjp`. By default ``function.vjp``, or
        the automatic differentiation of PyTorch and JAX.
    quick : bool, default False
        Run the quick cases alone.
    cases : iterable of str, optional
        Only these cases, by id or by group.
    progress : callable, optional
        Called with the number of cases done, their total, and the last `CaseResult`.
    isolate : bool, optional
        Make the calls in a process of their own, that may hang or crash. By default where that is
        possible: for functions that can be imported, and for all others on NumPy.
    time_limit : float, default 20
        Seconds for one call; the first one may take thrice as long.

    Returns
    -------
    Report
        ``report.ok``, ``report.findings``, ``print(report)``, ``report.to_html(path)``.

    Raises
    ------
    ImplementationError
        Where the implementation cannot be imported, or its library or device cannot be used.

    Examples
    --------
    >>> from portable_attention import attention
    >>> from portable_attention.conformance import conform
    >>> report = conform(attention, cases=["scale"], isolate=False)
    >>> report.ok
    True
    """
    start = time.perf_counter()
    agreed = (
        conventions if isinstance(conventions, Conventions) else Conventions(**(conventions or {}))
    )
    chosen = select(quick=quick, ids=cases)
    if not chosen:
        raise ValueError(f"there are no cases {cases!r}: write groups or whole ids")
    holder = Holder(
        function,
        backend=backend,
        device=device,
        capabilities=capabilities,
        without=without,
        conventions=agreed,
        vjp=vjp,
        isolate=isolate,
        time_limit=time_limit,
    )
    results: list[CaseResult] = []
    with holder:
        probes = holder.probes() if cases is None else []
        for case in (*chosen, *probes):
            results.append(holder.undeclared(case) if case in probes else holder.case(case))
            if progress is not None:
                progress(len(results), len(chosen) + len(probes), results[-1])
    return Report(
        implementation=holder.name,
        library=holder.library,
        device=holder.device,
        capabilities=holder.capabilities,
        declared=holder.declared,
        conventions=agreed,
        results=tuple(results),
        isolated=holder.isolated,
        quick=quick,
        seconds=time.perf_counter() - start,
    )
