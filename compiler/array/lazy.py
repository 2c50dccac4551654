"""Lazy values: what an array is before anybody looks at it.

A Lazy is one result of an op that has not run (`call`), a buffer (`data`; a NumPy array, or DeviceData on a CUDA
device), or neither: a placeholder, which stands for an argument of a traced function. `materialise` makes one program
of all that is asked for and replaces it by buffers; `graph_of` makes the same graph for a trace.

Programs are found again by their structure: ops, attributes, types and wiring. Data is no part of it, numbers of the
user's included: they are operands without axes, so `x * 0.1` and `x * 0.2` share a program. Results of which an array
still knows become results of the program too, where computing them again would cost: those of products, reductions and
sorts at once, element-wise ones the second time.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from typing import Any

import numpy as np

from dnnc.array.devices import HOST, DeviceData, common, place
from dnnc.array.lines import no_data, user_line
from dnnc.array.sizes import seen
from dnnc.array.structure import FLAT_SIZE, TRACKED, Reached, flat_shape, graph_of, graph_of_call, open_types
from dnnc.ir.dtype import DType, from_numpy
from dnnc.ir.errors import InputError, Loc
from dnnc.ir.expr import Expr
from dnnc.ir.graph.attributes import complete
from dnnc.ir.graph.builder import infer
from dnnc.ir.lru import LRU
from dnnc.ir.op import Cost, OpDef
from dnnc.ir.ops import OPS
from dnnc.ir.types import TensorType

Array = np.ndarray[Any, Any]
FLAT_THERE = 1 << 22  # the same on a CUDA device, where a new program costs more
PROGRAMS = 512  # programs kept in a process
# calls on top of each other: unread chains are computed piece by piece, and pieces of a loop are one program
DEEPEST = 64
# the same of what depends on an array that requires a gradient: forward and backward are one program
DEEPEST_TRACKED = 4096
HEAVY = Cost.HEAVY
RULES = 4096  # applications of ops of which the types are kept
_RECORDING: ContextVar[bool] = ContextVar("dnnc_recording", default=True)


def recording() -> bool:
    """Do results have a history, outside of `no_grad`?"""
    return _RECORDING.get()


@contextmanager
def no_grad() -> Iterator[None]:
    """Within it, results have no history: `backward` ends at them, and nothing is kept for it. Also a decorator."""
    token = _RECORDING.set(False)
    try:
        yield
    finally:
        _RECORDING.reset(token)


class Call:
    """One application of an op. `key`: its structure; `device`: of operands. Traced: rising `number`, `locs`.

    Tracked: an operand depends on an array that requires a gradient, see `dnnc.frontends.trace.backward`. `along`:
    values that are computed together with the results.
    """

    __slots__ = (
        "along", "attrs", "depth", "device", "heavy", "inputs", "key", "locs", "number", "op", "traced",
        "tracked", "types",
    )  # fmt: skip
    counted = itertools.count(1)
    heavy: bool
    traced: bool
    tracked: int

    def __init__(
        self,
        op: OpDef,
        inputs: tuple[Lazy | None, ...],
        attrs: dict[str, Any],
        types: tuple[TensorType, ...],
        key: Any = None,
    ) -> None:
        self.op, self.inputs, self.attrs, self.types = op, inputs, attrs, types
        self.key = key or (op.name, *attrs.values())
        self.number = 0
        self.locs: tuple[Loc, ...] = ()
        self.along: tuple[weakref.ref[Lazy], ...] = ()
        depth, traced, heavy, tracked = 0, False, op.cost is HEAVY, False
        device: str | None = None
        for x in inputs:
            if x is None:
                continue
            call, place = x.call, x.device
            if call is not None:
                if x.depth > depth:
                    depth = x.depth
                heavy = heavy or call.heavy
            if x.traced:
                traced = True
            if x.tracked:
                tracked = True
            if place is not device and place is not None and place != device:
                if device is not None and not any(i is not None and i.traced for i in inputs):
                    common(op.name, [i.device for i in inputs if i is not None])
                device = place
        self.depth, self.traced, self.heavy = depth + 1, traced, heavy
        self.tracked = TRACKED if tracked and _RECORDING.get() else 0
        self.device = None if traced else device

    def trace(self) -> None:
        """Say where in the user's code, and in which order of the trace, this is."""
        self.number, self.locs = next(self.counted), (user_line()[0],)


