"""The node tests of ONNX's Attention operator, which the package `onnx` carries, pass here."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest

from portable_attention.dialects.onnx import attention

from ..backends import Backend

onnx = pytest.importorskip("onnx", reason="needs the package onnx, which carries the node tests")

VERSION = "1.23.2"
CASES = {23: 69, 24: 13, 25: 11}  # by opset, of that version
INPUTS = ["Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"]
OUTPUTS = ["Y", "present_key", "present_value", "qk_matmul_output"]
DOUBLE = onnx.TensorProto.DOUBLE


@cache
def node_tests() -> dict[str, Any]:
    """Return the cases by name, without those that expand the operator into a graph."""
    from onnx.backend.test.case import node
    from onnx.backend.test.case.node import attention as _made_by_its_import  # noqa: F401

    found = [case for case in node._NodeTestCases if not case.name.endswith("_expanded")]
    return {case.name: case for case in found if len(case.model.graph.node) == 1}


def runs_on(backend: Backend, case: Any) -> bool:
    """Return whether a library has the dtypes of a case."""
    (inputs, _), *_ = case.data_sets
    dtypes = {str(array.dtype) for array in inputs if np.issubdtype(array.dtype, np.inexact)}
    dtypes |= {"bfloat16"} if any(str(array.dtype) == "bfloat16" for array in inputs) else set()
    if attributes(case).get("softmax_precision") == DOUBLE:
        dtypes.add("float64")
    return dtypes <= set(backend.dtypes)


def attributes(case: Any) -> dict[str, Any]:
    (node,) = case.model.graph.node
    return {
        attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute
    }


def _cases(backend: Backend, _config: pytest.Config) -> list[str]:
    return [name for name, case in node_tests().items() if runs_on(backend, case)]


BACKEND_AXES = {"name": _cases}


def test_none_is_missing() -> None:
    assert onnx.__version__ == VERSION
    opsets = Counter(case.model.opset_import[0].version for case in node_tests().values())
    assert dict(opsets) == CASES
    kinds = {case.model.graph.node[0].op_type for case in node_tests().values()}
    assert kinds == {"Attention"}


HALVES = {"float16": 6, "bfloat16": 5}  # cases in these dtypes


def test_each_library_runs_what_its_dtypes_allow(backend: Backend) -> None:
    lost = sum(count for dtype, count in HALVES.items() if dtype not in backend.dtypes)
    lost += "float64" not in backend.dtypes  # one case asks for a softmax in double precision
    assert len(_cases(backend, None)) == sum(CASES.values()) - lost


def test_node_test(backend: Backend, name: str) -> None:
    case = node_tests()[name]
    (node,) = case.model.graph.node
    for inputs, expected in case.data_sets:
        given = iter(inputs)
        arrays = [backend.asarray(next(given)) if named else None for named in node.input]
        found = dict(
            zip(
                OUTPUTS,
                attention(
                    *arrays,
                    **attributes(case),
                    return_qk_matmul_output="qk_matmul_output" in node.output,
                ),
                strict=True,
            )
        )
        wanted = [output for output in node.output if output]
        for output, array in zip(wanted, expected, strict=True):
            assert backend.owns(found[output])
            check(backend.to_numpy(found[output]), array, case)
        assert found["qk_matmul_output"] is None or "qk_matmul_output" in wanted


def check(found: np.ndarray, expected: np.ndarray, case: Any) -> None:
    """Compare as the backend tests of ONNX do: two units in the last place for bfloat16."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    rtol = case.rtol
    if found.dtype.name == "bfloat16":
        rtol = max(rtol, 2**-6)
        found, expected = found.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=case.atol)
