"""Operator IR -> LLVM IR text. One walk; pure instructions go as far out as operands allow, shared.

So loop-invariant motion and common subexpressions of addresses come for free, and LLVM needs little more than sroa.
`unroll` loops are expanded while printing, their variables evaluated as ints. Register buffers become allocas; after
unrolling every index into them is constant, so sroa turns them into SSA values. Integer arithmetic wraps and no `nsw`,
`inbounds` or fast-math flag is printed: nothing is promised to LLVM that was not proved. Buffers are `noalias`: the
memory plan gives every parameter its own memory, and a kernel that works in place reads and writes one parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import reduce

from dnnc.backends.llvm import gathers, matrix_tiles, streams, values
from dnnc.backends.llvm.spelling import literal, memory_mangle, scalar, stored, vector
from dnnc.backends.llvm.statements import MANY_SUMS, Region, emit_block, vectors
from dnnc.backends.runtime.frames import FRAME_STATUS
from dnnc.ir.bounds import bounds
from dnnc.ir.dtype import DType, f16, f32, i64, u8
from dnnc.ir.expr import Const, Expr, Linear, Load, Op, Product, Ref, Var, const, free, substitute, unwrap
from dnnc.ir.linear import lane_offsets
from dnnc.ir.loops.stmt import Alloc, Buffer, For, Func, Kernel, SparseRows, walk_stmts
from dnnc.ir.loops.stmt import stored as stored_buffers

ADDRESSED = (1, 2, 4, 8)  # scales that an address may have
MOST_MULTIPLES = 4  # of a loop's variable that take a register each
MOST_VECTORS = 4  # that are faster to load and to shuffle than their elements are to gather
MOST_OF_TWO = 16  # the same where a shuffle takes lanes of two vectors in any order (AVX-512)


def emit_kernel(kernel: Kernel, symbol: str, features: frozenset[str] | None = None) -> str:
    """LLVM module of `void symbol(buffers and scalars, ptr frame, i64 tid, i64 nthreads)`. features: None is all.

    Code of `sparse_rows` is declared; `rows_of` says what it is.
    """
    names = {f.name: symbol if f is kernel.entry else f"{symbol}.{f.name}" for f in kernel.funcs}
    decls: set[str] = set()
    rows = {_code_key(s): name for name, s in rows_of(kernel, symbol).items()}
    large = streams.streamed(kernel.entry, features)
    if not large:
        text = [FuncEmitter(f, names, rows, decls, features, f is kernel.entry).text() for f in kernel.funcs]
        return "\n".join([*sorted(decls), *text]) + "\n"
    text = [FuncEmitter(f, names, rows, decls, features, False).text() for f in kernel.funcs if f is not kernel.entry]
    ways = {f"{symbol}..past": large, f"{symbol}..through": frozenset[Buffer]()}
    both = [
        FuncEmitter(kernel.entry, {**names, kernel.entry.name: way}, rows, decls, features, False, b)
        for way, b in ways.items()
    ]
    text += [f.text() for f in both]
    text.append(streams.dispatch(symbol, both[0].params, sorted(both[0].values[b] for b in large), *ways))
    return "\n".join([*sorted(decls), *text]) + "\n"


def rows_of(kernel: Kernel, symbol: str) -> dict[str, SparseRows]:
    """The `sparse_rows` of a kernel by the symbols of their code, which do not tell of patterns."""
    found: dict[tuple[object, ...], SparseRows] = {}
    for f in kernel.funcs:
        for s in walk_stmts(f.body):
            if isinstance(s, SparseRows):
                found.setdefault(_code_key(s), s)
    return {f"{symbol}.rows.{k}": s for k, s in enumerate(found.values())}


def _code_key(s: SparseRows) -> tuple[object, ...]:
    """What the code of a statement depends on."""
    x = s.args[1]
    return s.head, s.pattern, unwrap(x.buf.full_strides()[-2]) if s.window and isinstance(x, Ref) else None


class FuncEmitter:
    def __init__(
        self,
        func: Func,
        names: dict[str, str],
        rows: Mapping[tuple[object, ...], str],
        decls: set[str],
        features: frozenset[str] | None,
        entry: bool,
        streamed: Collection[Buffer] = (),
    ) -> None:
        self.func, self.names, self.rows, self.decls, self.features, self.entry, self.streamed = (
            func,
            names,
            rows,
            decls,
            features,
            entry,
            streamed,
        )
        self.ahead = bool(streamed) and streams.walks(func)
        self.regions = [Region("entry")]
        self.depth: dict[str, int] = {}
        self.values: dict[Var | Buffer, str] = {}
        self.unrolled: dict[Var, int] = {}
        self.forms: dict[Expr, tuple[list[tuple[Expr, int]], list[tuple[Expr, int]]]] = {}
        self.now: dict[Expr, str] = {}
        self.substituted: dict[tuple[object, ...], Expr] = {}
        self.count = 0
        self.allocas: list[str] = []
        self.frees: list[str] = []
        self.tiles: dict[Buffer, int] = {}  # the first register of each buffer of tiles
        self.ever_unrolled = frozenset(
            s.var for s in walk_stmts(func.body) if isinstance(s, For) and s.kind == "unroll"
        )
        self.readonly = set(func.buffers) - stored_buffers(func.body)
        self.pool: dict[float, int] | None = (
            None  # constants of epilogues, and where they are in their table; None: there is no epilogue
        )
        self.table = ""  # its address, while an epilogue is printed
        self.crowded = any(isinstance(s, Alloc) and vectors(s.buf) >= MANY_SUMS for s in walk_stmts(func.body))

    def text(self) -> str:
        self.values.update((p, f"%{p.name}") for p in self.func.params)
        emit_block(self, self.func.body)
        if self.streamed:
            self.decls.add(f"declare void @{streams.FENCE}()")
            self.frees.append(f"  call void @{streams.FENCE}()")
        if self.pool is not None:
            numbers = ", ".join(f"float {literal(v, f32)}" for v in self.pool or (0.0,))
            self.decls.add(
                f"{self.pool_name} = private unnamed_addr constant [{max(len(self.pool), 1)} x float] [{numbers}]"
            )
        if self.tiles:
            matrix_tiles.configure(self)
        linkage = "" if self.entry else "internal "
        inline = "" if self.entry else " noinline"
        head = f"define {linkage}void @{self.names[self.func.name]}({', '.join(self.params)}) nounwind{inline} {{"
        return "\n".join([head, "entry:", *self.allocas, *self.regions[0].lines, *self.frees, "  ret void", "}"])

    @property
    def params(self) -> list[str]:
        """Types and names."""
        own = [
            f"ptr noalias %{p.name}" if isinstance(p, Buffer) else f"{vector(p.dtype, p.lanes)} %{p.name}"
            for p in self.func.params
        ]
        return [*own, "ptr %frame.", "i64 %tid.", "i64 %nthreads."]

    def lacks(self, feature: str) -> bool:
        """True if an x86 instruction set is missing. Other architectures have other names, none needed here."""
        return self.features is not None and feature not in self.features and "neon" not in self.features

    def has(self, feature: str) -> bool:
        """Is an x86 instruction set there for certain?"""
        return self.features is not None and feature in self.features

    def has_half(self, t: DType) -> bool:
        """Does the CPU convert this small float?"""
        return t is f16 and not self.lacks("f16c")

    def sparse_rows(self, s: SparseRows) -> str:
        """The symbol of the code of a sparse matrix's rows, which is no part of the module."""
        symbol = self.rows[_code_key(s)]
        types = ["ptr" if isinstance(a, Ref) else "i64" for a in s.args]
        self.decls.add(f"declare hidden void @{symbol}({', '.join(types)})")
        return symbol

    # --- placing code -------------------------------------------------------------------------------------------------

    def depth_of(self, operands: tuple[str, ...]) -> int:
        get, deepest = self.depth.get, 0
        for v in operands:
            d = get(v, 0)
            if d > deepest:
                deepest = d
        return deepest

    def fresh(self) -> int:
        self.count += 1
        return self.count

    def pure(self, text: str, *operands: str, here: bool = False) -> str:
        """Emit or reuse a pure instruction as far out as its operands allow (`here`: in the current region)."""
        d = self.depth_of(operands)  # equal texts have equal operands: none lies further out
        for r in self.regions[d:] if here else (self.regions[d],):
            v = r.memo.get(text)
            if v is not None:
                return v
        v = f"%.{self.fresh()}"
        d = len(self.regions) - 1 if here else d
        region = self.regions[d]
        region.lines.append(f"  {v} = {text}")
        region.memo[text] = v
        if here:
            region.local.append(text)
        self.depth[v] = d
        return v

    def effect(self, text: str) -> str:
        """Emit an instruction with a result that may not be shared or moved."""
        v = f"%.{self.fresh()}"
        self.line(f"{v} = {text}")
        self.depth[v] = len(self.regions) - 1
        return v

    def line(self, s: str) -> None:
        self.regions[-1].lines.append("  " + s)

    def call(self, name: str, result: str, *args: tuple[str, str], here: bool = True) -> str:
        """A pure call of an intrinsic or libm function; args are (type, value)."""
        self.decls.add(f"declare {result} @{name}({', '.join(t for t, _ in args)})")
        return self.pure(
            f"call {result} @{name}({', '.join(f'{t} {v}' for t, v in args)})", *(v for _, v in args), here=here
        )

    # --- addresses ----------------------------------------------------------------------------------------------------

    def address(self, buf: Buffer, idx: tuple[Expr, ...]) -> str:
        return self.place(buf, buf.offset(idx))

    def place(self, buf: Buffer, offset: Expr) -> str:
        """Base plus terms, outermost loop first, constant last, where it folds into the displacement."""
        terms, k = self.folded(offset)
        size, p = buf.dtype.bytes, self.values[buf]
        groups: dict[int, list[str]] = {}
        for t, c in terms:
            v = self.scaled(self.expr(t), c * size)
            groups.setdefault(self.depth.get(v, 0), []).append(v)
        for d in sorted(groups):
            for v in groups[d]:
                p = self.pure(f"getelementptr i8, ptr {p}, i64 {v}", p, v)
        return self.pure(f"getelementptr i8, ptr {p}, i64 {k * size}", p) if k else p

    def folded(self, e: Expr) -> tuple[list[tuple[Expr, int]], int]:
        """The linear form of an index, with the unroll variables as numbers."""
        if isinstance(e, Const):
            return [], int(e.value)
        pairs, k = (e.terms, e.const) if isinstance(e, Linear) else (((e, 1),), 0)
        if not self.unrolled:
            return list(pairs), k
        split = self.forms.get(e)
        if split is None:
            split = ([], [])
            for t, c in pairs:
                split[0 if self.ever_unrolled.isdisjoint(free(t)) else 1].append((t, c))
            self.forms[e] = split
        out = split[0]
        for t, c in split[1]:
            n = self.unrolled.get(t)  # type: ignore[call-overload]
            if n is not None:
                k += c * n
                continue
            rest, k2 = self.folded_term(t)
            out = [*out, *((u, c * d) for u, d in rest)]
            k += c * k2
        return out, k

    def folded_term(self, t: Expr) -> tuple[list[tuple[Expr, int]], int]:
        r = self.without_unrolled(t)
        if isinstance(r, Const):
            return [], int(r.value)
        return (list(r.terms), r.const) if isinstance(r, Linear) else ([(r, 1)], 0)

    def without_unrolled(self, e: Expr) -> Expr:
        inside = [v for v in free(e) if v in self.unrolled]
        if not inside:
            return e
        key = (e, *(self.unrolled[v] for v in inside))
        r = self.substituted.get(key)
        if r is None:
            r = self.substituted[key] = substitute(e, {v: const(self.unrolled[v]) for v in inside})
        return r

    def scaled(self, v: str, c: int) -> str:
        """v * c. An innermost loop counts multiples of its variable: LLVM's scheduler sees a product at the head of the
        body as a delay, loads everything else ahead of what waits for it, and keeps that in memory if need be.
        """
        region = self.regions[self.depth.get(v, 0)]
        if (
            c in ADDRESSED
            or region.stepped != v
            or (c not in region.multiples and len(region.multiples) == MOST_MULTIPLES)
        ):
            return v if c == 1 else self.pure(f"mul i64 {v}, {c}", v)
        if c not in region.multiples:
            region.multiples[c] = found = f"%.{self.fresh()}"
            self.depth[found] = self.depth[v]
        return region.multiples[c]

    # --- expressions --------------------------------------------------------------------------------------------------

    def expr(self, e: Expr) -> str:
        """The SSA value of an expression; expressions are DAGs, so each node is computed once per statement."""
        if isinstance(e, Const):
            return literal(e.value, e.dtype)
        if isinstance(e, Var):
            n = self.unrolled.get(e)
            return str(n) if n is not None else self.values[e]
        v = self.now.get(e)
        if v is None:
            v = self.now[e] = self.compute(e)
        return v

    def operand(self, e: Expr, lanes: int) -> str:
        """An operand of an operation on `lanes` lanes: scalars are splatted."""
        if isinstance(e, Const):
            pooled = self.table and lanes > 1 and e.dtype is f32 and e.value != 0.0
            return self.pooled(float(e.value), lanes) if pooled else literal(e.value, e.dtype, lanes)
        v = self.expr(e)
        return v if e.lanes == lanes else self.splat(v, e.dtype, lanes)

    @property
    def pool_name(self) -> str:
        return f"@constants.{self.func.name}"

    def pooled(self, c: float, lanes: int) -> str:
        """An epilogue constant from a table of unknown address, so that LLVM keeps it out of registers."""
        assert self.pool is not None
        at = self.pool.setdefault(c, len(self.pool))
        p = self.pure(f"getelementptr i8, ptr {self.table}, i64 {at * 4}", self.table, here=True)
        return self.splat(self.pure(f"load float, ptr {p}, align 4", p, here=True), f32, lanes)

    def splat(self, v: str, t: DType, lanes: int) -> str:
        ty = vector(t, lanes)
        if not v.startswith("%"):  # an unroll variable, or a test of one
            return literal(v == "true" if t.kind == "b" else int(v), t, lanes)
        a = self.pure(f"insertelement {ty} poison, {scalar(t)} {v}, i64 0", v, here=True)
        return self.pure(f"shufflevector {ty} {a}, {ty} poison, <{lanes} x i32> zeroinitializer", a, here=True)

    def compute(self, e: Expr) -> str:
        if isinstance(e, (Linear, Product)):
            return self.integer(e)
        if isinstance(e, Load):
            return self.load(e)
        if isinstance(e, Ref):
            return self.address(e.buf, e.idx)
        assert isinstance(e, Op)
        if (e.lanes == 1 and e.dtype is i64) or (
            e.dtype.kind == "b" and e.lanes == 1 and all(a.dtype is i64 for a in e.args)
        ):
            r = self.without_unrolled(e)
            if r is not e:
                return self.expr(r)
        return values.compute(self, e)

    def integer(self, e: Expr) -> str:
        terms, k = self.folded(e)
        parts: list[str] = []
        for t, c in terms:
            if isinstance(t, Product):
                v = reduce(lambda a, b: self.pure(f"mul i64 {a}, {b}", a, b), (self.expr(f) for f in t.factors))
            else:
                v = self.expr(t)
            parts.append(self.scaled(v, c))
        if not parts:
            return str(k)
        parts.sort(key=lambda v: self.depth.get(v, 0))
        r = parts[0]
        for v in parts[1:]:
            r = self.pure(f"add i64 {r}, {v}", r, v)
        return self.pure(f"add i64 {r}, {k}", r) if k else r

    def load(self, e: Load) -> str:
        if any(i.lanes > 1 for i in e.idx):
            return self.gather(e)
        p, ty = self.address(e.buf, e.idx), stored(e.buf.dtype, e.lanes)
        if self.ahead and streams.read_ahead(e):
            for at in range(0, e.lanes * e.buf.dtype.bytes, streams.LINE):
                self.prefetch(self.pure(f"getelementptr i8, ptr {p}, i64 {streams.AHEAD + at}", p))
        if e.limit is not None:
            v = self.masked_load(p, ty, e)
        else:
            text = f"load {ty}, ptr {p}, align {self.alignment(e.buf, e.lanes)}"
            v = self.pure(text, p, here=True) if e.buf in self.readonly else self.effect(text)
        return self.from_memory(v, e.buf.dtype, e.lanes)

    def from_memory(self, v: str, t: DType, lanes: int) -> str:
        ty = stored(t, lanes)
        if t.kind == "b":
            return self.pure(f"icmp ne {ty} {v}, {'zeroinitializer' if lanes > 1 else 0}", v, here=True)
        if not t.is_int or t.bits >= 8:
            return v
        if t.kind == "u":
            return self.pure(f"and {ty} {v}, {literal((1 << t.bits) - 1, u8, lanes)}", v, here=True)
        by = literal(8 - t.bits, u8, lanes)  # the sign bit of a 4-bit integer is in the middle of its byte
        high = self.pure(f"shl {ty} {v}, {by}", v, here=True)
        return self.pure(f"ashr {ty} {high}, {by}", high, here=True)

    def to_memory(self, v: str, t: DType, lanes: int) -> str:
        """Bytes of a bool are 0 and 1, and those of a 4-bit integer have their upper half clear."""
        if t.kind == "b":
            return self.pure(f"zext {vector(t, lanes)} {v} to {stored(t, lanes)}", v, here=True)
        if t.is_int and t.bits < 8:
            return self.pure(f"and {stored(t, lanes)} {v}, {literal((1 << t.bits) - 1, u8, lanes)}", v, here=True)
        return v

    @staticmethod
    def alignment(buf: Buffer, lanes: int) -> int:
        return (
            64 if buf.space == "register" and lanes * buf.dtype.bytes == 64 else buf.dtype.bytes
        )  # a local row may be read anywhere

    def masked_load(self, p: str, ty: str, e: Load) -> str:
        assert e.limit is not None
        m = f"<{e.lanes} x i1>"
        name = f"llvm.masked.load.{memory_mangle(e.buf.dtype, e.lanes)}.p0"
        self.decls.add(f"declare {ty} @{name}(ptr, i32, {m}, {ty})")
        return self.effect(
            f"call {ty} @{name}(ptr {p}, i32 {e.buf.dtype.bytes}, {m} {self.mask(e.limit, e.lanes)}, {ty} "
            "zeroinitializer)"
        )

    def gather(self, e: Load) -> str:
        lanes, ty = e.lanes, stored(e.buf.dtype, e.lanes)
        found = lane_offsets(self.without_unrolled(e.buf.offset(e.idx)), lanes) if e.limit is None else None
        if found is not None and self.is_in_a_few_vectors(e, found[0]):
            return self.from_memory(self.shuffled(e, *found), e.buf.dtype, lanes)
        picked = gathers.picked(self, e)
        if picked:
            return self.from_memory(picked, e.buf.dtype, lanes)
        single = gathers.one_by_one(self, e)
        if single:
            return self.from_memory(single, e.buf.dtype, lanes)
        off = self.operand(e.buf.offset(e.idx), lanes)
        p = self.pure(
            f"getelementptr {stored(e.buf.dtype, 1)}, ptr {self.values[e.buf]}, <{lanes} x i64> {off}", off, here=True
        )
        m = f"<{lanes} x i1>"
        mask = self.mask(e.limit, lanes) if e.limit is not None else "splat (i1 true)"
        name = f"llvm.masked.gather.{memory_mangle(e.buf.dtype, lanes)}.v{lanes}p0"
        self.decls.add(f"declare {ty} @{name}(<{lanes} x ptr>, i32, {m}, {ty})")
        v = self.effect(
            f"call {ty} @{name}(<{lanes} x ptr> {p}, i32 {e.buf.dtype.bytes}, {m} {mask}, {ty} zeroinitializer)"
        )
        return self.from_memory(v, e.buf.dtype, lanes)

    def is_in_a_few_vectors(self, e: Load, offsets: tuple[int, ...]) -> bool:
        """Are the vectors from the first to the last lane's place faster to load and to shuffle than to gather?"""
        span = max(offsets) - min(offsets) + 1
        wide = e.buf.dtype.bytes >= 4 and (self.features is None or "avx512f" in self.features)
        return e.lanes < span <= min(MOST_OF_TWO if wide else MOST_VECTORS, e.lanes) * e.lanes

    def shuffled(self, e: Load, offsets: tuple[int, ...], start: Expr) -> str:
        """Lanes out of several vectors by shuffles, not a gather; the last vector ends at the last place."""
        n, ty, low = e.lanes, stored(e.buf.dtype, e.lanes), min(offsets)
        places, last = [k - low for k in offsets], max(offsets) - low
        made, held = "", [-1] * n  # lane of `made` where a lane's element is
        for k in range(-(-(last + 1) // n)):
            at = min(k * n, last + 1 - n)
            fresh = [j for j, x in enumerate(places) if held[j] < 0 and at <= x < at + n]
            if not fresh:
                continue
            p = self.place(e.buf, start + low + at)
            text = f"load {ty}, ptr {p}, align {self.alignment(e.buf, n)}"
            v = self.pure(text, p, here=True) if e.buf in self.readonly else self.effect(text)
            if not made:  # its elements stay where they are until the second vector comes
                made = v
                for j in fresh:
                    held[j] = places[j] - at
                continue
            order = [n + places[j] - at if j in fresh else held[j] for j in range(n)]
            picks = ", ".join("i32 poison" if x < 0 else f"i32 {x}" for x in order)
            made = self.pure(f"shufflevector {ty} {made}, {ty} {v}, <{n} x i32> <{picks}>", made, v, here=True)
            held = [j if x >= 0 else -1 for j, x in enumerate(order)]
        return made

    def mask(self, n: Expr, lanes: int) -> str:
        """Lanes below n, for any n: clamped before it is narrowed."""
        v = self.expr(n)
        lo, hi = bounds(n)
        if lo is None or lo < 0:
            v = self.call("llvm.smax.i64", "i64", ("i64", v), ("i64", "0"), here=False)
        if hi is None or hi > lanes:
            v = self.call("llvm.smin.i64", "i64", ("i64", v), ("i64", str(lanes)), here=False)
        t = self.pure(f"trunc i64 {v} to i32", v)
        a = self.pure(f"insertelement <{lanes} x i32> poison, i32 {t}, i64 0", t)
        b = self.pure(f"shufflevector <{lanes} x i32> {a}, <{lanes} x i32> poison, <{lanes} x i32> zeroinitializer", a)
        iota = ", ".join(f"i32 {k}" for k in range(lanes))
        return self.pure(f"icmp slt <{lanes} x i32> <{iota}>, {b}", b)

    def raise_status(self, bad: str) -> None:
        """Set Frame.status to 1 where `bad` holds, without a branch: the store goes to a cell of our own otherwise."""
        if "  %unused. = alloca i64, align 8" not in self.allocas:
            self.allocas.append("  %unused. = alloca i64, align 8")
        p = self.pure(f"getelementptr i64, ptr %frame., i64 {FRAME_STATUS}", here=True)
        cell = self.pure(f"select i1 {bad}, ptr {p}, ptr %unused.", bad, here=True)
        self.line(f"store i64 1, ptr {cell}, align 8")

    def prefetch(self, p: str) -> None:
        """Into the nearest cache, to be read."""
        self.decls.add("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        self.line(f"call void @llvm.prefetch.p0(ptr {p}, i32 0, i32 3, i32 1)")
