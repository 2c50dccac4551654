"""Derivatives of functions of array code: `grad`, `value_and_grad`, `vjp`, `jvp`, `linearize`.

A function is run once, with placeholders for what it is differentiated by; the graph of what it did is differentiated
by `dnnc.ir.autodiff`, and the result becomes lazy values again. So derivatives run by themselves, as parts of traced
functions and loops, under `vmap`, and under each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from dnnc.array.core import Array, scalar
from dnnc.array.creation import asarray
from dnnc.array.lazy import Lazy
from dnnc.array.operators import NUMBERS
from dnnc.array.promotion import kind_of, promoted
from dnnc.array.sizes import same_shape
from dnnc.frontends.trace.functions import Recorded, Replay, number, record, stand_in
from dnnc.ir import checks
from dnnc.ir.autodiff.forward import pushforward
from dnnc.ir.autodiff.paths import require_path
from dnnc.ir.autodiff.reverse import pullback, zeros
from dnnc.ir.errors import GradientError, InputError, a_type, count
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.builder import Builder
from dnnc.pytree import Branch, Leaf, Rules, Tree, flatten, unflatten

Result = TypeVar("Result")
Aux = TypeVar("Aux")
TREES = Rules(NUMBERS, any=True)  # numbers are arrays here


@dataclass(frozen=True)
class Arrays:
    """A tree of float arrays: those by which a function is differentiated, or cotangents and tangents of results."""

    tree: Tree
    arrays: tuple[Array, ...]
    paths: tuple[str, ...]

    @property
    def parts(self) -> list[Lazy]:
        return [p for a in self.arrays for p in a._parts]

    def again(self, arrays: Sequence[Array]) -> Any:
        """The tree with other arrays."""
        return unflatten(self.tree, arrays)

    def of(self, parts: Sequence[Lazy]) -> Any:
        """The tree with other values, one for each array."""
        return self.again([Array([p], a.dtype) for p, a in zip(parts, self.arrays)])


def float_arrays(tree: Any, path: str, what: str, hint: str) -> Arrays:
    """The arrays of a tree. GradientError for one that is not of real floats."""
    leaves, shape = flatten(tree, path, TREES)
    made = [scalar(x, promoted(x)) if isinstance(x, NUMBERS) else asarray(x) for _, x in leaves]
    for (where, _), a in zip(leaves, made):
        if kind_of(a.dtype) != "f":
            raise GradientError(f"{what}: {where or 'the argument'} is {a.dtype}, expected real floats; {hint}")
    return Arrays(shape, tuple(made), tuple(p for p, _ in leaves))


@dataclass(frozen=True)
class Call:
    """A call of a function that is differentiated: its graph, and by which arrays of its arguments."""

    wrt: tuple[Arrays, ...]  # one for each chosen argument
    recorded: Recorded
    known: dict[Value, Lazy]  # the values of the graph's inputs

    @property
    def graph(self) -> Graph:
        return self.recorded.graph

    @property
    def inputs(self) -> list[Value]:
        """The inputs of the graph that stand for `wrt`."""
        return self.graph.inputs[: sum(len(w.arrays) for w in self.wrt)]

    def split(self, parts: Sequence[Any]) -> list[Any]:
        """The trees of `wrt` with other values."""
        rest = iter(parts)
        return [w.of([next(rest) for _ in w.arrays]) for w in self.wrt]


def called(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], argnums: Sequence[int], what: str
) -> Call:
    """Record a call of a function with placeholders for the float arrays of some positional arguments."""
    before = number()
    hint = "convert it with astype, or choose other arguments by argnums"
    wrt = tuple(float_arrays(args[k], f"argument {k}", what, hint) for k in argnums)
    inner = [[stand_in(a) for a in w.arrays] for w in wrt]
    given = list(args)
    for k, w, arrays in zip(argnums, wrt, inner):
        given[k] = w.again(arrays)
    recorded = record(fn, given, kwargs, [a for arrays in inner for a in arrays], before)
    values = [*(p for w in wrt for p in w.parts), *recorded.captured]
    return Call(wrt, recorded, dict(zip(recorded.graph.inputs, values)))


def positions(argnums: int | Sequence[int], given: int, what: str) -> tuple[int, ...]:
    """The numbers of positional arguments. InputError where there are no such arguments."""
    many = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    for k in many:
        if isinstance(k, bool) or not isinstance(k, int) or not -given <= k < given:
            have = count(given, "positional argument")
            raise InputError(f"{what}: argnums={argnums!r}, but the call has {have}")
    return tuple(k % given for k in many)


# --- reverse mode -----------------------------------------------------------------------------------------------------


def value_and_grad(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that gives the value of `fn` and its gradient by some arguments.

    Args:
        fn: gives one real float number (an array without axes); with `has_aux` a pair of that and further results.
        argnums: the positional arguments to differentiate by: arrays, numbers, or dicts, lists, tuples and dataclasses
            of these. Keyword arguments are constants.
        has_aux: does `fn` give results beside the value? They come back as they are.

    Returns:
        A function of the same arguments that gives `(value, gradient)`, or `((value, aux), gradient)`. The gradient has
        the structure, shapes and dtypes of the argument; with several `argnums` it is a tuple.

    Raises:
        GradientError: the value is no float number, an argument has integers, or an op on the way has no derivative;
            names the op and the line.
    """
    checks.function(fn, "value_and_grad")

    @functools.wraps(fn)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        checks.function(fn, "grad", args, kwargs)
        call = called(fn, args, kwargs, positions(argnums, len(args), "grad"), "grad")
        values, gradients = gradients_of(call, has_aux)
        trees = call.split(gradients)
        made = unflatten(call.recorded.tree, call.recorded.arrays(values))
        return made, trees[0] if isinstance(argnums, int) else tuple(trees)

    return differentiated


