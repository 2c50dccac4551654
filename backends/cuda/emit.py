"""Operator IR -> CUDA C++: one translation unit of a kernel, and how it is to be launched.

    extern "C" __global__ void symbol(buffers and scalars in order, tensor maps, i32* status)

Loops over blocks, threads, warps and lanes become the numbers that the hardware gives; the others stay loops under
their names, and NVRTC unrolls those that are to be unrolled. Nothing is hoisted or shared here but what is used twice
in one statement: the compiler does that. Buffers are `__restrict__`, for the memory plan gives every parameter its own
memory, and `const` where only read. Addresses of parameters are multiples of VECTOR_BYTES. `status` is i32[4]: code (1:
an index was outside), the number of the kernel (`kernel_number`), the index.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import gcd
from typing import Any

from dnnc.backends.cuda import immediate_rows, index, values
from dnnc.backends.cuda.hopper import EFFECTS as HOPPER_EFFECTS
from dnnc.backends.cuda.hopper import HELPERS as HOPPER_HELPERS
from dnnc.backends.cuda.hopper import VALUES as HOPPER_VALUES
from dnnc.backends.cuda.index import EQUAL, PLUS, UNARY, Text
from dnnc.backends.cuda.launch import Shape, shape_of
from dnnc.backends.cuda.prelude import HELPERS, prelude
from dnnc.backends.cuda.spelling import RESERVED, ctype, identifier, literal, scalar, stored
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.runtime.device import Launch, TensorMap
from dnnc.ir.bounds import bounds
from dnnc.ir.dtype import FLOAT8, DType, i64
from dnnc.ir.errors import InternalError
from dnnc.ir.expr import Const, Expr, Linear, Load, Op, Product, Ref, Var, children, free, unwrap, var
from dnnc.ir.loops.stmt import (
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
    Stmt,
    Store,
    exprs,
    walk_stmts,
)

VECTOR_BYTES = 16  # the widest access, and what addresses of parameters are multiples of
STATIC_SHARED = 48 * 1024  # bytes that a kernel may declare; more is asked for at the launch
SHARED_ALIGN, SWIZZLE_ALIGN = 128, 1024
INLINE_SIZE = 6  # nodes: a larger expression that is used twice gets a name
_PLAIN = ("prefetch", "cp_async_commit", "pdl_wait", "pdl_launch")


def kernel_number(symbol: str) -> int:
    """What a kernel writes into status[1]: 31 bits of its symbol's CRC."""
    return zlib.crc32(symbol.encode()) & 0x7FFFFFFF


def emit_kernel(kernel: Kernel, symbol: str, target: GpuTarget) -> str:
    """CUDA C++ of a kernel, without headers. InternalError: no grid, no constant shape, or no spelling."""
    return emit_module([(kernel, symbol)], target)


def emit_module(kernels: Sequence[tuple[Kernel, str]], target: GpuTarget) -> str:
    """Several kernels, each with its symbol, as one translation unit: helpers are compiled once."""
    for name in (symbol for _, symbol in kernels if symbol in HELPERS or symbol in RESERVED):
        raise InternalError(f"a kernel cannot be called {name}, which is a name of the prelude; take another symbol")
    units = [Unit(kernel, symbol, target) for kernel, symbol in kernels]
    bodies = [u.text() for u in units]
    text = "\n".join(bodies)
    used = {name for u in units for name in u.used}
    more = {name: helper for u in units for name, helper in u.defined.items()}
    return prelude(text, used, {**HOPPER_HELPERS, **more}) + "\n" + text


def launch_of(kernel: Kernel) -> Launch:
    """Grid, block and memory of a kernel, from its loops alone."""
    unit = Unit(kernel, kernel.name, GpuTarget())
    effects = {s.name for s in walk_stmts(kernel.entry.body) if isinstance(s, Eval)}
    if not effects.isdisjoint(HOPPER_EFFECTS):
        unit.text()  # finds the tensor maps
    s = unit.shape
    dynamic = unit.shared_total if unit.dynamic else 0
    return Launch(s.grid, (s.threads, 1, 1), dynamic, s.cluster, tuple(unit.maps), "first_level_cache" in effects)


