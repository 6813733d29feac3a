"""Correct implementations of other makes: the kit must pass every one of them."""

from __future__ import annotations

import math
from typing import ClassVar

import ml_dtypes
import numpy as np

from .dense import Dense, Tiled


class Float64(Dense):
    """Everything in float64, whatever the inputs; rounded at the end."""

    def compute_dtype(self, dtype):
        return np.float64

    def restored(self, output, lse, state):
        wide = state.given.query.dtype == np.float64
        return super().restored(output, lse.astype(np.float64 if wide else np.float32), state)


class TwoPass(Dense):
    """The lse first; then the weights as exp(score - lse)."""

    def weights(self, part, denominator, lse, score):
        return np.exp(score - lse[..., None])


class Exp2(Dense):
    """Powers of two of scores that were multiplied by log2(e), as GPU kernels take them."""

    LOG2E = math.log2(math.e)

    def exponentials(self, score, top, allowed):
        factor = score.dtype.type(self.LOG2E)
        return np.where(allowed, np.exp2(score * factor - top * factor), 0).astype(score.dtype)

    def lse(self, top, denominator):
        return (top + np.log2(denominator) * denominator.dtype.type(math.log(2)))[..., 0]


class HalfWeights(Dense):
    """Weights in the dtype of half inputs before they meet the values, as fused kernels do."""

    def forward(self, query, key, value, **options):
        self.dtype = query.dtype
        return super().forward(query, key, value, **options)

    def product_with_values(self, weights, v, felt):
        return super().product_with_values(weights.astype(self.dtype).astype(v.dtype), v, felt)

    def by_value(self, state, d_output):
        state.used = state.used.astype(self.dtype).astype(state.used.dtype)
        return super().by_value(state, d_output)

    def by_product(self, state, by_score):
        product = super().by_product(state, by_score)
        return product.astype(self.dtype).astype(product.dtype)


class LateHalfWeights(HalfWeights):
    """The same with weights that are not normalised yet, as in FlashAttention."""

    def weights(self, part, denominator, lse, score):
        self.total = denominator
        return super().weights(part, denominator, lse, score)

    def product_with_values(self, weights, v, felt):
        raw = (weights * self.total).astype(self.dtype).astype(v.dtype)
        return Dense.product_with_values(self, raw, v, felt) / self.total

    def empty_rows(self, output, lse, empty, v, sinks):
        return np.where(empty[..., None], 0, output).astype(output.dtype), lse


class ScaledQueries(Dense):
    """The scale on the queries, before the product."""

    def scores(self, q, k, scale, softcap, bias, allowed):
        score, slope = self.capped(self.product(q * q.dtype.type(scale), k), softcap)
        return self.biased(score, bias, scale), slope


class SequentialSums(Dense):
    """Sums one after another, not in pairs: the worst order that is still honest."""

    def product(self, q, k):
        total = np.zeros((*q.shape[:-1], k.shape[-2]), q.dtype)
        for d in range(q.shape[-1]):
            total = total + q[..., :, None, d] * k[..., None, :, d]
        return total

    def denominator(self, part, top, sinks):
        total = super().denominator(0 * part, top, sinks)
        for j in range(part.shape[-1]):
            total = total + part[..., j, None]
        return total


class BackwardsKeys(Dense):
    """The keys from the last to the first."""

    def product(self, q, k):
        return super().product(q[..., ::-1], k[..., ::-1, ::-1])[..., ::-1]


class MeanFromTheOutput(Dense):
    """The backward pass takes the row's mean from the output as it was rounded."""

    def by_score(self, state, by_weight, mean, d_lse):
        self.rounded_output = self.rounded(state.output, state.given.query.dtype)
        return super().by_score(state, by_weight, self.mean(state, mean), d_lse)

    def backward(self, state, d_output, d_lse):
        self.upstream = self.heads_first(d_output, state.layout).reshape(state.output.shape)
        return super().backward(state, d_output, d_lse)

    def mean(self, state, mean):
        output = self.rounded(state.output, state.given.query.dtype).astype(state.output.dtype)
        found = (self.upstream * output).sum(-1)
        return np.where(np.isfinite(found), found, mean).astype(mean.dtype)


class Eager(Tiled):
    """Tiles that are too small for anything."""

    def __init__(self):
        super().__init__(1)


class LongTiles(Tiled):
    """Tiles that are longer than most calls."""

    def __init__(self):
        super().__init__(128)


class OddTiles(Tiled):
    """Tiles of an odd size."""

    def __init__(self):
        super().__init__(7)


class LogAddExp(Dense):
    """The lse by adding logarithms one after another, and the weights from it."""

    def lse(self, top, denominator):
        return self.found

    def denominator(self, part, top, sinks):
        total = np.full(part.shape[:-1], -np.inf, part.dtype)
        if sinks is not None:
            total = total * 0 + sinks.astype(part.dtype)[:, None]
            total = np.where(np.isnan(total), sinks.astype(part.dtype)[:, None], total)
        scores = np.log(part) + top
        for j in range(part.shape[-1]):
            total = np.logaddexp(total, scores[..., j])
        self.found = total.astype(part.dtype)
        return np.exp(self.found[..., None] - top)

    def weights(self, part, denominator, lse, score):
        return np.exp(score - lse[..., None])


class LongDouble(Float64):
    """More than float64, where there is more."""

    def compute_dtype(self, dtype):
        return np.longdouble


