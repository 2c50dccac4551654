"""Products of sparse matrices with arrays, and what is made of them: sums, dense arrays, elements at the stored places.

Values are arrays of `dnnc.array`: lazy, traced, differentiable. Structures are data of the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.array.core import Array, array_of, cast, from_buffer
from dnnc.array.creation import ones, zeros
from dnnc.array.devices import HOST
from dnnc.array.elementwise import one
from dnnc.array.errors import TypeInputError, ValueInputError
from dnnc.array.lazy import PROGRAMS_MADE, Lazy, apply, leaf, materialise
from dnnc.array.manipulation import matrix_transpose, reshape, result_type
from dnnc.array.sparse.structure import Host, Structure, operand
from dnnc.array.structure import Reached

OPERANDS, PLACES = ("starts", "columns"), ("rows", "columns")
ALL = ("rows", "t_starts", "t_rows", "order")  # what derivatives read besides


def numbers(name: str, *arrays: Array) -> list[Array]:
    """Arrays of one dtype of real numbers."""
    dtype = arrays[0].dtype if len({x.dtype for x in arrays}) == 1 else result_type(*arrays)
    if np.dtype(dtype).kind not in "iuf" and str(dtype) != "bfloat16":
        raise TypeInputError(f"{name}: expected real numbers, got {dtype}; cast them by astype")
    return [cast(x, dtype) for x in arrays]


def _apply(op: str, s: Structure, names: tuple[str, ...], *factors: Array) -> Array:
    """An op on a structure; where derivatives may be asked for, it gets what they read.

    Otherwise it runs at once, by itself: so one program serves all structures.
    """
    parts = [one(x) for x in factors]
    traced = any(map(followed, factors))
    more = tuple(n for n in ("starts", "rows") if n not in names) + ALL[1:] if traced else ()
    devices = {where(x) for x in factors}
    device = None if None in devices else where(factors[0])
    operands = [s.value(n, device) for n in (*names, *more)]
    if traced:
        return array_of(apply(op, *parts, *operands, trusted=True))
    materialise(parts)
    made = apply(op, *parts, *operands, trusted=True)
    materialise([made])
    return array_of(made)


def _at_once(op: str, s: Structure, names: tuple[str, ...], *factors: Host) -> Host | None:
    """The same of arrays of the host, without a lazy value: once its program is known, a call of this takes a few us.

    Returns None where no one program serves all structures.
    """
    key = op, *((a.dtype, a.shape[1:]) for a in factors)
    arrays = [*factors, *map(s.array, names)]
    if key not in s.programs:
        operands = [leaf(a) for a in arrays]
        made = [apply(op, *operands, trusted=True)]
        reached = Reached(made)
        s.programs[key] = PROGRAMS_MADE.opened(reached, made) if list(reached.leaves) == operands else None
    program = s.programs[key]
    return None if program is None else program(arrays)[0]


def where(x: Array) -> str | None:
    """The device of an array; None where it is traced."""
    return x._parts[0].device


def at_hand(x: Array) -> bool:
    """Is it an array of the host that nobody follows? Moving its elements about needs no program."""
    return x.device == HOST and not followed(x)


def followed(x: Array) -> bool:
    """May somebody ask for derivatives?"""
    return any(p.traced or bool(p.tracked) for p in x._parts)


def matmul(values: Array, s: Structure, x: Array) -> Array:
    """The product of a sparse matrix [M, K] with a matrix [K, N] or a vector [K]."""
    m, k = s.shape
    if x.ndim not in (1, 2) or x.shape[0] != k:
        raise ValueInputError(f"matmul: expected a vector [{k}] or a matrix [{k}, N] beside {s.shape}, got {x.shape}")
    values, x = numbers("matmul", values, x)
    shape = (m, *x.shape[1:])
    if 0 in (s.stored, *shape):
        return zeros(shape, dtype=x.dtype, device=x.device)
    if at_hand(values) and at_hand(x):
        made = _at_once("csr_matmul", s, OPERANDS, values.numpy(), x.numpy().reshape(k, -1))
        if made is not None:
            return from_buffer(made.reshape(shape), HOST)
    y = _apply("csr_matmul", s, OPERANDS, values, shaped(x, (k, 1)) if x.ndim == 1 else x)
    return shaped(y, shape) if x.ndim == 1 else y


def sampled(s: Structure, x: Array, y: Array) -> Array:
    """The elements of x @ y, of [M, D] and [D, K], at the stored places."""
    (m, k), fits = s.shape, x.ndim == y.ndim == 2 and x.shape[1] == y.shape[0]
    if not fits or (x.shape[0], y.shape[1]) != s.shape:
        raise ValueInputError(
            f"sddmm: expected [{m}, D] and [D, {k}] for a pattern {s.shape}, got {x.shape}, {y.shape}"
        )
    x, y = numbers("sddmm", x, y)
    if 0 in (s.stored, x.shape[1]):
        return zeros((s.stored,), dtype=x.dtype, device=x.device)
    if at_hand(x) and at_hand(y):
        made = _at_once("csr_sampled", s, PLACES, x.numpy(), np.ascontiguousarray(y.numpy().T))
        if made is not None:
            return from_buffer(made, HOST)
    return _apply("csr_sampled", s, PLACES, x, matrix_transpose(y))


def shaped(x: Array, shape: tuple[int, ...]) -> Array:
    """The elements in another shape."""
    return from_buffer(x.numpy().reshape(shape), HOST) if at_hand(x) else reshape(x, shape)


def taken(x: Array, s: Structure, name: str) -> Array:
    """The rows of an array that one of the structure's arrays of indices says."""
    return gathered(x, s.value(name, where(x)))


