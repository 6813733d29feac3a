"""The yardstick: hold anybody's attention kernel against the specification.

`conform` calls an implementation with every case and returns a `Report`: what is wrong, which rule
of docs/semantics.md it breaks, and by how many units of a rounding bound. The same cases can be
run with pytest,

    pytest --pyargs portable_attention.conformance --implementation mypkg.mod:attention

from the command line, ``portable-attention conform mypkg.mod:attention``, and from any language,
through the files that ``portable-attention vectors`` writes (docs/vectors.md).
"""

from portable_attention.conformance.capabilities import CAPABILITIES, Conventions
from portable_attention.conformance.discovery import Fingerprint, discover
from portable_attention.conformance.implementation import ImplementationError
from portable_attention.conformance.judge import Finding
from portable_attention.conformance.report import CaseResult, Report
from portable_attention.conformance.runner import conform

__all__ = [
    "CAPABILITIES",
    "CaseResult",
    "Conventions",
    "Finding",
    "Fingerprint",
    "ImplementationError",
    "Report",
    "conform",
    "discover",
]
