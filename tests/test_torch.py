"""What PyTorch's own tools make of a call: autograd, compilers, transforms, autocast."""

from __future__ import annotations

import tracemalloc
import warnings

import numpy as np
import pytest

from portable_attention import Dropout, attention, attention_vjp, partial_attention

torch = pytest.importorskip("torch", reason="needs torch")


def tensors(dtype=torch.float64, requires_grad=True):
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "query": (2, 4, 5, 3),
        "key": (2, 2, 6, 3),
        "value": (2, 2, 6, 2),
        "bias": (4, 1, 6),
        "sinks": (4,),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        .to(dtype)
        .requires_grad_(requires_grad)
        for name, shape in shapes.items()
    }


OPTIONS = {
    "causal": True,
    "query_offset": -1,  # the first row is empty
    "softcap": 2.0,
    "block_size": (2, 4),
    "dropout": Dropout(0.3, 4),
    "return_lse": True,
}


def call(query, key, value, bias, sinks, **options):
    return attention(query, key, value, bias=bias, sinks=sinks, **{**OPTIONS, **options})


def test_gradcheck_backwards_and_forwards():
    assert torch.autograd.gradcheck(call, tuple(tensors().values()), check_forward_ad=True)


def test_gradgradcheck():
    assert torch.autograd.gradgradcheck(call, tuple(tensors().values()))


def test_gradcheck_with_heads_after_length():
    x, y, z = (
        torch.randn(1, 4, heads, 3, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2)
    )

    def swapped(*arrays):
        return attention(*arrays, layout="blhd", window=(2, 1))

    assert torch.autograd.gradcheck(swapped, (x, y, z))
    assert torch.autograd.gradgradcheck(swapped, (x, y, z))


