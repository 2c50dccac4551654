"""Programs of array expressions as records that a cache keeps under the structure of the expression.

Machine code is not part of a record: kernels are found by their symbols, in the process or in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dnnc.backends.runtime.device import Launch
from dnnc.backends.runtime.frames import aligned_empty
from dnnc.backends.runtime.program import Call, CompiledKernel, Program
from dnnc.ir.arena import Arena
from dnnc.ir.dtype import from_numpy, u8
from dnnc.ir.expr import dim
from dnnc.ir.types import TensorType


@dataclass(frozen=True)
class SavedExpression:
    """A program of fixed sizes, or of one size that all its arrays have (`flat`)."""

    flat: bool
    inputs: int  # how many there are
    outputs: tuple[tuple[tuple[int, ...], str], ...]  # shape (empty in a flat program) and NumPy's name of the dtype
    arena: int  # bytes
    constants: bytes  # one block
    kernels: tuple[CompiledKernel, ...]
    calls: tuple[Call, ...]
    launches: dict[str, Launch]
    params: dict[str, tuple[str, ...]]


def record_of(p: Program) -> SavedExpression:
    """The record of a program without loops and branches."""
    flat = bool(p.dims)
    shapes = [() if flat else tuple(int(str(d)) for d in t.shape) for t in p.outputs]
    return SavedExpression(
        flat,
        len(p.inputs),
        tuple((shape, t.dtype.numpy.name) for shape, t in zip(shapes, p.outputs)),
        0 if flat else p.sizes({})[1],
        p.constants.tobytes() if p.constant_bytes > 1 else b"",
        p.kernels,
        p.calls,
        dict(p.launches),
        dict(p.params),
    )


def program_of(r: SavedExpression) -> Program:
    """The program of a record, without machine code."""
    outputs = tuple(TensorType(from_numpy(np.dtype(d)), shape) for shape, d in r.outputs)
    arena = Arena((r.arena,), ((0, len(r.calls)),), ((),)) if r.arena else Arena((), (), ())
    return Program(
        r.kernels,
        {},
        r.calls,
        {},
        (dim("n"),) if r.flat else (),
        (TensorType(u8, ()),) * r.inputs,
        outputs,
        arena,
        max(len(r.constants), 1),
        lambda: block_of(r.constants),
        lambda locs: "",
        launches=r.launches,
        params=r.params,
    )


def block_of(constants: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Constants in aligned memory."""
    block = aligned_empty(max(len(constants), 1))
    block[: len(constants)] = np.frombuffer(constants, np.uint8)
    return block