class Untracked(Call):
    """A call that gradients end at. It counts as one op deep, however deep its operands lie."""

    __slots__ = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tracked, self.depth = 0, 1


class Lazy:
    """One value; see above. `owner`: weak reference to the user's array. `device`: None for a neutral value.

    A value that is TRACKED has a history that outlives its computation: `origin` is the call that computed it. At a
    ROOT the history begins; `root` is a weak reference to the array whose gradient is asked for. `step`: what is
    computed along.
    """

    __slots__ = (
        "__weakref__", "call", "data", "depth", "device", "index", "origin", "owner", "root", "seen", "step", "traced",
        "tracked", "type",
    )  # fmt: skip

    depth: int
    device: str | None
    traced: bool
    tracked: int
    origin: Call
    root: weakref.ref[Any]

    def __init__(
        self,
        type: TensorType,
        call: Call | None = None,
        index: int = 0,
        data: Array | DeviceData | None = None,
        device: str | None = None,
    ) -> None:
        self.type, self.call, self.index, self.data = type, call, index, data
        if call is None:
            self.device, self.depth, self.traced, self.tracked = device, 0, data is None, 0
        else:
            self.device, self.depth, self.traced = call.device, call.depth, call.traced  # by a placeholder
            self.tracked = call.tracked
        self.seen = False  # computed once within a program that did not keep it
        self.step: Step | None = None
        self.owner: weakref.ref[Any] | None = None

    @property
    def heavy(self) -> bool:
        return self.call is not None and self.call.heavy

    @property
    def shape(self) -> tuple[int, ...]:
        """Integers, and a Size (which computes like one) for what a trace does not know."""
        for d in self.type.shape:
            if type(d) is not int:
                return tuple(map(seen, self.type.shape))
        return self.type.shape  # type: ignore[return-value]


class Step:
    """The arrays of one `backward`, which become one program: its result, the arrays that require a gradient, theirs,
    and arrays whose history was cut meanwhile.

    All are known by weak references. An array that was written to meanwhile, as an optimizer does, counts as it is now.
    `history`: how the result is computed, until it is.
    """

    __slots__ = ("history", "result", "roots")

    def __init__(self, result: weakref.ref[Any], roots: Sequence[weakref.ref[Any]], history: Any = None) -> None:
        self.result, self.roots, self.history = result, list(roots), history

    def values(self) -> list[Lazy]:
        """What is not computed yet."""
        arrays = [a for ref in (self.result, *self.roots) if (a := ref()) is not None]
        arrays += [a._grad for a in arrays if a._grad is not None]
        return [p for a in arrays for p in a._parts if p.call is not None and not p.traced]


def results(call: Call) -> list[Lazy]:
    """What a call gives; results without elements are there already."""
    return [nothing(t, call.device) if 0 in t.shape else Lazy(t, call, k) for k, t in enumerate(call.types)]


def leaf(data: Any, device: str | None = HOST) -> Lazy:
    """A buffer as a value, copied only if it is not contiguous. `device`: of a NumPy array; None if neutral."""
    if isinstance(data, DeviceData):
        return Lazy(TensorType(from_numpy(data.dtype), data.shape), data=data, device=data.place.name)
    a = np.ascontiguousarray(data) if np.ndim(data) else np.asarray(data)
    return Lazy(TensorType(from_numpy(a.dtype), a.shape), data=a, device=device)


def compute_along(x: Lazy, *values: Lazy) -> None:
    """Let values that depend on the call of x be computed with its results, if anybody still holds them then.

    These are running statistics: nobody asks for them, and each call adds to how the last ones were computed.
    """
    if x.call is not None and not x.traced:
        x.call.along += tuple(map(weakref.ref, values))


def placeholder(type: TensorType) -> Lazy:
    """An argument of a function that is traced."""
    return Lazy(type)


