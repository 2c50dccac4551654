"""Prints operator IR as C99: one function for each kernel, one constant for each operation.

Signed integers wrap (`-fwrapv`), and products and sums are not contracted (`-ffp-contract=off`).
"""

from __future__ import annotations

import math
import re

import numpy as np

from dnnc.ir.dtype import DType, f32, f64
from dnnc.ir.errors import InternalError
from dnnc.ir.expr import COMPARE, Const, Expr, Linear, Load, Op, Product, Ref, Var, cast, children
from dnnc.ir.loops.intrinsics import cast_target
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, Eval, For, Func, If, Kernel, Let, Stmt, Store
from dnnc.passes.lower.conversions import is_small, narrow, to_odd, widen

# Functions of C's math library; float32 ones end in f.
MATH = frozenset(
    "exp exp2 expm1 log log1p pow sqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf floor ceil "
    "trunc rint fma".split()
)
# Every operand is a name or a number, so it may occur twice.
FLOAT = {
    "min": "{0} != {0} || {0} < {1} ? {0} : {1}", "max": "{0} != {0} || {0} > {1} ? {0} : {1}",  # NaN propagates
    "neg": "-{0}", "abs": "fabs{f}({0})", "isnan": "{0} != {0}", "truncmod": "fmod{f}({0}, {1})",
    "floormod": "floormod_{t}({0}, {1})", "ldexp": "ldexp{f}({0}, (int){1})", "recip": "1 / {0}", "estimate": "1 / {0}",
}  # fmt: skip
INTEGER = {
    "min": "{0} < {1} ? {0} : {1}", "max": "{0} > {1} ? {0} : {1}", "//": "floordiv({0}, {1})",
    "%": "{0} - floordiv({0}, {1}) * {1}", "truncdiv": "truncdiv_{k}({0}, {1})",
    "truncmod": "{0} - truncdiv_{k}({0}, {1}) * {1}", "floormod": "floormod_{k}({0}, {1})", "not": "!{0}",
    "bitnot": "~{0}", "neg": "-{0}", "abs": "{0} < 0 ? -{0} : {0}", "guard": "guard({0}, {1}, {2}, status)",
    "shl": "(uint64_t){1} < {bits} ? (uint64_t){0} << {1} : 0",
    "shr": "(uint64_t){1} < {bits} ? {0} >> {1} : {0} < 0 ? -1 : 0",
}  # fmt: skip
BOTH = {"select": "{0} ? {1} : {2}", "fmin": "{0} < {1} ? {0} : {1}", "fmax": "{0} > {1} ? {0} : {1}"}

PRELUDE = """#include <math.h>
#include <stdint.h>

static inline int64_t floordiv(int64_t a, int64_t b) { return a / b - (a % b < 0); }  /* b > 0 */
/* x / 0 is 0, INT64_MIN / -1 wraps */
static inline int64_t truncdiv_i(int64_t a, int64_t b) { return b == 0 ? 0 : b == -1 ? -a : a / b; }
static inline uint64_t truncdiv_u(uint64_t a, uint64_t b) { return b == 0 ? 0 : a / b; }
static inline int64_t floormod_i(int64_t a, int64_t b) {
    int64_t r = b == 0 || b == -1 ? 0 : a % b;
    return r != 0 && (r ^ b) < 0 ? r + b : r;
}
static inline uint64_t floormod_u(uint64_t a, uint64_t b) { return b == 0 ? 0 : a % b; }
static inline float floormod_f32(float a, float b) {
    float r = fmodf(a, b);
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
static inline double floormod_f64(double a, double b) {
    double r = fmod(a, b);
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
/* An index known at run time, clamped into [low, high); status says that it was outside. */
static inline int64_t guard(int64_t x, int64_t low, int64_t high, int64_t *status) {
    if (x < low || x >= high) *status = 1;
    x = x < high ? x : high - 1;
    return x > low ? x : low;
}
/* a * b + c is rounded twice where the machine has no instruction for it. */
#ifndef FP_FAST_FMAF
#define fmaf(a, b, c) ((a) * (b) + (c))
#endif
#ifndef FP_FAST_FMA
#define fma(a, b, c) ((a) * (b) + (c))
#endif

"""


