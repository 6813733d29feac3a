"""A native kernel takes a call only where it keeps to the rules."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from portable_attention import attention, explain

from .accuracy import assert_accurate, assert_near, gradients_of_oracle, reference_of
from .problems import make_inputs

torch = pytest.importorskip("torch", reason="needs torch")

# It imports torch, so it comes after the line that skips without it.
from portable_attention.backends.torch_native import FlashOnCpu  # noqa: E402


@pytest.fixture
def taken(monkeypatch):
    """Return the list of what the kernel has returned."""
    results = []
    run = FlashOnCpu.run

    def noting(self, call):
        results.append(run(self, call))
        return results[-1]

    monkeypatch.setattr(FlashOnCpu, "run", noting)
    return results


def tensors(**sizes):
    inputs = make_inputs(**sizes)
    return inputs, {name: torch.from_numpy(array) for name, array in inputs.items()}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"scale": -2.0}, {"scale": 0.0}])
@pytest.mark.parametrize(
    "sizes", [{"queries": 5}, {"queries": 300, "batch": (2, 3)}, {"batch": ()}]
)
def test_the_kernel_is_right_where_it_is_taken(taken, dtype, options, sizes):
    sizes = {"queries": 7, "keys": sizes.get("queries", 7), "value_width": 4, "width": 4, **sizes}
    inputs, own = tensors(heads=3, dtype=dtype, **sizes)
    output, lse = attention(**own, **options, return_lse=True)
    assert len(taken) == 1
    assert_accurate(output.numpy(), lse.numpy(), reference_of(**inputs, **options))


def test_heads_after_length(taken):
    inputs, own = tensors(heads=3, width=4, value_width=4)
    swapped = {name: array.transpose(-3, -2) for name, array in own.items()}
    output, lse = attention(**swapped, layout="blhd", return_lse=True)
    assert len(taken) == 1
    assert_accurate(output.transpose(-3, -2).numpy(), lse.numpy(), reference_of(**inputs))


VIEWS = {
    "columns apart": lambda array: array[..., ::2],
    "columns swapped with rows": lambda array: array.mT.contiguous().mT,
    "one row for all": lambda array: array[..., :1, :].expand(array.shape),
    "one column for all": lambda array: array[..., :1].expand(array.shape),
    "one head for all": lambda array: array[:, :1].expand(array.shape),
    "rows apart": lambda array: array[..., ::2, :],
}


@pytest.mark.parametrize("view", VIEWS)
def test_how_a_tensor_lies_in_memory_changes_nothing(taken, view):
    _, own = tensors(heads=3, queries=40, keys=40, width=8, value_width=8)
    views = {name: VIEWS[view](array) for name, array in own.items()}
    output, lse = attention(**views, causal=True, return_lse=True)
    assert taken[0] is not None
    inputs = {name: array.numpy() for name, array in views.items()}
    assert_accurate(output.numpy(), lse.numpy(), reference_of(**inputs, causal=True))


REFUSED = {
    "window": {"window": (2, 0)},
    "offset": {"causal": True, "query_offset": 1},
    "lengths": {"key_lengths": 3},
    "mask": {"mask": torch.ones(6, 6, dtype=torch.bool)},
    "bias": {"bias": torch.zeros(6, 6)},
    "sinks": {"sinks": torch.zeros(2)},
    "softcap": {"softcap": 2.0},
    "block_size": {"block_size": (2, 2)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_do_is_named(taken, name):
    _, own = tensors(heads=2, queries=6, keys=6, width=4, value_width=4)
    attention(**own, **REFUSED[name])
    assert taken == []
    with pytest.raises(ValueError, match="native") as caught:
        attention(**own, **REFUSED[name], engine="native")
    assert name in str(caught.value)
    assert "portable" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"key_heads": 1}, "query head"),
        ({"value_width": 3}, "wide"),
        ({"keys": 0}, "empty"),
        ({"queries": 0}, "empty"),
    ],
)
def test_inputs_it_cannot_take_are_named(taken, change, reason):
    sizes = {"heads": 2, "queries": 6, "keys": 6, "width": 4, "value_width": 4}
    _, own = tensors(**{**sizes, **change})
    assert attention(**own).shape == (*own["query"].shape[:-1], own["value"].shape[-1])
    assert taken == []
    with pytest.raises(ValueError, match=reason):
        attention(**own, engine="native")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("queries", [1, 2, 6, 64, 300])
@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 8e37])
def test_garbage_is_left_to_the_portable_tiles(taken, queries, name, poison, causal):
    """The kernel multiplies a masked NaN by 0, and gives 0 for a query of NaN in a short call."""
    sizes = {"queries": queries, "keys": queries, "width": 4, "value_width": 4}
    inputs, own = tensors(heads=2, **sizes)
    inputs[name][..., -1, 1] = poison
    own[name][..., -1, 1] = poison
    output, lse = attention(**own, causal=causal, return_lse=True)
    assert_accurate(output.numpy(), lse.numpy(), reference_of(**inputs, causal=causal))
    if not np.isfinite(poison):
        assert taken == [None]
        with pytest.raises(ValueError, match="not finite"):
            attention(**own, causal=causal, engine="native")


def test_scores_beyond_the_range_are_left_to_the_portable_tiles(taken):
    """The product of both is infinite in float32, and a row that meets it is NaN."""
    _, own = tensors(heads=2, queries=2, keys=2, width=4, value_width=4)
    for name in ("query", "key"):
        own[name][..., :1, :] = 1e30
    output = attention(**own)
    assert taken == [None]
    assert torch.isnan(output[..., 0, :]).all()


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_queries_whose_squares_overflow_are_left_to_the_portable_tiles(taken, layout):
    inputs, own = tensors(heads=2, queries=6, keys=6, width=4, value_width=4, dtype="float32")
    inputs["query"] *= np.float32(1e20)
    inputs["key"] *= np.float32(1e-20)
    if layout == "blhd":
        own = {name: array.transpose(-2, -3) for name, array in own.items()}
    output, lse = attention(**own, layout=layout, return_lse=True)
    assert taken == [None]
    output = output.transpose(-2, -3) if layout == "blhd" else output
    assert_accurate(output.numpy(), lse.numpy(), reference_of(**inputs))


def test_large_finite_sums_are_not_garbage(taken):
    own = [torch.full((1, 2, 6, 4), number) for number in (0.0, 0.0, 3e37)]
    assert torch.isfinite(attention(*own, engine="native")).all()


def test_long_calls_can_be_interrupted():
    """A kernel that runs for minutes would keep Ctrl-C waiting."""
    query = torch.zeros(1).expand(1, 16, 2**17, 16)
    found = explain(query, query, query)
    assert found.engine == "portable"
    assert "interrupted" in found.passed_over[FlashOnCpu.name]


def test_libraries_without_a_kernel_say_so():
    inputs = make_inputs()
    with pytest.raises(ValueError, match="numpy has no attention kernel"):
        attention(**inputs, engine="native")


def test_gradients_go_through_the_kernel_too(taken):
    """Its output and lse are what the portable backward pass needs."""
    _, own = tensors(heads=2, queries=6, keys=6, width=4, value_width=4)
    found = []
    for engine in ("auto", "portable"):
        leaves = [array.double().requires_grad_() for array in own.values()]
        attention(*leaves, causal=True, engine=engine).square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    assert len(taken) == 1
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.fixture
def taken_backward(monkeypatch):
    """Return the list of what the kernel has returned as gradients."""
    results = []
    run = FlashOnCpu.run_backward

    def noting(self, call, given):
        results.append(run(self, call, given))
        return results[-1]

    monkeypatch.setattr(FlashOnCpu, "run_backward", noting)
    return results


def gradients(own, engine="auto", *, square_lse=False, **options):
    """Return the gradients of a sum of squares, in float64 where the tensors are."""
    leaves = [array.clone().requires_grad_() for array in own.values()]
    output, lse = attention(*leaves, **options, engine=engine, return_lse=True)
    loss = output.square().sum() + (lse.square().sum() if square_lse else 0.0)
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"scale": -2.0}])
@pytest.mark.parametrize(
    "sizes", [{"queries": 5}, {"queries": 300, "batch": (2, 3)}, {"batch": (), "queries": 70}]
)
def test_its_gradients_are_right_where_they_are_taken(taken_backward, dtype, options, sizes):
    sizes = {"heads": 3, "keys": sizes["queries"], "value_width": 4, "width": 4, **sizes}
    inputs, own = tensors(dtype=dtype, **sizes)
    leaves = {name: array.requires_grad_() for name, array in own.items()}
    output = attention(**leaves, **options)
    cotangent = np.random.default_rng(1).standard_normal(output.shape).astype(dtype)
    output.backward(torch.from_numpy(cotangent))
    assert taken_backward[0] is not None
    for name, reference in gradients_of_oracle({**inputs, **options}, cotangent=cotangent).items():
        assert_near(leaves[name].grad.numpy(), *reference, name)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["key", "value"])
def test_gradients_beside_masked_garbage_are_left_to_the_portable_tiles(
    taken_backward, name, poison
):
    _, own = tensors(heads=2, queries=6, keys=6, width=4, value_width=4)
    own[name][..., -1, :] = poison
    leaves = [array.requires_grad_() for array in own.values()]
    found = []
    for engine in ("auto", "portable"):
        output = attention(*leaves, causal=True, engine=engine)
        found.append(torch.autograd.grad(output[..., :-1, :].square().sum(), leaves))
    assert taken_backward == [None]
    assert torch.isfinite(found[0][0][..., :-1, :]).all()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("queries", [6, 64, 300])
def test_garbage_from_above_is_left_to_the_portable_tiles(taken_backward, poison, queries):
    """It reaches the gradients of its own row, and of the keys and values that this attends."""
    sizes = {"queries": queries, "keys": queries, "width": 4, "value_width": 4}
    _, own = tensors(heads=2, **sizes, dtype="float32")
    leaves = [array.requires_grad_() for array in own.values()]
    cotangent = torch.ones_like(own["query"])
    cotangent[..., 2, 1] = poison
    found = [
        torch.autograd.grad(attention(*leaves, causal=True, engine=engine), leaves, cotangent)
        for engine in ("auto", "portable")
    ]
    assert taken_backward == [None]
    assert torch.isfinite(found[0][0][..., 3:, :]).all()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_gradients_of_the_lse_are_left_to_the_portable_tiles(taken_backward):
    _, own = tensors(heads=2, queries=6, keys=6, width=4, value_width=4)
    found = gradients(own, square_lse=True)
    assert taken_backward == [None]
    for one, other in zip(found, gradients(own, "portable", square_lse=True), strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_from_an_lse_without_digits_are_left_to_the_portable_tiles(taken_backward):
    """An lse of 1e3 is rounded by up to 3e-5, and so are all the weights made from it."""
    _, own = tensors(heads=2, queries=6, keys=6, width=4, value_width=4, dtype="float32")
    found = gradients(own, scale=500.0)
    assert taken_backward == [None]
    for one, other in zip(found, gradients(own, "portable", scale=500.0), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-2)


def test_a_single_head_keeps_its_bits(taken_backward):
    """The kernel would give its products to several threads, as many as there are."""
    _, own = tensors(batch=(), heads=1, queries=6, keys=6, width=4, value_width=4)
    gradients(own)
    assert taken_backward == []


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("queries", [1, 20, 32, 33, 200])
@pytest.mark.parametrize("causal", [False, True])
def test_threads_do_not_change_the_bits(heads, queries, causal):
    sizes = {"heads": heads, "queries": queries, "keys": queries, "width": 64, "value_width": 64}
    _, own = tensors(**sizes, batch=(), dtype="float32")
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4, 8):
            torch.set_num_threads(threads)
            output = attention(**own, causal=causal)
            found.append([output, *gradients(own, causal=causal)])
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


def test_portable_gradients_are_portable(taken_backward):
    _, own = tensors(heads=2, queries=6, keys=6, width=4, value_width=4)
    gradients(own, "portable")
    assert taken_backward == []


FORKED = """
import os
from portable_attention.backends import torch_native

with torch_native._measuring:
    child = os.fork()
    if child == 0:
        os._exit(0 if torch_native._measuring.acquire(timeout=5) else 1)
_, status = os.waitpid(child, 0)
raise SystemExit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_fork_while_another_thread_measures():
    """The child has no such thread, which would never let go. (JAX warns of forks beside it.)"""
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
