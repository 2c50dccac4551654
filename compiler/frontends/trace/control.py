"""Loops and branches that stay in the program. Where nothing is traced they run as Python does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from dnnc.array.core import Array, cast, namespace, scalar
from dnnc.array.creation import asarray
from dnnc.array.lazy import Call, Lazy, materialise, placeholder
from dnnc.array.operators import NUMBERS
from dnnc.array.promotion import kind_of, promoted
from dnnc.array.sizes import same_shape
from dnnc.frontends.trace.regions import Region
from dnnc.frontends.trace.tracer import is_traced, keys_of_iteration, tracing
from dnnc.ir.checks import function, integer
from dnnc.ir.dtype import boolean, i64
from dnnc.ir.errors import InputError, a_type
from dnnc.ir.graph import Graph
from dnnc.ir.graph.attributes import complete
from dnnc.ir.graph.builder import infer
from dnnc.ir.ops import OPS
from dnnc.ir.types import TensorType
from dnnc.pytree import Rules, Tree, flatten, unflatten

State = TypeVar("State")
Result = TypeVar("Result")
LEVEL = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}  # of Python numbers: one gives way to a type of its level or above
STATE = Rules(NUMBERS, any=True)  # numbers are arrays here: they may change from one iteration to the next


@dataclass(frozen=True)
class Pack:
    """A tree of arrays. `weak`: which were Python numbers, whose type gives way."""

    tree: Tree
    arrays: tuple[Array, ...]
    paths: tuple[str, ...]
    weak: tuple[bool, ...]

    @property
    def parts(self) -> list[Lazy]:
        return [p for a in self.arrays for p in a._parts]

    def again(self, parts: Sequence[Lazy]) -> Any:
        """The tree with other values of the same types."""
        rest = iter(parts)
        return unflatten(self.tree, [Array([next(rest) for _ in a._parts], a.dtype) for a in self.arrays])


def pack(tree: Any, path: str) -> Pack:
    leaves, shape = flatten(tree, path, STATE)
    made = [
        scalar(x, promoted(x)) if isinstance(x, NUMBERS) else asarray(x) for _, x in leaves
    ]  # numbers live nowhere in particular
    arrays = tuple(Array(x._parts, x.dtype) for x in made)  # handles of its own: writing stays inside
    return Pack(shape, arrays, tuple(p for p, _ in leaves), tuple(isinstance(x, NUMBERS) for _, x in leaves))


def matched(made: Pack, want: Pack, what: str) -> Pack:
    """`made` with Python numbers in the types of `want`. InputError where structure, shapes or dtypes differ."""
    if made.paths != want.paths:
        raise InputError(
            f"{what}: expected {', '.join(want.paths) or 'no arrays'}, got {', '.join(made.paths) or 'none'}"
        )
    made = eased(made, want)
    for p, a, w in zip(made.paths, made.arrays, want.arrays):
        if not same_shape(a.shape, w.shape) or a.dtype != w.dtype:
            got = f"{a.dtype} of shape {a.shape}"
            raise InputError(
                f"{what}: {p} must be {w.dtype} of shape {w.shape} as before, got {got}; convert it with astype or "
                "broadcast_to"
            )
    return made


def eased(made: Pack, want: Pack) -> Pack:
    """`made` with Python numbers in the types of `want` where these hold them."""
    triples = zip(made.arrays, want.arrays, made.weak)
    arrays = tuple(
        cast(a, w.dtype) if weak and LEVEL[kind_of(a.dtype)] <= LEVEL[kind_of(w.dtype)] else a for a, w, weak in triples
    )
    return Pack(made.tree, arrays, made.paths, made.weak)


def truth(x: Any, what: str) -> Array:
    """A condition as an array. InputError unless it is one truth value."""
    a = x if isinstance(x, Array) else asarray(x)
    if a.ndim or a.dtype.kind != "b":
        raise InputError(
            f"{what}: the condition must be one truth value, got {a.dtype} of shape {a.shape}; compare it, or reduce "
            "it with any or all"
        )
    return a


def values(op: str, inputs: Sequence[Lazy | None], **attrs: Any) -> list[Lazy]:
    """Return the results of an op with bodies; in a trace they belong to it, whatever the operands are."""
    full = complete(OPS[op], attrs)
    call = Call(OPS[op], tuple(inputs), full, tuple(infer(OPS[op], inputs, full)))  # type: ignore[arg-type]  # a rule reads the types alone
    if call.traced or tracing():
        call.traced, call.device = True, None
        call.trace()
    else:
        call.key = (op, *(a.structural_hash() if isinstance(a, Graph) else a for a in full.values()))
    return [Lazy(t, call, k) for k, t in enumerate(call.types)]


def _now() -> int:
    """A number above those of all calls so far."""
    return next(Call.counted)


def in_python(*packs: Pack) -> bool:
    return not tracing() and not any(is_traced(a) for p in packs for a in p.arrays)


def cond(condition: Any, then: Callable[..., Result], other: Callable[..., Result], *operands: Any) -> Result:
    """Return `then(*operands)` if the condition holds, else `other(*operands)`; traced, the program chooses.

    Args:
        condition: one truth value.
        then, other: give arrays, or trees of arrays, of the same structure, shapes and dtypes. They may read arrays
            from around them.
        *operands: arguments of both.

    Raises:
        InputError: the condition is no truth value, or the results differ.
    """
    function(then, "cond: then", operands)
    function(other, "cond: other", operands)
    test = truth(condition, "cond")
    if not is_traced(test):
        return (then if bool(test) else other)(*operands)
    before = _now()
    given = pack(operands, "operands")
    first, second = (pack(fn(*given.again(given.parts)), "result") for fn in (then, other))
    if first.paths == second.paths:
        first = eased(first, second)
    second = matched(second, first, "cond: the second branch")
    regions = []
    for name, made in (("then", first), ("other", second)):
        r = Region(name, (), (), before)
        r.finish(made.parts)
        regions.append(r)
    every = list({(id(x.call), x.index) if x.call else id(x): x for r in regions for x in r.captured}.values())
    for r in regions:
        r.share(every)
    done = values("cond", [test._parts[0], *every], then=regions[0].graph, other=regions[1].graph)
    return first.again(done)  # type: ignore[no-any-return]


@overload
def while_loop(
    condition: Callable[[State], Any], body: Callable[[State], State], init: State, bound: int | None = None
) -> State: ...
@overload  # numbers in the first state
def while_loop(
    condition: Callable[[State], Any], body: Callable[[State], State], init: Any, bound: int | None = None
) -> State: ...
def while_loop(condition: Callable[[Any], Any], body: Callable[[Any], Any], init: Any, bound: int | None = None) -> Any:
    """`state = init; while condition(state): state = body(state)` as a loop of the program.

    Args:
        condition: gives one truth value.
        body: gives the next state, with the structure, shapes and dtypes of the one before.
        init: an array, a number (which is an array of int64, float64 or bool), or a tree of them.
        bound: the most iterations that there may be. A gradient in reverse mode needs it: memory for so many is kept.

    Returns:
        The last state.

    Raises:
        InputError: the condition is no truth value, the state changes its structure, a shape or a dtype, or the
            condition still holds after `bound` iterations.
    """
    function(condition, "while_loop: condition", [init])
    function(body, "while_loop: body", [init])
    if bound is not None:
        bound = integer(bound, "bound", 1)
    start = pack(init, "state")
    if in_python(start):
        return _while(condition, body, start, bound)
    first = truth(condition(start.again(start.parts)), "while_loop")
    before = _now()
    inner = [placeholder(TensorType(i64, ())), *(placeholder(p.type) for p in start.parts)]
    with keys_of_iteration(inner[0]):
        made = matched(pack(body(start.again(inner[1:])), "state"), start, "while_loop")
    holds = truth(condition(start.again(made.parts)), "while_loop")
    names = ["number", *(f"state{k}" for k in range(len(inner) - 1))]
    if bound is not None:  # the loop carries its condition, which the caller checks afterwards
        inner.insert(1, placeholder(TensorType(boolean, ())))
        names.insert(1, "going")
    carried = len(start.parts) + (bound is not None)
    region = Region("body", inner, names, before)
    graph = region.finish([*holds._parts * (1 + carried - len(start.parts)), *made.parts])
    state = [*first._parts * (carried - len(start.parts)), *start.parts]
    operands = [None, first._parts[0], *state, *region.captured]
    done = values("loop", operands, body=graph, carried=carried, length=bound)
    return start.again(done if bound is None else _within(done))


def _within(done: Sequence[Lazy]) -> list[Lazy]:
    """The state of a loop with a bound, whose condition came first; reading it fails while that holds."""
    going, *state = done
    (one,) = values("cast", [going], to=i64)
    (over,) = values("expand", [one], shape=(2,))
    return [values("within_bound", [x, over])[0] for x in state]


def _while(condition: Callable[[Any], Any], body: Callable[[Any], Any], start: Pack, bound: int | None) -> Any:
    """The loop in Python: a program for each iteration, of the state and the condition."""
    state, count = start, 0
    while True:
        test = truth(condition(unflatten(start.tree, [Array(a._parts, a.dtype) for a in state.arrays])), "while_loop")
        materialise([*test._parts, *state.parts])
        if not bool(test):
            return start.again(state.parts)
        if count == bound:
            raise InputError(f"while_loop: the condition still holds after {bound} iterations; give it a larger bound")
        state = matched(pack(body(start.again(state.parts)), "state"), start, "while_loop")
        count += 1


@overload
def scan(
    fn: Callable[[State, Any], tuple[State, Result]],
    init: State,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    checkpoint: int | None = None,
) -> tuple[State, Result]: ...
@overload  # numbers in the first state
def scan(
    fn: Callable[[State, Any], tuple[State, Result]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    checkpoint: int | None = None,
) -> tuple[State, Result]: ...
def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    checkpoint: int | None = None,
) -> tuple[Any, Any]:
    """`state, y = fn(state, x)` for each row of `xs`; the last state and the `y`s, stacked.

    Args:
        fn: gives the next state, of the structure, shapes and dtypes of the one before, and a tree of arrays (or None).
        init: the first state, a tree of arrays and numbers.
        xs: a tree of arrays, with one row along axis 0 for each step; None gives `fn` None.
        length: number of iterations where there is no `xs`.
        reverse: from the last row to the first; results are stacked at the rows they belong to.
        checkpoint: a gradient keeps the state of every so many iterations, and computes those in between again. The
            square root of their number takes the least memory. None keeps the values of all steps that the gradient
            needs.

    Raises:
        InputError: there are no rows, their numbers differ, or the state changes its structure, a shape or a dtype.
    """
    function(fn, "scan", [init, xs])
    if length is not None:
        length = integer(length, "length", 1)
    every = 0 if checkpoint is None else integer(checkpoint, "checkpoint", 1)
    start, rows = pack(init, "state"), pack(xs, "xs")
    n = _rows(rows, length)
    if in_python(start, rows):
        return _stepped(fn, start, rows, n, reverse)
    return looped(fn, start, rows, n, reverse, every)


def looped(
    fn: Callable[..., tuple[Any, Any]],
    start: Pack,
    rows: Pack,
    n: int,
    reverse: bool = False,
    every: int = 0,
    fixed: Sequence[Array] = (),
) -> tuple[Any, Any]:
    """A scan as one op, also where nothing is traced. `fixed`: arrays that `fn` takes behind state and row."""
    before = _now()
    held = [Array([placeholder(p.type) for p in a._parts], a.dtype) for a in fixed]
    inner = [placeholder(TensorType(i64, ())), *(placeholder(p.type) for p in start.parts)]
    row = [placeholder(TensorType(p.type.dtype, p.type.shape[1:])) for p in rows.parts]
    with keys_of_iteration(inner[0]):
        state, y = _pair(fn(start.again(inner[1:]), rows.again(row), *held))
    made, out = matched(pack(state, "state"), start, "scan"), pack(y, "y")
    names = ["number", *(f"state{k}" for k in range(len(start.parts))), *(f"row{k}" for k in range(len(row)))]
    outer = [p for a in fixed for p in a._parts]
    names += [f"fixed{k}" for k in range(len(outer))]
    region = Region("body", [*inner, *row, *(p for a in held for p in a._parts)], names, before)
    graph = region.finish([*made.parts, *out.parts])
    back = (True,) * (len(row) + len(out.parts)) if reverse else ()
    attrs = {"body": graph, "carried": len(start.parts), "scanned": len(row), "length": n, "backward": back}
    attrs["checkpoint"] = every
    done = values("loop", [None, None, *start.parts, *rows.parts, *outer, *region.captured], **attrs)
    return start.again(done[: len(start.parts)]), out.again(done[len(start.parts) :])


def _rows(rows: Pack, length: int | None) -> int:
    counts = {p: a.shape[0] if a.ndim else 0 for p, a in zip(rows.paths, rows.arrays)}
    if length is not None:
        counts["length"] = length
    if len(set(counts.values())) != 1 or min(counts.values()) < 1:
        raise InputError(
            f"scan: expected one number of rows, at least 1, got "
            f"{', '.join(f'{p}: {n}' for p, n in counts.items()) or 'no xs and no length'}"
        )
    return next(iter(counts.values()))


def _pair(made: Any) -> tuple[Any, Any]:
    if not isinstance(made, tuple) or len(made) != 2:
        raise InputError(f"scan: the function must give a pair (state, y), got {a_type(made)}")
    return made


def _stepped(
    fn: Callable[[Any, Any], tuple[Any, Any]], start: Pack, rows: Pack, n: int, reverse: bool
) -> tuple[Any, Any]:
    state, ys = start, []
    for k in range(n)[::-1] if reverse else range(n):
        made, y = _pair(fn(start.again(state.parts), unflatten(rows.tree, [a[k, ...] for a in rows.arrays])))
        state = matched(pack(made, "state"), start, "scan")
        ys.append(pack(y, "y"))
        materialise([*state.parts, *ys[-1].parts])
    if reverse:
        ys.reverse()
    stacked = [namespace().stack([y.arrays[k] for y in ys]) for k in range(len(ys[0].arrays))]
    return start.again(state.parts), unflatten(ys[0].tree, stacked)
