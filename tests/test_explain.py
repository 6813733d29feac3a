"""What `explain` says is what a call does."""

from __future__ import annotations

import json

import numpy as np
import pytest

from portable_attention import attention, explain
from portable_attention.core import bounded, eager, host
from portable_attention.core.heads import Heads

from .backends import Backend
from .problems import make_inputs

OPTIONS = {
    "bare": {},
    "causal": {"causal": True},
    "from the end": {"causal": True, "query_offset": "end"},
    "lengths": {"causal": True, "query_offset": -30, "key_lengths": np.array([0, 333])},
    "mask": {"mask": np.ones((700, 500), bool)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.needs(library="numpy")
def test_tiles_are_those_of_the_call(backend: Backend, monkeypatch, name):
    """Counted where the call makes them, in a tiling that does not divide the lengths."""
    inputs = make_inputs(batch=(2,), heads=2, key_heads=1, queries=700, keys=500, width=4)
    options = {**({"query_offset": "start"} if name == "causal" else {}), **OPTIONS[name]}
    seen = {"full": [], "mixed": []}  # to lists, threads add without losing any
    tiles = eager.Part.tiles

    def counting(self, rows, *rest, **named):
        for met in tiles(self, rows, *rest, **named):
            kind = "full" if met.allowed is None else "mixed"
            seen[kind].append(int(np.prod(self.lead)))
            yield met

    monkeypatch.setattr(Heads, "tiles", counting)
    for again in ("_attend_exactly", "_attend_again", "_sum_again"):  # a second look at a few rows
        monkeypatch.setattr(host, again, lambda *_: None)
    found = explain(**inputs, **options, block_size=(96, 64))
    attention(**inputs, **options, block_size=(96, 64))
    assert found.tile == (96, 64)
    assert (found.full, found.mixed) == (sum(seen["full"]), sum(seen["mixed"]))
    assert found.skipped + found.full + found.mixed == 4 * 8 * 8
    assert found.engine == "portable"


@pytest.mark.needs(library="numpy")
def test_nothing_is_computed(backend: Backend, monkeypatch):
    def refuse(*_args, **_named):
        raise AssertionError("computed")

    for module, name in ((host, "run_tasks"), (bounded, "attend_bounded"), (eager, "run")):
        monkeypatch.setattr(module, name, refuse)
    length = 1 << 20
    query = np.broadcast_to(np.float32(0), (1, 8, length, 64))
    found = explain(query, query, query, window=(512, 0))
    assert found.skipped > 0.99 * (found.skipped + found.full + found.mixed)
    assert found.memory < 64 << 20
    assert found.bytes == 4 * 4 * 8 * length * 64
    # Between the pairs of the window, and what their tiles have besides.
    pairs = 8 * length * 513
    assert pairs * 4 * 64 < found.flops < 3 * pairs * 4 * 64


def test_every_backend_explains_itself(backend: Backend):
    inputs = make_inputs(queries=5, keys=7)
    inputs = {name: backend.asarray(array) for name, array in inputs.items()}
    found = explain(**inputs, softcap=3.0, return_lse=True)
    assert found.engine == "portable"
    assert found.schedule in ("host tiles", "eager tiles", "scan")
    assert all(reason for reason in found.passed_over.values())
    assert found.flops > 0
    assert "engine    portable" in str(found)
    assert "memory    about" in str(found)
    with pytest.raises(ValueError, match="softcap"):
        explain(**inputs, softcap=-1.0)


def test_what_cannot_be_read_is_not_counted():
    jax = pytest.importorskip("jax", reason="needs jax")
    found = []

    def traced(query, lengths):
        found.append(explain(query, query, query, key_lengths=lengths))
        return query

    jax.jit(traced)(jax.numpy.zeros((2, 1, 8, 4)), jax.numpy.asarray([3, 8]))
    assert (found[0].skipped, found[0].full, found[0].mixed) == (None, None, None)
    assert "known when the call runs" in str(found[0])


def test_what_autograd_records_is_the_call_beneath_it():
    torch = pytest.importorskip("torch", reason="needs torch")
    query = torch.zeros(1, 2, 64, 8)
    for options in ({}, {"window": (3, 0)}):
        plain = explain(query, query, query, **options)
        assert explain(query.clone().requires_grad_(), query, query, **options) == plain
        assert plain.schedule in ("native", "host tiles")


@pytest.mark.parametrize("wrong", [{"masks": None}, {"return_lse": 1}])
def test_wrong_options_are_refused_in_its_own_name(wrong):
    query = np.zeros((4, 4))
    with pytest.raises(TypeError, match=r"explain\(\) got|return_lse must be"):
        explain(query, query, query, **wrong)


def test_a_kernel_that_takes_the_call_is_named():
    torch = pytest.importorskip("torch", reason="needs torch")
    query = torch.zeros(1, 2, 64, 8)
    found = explain(query, query, query)
    assert (found.engine, found.schedule) == ("torch flash attention (CPU)", "native")
    found = explain(query, query, query, engine="portable")
    assert found.engine == "portable"
    assert "asks for" in found.passed_over["torch flash attention (CPU)"]
    found = explain(query, query, query, window=(3, 0))
    assert "window" in found.passed_over["torch flash attention (CPU)"]
    with pytest.raises(ValueError, match="window"):
        explain(query, query, query, window=(3, 0), engine="native")
    assert json.dumps(found.passed_over)
