"""Graph <-> text. The text is valid Python syntax, read with `ast` (spans for free), never executed.

    text     ::= {NAME: dim[low, high, divisor]} {definition} function       a dim that nothing is known of (>= 1) needs
                                                                             no declaration; a definition, of an op that
                                                                             is not dnnc's own: see `dnnc.ir.te.syntax`
    function ::= def NAME(input: type, ..., *, constant: type = data, ...): {function} {statement} return NAME, ...
    type     ::= f32[N, 2*N + 1] | f32 | f32[N, 64] @ "0 1/16 1%16"
    data     ::= 1.5 | [[1.0, inf], [nan, 2.0]] | const("sha256:0123456789abcdef")   left out: looked up by the name
    statement ::= NAME: type = op(operand, ..., attribute=literal, ...) | (NAME, NAME) = op(...) @ (type, type)
    operand  ::= NAME | None (absent)       by hand also: a nested call, a number or list (dtype of the first value
                                            beside it)
    literal  ::= numbers, strings, None, True, tuples, f32, f32[2, 3], 2*N, layout("0 1/16 1%16"),
                 the name of a nested function

An attribute that has the default of its op's type rule is not printed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NoReturn, TypeVar

import numpy as np

from dnnc.ir.dtype import BY_NAME, DType, i64
from dnnc.ir.encodings import parse_encoding
from dnnc.ir.errors import DnncError, ParseError, UnsupportedError, count
from dnnc.ir.expr import Expr, Var, const, dim, op, unwrap, var
from dnnc.ir.graph.builder import Builder, find_op
from dnnc.ir.graph.constant_text import read_inline, read_literal
from dnnc.ir.graph.core import Graph, Node, Value
from dnnc.ir.op import OpDef, known_ops
from dnnc.ir.te.syntax import Reader, read_op
from dnnc.ir.types import Dim, Encoding, Layout, TensorType, parse_layout

Order = TypeVar("Order", Layout, Encoding)


def read_definition(text: str) -> OpDef:
    """The record of an op by the text of its definition. ParseError where it is none."""
    *facts, d = ast.parse(text).body
    p = _Parser({}, {})
    for s in facts:
        p.declare(s)
    if not isinstance(d, ast.FunctionDef):
        _fail(d, "expected the definition of an op")
    return read_op(d, Reader(p.type, p.dims))


# --- parsing ----------------------------------------------------------------------------------------------------------

_BINARY: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%", ast.Lt: "<", ast.LtE: "<=",
    ast.Eq: "==", ast.NotEq: "!=",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^",
}  # fmt: skip
_NUMBERS = {"inf": float("inf"), "nan": float("nan")}


def parse(
    text: str, constants: Mapping[str, np.ndarray[Any, Any]] | None = None, ops: Mapping[str, OpDef] | None = None
) -> Graph:
    """Read a graph.

    Args:
        text: what `str(graph)` prints, or written by hand: calls may be nested and results need no type.
        constants: arrays for constants that are not inline, by content hash (as `load_constants` gives them) or by
            name.
        ops: the known ops; default all of dnnc's.

    ParseError: with line and column where the text is no graph, a type is wrong, or a constant's data is missing.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as e:
        raise ParseError(
            f"line {getattr(e, 'lineno', 1)}, column {getattr(e, 'offset', 1)}: {getattr(e, 'msg', e)}"
        ) from None
    p = _Parser(constants or {}, ops)
    if not tree.body or not isinstance(tree.body[-1], ast.FunctionDef):
        _fail(
            tree.body[-1] if tree.body else None,
            "expected dim declarations, then one `def NAME(...):`, and in front of it nothing but definitions of ops",
        )
    for s in tree.body[:-1]:
        if isinstance(s, ast.FunctionDef):
            p.define(s)
        else:
            p.declare(s)
    return p.function(tree.body[-1], {}, p.declared)


def _fail(node: ast.AST | None, message: str) -> NoReturn:
    raise ParseError(
        f"line {getattr(node, 'lineno', 1)}, column {getattr(node, 'col_offset', 0) + 1}: {message}"
    ) from None