class Halves(Tiled):
    """The keys in halves, and those in halves again, merged by their lse."""

    def in_tiles(self, state, sinks, softcap, bias):
        score, _ = self.scores(state.q, state.k, state.scale, softcap, bias, state.allowed)
        infinite = (np.isposinf(score) & state.allowed).any(-1)
        output, lse = self.part(state, score, 0, score.shape[-1])
        if sinks is not None:
            nothing = np.zeros_like(output)
            sink = np.broadcast_to(sinks.astype(lse.dtype)[:, None], lse.shape)
            output, lse = self.merged((output, lse), (nothing, sink))
        rate = 0 if state.dropout is None else state.dropout.rate
        output = output / output.dtype.type(1 - rate or 1)
        state.lse = np.where(infinite, np.nan, lse).astype(score.dtype)
        state.output = np.where(infinite[..., None], np.nan, output).astype(score.dtype)

    def part(self, state, score, start, stop):
        if stop - start > 4:
            middle = (start + stop) // 2
            return self.merged(
                self.part(state, score, start, middle), self.part(state, score, middle, stop)
            )
        tile = slice(start, stop)
        allowed, kept = state.allowed[..., tile], state.kept[..., tile]
        top = Dense.maximum(self, score[..., tile], allowed, None)
        part = self.exponentials(score[..., tile], top, allowed)
        total = part.sum(-1, keepdims=True)
        weights = np.where(allowed, part / total, 0).astype(part.dtype)
        output = self.product_with_values(weights, state.v[..., tile, :], kept)
        return output, self.lse(top, total)

    def merged(self, one, other):
        (output, lse), (second, its) = one, other
        both = np.logaddexp(lse, its)
        shares = [np.exp(part - both)[..., None] for part in (lse, its)]
        first, second = (
            np.where(np.isneginf(part)[..., None], 0, share * found)
            for part, share, found in zip((lse, its), shares, (output, second), strict=True)
        )
        return first + second, both


VARIATIONS = [
    *(Dense, Tiled, Eager, LongTiles, OddTiles, Float64, TwoPass, Exp2, HalfWeights),
    *(LateHalfWeights, ScaledQueries, SequentialSums, BackwardsKeys, MeanFromTheOutput),
    *(LogAddExp, LongDouble, Halves),
]


# Other conventions, of which none is wrong by its own rules.


class EmptyRowsAreNan(Dense):
    """0/0, as without any care."""

    conventions: ClassVar = {"empty_rows": "nan"}

    def empty_rows(self, output, lse, empty, v, sinks):
        bare = empty & (sinks is None) & (v.shape[-2] > 0)
        return np.where(bare[..., None], np.nan, output), lse


class EmptyRowsAreTheMean(Dense):
    """The mean of the values, as where a large number is subtracted."""

    conventions: ClassVar = {"empty_rows": "mean", "empty_lse": "lowest"}

    def empty_rows(self, output, lse, empty, v, sinks):
        if v.shape[-2]:
            output = np.where(empty[..., None], v.mean(axis=-2, keepdims=True), output)
        return output, np.where(empty & (sinks is None), -3e38, lse)


class BaseTwo(Dense):
    """An lse in base 2."""

    conventions: ClassVar = {"lse_base": "2", "empty_lse": "inf"}

    def restored(self, output, lse, state):
        lse = np.where(np.isneginf(lse), np.inf, lse / lse.dtype.type(math.log(2)))
        return super().restored(output, lse, state)

    def backward(self, state, d_output, d_lse):
        if d_lse is not None:
            d_lse = d_lse / d_lse.dtype.type(math.log(2))
        return super().backward(state, d_output, d_lse)


class Ignoring(Dense):
    """True in a mask takes a key out."""

    conventions: ClassVar = {"mask_polarity": "ignore"}

    def masked(self, allowed, mask):
        return allowed & ~mask


class Interleaved(Dense):
    """Query head h reads key/value head h % Hkv."""

    conventions: ClassVar = {"head_order": "interleaved"}

    def grouped(self, array, groups):
        return np.concatenate([array] * groups, axis=-3)

    def shared(self, gradient, groups):
        *batch, heads, length, width = gradient.shape
        return gradient.reshape(*batch, groups, heads // groups, length, width).sum(-4)


class HeadsLast(Dense):
    """(B, L, H, D) without being told."""

    conventions: ClassVar = {"layout": "blhd"}
    without = ("layout",)

    def forward(self, query, key, value, **options):
        layout = "bhld" if query.ndim == key.ndim == value.ndim == 2 else "blhd"
        return super().forward(query, key, value, layout=layout, **options)


class _Cornered(Dense):
    """No offsets: one corner by convention."""

    corner = ""
    vjp = None

    def __call__(self, query, key, value, *, mask=None, bias=None, causal=False, window=None,
                 query_lengths=None, key_lengths=None, return_lse=False):  # fmt: skip
        return super().__call__(
            query, key, value, mask=mask, bias=bias, causal=causal, window=window,
            query_lengths=query_lengths, key_lengths=key_lengths, query_offset=self.corner,
            return_lse=return_lse,
        )  # fmt: skip


class UpperLeft(_Cornered):
    """The upper left corner, as PyTorch and JAX have it."""

    conventions: ClassVar = {"diagonal": "start"}
    corner = "start"


class LowerRight(_Cornered):
    """The lower right corner, as FlashAttention has it."""

    conventions: ClassVar = {"diagonal": "end"}
    corner = "end"


CONVENTIONS = [
    *(EmptyRowsAreNan, EmptyRowsAreTheMean, BaseTwo, Ignoring, Interleaved, HeadsLast),
    *(UpperLeft, LowerRight),
]


def only_half(query, key, value, *, causal=False, scale=None, return_lse=False):
    """A kernel for half precision alone, of one corner, as GPU kernels are."""
    if query.dtype not in (np.float16, ml_dtypes.bfloat16):
        raise TypeError(f"half precision alone, not {query.dtype}")
    return Dense()(
        query, key, value, causal=causal, query_offset="end", scale=scale, return_lse=return_lse
    )