@pytest.mark.parametrize("name", ["query", "key", "value", "bias", "sinks"])
def test_a_gradient_by_one_argument_alone(name):
    alone = tensors(requires_grad=False)
    alone[name].requires_grad_()
    everything = tensors()
    for arguments in (alone, everything):
        output, lse = call(**arguments)
        (output.sum() + torch.where(torch.isinf(lse), 0.0, lse).sum()).backward()
    assert torch.equal(alone[name].grad, everything[name].grad)
    assert all(array.grad is None for other, array in alone.items() if other != name)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_makes_one_graph_without_tiles(dynamic):
    counted = []

    def backend(graph, example_inputs):
        counted.append([node for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    compiled = torch.compile(call, fullgraph=True, backend=backend, dynamic=dynamic)
    arguments = tensors(requires_grad=False)
    for found, expected in zip(compiled(**arguments), call(**arguments), strict=True):
        assert torch.equal(found, expected)
    (nodes,) = counted
    assert len(nodes) < 12  # the operator and what takes its results apart


@pytest.mark.parametrize("option", [{"causal": True}, {"window": (2, 1)}])
@pytest.mark.parametrize("offset", ["start", "end", "own"])
def test_a_compiled_call_takes_other_lengths(option, offset):
    """As in decoding, where the diagonal moves with lengths that the compiler has as symbols."""

    def call(query, key):
        own = key.shape[-2] - query.shape[-2]
        place = own if offset == "own" else offset
        return attention(query, key, key, query_offset=place, **option)

    torch._dynamo.reset()  # it counts the compilations of this function over all tests
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, keys in ((3, 5), (4, 9), (6, 7)):
        results = []
        for function in (call, compiled):
            query, key = (torch.ones(2, size, 4).cumsum(1).div(8) for size in (rows, keys))
            query.requires_grad_()
            output = function(query, key)
            output.sum().backward()
            results.append((output, query.grad))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_gradients_of_a_compiled_call():
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = []
    for function in (call, compiled):
        arguments = tensors()
        output, _ = function(**arguments, key_lengths=torch.tensor([5, 6]), window=(3, 0))
        output.sum().backward()
        results.append([array.grad for array in arguments.values()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_partial_attention_is_one_operator_too():
    """So that it compiles, and its backward pass keeps no weights."""
    query, key, value, *_ = tensors().values()
    compiled = torch.compile(partial_attention, fullgraph=True, backend="aot_eager")
    for function in (partial_attention, compiled):
        state = function(query, key, value, causal=True, query_offset="end")
        assert function is compiled or "attend" in type(state.output.grad_fn).__name__
        state.lse.sum().backward()


@pytest.mark.parametrize("name", ["scale", "softcap", "rate"])
def test_numbers_that_are_learned_are_refused(name):
    """Rather than given a gradient of 0: recorded, compiled, or carried forward."""
    query, key, value, *_ = tensors(requires_grad=False).values()

    def call(number):
        options = {"dropout": Dropout(number, 0)} if name == "rate" else {name: number}
        return attention(query, key, value, **options)

    message = rf"{name}.* cannot be differentiated"
    number, one = torch.tensor([0.5, 1.0], dtype=torch.float64)
    with pytest.raises(TypeError, match=message):
        torch.func.jvp(call, (number,), (one,))
    number.requires_grad_()
    with pytest.raises(TypeError, match=message):
        call(number)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        compiled(number)


@pytest.mark.parametrize(
    "options",
    [
        {"scale": True},
        {"softcap": True},
        {"causal": 1},
        {"window": (2.5, 0)},
        {"key_lengths": 2.5},
        {"block_size": (True, 3)},
        {"dropout": Dropout(0.5, 1.5)},
    ],
    ids=str,
)
def test_a_compiled_call_takes_the_same_kinds_of_numbers(options):
    """And makes no other kind fit."""
    query, key, value, *_ = tensors(requires_grad=False).values()

    def call(query):
        return attention(query, key, value, **options)

    with pytest.raises(TypeError, match="must be"):
        call(query)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"TypeError.*must be"):
        compiled(query)


def test_export():
    class Model(torch.nn.Module):
        def forward(self, query, key, value):
            return attention(query, key, value, causal=True, query_offset="end")

    query, key, value, *_ = tensors(requires_grad=False).values()
    exported = torch.export.export(Model(), (query, key, value))
    assert torch.equal(exported.module()(query, key, value), Model()(query, key, value))


def test_transforms():
    query, key, value, *_ = tensors(requires_grad=False).values()

    def output(query):
        return attention(query, key, value, causal=True, query_offset="end")

    mapped = torch.func.vmap(output)(torch.stack([query, 2 * query]))
    torch.testing.assert_close(mapped, torch.stack([output(query), output(2 * query)]))
    recorded = query.clone().requires_grad_()
    output(recorded).sum().backward()
    gradient = torch.func.grad(lambda x: output(x).sum())(query)
    torch.testing.assert_close(gradient, recorded.grad)
    _, along = torch.func.jvp(output, (query,), (torch.ones_like(query),))
    steps = [output(query + step * torch.ones_like(query)) for step in (1e-6, -1e-6)]
    torch.testing.assert_close(along, (steps[0] - steps[1]) / 2e-6, rtol=1e-6, atol=1e-8)


def test_autocast_decides_the_dtype_as_for_pytorchs_own_attention():
    query, key, value, *_ = tensors(torch.float32, requires_grad=False).values()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = attention(query, key, value.to(torch.bfloat16))
        assert output.dtype == torch.bfloat16
        assert partial_attention(query, key, value).output.dtype == torch.bfloat16
        assert attention(*(x.double() for x in (query, key, value))).dtype == torch.float64
    narrow = [x.to(torch.bfloat16) for x in (query, key, value)]
    assert torch.equal(output, attention(*narrow))


def test_autocast_and_gradients():
    query, key, value, *_ = tensors(torch.float32).values()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attention(query, key, value).float().sum().backward()
    assert query.grad.dtype == torch.float32
    narrow = [x.detach().to(torch.bfloat16).requires_grad_() for x in (query, key, value)]
    attention(*narrow).float().sum().backward()
    torch.testing.assert_close(value.grad, narrow[2].grad.float())


@pytest.mark.parametrize("options", [{"key_lengths": 0}, {"mask": torch.zeros(5, 6).bool()}])
def test_rows_that_attend_nothing_are_connected_to_their_inputs(options):
    query, key, value, *_ = tensors().values()
    attention(query, key, value, **options).sum().backward()
    assert all(not array.grad.any() for array in (query, key, value))


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 0)])
def test_empty_outputs_are_connected_to_their_inputs(shape):
    query, key, value = (torch.zeros(*shape, 3, requires_grad=True) for _ in range(3))
    attention(query, key, value).sum().backward()
    assert query.grad.shape == query.shape


def test_arrays_of_lengths_for_no_items_have_their_shape():
    query, key, value = (torch.zeros(0, 3, 2, 5, 4, requires_grad=True) for _ in range(3))
    none = np.zeros((0, 3), np.int64)
    options = {"query_offset": none, "query_lengths": none, "key_lengths": none}
    assert attention(query, key, value, causal=True, **options).shape == query.shape


