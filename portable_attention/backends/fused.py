"""What the fused kernels of all libraries are asked: whether a call is one of those they are for.

They are for calls that are bare, or causal with a diagonal from corner to corner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portable_attention.core.problem import Call, Problem

HALVES = ("float16", "bfloat16")
FINITE_SCORE = 1e37
UNPACKED = (
    "it wants numbers of a row side by side, and rows that begin at multiples of 16 bytes: "
    "pass contiguous arrays"
)
# Earlier ones err where a length is not a multiple of 128: pytorch/pytorch#169849.
_CUDNN_FOR_ANY_LENGTH = 91501
_MOST_BLOCKS = 65535  # the last two axes of a grid of CUDA, which are batch and heads


def lacks(call: Call) -> str | None:
    """Return which options of a call no plain kernel has, or None."""
    problem, limits = call.problem, call.limits
    given = [name for name in ("mask", "bias", "sinks", "seed") if getattr(call, name) is not None]
    if problem.softcap is not None:
        given.append("softcap")
    if limits.low is not None or (limits.high is not None and not _is(limits.high, 1)):
        given.append("window or query_offset")
    if limits.key_length is not None or limits.query_length is not None:
        given.append("lengths")
    if problem.block_size is not None:
        given.append("block_size")
    if given:
        return f"it has not this meaning of {', '.join(given)}".replace("seed", "dropout")
    return None


def misfits(call: Call, dtypes: tuple[str, ...]) -> str | None:
    """Return why the inputs of a plain call are none for a kernel on a GPU, or None."""
    problem = call.problem
    if problem.dtype not in dtypes:
        return f"it takes {', '.join(dtypes)} alone"
    if 0 in (*problem.output_shape, problem.key_length, problem.width):
        return "an axis is empty"
    if is_causal(call) and problem.query_length != problem.key_length:
        return "it is trusted with a causal diagonal where Lq = Lk alone"
    if problem.scale <= 0:
        # It looks for the largest score before it multiplies, and masks with -inf before that.
        return "it wants a scale above 0"
    if problem.width != problem.value_width:
        return "it wants values as wide as keys"
    if problem.width % 8:
        return "it wants a width that is a multiple of 8"
    if max(items(problem), problem.kv_heads * problem.groups) > _MOST_BLOCKS:
        return f"its grid has room for {_MOST_BLOCKS} items and heads"
    lead = tuple(call.query.shape[:-3])
    if tuple(call.key.shape[:-3]) != lead or tuple(call.value.shape[:-3]) != lead:
        return "it copies what is broadcast"
    return None


def rounds(problem: Problem) -> str | None:
    """Return what all kernels for half precision do against the rules, or None."""
    if problem.dtype in HALVES:
        return f"it rounds the weights to {problem.dtype} before their product with the values"
    return None


def aged(cudnn_version: int, problem: Problem) -> str | None:
    """Return why a version of cuDNN is not trusted with these lengths, or None."""
    ragged = problem.query_length % 128 or problem.key_length % 128
    if ragged and cudnn_version < _CUDNN_FOR_ANY_LENGTH:
        return f"cuDNN {cudnn_version} errs where lengths are not multiples of 128: it takes 9.15.1"
    return None


def is_causal(call: Call) -> bool:
    """Whether a call that lacks nothing is causal."""
    return call.limits.high is not None


def scores_are_finite(problem: Problem, query: Any, key: Any) -> Any:
    """Whether scores of inputs of these magnitudes are sure to be finite, scaled or not.

    The magnitudes are numbers, or arrays that stand for them under a trace.
    """
    return query * key * problem.width * max(problem.scale, 1.0) < FINITE_SCORE


def is_packed(address: int, strides: tuple[int, ...], shape: tuple[int, ...], item: int) -> bool:
    """Whether a kernel that loads 16 bytes at a time can read an array; strides are in items."""
    rows_apart = all(
        step > 0 and step * item % 16 == 0
        for step, size in zip(strides[:-1], shape[:-1], strict=True)
        if size > 1
    )
    return rows_apart and address % 16 == 0 and (strides[-1] == 1 or shape[-1] == 1)


def items(problem: Problem) -> int:
    """Return the number of items of a batch."""
    count = 1
    for size in problem.batch:
        count *= size
    return count


def _is(limit: Any, number: int) -> bool:
    return isinstance(limit, int) and limit == number
