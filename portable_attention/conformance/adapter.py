"""Calls an implementation with its library's arrays, and reads what it returns.

Whatever the implementation does, an `Outcome` says what it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from portable_attention.cli.libraries import Library, open_library
from portable_attention.conformance.calls import DIFFERENTIABLE, INPUTS, Call, Outcome
from portable_attention.conformance.capabilities import keywords_of
from portable_attention.conformance.oracle import Numbers

_LONGEST: Final = 400  # characters of an error message


class Adapter:
    """An implementation and its library.

    Parameters
    ----------
    function
        Called as ``function(query, key, value, **options)``.
    backend, device
        The array library and device, as the command line names them.
    vjp
        Called as `portable_attention.attention_vjp`; None takes the library's own differentiation.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backend: str,
        device: str | None,
        vjp: Callable[..., Any] | None = None,
    ) -> None:
        self.function = function
        self.library: Library = open_library(backend, device)
        self._last: Any = None  # what the call before returned
        self.vjp = vjp if vjp is not None else getattr(function, "vjp", None)

    def describe(self) -> dict[str, Any]:
        """Return what can be said of the implementation without calling it."""
        return {
            "keywords": keywords_of(self.function),
            "own_vjp": self.vjp is not None,
            "gradients": self.vjp is not None or self.library.name in ("torch", "jax"),
            "library": f"{self.library.name} {self.library.version}",
            "device": self.library.device,
        }

    def run(self, call: Call) -> Outcome:
        """Make one call."""
        start = time.perf_counter()
        try:
            with self.library.scope(call.dtype == "float64"):
                outcome = self._run(call)
        except BaseException as error:  # SystemExit and the like: it is the implementation's
            if isinstance(error, TimeLimit):
                raise
            outcome = Outcome("raised", error=_told(error), error_types=_classes(error))
        return replace(outcome, seconds=time.perf_counter() - start)

    def _run(self, call: Call) -> Outcome:
        library = self.library
        own = {name: self._own(array) for name, array in call.arrays.items()}
        for name in INPUTS:
            own[name] = _viewed(own[name], call.view, library.name)
        before = {name: _bytes(library, array) for name, array in own.items()}
        options = dict(call.options)
        if isinstance(options.get("dropout"), Mapping):
            from portable_attention import Dropout

            options["dropout"] = Dropout(**options["dropout"])
        wants_lse = call.lse
        if wants_lse:
            options["return_lse"] = True

        if call.cotangents:
            cotangents = {name: self._own(array) for name, array in call.cotangents.items()}
            output, lse, gradients = self._differentiated(own, options, cotangents)
        else:
            output, lse = _pair(self._called(own, options), wants_lse)
            gradients = {}

        problems = [
            ("purity", f"{name} was changed by the call")
            for name, array in own.items()
            if _bytes(library, array) != before[name]
        ]
        found: dict[str, Numbers | None] = {}
        wide = "float64" if call.dtype == "float64" else "float32"
        expected_dtypes = {"output": (call.dtype, "output-dtype"), "lse": (wide, "lse")}
        for name, result in (("output", output), ("lse", lse)):
            if name == "lse" and not wants_lse:
                continue
            dtype, rule = expected_dtypes[name]
            found[name] = self._read(name, result, own["query"], dtype, rule, problems)
            problems += self._shared(name, result, own)
        read = {}
        for name, result in gradients.items():
            dtype = str(call.arrays[name].dtype.name)
            array = self._read(
                f"the gradient of {name}", result, own["query"], dtype, "derivatives", problems
            )
            if array is not None:
                read[name] = array
        return Outcome("returned", found.get("output"), found.get("lse"), read, tuple(problems))

    def _own(self, array: Numbers) -> Any:
        if self.library.name == "jax" and array.dtype == np.int64:
            array = array.astype(np.int32)
        return self.library.from_numpy(np.array(array))

    def _called(self, own: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        others = {name: array for name, array in own.items() if name not in INPUTS}
        return self.function(*(own[name] for name in INPUTS), **others, **options)

    def _differentiated(
        self, own: dict[str, Any], options: dict[str, Any], cotangents: dict[str, Any]
    ) -> tuple[Any, Any, dict[str, Any]]:
        names: list[str] = [name for name in DIFFERENTIABLE if name in own]
        wants_lse = bool(options.get("return_lse"))
        d_output, d_lse = cotangents["d_output"], cotangents.get("d_lse")
        if self.vjp is not None:
            others = {name: array for name, array in own.items() if name not in INPUTS}
            result, pullback = self.vjp(*(own[name] for name in INPUTS), **others, **options)
            output, lse = _pair(result, wants_lse)
            pulled = pullback(d_output) if d_lse is None else pullback(d_output, d_lse)
            return output, lse, _by_name(pulled, names)
        if self.library.name == "torch":
            return _torch_gradients(self._called, own, options, names, d_output, d_lse)
        if self.library.name == "jax":
            return _jax_gradients(self._called, own, options, names, d_output, d_lse)
        raise TypeError(f"gradients of a {self.library.name} function need a vjp")

    def _read(
        self,
        name: str,
        result: Any,
        query: Any,
        dtype: str,
        rule: str,
        problems: list[tuple[str, str]],
    ) -> Numbers | None:
        """Return a result as a NumPy array, and note what is wrong with it."""
        kind = _array_class(self.library.name)
        # A masked array or a matrix is a NumPy array, too, and behaves as none.
        if not isinstance(result, kind) or (kind is np.ndarray and type(result) is not kind):
            told = _short_name(type(result))
            problems.append(("arrays", f"{name} is {told}, not an array of {self.library.name}"))
            return None
        found = str(getattr(result, "dtype", None)).rpartition(".")[2]
        if found != dtype:
            problems.append((rule, f"{name} has dtype {found}, not {dtype}"))
        if (here := str(_device(result))) != (there := str(_device(query))):
            problems.append(("purity", f"{name} is on {here}, the inputs are on {there}"))
        try:
            return _real(np.array(self.library.to_numpy(result)))
        except Exception as error:
            problems.append(("arrays", f"{name} cannot be read: {_told(error)}"))
            return None

    def _shared(self, name: str, result: Any, own: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Return in whose memory a result lies, if it is not new."""
        others = dict(own)
        if name == "output":
            others["the output of the call before"] = self._last
            self._last = result
        return [
            ("purity", f"{name} lies in the memory of {other}")
            for other, array in others.items()
            if _share_memory(result, array)
        ]


class TimeLimit(BaseException):
    """Raised inside a call that takes too long, where it cannot be ended from outside."""


def _short_name(kind: type) -> str:
    """Return the name of a type as its users know it: list, torch.Tensor, pandas.DataFrame."""
    package = kind.__module__.partition(".")[0]
    return kind.__name__ if package == "builtins" else f"{package}.{kind.__name__}"


def _pair(result: Any, wants_lse: bool) -> tuple[Any, Any]:
    if not wants_lse:
        return result, None
    if isinstance(result, (tuple, list)) and len(result) == 2:
        return result[0], result[1]
    raise TypeError(f"return_lse=True returned {type(result).__name__}, not (output, lse)")


def _by_name(pulled: Any, names: list[str]) -> dict[str, Any]:
    if isinstance(pulled, Mapping):
        return {name: pulled[name] for name in names}
    if all(hasattr(pulled, name) for name in names):
        return {name: getattr(pulled, name) for name in names}
    pulled = tuple(pulled)
    every = DIFFERENTIABLE if len(pulled) == len(DIFFERENTIABLE) else names
    found = dict(zip(every, pulled, strict=True))
    return {name: found[name] for name in names}


def _torch_gradients(
    called: Callable[..., Any],
    own: dict[str, Any],
    options: dict[str, Any],
    names: list[str],
    d_output: Any,
    d_lse: Any,
) -> tuple[Any, Any, dict[str, Any]]:
    import torch

    own = {n: a.detach().requires_grad_() if n in names else a for n, a in own.items()}
    output, lse = _pair(called(own, options), bool(options.get("return_lse")))
    results, upstream = [output], [d_output]
    if d_lse is not None:
        results, upstream = [output, lse], [d_output, d_lse]
    inputs = [own[name] for name in names]
    pulled = torch.autograd.grad(results, inputs, upstream, allow_unused=True)
    gradients = {
        name: torch.zeros_like(own[name]) if gradient is None else gradient
        for name, gradient in zip(names, pulled, strict=True)
    }
    return output.detach(), None if lse is None else lse.detach(), gradients


def _jax_gradients(
    called: Callable[..., Any],
    own: dict[str, Any],
    options: dict[str, Any],
    names: list[str],
    d_output: Any,
    d_lse: Any,
) -> tuple[Any, Any, dict[str, Any]]:
    import jax

    wants_lse = bool(options.get("return_lse"))

    def function(arrays: dict[str, Any]) -> Any:
        return _pair(called({**own, **arrays}, options), wants_lse)[: 1 + wants_lse]

    results, pullback = jax.vjp(function, {name: own[name] for name in names})
    upstream: tuple[Any, ...] = (d_output,)
    if wants_lse:
        upstream = (d_output, jax.numpy.zeros_like(results[1]) if d_lse is None else d_lse)
    (gradients,) = pullback(upstream)
    return results[0], results[1] if wants_lse else None, gradients


def _viewed(array: Any, view: str, library: str) -> Any:
    """Return the same numbers, laid out otherwise in memory with NaN between them."""
    if not view or library not in ("numpy", "torch"):
        return array
    if view == "swapped":
        turned = array.swapaxes(-3, -2)
        packed = turned.contiguous() if library == "torch" else np.ascontiguousarray(turned)
        return packed.swapaxes(-3, -2)
    if view == "stepped":
        width = array.shape[-1]
        if library == "torch":
            whole = array.new_full((*array.shape[:-1], 2 * width), math.nan)
        else:
            whole = np.full((*array.shape[:-1], 2 * width), np.nan, dtype=array.dtype)
        whole[..., ::2] = array
        return whole[..., ::2]
    if library == "torch":  # it has neither negative strides nor read-only memory
        return array
    if view == "reversed":
        return np.ascontiguousarray(array[..., ::-1])[..., ::-1]
    array = np.broadcast_to(array[:1], array.shape) if view == "broadcast" else array.copy()
    array.flags.writeable = False
    return array


def _array_class(library: str) -> type:
    if library == "numpy":
        return np.ndarray
    if library == "torch":
        import torch

        return torch.Tensor  # type: ignore[no-any-return]
    if library == "jax":
        import jax

        return jax.Array  # type: ignore[no-any-return]
    if library == "cupy":
        import cupy

        return cupy.ndarray  # type: ignore[no-any-return]
    import array_api_strict

    return type(array_api_strict.zeros(1))


def _share_memory(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return bool(np.may_share_memory(one, other))
    if hasattr(one, "untyped_storage") and hasattr(other, "untyped_storage"):  # of PyTorch
        pointer = one.untyped_storage().data_ptr()
        return bool(pointer and pointer == other.untyped_storage().data_ptr())
    return False


def _device(array: Any) -> Any:
    return getattr(array, "device", "cpu")


def _bytes(library: Library, array: Any) -> bytes:
    return np.asarray(library.to_numpy(array)).tobytes()


def _real(array: Numbers) -> Numbers:
    """Return floating numbers that can be compared, or say that there are none."""
    if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
        return array
    if array.dtype.kind in "biu":
        return array.astype(np.float64)
    raise TypeError(f"its dtype is {array.dtype}")


def _told(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _classes(error: BaseException) -> tuple[str, ...]:
    return tuple(kind.__name__ for kind in type(error).__mro__)
