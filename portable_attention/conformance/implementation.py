"""What is held: a function, or its name, and the library of its arrays."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from portable_attention.conformance.adapter import Adapter


class ImplementationError(Exception):
    """The implementation cannot be imported, or its library or device cannot be used."""


@dataclass(frozen=True)
class Implementation:
    """What to call, and how.

    Parameters
    ----------
    function
        A callable, or its name, ``package.module:function`` or ``path/to/file.py:function``.
    backend, device
        The library and device of the arrays.
    vjp
        A callable with the signature of `portable_attention.attention_vjp`, or its name.
    """

    function: Callable[..., Any] | str
    backend: str = "numpy"
    device: str | None = None
    vjp: Callable[..., Any] | str | None = None

    def adapter(self) -> Adapter:
        """Import what is named, and return what makes calls of it."""
        try:
            return Adapter(
                resolved(self.function),
                self.backend,
                self.device,
                None if self.vjp is None else resolved(self.vjp),
            )
        except ImplementationError:
            raise
        except (Exception, SystemExit) as error:
            raise ImplementationError(f"{type(error).__name__}: {error}") from error


def name_of(function: Callable[..., Any] | str) -> str:
    """Return what a report calls an implementation."""
    if isinstance(function, str):
        return function
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name:  # an object that can be called
        module, name = type(function).__module__, type(function).__qualname__ + "()"
    return f"{module}:{name}"


def resolved(function: Callable[..., Any] | str) -> Callable[..., Any]:
    """Return a callable, importing it if it is named."""
    if not isinstance(function, str):
        return function
    where, _, name = function.rpartition(":")
    if not where or not name:
        raise ImplementationError(
            f"{function!r} names no function: write package.module:function or file.py:function"
        )
    try:
        found: Any = _imported(where)
        for part in name.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        raise ImplementationError(
            f"cannot import {function!r}: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise ImplementationError(f"{function!r} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def _imported(where: str) -> Any:
    if where.endswith(".py"):
        from importlib.util import module_from_spec, spec_from_file_location

        name = os.path.splitext(os.path.basename(where))[0]
        spec = spec_from_file_location(name, where)
        if spec is None or spec.loader is None or not os.path.exists(where):
            raise ImportError(f"there is no file {where!r}")
        module = module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(where)


def importable(implementation: Implementation) -> Implementation | None:
    """Return the implementation with names in place of its functions, if they can be imported."""
    function, vjp = _reference(implementation.function), None
    if implementation.vjp is not None and (vjp := _reference(implementation.vjp)) is None:
        return None
    if function is None:
        return None
    return Implementation(
        function,
        implementation.backend,
        implementation.device,
        vjp,
    )


def _reference(function: Callable[..., Any] | str) -> str | None:
    if isinstance(function, str):
        return function
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name:
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return f"{module}:{name}" if found is function and spec is not None else None
