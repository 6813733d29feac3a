"""Products in blocks of rows, keys in columns, and what is folded into products, on any BLAS."""

import numpy as np
import pytest

from portable_attention import attention, attention_vjp
from portable_attention.backends import numpy_backend, numpy_products
from portable_attention.core import plan
from portable_attention.core.spec import validate


@pytest.fixture(params=[True, False], ids=["small kernels", "large kernels"])
def small_kernels(request, monkeypatch):
    """Whether the BLAS is said to have kernels for small products; either way it must be right."""
    for module in (numpy_products, numpy_backend):
        monkeypatch.setattr(module, "has_small_kernels", lambda: request.param)
    return request.param


def random(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("width", [16, 17, 64, 130, 640])
@pytest.mark.parametrize("rows", [1, 31, 97, 320, 608])
@pytest.mark.parametrize("left_in_columns", [False, True])
def test_blocks_make_up_the_product(small_kernels, rows, width, left_in_columns):
    left, right = random(rows, width), random(width, 272)
    if left_in_columns:
        left = np.ascontiguousarray(left.T).T
    out = np.full((rows, 272), np.nan, np.float32)
    found = numpy_products.matmul(left, right, out)
    assert found is out
    expected = left.astype(float) @ right.astype(float)
    bound = np.abs(left).astype(float) @ np.abs(right).astype(float) * width * 2.0**-23
    assert np.all(np.abs(found - expected) <= bound)


def test_lead_axes_broadcast(small_kernels):
    left, right = random(2, 3, 1, 160, 64), random(2, 1, 5, 64, 240)
    out = np.empty((2, 3, 5, 160, 240), np.float32)
    np.testing.assert_allclose(numpy_products.matmul(left, right, out), left @ right, atol=1e-4)


def test_a_head_has_the_same_bits_alone(small_kernels):
    left, right = random(4, 500, 64), random(4, 64, 300)
    together = numpy_products.matmul(left, right, np.empty((4, 500, 300), np.float32))
    alone = numpy_products.matmul(left[2], right[2], np.empty((500, 300), np.float32))
    assert np.array_equal(together[2], alone)


@pytest.mark.parametrize(
    ("width", "backward"),
    [(32, False), (64, False), (128, False), (256, False), (32, True), (64, True), (128, True)],
)
def test_tiles_are_products_that_the_small_kernels_take(monkeypatch, width, backward):
    """A block may hold as many multiplications as OpenBLAS lets its small kernels have."""
    array = np.broadcast_to(np.float32(0), (1, 2048, width))
    rows, keys = plan.host_block_sizes(validate(array, array, array).problem, backward=backward)
    monkeypatch.setattr(numpy_products, "has_small_kernels", lambda: True)
    seen = []
    monkeypatch.setattr(np, "matmul", lambda left, right, out: seen.append((left, right)))
    made = np.zeros((rows, keys), np.float32)
    by_rows, by_keys = np.zeros((rows, width), np.float32), np.zeros((keys, width), np.float32)
    numpy_products.matmul(by_rows, np.ascontiguousarray(by_keys.T), made)
    numpy_products.matmul(made, by_keys, by_rows)
    if backward:
        numpy_products.matmul(made.T, by_rows, by_keys)
    assert seen
    for left, right in seen:
        assert left.shape[-2] * left.shape[-1] * right.shape[-1] <= 1_000_000


@pytest.mark.parametrize("width", [256, 512, 1024])
def test_tiles_of_wide_heads_are_not_cut_small(width):
    """Python between the products would cost more than small products save."""
    array = np.broadcast_to(np.float32(0), (1, 2048, width))
    problem = validate(array, array, array).problem
    for backward in (False, True):
        rows, keys = plan.host_block_sizes(problem, backward=backward)
        assert rows * keys >= 2**16
        assert rows * keys * width >= 2**24


OPTIONS = {
    "bare": {},
    "causal": {"causal": True},
    "mask": {"mask": random(700, 700) > 0.3},
    "lengths": {"key_lengths": np.array([650, 0]), "query_lengths": np.array([700, 300])},
    "window": {"window": (90, 40)},
    "softcap": {"softcap": 3.0},
    "bias": {"bias": random(700, 700)},
    "large scores": {"scale": 40.0},
    "large scale": {"scale": 3000.0},
    "sinks": {"sinks": random(2)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_are_those_of_float64(small_kernels, name):
    arrays = [random(2, 2, 700, 24) for _ in range(3)]
    arrays[1] = arrays[1] / 24 if name == "large scale" else arrays[1]
    options = OPTIONS[name]
    output, pullback = attention_vjp(*arrays, **options)
    found = pullback(random(2, 2, 700, 24), random(2, 2, 700))
    wide = [array.astype(float) for array in arrays]
    expected_output, exact_pullback = attention_vjp(*wide, **options)
    expected = exact_pullback(random(2, 2, 700, 24).astype(float), random(2, 2, 700).astype(float))
    largest = 1e-3 if name.startswith("large") else 2e-5
    np.testing.assert_allclose(output, expected_output, atol=largest)
    for given, exact in zip(found, expected, strict=True):
        if exact is not None:
            scale = np.max(np.abs(exact)) or 1.0
            np.testing.assert_allclose(given / scale, exact / scale, atol=largest)


@pytest.mark.parametrize("name", ["bare", "mask", "causal"])
def test_masked_garbage_changes_no_bit_of_the_other_rows(small_kernels, name):
    query, key, value = (random(1, 1, 700, 24) for _ in range(3))
    mask = np.ones((700, 700), bool)
    mask[:600, 650:] = False
    options = {**OPTIONS[name], "mask": mask & OPTIONS[name].get("mask", True)}
    d_output = random(1, 1, 700, 24)
    d_output[..., 600:, :] = 0.0

    def gradient():
        _, pullback = attention_vjp(query, key, value, **options)
        return pullback(d_output).query[..., :600, :]

    plain = gradient()
    key[..., 650:, :], value[..., 650:, :] = np.nan, np.inf
    assert np.array_equal(gradient(), plain)
    assert np.array_equal(attention(query, key, value, **options)[..., :600, :].shape, plain.shape)
