"""Wrong implementations: each is a correct one with one fault, of a kind that has been seen.

The rule is the one that the kit must name first. Where two rules say the same of a fault, both
are given.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from .dense import Dense, Tiled, per_item, selected, summed_to

ZOO = {}


def fault(*rules, of=Dense, method=None):
    """Add a fault: a function that replaces the method of its name, or the one that is named."""

    def add(function):
        name = function.__name__
        kind = type(name, (of,), {method or name.split("__")[0]: function})
        ZOO[name] = (kind, rules)
        return function

    return add


def tf32(array):
    """Round to 11 bits of significand, as tensor cores do."""
    bits = np.ascontiguousarray(array).view(np.uint32) + np.uint32(0x1000)
    return (bits & np.uint32(0xFFFFE000)).view(np.float32)


def rounded_to(array, dtype):
    return array.astype(dtype).astype(array.dtype)


# Scores.


@fault("scale", method="scale")
def scale_missing(self, given, width, value_width):
    return 1.0 if given is None else given


@fault("scale", method="scale")
def scale_of_the_value_width(self, given, width, value_width):
    return Dense.scale(self, given, value_width, width)


@fault("scale", method="scale")
def scale_of_the_padded_width(self, given, width, value_width):
    return Dense.scale(self, given, -(-width // 8) * 8 if width > 8 else width, value_width)


@fault("scale", method="scale")
def scale_without_the_root(self, given, width, value_width):
    return 1 / max(width, 1) if given is None else given


@fault("scale", method="scale")
def scale_of_zero_is_lost(self, given, width, value_width):
    return given or Dense.scale(self, None, width, value_width)


@fault("scale", method="scores")
def scale_split_into_roots(self, q, k, scale, softcap, bias, allowed):
    root = q.dtype.type(np.sqrt(scale))
    score, slope = self.capped(self.product(q * root, k * root), softcap)
    return self.biased(score, bias, scale), slope


@fault("scale", method="scores")
def scale_after_the_softmax(self, q, k, scale, softcap, bias, allowed):
    self.late = q.dtype.type(scale)
    return Dense.scores(self, q, k, 1.0, softcap, bias, allowed)


ZOO["scale_after_the_softmax"][0].weights = lambda self, part, denominator, lse, score: (
    part / denominator * self.late
)


@fault("accuracy", method="product")
def product_in_tf32(self, q, k):
    if q.dtype == np.float64:
        return Dense.product(self, q, k)
    return tf32(q) @ tf32(k).swapaxes(-1, -2)


@fault("accuracy", "order", method="product")
def product_in_bfloat16(self, q, k):
    if q.dtype == np.float64:
        return Dense.product(self, q, k)
    return rounded_to(q, ml_dtypes.bfloat16) @ rounded_to(k, ml_dtypes.bfloat16).swapaxes(-1, -2)


@fault("accuracy", "dtypes", method="product")
def float64_in_float32(self, q, k):
    return (q.astype(np.float32) @ k.astype(np.float32).swapaxes(-1, -2)).astype(q.dtype)


@fault("softcap", "order", method="scores")
def softcap_before_the_scale(self, q, k, scale, softcap, bias, allowed):
    score, slope = self.capped(self.product(q, k), softcap)
    return self.biased(q.dtype.type(scale) * score, bias, scale), slope


@fault("order", method="scores")
def softcap_after_the_bias(self, q, k, scale, softcap, bias, allowed):
    return self.capped(self.biased(q.dtype.type(scale) * self.product(q, k), bias, scale), softcap)


@fault("softcap", method="scores")
def softcap_after_the_mask(self, q, k, scale, softcap, bias, allowed):
    score, slope = Dense.scores(self, q, k, scale, None, bias, allowed)
    if softcap is not None:
        score, slope = self.capped(np.where(allowed, score, -np.inf), softcap)
        allowed[...] = allowed.any(-1, keepdims=True)
    return score, slope


@fault("softcap", method="capped")
def softcap_clips(self, score, softcap):
    if softcap is None:
        return Dense.capped(self, score, None)
    return np.clip(score, -softcap, softcap), np.ones_like(score)


@fault("bias", method="biased")
def bias_is_scaled(self, score, bias, scale):
    return score if bias is None else Dense.biased(self, score, bias * bias.dtype.type(scale), 1)


@fault("bias", method="biased")
def bias_is_subtracted(self, score, bias, scale):
    return score if bias is None else Dense.biased(self, score, -bias, 1)


@fault("bias", method="not_masked_by")
def very_negative_bias_masks(self, bias):
    return bias > -1e9


@fault("empty-rows", method="not_masked_by")
def bias_of_minus_infinity_is_finite(self, bias):
    return np.ones(bias.shape, dtype=bool)


# Softmax.


@fault("accuracy", method="maximum")
def no_maximum(self, score, allowed, sinks):
    return np.zeros((*score.shape[:-1], 1), score.dtype)


@fault("mask", method="maximum")
def maximum_over_masked_keys(self, score, allowed, sinks):
    return Dense.maximum(self, score, np.ones_like(allowed), sinks)


@fault("accuracy", method="exponentials")
def scores_are_clipped(self, score, top, allowed):
    return Dense.exponentials(self, np.clip(score, -80, 80), np.clip(top, -80, 80), allowed)


@fault("accuracy", method="exponentials")
def rough_exponential(self, score, top, allowed):
    part = Dense.exponentials(self, score, top, allowed)
    return part if part.dtype == np.float64 else tf32(part)


@fault("accuracy", method="denominator")
def epsilon_in_the_denominator(self, part, top, sinks):
    return Dense.denominator(self, part, top, sinks) + part.dtype.type(1e-4)


@fault("order", method="denominator")
def softmax_over_the_queries(self, part, top, sinks):
    return part.sum(axis=-2, keepdims=True) + 0 * Dense.denominator(self, part, top, sinks)


@fault("wide-arithmetic", method="denominator")
def denominator_in_half(self, part, top, sinks):
    if not self.half:
        return Dense.denominator(self, part, top, sinks)
    running = np.zeros(part.shape[:-1], np.float16)
    for j in range(part.shape[-1]):
        running = running + part[..., j].astype(np.float16)
    return running[..., None].astype(part.dtype)


def _remembering_half(function):
    def forward(self, query, key, value, **options):
        self.half = query.dtype.itemsize == 2
        return Dense.forward(self, query, key, value, **options)

    ZOO[function][0].forward = forward


_remembering_half("denominator_in_half")


@fault("wide-arithmetic", method="product")
def scores_in_half(self, q, k):
    product = Dense.product(self, q, k)
    return rounded_to(product, np.float16) if self.half else product


_remembering_half("scores_in_half")


@fault("wide-arithmetic", method="product_with_values")
def output_summed_in_half(self, weights, v, felt):
    if not self.half:
        return Dense.product_with_values(self, weights, v, felt)
    running = np.zeros((*weights.shape[:-1], v.shape[-1]), np.float16)
    for j in range(weights.shape[-1]):
        terms = weights[..., j, None] * np.where(felt[..., j, None], v[..., None, j, :], 0)
        running = running + terms.astype(np.float16)
    return running.astype(v.dtype)


_remembering_half("output_summed_in_half")


@fault("accuracy", method="weights")
def weights_in_bfloat16_for_float32(self, part, denominator, lse, score):
    return rounded_to(part / denominator, ml_dtypes.bfloat16)


@fault("accuracy", method="product_with_values")
def values_in_tf32(self, weights, v, felt):
    return Dense.product_with_values(self, weights, v if v.dtype == np.float64 else tf32(v), felt)


@fault("lse", method="lse")
def lse_in_base_2(self, top, denominator):
    return Dense.lse(self, top, denominator) / np.log(2)


@fault("lse", method="lse")
def lse_without_the_maximum(self, top, denominator):
    return np.log(denominator)[..., 0]


@fault("lse", method="lse")
def lse_is_the_denominator(self, top, denominator):
    return (np.exp(top) * denominator)[..., 0]


@fault("lse", method="restored")
def lse_in_the_dtype_of_the_query(self, output, lse, state):
    return Dense.restored(self, output, lse.astype(output.dtype), state)


# Masks, positions, lengths.


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


# Heads, batch, shapes.


@fault("grouped-heads", method="grouped")
def groups_tiled(self, array, groups):
    return np.concatenate([array] * groups, axis=-3)


@fault("batch-axes", method="product")
def keys_of_the_first_item_for_all(self, q, k):
    return Dense.product(self, q, k[:1] if k.ndim == 4 else k)


@fault("shapes", method="product")
def keys_of_the_first_head_for_all(self, q, k):
    return Dense.product(self, q, k[..., :1, :, :])


@fault("batch-axes", "determinism", method="maximum")
def items_are_mixed(self, score, allowed, sinks):
    if score.ndim == 4 and score.shape[0] > 1:
        score += score[::-1] * score.dtype.type(1e-2)
    return Dense.maximum(self, score, allowed, sinks)


@fault("layout", method="heads_first")
def layout_ignored(self, array, layout):
    return Dense.heads_first(self, array, "bhld")


@fault("layout", "shapes", method="restored")
def output_in_the_other_layout(self, output, lse, state):
    flat = SimpleNamespace(layout="bhld", flat=state.flat)
    return Dense.restored(self, output, lse, flat)


@fault("output-dtype", "wide-arithmetic", method="rounded")
def output_stays_wide(self, output, dtype):
    return output


@fault("shapes", "order", method="restored")
def output_transposed(self, output, lse, state):
    output, lse = Dense.restored(self, output, lse, state)
    return output.swapaxes(-1, -2), lse


# Tiles.


@fault("block-size", of=Tiled, method="in_tiles")
def tail_dropped(self, state, *others):
    keys = state.allowed.shape[-1]
    if keys > self.block:
        state.allowed = state.allowed & (np.arange(keys) < keys - keys % self.block)
        state.kept = state.kept & state.allowed
    return Tiled.in_tiles(self, state, *others)


@fault("block-size", of=Tiled, method="in_tiles")
def last_of_many_keys_dropped(self, state, *others):
    keys = state.allowed.shape[-1]
    state.allowed = state.allowed & (np.arange(keys) < (keys - 1 if keys > 200 else keys))
    state.kept = state.kept & state.allowed
    return Tiled.in_tiles(self, state, *others)


@fault("block-size", of=Tiled, method="rescaled")
def output_not_rescaled(self, total, output, factor):
    return total * factor, output


@fault("block-size", of=Tiled, method="rescaled")
def denominator_not_rescaled(self, total, output, factor):
    return total, output * np.where(output == 0, 1, factor)


@fault("block-size", of=Tiled, method="rescaled")
def last_tile_alone(self, total, output, factor):
    return total * 0, output * 0


@fault("sinks", of=Tiled, method="rescaled")
def sink_once_a_tile(self, total, output, factor):
    total = total * factor
    return total + (factor if self.sunk else 0), output * factor


def _remembering_sinks(self, top, total, sinks):
    self.sunk = True
    return Tiled.begun(self, top, total, sinks)


ZOO["sink_once_a_tile"][0].begun = _remembering_sinks
ZOO["sink_once_a_tile"][0].sunk = False


# Empty rows and sinks.


@fault("empty-rows", method="empty_rows")
def empty_rows_are_nan(self, output, lse, empty, v, sinks):
    return np.where(empty[..., None], np.nan, output), lse


@fault("empty-rows", method="empty_rows")
def empty_rows_are_the_mean(self, output, lse, empty, v, sinks):
    mean = v.sum(-2, keepdims=True) / max(v.shape[-2], 1)
    return np.where(empty[..., None] & (v.shape[-2] > 0), mean, output), lse


@fault("empty-rows", "zero-sizes", method="empty_rows")
def empty_lse_is_zero(self, output, lse, empty, v, sinks):
    return output, np.where(empty & (sinks is None), 0, lse)


@fault("empty-rows", "zero-sizes", method="empty_rows")
def empty_lse_is_plus_infinity(self, output, lse, empty, v, sinks):
    return output, np.where(empty & (sinks is None), np.inf, lse)


@fault("sinks", method="denominator")
def sink_ignored(self, part, top, sinks):
    return Dense.denominator(self, part, top, None)


@fault("sinks", method="denominator")
def sink_not_shifted(self, part, top, sinks):
    total = Dense.denominator(self, part, top, None)
    return total if sinks is None else total + np.exp(sinks.astype(part.dtype)[:, None, None])


@fault("sinks", method="maximum")
def sink_not_in_the_maximum(self, score, allowed, sinks):
    return Dense.maximum(self, score, allowed, None)


@fault("sinks", method="empty_rows")
def lse_without_the_sink(self, output, lse, empty, v, sinks):
    if sinks is None:
        return output, lse
    return output, lse + np.log1p(-np.exp(np.minimum(sinks.astype(lse.dtype)[:, None] - lse, 0)))


# NaN and infinities.


@fault("masked-is-not-felt", method="product_with_values")
def nan_of_masked_values_leaks(self, weights, v, felt):
    return np.where(felt, weights, 0) @ v


@fault("masked-is-not-felt", "empty-rows", method="exponentials")
def nan_of_masked_keys_leaks(self, score, top, allowed):
    return np.exp(np.minimum(score - top, 0)) * allowed


@fault("nan", "masked-is-not-felt", method="scores")
def nan_is_hidden(self, q, k, scale, softcap, bias, allowed):
    score, slope = Dense.scores(self, q, k, scale, softcap, bias, allowed)
    return np.where(np.isnan(score), 0, score), slope


@fault("infinite-scores", method="biased")
def infinite_scores_are_clipped(self, score, bias, scale):
    return np.clip(Dense.biased(self, score, bias, scale), None, 3e38)


@fault("infinite-values", "masked-is-not-felt", method="product_with_values")
def infinite_values_are_hidden(self, weights, v, felt):
    return Dense.product_with_values(self, weights, np.where(np.isinf(v), 0, v), felt)


# Dropout.


@fault("dropout", method="dropped")
def dropout_without_scaling_up(self, weights, allowed, dropout):
    kept, _ = Dense.dropped(self, weights, allowed, dropout)
    return kept, np.where(kept, weights, 0)


@fault("dropout", method="dropped")
def dropout_renormalises(self, weights, allowed, dropout):
    kept, used = Dense.dropped(self, weights, allowed, dropout)
    if dropout is None:
        return kept, used
    total = np.where(kept, weights, 0).sum(-1, keepdims=True)
    return kept, np.where(kept, weights / np.where(total == 0, 1, total), 0)


@fault("dropout", method="dropped")
def dropout_by_another_generator(self, weights, allowed, dropout):
    if dropout is None:
        return allowed, weights
    uniform = np.random.default_rng(dropout.seed % 2**63).random(weights.shape)
    kept = allowed & (uniform >= dropout.rate)
    return kept, np.where(kept, weights / weights.dtype.type(1 - dropout.rate or 1), 0)


# Manners.


@fault("purity", method="scale")
def inputs_are_changed(self, given, width, value_width):
    return Dense.scale(self, given, width, value_width)


def _changing(self, query, key, value, **options):
    state = Dense.forward(self, query, key, value, **options)
    if query.size and query.flags.writeable:
        query *= query.dtype.type(0.5)
    return state


ZOO["inputs_are_changed"][0].forward = _changing


@fault("determinism", method="lse")
def bits_differ_from_call_to_call(self, top, denominator):
    lse = Dense.lse(self, top, denominator)
    ways = np.random.default_rng().choice([-np.inf, np.inf], lse.shape).astype(lse.dtype)
    return np.where(np.isfinite(lse), np.nextafter(lse, ways), lse)


@fault("arrays", method="restored")
def output_is_a_list(self, output, lse, state):
    output, lse = Dense.restored(self, output, lse, state)
    return output.tolist(), lse


@fault("zero-sizes", method="maximum")
def no_keys_raise(self, score, allowed, sinks):
    score.max(axis=-1)
    return Dense.maximum(self, score, allowed, sinks)


# Gradients.


@fault("derivatives", method="by_score")
def gradient_without_the_mean(self, state, by_weight, mean, d_lse):
    return Dense.by_score(self, state, by_weight, 0 * mean, d_lse)


@fault("derivatives", method="by_score")
def gradient_of_the_lse_ignored(self, state, by_weight, mean, d_lse):
    return Dense.by_score(self, state, by_weight, mean, 0 * d_lse)


@fault("derivatives", method="by_product")
def gradient_without_the_softcap(self, state, by_score):
    return by_score


@fault("derivatives", method="shared")
def gradient_of_the_last_head_of_a_group(self, gradient, groups):
    *batch, heads, length, width = gradient.shape
    return gradient.reshape(*batch, heads // groups, groups, length, width)[..., -1, :, :]


@fault("derivatives", method="shared")
def gradient_summed_over_tiled_groups(self, gradient, groups):
    *batch, heads, length, width = gradient.shape
    return gradient.reshape(*batch, groups, heads // groups, length, width).sum(-4)


@fault("derivatives", method="by_bias")
def gradient_of_a_broadcast_bias_is_a_mean(self, by_score, bias):
    share = max(1, by_score.size // bias.size)
    return (summed_to(by_score, bias.shape) / share).astype(bias.dtype)


@fault("derivatives", method="by_bias")
def gradient_of_a_bias_is_not_summed(self, by_score, bias):
    return by_score.astype(bias.dtype)


@fault("sinks", method="by_sink")
def gradient_of_a_sink_has_the_wrong_sign(self, state, mean, d_lse):
    return -Dense.by_sink(self, state, mean, d_lse)


@fault("sinks", method="by_sink")
def gradient_of_a_sink_without_the_lse(self, state, mean, d_lse):
    return Dense.by_sink(self, state, mean, 0 * d_lse)


@fault("dropout", method="by_value")
def gradient_of_values_without_dropout(self, state, d_output):
    return selected(state.weights.swapaxes(-1, -2), d_output, state.allowed.swapaxes(-1, -2))


@fault("dropout", method="by_weight")
def gradient_of_scores_without_dropout(self, state, d_output):
    return d_output @ state.v.swapaxes(-1, -2)


@fault("empty-rows", method="by_score")
def gradient_of_empty_rows_is_nan(self, state, by_weight, mean, d_lse):
    empty = ~state.allowed.any(-1, keepdims=True)
    state.allowed = state.allowed | empty
    return np.where(empty, np.nan, Dense.by_score(self, state, by_weight, mean, d_lse))


@fault("masked-is-not-felt", method="by_weight")
def gradient_feels_masked_values(self, state, d_output):
    by_weight = d_output @ state.v.swapaxes(-1, -2)
    return np.where(state.kept, by_weight, by_weight * 0)


ZOO["gradient_feels_masked_values"][0].by_score = lambda self, state, by_weight, mean, d_lse: (
    state.weights * (by_weight - (state.weights * by_weight).sum(-1)[..., None] + d_lse[..., None])
)


@fault("masked-is-not-felt", method="backward")
def gradient_feels_masked_keys(self, state, d_output, d_lse):
    found = Dense.backward(self, state, d_output, d_lse)
    nothing = 0 * state.k.sum(axis=-2, keepdims=True)
    return found | {"query": (found["query"] + nothing).astype(found["query"].dtype)}


@fault("layout", "derivatives", method="like")
def gradient_in_the_other_layout(self, gradient, given, state):
    found = Dense.like(self, gradient, given, state)
    return found.swapaxes(-3, -2) if state.layout == "blhd" else found


# What ends in no result.


def never_returns(query, key, value, **options):
    while True:
        time.sleep(0.01)


def never_returns_from_c(query, key, value, **options):
    sum(iter(lambda: 1, 2))


def ends_the_interpreter(query, key, value, **options):
    os._exit(3)


def aborts(query, key, value, **options):
    os.abort()


def exits(query, key, value, **options):
    sys.exit("no attention today")


def prints_megabytes(query, key, value, **options):
    print("x" * 4_000_000)
    os.write(1, b"y" * 4_000_000)
    return Dense()(query, key, value, **options)


def of_another_library(query, key, value, *, return_lse=False, **options):
    import torch

    output, lse = Dense()(query, key, value, return_lse=True, **options)
    output = torch.from_numpy(np.asarray(output, dtype=np.float32))
    return (output, lse) if return_lse else output


def closes_stdout(query, key, value, **options):
    sys.stdout.close()
    with contextlib.suppress(OSError):
        os.close(1)
    return Dense()(query, key, value, **options)
