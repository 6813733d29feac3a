"""Exact attention for every array library."""

from importlib import import_module
from types import ModuleType

from portable_attention._version import __version__
from portable_attention.attention import attention
from portable_attention.core.dropout import Dropout
from portable_attention.explain import Explanation, explain
from portable_attention.gradients import Gradients, attention_vjp
from portable_attention.states import State, merge_states, partial_attention

__all__ = [
    "Dropout",
    "Explanation",
    "Gradients",
    "State",
    "__version__",
    "attention",
    "attention_vjp",
    "explain",
    "merge_states",
    "partial_attention",
]


def __getattr__(name: str) -> ModuleType:
    """Import the conformance kit when it is first asked for."""
    if name == "conformance":
        return import_module("portable_attention.conformance")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