def apply(name: str, *inputs: Lazy | None, **attrs: Any) -> Lazy:
    """The result of an op with one. ShapeError where the operands' types do not fit."""
    return apply_all(name, *inputs, **attrs)[0]


def apply_binary(name: str, x: Lazy, y: Lazy) -> Lazy:
    """The same of an op of two operands without attributes: most of what expressions are made of."""
    if x.traced or y.traced:
        return apply_all(name, x, y)[0]
    s, t = x.type, y.type
    op, full, types, key = _plain(name, s.dtype, s.shape, t.dtype, t.shape)
    call = Call(op, (x, y), full, types, key)
    most = DEEPEST_TRACKED if call.tracked else DEEPEST
    return Lazy(types[0], call) if call.depth < most and 0 not in types[0].shape else apply_all(name, x, y)[0]


def apply_unary(name: str, x: Lazy) -> Lazy:
    """The same of one operand."""
    if x.traced:
        return apply_all(name, x)[0]
    op, full, types, key = _plain(name, x.type.dtype, x.type.shape)
    call = Call(op, (x,), full, types, key)
    most = DEEPEST_TRACKED if call.tracked else DEEPEST
    return Lazy(types[0], call) if call.depth < most and 0 not in types[0].shape else apply_all(name, x)[0]


def apply_all(name: str | OpDef, *inputs: Lazy | None, **attrs: Any) -> tuple[Lazy, ...]:
    """The results of an op, which is one of OPS or a record of its own."""
    op, full, types, key = _rules(name, inputs, attrs)
    call = Call(op, inputs, full, types, key)
    if key is None and full and not call.traced and depends(call):  # without attributes the operands decide
        call.traced, call.device = True, None
    made = tuple([Lazy(t, call, k) for k, t in enumerate(types)])
    if made[0].traced:
        call.trace()
        return made
    for t in types:
        if 0 in t.shape:  # nothing to compute
            return tuple(nothing(t, x.device) if 0 in t.shape else x for t, x in zip(types, made))
    if call.depth >= (DEEPEST_TRACKED if call.tracked else DEEPEST):
        materialise([x for x in inputs if x is not None and x.call is not None])
        call.depth = 1
        return tuple(Lazy(t, call, k) for k, t in enumerate(types))
    return made


# An op, all of its attributes, the types of its results, the words for it in structures.
Applied = tuple[OpDef, dict[str, Any], tuple[TensorType, ...], Any]


def _rules(name: str | OpDef, inputs: tuple[Lazy | None, ...], attrs: dict[str, Any]) -> Applied:
    """What an op gives. Its words are None where a size may be in it."""
    flat = _words(inputs, attrs) if type(name) is str else None
    if flat is not None:
        return _typed(name, tuple(attrs), *flat) if attrs else _plain(name, *flat)
    op = OPS[name] if isinstance(name, str) else name
    full = complete(op, attrs)
    return op, full, tuple(infer(op, inputs, full)), None  # type: ignore[arg-type]  # a rule reads the types alone


def _words(inputs: tuple[Lazy | None, ...], attrs: dict[str, Any]) -> list[Any] | None:
    """Attributes, then the dtype and the shape of each operand; None unless equal words mean the same."""
    flat: list[Any] = []
    for a in attrs.values():
        kind = type(a)
        if kind is tuple:
            for d in a:
                if type(d) is not int:
                    return None
        elif kind not in _EXACT and not (kind is float and (a > 0 or a < 0)):
            return None
        flat.append(a)
    for x in inputs:
        if x is None or x.traced:
            return None
        flat += (x.type.dtype, x.type.shape)
    return flat


_EXACT = {bool, int, str, DType}  # equal ones are the same, as zeros of floats are not


@lru_cache(RULES)
def _plain(name: str, *operands: Any) -> Applied:
    """The same of an op without attributes."""
    return _typed(name, (), *operands)