def emit_kernel(kernel: Kernel, symbol: str) -> str:
    """The C module of a kernel: `void symbol(parameters in order, int64_t *status)`. InternalError: C has no form."""
    names = {f.name: symbol if f is kernel.entry else f"{symbol}_{f.name}" for f in kernel.funcs}
    return PRELUDE + "\n".join(_Function(f, names, f is kernel.entry).text() for f in kernel.funcs)


def type_of(t: DType) -> str:
    """The C type of a value in memory; bool is a byte of 0 or 1."""
    if t.is_float and t.bits >= 32:
        return "float" if t is f32 else "double"
    if t.kind not in "fiub":
        raise InternalError(f"values of type {t} have no C form")
    return f"{'' if t.kind == 'i' else 'u'}int{t.bytes * 8}_t"


def literal(v: float | int | bool, t: DType) -> str:
    """A constant of a type."""
    if is_small(t):
        with np.errstate(all="ignore"):
            return str(int(np.array(v).astype(t.numpy).view(f"u{t.bytes}")))
    if t.is_float:
        if not math.isfinite(v):
            return "NAN" if v != v else f"({'-' if v < 0 else ''}INFINITY)"
        return f"({float(v).hex()}{'f' if t is f32 else ''})"
    n = int(v)
    if t.kind == "u":
        return f"{n}u" if t.bits < 64 else f"UINT64_C({n})"
    if abs(n) < 1 << 31:
        return f"({n})" if n < 0 else str(n)
    return f"(-INT64_C({-n - 1}) - 1)" if n < 0 else f"INT64_C({n})"


