"""Faults of the gradients."""

from __future__ import annotations

import numpy as np

from ..dense import Dense, selected, summed_to
from .faults import ZOO, fault


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