@lru_cache(RULES, typed=True)
def _typed(name: str, names: tuple[str, ...], *given: Any) -> Applied:
    """The same of an op with attributes of these names, which stand ahead of the operands in `given`."""
    op = OPS[name]
    full = complete(op, dict(zip(names, given)))
    operands = given[len(names) :]
    values = [Lazy(TensorType(d, shape)) for d, shape in zip(operands[::2], operands[1::2])]
    key = repr((name, *full.values()))  # text, whose hash is computed once
    return op, full, tuple(infer(op, values, full)), key  # type: ignore[arg-type]


def depends(call: Call) -> bool:
    """Does a call need a size that a trace does not know?"""
    return not all(t.static for t in call.types) or any(_holds_size(a) for a in call.attrs.values())


def _holds_size(a: Any) -> bool:
    return isinstance(a, Expr) or (type(a) is tuple and any(isinstance(d, Expr) for d in a))


def nothing(t: TensorType, device: str | None) -> Lazy:
    """A value without elements."""
    shape: tuple[int, ...] = t.shape  # type: ignore[assignment]
    if device in (None, HOST):
        return Lazy(t, data=np.empty(shape, t.dtype.numpy), device=device)
    return Lazy(t, data=DeviceData(place(str(device)), 0, shape, t.dtype.numpy, None, 0), device=device)


# --- programs ---------------------------------------------------------------------------------------------------------

Program = Callable[[Sequence[Array]], list[Array]]


class Programs:
    """The programs of this process by their structure, the last PROGRAMS used."""

    def __init__(self) -> None:
        self.made: LRU[Any, Any] = LRU(PROGRAMS)  # None: there is no flat one
        self.lock = threading.RLock()
        self.compiled = 0  # programs made so far
        self.last: Any = None

    def get(self, reached: Reached, outputs: Sequence[Lazy], device: str = HOST) -> Program:
        key = device, reached.structure(outputs)
        with self.lock:
            found = self.made.find(key)
            if found is None:
                found = self._enter(
                    key, compiler(device).compile(lambda: graph_of(outputs, list(reached.leaves))[0], repr(key[1]))
                )
            self.last = found
            return found  # type: ignore[no-any-return]

    def _enter(self, key: Any, program: Any) -> Any:
        self.made[key] = program
        self.compiled += program is not None
        return program

    def run(self, reached: Reached, outputs: Sequence[Lazy], device: str = HOST) -> list[Any]:
        """The contents of `outputs`, computed on a device."""
        data = [x.data for x in reached.leaves if x.data is not None]
        shape = flat_shape(reached.calls, reached.leaves, outputs, FLAT_SIZE if device == HOST else FLAT_THERE)
        if shape is not None:
            key = "flat", device, reached.structure(outputs, flat=True)
            with self.lock:
                if key not in self.made:
                    self._enter(
                        key,
                        compiler(device).compile_flat(
                            lambda: graph_of(outputs, list(reached.leaves), flat=True)[0], repr(key[2])
                        ),
                    )
                found = self.made[key]
            if found is not None:
                self.last = found
                return found.flat(data, shape, math.prod(shape))  # type: ignore[no-any-return]
        program = self.opened(reached, outputs, device) or self.get(reached, outputs, device)
        return program(data)  # type: ignore[arg-type]

    def opened(self, reached: Reached, outputs: Sequence[Lazy], device: str = HOST) -> Program | None:
        """The program of one call that serves other sizes, too; None where there is none."""
        types = open_types(reached, outputs) if len(reached.calls) == 1 else None
        if types is None:
            return None
        (call,) = reached.calls
        key = "open", device, call.key, tuple((t.dtype.name, t.shape) for t in types)
        with self.lock:
            if key not in self.made:
                self._enter(key, compiler(device).compile(lambda: graph_of_call(call, types)))
            found = self.last = self.made[key]
        return found  # type: ignore[no-any-return]


@cache
def compiler(device: str = HOST) -> Any:
    """What makes programs for a device in this process; loaded at the first one."""
    from dnnc.array.expressions import ExpressionCompiler  # loads the compiler, which values alone do without

    return ExpressionCompiler(None if device == HOST else place(device))


PROGRAMS_MADE = Programs()


