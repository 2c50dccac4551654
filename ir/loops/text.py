"""Kernel <-> text. The text is valid Python syntax, read with `ast` (spans for free), never executed."""

from __future__ import annotations

import ast
from functools import reduce
from typing import Any

from dnnc.ir.dtype import BY_NAME, DType, boolean, f32, i64
from dnnc.ir.errors import ParseError, count
from dnnc.ir.expr import Expr, Load, Var, cast, const, load, logical_not, op, ref, show, show_at, unwrap, value, var
from dnnc.ir.loops.intrinsics import TABLE, cast_target
from dnnc.ir.loops.sharing import with_names
from dnnc.ir.loops.stmt import (
    LOOP_KINDS,
    SPACES,
    Alloc,
    Block,
    Buffer,
    Eval,
    For,
    Func,
    If,
    ImmediateRows,
    Kernel,
    Let,
    Param,
    SparseRows,
    Stmt,
    Store,
    call,
    let_var,
    loop_var,
)

# --- printing ---------------------------------------------------------------------------------------------------------


def show_buffer(b: Buffer) -> str:
    s = f"{b.name}: {b.dtype}[{', '.join(map(show, b.shape))}]"
    if b.space != "global":
        s += f" @ {b.space}" + (f".swizzle{b.swizzle}" if b.swizzle else "")
    return s + (f" @ strides({', '.join(map(show, b.strides))})" if b.strides is not None else "")


def show_param(p: Param) -> str:
    if isinstance(p, Buffer):
        return show_buffer(p)
    if p.dtype is not i64:
        return f"{p.name}: {p.dtype}"
    if p.lo is None and p.hi is None and p.div == 1:
        return f"{p.name}: dim"
    parts = [str(p.lo), str(p.hi)] + ([str(p.div)] if p.div != 1 else [])
    return f"{p.name}: dim[{', '.join(parts)}]"


def show_stmt(s: Stmt, pad: str = "") -> str:
    if isinstance(s, For):
        args = show(s.hi) if value(s.lo) == 0 else f"{show(s.lo)}, {show(s.hi)}"
        return f"{pad}for {s.var.name} in {s.kind}({args}):\n{show_block(s.body, pad + '    ')}"
    if isinstance(s, If):
        other = f"{pad}else:\n{show_block(s.other, pad + '    ')}" if s.other else ""
        return f"{pad}if {show(s.cond)}:\n{show_block(s.then, pad + '    ')}{other}"
    if isinstance(s, Let):
        t = f"{s.var.dtype}x{s.var.lanes}" if s.var.lanes > 1 else str(s.var.dtype)
        return f"{pad}{s.var.name}: {t} = {show(s.value)}\n"
    if isinstance(s, Alloc):
        return f"{pad}{show_buffer(s.buf)}\n"
    if isinstance(s, Store):
        return f"{pad}{show_at(s.buf, s.idx, s.lanes, s.limit)} = {show(s.value)}\n"
    assert isinstance(s, Eval)
    pattern = (f'"{s.head} {s.pattern}"',) if isinstance(s, SparseRows) else ()
    pattern = (f'"{s.text}"',) if isinstance(s, ImmediateRows) else pattern
    return f"{pad}{s.name}({', '.join((*map(show, s.args), *pattern))})\n"


def show_block(b: Block, pad: str = "    ") -> str:
    return "".join(show_stmt(s, pad) for s in b) or pad + "pass\n"


def show_func(f: Func) -> str:
    return f"def {f.name}({', '.join(map(show_param, f.params))}):\n{show_block(with_names(f).body)}"


def show_kernel(k: Kernel) -> str:
    """The text of a kernel; `parse_kernel` reads it back (locations apart)."""
    return "\n".join(map(show_func, k.funcs))


# --- parsing ----------------------------------------------------------------------------------------------------------

_BINARY: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.BitXor: "^",
    ast.BitAnd: "&",
    ast.BitOr: "|", ast.Lt: "<", ast.LtE: "<=", ast.Eq: "==", ast.NotEq: "!=",
}  # fmt: skip
_LIKE = {"min", "max", "shl", "shr"}  # calls whose operands have one type


