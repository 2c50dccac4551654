"""Makes nodes from values: runs the type rule, inserts the node with its location, returns values."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dnnc.ir.dtype import DType
from dnnc.ir.errors import Loc, ShapeError, UnsupportedError, locations
from dnnc.ir.expr import Expr, unwrap
from dnnc.ir.graph.attributes import complete, show_attrs
from dnnc.ir.graph.core import Graph, Node, Value
from dnnc.ir.op import Attrs, OpDef, known_ops
from dnnc.ir.types import TensorType


class Builder:
    """Appends nodes, or inserts them in front of `before`. New nodes carry `locs`; both may be changed.

    `b.op("add", x, y)` and `b.add(x, y)` are the same. Operands are values, None for an absent optional input, or
    numbers and arrays, which become constants (Python numbers of the first operand's dtype). Attributes are keywords.
    """

    def __init__(
        self,
        graph: Graph,
        before: Node | None = None,
        locs: tuple[Loc, ...] = (),
        ops: Mapping[str, OpDef] | None = None,
    ) -> None:
        self.graph, self.before, self.locs = graph, before, locs
        self._ops = ops

    @property
    def ops(self) -> Mapping[str, OpDef]:
        """The known ops by name."""
        if self._ops is None:
            self._ops = known_ops()
        return self._ops

    def op(self, op: str | OpDef, /, *operands: Any, **attrs: Any) -> Any:
        """Add a node.

        Returns its output, or a tuple of them when the op has several. Missing attributes take their defaults.
        UnsupportedError: there is no op of that name. ShapeError: the operands' types do not fit; says the op, the
        types, the attributes and the source.
        """
        record = op if isinstance(op, OpDef) else find_op(self.ops, op)
        node = self.node(record, self.operands(operands), attrs)
        return node.outputs[0] if len(node.outputs) == 1 else tuple(node.outputs)

    def node(self, op: OpDef, inputs: Sequence[Value | None], attrs: Attrs, names: Sequence[str] = ()) -> Node:
        """Add a node whose operands are values already; `names` are wishes for its outputs' names."""
        full = complete(op, attrs)
        node = Node(op, inputs, full, infer(op, inputs, full, self.locs), self.locs, names)
        return self.graph.append(node) if self.before is None else self.graph.insert_before(node, self.before)

    def operands(self, given: Sequence[Any]) -> list[Value | None]:
        """Values as they are; numbers and arrays as constants."""
        out: list[Value | None] = []
        for x in given:
            if x is None or isinstance(x, Value):
                out.append(x)
            elif isinstance(x, (bool, int, float)):
                out.append(self.constant(x, dtype=_dtype_for(x, given)))
            else:
                out.append(self.constant(x))
        return out

    def constant(self, array: Any, name: str | None = None, dtype: DType | None = None) -> Value:
        """A constant with the given content: an array, a number, or nested lists of numbers; `dtype` converts it."""
        a = np.asarray(array, dtype=None if dtype is None else dtype.numpy)
        return self.graph.constant(a, name, self.locs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_") or name == "ops" or name not in self.ops:
            raise AttributeError(f"there is no op {name}")
        return functools.partial(self.op, name)


def _dtype_for(x: bool | int | float, given: Sequence[Any]) -> DType | None:
    """The dtype of a number that stands among operands: that of the first value."""
    lead = next((v.type.dtype for v in given if isinstance(v, Value)), None)
    if lead is not None and isinstance(x, float) and lead.kind not in "fc":
        raise ShapeError(f"the number {x} stands beside {lead} operands; make it an integer or cast them")
    return lead


def find_op(ops: Mapping[str, OpDef], name: str) -> OpDef:
    """The record of an op. UnsupportedError with similar names if there is none."""
    found = ops.get(name)
    if found is None:
        near = difflib.get_close_matches(name, ops, 3)
        raise UnsupportedError(f"there is no op {name!r}" + (f"; did you mean {', '.join(near)}?" if near else ""))
    return found


def infer(op: OpDef, inputs: Sequence[Value | None], attrs: Attrs, locs: tuple[Loc, ...] = ()) -> list[TensorType]:
    """Run the type rule on logical shapes. ShapeError says op, operand types, attributes and source."""
    types = [
        None if v is None else v.type if v.type.row_major else TensorType(v.type.dtype, v.type.shape) for v in inputs
    ]
    try:
        found = op.type(*types, **attrs)
    except ShapeError as e:
        raise ShapeError(_context(op, types, attrs, locs, str(e))) from e
    except TypeError as e:
        if _fits(op, types, attrs):
            raise  # not the call itself: an error inside the rule
        raise ShapeError(_context(op, types, attrs, locs, f"wrong operands or attributes: {e}")) from e
    many = tuple(found) if isinstance(found, (tuple, list)) else (found,)
    out = [t if all(type(d) is int for d in t.shape) else _normal_type(t) for t in many]
    for t in out:
        if any(isinstance(d, int) and d < 0 for d in t.shape):
            raise ShapeError(_context(op, types, attrs, locs, f"the result {t} has a negative dim"))
    return out


def _fits(op: OpDef, types: Sequence[TensorType | None], attrs: Attrs) -> bool:
    """Does the type rule take that many operands and these attributes?"""
    try:
        inspect.signature(op.type).bind(*types, **attrs)
    except TypeError:
        return False
    return True


def _normal_type(t: TensorType) -> TensorType:
    return TensorType(t.dtype, tuple(unwrap(d) if isinstance(d, Expr) else int(d) for d in t.shape), t.encoding)


def _context(op: OpDef, types: Sequence[TensorType | None], attrs: Attrs, locs: tuple[Loc, ...], message: str) -> str:
    shown = ", ".join(map(str, types))
    given = show_attrs(op, attrs)
    return f"{op.name}({shown}{', ' + given if given else ''}){locations(locs)}: {message}"