def gathered(x: Array, indices: Lazy | Host) -> Array:
    """The rows of an array that indices say, which are in range."""
    at: Any = indices.data if isinstance(indices, Lazy) else indices
    if at_hand(x) and at is not None:
        return from_buffer(np.take(x.numpy(), at, 0), HOST)
    indices = indices if isinstance(indices, Lazy) else operand(indices, where(x))
    if 0 in x.shape or 0 in indices.shape:
        return zeros((*indices.shape, *x.shape[1:]), dtype=x.dtype, device=x.device)
    return array_of(*(apply("gather", p, indices, axis=0) for p in x._parts))


def transposed(values: Array, s: Structure) -> Array:
    """The values of the transpose."""
    return taken(values, s, "order")


def dense(values: Array, s: Structure, onto: Array | None = None) -> Array:
    """The matrix as an array, or added to one."""
    kind, device = values.dtype, values.device
    base = zeros(s.shape, dtype=kind, device=device) if onto is None else onto
    if not s.stored:
        return base
    if at_hand(base) and at_hand(values):
        made = base.numpy().copy()
        made.reshape(-1)[s.places[:, 0]] += values.numpy()
        return from_buffer(made, HOST)
    flat = reshape(base, (s.shape[0] * s.shape[1],))
    how = "none" if onto is None else "add"
    put = [
        apply("scatter_nd", p, s.value("places", where(base)), q, reduction=how)
        for p, q in zip(flat._parts, values._parts)
    ]
    return reshape(array_of(*put), s.shape)


def sum_rows(values: Array, s: Structure) -> Array:
    """The sum of each row."""
    return matmul(values, s, ones((s.shape[1],), dtype=values.dtype, device=values.device))


def merged(values: Array, begins: Any, order: Any) -> Array:
    """Sums of runs of values, or of blocks, in an order: those of one place become one element. Runs begin there."""
    count = values.shape[0]
    s = Structure((len(begins) - 1, count), begins, order)
    flat = reshape(values, (count, values.size // max(count, 1)))
    made = matmul(ones((count,), dtype=values.dtype, device=values.device), s, flat)
    return reshape(made, (len(begins) - 1, *values.shape[1:]))