def _is_bare(n: ast.expr) -> bool:
    """Is it a number without a type?"""
    n = n.operand if isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.USub) else n
    return isinstance(n, ast.Constant) and type(n.value) in (int, float)


def _typed(number: ast.expr, t: DType) -> DType | None:
    """The type of a bare number beside an operand of type t: t, if it holds such numbers."""
    n = number.operand if isinstance(number, ast.UnaryOp) else number
    whole = isinstance(n, ast.Constant) and type(n.value) is int
    return t if t.is_float or (whole and t.is_int) else None


def _fail(node: ast.AST, message: str) -> ParseError:
    return ParseError(f"line {getattr(node, 'lineno', '?')}, column {getattr(node, 'col_offset', -1) + 1}: {message}")


def parse_kernel(text: str) -> Kernel:
    """Read a kernel. ParseError with line and column where it is not one."""
    try:
        tree = ast.parse(text)
    except SyntaxError as e:
        raise ParseError(f"line {e.lineno}, column {e.offset}: {e.msg}") from None
    funcs: list[Func] = []
    for d in tree.body:
        if not isinstance(d, ast.FunctionDef):
            raise _fail(d, "expected `def NAME(...):`")
        funcs.append(_Parser({f.name for f in funcs}).func(d))
    if not funcs:
        raise ParseError("line 1, column 1: the text holds no function")
    return Kernel(tuple(funcs))


