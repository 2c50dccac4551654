"""`recurrence`: a loop of known length as one op with one result, so that a kernel may run all of its steps.

The operands, the body and the attributes are those of `loop`, without a condition. Carried and stacked values are all
[batch, hidden]; the result is [stacked * length + carried, batch, hidden]: stacked rows, then the last states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.core import Graph, Value
from dnnc.ir.op import OpDef, Trait, require
from dnnc.ir.ops.control import CONTROL_OPS
from dnnc.ir.types import Dim, TensorType, product

Array = np.ndarray[Any, Any]
LOOP = next(op for op in CONTROL_OPS if op.name == "loop")


def _type(
    *rest: TensorType, body: Graph, carried: int, scanned: int = 0, length: int = 1, backward: tuple[bool, ...] = ()
) -> TensorType:
    made = LOOP.type(None, None, *rest, body=body, carried=carried, scanned=scanned, length=length, backward=backward)
    require(carried > 0 and length > 0, "a recurrence of {} steps carries {} values", length, carried)
    rows = [*made[:carried], *(TensorType(t.dtype, t.shape[1:]) for t in made[carried:])]
    ok = all(t == rows[0] for t in rows)
    require(ok, "the states of a recurrence have one type, got {}", ", ".join(map(str, rows)))
    require(rows[0].rank == 2, "the states of a recurrence are [batch, hidden], got {}", rows[0])
    return TensorType(rows[0].dtype, (length * (len(made) - carried) + carried, *rows[0].shape))


def _reference(*rest: Array, body: Callable[..., list[Array]], carried: int, length: int, **attrs: Any) -> Array:
    assert LOOP.reference is not None
    made = LOOP.reference(None, None, *rest, body=body, carried=carried, length=length, **attrs)
    return np.concatenate([*made[carried:], np.stack(made[:carried])])


def _decompose(b: Builder, *rest: Value, body: Graph, carried: int, **attrs: Any) -> Any:
    made = b.op("loop", None, None, *rest, body=body.copy(), carried=carried, **attrs)
    parts = (
        [*made[carried:], *(b.unsqueeze(v, axes=(0,)) for v in made[:carried])]
        if isinstance(made, tuple)
        else [b.unsqueeze(made, axes=(0,))]
    )
    return parts[0] if len(parts) == 1 else b.concat(*parts, axis=0)


def _flops(*rest: TensorType, body: Graph, length: int = 1, **attrs: Any) -> Dim:
    """Those of the products."""
    total: Any = 0
    for n in body.nodes():
        if n.op.name == "matmul" and n.inputs[0] is not None:
            total = total + 2 * length * product(n.output.type.shape) * n.inputs[0].type.shape[-1]
    return total  # type: ignore[no-any-return]


RECURRENCE_OPS: tuple[OpDef, ...] = (
    OpDef(
        "recurrence",
        _type,
        decompose=_decompose,
        reference=_reference,
        flops=_flops,
        traits=frozenset((Trait.PURE, Trait.LOOPS, Trait.SEQUENTIAL, Trait.RECURRENT)),
    ),
)