class Unit:
    """What the functions of a kernel share."""

    def __init__(self, kernel: Kernel, symbol: str, target: GpuTarget) -> None:
        self.kernel, self.symbol, self.target = kernel, symbol, target
        self.shape: Shape = shape_of(kernel)
        self.number = kernel_number(symbol)
        self.used: set[str] = set()
        self.defined: dict[str, str] = {}
        self.maps: list[TensorMap] = []
        self.names = {f.name: symbol if f is kernel.entry else identifier(f"{symbol}_{f.name}") for f in kernel.funcs}
        self.shared = _shared(kernel)
        self.shared_total = sum(size for _, size in self.shared.values())
        self.dynamic = self.shared_total > STATIC_SHARED
        effects = {s.name for f in kernel.funcs for s in walk_stmts(f.body) if isinstance(s, Eval)}
        self.overlaps = "pdl_wait" in effects  # runs while the kernel before it still writes: nothing may be read early
        self.written = {f.name: written(f, kernel) for f in kernel.funcs}

    def text(self) -> str:
        """The functions alone; what they need of the prelude is then in `used` and `defined`."""
        self.maps.clear()
        return "\n".join(FuncEmitter(f, self).function() for f in self.kernel.funcs)

    def define(self, name: str, src: DType, f: Callable[[Expr], Expr]) -> None:
        """A helper whose body is an expression of the operator IR."""
        if name in self.defined:
            return
        x = var("x", src)
        body = f(x)
        em = FuncEmitter(Func(name, (x,), ()), self)
        em.param(x)
        em.named(body)
        lines = "\n".join([*em.lines, f"  return {em.text(body)};"])
        self.defined[name] = f"FN {scalar(body.dtype)} {name}({scalar(src)} x) {{\n{lines}\n}}"

    def tensor_map(self, m: TensorMap) -> str:
        """The name of the parameter that holds a tensor map."""
        if m not in self.maps:
            self.maps.append(m)
        return f"map{self.maps.index(m)}_"


