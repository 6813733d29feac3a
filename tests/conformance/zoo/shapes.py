"""Faults of heads, batch axes, layouts and tiles."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from ..dense import Dense, Tiled
from .faults import ZOO, fault

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
