"""A correct implementation, step by step: what a fault of the zoo replaces is one method of it.

Dense, in NumPy, in float32 or float64, with every option. It shares no line with the library.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np

from ..dropout_reference import keep_mask


class Dense:
    """Scores, softmax, values: the formula as it stands."""

    def __call__(self, query, key, value, *, return_lse=False, **options):
        state = self.forward(query, key, value, **options)
        output = self.rounded(state.output, query.dtype)
        output, lse = self.restored(output, state.lse, state)
        return (output, lse) if return_lse else output

    def vjp(self, query, key, value, *, return_lse=False, **options):
        result = self(query, key, value, return_lse=return_lse, **options)

        def pullback(d_output, d_lse=None):
            with np.errstate(all="ignore"):
                state = self.forward(query, key, value, **options)
                return self.backward(state, d_output, d_lse)

        return result, pullback

    # Forwards.

    def forward(
        self, query, key, value, *, mask=None, bias=None, causal=False, window=None,
        query_offset=None, query_lengths=None, key_lengths=None, scale=None, softcap=None,
        sinks=None, dropout=None, layout="bhld",
    ):  # fmt: skip
        given = SimpleNamespace(query=query, key=key, value=value, bias=bias, sinks=sinks)
        flat = query.ndim == key.ndim == value.ndim == 2
        q, k, v = (self.heads_first(array, layout) for array in (query, key, value))
        batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        groups = q.shape[-3] // k.shape[-3]
        k, v = self.grouped(k, groups), self.grouped(v, groups)
        q, k, v = (np.broadcast_to(array, batch + array.shape[-3:]) for array in (q, k, v))
        scale = self.scale(scale, q.shape[-1], v.shape[-1])
        with np.errstate(all="ignore"):
            allowed = self.allowed(
                (*q.shape[:-1], k.shape[-2]), causal=causal, window=window,
                offset=query_offset, rows=query_lengths, columns=key_lengths, mask=mask,
            )  # fmt: skip
            if bias is not None:
                allowed = allowed & self.not_masked_by(bias)
            score, slope = self.scores(q, k, scale, softcap, bias, allowed)
            top = self.maximum(score, allowed, sinks)
            part = self.exponentials(score, top, allowed)
            denominator = self.denominator(part, top, sinks)
            lse = self.lse(top, denominator)
            infinite = (np.isposinf(score) & allowed).any(-1)
            lse = np.where(infinite, np.nan, lse)
            weights = self.weights(part, denominator, lse, score)
            weights = np.where(infinite[..., None] & allowed, np.nan, weights)
            weights = np.where(allowed, weights, 0).astype(part.dtype)
            empty = ~allowed.any(-1)
            kept, used = self.dropped(weights, allowed, dropout)
            output = self.product_with_values(used, v, kept)
            output, lse = self.empty_rows(output, lse, empty, v, sinks)
            sink_weight = 0 * lse
            if sinks is not None:
                sink = sinks.astype(lse.dtype)[:, None]
                sink_weight = np.where(empty, 1, np.exp(sink - lse))
        return SimpleNamespace(
            q=q, k=k, v=v, scale=scale, slope=slope, allowed=allowed, weights=weights, used=used,
            kept=kept, output=output, lse=lse.astype(q.dtype), sink_weight=sink_weight, flat=flat,
            layout=layout, given=given, dropout=dropout,
        )  # fmt: skip

    def compute_dtype(self, dtype):
        return np.float64 if dtype == np.float64 else np.float32

    def heads_first(self, array, layout):
        wide = array.astype(self.compute_dtype(array.dtype))
        if layout == "blhd":
            return wide.swapaxes(-3, -2)
        return wide[None] if wide.ndim == 2 else wide

    def grouped(self, array, groups):
        return np.repeat(array, groups, axis=-3)

    def scale(self, given, width, value_width):
        if given is None:
            return 1 / math.sqrt(width) if width else 0.0
        return given

    def product(self, q, k):
        return q @ k.swapaxes(-1, -2)

    def scores(self, q, k, scale, softcap, bias, allowed):
        score = q.dtype.type(scale) * self.product(q, k)
        score, slope = self.capped(score, softcap)
        return self.biased(score, bias, scale), slope

    def capped(self, score, softcap):
        if softcap is None:
            return score, np.ones_like(score)
        cap = score.dtype.type(softcap)
        bounded = np.tanh(score / cap)
        return cap * bounded, 1 - bounded**2

    def biased(self, score, bias, scale):
        if bias is None:
            return score
        return score + np.clip(bias, np.finfo(score.dtype).min, None).astype(score.dtype)

    def not_masked_by(self, bias):
        return ~np.isneginf(bias.astype(np.float64))

    def offset(self, given, rows, columns, shape):
        if isinstance(given, str):
            return columns - rows if given == "end" else np.zeros_like(columns)
        return per_item(0 if given is None else given)

    def allowed(self, shape, *, causal, window, offset, rows, columns, mask):
        rows = per_item(shape[-2] if rows is None else rows)
        columns = per_item(shape[-1] if columns is None else columns)
        i, j = np.arange(shape[-2])[:, None], np.arange(shape[-1])
        position = i + self.offset(offset, rows, columns, shape)
        allowed = self.valid(i, j, rows, columns)
        if causal:
            allowed = allowed & self.causal(position, j)
        if window is not None:
            allowed = allowed & self.window(position, j, *window)
        if mask is not None:
            allowed = self.masked(allowed, mask)
        return np.broadcast_to(allowed, shape)

    def valid(self, i, j, rows, columns):
        return (i < rows) & (j < columns)

    def causal(self, position, j):
        return j <= position

    def window(self, position, j, left, right):
        inside = np.ones(np.broadcast_shapes(position.shape, j.shape), dtype=bool)
        if left is not None:
            inside = inside & (j >= position - left)
        if right is not None:
            inside = inside & (j <= position + right)
        return inside

    def masked(self, allowed, mask):
        return allowed & mask

    def maximum(self, score, allowed, sinks):
        top = np.where(allowed, score, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
        if sinks is not None:
            top = np.maximum(top, sinks.astype(score.dtype)[:, None, None])
        return np.where(np.isfinite(top), top, 0).astype(score.dtype)

    def exponentials(self, score, top, allowed):
        return np.where(allowed, np.exp(score - top), 0).astype(score.dtype)

    def denominator(self, part, top, sinks):
        total = part.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks.astype(part.dtype)[:, None, None] - top)
        return total

    def lse(self, top, denominator):
        return (top + np.log(denominator))[..., 0]

    def weights(self, part, denominator, lse, score):
        return part / denominator

    def dropped(self, weights, allowed, dropout):
        if dropout is None:
            return allowed, weights
        kept = allowed & keep_mask(dropout.rate, dropout.seed, weights.shape)
        share = weights.dtype.type(1 - dropout.rate if dropout.rate < 1 else 1)
        return kept, np.where(kept, weights / share, 0)

    def product_with_values(self, weights, v, felt):
        product = np.where(felt, weights, 0) @ np.where(np.isfinite(v), v, 0)
        for special in (np.inf, -np.inf, np.nan):
            found = np.isnan(v) if np.isnan(special) else v == special
            meets = felt.astype(v.dtype) @ found.astype(v.dtype) > 0
            product = product + np.where(meets, special, 0).astype(v.dtype)
        return product

    def empty_rows(self, output, lse, empty, v, sinks):
        return output, lse

    def rounded(self, output, dtype):
        return output.astype(dtype)

    def restored(self, output, lse, state):
        if state.layout == "blhd":
            return output.swapaxes(-3, -2), lse
        return (output[0], lse[0]) if state.flat else (output, lse)

    # Backwards.

    def backward(self, state, d_output, d_lse):
        d_output = self.heads_first(d_output, state.layout).reshape(state.output.shape)
        d_lse = np.zeros_like(state.lse) if d_lse is None else d_lse.reshape(state.lse.shape)
        by_weight = self.by_weight(state, d_output)
        mean = np.where(state.kept, state.weights * by_weight, 0).sum(-1)
        by_score = self.by_score(state, by_weight, mean, d_lse)
        by_score = np.where(state.allowed, by_score, 0)
        by_product = self.by_product(state, by_score)
        swapped = by_product.swapaxes(-1, -2)
        felt = state.allowed.swapaxes(-1, -2)
        found = {
            "query": state.scale * selected(by_product, state.k, state.allowed),
            "key": state.scale * selected(swapped, state.q, felt),
            "value": self.by_value(state, d_output),
        }
        for name, gradient in found.items():
            found[name] = self.like(gradient, getattr(state.given, name), state)
        if state.given.bias is not None:
            found["bias"] = self.by_bias(by_score, state.given.bias)
        if state.given.sinks is not None:
            by_sink = self.by_sink(state, mean, d_lse)
            summed = by_sink.sum(axis=tuple(range(by_sink.ndim - 2))).sum(-1)
            found["sinks"] = summed.astype(state.given.sinks.dtype)
        return found

    def by_weight(self, state, d_output):
        by_weight = d_output @ state.v.swapaxes(-1, -2)
        rate = 0 if state.dropout is None else state.dropout.rate
        return np.where(state.kept, by_weight / by_weight.dtype.type(1 - rate or 1), 0)

    def by_score(self, state, by_weight, mean, d_lse):
        return state.weights * (by_weight - mean[..., None] + d_lse[..., None])

    def by_product(self, state, by_score):
        return np.where(state.allowed, by_score * state.slope, 0)

    def by_value(self, state, d_output):
        return selected(state.used.swapaxes(-1, -2), d_output, state.kept.swapaxes(-1, -2))

    def by_bias(self, by_score, bias):
        return summed_to(by_score, bias.shape).astype(bias.dtype)

    def by_sink(self, state, mean, d_lse):
        return state.sink_weight * (d_lse - mean)

    def shared(self, gradient, groups):
        *batch, heads, length, width = gradient.shape
        return gradient.reshape(*batch, heads // groups, groups, length, width).sum(-3)

    def like(self, gradient, given, state):
        shape = given.shape
        if state.layout == "blhd":
            shape = (*shape[:-3], shape[-2], shape[-3], shape[-1])
        padded = (1,) * (gradient.ndim - len(shape)) + shape
        gradient = self.shared(gradient, gradient.shape[-3] // padded[-3])
        gradient = summed_to(gradient, padded).reshape(shape).astype(given.dtype)
        return gradient.swapaxes(-3, -2) if state.layout == "blhd" else gradient


class Tiled(Dense):
    """The softmax tile by tile along the keys: running maximum, rescaled sums."""

    def __init__(self, block=16):
        self.block = block

    def forward(self, query, key, value, *, dropout=None, **options):
        state = super().forward(query, key, value, dropout=dropout, **options)
        with np.errstate(all="ignore"):
            self.in_tiles(state, options.get("sinks"), options.get("softcap"), options.get("bias"))
        return state

    def in_tiles(self, state, sinks, softcap, bias):
        score, _ = self.scores(state.q, state.k, state.scale, softcap, bias, state.allowed)
        rate = 0 if state.dropout is None else state.dropout.rate
        shape = (*score.shape[:-1], 1)
        top = np.full(shape, -np.inf, dtype=score.dtype)
        total = np.zeros(shape, dtype=score.dtype)
        output = np.zeros_like(state.output)
        if sinks is not None:
            top, total = self.begun(top, total, sinks)
        for start in range(0, score.shape[-1], self.block):
            tile = slice(start, start + self.block)
            allowed = state.allowed[..., tile]
            part_score = np.where(allowed, score[..., tile], -np.inf)
            new = np.maximum(top, part_score.max(axis=-1, keepdims=True))
            shift = np.where(np.isfinite(new), new, 0)
            factor = np.exp(np.where(np.isneginf(top), -np.inf, top - shift))
            part = np.where(allowed, np.exp(part_score - shift), 0).astype(score.dtype)
            total, output = self.rescaled(total, output, factor)
            total = total + part.sum(axis=-1, keepdims=True)
            kept = state.kept[..., tile]
            output = output + self.product_with_values(
                np.where(kept, part, 0), state.v[..., tile, :], kept
            )
            top = new
        infinite = (np.isposinf(score) & state.allowed).any(-1, keepdims=True)
        empty = ~state.allowed.any(-1, keepdims=True)
        lse = np.where(np.isfinite(top), top, 0) + np.log(total)
        state.lse = np.where(infinite | np.isnan(total), np.nan, lse)[..., 0].astype(score.dtype)
        output = output / total / output.dtype.type(1 - rate or 1)
        output = np.where(infinite, np.nan, output)
        state.output = np.where(empty, 0, output).astype(score.dtype)

    def begun(self, top, total, sinks):
        """Start from the sink: a key without a value."""
        sink = sinks.astype(top.dtype)[:, None, None]
        return np.broadcast_to(sink, top.shape), np.ones_like(total)

    def rescaled(self, total, output, factor):
        return total * factor, output * np.where(output == 0, 1, factor)


def per_item(numbers):
    numbers = np.asarray(numbers)
    return numbers[..., None, None, None] if numbers.ndim else numbers


def selected(weights, values, felt):
    return Dense().product_with_values(weights, values, felt)


def summed_to(array, shape):
    padded = (1,) * (array.ndim - len(shape)) + tuple(shape)
    axes = tuple(axis for axis, size in enumerate(padded) if size == 1 != array.shape[axis])
    return array.sum(axis=axes, keepdims=True).reshape(shape)
