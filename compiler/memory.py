"""Checks that a program fits into memory before allocating, so that a mistyped size gives an error."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dnnc.ir.errors import InputError, ShapeError, locations

if TYPE_CHECKING:
    from dnnc.backends.runtime.program import Program
    from dnnc.ir.graph import Graph
    from dnnc.ir.types import TensorType
    from dnnc.passes.planning.program import ScheduledGraph

SHOWN = 3  # of the largest, in a message
UNKNOWN = 1 << 46  # bytes, where the system does not tell: no machine has more


def check_fits(parts: Iterable[tuple[str, tuple[int, ...], np.dtype[np.generic]]], more: int = 0) -> None:
    """Raise InputError where arrays and `more` bytes of intermediates are larger than the memory there is."""
    sizes = {name: (math.prod(shape) * dtype.itemsize, shape) for name, shape, dtype in parts}
    total = more + sum(n for n, _ in sizes.values())
    if total <= 1 << 28 or total <= memory():  # the system is asked only where it matters
        return
    largest = sorted(sizes.items(), key=lambda item: -item[1][0])[:SHOWN]
    shown = [f"{name} {list(shape)} with {gigabytes(n)}" for name, (n, shape) in largest] + [
        f"intermediate values with {gigabytes(more)}"
    ] * bool(more)
    raise InputError(
        f"a call of this model needs {gigabytes(total)} of memory, this machine has {gigabytes(memory())}: "
        f"{', '.join(shown)}; give smaller sizes"
    )


def check_possible(graph: Graph) -> None:
    """Raise ShapeError for a value larger than any array can be, with or without elements (f32[0, 2**62])."""
    for v in (*graph.inputs, *(o for n in graph.nodes() for o in n.outputs)):
        sizes = [d for d in v.type.shape if isinstance(d, int)]
        if math.prod(max(d, 1) for d in sizes) * v.type.dtype.bytes > sys.maxsize:
            raise ShapeError(
                f"{v.name}: {v.type}{locations(v.locs)} has more elements than an array can have; give smaller sizes"
            )


def check_scheduled(program: ScheduledGraph, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Raise InputError, with input and output names, where a graph of fixed sizes exceeds the memory."""
    g, arena = program.graph, program.arena.offsets({})[1]
    _check_call([*zip(inputs, (v.type for v in g.inputs))], [*zip(outputs, (v.type for v in g.outputs))], arena)


def check_program(program: Program, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """The same for a linked program."""
    _check_call([*zip(inputs, program.inputs)], [*zip(outputs, program.outputs)], program.sizes({})[1])


def _check_call(
    inputs: Sequence[tuple[str, TensorType]], outputs: Sequence[tuple[str, TensorType]], arena: int
) -> None:
    named = [*((f"input {n}", t) for n, t in inputs), *((f"output {n}", t) for n, t in outputs)]
    check_fits([(n, tuple(int(str(d)) for d in t.shape), t.dtype.numpy) for n, t in named], arena)


def memory() -> int:
    """Bytes that this process may use at most: the machine's memory, or less where the process is limited."""
    try:
        have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return UNKNOWN
    if sys.platform == "win32":
        return have
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return have if limit == resource.RLIM_INFINITY else min(have, limit)


def gigabytes(n: int) -> str:
    return f"{n / 1e9:.3g} GB"