class _Parser:
    def __init__(self, constants: Mapping[str, np.ndarray[Any, Any]], ops: Mapping[str, OpDef] | None) -> None:
        self.data, self.ops = constants, ops
        self.dims: dict[str, Var] = {}
        self.declared: list[Var] = []
        self.defined: set[str] = set()

    def declare(self, s: ast.stmt) -> None:
        if not (isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name) and s.value is None):
            _fail(s, "expected a dim such as `N: dim[1, 64, 8]` in front of the function")
        name, a = s.target.id, s.annotation
        parts: list[Any] = []
        if isinstance(a, ast.Subscript) and isinstance(a.value, ast.Name) and a.value.id == "dim":
            parts = [
                None if isinstance(x, ast.Constant) and x.value is None else self.dim(x) for x in _elements(a.slice)
            ]
        elif not (isinstance(a, ast.Name) and a.id == "dim"):
            _fail(a, f"expected dim or dim[low, high, divisor], got {ast.unparse(a)}")
        lo, hi, div = [*parts, *(1, None, 1)[len(parts) :]][:3]
        if len(parts) > 3 or not isinstance(div, int) or div < 1:
            _fail(a, "expected dim[low, high, divisor] with a positive divisor")
        if name in self.dims or is_reserved(name):
            _fail(s, f"{name} is declared twice or means something else")
        v = self.dims[name] = var(name, i64, lo, hi, div)
        self.declared.append(v)

    def define(self, d: ast.FunctionDef) -> None:
        """An op's definition: graphs that follow know the op."""
        known = known_ops()
        if d.name in known or d.name in self.defined:
            _fail(d, f"{d.name} is an op of dnnc's own" if d.name in known else f"{d.name} is defined twice")
        self.defined.add(d.name)
        self.ops = {**(known if self.ops is None else self.ops), d.name: read_op(d, Reader(self.type, self.dims))}

    def function(self, d: ast.FunctionDef, outer: Mapping[str, Graph], facts: Sequence[Var] = ()) -> Graph:
        g = Graph(d.name)
        return _Function(self, g, dict(outer)).read(d, facts)

    # --- types and literals ---

    def type(self, a: ast.expr | None, name: str = "") -> TensorType:
        if a is None:
            _fail(a, f"{name} needs a type such as f32[4, 8]")
        if isinstance(a, ast.BinOp) and isinstance(a.op, ast.MatMult):
            t = self.type(a.left)
            return TensorType(t.dtype, t.shape, self.order(a.right, parse_encoding))
        if isinstance(a, ast.Name):
            return TensorType(self.dtype(a), ())
        if not isinstance(a, ast.Subscript):
            _fail(a, f"expected a type such as f32[4, 8], got {ast.unparse(a)}")
        return TensorType(self.dtype(a.value), tuple(self.dim(x) for x in _elements(a.slice)))

    def dtype(self, a: ast.expr) -> DType:
        if not isinstance(a, ast.Name) or a.id not in BY_NAME:
            _fail(a, f"unknown dtype {ast.unparse(a)}; there are {', '.join(BY_NAME)}")
        return BY_NAME[a.id]

    def order(self, a: ast.expr, read: Callable[[str], Order]) -> Order:
        """A layout or an encoding."""
        if not isinstance(a, ast.Constant) or not isinstance(a.value, str):
            _fail(a, f'expected a layout such as "0 1/16 1%16", got {ast.unparse(a)}')
        try:
            return read(a.value)
        except ValueError:
            _fail(a, f'"{a.value}" is not a layout; one is written like "0 1/16 1%16"')

    def dim(self, a: ast.expr) -> Dim:
        """A dim; a name that was not declared is one that nothing is known of."""
        try:
            return unwrap(self._dim(a))  # type: ignore[no-any-return]
        except (ValueError, TypeError) as e:
            _fail(a, str(e))

    def _dim(self, a: ast.expr) -> Expr:
        if isinstance(a, ast.Constant) and type(a.value) is int:
            return const(a.value)
        if isinstance(a, ast.Name) and not is_reserved(a.id):
            return self.dims.setdefault(a.id, dim(a.id))
        if isinstance(a, ast.UnaryOp) and isinstance(a.op, ast.USub):
            return 0 - self._dim(a.operand)
        if isinstance(a, ast.BinOp) and type(a.op) in _BINARY:
            return op(_BINARY[type(a.op)], self._dim(a.left), self._dim(a.right))
        if isinstance(a, ast.Compare) and len(a.ops) == 1 and type(a.ops[0]) in _BINARY:
            return op(_BINARY[type(a.ops[0])], self._dim(a.left), self._dim(a.comparators[0]))
        if (
            isinstance(a, ast.Call)
            and isinstance(a.func, ast.Name)
            and a.args
            and a.func.id in ("min", "max", "select")
        ):
            args = [self._dim(x) for x in a.args]
            return op("select", *args) if a.func.id == "select" else reduce(lambda x, y: op(a.func.id, x, y), args)  # type: ignore[attr-defined]
        _fail(a, f"not a dim: {ast.unparse(a)}")

    def literal(self, a: ast.expr, graphs: Mapping[str, Graph]) -> Any:
        if isinstance(a, ast.Constant) and (a.value is None or isinstance(a.value, (bool, int, float, str))):
            return a.value
        if isinstance(a, (ast.Tuple, ast.List)):
            return tuple(self.literal(x, graphs) for x in a.elts)
        if isinstance(a, ast.Name):
            found = _NUMBERS.get(a.id, BY_NAME.get(a.id, graphs.get(a.id)))
            return self.dim(a) if found is None else found
        if isinstance(a, ast.UnaryOp) and isinstance(a.op, ast.USub):
            x = self.literal(a.operand, graphs)
            return -x if isinstance(x, (int, float)) else unwrap(0 - self._dim(a.operand))
        if isinstance(a, ast.Subscript) or (isinstance(a, ast.BinOp) and isinstance(a.op, ast.MatMult)):
            return self.type(a)
        if isinstance(a, ast.Call) and isinstance(a.func, ast.Name) and a.func.id == "layout" and len(a.args) == 1:
            return self.order(a.args[0], parse_layout)
        return self.dim(a)


