"""Exact attention for every array library."""

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
