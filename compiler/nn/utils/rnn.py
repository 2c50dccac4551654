"""Sequences of different lengths: padded to one length, or packed one step after the other.

    data         [total, ...]: of each step the rows of the sequences that are not over, the longest sequence first
    batch_sizes  int64[steps]: how many these are

Lengths are known on the host, so packing and padding are gathers of constant indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dnnc.array.core import Array
from dnnc.array.creation import asarray
from dnnc.array.elementwise import where
from dnnc.array.manipulation import concat, expand_dims, permute_dims, reshape, take
from dnnc.ir.errors import InputError
from dnnc.nn.functional.operands import array, filled

Lengths = np.ndarray[Any, np.dtype[np.int64]]


class PackedSequence(NamedTuple):
    """Packed sequences; `sorted_indices`: the sequences from the longest to the shortest, `unsorted_indices`: back."""

    data: Array
    batch_sizes: Array
    sorted_indices: Array | None = None
    unsorted_indices: Array | None = None


def pack_padded_sequence(
    input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True
) -> PackedSequence:
    """Pack sequences [steps, N, ...] of these lengths, with `batch_first` [N, steps, ...].

    Raises:
        InputError: a length is below 1 or above the number of steps, or lengths rise although `enforce_sorted` holds.
    """
    x = array("pack_padded_sequence", "input", input, "fiub")
    x = _swapped(x) if batch_first else x
    n = _lengths(lengths)
    if n.shape != (x.shape[1],) or not n.size or n.min() < 1 or n.max() > x.shape[0]:
        raise InputError(f"pack_padded_sequence: lengths {n.tolist()} do not fit to {x.shape[1]} x {x.shape[0]} steps")
    if enforce_sorted and np.any(n[1:] > n[:-1]):
        raise InputError("pack_padded_sequence: lengths rise; sort the sequences, or give enforce_sorted=False")
    order = np.argsort(-n, kind="stable")
    return packed(x, n, order, None if enforce_sorted else order)


def packed(x: Array, lengths: Lengths, order: Lengths, shown: Lengths | None) -> PackedSequence:
    """Pack [steps, N, ...] in an order of the sequences; `shown`: the order that the result knows."""
    steps, batch = x.shape[:2]
    alive = np.arange(lengths.max())[:, None] < lengths[order][None, :]
    rows = (np.arange(lengths.max())[:, None] * batch + order[None, :])[alive]
    data = take(reshape(x, (steps * batch, *x.shape[2:])), asarray(rows), axis=0)
    back = None if shown is None else asarray(np.argsort(shown))
    return PackedSequence(data, asarray(alive.sum(1)), None if shown is None else asarray(shown), back)


def lengths_of(p: PackedSequence) -> tuple[Lengths, Lengths]:
    """The lengths of the sequences in the user's order, and the order in which they are packed."""
    sizes = _lengths(p.batch_sizes)
    falling = (sizes[None, :] > np.arange(sizes[0])[:, None]).sum(1)
    order = np.arange(sizes[0]) if p.sorted_indices is None else _lengths(p.sorted_indices)
    lengths = np.empty_like(falling)
    lengths[order] = falling
    return lengths, order


def pad_packed_sequence(
    sequence: PackedSequence, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[Array, Array]:
    """The sequences as [steps, N, ...], with `batch_first` [N, steps, ...], and their lengths.

    InputError: `total_length` is below a length.
    """
    lengths, order = lengths_of(sequence)
    steps = int(lengths.max()) if total_length is None else total_length
    if steps < lengths.max():
        raise InputError(f"pad_packed_sequence: total_length={total_length} is below the length {lengths.max()}")
    sizes = _lengths(sequence.batch_sizes)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    alive = np.arange(steps)[:, None] < lengths[None, :]
    rows = np.where(alive, np.resize(first, steps)[:, None] + place[None, :], 0)
    data = sequence.data
    x = reshape(take(data, asarray(rows.reshape(-1)), axis=0), (*rows.shape, *data.shape[1:]))
    there = asarray(alive.reshape(*alive.shape, *(1,) * (data.ndim - 1)))
    x = where(there, x, filled((), padding_value, data.dtype))
    return _swapped(x) if batch_first else x, asarray(lengths)


def pad_sequence(sequences: Sequence[Any], batch_first: bool = False, padding_value: float = 0.0) -> Array:
    """Sequences [length, ...] as one array [steps, N, ...], with `batch_first` [N, steps, ...]."""
    given = [array("pad_sequence", "sequences", x, "fiub") for x in sequences]
    steps = max(x.shape[0] for x in given)
    rows = []
    for x in given:
        rest = filled((steps - x.shape[0], *x.shape[1:]), padding_value, x.dtype)
        rows.append(expand_dims(concat([x, rest], axis=0) if steps > x.shape[0] else x, axis=0))
    made = concat(rows, axis=0)
    return made if batch_first else _swapped(made)


def pack_sequence(sequences: Sequence[Any], enforce_sorted: bool = True) -> PackedSequence:
    """Pack sequences [length, ...]."""
    return pack_padded_sequence(pad_sequence(sequences), [len(x) for x in sequences], False, enforce_sorted)


def _lengths(x: Any) -> Lengths:
    return np.asarray(x.numpy() if isinstance(x, Array) else x, np.int64)


def _swapped(x: Array) -> Array:
    return permute_dims(x, (1, 0, *range(2, x.ndim)))
