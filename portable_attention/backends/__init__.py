"""What differs between array libraries: a handful of hooks, one thin file a library."""

from portable_attention.backends.base import Array, Backend
from portable_attention.backends.namespace import common_backend

__all__ = ["Array", "Backend", "common_backend"]
