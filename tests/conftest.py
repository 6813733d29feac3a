"""The backend, xp and device fixtures, and the options that choose what they run over.

A test that takes `backend` runs over every row of the table that can run here; test_backends.py
names the others. ``@pytest.mark.needs(autodiff=True)`` leaves it the rows with that capability.
What else it runs over may depend on the row: `dtype`, and what its module lists in BACKEND_AXES.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from .backends import BACKENDS, Backend

settings.register_profile(
    "suite",
    deadline=None,  # the first call of a shape may compile
    derandomize=True,  # the same examples on every machine: no test that fails now and then
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("suite")

MISSING = {name: backend.missing() for name, backend in BACKENDS.items()}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("portable_attention")
    group.addoption(
        "--backend",
        action="append",
        choices=list(BACKENDS),
        help="run over this backend only (may be repeated); all that can run here by default",
    )
    group.addoption(
        "--combinations",
        type=int,
        help="random option combinations for each backend, in place of the short default",
    )
    group.addoption(
        "--first-combination",
        type=int,
        default=0,
        help="the number of the first random combination: to run one again, or others",
    )


def _chosen(config: pytest.Config) -> list[str]:
    chosen = config.getoption("--backend") or list(BACKENDS)
    return [name for name in BACKENDS if name in chosen]


def _dtypes(backend: Backend, _config: pytest.Config) -> tuple[str, ...]:
    """Return the dtypes of the tests that run over dtypes; float32 is in all the others."""
    # Each is compiled anew: a half and a double then stand for the rest.
    return ("bfloat16", "float64") if backend.compiled else backend.dtypes


def pytest_report_header(config: pytest.Config) -> list[str]:
    lines = []
    for name in _chosen(config):
        lines.append(f"backend {name}: {MISSING[name] or 'runs'}")
    return lines


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "needs(**capabilities): run over the backends that have these alone"
    )
    for name in config.getoption("--backend") or ():
        if MISSING[name]:
            raise pytest.UsageError(f"--backend {name} {MISSING[name]}")


def _suited(metafunc: pytest.Metafunc) -> Iterator[Backend]:
    """Yield the backends that run here and have what the test needs."""
    marks = [mark.kwargs for mark in metafunc.definition.iter_markers("needs")]
    for name in _chosen(metafunc.config):
        backend = BACKENDS[name]
        if not MISSING[name] and all(
            getattr(backend, what) == value for needs in marks for what, value in needs.items()
        ):
            yield backend


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if any("backend" in (names if isinstance(names, str) else list(names)) for names in own):
        return  # the test names its backends itself
    if "backend" in metafunc.fixturenames:
        known = {"dtype": _dtypes, **getattr(metafunc.module, "BACKEND_AXES", {})}
        axes = {name: axis for name, axis in known.items() if name in metafunc.fixturenames}
        rows = [
            (backend.name, *others)
            for backend in _suited(metafunc)
            for others in itertools.product(
                *(axis(backend, metafunc.config) for axis in axes.values())
            )
        ]
        names = ["backend", *axes]
        ids = ["-".join(map(str, row)) for row in rows]
        if not rows:
            needed = [mark.kwargs for mark in metafunc.definition.iter_markers("needs")]
            skip = pytest.mark.skip(reason=f"needs a backend with {needed}")
            rows, ids = [pytest.param(*names, marks=skip)], ["none"]
        metafunc.parametrize(names, rows, indirect=["backend"], scope="session", ids=ids)
    if "each_backend" in metafunc.fixturenames:
        marks = [
            pytest.param(name, marks=pytest.mark.skip(reason=f"{name} {MISSING[name]}"))
            if MISSING[name]
            else name
            for name in _chosen(metafunc.config)
        ]
        metafunc.parametrize("each_backend", marks)


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest):
    """One row of the table of backends, set up."""
    row: Backend = BACKENDS[request.param]
    with row.active():
        yield row


@pytest.fixture(scope="session")
def xp(backend: Backend):
    """The namespace of the backend's library."""
    return backend.xp


@pytest.fixture(scope="session")
def device(backend: Backend):
    """The device that the backend's arrays lie on."""
    return backend.device_object()


@pytest.fixture(scope="session")
def tilings(backend: Backend) -> list[tuple[int, int] | None]:
    """Block sizes to run a rule with: the library's own, odd ones, and one beyond any call."""
    # Where each tiling is compiled, the one that cuts both axes into several tiles.
    return [(3, 2)] if backend.compiled else [None, (1, 1), (3, 2), (64, 64)]