def test_integers_and_arrays_that_the_dispatcher_would_refuse():
    query, key, value, *_ = tensors().values()
    far = {"query_offset": 10**30, "window": (10**30, 0), "block_size": (10**20, 4)}
    expected = attention(query.detach(), key.detach(), value.detach(), **far)
    torch.testing.assert_close(attention(query, key, value, **far), expected)
    lengths = np.array([6, 5])[::-1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in (lengths, lengths.astype(">i8"), lengths.astype(np.uint64)):
            found = attention(query, key, value, key_lengths=given)
            expected = attention(query, key, value, key_lengths=np.array([5, 6]))
            assert torch.equal(found, expected)


def test_the_output_may_be_changed_in_place():
    query, key, value, *_ = tensors().values()
    wanted = torch.autograd.grad((2 * (attention(query, key, value) + 1)).sum(), query)
    output = attention(query, key, value)
    output += 1
    found = torch.autograd.grad(output.mul_(2).sum(), query)
    assert torch.equal(found[0], wanted[0])
    assert found[0].abs().max() > 0.01


class DerivedTensor(torch.Tensor):
    pass


@pytest.mark.parametrize("kind", [torch.Tensor, DerivedTensor])
def test_autograd_keeps_nothing_of_the_size_of_the_scores(kind):
    """For tensors of a class that another package has derived, too."""
    length = 600
    inputs = [torch.randn(1, 1, length, 8).as_subclass(kind).requires_grad_() for _ in range(3)]
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
    )
    with hooks:
        output = attention(*inputs, block_size=(100, 100))
    assert 0 < sum(kept) < length**2
    output.sum().backward()
    assert all(array.grad is not None for array in inputs)


def test_a_bias_that_is_not_learned_costs_no_gradient():
    """It may be a view that is larger than its memory."""
    length = 1500
    bias = torch.linspace(-1, 0, length).expand(1, 1, length, length)
    inputs = [torch.randn(1, 1, length, 8, requires_grad=True) for _ in range(3)]
    tracemalloc.start()
    try:
        attention(*inputs, bias=bias).sum().backward()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * length**2
    wanted = torch.autograd.grad(
        attention(*inputs, bias=bias.clone().requires_grad_()).sum(), inputs
    )
    for array, gradient in zip(inputs, wanted, strict=True):
        torch.testing.assert_close(array.grad, gradient)


def test_tensors_that_are_not_dense_are_refused_by_name():
    dense = torch.ones(2, 3, 4)
    with pytest.raises(TypeError, match=r"key is a sparse tensor.*to_dense"):
        attention(dense, dense.to_sparse(), dense)


@pytest.mark.parametrize("thing", [torch.float32, torch.Size([2, 3]), torch.nn.Linear(2, 2)])
def test_other_things_of_torch_are_refused(thing):
    with pytest.raises(TypeError, match="query must be an array"):
        attention(thing, thing, thing)


def test_the_gradients_of_autograd_and_of_attention_vjp_are_the_same_bits():
    arguments = tensors()
    output, lse = call(**arguments)
    cotangents = torch.ones_like(output), torch.zeros_like(lse)
    torch.autograd.backward((output, lse), cotangents)
    given = {name: array.detach() for name, array in arguments.items()}
    inputs = [given.pop(name) for name in ("query", "key", "value")]
    _, pullback = attention_vjp(*inputs, **given, **OPTIONS)
    for name, gradient in pullback(*cotangents)._asdict().items():
        assert torch.equal(gradient, arguments[name].grad)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_transforms_feel_what_is_attended(poison, transform):
    """The value's own gradient does not depend on it; that of the queries is not finite."""
    query, key, value = (tensors(requires_grad=False)[name] for name in ("query", "key", "value"))
    value[0, 0, 2, 1] = poison

    def total(query, value):
        return attention(query, key, value).sum()

    if transform == "jvp":
        _, along = torch.func.jvp(
            lambda value: attention(query, key, value), (value,), (torch.ones_like(value),)
        )
        torch.testing.assert_close(along, torch.ones_like(along))
        return
    by_query, by_value = torch.func.grad(total, argnums=(0, 1))(query, value)
    if transform == "vmap":
        mapped = torch.func.vmap(torch.func.grad(total, argnums=(0, 1)))
        more_query, more_value = mapped(torch.stack([query] * 2), torch.stack([value] * 2))
        torch.testing.assert_close(more_query[1], by_query, equal_nan=True)
        torch.testing.assert_close(more_value[1], by_value)
    torch.testing.assert_close(by_value.sum(-2), torch.full((2, 2, 2), 10.0, dtype=query.dtype))
    assert by_query[0, :2].isfinite().logical_not().all()
    assert by_query[0, 2:].isfinite().all()
    assert by_query[1].isfinite().all()
