"""How a function is differentiated: `stop_gradient`, `checkpoint`, `custom_vjp`.

In a trace, and of arrays whose gradient `backward` may ask for, each leaves an op in the graph that holds the function
(`dnnc.ir.ops.derivatives`); elsewhere functions run as they are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

from dnnc.array.core import Array
from dnnc.array.lazy import Lazy, apply
from dnnc.frontends.trace.control import Pack, matched, pack, values
from dnnc.frontends.trace.functions import number
from dnnc.frontends.trace.regions import Region, key_of
from dnnc.frontends.trace.tracer import tracing
from dnnc.ir import checks
from dnnc.ir.errors import InputError, a_type, count
from dnnc.ir.graph.builder import Builder
from dnnc.pytree import Rules, flatten, unflatten

P = ParamSpec("P")
Result = TypeVar("Result")


def stop_gradient(tree: Result) -> Result:
    """The same arrays, through which no derivative flows: they count as constants."""
    leaves, shape = flatten(tree, "", Rules(any=True))
    arrays = [x if isinstance(x, Array) else pack(x, path).arrays[0] for path, x in leaves]
    return unflatten(shape, [Array([apply("stop_gradient", p) for p in a._parts], a.dtype) for a in arrays])  # type: ignore[no-any-return]


def checkpoint(fn: Callable[P, Result]) -> Callable[P, Result]:
    """A function whose intermediate values are not kept for the gradient, but computed again when it is needed.

    Memory between forward and backward is that of the arguments; the price is to compute `fn` twice. Outside of a
    derivative the function is as it was.
    """
    checks.function(fn, "checkpoint")

    @functools.wraps(fn)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> Result:
        if not tracing() and not _has_history((args, kwargs)):
            return fn(*args, **kwargs)
        before = number()
        given, made, region = _run(fn, (args, kwargs), "arguments", before)
        graph = region.finish(made.parts)
        done = values("checkpoint", [*given.parts, *region.captured], body=graph)
        return made.again(done)  # type: ignore[no-any-return]

    return wrapped


def _has_history(tree: Any) -> bool:
    """Does `backward` ask for the gradient of an array of these arguments?"""
    leaves, _ = flatten(tree, "", Rules(any=True))
    return any(p.tracked for _, x in leaves if isinstance(x, Array) for p in x._parts)


def _run(fn: Callable[..., Any], call: tuple[Any, Any], path: str, before: int) -> tuple[Pack, Pack, Region]:
    """Run a function on stand-ins for the arrays of its arguments: these, its results, the region of its graph."""
    given = _arrays(call, path)
    inner = [_stand_in(p) for p in given.parts]
    args, kwargs = given.again(inner)
    made = pack(fn(*args, **kwargs), "result")
    name = getattr(fn, "__name__", "")
    title = name if name.isidentifier() else "function"
    return given, made, Region(title, inner, [f"x{k}" for k in range(len(inner))], before)


def _arrays(tree: Any, path: str) -> Pack:
    """The arrays of a tree; numbers in it stay numbers."""
    leaves, shape = flatten(tree, path, Rules(any=True))
    packs = [pack(x, p) for p, x in leaves]
    arrays = tuple(p.arrays[0] for p in packs)
    return Pack(shape, arrays, tuple(p for p, _ in leaves), (False,) * len(arrays))


def _stand_in(p: Lazy) -> Lazy:
    return Lazy(p.type)


class CustomVjp(Generic[Result]):
    """A function with a gradient of its own; see `custom_vjp`."""

    def __init__(self, fn: Callable[..., Result], nondiff_argnums: Sequence[int]) -> None:
        functools.update_wrapper(self, fn)
        self._fn, self._fixed = fn, tuple(nondiff_argnums)
        self._forward: Callable[..., Any] | None = None
        self._backward: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        return f"<dnnc.custom_vjp of {getattr(self._fn, '__name__', 'a function')}>"

    def defvjp(self, forward: Callable[..., tuple[Result, Any]], backward: Callable[..., Any]) -> CustomVjp[Result]:
        """Set the rule.

        Args:
            forward: takes what the function takes; gives `(results, residuals)`.
            backward: takes the values of `nondiff_argnums`, the residuals and the cotangents of the results; gives a
                tuple with a cotangent for each other argument, or None for zero.
        """
        checks.function(forward, "defvjp: forward")
        checks.function(backward, "defvjp: backward")
        self._forward, self._backward = forward, backward
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        if kwargs:
            bound = inspect.signature(self._fn).bind(*args, **kwargs)
            bound.apply_defaults()
            args = bound.args
        if self._forward is None or self._backward is None:
            raise InputError(f"{self!r} has no rule yet; give it one by defvjp(forward, backward)")
        seen = tracing() or _has_history(args)
        return self._traced(args, self._forward, self._backward) if seen else self._fn(*args)

    def _traced(self, args: tuple[Any, ...], forward: Callable[..., Any], backward: Callable[..., Any]) -> Result:
        before = number()
        fixed = {k: args[k] for k in self._fixed}
        free = tuple(x for k, x in enumerate(args) if k not in fixed)

        def whole(fn: Callable[..., Any]) -> Callable[..., Any]:
            def call(*some: Any) -> Any:
                rest = iter(some)
                return fn(*(fixed[k] if k in fixed else next(rest) for k in range(len(args))))

            call.__name__ = getattr(fn, "__name__", "function")
            return call

        given, made, body = _run(whole(self._fn), (free, {}), "arguments", before)
        _, pair, ahead = _run(whole(forward), (free, {}), "arguments", before)
        results, residuals = _pair(pair)
        results = matched(results, made, f"{self!r}: the forward rule's results")
        behind, cotangents = self._behind(backward, tuple(fixed.values()), given, made, residuals, before)
        body.finish(made.parts)
        ahead.finish([*results.parts, *residuals.parts])
        behind.finish(cotangents)
        captured = list({key_of(x): x for r in (body, ahead, behind) for x in r.captured}.values())
        body.share(captured)
        ahead.share(captured)
        kept = len(residuals.parts)
        ahead.graph.outputs += [ahead.known[key_of(x)] for x in captured]
        behind.share(captured)
        # the backward graph takes residuals, what is captured, and cotangents; captured values get no cotangents
        g = behind.graph
        many = len(made.parts)
        own, seeds, outer = g.inputs[:kept], g.inputs[kept : kept + many], g.inputs[kept + many :]
        g.inputs = [*own, *outer, *seeds]
        b = Builder(g)
        g.outputs += [b.expand(b.constant(0, dtype=v.type.dtype), shape=v.type.shape) for v in outer]
        done = values(
            "custom_vjp", [*given.parts, *captured], body=body.graph, forward=ahead.graph, backward=behind.graph
        )
        return made.again(done)  # type: ignore[no-any-return]

    def _behind(
        self, backward: Callable[..., Any], fixed: Sequence[Any], given: Pack, made: Pack, residuals: Pack, before: int
    ) -> tuple[Region, list[Lazy]]:
        """The region of the backward rule, and a cotangent for each operand."""
        kept, seeds = ([_stand_in(p) for p in x.parts] for x in (residuals, made))
        found = backward(*fixed, residuals.again(kept), made.again(seeds))
        if not isinstance(found, (tuple, list)):
            raise InputError(f"{self!r}: the backward rule gives a tuple of cotangents, got {a_type(found)}")
        trees = given.again(given.parts)[0]
        if len(found) != len(trees):
            have, expected = count(len(found), "cotangent"), count(len(trees), "argument")
            raise InputError(f"{self!r}: the backward rule gives {have} for {expected}")
        parts: list[Lazy] = []
        for k, (c, x) in enumerate(zip(found, trees)):
            want = _arrays(x, f"argument {k}")
            if c is None:
                parts += [apply("full", shape=p.type.shape, value=0, dtype=p.type.dtype) for p in want.parts]
                continue
            parts += matched(pack(c, f"argument {k}"), want, f"{self!r}: the backward rule").parts
        names = [f"x{k}" for k in range(len(kept) + len(seeds))]
        return Region("backward", [*kept, *seeds], names, before), parts


def _pair(made: Pack) -> tuple[Pack, Pack]:
    """The results and the residuals that a forward rule gives."""
    tree: Any = made.again(made.parts)
    if not isinstance(tree, tuple) or len(tree) != 2:
        raise InputError("custom_vjp: the forward rule gives a pair (results, residuals)")
    first = sum(path.startswith("result.0") for path in made.paths)
    parts = []
    for k, (lo, hi) in enumerate(((0, first), (first, len(made.arrays)))):
        _, shape = flatten(tree[k], "result", Rules((int, float, complex, bool), any=True))
        paths = tuple("result" + p[len("result.0") :] for p in made.paths[lo:hi])
        parts.append(Pack(shape, made.arrays[lo:hi], paths, made.weak[lo:hi]))
    return parts[0], parts[1]


def custom_vjp(fn: Callable[..., Result], nondiff_argnums: Sequence[int] = ()) -> CustomVjp[Result]:
    """A function whose gradient its author gives: `f.defvjp(forward, backward)`.

    Args:
        fn: takes and gives arrays, or trees of arrays.
        nondiff_argnums: positional arguments that are no arrays, or have no cotangents; the backward rule gets them
            first.

    Example:
        @dnnc.custom_vjp
        def clipped(x): return x
        clipped.defvjp(lambda x: (x, None), lambda _, g: (xp.clip(g, -1, 1),))
    """
    checks.function(fn, "custom_vjp")
    return CustomVjp(fn, tuple(nondiff_argnums))
