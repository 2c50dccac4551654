"""Control flow: loops and branches, whose bodies are graphs of their own.

A body reads nothing but its inputs. Those of a loop are the iteration's number (i64[]), the carried values, one row of
each scanned operand, and the captured values; its results are the condition (where there is one), the new carried
values and one row of each stacked result. A loop ends after `trips` iterations or when its condition is false,
whichever comes first; without stacked results the number of iterations may be known at run time only. Its gradient
keeps the state of every `checkpoint`-th iteration and computes those in between again; 0: it keeps all that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.ir import te
from dnnc.ir.autodiff import control as rules
from dnnc.ir.dtype import boolean, i64
from dnnc.ir.expr import const, select
from dnnc.ir.graph.core import Graph
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import PURE, OpDef, Trait, require
from dnnc.ir.ops.common import rows_flops, sample
from dnnc.ir.te import Tensor
from dnnc.ir.types import Dim, TensorType

Array = np.ndarray[Any, Any]
Types = tuple["TensorType | None", ...]
CONTROL = frozenset((Trait.CONTROL, Trait.PURE))


def _loop_type(
    trips: TensorType | None,
    condition: TensorType | None,
    *rest: TensorType,
    body: Graph,
    carried: int,
    scanned: int = 0,
    length: Dim | None = None,
    backward: tuple[bool, ...] = (),
    checkpoint: int = 0,
) -> tuple[TensorType, ...]:
    require(checkpoint >= 0, "a loop keeps its state every so many iterations, not {}", checkpoint)
    for t, what, dtype in ((trips, "trips", i64), (condition, "condition", boolean)):
        ok = t is None or (t.dtype is dtype and t.rank == 0)
        require(ok, "the {} of a loop must be {}[], got {}", what, dtype, t)
    stacked = len(body.outputs) - carried - (condition is not None)
    require(stacked >= 0, "the body of a loop with {} carried values makes {} results", carried, len(body.outputs))
    ok = length is not None or not (scanned or stacked or trips is condition is None)
    require(ok, "a loop with rows, or without an end, needs a length")
    ok = len(backward) in (0, scanned + stacked)
    require(ok, "backward says {} of {} scanned and stacked values", len(backward), scanned + stacked)
    given = [v.type for v in body.inputs]
    ok = len(given) == 1 + len(rest)
    require(ok, "the body of the loop takes {} values, {} are there", len(given), 1 + len(rest))
    require(given[0] == TensorType(i64, ()), "the body's first input is the iteration, i64[], not {}", given[0])
    for k, (t, want) in enumerate(zip(rest, given[1:])):
        row = carried <= k < carried + scanned
        ok = not row or (t.rank > 0 and t.shape[0] == length)
        require(ok, "scanned operand {} must have {} rows, got {}", k, length, t)
        got = TensorType(t.dtype, t.shape[1:]) if row else t
        ok = (got.dtype, got.shape) == (want.dtype, want.shape)
        require(ok, "operand {} of the loop gives {}, the body takes {}", k, got, want)
    made = [v.type for v in body.outputs][condition is not None :]
    for k, (t, want) in enumerate(zip(made[:carried], rest[:carried])):
        require(t == want, "carried value {} is {} before and {} after an iteration", k, want, t)
    assert length is not None or stacked == 0
    return (*made[:carried], *(TensorType(t.dtype, (length, *t.shape)) for t in made[carried:]))  # type: ignore[arg-type]


def _loop(
    trips: Array | None,
    condition: Array | None,
    *rest: Array,
    body: Callable[..., list[Array]],
    carried: int,
    scanned: int = 0,
    length: int | None = None,
    backward: tuple[bool, ...] = (),
    checkpoint: int = 0,
) -> tuple[Array, ...]:
    limit = length if trips is None else int(trips) if length is None else min(int(trips), length)
    running = condition is None or bool(condition)
    state, rows, captured = list(rest[:carried]), rest[carried : carried + scanned], rest[carried + scanned :]
    stacked: list[list[Array]] = []
    back = backward or (False,) * 64

    def at(k: int, flip: bool) -> int:
        assert length is not None
        return length - 1 - k if flip else k

    k = 0
    while running and (limit is None or k < limit):
        made = body(np.int64(k), *state, *(x[at(k, flip)] for x, flip in zip(rows, back)), *captured)
        if condition is not None:
            running, made = bool(made[0]), made[1:]
        state = made[:carried]
        stacked = stacked or [[] for _ in made[carried:]]
        for column, row in zip(stacked, made[carried:]):
            column.append(row)
        k += 1
    if length is None:
        return tuple(state)
    require(k == length or not stacked, "a loop of {} rows ended after {}", length, k)
    if not length:  # the body tells the shapes of rows that it does not make
        made = body(np.int64(0), *state, *(np.zeros(x.shape[1:], x.dtype) for x in rows), *captured)
        made = made[(condition is not None) + carried :]
        return (*state, *(np.zeros((0, *y.shape), y.dtype) for y in made))
    rows_made = (
        np.stack(c[::-1] if flip else c) for c, flip in zip(stacked, (*back[scanned:], *(False,) * len(stacked)))
    )
    return (*state, *rows_made)


def _cond_type(condition: TensorType, *captured: TensorType, then: Graph, other: Graph) -> tuple[TensorType, ...]:
    require(condition.dtype is boolean and condition.rank == 0, "the condition must be bool[], got {}", condition)
    for g in (then, other):
        got = [v.type for v in g.inputs]
        require(got == list(captured), "the branch {} takes {}, {} are there", g.name, got, list(captured))
    a, b = ([v.type for v in g.outputs] for g in (then, other))
    require(a == b, "the branches make {} and {}", a, b)
    return tuple(a)


def _cond(
    condition: Array, *captured: Array, then: Callable[..., list[Array]], other: Callable[..., list[Array]]
) -> tuple[Array, ...]:
    return tuple((then if bool(condition) else other)(*captured))


def _within_type(x: TensorType, over: TensorType) -> TensorType:
    require(over == TensorType(i64, (2,)), "within_bound takes an i64[2], both 0 or both 1, got {}", over)
    return x


def _within(x: Tensor, over: Tensor) -> Tensor:
    ended = over[(call("guard", over[(const(0),)] * 2, 0, 2),)].eq(0)
    return te.compute(x.dims, x.dtype, lambda *i: select(ended, x[i], const(0, x.dtype.computed)))


def _within_numpy(x: Array, over: Array) -> Array:
    if over.any():
        raise IndexError("the condition of a loop still holds when its bound is reached")
    return x


CONTROL_OPS: tuple[OpDef, ...] = (
    OpDef(  # the result of a loop with a bound; an index outside of `over` where its condition still holds
        "within_bound",
        _within_type,
        _within,
        reference=_within_numpy,
        flops=rows_flops(1),
        traits=PURE,
        samples=(sample("f32[3, 2]", "i64[2]", domain=(0.0, 0.0)), sample("i32[]", "i64[2]", domain=(0.0, 0.0))),
        vjp=rules.within_bound_vjp,
    ),
    OpDef(
        "loop",
        _loop_type,
        reference=_loop,
        traits=CONTROL | {Trait.ITERATES},
        deciding=2,
        vjp=rules.loop_vjp,
        jvp=rules.loop_jvp,
    ),
    OpDef(
        "cond",
        _cond_type,
        reference=_cond,
        traits=CONTROL,
        deciding=1,
        vjp=rules.cond_vjp,
        jvp=rules.cond_jvp,
    ),
)
