"""Gives pytest the options of the conformance kit, where it is asked to run the kit.

    pytest --pyargs portable_attention.conformance --implementation mypkg.mod:attention

pytest loads the plugins of every package that is installed. So this one is small, and does nothing
in all other runs: no options, and no import but that of the package itself.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

KIT = "portable_attention.conformance"


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, args: list[str]
) -> Generator[None, Any, Any]:
    """Register the kit's own plugin after the conftests, whose options come first."""
    result = yield
    if any(KIT in str(argument) for argument in args):
        from portable_attention.conformance import pytest_plugin

        if not early_config.pluginmanager.is_registered(pytest_plugin):
            early_config.pluginmanager.register(pytest_plugin, pytest_plugin.__name__)
    return result
