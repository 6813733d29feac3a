"""The signatures and conventions of other attention functions, computed by this library.

One module each, named after the original's library. Its functions have the original's own name,
signature and conventions, so that code changes one import; they take the arrays of any library.
``native()`` goes the other way: it makes a callable with the signature of
`portable_attention.attention` from the original's own kernel, and says of each option that the
original lacks that it lacks it. No library is imported before its ``native()`` is called.
"""

from portable_attention.dialects import flash, jax, keras, mlx, onnx, torch

__all__ = ["flash", "jax", "keras", "mlx", "onnx", "torch"]
