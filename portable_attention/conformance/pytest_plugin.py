"""The kit as a pytest plugin: one test item for each case.

It is registered by the module ``portable_attention.pytest_entry``, only where the kit is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest

from portable_attention.conformance.capabilities import CAPABILITIES, Conventions
from portable_attention.conformance.cases import Case, select
from portable_attention.conformance.holder import LIMIT, Holder
from portable_attention.conformance.implementation import ImplementationError

_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "--implementation": {"help": "what to hold: package.module:function or file.py:function"},
    "--backend": {"help": "the library of its arrays (default: numpy)"},
    "--device": {"help": "the device of its arrays, as the library writes it"},
    "--vjp": {"help": "its gradients, as those of portable_attention.attention_vjp"},
    "--quick": {"action": "store_true", "default": False, "help": "the quick cases alone"},
    "--capabilities": {"help": "what it can do, separated by commas, or all"},
    "--without": {"help": "what it cannot do, separated by commas"},
    "--convention": {"action": "append", "help": "key=value, where it deviates by intention"},
    "--time-limit": {"type": float, "help": f"seconds for one call (default: {LIMIT:g})"},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options, but for those that a conftest has taken."""
    group = parser.getgroup("conformance", "portable_attention.conformance")
    for name, about in _OPTIONS.items():
        try:
            group.addoption(name, **about)
        except ValueError:  # it is somebody else's; its value is read all the same
            continue


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what is held."""
    return [f"conformance: {_option(config, 'implementation')} on {_backend(config)}"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each case."""
    if "conformance_case" in metafunc.fixturenames:
        cases = select(quick=bool(_option(metafunc.config, "quick")))
        metafunc.parametrize("conformance_case", cases, ids=[case.id for case in cases])


@pytest.fixture(scope="session")
def conformance_holder(request: pytest.FixtureRequest) -> Iterator[Holder]:
    """Start the implementation that is held, in a process of its own."""
    config = request.config
    name = _option(config, "implementation")
    if not name:
        pytest.exit("--implementation package.module:function is missing", returncode=4)
    capabilities, without = (_names(_option(config, n)) for n in ("capabilities", "without"))
    try:
        holder = Holder(
            name,
            backend=_backend(config),
            device=_option(config, "device"),
            capabilities=capabilities,
            without=without or (),
            conventions=Conventions.parse(_option(config, "convention") or ()),
            vjp=_option(config, "vjp"),
            time_limit=_option(config, "time_limit") or LIMIT,
        )
    except (ImplementationError, ValueError) as error:
        pytest.exit(str(error), returncode=4)
    with holder:
        yield holder


def held(case: Case, holder: Holder) -> None:
    """Fail, or skip with the reason, by the verdict on a case."""
    if why := holder.why_not_applicable(case):
        pytest.skip(why)
    result = holder.case(case)
    if result.status in ("refused", "not run"):
        pytest.skip(f"{result.status}: {result.why}")
    if result.findings:
        lines = [f"{case.shows}"]
        for finding in result.findings:
            lines += ["", str(finding), finding.code]
        pytest.fail("\n".join(lines), pytrace=False)


def _option(config: pytest.Config, name: str) -> Any:
    return config.getoption(name, default=None)


def _backend(config: pytest.Config) -> str:
    backend = _option(config, "backend")
    if isinstance(backend, list):  # of a conftest that takes several
        backend = backend[0] if backend else None
    return backend or "numpy"


def _names(text: str | None) -> list[str] | None:
    if text is None:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := sorted(set(names) - {*CAPABILITIES, "all"}):
        raise ValueError(f"there is no capability {', '.join(unknown)}")
    return names
