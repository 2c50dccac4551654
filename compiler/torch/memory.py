"""Layouts of torch's arguments and results: orders of axes in memory, and results that are views.

torch makes views of results itself, by a result's strides and place (`as_strided` on the argument or result that it is
a view of). So results must not only have the right elements: those that share memory in eager torch share it here.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dnnc.frontends.torch.dims import Dims
from dnnc.frontends.torch.importer import Output, Read
from dnnc.frontends.torch.tensors import hint, memory_order
from dnnc.ir.expr import Expr, const, free, substitute, value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.types import Dim

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Given:
    """A result that is output `output` of the program, and how its axes are put back in order.

    `internal`: it lies as the program computes it.
    """

    output: int
    perm: tuple[int, ...] | None
    internal: bool = False


@dataclass(frozen=True)
class View:
    """A result in the memory of an argument, or of another result: its sizes and strides, and where it begins."""

    of: int
    argument: bool
    sizes: tuple[Dim, ...]
    strides: tuple[Dim, ...]
    offset: Dim

    def make(self, args: Sequence[Any], results: Sequence[Any], sizes: Callable[[], Sizes]) -> torch.Tensor:
        t = args[self.of] if self.argument else results[self.of]
        at = [number(d, sizes) for d in (*self.sizes, *self.strides, self.offset)]
        n = len(self.sizes)
        made: torch.Tensor = t.as_strided(at[:n], at[n:-1], t.storage_offset() + at[-1])
        return made


def number(d: Any, sizes: Callable[[], Sizes]) -> Any:
    """The value of a dim in a call; anything else as it is."""
    if not isinstance(d, Expr):
        return d
    known = sizes()
    return value(substitute(d, {v: const(known[v.name]) for v in free(d)}))


def results_of(
    b: Builder, read: Read, args: Sequence[Any], fakes: Sequence[Any], dims: Dims, internal: Container[int] = ()
) -> list[Any]:
    """What becomes of each result; outputs of the graph are those alone that no view gives.

    Args:
        b: of the graph that was read.
        read: says what results are.
        args, fakes: torch's stand-ins for arguments and results.
        dims: sizes as dims.
        internal: numbers of results that may lie in any way, if no other result is a view of them.
    """
    whole = [v for v in b.graph.outputs]
    b.graph.outputs = []
    views = [_view(k, args, fakes, dims) if isinstance(r, Output) else None for k, r in enumerate(read.results)]
    bases = {v.of for v in views if v is not None and not v.argument}
    made: list[Any] = []
    for k, (r, view) in enumerate(zip(read.results, views)):
        if not isinstance(r, Output) or view is not None:
            made.append(view or r)
            continue
        number, free = len(b.graph.outputs), k in internal and k not in bases
        b.graph.outputs.append(whole[r.index])
        made.append(Given(number, None if free else arranged(b, number, fakes[k]), free))
    return made


def _view(k: int, args: Sequence[Any], fakes: Sequence[Any], dims: Dims) -> View | None:
    """Result k as a view of an argument, or of another result that is no view of it."""
    view = view_of(fakes[k], args, True, dims) or view_of(
        fakes[k], [f if j != k and is_base(f) else None for j, f in enumerate(fakes)], False, dims
    )
    return None if view is not None and not view.argument and is_base(fakes[k]) and view.of > k else view


def view_of(fake: Any, others: Sequence[Any], argument: bool, dims: Dims) -> View | None:
    """A tensor as a view of one of others, where they share memory and a type."""
    own = fake.untyped_storage()._cdata
    for k, other in enumerate(others):
        if isinstance(other, torch.Tensor) and other.untyped_storage()._cdata == own and other.dtype is fake.dtype:
            offset = fake.storage_offset() - other.storage_offset()
            return View(k, argument, dims.shape(fake.shape), dims.shape(fake.stride()), dims.of(offset))
    return None


def is_base(fake: Any) -> bool:
    """Does a tensor hold every element of its memory, row after row or in another order of axes?"""
    if not isinstance(fake, torch.Tensor):
        return False
    return hint(fake.numel()) * fake.element_size() == hint(fake.untyped_storage().nbytes()) and (
        fake.is_contiguous() or memory_order(fake) is not None
    )


def stored(b: Builder, v: Any, fake: Any) -> tuple[int, ...] | None:
    """Let an input be taken as it lies in memory: the graph puts its axes in order. Returns the order."""
    order = memory_order(fake)
    if order is None:
        return None
    g = b.graph
    shape = v.type.shape
    users = list(v.uses)
    v.type = replace(v.type, shape=tuple(shape[k] for k in order))
    b.before = g.first_node()
    moved = b.transpose(v, perm=tuple(order.index(k) for k in range(len(order))))
    for node, k in users:
        node.set_input(k, moved)
    g.outputs = [moved if o is v else o for o in g.outputs]
    b.before = None
    return order


def arranged(b: Builder, output: int, fake: Any) -> tuple[int, ...] | None:
    """Let an output be written as torch would lay it; returns how the axes are put back in order."""
    order = memory_order(fake) if isinstance(fake, torch.Tensor) else None
    if order is None:
        return None
    b.graph.outputs[output] = b.transpose(b.graph.outputs[output], perm=order)
    return tuple(order.index(k) for k in range(len(order)))
