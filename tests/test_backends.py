"""Every backend of the table runs here, or says what it needs; arrays get there and back."""

from __future__ import annotations

import numpy as np
import pytest

from .backends import BACKENDS, Backend
from .dtypes import dtype_name, numpy_dtype
from .memory import VIEWS, lay_out
from .running import attend


def test_backend_runs_here(each_backend):
    """The one place where a backend that is missing shows as skipped, with its reason."""
    row = BACKENDS[each_backend]
    with row.active():
        ones = np.ones((1, 1, 2, 2), dtype=np.float32)
        np.testing.assert_array_equal(attend(row, ones, ones, ones).output, ones)


@pytest.mark.parametrize("view", VIEWS)
def test_arrays_get_there_and_back(backend: Backend, xp, device, view):
    for name in backend.dtypes:
        numbers = np.arange(24).reshape(2, 3, 4).astype(numpy_dtype(name))
        array = backend.asarray(lay_out(numbers, view))
        assert backend.owns(array)
        assert array.device == device
        assert array.dtype == (numpy_dtype(name) if backend.library == "jax" else _own(xp, name))
        back = backend.to_numpy(array)
        assert dtype_name(back.dtype) == name
        np.testing.assert_array_equal(back, numbers)


def _own(xp, name):
    return numpy_dtype("bfloat16") if not hasattr(xp, name) else getattr(xp, name)


def test_torch_keeps_strides():
    pytest.importorskip("torch", reason="needs torch")
    numbers = lay_out(np.zeros((2, 3, 4, 8), dtype=np.float32), "stepped")[:, :, ::2]
    tensor = BACKENDS["torch"].asarray(numbers)
    assert tensor.stride() == tuple(step // 4 for step in numbers.strides)
    wide = BACKENDS["torch"].asarray(np.broadcast_to(numbers[:1, :1], numbers.shape))
    assert wide.stride()[:2] == (0, 0)
