"""ONNX's own kernels as a callable with the signature of `attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from portable_attention.backends import Array
from portable_attention.dialects._shared import adapter, lacks

_NAME = "the Attention operator of ONNX"
_WINDOWS = 25  # the opset that brought windows
_LENGTHS = 24  # the opset that brought nonpad_kv_seqlen


def native(runtime: str = "reference", opset: int = 25) -> Callable[..., Any]:
    """Make a callable with the signature of `attention` from an implementation of the operator.

    Parameters
    ----------
    runtime : {"reference", "onnxruntime"}, default "reference"
        The evaluator of the package `onnx`, or ONNX Runtime on a CPU.
    opset : {23, 24, 25}, default 25
        Key lengths need 24, windows 25.

    Returns
    -------
    callable
        It takes NumPy arrays of rank 4, and mask or bias, causal, window, key_lengths, scale and
        softcap. Other options are a NotImplementedError that names them.

    References
    ----------
    https://onnx.ai/onnx/operators/onnx__Attention.html

    Examples
    --------
    >>> from portable_attention.dialects.onnx import native
    >>> kernel = native()  # doctest: +SKIP
    """
    if runtime not in ("reference", "onnxruntime"):
        raise ValueError(f"runtime must be 'reference' or 'onnxruntime', got {runtime!r}")
    evaluate = _reference if runtime == "reference" else _onnxruntime

    def kernel(query: Array, key: Array, value: Array, **options: Any) -> Any:
        ranks = query.ndim, key.ndim, value.ndim
        if ranks != (4, 4, 4):
            lacks(_NAME, f"arrays of ranks {ranks}")
        if "mask" in options and "bias" in options:
            lacks(_NAME, "mask with bias")
        lengths = _key_lengths(options, query, key)
        if lengths is not None and opset < _LENGTHS:
            lacks(f"{_NAME}, opset {opset},", "key_lengths, nor query_offset='end'")
        if "window" in options and opset < _WINDOWS:
            lacks(f"{_NAME}, opset {opset},", "window")
        inputs = {"Q": query, "K": key, "V": value}
        mask = options.get("mask", options.get("bias"))
        if mask is not None:
            inputs["attn_mask"] = mask
        if lengths is not None:
            inputs["nonpad_kv_seqlen"] = lengths
        attributes = {
            "is_causal": int(options.get("causal", False)),
            "scale": options.get("scale"),
            "softcap": options.get("softcap"),
        }
        for name, side in zip(("left", "right"), options.get("window", ()), strict=False):
            attributes[f"{name}_window_size"] = side
        return evaluate(_model(inputs, attributes, opset), inputs)

    takes = {"mask", "bias", "causal", "window", "query_offset", "key_lengths", "scale", "softcap"}
    return adapter(_NAME, takes, kernel)


def _key_lengths(options: dict[str, Any], query: Array, key: Array) -> Any:
    """Return the valid keys of each item, or None; they decide where the diagonal sits."""
    lengths, offset = options.get("key_lengths"), options.get("query_offset")
    rows, columns = query.shape[2], key.shape[2]
    if options.get("causal", False) or "window" in options:
        places: dict[Any, int] = {"start": 0, "end": columns - rows}
        place = places.get(offset, offset) if isinstance(offset, int | str) else None
        if lengths is not None:
            # The last row stands on the last valid key, which need not be a row's own index.
            own = offset is None and np.all(np.asarray(lengths) == rows)
            if offset != "end" and not own:
                lacks(_NAME, "diagonal apart from key_lengths: pass query_offset='end'")
        elif offset is not None and place == places["end"] != 0:
            lengths = columns  # all of them, which puts the last row on the last key
        elif offset is not None and place != 0:
            lacks(_NAME, f"query_offset={offset!r} for this call")
    if lengths is None:
        return None
    return np.broadcast_to(np.asarray(lengths, np.int64), (query.shape[0],)).copy()


def _model(inputs: dict[str, Any], attributes: dict[str, Any], opset: int) -> Any:
    from onnx import helper

    names = ["Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"]
    last = max(names.index(name) for name in inputs)  # older opsets have fewer inputs
    node = helper.make_node(
        "Attention",
        [name if name in inputs else "" for name in names[: last + 1]],
        ["Y"],
        **{name: number for name, number in attributes.items() if number is not None},
    )
    kinds = {
        name: helper.np_dtype_to_tensor_dtype(np.asarray(array).dtype)
        for name, array in inputs.items()
    }
    graph = helper.make_graph(
        [node],
        "attention",
        [
            helper.make_tensor_value_info(name, kinds[name], array.shape)
            for name, array in inputs.items()
        ],
        [helper.make_tensor_value_info("Y", kinds["Q"], [None] * 4)],
    )
    opsets = [helper.make_opsetid("", opset)]
    return helper.make_model(
        graph, opset_imports=opsets, ir_version=helper.find_min_ir_version_for(opsets)
    )


def _reference(model: Any, inputs: dict[str, Any]) -> Any:
    from onnx.reference import ReferenceEvaluator

    with np.errstate(all="ignore"):
        return ReferenceEvaluator(model).run(None, inputs)[0]


def _onnxruntime(model: Any, inputs: dict[str, Any]) -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return session.run(None, inputs)[0]
