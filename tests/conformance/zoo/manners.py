"""Faults of manners: inputs that change, bits that differ, calls that end in no result."""

from __future__ import annotations

import contextlib
import os
import sys
import time

import numpy as np

from ..dense import Dense
from .faults import ZOO, fault


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
