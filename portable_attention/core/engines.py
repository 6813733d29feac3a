"""Which engine runs a call: the portable tiles, or a fused kernel of the array's own library.

A kernel takes a call only where it gives all that `docs/semantics.md` promises. NaN and infinities
it is not trusted with: where they stand in the inputs, or come out, the portable tiles compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from portable_attention.backends import Array
from portable_attention.backends.base import Declined

if TYPE_CHECKING:
    from portable_attention.core.backward import Cotangents
    from portable_attention.core.problem import Call


class Kernel(Protocol):
    """A fused kernel of an array library."""

    name: str

    def breaks(self, call: Call) -> str | None:
        """Return which rule of arithmetic it does not keep to, or None.

        Only a caller who demands a kernel gets it then. It is asked before all else.
        """

    def refuses(self, call: Call) -> str | None:
        """Return why the kernel cannot give what this call means, or None."""

    def is_worse(self, call: Call) -> str | None:
        """Return why the portable tiles are the better choice, or None."""

    def run(self, call: Call) -> tuple[Array, Array] | None:
        """Return output (*batch, Hkv, G, Lq, Dv) and lse, or None if something is not finite.

        Raise `Declined` where the library says only now that it cannot.
        """


def choose(call: Call, engine: str) -> tuple[Kernel | None, dict[str, str]]:
    """Return the kernel that is to run a call, None for the portable tiles, and why not others."""
    passed_over = dict(call.backend.unconnected)
    chosen = None
    for kernel in call.backend.kernels_on(call.device):
        reason = None if engine == "native" else kernel.breaks(call)
        if reason is None:
            reason = kernel.refuses(call)
        if reason is None and engine == "portable":
            reason = "engine='portable' asks for the portable tiles"
        if reason is None and engine == "auto":
            reason = kernel.is_worse(call)
        if reason is None and chosen is not None:
            reason = f"{chosen.name} comes first"
        if reason is None:
            chosen = kernel
            passed_over.pop(kernel.name, None)
        else:
            passed_over[kernel.name] = reason
    if chosen is None and engine == "native":
        raise ValueError(_why_not(call, passed_over))
    return chosen, passed_over


def run_native(call: Call, engine: str) -> tuple[Array, Array] | None:
    """Run a call on a native kernel, or return None where that is not to be."""
    if engine == "portable" or (engine == "auto" and not call.backend.kernels):
        return None
    kernel, _ = choose(call, engine)
    if kernel is None:
        return None
    try:
        found = kernel.run(call)
    except Declined as reason:
        if engine == "native":
            raise ValueError(_why_not(call, {kernel.name: str(reason)})) from reason
        return None
    if found is None and engine == "native":
        raise ValueError(
            f"engine='native': inputs, scores or output of {kernel.name} are not finite, where it "
            "does not keep to the rules: use engine='auto' or engine='portable'"
        )
    return found


def run_native_backward(call: Call, given: Cotangents) -> dict[str, Array] | None:
    """Return the gradients from a native kernel, or None where that is not to be.

    That is an optimisation alone: `engine="native"` asks for the forward kernel.
    """
    if call.engine == "portable":
        return None
    for kernel in call.backend.kernels:
        run = getattr(kernel, "run_backward", None)
        if run and kernel.refuses(call) is None and kernel.is_worse_backward(call) is None:
            found: dict[str, Array] | None = run(call, given)
            return found
    return None


def _why_not(call: Call, passed_over: dict[str, str]) -> str:
    if not passed_over:
        return (
            f"engine='native': {call.backend.name} has no attention kernel of its own: "
            "use engine='auto' or engine='portable'"
        )
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
    return f"engine='native' cannot take this call ({reasons}): use engine='auto' or 'portable'"
