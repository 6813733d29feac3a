"""Exact attention for every array library."""

from portable_attention._version import __version__

__all__ = ["__version__"]