class _Parser:
    def __init__(self, funcs: set[str]) -> None:
        self.env: dict[str, Var | Buffer] = {}
        self.funcs = funcs

    def func(self, d: ast.FunctionDef) -> Func:
        params: list[Param] = []
        for a in d.args.args:
            if a.annotation is None:
                raise _fail(a, f"parameter {a.arg} needs a type such as f32[4, 8] or i64")
            p = self.param(a.arg, a.annotation)
            self.env[a.arg] = p
            params.append(p)
        return Func(d.name, tuple(params), self.block(d.body))

    def param(self, name: str, a: ast.expr) -> Param:
        if isinstance(a, ast.Name):
            return var(name) if a.id == "dim" else var(name, self.dtype(a)[0])
        if isinstance(a, ast.Subscript) and isinstance(a.value, ast.Name) and a.value.id == "dim":
            parts = a.slice.elts if isinstance(a.slice, ast.Tuple) else [a.slice]
            lo, hi, div = ([ast.literal_eval(p) for p in parts] + [None, None, None])[:3]
            return var(name, i64, lo, hi, div or 1)
        return self.buffer(name, a)

    def dtype(self, n: ast.expr) -> tuple[DType, int]:
        name, _, lanes = n.id.partition("x") if isinstance(n, ast.Name) else ("", "", "")
        if name not in BY_NAME or (lanes and not lanes.isdigit()):
            raise _fail(n, f"unknown type {ast.unparse(n)}")
        return BY_NAME[name], int(lanes or 1)

    def buffer(self, name: str, a: ast.expr) -> Buffer:
        space, strides, swizzle = "global", None, 0
        while isinstance(a, ast.BinOp) and isinstance(a.op, ast.MatMult):
            r = a.right
            if isinstance(r, ast.Call):
                strides = tuple(self.expr(x) for x in r.args)
            elif isinstance(r, ast.Attribute) and isinstance(r.value, ast.Name) and r.attr.startswith("swizzle"):
                space, swizzle = r.value.id, int(r.attr[7:])
            elif isinstance(r, ast.Name):
                space = r.id
            a = a.left
        if space not in SPACES:
            raise _fail(a, f"unknown memory space {space}; there are {', '.join(SPACES)}")
        if not isinstance(a, ast.Subscript):
            raise _fail(a, f"{name}: expected a buffer type such as f32[4, 8] @ register")
        dims = a.slice.elts if isinstance(a.slice, ast.Tuple) else [a.slice]
        b = Buffer(name, self.dtype(a.value)[0], tuple(self.expr(x) for x in dims), space, strides, swizzle)
        self.env[name] = b
        return b

    def block(self, body: list[ast.stmt]) -> Block:
        return tuple(self.stmt(s) for s in body if not isinstance(s, ast.Pass))

    def stmt(self, s: ast.stmt) -> Stmt:
        if isinstance(s, ast.For):
            return self.loop(s)
        if isinstance(s, ast.If):
            return If(self.expr(s.test), self.block(s.body), self.block(s.orelse))
        if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name):
            if s.value is None:
                return Alloc(self.buffer(s.target.id, s.annotation))
            return self.let(s, s.target.id, s.value)
        if isinstance(s, ast.Assign) and isinstance(s.targets[0], ast.Subscript):
            at = self.at(s.targets[0])
            return Store(at.buf, at.idx, self.expr(s.value, at.buf.dtype), at.lanes, at.limit)
        if isinstance(s, ast.Expr) and isinstance(s.value, ast.Call) and isinstance(s.value.func, ast.Name):
            name = s.value.func.id
            if name == "sparse_rows" and isinstance(text := s.value.args[-1], ast.Constant):
                return SparseRows.parse(str(text.value), tuple(self.expr(a) for a in s.value.args[:-1]))
            if name == "immediate_rows" and isinstance(text := s.value.args[-1], ast.Constant):
                return ImmediateRows.parse(str(text.value), tuple(self.expr(a) for a in s.value.args[:-1]))
            if name not in self.funcs and not (name in TABLE and TABLE[name].effect):
                raise _fail(s, f"unknown effect or function {name}")
            return Eval(name, tuple(self.expr(a) for a in s.value.args))
        raise _fail(s, f"not a statement of the operator IR: {ast.unparse(s)}")

    def loop(self, s: ast.For) -> For:
        call_ = s.iter
        if (
            not isinstance(call_, ast.Call)
            or not isinstance(s.target, ast.Name)
            or ast.unparse(call_.func) not in LOOP_KINDS
        ):
            raise _fail(s, f"expected `for NAME in KIND(...)` with KIND one of {', '.join(LOOP_KINDS)}")
        args = [self.expr(a) for a in call_.args]
        if len(args) not in (1, 2):
            raise _fail(call_, "a loop takes (hi) or (lo, hi)")
        lo, hi = args if len(args) == 2 else (const(0), args[0])
        v = self.env[s.target.id] = loop_var(s.target.id, lo, hi)
        return For(v, lo, hi, ast.unparse(call_.func), self.block(s.body))

    def let(self, s: ast.AnnAssign, name: str, v: ast.expr) -> Let:
        t, lanes = self.dtype(s.annotation)
        e = self.expr(v, t)
        if (e.dtype, e.lanes) != (t, lanes):
            raise _fail(s, f"{name} is declared {ast.unparse(s.annotation)}, its value is {e.dtype}x{e.lanes}")
        made = self.env[name] = let_var(name, e)
        return Let(made, e)

    def at(self, n: ast.Subscript) -> Load:
        buf = self.env.get(n.value.id) if isinstance(n.value, ast.Name) else None
        if not isinstance(buf, Buffer):
            raise _fail(n, f"{ast.unparse(n.value)} is not a buffer here")
        parts = list(n.slice.elts) if isinstance(n.slice, ast.Tuple) else [n.slice]
        lanes, limit = 1, None
        last = parts[-1] if parts else None
        if isinstance(last, ast.Slice):
            if (
                not (isinstance(last.upper, ast.UnaryOp) and isinstance(last.upper.operand, ast.Constant))
                or last.lower is None
            ):
                raise _fail(n, "vector access is written B[.., start:+lanes] or B[.., start:+lanes:limit]")
            lanes, limit = int(last.upper.operand.value), None if last.step is None else self.expr(last.step)  # type: ignore[arg-type]
            parts[-1] = last.lower
        if len(parts) != len(buf.shape):
            raise _fail(
                n,
                f"{buf.name} has {count(len(buf.shape), 'dimension')}, "
                f"{count(len(parts), 'index', 'indices')} are given",
            )
        e = load(buf, [self.expr(p) for p in parts], lanes, limit)
        assert isinstance(e, Load)
        return e

    def expr(self, n: ast.expr, want: DType | None = None) -> Expr:
        """`want`: the type a bare number gets (the stored element's)."""
        if isinstance(n, ast.Constant):
            if isinstance(n.value, bool):
                return const(n.value, boolean)
            if not isinstance(n.value, (int, float)):
                raise _fail(n, f"not a number: {n.value!r}")
            return const(n.value, want or (f32 if isinstance(n.value, float) else i64))
        if isinstance(n, ast.Name):
            if n.id not in self.env or isinstance(self.env[n.id], Buffer):
                raise _fail(n, f"unknown name {n.id}")
            return self.env[n.id]  # type: ignore[return-value]
        if isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.USub):
            if isinstance(n.operand, ast.Constant) and isinstance(n.operand.value, (int, float)):
                return const(-n.operand.value, want or (f32 if isinstance(n.operand.value, float) else i64))
            return 0 - self.expr(n.operand)
        if isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.Not):
            return logical_not(self.expr(n.operand))
        if isinstance(n, ast.BinOp) and type(n.op) in _BINARY:
            return self.binary(_BINARY[type(n.op)], n.left, n.right)
        if isinstance(n, ast.Compare) and len(n.ops) == 1 and type(n.ops[0]) in _BINARY:
            return self.binary(_BINARY[type(n.ops[0])], n.left, n.comparators[0])
        if isinstance(n, ast.Subscript):
            return self.at(n)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name):
            return self.call(n, n.func.id)
        raise _fail(n, f"not an expression of the operator IR: {ast.unparse(n)}")

    def binary(self, name: str, a: ast.expr, b: ast.expr) -> Expr:
        return op(name, *self.operands(a, b))

    def operands(self, a: ast.expr, b: ast.expr) -> tuple[Expr, Expr]:
        """Two operands of one type: a bare number takes the other's, as in Python code that builds expressions."""
        if _is_bare(a) and not _is_bare(b):
            y = self.expr(b)
            return self.expr(a, _typed(a, y.dtype)), y
        x = self.expr(a)
        return x, self.expr(b, _typed(b, x.dtype)) if _is_bare(b) and not _is_bare(a) else self.expr(b)

    def call(self, n: ast.Call, name: str) -> Expr:
        if name == "addr" and isinstance(n.args[0], ast.Subscript):
            a = self.at(n.args[0])
            return ref(a.buf, a.idx, a.lanes)
        if name in BY_NAME:  # i32(7), f32(inf)
            text = ast.unparse(n.args[0])
            t = BY_NAME[name]
            return const(float(text) if t.is_float else int(text), t)
        args = list(self.operands(*n.args)) if name in _LIKE and len(n.args) == 2 else [self.expr(a) for a in n.args]
        target = cast_target(name)
        if target is not None:
            to, bits = target
            return op(name, *args, dtype=to) if bits else cast(args[0], to)
        if name in ("min", "max"):
            return reduce(lambda x, y: op(name, x, y), args)
        if name == "select":
            return op(name, *args)
        if name not in TABLE or TABLE[name].effect:
            raise _fail(n, f"unknown intrinsic {name}")
        return call(name, *args)


class ExpressionParser:
    """Reads expressions by themselves. `names`: the expressions and buffers that stand for names."""

    def __init__(self, names: dict[str, Any]) -> None:
        self._parser = _Parser(set())
        self.names = self._parser.env = names

    def expr(self, n: ast.expr, want: DType | None = None) -> Expr:
        """An expression. `want`: the type that a bare number gets. ParseError with line and column where it is none."""
        return self._parser.expr(n, want)


__all__ = ["ExpressionParser", "parse_kernel", "show_kernel", "show_stmt", "unwrap"]
