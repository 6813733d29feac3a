"""Collected by ``pytest --pyargs portable_attention.conformance``: every case is one test."""

from __future__ import annotations

from portable_attention.conformance.cases import Case
from portable_attention.conformance.holder import Holder
from portable_attention.conformance.pytest_plugin import held


def test_case(conformance_case: Case, conformance_holder: Holder) -> None:
    """The implementation does with the case what the specification says."""
    held(conformance_case, conformance_holder)
