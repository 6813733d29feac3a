"""The same numbers lying otherwise in memory."""

from __future__ import annotations

import numpy as np

VIEWS = (None, "reversed", "stepped", "swapped", "sliced", "flipped", "read-only")


def lay_out(array: np.ndarray, view: str | None) -> np.ndarray:
    """Return the same numbers laid out in memory in the manner named, with NaN around them."""
    if view is None:
        return array
    if view == "reversed":  # a negative stride along the width
        return np.ascontiguousarray(array[..., ::-1])[..., ::-1]
    if view == "flipped":  # a negative stride along every axis
        return np.ascontiguousarray(np.flip(array))[(slice(None, None, -1),) * array.ndim]
    if view == "swapped":  # stored (..., L, H, D), seen as (..., H, L, D); its transpose in 2-D
        axes = (-3, -2) if array.ndim > 2 else (-2, -1)
        return np.ascontiguousarray(array.swapaxes(*axes)).swapaxes(*axes)
    if view == "read-only":
        array = array.copy()
        array.flags.writeable = False
        return array
    *lead, rows, width = array.shape
    if view == "stepped":  # every second number of a row
        whole = np.full((*lead, rows, 2 * width), np.nan, dtype=array.dtype)
        part = whole[..., ::2]
    elif view == "sliced":  # all rows but the last of a longer array
        whole = np.full((*lead, rows + 1, width), np.nan, dtype=array.dtype)
        part = whole[..., :-1, :]
    else:
        raise ValueError(f"no such view: {view!r}")
    part[...] = array
    return part