class FuncEmitter:
    def __init__(self, func: Func, unit: Unit) -> None:
        self.func, self.unit = func, unit
        self.entry = func is unit.kernel.entry
        self.lines: list[str] = []
        self.pad = "  "
        self.values: dict[Var | Buffer, str] = {}
        self.scopes: list[set[str]] = [set()]
        self.temps: dict[Expr, str] = {}
        self.divisors: dict[Var, int] = {}
        self.ranks: dict[Var, int] = {}

    def function(self) -> str:
        params = [self.param(p) for p in self.func.params]
        if self.unit.dynamic:
            self.line(f"extern __shared__ __align__({SWIZZLE_ALIGN}) u8 shared_[];")
        self.block(self.func.body)
        if self.entry:
            params += [f"const __grid_constant__ TensorMap map{k}_" for k in range(len(self.unit.maps))]
        params.append("i32* status")
        name = self.unit.names[self.func.name]
        head = self.head(name) if self.entry else f"FN void {name}"
        return f"{head}({', '.join(params)}) {{\n" + "\n".join(self.lines) + "\n}\n"

    def head(self, name: str) -> str:
        s = self.unit.shape
        cluster = f" __cluster_dims__({s.cluster}, 1, 1)" if s.cluster > 1 else ""
        together = next((s for s in walk_stmts(self.func.body) if isinstance(s, Eval) and s.name == "resident"), None)
        blocks = (
            f", {index.constant(together.args[0], 'the number of resident blocks')}" if together is not None else ""
        )
        return f'extern "C" __global__ void{cluster} __launch_bounds__({s.threads}{blocks}) {name}'

    def param(self, p: Var | Buffer) -> str:
        name = self.fresh(p.name)
        if isinstance(p, Buffer):
            self.values[p] = name
            const = "" if self.unit.overlaps or p in self.unit.written[self.func.name] else "const "
            alone = "" if self.unit.overlaps or not self.entry else "__restrict__ "
            return f"{const}{stored(p.dtype)}* {alone}{name}"
        self.values[p] = f"(int){name}" if index.narrow(p) else name
        return f"{ctype(p.dtype, p.lanes)} {name}"

    # --- names --------------------------------------------------------------------------------------------------------

    def fresh(self, name: str) -> str:
        """A name that no open scope has."""
        base = identifier(name)
        if base in HELPERS or base in HOPPER_HELPERS or base in self.unit.names.values():
            base += "_"
        found, k = base, 0
        while any(found in s for s in self.scopes) or found in RESERVED:
            k += 1
            found = f"{base}_{k}"
        self.scopes[-1].add(found)
        return found

    @contextmanager
    def scope(self) -> Iterator[None]:
        self.scopes.append(set())
        self.pad += "  "
        yield
        self.pad = self.pad[:-2]
        self.scopes.pop()

    def declare(self, v: Var, name: str) -> None:
        self.values[v] = name
        self.ranks[v] = len(self.ranks)

    def rank(self, e: Expr) -> int:
        """How late all is known that an expression depends on."""
        return max((self.ranks.get(v, 0) for v in free(e)), default=0)

    def line(self, text: str) -> None:
        self.lines.append(self.pad + text)

    def use(self, helper: str) -> str:
        """Ask for a helper. Words of the text are found anyway: only vectors and operators need asking."""
        self.unit.used.add(helper)
        return helper

    def converts(self, t: DType) -> bool:
        """Does the GPU convert this 8-bit float by an instruction?"""
        return t in FLOAT8 and self.unit.target.has_float8

    # --- expressions --------------------------------------------------------------------------------------------------

    def text(self, e: Expr, outer: int = 0) -> str:
        """An expression in its own number of lanes, in parentheses where it binds less than `outer`."""
        body, inner = self.spelled(e)
        return f"({body})" if inner and inner < outer else body

    def spelled(self, e: Expr) -> Text:
        if e in self.temps:
            return self.temps[e], 0
        if isinstance(e, Const):
            if e.dtype is i64:
                return (
                    (str(e.value), 0 if e.value >= 0 else PLUS) if index.narrow(e) else (literal(e.value, e.dtype), 0)
                )
            number = literal(e.value, e.dtype)
            return number, PLUS if number.startswith("-") else 0
        if isinstance(e, Var):
            name = self.values[e]
            return name, UNARY if name.startswith("(") else 0
        if isinstance(e, Linear):
            return index.linear(self, e)
        if isinstance(e, Product):
            return index.product(self, e)
        if isinstance(e, Load):
            return self.load(e)
        if isinstance(e, Ref):
            return self.pointer(e.buf, e.idx), PLUS
        assert isinstance(e, Op)
        if e.name in HOPPER_VALUES:
            return HOPPER_VALUES[e.name](self, e), UNARY
        return values.compute(self, e)

    def operand(self, e: Expr, lanes: int, outer: int = 0) -> str:
        """An operand of an operation on `lanes` lanes, with exactly the C++ type of its IR type."""
        if lanes > 1 and e.lanes == 1:
            return f"splat<{scalar(e.dtype)}, {lanes}>({self.text(e)})"
        return index.wide(self, e, outer) if e.dtype is i64 and e.lanes == 1 else self.text(e, outer)

    def pointer(self, buf: Buffer, idx: tuple[Expr, ...], outer: int = PLUS) -> str:
        off = buf.offset(idx)
        name = self.values[buf]
        return name if isinstance(off, Const) and off.value == 0 else f"{name} + {self.text(off, outer)}"

    def element(self, buf: Buffer, idx: tuple[Expr, ...]) -> str:
        return f"{self.values[buf]}[{self.text(buf.offset(idx))}]"

    def aligned(self, buf: Buffer, idx: tuple[Expr, ...], lanes: int) -> int:
        """Elements of which an access may take that many at once."""
        if buf.space == "global" and not self.entry:
            return 1
        most = max(VECTOR_BYTES // buf.dtype.bytes, 1)
        known = gcd(index.divisor(buf.offset(idx), self.divisors), lanes, most)
        return known & -known if known else most

    def load(self, e: Load) -> Text:
        t = e.buf.dtype
        if any(i.lanes > 1 for i in e.idx):
            limit = "" if e.limit is None else f", {self.limit(e.limit, e.lanes)}"
            at = self.operand(e.buf.offset(e.idx), e.lanes)
            return self.from_memory(f"gather({self.values[e.buf]}, {at}{limit})", UNARY, t, e.lanes)
        if e.lanes == 1:
            found = self.from_memory(self.element(e.buf, e.idx), 0, t, 1)
            return (
                found
                if e.limit is None
                else (f"{self.limit(e.limit, 1)} > 0 ? {found[0]} : {literal(0, t)}", index.CHOICE)
            )
        name, args, limit = "take", str(e.lanes), ""
        if e.buf.space != "register":
            name, args = "ld", f"{self.aligned(e.buf, e.idx, e.lanes)}, {e.lanes}"
        if e.limit is not None:
            name, limit = name + "_first", f", {self.limit(e.limit, e.lanes)}"
        return self.from_memory(f"{name}<{args}>({self.pointer(e.buf, e.idx)}{limit})", UNARY, t, e.lanes)

    def limit(self, n: Expr, lanes: int) -> str:
        """A number of lanes as int, for any number."""
        return self.text(n) if index.narrow(n) else f"(int)min(max({index.wide(self, n)}, 0LL), {lanes}LL)"

    def from_memory(self, s: str, p: int, t: DType, lanes: int) -> Text:
        if t.kind == "b":
            return (f"{s} != 0", EQUAL) if lanes == 1 else values.call(self, "to_bool", [s], lanes)
        if not t.is_int or t.bits >= 8:
            return s, p
        return values.call(self, f"unpack_{t}", [s], lanes)

    def to_memory(self, e: Expr, t: DType, lanes: int) -> str:
        """Bytes of a bool are 0 and 1, and those of a small integer have their upper bits clear."""
        s = self.operand(e, lanes) if lanes > 1 else self.text(e)
        if t.kind == "b" and lanes > 1:
            return f"convert<u8>({s})"
        if t.is_int and t.bits < 8:
            return values.call(self, f"pack_{t}", [s], lanes)[0]
        return s

    # --- what is used twice in a statement ----------------------------------------------------------------------------

    def named(self, *roots: Expr) -> None:
        """Give names to larger expressions that occur more than once: text would otherwise grow exponentially."""
        counts: dict[Expr, int] = {}
        sizes: dict[Expr, int] = {}
        order: list[Expr] = []

        def visit(e: Expr) -> int:
            counts[e] = counts.get(e, 0) + 1
            if e not in sizes:
                sizes[e] = 1 + sum(visit(c) for c in self.parts(e))
                order.append(e)
            return sizes[e] if counts[e] == 1 or sizes[e] <= INLINE_SIZE else 1

        for r in roots:
            visit(r)
        for e in order:
            if counts[e] > 1 and sizes[e] > INLINE_SIZE and not isinstance(e, Ref):
                body = self.text(e)
                self.temps[e] = self.fresh("t")
                self.line(f"const {self.declared(e)} {self.temps[e]} = {body};")

    @staticmethod
    def parts(e: Expr) -> tuple[Expr, ...]:
        """What the text of an expression consists of: of an access, its offset."""
        if isinstance(e, (Load, Ref)):
            off = (e.buf.offset(e.idx),)
            return off if isinstance(e, Ref) or e.limit is None else (*off, e.limit)
        return children(e)

    def declared(self, e: Expr) -> str:
        return "int" if index.narrow(e) else ctype(e.dtype, e.lanes)

    # --- statements ---------------------------------------------------------------------------------------------------

    def block(self, b: Block) -> None:
        for s in b:
            self.temps = {}
            if not isinstance(s, (For, If)):
                self.named(*_roots(s))
            _STATEMENTS[type(s)](self, s, s is b[-1])

    def do_alloc(self, s: Alloc, last: bool) -> None:
        name = self.values[s.buf] = self.fresh(s.buf.name)
        t = stored(s.buf.dtype)
        n = elements(s.buf)
        if s.buf.space != "shared":
            align = "alignas(16) " if s.buf.space == "local" else ""
            self.line(f"{align}{t} {name}[{max(n, 1)}];")
        elif self.unit.dynamic:
            self.line(f"{t}* const {name} = ({t}*)(shared_ + {self.unit.shared[s.buf][0]});")
        else:
            boundary = SWIZZLE_ALIGN if s.buf.swizzle else SHARED_ALIGN
            self.line(f"__shared__ __align__({boundary}) {t} {name}[{max(n, 1)}];")

    def do_let(self, s: Let, last: bool) -> None:
        v = s.var
        if not index.narrow(v):
            body = self.operand(s.value, v.lanes)
        else:
            body = self.text(s.value) if index.narrow(s.value) else f"(int){self.text(s.value, UNARY)}"
        if v.dtype is i64 and v.lanes == 1:
            self.divisors[v] = index.divisor(s.value, self.divisors)
        name = self.fresh(v.name)  # the value does not see it
        self.line(f"const {self.declared(v)} {name} = {body};")
        self.declare(v, name)

    def do_store(self, s: Store, last: bool) -> None:
        t, lanes = s.buf.dtype, max([s.lanes, *(i.lanes for i in s.idx)])
        v = self.to_memory(s.value, t, lanes)
        limit = "" if s.limit is None else f", {self.limit(s.limit, lanes)}"
        if any(i.lanes > 1 for i in s.idx):
            self.line(f"scatter({self.values[s.buf]}, {self.operand(s.buf.offset(s.idx), lanes)}, {v}{limit});")
        elif lanes == 1 and s.limit is None:
            self.line(f"{self.element(s.buf, s.idx)} = {v};")
        elif lanes == 1:
            self.line(f"if ({self.limit(s.limit, 1)} > 0) {self.element(s.buf, s.idx)} = {v};")  # type: ignore[arg-type]
        else:
            name = "put" if s.buf.space == "register" else "st"
            wide = "" if name == "put" else f"<{self.aligned(s.buf, s.idx, lanes)}>"
            # one offset: of a pointer that grows term by term NVRTC stores the elements one by one
            at = self.pointer(s.buf, s.idx, PLUS + 1 if s.buf.space == "global" else PLUS)
            self.line(f"{name}{'_first' if limit else ''}{wide}({at}, {v}{limit});")

    def do_eval(self, s: Eval, last: bool) -> None:
        if s.name in HOPPER_EFFECTS:
            self.line(HOPPER_EFFECTS[s.name](self, s))
        elif s.name in self.unit.names:
            args = [*(self.argument(a) for a in s.args), "status"]
            self.line(f"{self.unit.names[s.name]}({', '.join(args)});")
        elif s.name in ("barrier", "syncwarp"):
            self.line("__syncthreads();" if s.name == "barrier" else "__syncwarp();")
        elif s.name == "cp_async":
            self.cp_async(s)
        elif s.name == "cp_async_wait":
            self.line(f"{s.name}<{index.constant(s.args[0], s.name)}>();")
        elif s.name in _PLAIN:
            self.line(f"{s.name}({', '.join(self.text(a) for a in s.args)});")
        else:
            raise InternalError(f"{s.name} has no CUDA spelling")

    def do_immediate_rows(self, s: ImmediateRows, last: bool) -> None:
        y, group = s.args[:2]
        assert isinstance(y, Ref)
        first, taps, step = f"{self.values[y.buf]}[{self.text(y.buf.offset(y.idx))}", [], 0
        for x, inside in s.taps:
            assert isinstance(x, Ref)
            step = unwrap(x.buf.full_strides()[s.axis]) * x.buf.dtype.bytes
            taps.append((self.text(x), None if inside is None else self.text(inside)))
        for line in immediate_rows.lines(s, [f"{first} + {r}]" for r in range(s.rows)], taps, self.text(group), step):
            self.line(line)

    def argument(self, a: Expr) -> str:
        return self.text(a) if isinstance(a, Ref) else self.operand(a, a.lanes)

    def cp_async(self, s: Eval) -> None:
        to, source = s.args[:2]
        assert isinstance(to, Ref) and isinstance(source, Ref)
        size = to.buf.dtype.bytes
        n = to.lanes * size
        whole = all(self.aligned(r.buf, r.idx, to.lanes) * size == n for r in (to, source))
        if n not in (4, 8, 16) or not whole:
            raise InternalError(
                f"cp_async copies 4, 8 or 16 aligned bytes at once; got {n} bytes from {source!r} to {to!r}"
            )
        limit = ""
        if len(s.args) > 2:
            k = s.args[2]
            lo, hi = bounds(k)
            clamped = self.limit(k, to.lanes) if not index.narrow(k) else self.text(k)
            if index.narrow(k) and not (lo is not None and lo >= 0 and hi is not None and hi <= to.lanes):
                clamped = f"min(max({clamped}, 0), {to.lanes})"
            limit = f", {size} * ({clamped})"
        self.line(f"cp_async<{n}>({self.text(to)}, {self.text(source)}{limit});")

    def do_if(self, s: If, last: bool) -> None:
        self.named(s.cond)
        self.line(f"if ({self.text(s.cond)}) {{")
        with self.scope():
            self.block(s.then)
        if s.other:
            self.line("} else {")
            with self.scope():
                self.block(s.other)
        self.line("}")

    def do_for(self, s: For, last: bool) -> None:
        if s.kind == "vector":
            raise InternalError(f"a {s.kind} loop has no CUDA form; vectorize it or choose another kind")
        self.named(s.lo, s.hi)
        if s.kind in self.unit.shape.kinds and s in self.unit.shape.numbers:
            self.number(s, last)
            return
        lo, hi = self.text(s.lo), self.text(s.hi, index.LESS + 1)
        pad = self.pad
        with self.scope():
            name = self.fresh(s.var.name)
            self.declare(s.var, name)
            unroll = "UNROLL " if s.kind == "unroll" else ""
            self.lines.append(f"{pad}{unroll}for ({self.declared(s.var)} {name} = {lo}; {name} < {hi}; ++{name}) {{")
            self.block(s.body)
        self.line("}")

    def number(self, s: For, last: bool) -> None:
        """A loop whose iterations are blocks or threads: its variable is a number that the hardware gives."""
        if last:
            self.numbered(s)
            return
        self.line("{")
        with self.scope():
            self.numbered(s)
        self.line("}")

    def numbered(self, s: For) -> None:
        lo, number = self.text(s.lo, PLUS), self.unit.shape.numbers[s]
        name = self.fresh(s.var.name)
        self.line(f"const int {name} = {number if lo == '0' else f'{lo} + {number}'};")
        self.declare(s.var, name)
        self.block(s.body)


def _roots(s: Stmt) -> tuple[Expr, ...]:
    """The expressions of which a statement's text is made."""
    if not isinstance(s, Store):
        return exprs(s)
    own = (s.buf.offset(s.idx), s.value)
    return own if s.limit is None else (*own, s.limit)


def elements(buf: Buffer) -> int:
    n = 1
    for d in buf.shape:
        n *= index.constant(d, f"the shape of {buf.space} memory {buf.name}")
    return n


def _shared(kernel: Kernel) -> dict[Buffer, tuple[int, int]]:
    """Offset and size in bytes of every shared buffer; those that TMA swizzles first, for their alignment."""
    found = [
        s.buf for f in kernel.funcs for s in walk_stmts(f.body) if isinstance(s, Alloc) and s.buf.space == "shared"
    ]
    out: dict[Buffer, tuple[int, int]] = {}
    at = 0
    for buf in sorted(found, key=lambda b: not b.swizzle):
        align = SWIZZLE_ALIGN if buf.swizzle else SHARED_ALIGN
        size = -(-elements(buf) * buf.dtype.bytes // align) * align
        out[buf] = (at, size)
        at += size
    return out


def written(f: Func, kernel: Kernel) -> set[Buffer]:
    """Buffers that a function writes, itself or through what it calls or copies."""
    out: set[Buffer] = set()
    bodies = {g.name: g for g in kernel.funcs}
    for s in walk_stmts(f.body):
        if isinstance(s, Store):
            out.add(s.buf)
        elif isinstance(s, Eval) and s.name in bodies:
            inner = written(bodies[s.name], kernel)
            out |= {a.buf for a, p in zip(s.args, bodies[s.name].params) if isinstance(a, Ref) and p in inner}
        elif isinstance(s, Eval) and s.name in ("cp_async", "tma_load", "tma_store", "immediate_rows"):
            out |= {a.buf for a in s.args[:1] if isinstance(a, Ref)}
        elif isinstance(s, Eval) and s.name not in ("prefetch", "wgmma"):
            out |= {a.buf for a in s.args if isinstance(a, Ref)}
    return out


_STATEMENTS: dict[type[Stmt], Callable[[FuncEmitter, Any, bool], None]] = {
    Alloc: FuncEmitter.do_alloc, Let: FuncEmitter.do_let, Store: FuncEmitter.do_store, Eval: FuncEmitter.do_eval,
    If: FuncEmitter.do_if, For: FuncEmitter.do_for, ImmediateRows: FuncEmitter.do_immediate_rows,
}  # fmt: skip
