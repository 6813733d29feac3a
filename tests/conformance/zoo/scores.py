"""Faults of the scores: scale, products, softcap and bias."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from ..dense import Dense
from .faults import ZOO, fault, rounded_to, tf32


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
