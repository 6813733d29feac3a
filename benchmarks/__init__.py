"""Benchmarks: `python -m benchmarks`. Speed is measured here, and never in the tests."""
