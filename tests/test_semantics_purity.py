"""Purity: inputs are left alone, and what comes out depends on the inputs alone, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from portable_attention import attention_vjp

from .accuracy import assert_accurate, reference_of
from .backends import BACKENDS, Backend
from .dtypes import numpy_dtype
from .memory import VIEWS, lay_out
from .problems import make_inputs, restrictions
from .running import attend
from .strategies import RandomChooser, random_call


def views(backend: Backend, _config) -> list[str]:
    return [view for view in VIEWS if view] if backend.strides else ["reversed"]


BACKEND_AXES = {"view": views}


def test_how_an_array_lies_in_memory_changes_nothing(backend: Backend, dtype, tilings, view):
    """Negative, stepped and permuted strides, parts of longer arrays, read-only memory."""
    inputs = make_inputs(dtype=dtype)
    options = restrictions()["together"]
    options["bias"] = options["bias"].astype(inputs["query"].dtype)
    reference = reference_of(**inputs, **options)
    inputs = {name: lay_out(array, view) for name, array in inputs.items()}
    options |= {name: lay_out(options[name], view) for name in ("mask", "bias")}
    for block_size in tilings:
        output, lse = attend(backend, **inputs, **options, block_size=block_size)
        assert_accurate(output, lse, reference)


def test_broadcast_arrays_are_taken_as_they_are(backend: Backend, dtype, tilings):
    """Stride 0, and read-only for it, along batch, heads, lengths and widths."""
    numbers = make_inputs(dtype=dtype)
    inputs = {
        "query": np.broadcast_to(numbers["query"][:1, :, :1], (2, 2, 5, 4)),
        "key": np.broadcast_to(numbers["key"][:, :1, :, :1], (2, 2, 7, 4)),
        "value": np.broadcast_to(numbers["value"][:1, :1], (2, 2, 7, 3)),
    }
    options = {"mask": np.broadcast_to(np.arange(7) > 2, (2, 2, 5, 7))}
    reference = reference_of(**inputs, **options)
    for block_size in tilings:
        output, lse = attend(backend, **inputs, **options, block_size=block_size)
        assert_accurate(output, lse, reference)


def test_one_array_may_be_all_three(backend: Backend):
    array = make_inputs(queries=6)["query"]
    output, lse = attend(backend, array, array, array)
    assert_accurate(output, lse, reference_of(array, array, array))


def test_output_is_new_where_it_equals_an_input(backend: Backend):
    """One key with all the weight: the output is the value, in memory of its own."""
    inputs = make_inputs(keys=1)
    output, _ = attend(backend, **inputs)  # `attend` compares the memory
    np.testing.assert_array_equal(output, np.broadcast_to(inputs["value"], output.shape))


def test_the_same_call_gives_the_same_bits(backend: Backend):
    for number in backend.few(range(20), 1):
        call = random_call(RandomChooser(number), backend.dtypes)
        results = [
            attend(backend, **call.inputs, **call.options, block_size=call.block_size)
            for _ in range(2)
        ]
        assert_same_bits(*results)


@pytest.mark.needs(compiled=False)
@pytest.mark.parametrize("block_size", [(1, 1), (2, 5), (4, 3), (100, 1), (1, 100), (100, 100)])
def test_block_size_changes_rounding_alone(backend: Backend, block_size):
    for way, options in restrictions().items():
        inputs = make_inputs(heads=2, key_heads=1)
        output, lse = attend(backend, **inputs, **options, block_size=block_size)
        try:
            assert_accurate(output, lse, reference_of(**inputs, **options))
        except AssertionError as error:
            raise AssertionError(way) from error


def assert_same_bits(first, second):
    for one, other in zip(first, second, strict=True):
        assert one.tobytes() == other.tobytes()


def wide_call():
    """A call of several tiles, so that there is work for several threads."""
    inputs = make_inputs(batch=(2,), heads=4, key_heads=2, queries=300, keys=700, width=32)
    options = {"causal": True, "query_offset": "end", "key_lengths": np.array([700, 333])}
    return inputs, options


@pytest.mark.needs(library="numpy")
def test_numpy_gives_the_same_bits_for_any_number_of_threads(backend: Backend, dtype):
    """In this process under limits, of BLAS and of the package's own pool."""
    inputs, options = wide_call()
    inputs = {name: array.astype(numpy_dtype(dtype)) for name, array in inputs.items()}
    expected = attend(backend, **inputs, **options, block_size=(64, 128))
    for threads in (1, 2, 5):
        with threadpool_limits(threads):
            found = attend(backend, **inputs, **options, block_size=(64, 128))
        assert_same_bits(found, expected)


