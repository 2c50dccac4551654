"""Definitions of ops as text: what a graph's text says of an op that is none of dnnc's own.

    definition ::= def NAME(operand: type, ...): {stage} return STAGE, ...
    stage      ::= def STAGE(axis, ...) -> type: {NAME = e} return e | return COMBINE(e, axis=size, ..., where=e)
                 | return scatter(UPDATE, e, (index, ...), value, axis=size, ...)

An element of a stage is what is returned for its axes, or the sum, prod, max, min or fmax of it over further axes; or
e, and then what updates at (index, ...) in the order of further axes make of it, UPDATE being one of last, sum, prod,
max and min. Expressions are those of the operator IR, and read operands and the stages before. A definition holds for
operands of the types that it names; its symbolic sizes are attributes of the node, or follow from operands.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from dnnc.ir import te
from dnnc.ir.bounds import bounds
from dnnc.ir.dtype import DType
from dnnc.ir.errors import ParseError, ShapeError, count
from dnnc.ir.expr import (
    Const,
    Expr,
    Load,
    Var,
    children,
    const,
    load,
    rebuild,
    show,
    substitute,
    unwrap,
    var,
    walk,
)
from dnnc.ir.loops.stmt import Buffer
from dnnc.ir.loops.text import ExpressionParser
from dnnc.ir.op import OpDef, Trait
from dnnc.ir.te import COMBINE, Scatter, Stage, Tensor
from dnnc.ir.te import interp as te_interp
from dnnc.ir.types import TensorType

PLAIN = 60  # nodes up to which an expression is written without names for what occurs several times

# --- printing ---------------------------------------------------------------------------------------------------------


def show_op(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
    """The definition of an op for operands of these types."""
    return _Printer(inputs, outputs).definition(name, inputs, outputs)


class _Printer:
    def __init__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self.stages = list(te.stages(outputs))
        dims = te.sizes(inputs, outputs)
        taken = {n.rstrip("0123456789")[1:] for n in dims if n[0] in "xtire" and n[-1].isdigit()}
        self.mark = next(m for m in ("_" * k for k in range(len(dims) + 1)) if m not in taken)
        self.names = {t: Buffer(f"x{self.mark}{k}", t.dtype, t.shape) for k, t in enumerate(inputs)}
        for k, t in enumerate(self.stages):
            self.names[t] = Buffer(f"t{self.mark}{k}", t.dtype, t.shape)
            if t.stage is not None and t.stage.own is not None:
                self.names[t.stage.own] = self.names[t]

    def definition(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
        params = ", ".join(f"{self.names[t].name}: {_type(t)}" for t in inputs)
        body = "".join(self.stage(t) for t in self.stages)
        return f"def {name}({params}):\n{body}    return {', '.join(self.names[t].name for t in outputs)}\n\n"

    def stage(self, t: Tensor) -> str:
        s = t.stage
        assert s is not None
        axes = {v: var(f"i{self.mark}{k}", v.dtype, v.lo, v.hi, v.div) for k, v in enumerate(s.axes)}
        axes |= {v: var(f"r{self.mark}{k}", v.dtype, v.lo, v.hi, v.div) for k, v in enumerate(_over(s))}
        memo: dict[Expr, Expr] = {}

        def go(e: Expr) -> Expr:
            r = memo.get(e)
            if r is None:
                if isinstance(e, Var):
                    r = axes.get(e, e)
                elif isinstance(e, Load):
                    assert isinstance(e.buf, Tensor)
                    r = load(self.names[e.buf], map(go, e.idx))
                else:
                    r = rebuild(e, go)
                memo[e] = r
            return r

        lines, (made, *where) = self.shared([go(e) for e in te.values_of(s)])
        shown = show(made)
        over = [f"{axes[v].name}={show(const(v.hi) + 1)}" for v in _over(s) if v.hi is not None]
        if s.updates is not None:
            *at, new = map(show, where)
            place = "".join(f"{i}, " for i in at)
            shown = f"scatter({', '.join([s.updates.combine, shown, f'({place})', new, *over])})"
        elif s.reduce:
            shown = f"{s.combine}({', '.join([shown, *over, *(f'where={show(w)}' for w in where)])})"
        head = f"    def {self.names[t].name}({', '.join(axes[v].name for v in s.axes)}) -> {_type(t)}:\n"
        return head + "".join(f"        {line}\n" for line in [*lines, f"return {shown}"])

    def shared(self, roots: Sequence[Expr]) -> tuple[list[str], list[Expr]]:
        """Names for what occurs several times, where all of it would be long; and the expressions with these."""
        uses: dict[Expr, int] = {}
        order: list[Expr] = []
        stack = [(e, False) for e in reversed(roots)]
        while stack:
            e, done = stack.pop()
            if done:
                order.append(e)
                continue
            uses[e] = uses.get(e, 0) + 1
            if uses[e] == 1:
                stack.append((e, True))
                stack += [(c, False) for c in reversed(children(e))]
        size: dict[Expr, int] = {}
        for e in order:
            size[e] = 1 + sum(size[c] for c in children(e))
        if sum(size[e] for e in roots) <= PLAIN:
            return [], list(roots)
        lines: list[str] = []
        short: dict[Expr, Expr] = {}
        for e in order:
            made = rebuild(e, lambda c: short[c])
            if uses[e] > 1 and not isinstance(e, (Var, Const)):
                name = var(f"e{self.mark}{len(lines)}", e.dtype, *(bounds(e) if e.dtype.name == "i64" else ()))
                lines.append(f"{name.name} = {show(made)}")
                made = name
            short[e] = made
        return lines, [short[e] for e in roots]


def _over(s: Stage) -> tuple[Var, ...]:
    """The axes of a stage beside those of its result."""
    return s.reduce if s.updates is None else s.updates.axes


def _type(t: Tensor) -> str:
    return str(TensorType(t.dtype, t.dims))


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reader:
    """What the text of a graph knows of types: how one is read, and the dims declared so far."""

    type: Callable[[ast.expr], TensorType]
    dims: Mapping[str, Var]


def read_op(d: ast.FunctionDef, reader: Reader) -> OpDef:
    """The record of an op from its definition. ParseError where the text is none."""
    return _Definition(d, reader).record()


def _fail(node: ast.AST, message: str) -> NoReturn:
    raise ParseError(
        f"line {getattr(node, 'lineno', 1)}, column {getattr(node, 'col_offset', 0) + 1}: {message}"
    ) from None


def placeholders(types: Sequence[TensorType | None]) -> list[Tensor]:
    """Operands of these types; absent ones are none."""
    return [te.placeholder(f"x{k}", t.dtype, t.shape) for k, t in enumerate(types) if t is not None]


class _Definition:
    """One definition. Its expressions are read again for operands of other sizes."""

    def __init__(self, d: ast.FunctionDef, reader: Reader) -> None:
        self.name, self.node = d.name, d
        for a in d.args.args:
            if a.annotation is None:
                _fail(a, f"operand {a.arg} needs a type such as f32[4, 8]")
        self.params = [(a.arg, reader.type(a.annotation)) for a in d.args.args if a.annotation is not None]
        *self.stages, last = d.body
        if not isinstance(last, ast.Return) or last.value is None:
            _fail(last, "a definition ends with `return STAGE, ...`")
        self.results = last.value.elts if isinstance(last.value, ast.Tuple) else [last.value]
        self.types: dict[str, TensorType] = {}
        for s in self.stages:
            if not isinstance(s, ast.FunctionDef) or s.returns is None:
                _fail(s, "expected a stage, `def NAME(axis, ...) -> type:`")
            self.types[s.name] = reader.type(s.returns)
        self.dims = dict(reader.dims)

    def record(self) -> OpDef:
        inputs = [te.placeholder(n, t.dtype, t.shape) for n, t in self.params]
        outputs = self.compute(inputs, {})
        traits = frozenset((Trait.PURE, Trait.CUSTOM)) | te.form(inputs, outputs)
        several = len(outputs) > 1

        def tensors(arrays: Sequence[Any], sizes: Mapping[str, Any]) -> tuple[tuple[Tensor, ...], dict[Tensor, Any]]:
            there = [a for a in arrays if a is not None]
            given = [te.placeholder(n, t.dtype, a.shape) for (n, t), a in zip(self.params, there)]
            return self.compute(given, sizes), dict(zip(given, there))

        def reference(*arrays: Any, **sizes: Any) -> Any:
            outs, known = tensors(arrays, sizes)
            made = tuple(te_interp.whole(t, known) for t in outs)
            return made if several else made[0]

        def reference_at(arrays: Sequence[Any], points: Any, **sizes: Any) -> Any:
            (out,), known = tensors(arrays, sizes)
            return te_interp.elements(out, known, points)

        def type_(*types: TensorType | None, **sizes: Any) -> Any:
            made = tuple(TensorType(t.dtype, t.dims) for t in self.compute(placeholders(types), sizes))
            return made if several else made[0]

        def compute(*xs: Tensor | None, **sizes: Any) -> Any:
            outs = self.compute([x for x in xs if x is not None], sizes)
            return outs if several else outs[0]

        def flops(*types: TensorType | None, **sizes: Any) -> Any:
            return te.flops(self.compute(placeholders(types), sizes))

        at = None if several else reference_at
        return OpDef(self.name, type_, compute, reference=reference, reference_at=at, flops=flops, traits=traits)

    # --- the expressions for operands of some sizes -------------------------------------------------------------------

    def compute(self, operands: Sequence[Tensor], said: Mapping[str, Any]) -> tuple[Tensor, ...]:
        """The results for operands. `said`: the node's attributes, which name the sizes that operands need not show."""
        sizes = self.bound(operands, said)
        env: dict[str, Any] = {v.name: sizes.get(v, v) for v in self.dims.values()}
        env.update((n, t) for (n, _), t in zip(self.params, operands))
        shapes = {n: [substitute(const(d), sizes) for d in t.shape] for n, t in self.types.items()}
        env.update(
            (n, te.placeholder(n, self.types[n].dtype, [unwrap(d) for d in shape])) for n, shape in shapes.items()
        )  # read by themselves
        for s in self.stages:
            assert isinstance(s, ast.FunctionDef)
            env[s.name] = self.stage(s, self.types[s.name].dtype, shapes[s.name], env)
        out = [env.get(r.id) if isinstance(r, ast.Name) else None for r in self.results]
        if not all(isinstance(t, Tensor) and t.stage is not None for t in out):
            _fail(self.node.body[-1], "a definition returns stages")
        return tuple(t for t in out if t is not None)

    def bound(self, operands: Sequence[Tensor], said: Mapping[str, Any]) -> dict[Expr, Expr]:
        """Return the symbolic sizes that operands give. ShapeError where the definition is for other sizes."""
        env: dict[Expr, Expr] = {
            v: const(said[v.name]) for v in self.dims.values() if isinstance(said.get(v.name), (int, Expr))
        }
        fits = len(operands) == len(self.params)
        for t, (_, want) in zip(operands, self.params):
            fits = fits and t.dtype is want.dtype and len(t.shape) == want.rank
            env.update((d, n) for d, n in zip(want.shape, t.shape) if isinstance(d, Var) and d not in env)
        for t, (_, want) in zip(operands, self.params):
            fits = fits and all(substitute(const(d), env) is n for d, n in zip(want.shape, t.shape))
        if not fits:
            defined, got = ", ".join(str(t) for _, t in self.params), ", ".join(map(_type, operands))
            raise ShapeError(f"{self.name} is defined for {defined}; got {got}")
        return env

    @staticmethod
    def updated(e: ast.Call, p: ExpressionParser, axes: tuple[Var, ...], over: tuple[Var, ...], wide: DType) -> Stage:
        """`scatter(UPDATE, e, (index, ...), value, axis=size, ...)`"""
        how, first, at, new = e.args
        if (
            not isinstance(how, ast.Name)
            or how.id not in te.UPDATES
            or not isinstance(at, ast.Tuple)
            or len(at.elts) != len(axes)
        ):
            _fail(
                e,
                f"expected scatter(UPDATE, e, (index, ...), value, axis=size, ...), UPDATE one of "
                f"{', '.join(te.UPDATES)}",
            )
        return Stage(
            axes, p.expr(first, wide), updates=Scatter(over, tuple(map(p.expr, at.elts)), p.expr(new, wide), how.id)
        )

    def stage(self, s: ast.FunctionDef, dtype: DType, shape: list[Expr], env: Mapping[str, Any]) -> Tensor:
        names = [a.arg for a in s.args.args]
        if len(names) != len(shape):
            _fail(s, f"{s.name} has {count(len(shape), 'axis', 'axes')}, {len(names)} are named")
        axes = tuple(var(n, lo=0, hi=unwrap(d - 1)) for n, d in zip(names, shape))
        own = env[s.name]
        p = ExpressionParser({**env, **dict(zip(names, axes))})
        *lets, last = s.body
        if not isinstance(last, ast.Return) or last.value is None:
            _fail(last, "a stage ends with `return e`")
        e, wide = last.value, dtype.computed
        reduce: tuple[Var, ...] = ()
        sums = (
            isinstance(e, ast.Call)
            and bool(e.keywords)
            and isinstance(e.func, ast.Name)
            and e.func.id in COMBINE
            and len(e.args) == 1
        )
        put = isinstance(e, ast.Call) and isinstance(e.func, ast.Name) and e.func.id == "scatter" and len(e.args) == 4
        over = [k for k in e.keywords if k.arg != "where"] if (sums or put) and isinstance(e, ast.Call) else []
        reduce = tuple(var(k.arg or "", lo=0, hi=unwrap(p.expr(k.value) - 1)) for k in over)
        p.names.update((v.name, v) for v in reduce)
        for x in lets:
            if not isinstance(x, ast.Assign) or len(x.targets) != 1 or not isinstance(x.targets[0], ast.Name):
                _fail(x, "expected `NAME = e`")
            p.names[x.targets[0].id] = p.expr(x.value)
        combine, where = "", None
        if put and isinstance(e, ast.Call):
            return Tensor(s.name, dtype, tuple(shape), stage=self.updated(e, p, axes, reduce, wide))
        if sums and isinstance(e, ast.Call) and isinstance(e.func, ast.Name):
            where = next((p.expr(k.value) for k in e.keywords if k.arg == "where"), None)
            combine, e = e.func.id, e.args[0]
        made = Tensor(s.name, dtype, tuple(shape), stage=Stage(axes, p.expr(e, wide), reduce, combine, where))
        every = [x for t in te.stages([made]) if t.stage is not None for v in te.values_of(t.stage) for x in walk(v)]
        if not any(isinstance(x, Load) and x.buf is own for x in every):
            return made
        assert made.stage is not None
        return replace(made, stage=replace(made.stage, own=own))