def materialise(roots: Iterable[Lazy], begun: frozenset[Step] = frozenset()) -> None:
    """Compute values, so that each has its buffer. InputError: a value depends on an argument under tracing.

    Values of a step of define-by-run are computed with the others of it, but for the steps that have `begun`.
    """
    groups: dict[str | None, list[Lazy]] = {}
    known: set[Lazy] = set()
    steps: dict[Step, None] = {}
    for x in roots:
        if x.traced:
            raise InputError(no_data())
        if x.call is not None and x not in known:
            known.add(x)
            groups.setdefault(x.device, []).append(x)
            if x.step is not None:
                steps[x.step] = None
    for step in steps:
        for x in step.values() if step not in begun else ():
            if x not in known:
                known.add(x)
                groups.setdefault(x.device, []).append(x)
    for device, values in groups.items():  # one, but where somebody asks for several arrays at once
        _compute(values, device, begun.union(steps))


def _compute(wanted: Sequence[Lazy], device: str | None, begun: frozenset[Step]) -> None:
    """Compute values that live on one device; neutral ones are computed on the host, and stay neutral."""
    reached = Reached(wanted)
    steps = {step: written for step, written in reached.steps.items() if step not in begun} if reached.steps else {}
    if True in steps.values():  # what an earlier step wrote: that is a program of its own, which is found again
        earlier = [step for step, written in steps.items() if written]
        materialise([x for step in earlier for x in step.values()], begun.union(earlier))
        reached = Reached(wanted)
    if steps:
        known = set(wanted)
        along = [x for step in steps for x in step.values() if x not in known and x.device == device]
        wanted = [*wanted, *along]
        reached.reach(along)
    wanted = [*wanted, *_along(reached, wanted, device)]
    ahead = not steps and not begun and any(x.tracked == TRACKED for x in wanted)
    outputs = [*wanted, *_kept(reached.met, wanted, (device, None) if device in (None, HOST) else (device,), ahead)]
    results = PROGRAMS_MADE.run(reached, outputs, device or HOST)
    for x, r in zip(outputs, results):
        if x.tracked == TRACKED and x.call is not None:
            x.origin = x.call
        x.data, x.call, x.depth = r, None, 0
    for step in reached.steps:
        step.history = None


def _along(reached: Reached, wanted: Sequence[Lazy], device: str | None) -> list[Lazy]:
    """Values that are to be computed along with what was reached, which then is reached from them too."""
    out: list[Lazy] = []
    others = set(wanted)
    while reached.along:
        held, reached.along = [ref() for ref in reached.along], []
        live = [x for x in held if x is not None and x.call is not None and x.device == device and x not in others]
        new = list(dict.fromkeys(live))  # a call may be met by itself and in the history of a step
        reached.reach(new)
        others.update(new)
        out += new
    return out


def _kept(met: Iterable[Lazy], wanted: Sequence[Lazy], devices: tuple[str | None, ...], ahead: bool) -> list[Lazy]:
    """Return other values of these devices to keep: the user holds them, and they would be computed again.

    `ahead`: a tracked value is computed ahead of `backward`, which then reads what was expensive and not its operands.
    """
    out = []
    others = set(wanted)
    for x in met:
        owner = x.owner
        if owner is None or owner() is None:
            if ahead and x.tracked == TRACKED and x.call is not None and x.call.op.cost is HEAVY:
                if x.device in devices and x not in others:
                    out.append(x)
            continue
        if x.device not in devices or x in others:
            continue
        if x.seen or x.heavy:
            out.append(x)
        x.seen = True
    return out


def compute_results(made: Sequence[Lazy]) -> None:
    """Compute the results of a call that was just recorded, on the device where it runs. InputError: it is traced."""
    pending = [x for x in made if x.call is not None]
    if pending and pending[0].traced:
        raise InputError(no_data())
    if pending:
        _compute(pending, pending[0].device, frozenset())


def buffer(x: Lazy) -> Array | DeviceData:
    """The contents of a value, where it lives."""
    if x.data is None:
        if x.traced or x.step is not None or x.call is None:
            materialise([x])
        else:
            _compute([x], x.device, frozenset())
    assert x.data is not None
    return x.data
