"""Faults of what may attend what: masks, positions, windows and lengths."""

from __future__ import annotations

import numpy as np

from ..dense import Dense, per_item
from .faults import ZOO, fault


@fault("mask", method="masked")
def polarity_inverted(self, allowed, mask):
    return allowed & ~mask


@fault("mask", method="masked")
def mask_ignored(self, allowed, mask):
    return allowed


@fault("mask", method="masked")
def first_row_of_the_mask_for_all(self, allowed, mask):
    return allowed & (mask[..., :1, :] if mask.ndim > 1 else mask)


@fault("mask-broadcasting", method="masked")
def first_head_of_the_mask_for_all(self, allowed, mask):
    return allowed & (mask[..., :1, :, :] if mask.ndim > 2 else mask)


@fault("mask-broadcasting", method="masked")
def first_item_of_the_mask_for_all(self, allowed, mask):
    return allowed & (mask[:1] if mask.ndim > 3 else mask)


def _finite_mask(number):
    def maximum(self, score, allowed, sinks):
        filled = np.where(allowed, score, score.dtype.type(number))
        return filled.max(axis=-1, keepdims=True, initial=number).astype(score.dtype)

    def exponentials(self, score, top, allowed):
        return np.exp(np.where(allowed, score, score.dtype.type(number)) - top)

    return {"maximum": maximum, "exponentials": exponentials}


ZOO["mask_of_minus_1e4"] = (type("mask_of_minus_1e4", (Dense,), _finite_mask(-1e4)), ("mask",))
ZOO["mask_of_minus_1e9"] = (type("mask_of_minus_1e9", (Dense,), _finite_mask(-1e9)), ("mask",))


@fault("mask", method="exponentials")
def mask_after_the_softmax(self, score, top, allowed):
    return np.exp(score - top)


@fault("causal", method="causal")
def causal_without_the_own_position(self, position, j):
    return j < position


@fault("causal", method="causal")
def causal_one_too_far(self, position, j):
    return j <= position + 1


@fault("causal", method="causal")
def causal_turned_round(self, position, j):
    return j >= position


@fault("causal", method="causal")
def causal_ignored(self, position, j):
    return np.ones(np.broadcast_shapes(position.shape, j.shape), dtype=bool)


@fault("query-offset", method="offset")
def corners_swapped(self, given, rows, columns, shape):
    if isinstance(given, str):
        given = {"start": "end", "end": "start"}[given]
    return Dense.offset(self, given, rows, columns, shape)


@fault("query-offset", method="offset")
def offset_ignored(self, given, rows, columns, shape):
    return per_item(0)


@fault("query-offset", method="offset")
def offset_of_the_first_item_for_all(self, given, rows, columns, shape):
    offset = Dense.offset(self, given, rows, columns, shape)
    return offset.reshape(-1)[:1].reshape((1,) * offset.ndim) if offset.size else offset


@fault("query-offset", method="offset")
def end_of_the_array_not_of_the_valid_keys(self, given, rows, columns, shape):
    return Dense.offset(self, given, per_item(shape[-2]), per_item(shape[-1]), shape)


@fault("ambiguous-corner", method="offset")
def always_the_end_of_the_valid_keys(self, given, rows, columns, shape):
    return Dense.offset(self, "end" if given is None else given, rows, columns, shape)


@fault("window", method="window")
def window_one_too_wide_on_the_left(self, position, j, left, right):
    return Dense.window(self, position, j, None if left is None else left + 1, right)


@fault("window", method="window")
def window_one_too_narrow_on_the_left(self, position, j, left, right):
    return (
        Dense.window(self, position, j, None if left is None else max(left - 1, 0), right)
        | (j == position)
    )  # fmt: skip


@fault("window", method="window")
def window_one_too_wide_on_the_right(self, position, j, left, right):
    return Dense.window(self, position, j, left, None if right is None else right + 1)


@fault("window", method="window")
def window_sides_swapped(self, position, j, left, right):
    return Dense.window(self, position, j, right, left)


@fault("window", method="window")
def window_open_side_is_zero(self, position, j, left, right):
    return Dense.window(self, position, j, left or 0, right or 0)


@fault("window", method="allowed")
def window_needs_causal(self, shape, *, causal, window, **others):
    return Dense.allowed(self, shape, causal=causal, window=window if causal else None, **others)


@fault("composition", method="allowed")
def mask_replaces_causal(self, shape, *, causal, mask, **others):
    return Dense.allowed(self, shape, causal=causal and mask is None, mask=mask, **others)


@fault("lengths", method="valid")
def key_lengths_off_by_one(self, i, j, rows, columns):
    return (i < rows) & (j <= columns)


@fault("lengths", method="valid")
def key_lengths_ignored(self, i, j, rows, columns):
    return (i < rows) & (j >= 0)


@fault("lengths", method="valid")
def query_lengths_ignored(self, i, j, rows, columns):
    return (i >= 0) & (j < columns)
