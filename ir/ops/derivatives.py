"""Ops that say how to differentiate: without a derivative they are what they are made of, and cost nothing.

`call`, `checkpoint` and `custom_vjp` hold a function as a graph that reads nothing but its inputs. `recomputed` marks a
value from which a function is computed again: it is the value, but no two marks of different moments merge.
"""

from __future__ import annotations

from typing import Any

from dnnc.ir import te
from dnnc.ir.autodiff.rules import functions as rules
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Graph, Value
from dnnc.ir.graph.expand import inline
from dnnc.ir.op import MOVEMENT, PURE, Cost, OpDef, require
from dnnc.ir.ops.common import sample
from dnnc.ir.te import Tensor
from dnnc.ir.types import TensorType


def _body_type(*operands: TensorType, body: Graph) -> tuple[TensorType, ...]:
    got = [v.type for v in body.inputs]
    require(got == list(operands), "the body {} takes {}, {} are there", body.name, got, list(operands))
    return tuple(v.type for v in body.outputs)


def _custom_type(*operands: TensorType, body: Graph, forward: Graph, backward: Graph) -> tuple[TensorType, ...]:
    """`forward`: operands -> results and residuals; `backward`: residuals, cotangents of results -> of operands."""
    results = _body_type(*operands, body=body)
    made = [v.type for v in forward.outputs]
    ok = [v.type for v in forward.inputs] == list(operands) and tuple(made[: len(results)]) == results
    require(ok, "the forward rule of {} takes and gives other types than the function", body.name)
    ok = [v.type for v in backward.inputs] == [*made[len(results) :], *results]
    require(ok, "the backward rule of {} takes other types than residuals and cotangents", body.name)
    ok = [v.type for v in backward.outputs] == list(operands)
    require(ok, "the backward rule of {} gives other types than {}", body.name, list(operands))
    return results


def _inlined(b: Builder, *operands: Value, body: Graph, **rules: Any) -> list[Value]:
    return inline(b, body, operands)


def _first(x: Tensor, token: Tensor) -> Tensor:
    return te.compute(x.dims, x.dtype, lambda *i: x[i])


DERIVATIVE_OPS: tuple[OpDef, ...] = (
    OpDef(
        "stop_gradient",
        lambda x: x,
        decompose=lambda b, x: x,
        traits=PURE,
        samples=(sample("f32[2, 3]"), sample("f16[5]"), sample("i64[4]")),
        vjp=rules.no_cotangent,
        jvp=rules.no_tangent,
    ),
    OpDef(
        "recomputed",
        lambda x, token: x,
        _first,
        reference=lambda x, token: x,
        traits=MOVEMENT,
        samples=(sample("f32[2, 3]", "f32[4]"), sample("f16[5]", "f64[]")),
        vjp=rules.recomputed,
    ),
    OpDef("call", _body_type, decompose=_inlined, traits=PURE, cost=Cost.HEAVY),
    OpDef("checkpoint", _body_type, decompose=_inlined, traits=PURE, vjp=rules.checkpoint),
    OpDef("custom_vjp", _custom_type, decompose=_inlined, traits=PURE, vjp=rules.custom_vjp),
)
