"""Faults of the softmax, of its product with the values, and of the lse."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ..dense import Dense
from .faults import ZOO, fault, rounded_to, tf32


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
