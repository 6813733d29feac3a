"""Blocks of rows that look alike, as an axis of the batch: their keys are views that overlap."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.lib.stride_tricks import as_strided

from portable_attention.backends import Array
from portable_attention.core.heads import Heads, largest_norm


def overlapping(array: Array, blocks: int, step: int, size: int) -> Array:
    """Return rows (*batch, Hkv, 1, rows, D) as blocks of `size` that begin `step` apart."""
    *lead, kv_heads, one, _, width = array.shape
    *strides, of_heads, of_one, of_rows, of_width = array.strides
    return as_strided(
        array,
        (*lead, blocks, kv_heads, one, size, width),
        (*strides, step * of_rows, of_heads, of_one, of_rows, of_width),
        writeable=False,
    )


class Blocks(Heads):
    """A chunk of blocks, whose keys and values are widened and measured once for all of them."""

    @cached_property
    def key(self) -> Array:
        return self._packed_rows(super().key)

    @cached_property
    def value(self) -> Array:
        return self._packed_rows(super().value)

    def _packed_rows(self, blocks: Array) -> Array:
        if self._is_packed(blocks):
            return blocks
        rows = self._packed(self._rows(blocks))
        return overlapping(rows, blocks.shape[-5], self.step, blocks.shape[-2])

    @property
    def step(self) -> int:
        return self.call.problem.query_length

    def _rows(self, blocks: Array) -> Array:
        """Return overlapping blocks as the rows that they are made of."""
        *lead, count, kv_heads, one, size, width = blocks.shape
        *strides, _, of_heads, of_one, of_rows, of_width = blocks.strides
        return as_strided(
            blocks,
            (*lead, kv_heads, one, (count - 1) * self.step + size, width),
            (*strides, of_heads, of_one, of_rows, of_width),
            writeable=False,
        )

    def _find_largest_keys(self) -> tuple[Array, Array]:
        key = self.key
        rows = self._rows(key)
        squares = np.vecdot(rows, rows)[..., np.newaxis]
        squares = overlapping(squares, key.shape[-5], self.step, key.shape[-2])[..., 0]
        return largest_norm(key, squares)

    def alike(self, ways: Array) -> Iterator[Heads]:
        """Return runs of the blocks of a head that have the same way."""
        ways = np.broadcast_to(ways[..., 0, 0], self.lead)
        axis = len(self.call.problem.batch) - 1
        offsets = [cut.start for cut in self.index]
        for place in np.ndindex(*(1 if at == axis else size for at, size in enumerate(self.lead))):
            line = ways[(*place[:axis], slice(None), *place[axis + 1 :])]
            bounds = [0, *(np.flatnonzero(np.diff(line)) + 1).tolist(), line.size]
            for start, stop in itertools.pairwise(bounds):
                index = [slice(o + p, o + p + 1) for o, p in zip(offsets, place, strict=True)]
                index[axis] = slice(offsets[axis] + start, offsets[axis] + stop)
                yield self._of(tuple(index))
