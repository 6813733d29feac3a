"""Attention over a part of the keys, and the sum of such parts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from portable_attention.attention import attention
from portable_attention.backends import Array, Backend, common_backend
from portable_attention.backends.base import dtype_name
from portable_attention.core.arguments import FLOATS, described
from portable_attention.core.dropout import Dropout
from portable_attention.core.spec import LAYOUTS, check_choice, common_device
from portable_attention.core.tile import finite_shift


class State(NamedTuple):
    """The attention of some queries over some of the keys.

    Parameters
    ----------
    output : array, shape (..., Hq, Lq, Dv)
        The output over these keys alone; 0 for a row that may attend none of them.
    lse : array, shape (..., Hq, Lq)
        The natural log of the softmax denominator over these keys, -inf for such a row; float32,
        or float64 where the output is float64.

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention import State
    >>> State(output=np.zeros((2, 8, 4)), lse=np.full((2, 8), -np.inf)).lse.shape
    (2, 8)
    """

    output: Array
    lse: Array


def partial_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Array | None = None,
    bias: Array | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    query_offset: Any = None,
    query_lengths: Any = None,
    key_lengths: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: Dropout | None = None,
    layout: str = "bhld",
    engine: str = "auto",
    block_size: tuple[int, int] | None = None,
) -> State:
    """Attend a part of the keys, and return a state that `merge_states` can join with others.

    All parameters are those of `attention`. Positions count from the first key of this part: for
    keys ``k0:k1`` of a longer sequence pass ``query_offset=offset - k0``. Give `sinks` to one of
    the parts only, since a sink counts once a row. `dropout` numbers the keys of this part from 0,
    so that parts drop other pairs than the whole call would.

    Returns
    -------
    State
        The named pair (output, lse).

    Raises
    ------
    TypeError, ValueError
        As `attention` does.

    Examples
    --------
    Half of the keys at a time (split-K, as in flash-decoding):

    >>> import numpy as np
    >>> from portable_attention import attention, merge_states, partial_attention
    >>> rng = np.random.default_rng(0)
    >>> query, key, value = rng.standard_normal((3, 1, 2, 8, 4))
    >>> parts = [partial_attention(query, key[..., s, :], value[..., s, :])
    ...          for s in (slice(0, 5), slice(5, 8))]
    >>> np.allclose(merge_states(*parts).output, attention(query, key, value))
    True

    References
    ----------
    Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023.
    """
    found = attention(
        query,
        key,
        value,
        mask=mask,
        bias=bias,
        causal=causal,
        window=window,
        query_offset=query_offset,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout=dropout,
        return_lse=True,
        layout=layout,
        engine=engine,
        block_size=block_size,
    )
    return State(*found)


def merge_states(*states: State | Sequence[Array], layout: str = "bhld") -> State:
    """Join the attention over disjoint parts of the keys into that over all of them.

    Associative and commutative up to rounding, with the empty state (0, -inf) as identity, which
    leaves the other state exactly as it was. So a sequence may be split over loops, threads,
    devices or machines and joined in any order.

    Parameters
    ----------
    *states : State or pair (output, lse)
        At least one; outputs (..., Hq, Lq, Dv) of one shape and dtype, and lse (..., Hq, Lq) in
        float32 (float64 for float64 outputs).
    layout : {"bhld", "blhd"}
        The order of the axes of the outputs, as given to `partial_attention`. The lse has its heads
        first in both.

    Returns
    -------
    State
        Of the same shapes and dtypes.

    Raises
    ------
    TypeError
        For something that is not a pair of arrays, for arrays of different libraries, and for
        dtypes that differ or do not belong together.
    ValueError
        Without states, for shapes that differ or do not belong together, and for arrays on
        different devices.

    Examples
    --------
    >>> import numpy as np
    >>> from portable_attention import State, merge_states
    >>> one = State(np.array([[4.0]]), np.array([0.0]))
    >>> two = State(np.array([[8.0]]), np.array([np.log(3.0)]))
    >>> merge_states(one, two).output
    array([[7.]])

    References
    ----------
    Rabe and Staats, "Self-attention does not need O(n^2) memory", 2021; Liu, Zaharia and Abbeel,
    "Ring attention with blockwise transformers for near-infinite context", 2023.
    """
    backend, pairs = _check_states(states, layout)
    xp = backend.xp
    compute_dtype = pairs[0].lse.dtype
    with np.errstate(all="ignore"):
        lses = [pair.lse for pair in pairs]
        largest = reduce(xp.maximum, [backend.stop_gradient(lse) for lse in lses])
        shift = finite_shift(xp, largest)
        weights = [xp.exp(lse - shift) for lse in lses]
        total = reduce(lambda one, other: one + other, weights)
        occupied = largest != float("-inf")
        safe = xp.where(occupied, total, 1.0)
        # Weights are divided before they meet the outputs, whose sum could overflow.
        parts = [
            _weighted(backend, pair, weight / safe, compute_dtype, layout)
            for pair, weight in zip(pairs, weights, strict=True)
        ]
        output = reduce(lambda one, other: one + other, parts)
        lse = xp.where(occupied, shift + xp.log(safe), float("-inf"))
        return State(backend.astype(output, pairs[0].output.dtype), lse)


def _weighted(
    backend: Backend, pair: State, weight: Array, compute_dtype: Any, layout: str
) -> Array:
    xp = backend.xp
    present = _per_row(xp, pair.lse != float("-inf"), layout)
    # What stands in the output of an empty row is not felt, in the derivative either.
    output = xp.where(present, backend.astype(pair.output, compute_dtype), 0.0)
    # An infinite value was attended: it stays, even if its weight has become 0 in this dtype.
    weighted = xp.where(xp.isinf(output), 0.0, output) * _per_row(xp, weight, layout)
    return xp.where(xp.isinf(output), output, weighted)


def _per_row(xp: Any, rows: Array, layout: str) -> Array:
    """Bring an array over rows (..., H, L) to the axes of the output, (..., L, H, 1) for blhd."""
    if layout == "blhd":
        axes = tuple(range(rows.ndim - 2))
        rows = xp.permute_dims(rows, (*axes, rows.ndim - 1, rows.ndim - 2))
    return xp.expand_dims(rows, axis=-1)


def _check_states(states: tuple[Any, ...], layout: str) -> tuple[Backend, list[State]]:
    check_choice("layout", layout, LAYOUTS)
    if not states:
        raise ValueError("merge_states needs at least one state")
    arrays: dict[str, Array] = {}
    for number, state in enumerate(states):
        if isinstance(state, tuple | list) and any(isinstance(one, State) for one in state):
            raise TypeError(
                f"state {number} is a sequence of states: pass each, merge_states(*states)"
            )
        if not isinstance(state, tuple | list) or len(state) != 2:
            raise TypeError(f"state {number} must be a pair (output, lse), got {described(state)}")
        arrays[f"the output of state {number}"], arrays[f"the lse of state {number}"] = state
    backend = common_backend(arrays)
    arrays = {name: backend.as_operand(name, array) for name, array in arrays.items()}
    common_device(backend, arrays)
    values = list(arrays.values())
    pairs = [State(*pair) for pair in zip(values[::2], values[1::2], strict=True)]
    first = pairs[0]
    for number, pair in enumerate(pairs):
        _check_pair(number, pair, first, layout)
    return backend, pairs


def _check_pair(number: int, pair: State, first: State, layout: str) -> None:
    output_dtype, lse_dtype = dtype_name(pair.output), dtype_name(pair.lse)
    if output_dtype not in FLOATS:
        raise TypeError(
            f"the output of state {number} must have a real floating dtype "
            f"({', '.join(FLOATS)}), got {output_dtype}"
        )
    expected = "float64" if output_dtype == "float64" else "float32"
    if lse_dtype != expected:
        raise TypeError(
            f"the lse of state {number} must be {expected}, since its output is {output_dtype}, "
            f"got {lse_dtype}"
        )
    if output_dtype != dtype_name(first.output):
        raise TypeError(
            f"the outputs of all states must share one dtype, got {dtype_name(first.output)} in "
            f"state 0 and {output_dtype} in state {number}"
        )
    output, lse = tuple(pair.output.shape), tuple(pair.lse.shape)
    rows = output[:-1]
    if layout == "blhd":
        rows = (*rows[:-2], *reversed(rows[-2:]))
    if not output or rows != lse or (layout == "blhd" and len(output) < 3):
        raise ValueError(
            f"the lse of state {number} must have one number a row of its output "
            f"(layout={layout!r}), got output {output} and lse {lse}"
        )
    if output != tuple(first.output.shape):
        raise ValueError(
            f"all states must have one shape, got outputs {tuple(first.output.shape)} in state 0 "
            f"and {output} in state {number}"
        )
