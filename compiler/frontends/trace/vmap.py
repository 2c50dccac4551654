"""`dnnc.vmap`: a function of one example as one of many, without a loop: its ops run on stacks of examples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from dnnc.array.core import Array, from_buffer
from dnnc.array.creation import asarray
from dnnc.array.lazy import Call, Lazy, apply, placeholder
from dnnc.array.operators import NUMBERS
from dnnc.array.sizes import plain, same
from dnnc.frontends.trace.batch import Batch, Operand
from dnnc.frontends.trace.batching import Batcher
from dnnc.frontends.trace.regions import key_of
from dnnc.frontends.trace.tracer import located
from dnnc.ir.checks import function
from dnnc.ir.errors import InputError, count
from dnnc.ir.types import TensorType
from dnnc.pytree import Branch, Fixed, Rules, Tree, children, flatten, unflatten

Result = TypeVar("Result")


def vmap(fn: Callable[..., Result], in_axes: Any = 0, out_axes: Any = 0) -> Callable[..., Result]:
    """A function that applies `fn` to each element along an axis of its arguments, and stacks the results.

    Args:
        fn: takes and gives arrays, or dicts, lists, tuples and dataclasses of arrays. It runs once, with arrays that
            lack the axis.
        in_axes: where the elements stand: an axis for all arguments, or a tuple with one for each positional argument;
            None is an argument that is the same for all. An argument that is a tree may have a tree of axes. Keyword
            arguments are taken along axis 0; other objects than arrays are passed unchanged.
        out_axes: where results are stacked: an axis, or a tree of them; None is a result that is the same for all.

    Returns:
        A function of arrays, which runs by itself and as a part of a traced function, and may be mapped again.

    Raises:
        InputError: the axes do not fit to the arguments, or sizes along them differ; or the function reads the contents
            of an array.
        UnsupportedError: an op of the function runs on the host; says which, and the line.
    """

    function(fn, "vmap")

    @functools.wraps(fn)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        function(fn, "vmap", args, kwargs)
        leaves, tree = flatten((args, kwargs), "", Rules(any=True))
        assert isinstance(tree, Branch)
        if isinstance(in_axes, (tuple, list)) and len(in_axes) != len(args):
            have, wanted = count(len(in_axes), "axis", "axes"), count(len(args), "positional argument")
            raise InputError(f"vmap: in_axes={in_axes!r} has {have} for {wanted}")
        given = tuple(in_axes) if isinstance(in_axes, list) else in_axes
        axes = [*spread_axes(given, tree.children[0], "in_axes"), *spread_axes(0, tree.children[1], "in_axes")]
        arrays = [x if isinstance(x, Array) else asarray(x) for _, x in leaves]
        places = [None if a is None else axis_in(a, x.ndim, path) for a, x, (path, _) in zip(axes, arrays, leaves)]
        rows = size_of([(path, x.shape[a]) for a, x, (path, _) in zip(places, arrays, leaves) if a is not None])
        return run(fn, tree, arrays, places, rows, out_axes)

    return mapped


def spread_axes(axes: Any, tree: Tree, where: str) -> list[int | None]:
    """The axis of each leaf of a tree, from a tree of axes that ends where one holds for all below."""
    if axes is None or (isinstance(axes, (int, np.integer)) and not isinstance(axes, bool)):
        return [axes if axes is None else int(axes)] * leaves_in(tree)
    parts = children(axes)
    if parts is None or not isinstance(tree, Branch):
        raise InputError(
            f"vmap: {where}={axes!r}: expected an axis or None"
            + ("" if isinstance(tree, Branch) else ", there is one array")
        )
    names = [n for n, _ in parts]
    if sorted(map(str, names)) != sorted(map(str, tree.names)):
        raise InputError(
            f"vmap: {where} has axes for {', '.join(map(str, names))}, there are "
            f"{', '.join(map(str, tree.names)) or 'no arrays'}"
        )
    by_name = dict(parts)
    return [a for n, c in zip(tree.names, tree.children) for a in spread_axes(by_name[n], c, f"{where}.{n}")]


def leaves_in(tree: Tree) -> int:
    """Leaves of a tree."""
    return sum(map(leaves_in, tree.children)) if isinstance(tree, Branch) else 0 if isinstance(tree, Fixed) else 1


def axis_in(axis: int, ndim: int, where: str) -> int:
    if not -ndim <= axis < ndim:
        raise InputError(
            f"vmap: axis {axis} of {argument_name(where)}, which has {ndim} axes; None in in_axes is for what is the "
            "same for all"
        )
    return axis % ndim


def argument_name(path: str) -> str:
    """How messages call an argument: the path of `flatten` begins with 0 and a position, or with 1 and a keyword."""
    rest = path.partition(".")[2]
    return f"argument {rest}" if rest else "the argument"


def size_of(sizes: Sequence[tuple[str, Any]]) -> Any:
    """The number of rows, which all agree on."""
    if not sizes:
        raise InputError("vmap: no argument has an axis to map over; give arrays, or axes that are not None")
    first = sizes[0][1]
    if not all(same(n, first) for _, n in sizes):
        raise InputError(
            f"vmap: sizes along the mapped axes differ: {', '.join(f'{argument_name(p)}: {n}' for p, n in sizes)}"
        )
    return plain(first)


def run(
    fn: Callable[..., Any], tree: Tree, arrays: Sequence[Array], places: Sequence[int | None], rows: Any, out_axes: Any
) -> Any:
    """Trace `fn` on one row, then compute what it made on all."""
    before = next(Call.counted)
    known: dict[Any, Operand] = {}
    inner = [x if a is None else one_row(x, a, known) for x, a in zip(arrays, places)]
    args, kwargs = unflatten(tree, inner)
    leaves, results = flatten(located(fn, args, kwargs), "", Rules(NUMBERS, any=True))
    made = [x if isinstance(x, Array) else from_buffer(np.array(x)) for _, x in leaves]
    axes = spread_axes(out_axes, results, "out_axes")
    stacks = iter(Batcher(rows).values([p for x in made for p in x._parts], known, before))
    return unflatten(results, [result(x.dtype, [next(stacks) for _ in x._parts], a, rows) for x, a in zip(made, axes)])


def one_row(x: Array, axis: int, known: dict[Any, Operand]) -> Array:
    """What stands for one row of an array, whose parts are entered as stacks."""
    parts = []
    for p in x._parts:
        row = placeholder(TensorType(p.type.dtype, p.type.shape[:axis] + p.type.shape[axis + 1 :]))
        order = (axis, *(k for k in range(x.ndim) if k != axis))
        known[key_of(row)] = Operand(p if axis == 0 else apply("transpose", p, perm=order), True)
        parts.append(row)
    return Array(parts, x.dtype)


def result(dtype: Any, parts: Sequence[Operand], axis: int | None, rows: Any) -> Array:
    """A result with the rows along an axis."""
    if axis is None:
        if any(p.stack for p in parts):
            raise InputError(
                "vmap: out_axes=None is for results that are the same for all rows, this one is not; give it an axis"
            )
        return Array([p.given for p in parts], dtype)
    b = Batch(rows)
    ndim = parts[0].rank + 1
    if not -ndim <= axis < ndim:
        raise InputError(f"vmap: out_axes: axis {axis} of a result with {ndim} axes")
    return Array([moved(b.stack(p), axis % ndim) for p in parts], dtype)


def moved(x: Lazy, axis: int) -> Lazy:
    """The rows, which are along axis 0, along another."""
    rest = list(range(1, len(x.type.shape)))
    return x if axis == 0 else apply("transpose", x, perm=(*rest[:axis], 0, *rest[axis:]))
