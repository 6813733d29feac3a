"""No backend is imported before an array of it is seen, nor anything else that is optional."""

import importlib.util

import pytest
from fresh_process import answer
from import_probe import OPTIONAL

SECONDS = 120


def need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package} installed: what is not there is not imported anyhow")


def test_importing_the_package_imports_nothing_optional():
    for package in OPTIONAL:
        need(package)
    assert answer("import_probe.after_import", timeout=SECONDS) == []


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_numpy_arrays_import_nothing_optional(dtype):
    for package in OPTIONAL:
        need(package)
    assert answer("import_probe.after_call", "numpy", dtype, timeout=SECONDS) == []


@pytest.mark.parametrize("library", ["torch", "jax", "array_api_strict"])
def test_arrays_of_one_backend_import_no_other(library):
    need(library)
    assert answer("import_probe.after_call", library, "float32", timeout=SECONDS) == []


def test_numpy_works_where_nothing_optional_is_installed():
    """Not even tried: an import that fails costs time, and one that works costs far more."""
    assert answer("import_probe.without_optional_packages", timeout=SECONDS) == []
