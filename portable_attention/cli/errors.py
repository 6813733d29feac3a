"""What the command line says when it cannot do what it was asked."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Final

CLI_EXTRA: Final = "pip install 'portable-attention[cli]'"


class CommandError(Exception):
    """A fault of the request or of its files: one line for the user, exit status 2."""

    def __str__(self) -> str:
        """Return the message on one line, whatever a library's own message looked like."""
        return " ".join(super().__str__().split())


def require(name: str) -> ModuleType:
    """Import a module of the ``cli`` extra, or say how to install it."""
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise CommandError(
            f"this command needs {package}, which cannot be imported ({error}): {CLI_EXTRA}"
        ) from error
