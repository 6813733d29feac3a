"""cuDNN's attention by way of JAX, for calls that ask for it by name.

One compiled function runs the kernel, looks at inputs and output, and takes the portable tiles
where something is not finite: so the rules for NaN hold under a trace, too, where nobody can read
values. A call that is differentiated takes the portable tiles, whose derivatives keep to the rules,
to any order and in both modes. Under `vmap` both run, and the result is selected.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from portable_attention.backends import fused
from portable_attention.backends.base import Array, Declined

if TYPE_CHECKING:
    from portable_attention.core.problem import Call


class CudnnOfJax:
    """What `jax.nn.dot_product_attention(implementation="cudnn")` runs, with the lse in float32.

    That function rounds the lse to half precision, so the one below it is called.
    """

    name = "jax.nn.dot_product_attention (cuDNN)"

    def breaks(self, call: Call) -> str | None:
        return fused.rounds(call.problem) if is_on_cuda(call.device) else None

    def refuses(self, call: Call) -> str | None:
        if not is_on_cuda(call.device):
            return "it runs on CUDA devices alone"
        reason = fused.lacks(call) or fused.misfits(call, fused.HALVES)
        if reason is not None:
            return reason
        if call.problem.key_length == 1:
            return "cuDNN has no attention to one key"
        shapes = (_query_shape(call), *_key_shapes(call))
        scale, causal = call.problem.scale, fused.is_causal(call)
        return fused.aged(cudnn_version(), call.problem) or _says_no(
            shapes, call.problem.dtype, scale, causal
        )

    def is_worse(self, call: Call) -> str | None:
        return None

    def run(self, call: Call) -> tuple[Array, Array] | None:
        # What is left of the call is hashable, and known before any value is.
        static = replace(call, query=None, key=None, value=None)
        try:
            found: tuple[Array, Array] = _attend(static, call.query, call.key, call.value)
        except NotImplementedError as error:
            raise Declined(str(error)) from error
        return found


@partial(jax.jit, static_argnums=0)
def _attend(static: Call, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
    from portable_attention.core import scan

    def portable(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        call = replace(static, query=query, key=key, value=value)
        return scan.run(call, query.dtype)

    @jax.custom_jvp
    def attend(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        found = _run(static, query, key, value)
        ordinary = _is_ordinary(static, query, key, value, found[0])
        chosen: tuple[Array, Array] = lax.cond(
            ordinary, lambda *_: found, portable, query, key, value
        )
        return chosen

    @attend.defjvp
    def _(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> Any:
        return jax.jvp(portable, primals, tangents)

    result: tuple[Array, Array] = attend(query, key, value)
    return result


def _run(static: Call, query: Array, key: Array, value: Array) -> tuple[Array, Array]:
    call = replace(static, query=query, key=key, value=value)
    key_shape, value_shape = _key_shapes(call)
    output, lse = kernel(
        jnp.reshape(query, _query_shape(call)),
        jnp.reshape(key, key_shape),
        jnp.reshape(value, value_shape),
        scale=call.problem.scale,
        causal=fused.is_causal(call),
    )
    shape = call.problem.output_shape
    return jnp.reshape(output, shape), jnp.reshape(lse, shape[:-1])


def _is_ordinary(static: Call, query: Array, key: Array, value: Array, output: Array) -> Array:
    """Whether inputs and output are finite, and the scores are sure to be."""
    # A maximum is NaN where anything is.
    query, key, value, output = (
        jnp.max(jnp.abs(array)).astype(jnp.float32) for array in (query, key, value, output)
    )
    finite = fused.scores_are_finite(static.problem, query, key)
    return finite & jnp.isfinite(value) & jnp.isfinite(output)


def kernel(
    query: Array, key: Array, value: Array, *, scale: float, causal: bool
) -> tuple[Array, Array]:
    """Return output (B, Hq, Lq, D) and lse (B, Hq, Lq) from arrays (B, H, L, D)."""
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    output, lse = dot_product_attention(
        query,
        key,
        value,
        scale=scale,
        mask_type=MaskType.CAUSAL if causal else MaskType.NO_MASK,
        qkv_layout="BNTH",
        return_residual=True,
    )
    return output, lse


def is_on_cuda(device: Any) -> bool:
    """Whether a call is on a GPU; None is wherever JAX puts what is not bound to a device."""
    platform = jax.default_backend() if device is None else device.platform
    return platform in ("gpu", "cuda")


def cudnn_version() -> int:
    """Return the version of JAX's cuDNN, such as 91501 for 9.15.1; 0 if it has none."""
    try:
        from jax._src.cudnn.fused_attention_stablehlo import check_cudnn_version

        return int(check_cudnn_version())
    except (ImportError, RuntimeError):
        return 0


@lru_cache(maxsize=256)
def _says_no(
    shapes: tuple[tuple[int, ...], ...], dtype: str, scale: float, causal: bool
) -> str | None:
    """Return why JAX does not take a call of these shapes, or None; nothing is compiled."""
    arrays = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    try:
        jax.eval_shape(partial(kernel, scale=scale, causal=causal), *arrays)
    except Exception as error:  # of whichever kind: a function that JAX keeps to itself
        return f"JAX says no: {error}"
    return None


def _query_shape(call: Call) -> tuple[int, ...]:
    problem = call.problem
    heads = problem.kv_heads * problem.groups
    return (fused.items(problem), heads, problem.query_length, problem.width)


def _key_shapes(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    problem = call.problem
    lead = (fused.items(problem), problem.kv_heads, problem.key_length)
    return (*lead, problem.width), (*lead, problem.value_width)