DIGEST = """
import hashlib
from tests.test_semantics_purity import wide_call
from tests.backends import BACKENDS
from tests.running import attend
inputs, options = wide_call()
for result in attend(BACKENDS["numpy"], **inputs, **options):
    print(hashlib.sha256(result.tobytes()).hexdigest())
"""


@pytest.mark.needs(library="numpy")
def test_numpy_gives_the_same_bits_whatever_the_environment_says(backend: Backend):
    """In processes that see one processor, or that hold BLAS to some number of threads."""
    del backend  # of the processes that are started
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    digests = set()
    for environment, processors in (
        ({}, cores),
        ({}, cores[:1]),
        ({"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}, cores),
        ({"OPENBLAS_NUM_THREADS": "4", "OMP_NUM_THREADS": "4"}, cores),
    ):
        narrow = f"import os; os.sched_setaffinity(0, {processors})\n" if len(cores) > 1 else ""
        done = subprocess.run(
            [sys.executable, "-c", narrow + DIGEST],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout)
    assert len(digests) == 1


@pytest.mark.needs(library="numpy")
@pytest.mark.parametrize("number", range(12))
def test_numpy_gives_each_item_the_bits_it_has_alone(backend: Backend, number):
    """Each batch item and head, whatever else is in the call, NaN included."""
    dtype = ("float16", "float32", "float64")[number % 3]
    rng = np.random.default_rng(number)
    queries, keys = (int(n) for n in rng.integers(1, 40, 2))
    inputs = make_inputs(
        batch=(3,), heads=4, key_heads=2, queries=queries, keys=keys, dtype=dtype, seed=number
    )
    inputs["key"][0] *= np.array(30, inputs["key"].dtype)  # scores of another size
    inputs["value"][1, 0] = np.nan
    inputs["query"][1, 3] = np.inf
    lengths = rng.integers(0, keys + 1, 3)
    options = {"causal": True, "query_offset": "end"}
    options["bias"] = rng.standard_normal((3, 1, queries, keys)).astype(dtype)
    blocks = [None, (7, 5), (64, 64)][number % 3]
    whole = attend(backend, **inputs, **options, key_lengths=lengths, block_size=blocks)
    for item in range(3):
        for group in range(2):
            part = {
                "query": inputs["query"][item, 2 * group : 2 * group + 2],
                "key": inputs["key"][item, group : group + 1],
                "value": inputs["value"][item, group : group + 1],
            }
            own = {**options, "bias": options["bias"][item], "key_lengths": lengths[item]}
            alone = attend(backend, **part, **own, block_size=blocks)
            assert_same_bits(alone, [result[item, 2 * group : 2 * group + 2] for result in whole])


def unaligned(array):
    """Return the same numbers where no number begins at a multiple of its size."""
    memory = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
    memory[...] = array
    return memory


@pytest.mark.needs(library="numpy")
@pytest.mark.parametrize("queries", [3, 16, 300])
@pytest.mark.parametrize("width", [4, 80, 200])
def test_numpy_gives_unaligned_arrays_the_same_bits(backend: Backend, dtype, queries, width):
    """As of a file that was mapped into memory; gradients, too."""
    inputs = make_inputs(queries=queries, keys=40, width=width, value_width=width, dtype=dtype)
    moved = {name: unaligned(array) for name, array in inputs.items()}
    options = {"key_lengths": 33}
    assert_same_bits(attend(backend, **inputs, **options), attend(backend, **moved, **options))
    output, pullback = attention_vjp(**inputs, **options)
    _, pullback_of_moved = attention_vjp(**moved, **options)
    assert_same_bits(pullback(output)[:3], pullback_of_moved(unaligned(output))[:3])


OFFSETS = {"query_offset": np.array([0, 37, -50])}
LENGTHS = {"query_offset": "end", "key_lengths": np.array([300, 190, 7])}


@pytest.mark.needs(library="numpy")
@pytest.mark.parametrize("window", [None, (100, 20), (16, 16), (50, None)])
@pytest.mark.parametrize("places", [OFFSETS, LENGTHS], ids=["offsets", "lengths"])
def test_numpy_gives_each_item_its_bits_wherever_others_stand(backend: Backend, window, places):
    """Items that reach other keys than their neighbours do, and so other tiles."""
    del backend  # the NumPy one
    inputs = make_inputs(batch=(3,), queries=300, keys=300, width=8)
    options = {"causal": window is None, "window": window, **places}
    assert_items_have_their_own_bits({**inputs, **options})


@pytest.mark.needs(library="numpy")
def test_numpy_gives_gradients_of_groups_their_bits(backend: Backend):
    """Enough items to share out: the sum over the heads of a group is the same whatever they do."""
    del backend  # the NumPy one
    sizes = {"heads": 4, "key_heads": 1, "queries": 650, "keys": 330, "width": 64}
    assert_items_have_their_own_bits(make_inputs(batch=(5,), **sizes))


def assert_items_have_their_own_bits(arguments):
    """Compare outputs and gradients with those of each batch item alone."""

    def call(arguments):
        output, pullback = attention_vjp(**arguments)
        return (output, *pullback(output)[:3])

    whole = call(arguments)
    for item in range(len(whole[0])):
        one = slice(item, item + 1)
        alone = {
            name: value[one] if isinstance(value, np.ndarray) else value
            for name, value in arguments.items()
        }
        assert_same_bits(call(alone), [result[one] for result in whole])


@pytest.mark.needs(library="numpy")
@pytest.mark.parametrize("seed", range(4))
def test_numpy_gives_each_row_its_bits_whatever_others_attend(backend: Backend, seed):
    """NaN in a key changes the rows that attend it, and not the way others are computed."""
    inputs = make_inputs(batch=(), heads=1, queries=650, keys=7, width=8, seed=seed)
    mask = np.random.default_rng(seed).random((650, 7)) < 0.6
    before = attend(backend, **inputs, mask=mask)
    inputs["key"][0, 2] = np.nan
    after = attend(backend, **inputs, mask=mask)
    unfelt = ~mask[:, 2]
    assert_same_bits(*([result[:, unfelt] for result in results] for results in (before, after)))


def test_every_backend_gives_the_results_of_numpy(backend: Backend):
    """Without the oracle between them: the same call, the same answer within its rounding."""
    for number in backend.few(range(1000, 1040), 2):
        call = random_call(RandomChooser(number), BACKENDS["strict-no-x64"].dtypes)
        reference = reference_of(**call.inputs, **call.expected)
        arguments = {**call.inputs, **call.options, "block_size": call.block_size}
        here, there = attend(backend, **arguments), attend(BACKENDS["numpy"], **arguments)
        for one, other, allowance in (
            (here.output, there.output, reference.output_allowance),
            (here.lse, there.lse, reference.lse_allowance),
        ):
            np.testing.assert_allclose(one, other, rtol=0, atol=2 * allowance)


@pytest.mark.needs(library="numpy")
@pytest.mark.parametrize("queries", [1, 5, 31, 32, 40])
@pytest.mark.parametrize("scale", [None, 3.0])
def test_numpy_gives_small_calls_the_bits_of_large_ones(backend: Backend, queries, scale, dtype):
    """Calls of a tile or less go another way, which must not show."""
    inputs = make_inputs(
        batch=(60,), heads=4, key_heads=2, queries=queries, keys=37, width=16, dtype=dtype
    )
    inputs["value"][0] = -0.0
    inputs["value"][1, 0, 3] = np.nan
    whole = attend(backend, **inputs, scale=scale)
    for item in range(3):
        part = {name: array[item] for name, array in inputs.items()}
        assert_same_bits(attend(backend, **part, scale=scale), [one[item] for one in whole])
