"""``portable-attention info`` names what a report of a fault needs."""

from __future__ import annotations

import platform
import sys

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from portable_attention import __version__
from portable_attention.cli import info, main


@pytest.fixture
def told(capsys):
    """Run the command; return a function from section and name to what is told."""

    def told():
        assert main(["info"]) == 0
        sections, title = {}, ""
        for line in capsys.readouterr().out.splitlines():
            if line.startswith("  "):
                name, _, text = line.strip().partition(" ")
                sections[title].setdefault(name, text.strip())
            else:
                title = line
                sections[title] = {}
        return sections

    return told


def test_versions_devices_and_blas(told, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    sections = told()
    assert sections["system"]["portable_attention"] == __version__
    assert sections["system"]["python"].startswith(platform.python_version())
    assert sections["packages"]["numpy"] == np.__version__
    assert {"torch", "jax", "cupy", "array-api-compat"} <= sections["packages"].keys()
    assert sections["devices"].keys() == {"numpy", "torch", "jax", "cupy", "strict"}
    assert sections["environment"]["OMP_WAIT_POLICY"] == "passive"
    pools = sections["BLAS and thread pools"]
    assert pools.keys() == {pool["internal_api"] for pool in threadpool_info()}
    for pool in threadpool_info():
        if "architecture" in pool:
            assert f"kernel {pool['architecture']}" in pools[pool["internal_api"]]


def test_needs_nothing_that_is_optional(told, monkeypatch):
    for name in ("torch", "jax", "cupy", "array_api_strict", "rich", "safetensors", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)
    sections = told()
    assert sections["devices"]["numpy"] == "cpu"
    for name in ("torch", "jax", "cupy", "strict"):
        assert "not available" in sections["devices"][name]


def test_package_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(info, "_PACKAGES", ("no-such-package",))
    assert info._packages() == [("no-such-package", "not installed")]


def test_broken_library_does_not_hide_the_rest(told, monkeypatch):
    def broken(name):
        raise OSError(f"lib{name}.so: undefined symbol")

    monkeypatch.setattr(info, "devices_of", broken)
    sections = told()
    assert "libjax.so: undefined symbol" in sections["devices"]["jax"]
    assert sections["BLAS and thread pools"]