class _Function:
    """Prints one function. `names`: of the module's functions; `entry`: it is called from outside."""

    def __init__(self, func: Func, names: dict[str, str], entry: bool) -> None:
        self.func, self.names, self.entry = func, names, entry
        self.lines: list[str] = []
        self.depth = 1
        self.count = 0
        self.bound: dict[Var | Buffer, str] = {}
        self.now: dict[Expr, str] = {}  # operations that the statement has computed

    def text(self) -> str:
        params = []
        for p in self.func.params:
            pointer = "* restrict " if isinstance(p, Buffer) else ""
            params.append(f"{type_of(p.dtype)} {pointer}{self.name(p)}")
        self.block(self.func.body)
        head = f"{'' if self.entry else 'static '}void {self.names[self.func.name]}"
        return "\n".join([f"{head}({', '.join([*params, 'int64_t *status'])}) {{", *self.lines, "}", ""])

    def name(self, of: Var | Buffer) -> str:
        """A new C name for what is bound here."""
        self.count += 1
        self.bound[of] = f"{re.sub(r'[^A-Za-z0-9_]', '_', of.name)}_{self.count}"
        return self.bound[of]

    def line(self, text: str) -> None:
        self.lines.append("    " * self.depth + text)

    # --- statements ---------------------------------------------------------------------------------------------------

    def block(self, b: Block) -> None:
        for s in b:
            self.now = {}
            self.statement(s)

    def statement(self, s: Stmt) -> None:
        if isinstance(s, For):
            if s.kind not in ("range", "unroll", "parallel"):
                raise InternalError(f"a {s.kind} loop has no C form")
            lo, hi = self.expr(s.lo), self.expr(s.hi)
            i = self.name(s.var)
            self.nested(f"for (int64_t {i} = {lo}; {i} < {hi}; {i}++) {{", s.body)
        elif isinstance(s, If):
            self.nested(f"if ({self.expr(s.cond)}) {{", s.then)
            if s.other:
                self.nested("else {", s.other)
        elif isinstance(s, Let):
            value = self.expr(s.value)
            self.line(f"const {type_of(s.var.dtype)} {self.name(s.var)} = {value};")
        elif isinstance(s, Alloc):
            size = self.expr(s.buf.size())
            self.line(f"{type_of(s.buf.dtype)} {self.name(s.buf)}[{size}];")
        elif isinstance(s, Store):
            if s.lanes > 1:
                raise InternalError("a vector has no C form")
            value, t = self.expr(s.value), s.buf.dtype
            value = f"{value} & {(1 << t.bits) - 1}" if t.is_int and t.bits < 8 else value
            self.line(f"{self.place(s.buf, s.idx)} = {value};")
        elif isinstance(s, Eval) and s.name in self.names:
            args = [f"&{self.place(a.buf, a.idx)}" if isinstance(a, Ref) else self.expr(a) for a in s.args]
            self.line(f"{self.names[s.name]}({', '.join([*args, 'status'])});")
        elif not (isinstance(s, Eval) and s.name in ("barrier", "prefetch")):  # of no use to one thread
            raise InternalError(f"{s} has no C form")

    def nested(self, head: str, body: Block) -> None:
        self.line(head)
        self.depth += 1
        self.block(body)
        self.depth -= 1
        self.line("}")

    # --- expressions --------------------------------------------------------------------------------------------------

    def place(self, buf: Buffer, idx: tuple[Expr, ...]) -> str:
        return f"{self.bound[buf]}[{self.expr(buf.offset(idx))}]"

    def expr(self, e: Expr) -> str:
        """A name or a number that stands for an expression, which is computed ahead of the statement."""
        if e.lanes > 1:
            raise InternalError("a vector has no C form")
        if isinstance(e, Const):
            return literal(e.value, e.dtype)
        if isinstance(e, Var):
            return self.bound[e]
        if e not in self.now:
            value = self.value(e)
            self.count += 1
            self.now[e] = f"v{self.count}"
            self.line(f"const {type_of(e.dtype)} v{self.count} = {value};")
        return self.now[e]

    def value(self, e: Expr) -> str:
        if isinstance(e, Linear):
            terms = [self.expr(t) if c == 1 else f"{self.expr(t)} * {literal(c, e.dtype)}" for t, c in e.terms]
            return " + ".join([*terms, literal(e.const, e.dtype)] if e.const else terms)
        if isinstance(e, Product):
            return " * ".join(map(self.expr, children(e)))
        if isinstance(e, Load):
            return self.loaded(e)
        if not isinstance(e, Op):
            raise InternalError(f"{e!r} has no C form")
        target = cast_target(e.name)
        if target is not None:
            return self.same_bits(e.args[0], e.dtype) if target[1] else self.converted(e.args[0], e.dtype)
        t, args = e.args[0].dtype, [self.expr(a) for a in e.args]
        suffix = "f" if t is f32 else ""
        if e.name in ("+", "-", "*", "/", "&", "|", "^", *COMPARE):
            return f" {e.name} ".join(args)
        if t.is_float and e.name in MATH:
            return f"{e.name}{suffix}({', '.join(args)})"
        name = "not" if e.name == "bitnot" and t.kind == "b" else e.name
        form = BOTH.get(name) or (FLOAT if t.is_float else INTEGER).get(name)
        if form is None:
            raise InternalError(f"{e.name} of {t} has no C form")
        return form.format(*args, f=suffix, t=t, k="i" if t.kind == "i" else "u", bits=t.bits)

    def loaded(self, e: Load) -> str:
        at, t = self.place(e.buf, e.idx), e.buf.dtype
        if t.kind == "b":
            return f"{at} != 0"
        if t.kind == "i" and t.bits < 8:  # the sign bit is in the middle of the byte
            return f"(int8_t)({at} << {8 - t.bits}) >> {8 - t.bits}"
        return f"{at} & {(1 << t.bits) - 1}" if t.is_int and t.bits < 8 else at

    def same_bits(self, x: Expr, to: DType) -> str:
        v, a, b = self.expr(x), type_of(x.dtype), type_of(to)
        return v if a == b else f"((union {{ {a} a; {b} b; }}){{ {v} }}).b"

    def converted(self, x: Expr, to: DType) -> str:
        """A value as another type. Floats become integers by rounding toward zero, within the range; NaN becomes 0."""
        t = x.dtype
        if is_small(t):
            return self.expr(widen(x) if to is f32 else cast(cast(x, f32), to))
        if is_small(to):
            return self.expr(narrow(x, to) if t is f32 else cast(to_odd(x) if t is f64 else cast(x, f32), to))
        v = self.expr(x)
        if to.kind == "b":
            return f"{v} != 0"
        if t.is_float and to.is_int:
            low, high = to.range
            inside = f"{v} < {literal(float(low), t)} ? {literal(low, to)} : ({type_of(to)}){v}"
            return f"{v} != {v} ? 0 : {v} >= {literal(float(high + 1), t)} ? {literal(high, to)} : {inside}"
        return f"({type_of(to)}){v}"
