"""Faults of what rows come to: empty ones, sinks, NaN and infinities, dropout."""

from __future__ import annotations

import numpy as np

from ..dense import Dense
from .faults import fault

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