def grad(fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """A function that gives the gradient of `fn` by some arguments, or `(gradient, aux)`; see `value_and_grad`."""
    checks.function(fn, "grad")
    both = value_and_grad(fn, argnums, has_aux)

    @functools.wraps(fn)
    def differentiated(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return differentiated


def gradients_of(call: Call, has_aux: bool) -> tuple[list[Lazy], list[Lazy]]:
    """The results of a call, and the gradient of the first of them by each array."""
    recorded, g = call.recorded, call.graph
    loss_tree = recorded.tree
    if has_aux:
        pair = isinstance(loss_tree, Branch) and loss_tree.type is tuple and len(loss_tree.children) == 2
        if not pair:
            raise InputError("grad: with has_aux=True the function gives a pair (value, aux)")
        assert isinstance(loss_tree, Branch)
        loss_tree = loss_tree.children[0]
    if not isinstance(loss_tree, Leaf):
        raise GradientError(
            "grad: the function must give one array; for further results use has_aux=True, for a gradient of several "
            "use vjp"
        )
    loss = recorded.results[0]
    if loss.ndim or kind_of(loss.dtype) != "f":
        raise GradientError(
            f"grad: the function must give one real float number, got {loss.dtype} of shape {loss.shape}; reduce it "
            "with sum or mean, or use vjp or jacrev"
        )
    y = g.outputs[0]
    b = Builder(g, locs=y.locs)
    found = pullback(g, {y: b.constant(1.0, dtype=y.type.dtype)}, call.inputs)
    every = [*g.outputs, *defined(g, g.outputs[:1], call, found)]
    values = Replay(g, call.known).values(every)
    return values[: len(g.outputs)], values[len(g.outputs) :]


def defined(g: Graph, results: Sequence[Value], call: Call, cotangents: Sequence[Value | None]) -> Iterator[Value]:
    """The cotangents of a call's arrays; zero for those on which no result depends.

    GradientError where a result depends on an array by integers or truth values only.
    """
    paths = [p for w in call.wrt for p in w.paths]
    for x, c, path in zip(call.inputs, cotangents, paths):
        if c is None:
            require_path(g, x, results, path)
        yield zeros(Builder(g), x.type) if c is None else c


@overload
def vjp(
    fn: Callable[..., Result], *primals: Any, has_aux: Literal[False] = False
) -> tuple[Result, Callable[[Result], tuple[Any, ...]]]: ...
@overload
def vjp(
    fn: Callable[..., tuple[Result, Aux]], *primals: Any, has_aux: Literal[True]
) -> tuple[Result, Callable[[Result], tuple[Any, ...]], Aux]: ...
@overload
def vjp(fn: Callable[..., Any], *primals: Any, has_aux: bool) -> tuple[Any, ...]: ...
def vjp(fn: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """The results of a function, and a function that maps their cotangents to those of the arguments.

    Args:
        fn: gives arrays of real floats, or a tree of them; with `has_aux` a pair of that and further results.
        *primals: its arguments: arrays or trees of arrays.
        has_aux: does `fn` give results that have no cotangents?

    Returns:
        `(results, pullback)`, or `(results, pullback, aux)`. `pullback` takes cotangents in the structure of the
        results and gives a tuple with a tree for each argument. What it needs of the function's work is computed once.

    Raises:
        GradientError: see `value_and_grad`.
    """
    checks.function(fn, "vjp", primals)
    call = called(fn, primals, {}, range(len(primals)), "vjp")
    results, aux, count = _with_aux(call, has_aux, "vjp")
    g = call.graph
    seeds = [g.add_input(f"cotangent{k}", o.type) for k, o in enumerate(g.outputs[:count])]
    cotangents: dict[Value, Value] = {}
    b = Builder(g)
    for o, c in zip(g.outputs[:count], seeds):  # results may be one value
        cotangents[o] = b.add(cotangents[o], c) if o in cotangents else c
    found = list(pullback(g, cotangents, call.inputs))
    wanted = list(defined(g, g.outputs[:count], call, found))
    partial = Partial(g, call.known, seeds, wanted)
    outputs = call.recorded.arrays(partial.forward.values(g.outputs))

    def pulled(cotangent: Any) -> tuple[Any, ...]:
        given = _matching(cotangent, results, outputs[:count], "the cotangents of vjp")
        return tuple(call.split(partial(given)))

    made = unflatten(results, outputs[:count])
    return (made, pulled, unflatten(aux, outputs[count:])) if has_aux else (made, pulled)


class Partial:
    """A graph with some inputs open: what does not depend on them is computed once, for all calls."""

    def __init__(
        self, g: Graph, known: Mapping[Value, Lazy], inputs: Sequence[Value], outputs: Sequence[Value]
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.forward = Replay(g, known)
        moving = set(inputs)
        kept: list[Value] = [v for v in outputs if v not in moving and v.node is None]
        for n in g.nodes():
            operands = [v for v in n.inputs if v is not None]
            if not moving.isdisjoint(operands):
                moving.update(n.outputs)
                kept += [v for v in operands if v not in moving]
        self.forward.values(list(dict.fromkeys(v for v in kept if v not in moving)))

    def __call__(self, values: Sequence[Lazy]) -> list[Lazy]:
        known = {**self.forward.known, **dict(zip(self.inputs, values))}
        return Replay(self.forward.graph, known).values(self.outputs)


def _with_aux(call: Call, has_aux: bool, what: str) -> tuple[Tree, Tree, int]:
    """The structures of results and of what comes beside them, and how many arrays the results have."""
    tree = call.recorded.tree
    aux: Tree = Branch(tuple, (), ())
    if has_aux:
        if not (isinstance(tree, Branch) and tree.type is tuple and len(tree.children) == 2):
            raise InputError(f"{what}: with has_aux=True the function gives a pair (results, aux)")
        tree, aux = tree.children
    count = _leaves(tree)
    for a, path in zip(call.recorded.results[:count], call.recorded.paths):
        if kind_of(a.dtype) != "f":
            raise GradientError(
                f"{what}: result {path or ''} is {a.dtype}, expected real floats; give it beside the others by has_aux"
            )
    return tree, aux, count


def _leaves(tree: Tree) -> int:
    return sum(map(_leaves, tree.children)) if isinstance(tree, Branch) else int(isinstance(tree, Leaf))


def _matching(given: Any, tree: Tree, arrays: Sequence[Array], what: str) -> list[Lazy]:
    """The values of a tree of arrays that has the structure, shapes and dtypes of another."""
    leaves, own = flatten(given, "", TREES)
    if len(leaves) != len(arrays) or not _alike(own, tree):
        raise InputError(
            f"{what}: expected {count(len(arrays), 'array')} in the structure of the results, got {a_type(given)}"
        )
    made = []
    for (path, x), want in zip(leaves, arrays):
        a = scalar(x, want.dtype) if isinstance(x, NUMBERS) else asarray(x)
        if a.dtype != want.dtype or not same_shape(a.shape, want.shape):
            raise InputError(
                f"{what}: {path or 'the array'} must be {want.dtype} of shape {want.shape}, got {a.dtype} of shape "
                f"{a.shape}"
            )
        made.append(a._parts[0])
    return made


def _alike(a: Tree, b: Tree) -> bool:
    """Do trees have the same containers?"""
    if isinstance(a, Branch) and isinstance(b, Branch):
        return a.names == b.names and all(map(_alike, a.children, b.children))
    return type(a) is type(b)


# --- forward mode -----------------------------------------------------------------------------------------------------


@overload
def linearize(
    fn: Callable[..., Result], *primals: Any, has_aux: Literal[False] = False
) -> tuple[Result, Callable[..., Result]]: ...
@overload
def linearize(
    fn: Callable[..., tuple[Result, Aux]], *primals: Any, has_aux: Literal[True]
) -> tuple[Result, Callable[..., Result], Aux]: ...
@overload
def linearize(fn: Callable[..., Any], *primals: Any, has_aux: bool) -> tuple[Any, ...]: ...
def linearize(fn: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """The results of a function, and the linear function that maps tangents of its arguments to those of the results.

    Args:
        fn: gives arrays of real floats, or a tree of them; with `has_aux` a pair of that and further results.
        *primals: its arguments: arrays or trees of arrays.
        has_aux: does `fn` give results that have no tangents?

    Returns:
        `(results, pushforward)`, or `(results, pushforward, aux)`. `pushforward` takes a tangent for each argument, in
        its structure. What it needs of the function's work is computed once.

    Raises:
        GradientError: see `value_and_grad`.
    """
    checks.function(fn, "linearize", primals)
    call = called(fn, primals, {}, range(len(primals)), "linearize")
    results, aux, number = _with_aux(call, has_aux, "linearize")
    g = call.graph
    inputs = call.inputs
    seeds = [g.add_input(f"tangent{k}", v.type) for k, v in enumerate(inputs)]
    found = pushforward(g, dict(zip(inputs, seeds)), g.outputs[:number])
    wanted = [zeros(Builder(g), o.type) if t is None else t for o, t in zip(g.outputs, found)]
    partial = Partial(g, call.known, seeds, wanted)
    outputs = call.recorded.arrays(partial.forward.values(g.outputs))

    def pushed(*tangents: Any) -> Any:
        if len(tangents) != len(primals):
            raise InputError(f"expected a tangent for each of {count(len(primals), 'argument')}, got {len(tangents)}")
        given = [
            p
            for k, (t, w) in enumerate(zip(tangents, call.wrt))
            for p in _matching(t, w.tree, w.arrays, f"the tangent of argument {k}")
        ]
        made = partial(given)
        return unflatten(results, [Array([p], a.dtype) for p, a in zip(made, outputs)])

    value = unflatten(results, outputs[:number])
    return (value, pushed, unflatten(aux, outputs[number:])) if has_aux else (value, pushed)


@overload
def jvp(
    fn: Callable[..., Result], primals: Sequence[Any], tangents: Sequence[Any], has_aux: Literal[False] = False
) -> tuple[Result, Result]: ...
@overload
def jvp(
    fn: Callable[..., tuple[Result, Aux]], primals: Sequence[Any], tangents: Sequence[Any], has_aux: Literal[True]
) -> tuple[Result, Result, Aux]: ...
def jvp(fn: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False) -> Any:
    """The results of a function at `primals`, and their derivative in the direction of `tangents`.

    Returns `(results, tangents of the results)`, with `has_aux` also the further results of `fn`; see `linearize`.
    """
    for name, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, (tuple, list)):
            raise InputError(f"jvp: expected a tuple of {name}, one for each argument, got {a_type(given)}")
    if len(primals) != len(tangents):
        raise InputError(f"jvp: {count(len(primals), 'primal')} and {count(len(tangents), 'tangent')}")
    value, pushed, *aux = linearize(fn, *primals, has_aux=has_aux)
    return (value, pushed(*tangents), *aux)
