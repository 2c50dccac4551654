"""Functions of arrays whose recordings are kept: for arguments of the same types they record the same ops, unchecked.

A convolution checks its arguments, makes attributes of them and infers types. All of that follows from the types of its
arrays and from its other arguments: a loop of define-by-run needs it once, and later calls replay the ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from operator import itemgetter
from typing import Any, ParamSpec, TypeVar

import numpy as np

from dnnc.array.core import Array, fresh
from dnnc.array.lazy import DEEPEST, DEEPEST_TRACKED, Call, Lazy
from dnnc.ir.lru import LRU

MOST = 1024  # recordings that a function keeps
P = ParamSpec("P")
R = TypeVar("R")


def replayed(fn: Callable[P, R]) -> Callable[P, R]:
    """A function whose ops are recorded again without running it, for arrays of the same types and equal options.

    The result must be one array or a tuple of arrays and follow from the arguments alone, without an array's contents
    being read. The function runs as it is where arguments are traced, complex, written to or have no hash.
    """
    known: LRU[Any, Recording] = LRU(MOST)

    @wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        given: dict[Lazy | None, int] = {None: 0}
        words: list[Any] = [*kwargs]
        for a in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(a, Array):
                p = a._parts[0]
                if p.traced or len(a._parts) > 1:
                    return fn(*args, **kwargs)
                words += (p.type.dtype, p.type.shape, p.device, given.setdefault(p, len(given)))
            else:  # True equals 1, and -0.0 equals 0.0
                words += (float, str(a)) if type(a) is float and not a else (type(a), a)
        key = tuple(words)
        try:
            found = known.find(key)
        except TypeError:
            return fn(*args, **kwargs)
        if found is not None:
            made = found.replay([*given])
            if made is not None:
                return made  # type: ignore[no-any-return]
        result = fn(*args, **kwargs)
        written = (a for a in (*args, *kwargs.values()) if isinstance(a, Array) and a._parts[0] not in given)
        if found is None and len(given) > 1 and not any(True for _ in written):
            new = Recording.of([*given], result)
            if new is not None:
                known[key] = new
        return result

    return call


class Recording:
    """The calls between operands and results. All values have numbers: 0 for none, then operands, captured ones, made.

    Attributes:
        captured: numbers that the function has made values of; they live nowhere.
        steps: for each call its class, op, attributes, types and key, and its operands.
        devices: of values that live elsewhere than the operands of their calls.
        results: those of the function.
        single: is there one, which is no tuple?
    """

    __slots__ = ("captured", "devices", "results", "single", "steps")

    def __init__(self, given: Sequence[Lazy | None], results: Sequence[Lazy], single: bool, calls: list[Call]) -> None:
        numbers: dict[Any, int] = {x: k for k, x in enumerate(given)}
        leaves = (x for c in calls for x in c.inputs if x is not None and x.call is None and x not in numbers)
        self.captured = list(dict.fromkeys(leaves))
        for x in self.captured:
            numbers[x] = len(numbers)
        first = len(numbers)
        for c in calls:
            numbers[c] = first
            first += len(c.types)

        def number(x: Lazy | None) -> int:
            return numbers[x] if x in numbers or x is None else numbers[x.call] + x.index

        self.steps: list[Any] = []
        self.devices: dict[int, str | None] = {}
        for c in calls:
            self.steps.append((type(c), c.op, c.attrs, c.types, c.key, _picked([number(x) for x in c.inputs])))
        for x in (*results, *(i for c in calls for i in c.inputs if i is not None and i not in given)):
            if x.call is not None and x.device != x.call.device:
                self.devices[number(x)] = x.device
        self.results, self.single = [number(x) for x in results], single

    @classmethod
    def of(cls, given: Sequence[Lazy | None], result: Any) -> Recording | None:
        """How a function has computed its result; None where that cannot be replayed."""
        single = isinstance(result, Array)
        arrays = (result,) if single else result if type(result) is tuple else ()
        if not arrays or not all(isinstance(a, Array) for a in arrays):
            return None
        parts = [p for a in arrays for p in a._parts]
        calls = _calls(given, parts)
        if not calls or len(parts) > len(arrays) or any(p.call is None or p in given for p in parts):
            return None
        return cls(given, parts, single, calls)

    def replay(self, given: list[Lazy | None]) -> Any:
        """The results for other operands of the same types; None if they lie too deep."""
        values = given + self.captured
        for kind, op, attrs, types, key, operands in self.steps:
            call = kind(op, operands(values), attrs, types, key)
            if call.depth >= DEEPEST and (not call.tracked or call.depth >= DEEPEST_TRACKED):
                return None
            if len(types) == 1:
                values.append(Lazy(types[0], call))
            else:
                values += [Lazy(t, call, k) for k, t in enumerate(types)]
            if self.devices:  # ahead of the calls that read them
                for k, x in enumerate(values[-len(types) :], len(values) - len(types)):
                    x.device = self.devices.get(k, x.device)  # type: ignore[union-attr]
        if self.single:
            return fresh(values[self.results[0]])  # type: ignore[arg-type]
        return tuple([fresh(values[k]) for k in self.results])  # type: ignore[arg-type]


def _picked(numbers: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What gives the elements with these numbers."""
    if len(numbers) > 1:
        return itemgetter(*numbers)
    return lambda values: tuple([values[k] for k in numbers])


def _is_view(x: Lazy, of: Lazy | None) -> bool:
    return of is not None and isinstance(of.data, np.ndarray) and np.may_share_memory(np.asarray(x.data), of.data)


def _calls(given: Sequence[Lazy | None], results: Sequence[Lazy]) -> list[Call] | None:
    """The calls behind results, operands first; None where they lie in a trace or read an array from elsewhere."""
    known = set(given)
    done: dict[Call | None, None] = {}
    stack = list(results)
    while stack:
        x = stack[-1]
        c = x.call
        if x in known or c in done:
            stack.pop()
        elif c is None:
            if x.traced or x.device is not None or x.type.shape or any(_is_view(x, of) for of in given):
                return None
            known.add(x)
        elif c.traced or c.along:
            return None
        else:
            waiting = [i for i in c.inputs if i not in known and i.call not in done]  # type: ignore[union-attr]
            if not waiting:
                done[c] = None
            stack += waiting  # type: ignore[arg-type]
    return list(done)  # type: ignore[arg-type]
