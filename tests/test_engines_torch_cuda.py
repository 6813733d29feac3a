"""PyTorch's kernels for CUDA: what they are offered, and what is made of what they give.

Stand-ins hand over what the real ones would, in the same shapes. tests/test_engines_gpu.py has the
real ones.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from portable_attention import attention, explain
from portable_attention.core.spec import validate

from .accuracy import assert_accurate, reference_of
from .dtypes import numpy_dtype
from .fused_kernels import OPTIONS, REFUSED, SIZES, formula
from .problems import make_inputs

torch = pytest.importorskip("torch", reason="needs torch")


@pytest.fixture
def on_cuda(monkeypatch):
    """Let tensors in host memory pass for ones on CUDA; return the names of what was run."""
    from portable_attention.backends import torch_backend, torch_cuda

    ran = []

    def stand_in(name, shaped):
        def run(query, key, value, *_options, scale):
            causal = {"flash": 1, "cudnn": 3, "efficient": 3}[name]
            ran.append(name)
            arrays = [to_numpy(array) for array in (query, key, value)]
            output, lse = formula(*arrays, causal=_options[causal], scale=scale)
            return from_numpy(output), torch.from_numpy(shaped(lse)), None, None

        return run

    def to_numpy(tensor):
        if tensor.dtype != torch.bfloat16:
            return tensor.numpy()
        return tensor.float().numpy().astype(numpy_dtype("bfloat16"))

    def from_numpy(array):
        if array.dtype.name != "bfloat16":
            return torch.from_numpy(array)
        return torch.from_numpy(array.astype(np.float32)).bfloat16()

    def padded(lse):
        rows = -lse.shape[-1] % 32
        return np.pad(lse, ((0, 0), (0, 0), (0, rows)), constant_values=np.inf)

    names = {
        "_scaled_dot_product_flash_attention": stand_in("flash", lambda lse: lse),
        "_scaled_dot_product_cudnn_attention": stand_in("cudnn", lambda lse: lse[..., None]),
        "_scaled_dot_product_efficient_attention": stand_in("efficient", padded),
    }
    monkeypatch.setattr(torch_cuda, "_aten", SimpleNamespace(**names))
    monkeypatch.setattr(torch_cuda, "is_on_cuda", lambda _call: True)
    monkeypatch.setattr(torch_cuda, "lets_run", lambda *_, **__: True)
    monkeypatch.setattr(torch_cuda, "cudnn_version", lambda: 92000)
    monkeypatch.setattr(torch_cuda, "wait", lambda _device: None)
    monkeypatch.setattr(
        torch_backend.TorchBackend, "kernels_on", lambda *_: torch_cuda.KERNELS, raising=True
    )
    torch_cuda._errs.cache_clear()
    yield SimpleNamespace(module=torch_cuda, ran=ran, monkeypatch=monkeypatch)
    torch_cuda._errs.cache_clear()


def tensors(**sizes):
    inputs = make_inputs(**{**SIZES, **sizes})
    if inputs["query"].dtype.name == "bfloat16":
        return inputs, {
            name: torch.from_numpy(array.astype(np.float32)).bfloat16()
            for name, array in inputs.items()
        }
    return inputs, {name: torch.from_numpy(array) for name, array in inputs.items()}


def as_numpy(tensor):
    return tensor.float().numpy() if str(tensor.dtype) == "torch.bfloat16" else tensor.numpy()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_float32_goes_to_the_kernel_that_takes_it(on_cuda, options, batch):
    inputs, own = tensors(batch=batch)
    output, lse = attention(**own, **OPTIONS[options], return_lse=True)
    assert on_cuda.ran == ["efficient"] * 3  # two trials, and the call
    assert_accurate(output.numpy(), lse.numpy(), reference_of(**inputs, **OPTIONS[options]))


def test_groups_are_rows_where_there_are_no_positions(on_cuda):
    inputs, own = tensors(key_heads=2)
    output, lse = attention(**own, return_lse=True, engine="native")
    assert on_cuda.ran == ["efficient"]
    assert_accurate(output.numpy(), lse.numpy(), reference_of(**inputs))
    with pytest.raises(ValueError, match="as many key heads"):
        attention(**own, causal=True, engine="native")


def test_heads_after_length(on_cuda):
    inputs, own = tensors()
    swapped = {name: array.transpose(1, 2).contiguous() for name, array in own.items()}
    output, lse = attention(**swapped, layout="blhd", return_lse=True, engine="native")
    assert on_cuda.ran == ["efficient"]
    assert_accurate(output.transpose(1, 2).numpy(), lse.numpy(), reference_of(**inputs))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_only_for_those_who_demand_a_kernel(on_cuda, dtype):
    inputs, own = tensors(dtype=dtype, key_heads=2)
    attention(**own)
    assert on_cuda.ran == []
    reasons = explain(**own).passed_over
    assert all(f"rounds the weights to {dtype}" in reasons[one.name] for one in kernels())
    output, lse = attention(**own, causal=True, return_lse=True, engine="native")
    assert on_cuda.ran == ["cudnn"]
    assert (output.dtype, str(lse.dtype)) == (own["query"].dtype, "torch.float32")
    reference = reference_of(**inputs, causal=True)
    assert_accurate(as_numpy(output).astype(numpy_dtype(dtype)), lse.numpy(), reference)
    found = explain(**own, engine="native")
    assert found.engine == "torch cuDNN attention (CUDA)"
    assert f"although it rounds the weights to {dtype}" in found.passed_over["portable"]
    assert "comes first" in found.passed_over["torch flash attention (CUDA)"]


def kernels():
    from portable_attention.backends import torch_cuda

    return torch_cuda.KERNELS


def test_an_old_cudnn_is_left_out_for_ragged_lengths(on_cuda):
    on_cuda.monkeypatch.setattr(on_cuda.module, "cudnn_version", lambda: 91002)
    _, own = tensors(dtype="float16")
    attention(**own, engine="native")
    assert on_cuda.ran == ["flash"]
    assert "9.15.1" in explain(**own, engine="native").passed_over["torch cuDNN attention (CUDA)"]
    _, own = tensors(dtype="float16", queries=128, keys=128)
    attention(**own, engine="native")
    assert on_cuda.ran == ["flash", "cudnn"]


@pytest.mark.parametrize("name", REFUSED)
def test_names_what_the_kernels_cannot_do(on_cuda, name):
    sizes, options = REFUSED[name]
    _, own = tensors(**sizes)
    options = {
        key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for key, value in options.items()
    }
    found = attention(**own, **options)
    assert found.shape == (*own["query"].shape[:-1], own["value"].shape[-1])
    assert on_cuda.ran == []
    with pytest.raises(ValueError, match=name):
        attention(**own, **options, engine="native")


@pytest.mark.parametrize("change", ["columns apart", "not at 16 bytes", "broadcast", "library"])
def test_tensors_that_a_kernel_would_misread_are_refused(on_cuda, change):
    inputs, own = tensors(width=16)
    reason = "side by side"
    if change == "columns apart":
        own = {name: array.mT.contiguous().mT for name, array in own.items()}
    elif change == "not at 16 bytes":
        room = torch.empty(own["key"].numel() + 1)
        own["key"] = room[1:].reshape(own["key"].shape).copy_(own["key"])
    elif change == "broadcast":
        own["key"], reason = own["key"][:1], "broadcast"
        inputs["key"] = inputs["key"][:1]
    else:
        on_cuda.monkeypatch.setattr(on_cuda.module, "lets_run", lambda *_, **__: False)
        reason = "can_use_efficient_attention says no"
    output, lse = attention(**own, return_lse=True)
    assert on_cuda.ran == []
    assert_accurate(output.numpy(), lse.numpy(), reference_of(**inputs))
    with pytest.raises(ValueError, match=reason):
        attention(**own, engine="native")


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 3e38])
def test_garbage_is_left_to_the_portable_tiles(on_cuda, name, poison):
    inputs, own = tensors()
    own[name][..., -1, 1] = poison
    inputs[name][..., -1, 1] = poison
    output, lse = attention(**own, causal=True, return_lse=True)
    assert_accurate(output.numpy(), lse.numpy(), reference_of(**inputs, causal=True))
    if not np.isfinite(poison):
        with pytest.raises(ValueError, match="not finite"):
            attention(**own, causal=True, engine="native")


def test_one_wait_a_call(on_cuda):
    """What the host reads of a device makes it wait."""
    read = []
    _, own = tensors()
    attention(**own)
    for name in ("tolist", "item", "__bool__", "__float__", "cpu"):
        method = getattr(torch.Tensor, name)

        def counted(self, *rest, method=method, name=name):
            read.append(name)
            return method(self, *rest)

        on_cuda.monkeypatch.setattr(torch.Tensor, name, counted)
    attention(**own)
    assert read == ["tolist"]


def test_an_inexact_kernel_is_found_out(on_cuda):
    """TF32 has 10 bits: products of it alone are not what float32 promises."""
    efficient = on_cuda.module._aten._scaled_dot_product_efficient_attention

    def coarse(query, key, value, *rest, scale):
        short = [array.bfloat16().float() for array in (query, key, value)]
        return efficient(*short, *rest, scale=scale)

    on_cuda.module._aten._scaled_dot_product_efficient_attention = coarse
    inputs, own = tensors()
    output, lse = attention(**own, return_lse=True)
    assert_accurate(output.numpy(), lse.numpy(), reference_of(**inputs))
    reason = explain(**own).passed_over["torch memory-efficient attention (CUDA)"]
    assert "times what is allowed" in reason


def test_the_faster_one_is_taken(on_cuda):
    query = torch.zeros(1, 2, 2048, 8)
    for ratio, engine in ((0.5, "portable"), (2.0, "torch memory-efficient attention (CUDA)")):
        on_cuda.monkeypatch.setattr(on_cuda.module, "_portable_to_native", lambda _: ratio)  # noqa: B023
        assert explain(query, query, query).engine == engine


def test_a_kernel_that_fails_is_not_the_end(on_cuda):
    def failing(*_, **__):
        raise RuntimeError("no kernel image is available\nfor this device")

    inputs, own = tensors()
    attention(**own)  # it is tried, and found right
    on_cuda.module._aten._scaled_dot_product_efficient_attention = failing
    output, lse = attention(**own, return_lse=True)
    assert_accurate(output.numpy(), lse.numpy(), reference_of(**inputs))
    with pytest.raises(ValueError, match="no kernel image is available") as caught:
        attention(**own, engine="native")
    assert "for this device" not in str(caught.value)


def test_gradients_by_way_of_a_kernel(on_cuda):
    _, own = tensors(dtype="float16")
    found = []
    for engine in ("native", "portable"):
        leaves = [array.clone().requires_grad_() for array in own.values()]
        attention(*leaves, causal=True, engine=engine).float().square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    assert on_cuda.ran == ["cudnn"]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_tensors_in_host_memory_never_meet_them():
    query = torch.zeros(1, 2, 16, 8)
    found = explain(query, query, query)
    for kernel in kernels():
        assert found.passed_over[kernel.name] == "it runs on CUDA devices alone"
        assert kernel.refuses(validate(query, query, query)) == "it runs on CUDA devices alone"


def test_devices_of_amd_are_others(monkeypatch):
    from portable_attention.backends import torch_cuda

    query = torch.zeros(1, 2, 16, 8)
    call = replace(validate(query, query, query), device=torch.device("cuda", 0))
    assert torch_cuda.is_on_cuda(call)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not torch_cuda.is_on_cuda(call)


def test_has_the_functions_that_are_called():
    from portable_attention.backends import torch_cuda

    query = torch.zeros(1, 2, 16, 8)
    for kernel in torch_cuda.KERNELS:
        assert callable(getattr(torch.backends.cuda, kernel.condition))
    params = torch.backends.cuda.SDPAParams(query, query, query, None, 0.0, True, False)
    assert torch.backends.cuda.can_use_efficient_attention(params) in (True, False)
    # The positions of what is passed, and of what is taken.
    expected = {
        "_scaled_dot_product_flash_attention": ["dropout_p", "is_causal", "return_debug_mask"],
        "_scaled_dot_product_cudnn_attention": [
            *("attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask"),
        ],
        "_scaled_dot_product_efficient_attention": [
            *("attn_bias", "compute_log_sumexp", "dropout_p", "is_causal"),
        ],
    }
    for name, rest in expected.items():
        schema = getattr(torch.ops.aten, name).default._schema
        names = [argument.name for argument in schema.arguments]
        assert names == ["query", "key", "value", *rest, "scale"]
        assert schema.returns[0].name == "output"
        assert schema.returns[1].name in ("logsumexp", "log_sumexp")