class _Function:
    """Reads one `def`: its own graph and names; dims and data are the parser's."""

    def __init__(self, parser: _Parser, g: Graph, graphs: dict[str, Graph]) -> None:
        self.p, self.g, self.graphs = parser, g, graphs
        self.values: dict[str, Value] = {}
        self.b = Builder(g, ops=parser.ops)

    def read(self, d: ast.FunctionDef, facts: Sequence[Var]) -> Graph:
        a = d.args
        if a.vararg or a.kwarg or a.defaults or a.posonlyargs or d.decorator_list:
            _fail(d, "a graph has plain inputs, then `*`, then constants")
        self.g.declare(*facts)  # a body has the dims that occur in it
        for x in a.args:
            self.define(x, x.arg, self.g.add_input(x.arg, self.p.type(x.annotation, x.arg)))
        for x, data in zip(a.kwonlyargs, a.kw_defaults):
            self.define(x, x.arg, self.constant(x, data))
        *body, last = d.body
        taken = {n.id for s in body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self.g.reserve(taken)  # so that nested calls get other names
        for s in body:
            self.statement(s)
        if not isinstance(last, ast.Return):
            _fail(last, "the last statement must be `return NAME, ...`")
        self.g.outputs = [self.operand(x, True) for x in ([] if last.value is None else _elements(last.value))]
        return self.g

    def define(self, at: ast.AST, name: str, v: Value) -> None:
        if name in self.values:
            _fail(at, f"{name} is defined twice")
        self.values[name] = v

    def constant(self, x: ast.arg, data: ast.expr | None) -> Value:
        t = self.p.type(x.annotation, x.arg)
        if not t.static:
            _fail(x, f"the constant {x.arg} has symbolic dims: {t}")
        key = ""
        if isinstance(data, ast.Call) and isinstance(data.func, ast.Name) and data.func.id == "const":
            key = str(self.p.literal(data.args[0], {})) if len(data.args) == 1 else ""
        if data is not None and not key:
            try:
                array = read_inline(data, t)
            except ValueError as e:
                _fail(data, f"{x.arg}: {e}")
            return self.g.constant(array, x.arg, type=t)
        found = self.p.data.get(key, self.p.data.get(x.arg))
        if found is None:
            _fail(
                x,
                f"the data of constant {x.arg} ({key or 'no hash'}) is not among the "
                f"{count(len(self.p.data), 'array')} given "
                "to parse(constants=...)",
            )
        if found.dtype != t.dtype.numpy or found.shape != t.shape:
            _fail(x, f"constant {x.arg} is declared {t}, its data is {found.dtype} {list(found.shape)}")
        v = self.g.constant(found, x.arg, type=t)
        if key and self.g.digest(v) != key:
            _fail(
                x,
                f"the data of constant {x.arg} has hash {self.g.digest(v)}, the text says {key}; drop const(...) to "
                "take it anyway",
            )
        return v

    def statement(self, s: ast.stmt) -> None:
        if isinstance(s, ast.FunctionDef):
            self.graphs[s.name] = self.p.function(s, self.graphs)
            return
        if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name) and s.value is not None:
            return self.assign(s, [s.target.id], s.value, [s.annotation])
        if isinstance(s, ast.Assign) and len(s.targets) == 1:
            names = _elements(s.targets[0])
            call: ast.expr = s.value
            types: list[ast.expr] | None = None
            if isinstance(call, ast.BinOp) and isinstance(call.op, ast.MatMult):
                types, call = _elements(call.right), call.left
            if all(isinstance(n, ast.Name) for n in names):
                return self.assign(s, [n.id for n in names if isinstance(n, ast.Name)], call, types)
        _fail(s, f"expected `NAME: type = op(...)`, got {ast.unparse(s)}")

    def assign(self, s: ast.stmt, names: list[str], call: ast.expr, types: list[ast.expr] | None) -> None:
        for name in names:
            if name in self.values:
                _fail(s, f"{name} is defined twice")
        node = self.call(call, names)
        if len(node.outputs) != len(names) or (types is not None and len(types) != len(names)):
            _fail(
                s,
                f"{node.op.name} has {count(len(node.outputs), 'output')}; "
                f"{count(len(names), 'name')}{'' if types is None else f' and {len(types)} types'} are given",
            )
        annotations: Sequence[ast.expr | None] = types or [None] * len(names)
        for v, name, t in zip(node.outputs, names, annotations):
            if t is not None:
                self.check(t, v)
            self.define(s, name, v)

    def check(self, a: ast.expr, v: Value) -> None:
        want = self.p.type(a)
        if (want.dtype, want.shape) != (v.type.dtype, v.type.shape) or (
            not v.type.row_major and want.encoding != v.type.encoding
        ):
            _fail(a, f"the text says {want}, {v.node.op.name if v.node else 'this'} gives {v.type}")
        v.type = want

    def call(self, a: ast.expr, names: Sequence[str] = ()) -> Node:
        if not isinstance(a, ast.Call) or not isinstance(a.func, ast.Name):
            _fail(a, f"expected op(...), got {ast.unparse(a)}")
        try:
            record = find_op(self.b.ops, a.func.id)
        except UnsupportedError as e:
            _fail(a, str(e))
        inputs = self.operands(a.args)
        attrs = {}
        for k in a.keywords:
            if k.arg is None or k.arg in attrs:
                _fail(k.value, "an attribute is written name=value, once")
            attrs[k.arg] = self.p.literal(k.value, self.graphs)
        self.g.release(names)
        try:
            return self.b.node(record, inputs, attrs, names)
        except DnncError as e:
            _fail(a, str(e))

    def operands(self, args: list[ast.expr]) -> list[Value | None]:
        """Values, nested calls and None; numbers and lists become constants with the dtype of the first value."""
        given = [None if self.is_literal(x) else self.operand(x) for x in args]
        lead = next((v.type.dtype for v in given if v is not None), None)
        for i, x in enumerate(args):
            if not self.is_literal(x):
                continue
            if lead is None:
                _fail(
                    x,
                    "a literal operand takes its dtype from a value beside it, and there is none; make it a constant "
                    "after `*`",
                )
            try:
                given[i] = self.g.constant(read_literal(x, lead))
            except ValueError as e:
                _fail(x, str(e))
        return given

    def is_literal(self, a: ast.expr) -> bool:
        if isinstance(a, ast.Constant):
            return a.value is not None
        return isinstance(a, (ast.UnaryOp, ast.List)) or (
            isinstance(a, ast.Name) and a.id in _NUMBERS and a.id not in self.values
        )

    def operand(self, a: ast.expr, output: bool = False) -> Any:
        if isinstance(a, ast.Name):
            if a.id not in self.values:
                _fail(a, f"unknown value {a.id}")
            return self.values[a.id]
        if isinstance(a, ast.Constant) and a.value is None and not output:
            return None
        node = self.call(a)
        if len(node.outputs) != 1:
            _fail(a, f"{node.op.name} has {count(len(node.outputs), 'output')} and cannot stand inside an expression")
        return node.outputs[0]


def _elements(a: ast.expr) -> list[ast.expr]:
    return list(a.elts) if isinstance(a, ast.Tuple) else [a]


def is_reserved(name: str) -> bool:
    """Does a name mean something else in texts than a size?"""
    return name in BY_NAME or name in _NUMBERS or name in ("dim", "min", "max", "select", "layout", "const")
