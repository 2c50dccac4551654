"""Kernels of equal structure and different sizes -> one kernel that takes the sizes as arguments.

    def mul(x: f32[8, 4, 64, 16], y: f32[64]): for i0 in range(8): for i1 in range(4): ...
    def mul(x: f32[8, 2, 256, 16], y: f32[32]): for i0 in range(8): for i1 in range(2): ...

    def mul(s0: dim[1, None], s1: dim[64, None, 64], x: f32[8, s0, s1, 16], y: f32[16*s0]): ...

In: naive nests, in which every element is computed by itself or is a sum across memory. Out: families with a symbolic
nest, and the sizes with which each member calls it. Texts are anti-unified (Plotkin, 1970): numbers that differ, in the
same ratio in all members, are multiples of one size; floats that differ, such as one divided by a size, are passed as
their bits. A chain over whole arrays is a loop over one axis first, whatever its rank, so that updates of all
parameters are one family. A nest is a member if the symbolic text with its sizes is its own text. Elements are the same
bits in any order of computing; sums are, if the kernels of the family and of the member make them `in_rows`.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dnnc.ir.expr import Expr, Load, Op, Var, const, extent, free, load, rebuild, substitute, terms, value, walk
from dnnc.ir.loops.stmt import (
    Alloc,
    Block,
    Buffer,
    For,
    Kernel,
    Param,
    Store,
    exprs,
    loop_var,
    substitute_block,
    walk_stmts,
)
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.passes.lower.approximate import quotient, softmax_terms, stores_halves
from dnnc.passes.lower.form import Map, Reduction, Rows
from dnnc.passes.lower.nests import Lowered

# An integer or a float32 of a text: no part of a name, no number with a type such as f16(0.5).
NUMBER = re.compile(r"(?<![\w.])(?<!\d\()(?<!\de[-+])(\d+\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+|\d+(?![\w.]))")
RESERVED = re.compile(r"\bs\d+\b")  # names of sizes
LANES = 16  # sizes of the innermost loop that are multiples of it have no tail on any CPU
LARGE = 16 << 20  # bytes of an array for which a target may have code of its own, such as non-temporal stores
SUMS = ("sum", "max", "min")  # what a reduction of any size may combine by
ROW, LONGEST = 8, 512  # terms of the loops of a sum whose order is the same for all sizes
BITS = "bits_f32"
EXACT = ("+", "-", "*", "fma", "min", "max", "fmin", "fmax", "select")  # of which no rule depends on a constant's value
PLACES = 4096  # numbers of a text, beyond which it is not worth the time

Number = int | float
Kind = tuple[object, ...]


@dataclass(frozen=True)
class Nest:
    """A naive nest as text: `frame` has no numbers, `head` only the lines of parameters and loops."""

    lowered: Lowered
    text: str
    frame: str
    numbers: tuple[Number, ...]
    head: str
    in_head: tuple[bool, ...]  # of each number

    @property
    def kind(self) -> Kind:
        """Equal for nests that may be one family."""
        entry = self.lowered.kernel.entry
        return entry.name, tuple((b.dtype, len(b.shape)) for b in entry.buffers), _innermost(self.lowered) % LANES == 0

    @property
    def floats(self) -> list[float]:
        return [n for n in self.numbers if isinstance(n, float)]

    @property
    def sizes(self) -> tuple[Number, ...]:
        """The numbers of the head."""
        return tuple(n for n, h in zip(self.numbers, self.in_head) if h)


@dataclass(frozen=True)
class Varying:
    """A number of a family that is `factor` times a size, or whose bits are one."""

    size: int
    factor: int = 1
    is_float: bool = False


@dataclass(frozen=True)
class Family:
    """A nest whose sizes are parameters s0, s1 ...; `words`: its numbers."""

    lowered: Lowered
    frame: str
    words: tuple[Number | Varying, ...]

    def sizes(self, nest: Nest) -> tuple[int, ...] | None:
        """The sizes with which a nest of the same kind is this one; None if it is another one."""
        found: dict[int, int] = {}
        buffers = zip(self.lowered.kernel.entry.buffers, nest.lowered.kernel.entry.buffers)
        for d, n in ((d, value(n)) for b, c in buffers for d, n in zip(b.shape, c.shape)):
            ts, _ = terms(d)
            if ts and n is not None:
                number = next(k for k, v in enumerate(self.lowered.dims) if v is ts[0][0])
                found.setdefault(number, n // ts[0][1])
        floats = nest.floats
        mine = [w for w in self.words if isinstance(w, float) or (isinstance(w, Varying) and w.is_float)]
        if len(floats) != len(mine):
            return None
        for w, x in zip(mine, floats):
            if isinstance(w, Varying):
                found.setdefault(w.size, _bits(x))
        if len(found) < len(self.lowered.dims):
            return None
        sizes = tuple(found[k] for k in range(len(found)))
        if any(n % v.div or n < v.lo or (v.hi is not None and n > v.hi) for n, v in zip(sizes, self.lowered.dims)):  # type: ignore[operator]
            return None
        given = iter(floats)

        def word(w: Number | Varying) -> str:
            if isinstance(w, Varying) and not w.is_float:
                return str(w.factor * sizes[w.size])
            x = next(given) if isinstance(w, (float, Varying)) else w
            return repr(x if isinstance(w, Varying) else w)

        return sizes if _text(parse_kernel(_filled(self.frame, self.words, word))) == nest.text else None


def nest_of(lowered: Lowered, as_vectors: bool = True) -> Nest | None:
    """A kernel as a possible member of a family; None if its sums depend on its sizes, or if it has memory of its own,
    symbolic sizes or large arrays.

    as_vectors: a chain over whole arrays becomes a loop over one axis.
    """
    form = lowered.form
    if lowered.dims or len(lowered.kernel.funcs) > 1 or not form.outer:
        return None
    if type(form) is Map:
        lowered = (_as_vectors(lowered) if as_vectors else None) or lowered
    elif type(form) is not Rows or form.panels or not all(map(_of_any_size, form.reductions)):
        return None
    entry = lowered.kernel.entry
    sums = {r.acc for r in form.reductions}
    if any(isinstance(s, Alloc) and s.buf not in sums for s in walk_stmts(entry.body)) or not _innermost(lowered):
        return None
    if any((value(b.size()) or 0) * b.dtype.bytes >= LARGE for b in entry.buffers):
        return None
    if sums and (_innermost(lowered) % LANES or _digits(entry.body, {v for r in form.reductions for v in r.loops})):
        return None
    text = _text(lowered.kernel)
    numbers = tuple(int(w) if w.isdigit() else float(w) for w in NUMBER.findall(text))
    if len(numbers) > PLACES or RESERVED.search(text):
        return None
    frame = NUMBER.sub("#", text)
    lines = [(line, line.lstrip().startswith(("def ", "for "))) for line in frame.splitlines()]
    head = "\n".join(line for line, is_head in lines if is_head)
    in_head = tuple(is_head for line, is_head in lines for _ in range(line.count("#")))
    return Nest(lowered, text, frame, numbers, head, in_head)


def _text(kernel: Kernel) -> str:
    """The text, where a variable that is always 0 is 0: lowering leaves it in the indices of outputs."""
    every = walk_stmts(kernel.entry.body)
    zeros: dict[Expr, Expr] = {s.var: const(0) for s in every if isinstance(s, For) and value(s.extent) == 1}
    return show_kernel(replace(kernel, funcs=(replace(kernel.entry, body=substitute_block(kernel.entry.body, zeros)),)))


def _of_any_size(r: Reduction) -> bool:
    """Is the order of a sum that goes across memory, a vector of sums at a time, the same for all sizes (`in_rows`)?"""
    lengths = [value(extent(v)) for v in r.loops]
    return not r.conds and r.combine in SUMS and all(n is not None and ROW <= n <= LONGEST for n in lengths)


def _digits(b: Block, loops: Collection[Var]) -> bool:
    """Are loops of sums taken apart in an index? Their parts may be shorter than rows."""
    every = [e for s in walk_stmts(b) for e in exprs(s)]
    return any(isinstance(x, Op) and x.name in ("//", "%") and free(x) & {*loops} for e in every for x in walk(e))


def family_of(nests: Sequence[Nest], others: Sequence[Nest] = ()) -> Family | None:
    """The family of nests with the same head; None if they have none in common.

    Args:
        nests: those with the most terms decide the text. Where a size is 1, an index has fewer.
        others: of the same head, which may turn out to be members.
    """
    loose = _anti_unified(nests)
    if loose is None or not _any_floats(loose.lowered.kernel):
        return None
    sizes = {s for n in (*nests, *others) if (s := loose.sizes(n)) is not None}
    most: dict[Expr, int] = {}
    for v in (v for r in loose.lowered.form.reductions for v in r.loops):
        for d, factor in terms(extent(v))[0]:
            most[d] = min(LONGEST // factor, most.get(d, LONGEST))
    if len(sizes) < 2:
        return None
    return _anti_unified(nests, [(min(s), most.get(d)) for s, d in zip(zip(*sizes), loose.lowered.dims)])


def _any_floats(kernel: Kernel) -> bool:
    """Are the floats that differ operands of what is computed from a constant as from any number? A division by one is
    not where `approximate` takes reciprocals.
    """
    hidden, rows = stores_halves(kernel, integers=False), softmax_terms(kernel)
    every = {x for s in walk_stmts(kernel.entry.body) for e in exprs(s) for x in walk(e) if isinstance(x, Op)}
    over = [x for x in every if any(isinstance(a, Op) and a.name == BITS for a in x.args)]
    return all(x.name in EXACT or (x.name == "/" and not hidden and quotient(x, rows) is x) for x in over)


def _anti_unified(nests: Sequence[Nest], bounds: Sequence[tuple[int, int | None]] = ()) -> Family | None:
    """A family whose sizes have these bounds; None if the numbers of nests do not fit."""
    first = max(nests, key=lambda n: len(n.frame.replace("#", "")))
    whole = [n for n in nests if n.frame == first.frame]
    nests = [*whole, *(n for n in nests if n.frame != first.frame)]
    if len({len(n.floats) for n in nests}) > 1:
        return None
    heads, decimals = iter(zip(*(n.sizes for n in nests))), iter(zip(*(n.floats for n in nests)))
    columns = [
        next(heads) if h else next(decimals) if isinstance(c[0], float) else c
        for c, h in zip(zip(*(n.numbers for n in whole)), first.in_head)
    ]
    divisors: dict[tuple[int, ...], int] = {}  # by ratio of the members' numbers, the divisor of all with this ratio
    floats: dict[tuple[Number, ...], None] = {}
    for c, h in zip(columns, first.in_head):
        if len({type(n) for n in c}) > 1:
            return None
        if len(set(c)) > 1 and isinstance(c[0], float):
            floats[c] = None
        elif len(set(c)) > 1 and h:
            ratio, g = _ratio(c)
            divisors[ratio] = math.gcd(divisors.get(ratio, 0), g)
    order, behind = list(divisors), list(floats)
    places: dict[tuple[Number, ...], int] = {}  # by numbers that differ, the position of their ratio
    for c in columns:
        if len(set(c)) > 1 and not isinstance(c[0], float):
            ratio, g = _ratio(c)
            size = next((k for k, r in enumerate(order) if _ratio(r[: len(c)])[0] == ratio), None)
            if size is None or g % (times := _ratio(order[size][: len(c)])[1]):
                return None
            places[c] = size
            divisors[order[size]] = math.gcd(divisors[order[size]], g // times)
    units = [r[0] * g for r, g in divisors.items()]  # the sizes of the first nest
    words: list[Number | Varying] = []
    for c in columns:
        if len(set(c)) == 1:
            words.append(c[0])
        elif isinstance(c[0], float):
            words.append(Varying(len(order) + behind.index(c), is_float=True))
        else:
            words.append(Varying(places[c], int(c[0]) // units[places[c]]))

    def word(w: Number | Varying) -> str:
        if not isinstance(w, Varying):
            return repr(w)
        if w.is_float:
            return f"{BITS}(cast_i32(s{w.size}))"
        return f"s{w.size}" if w.factor == 1 else f"({w.factor}*s{w.size})"

    low = first.lowered
    dims = [_dim(*(bounds[k] if bounds else (1, None)), g) for k, g in enumerate(divisors.values())]
    params = "".join(f"s{k}: {t}, " for k, t in enumerate([*dims, *("dim[0, None]" for _ in floats)]))
    kernel = parse_kernel(_filled(first.frame, tuple(words), word).replace("(", f"({params}", 1))
    loops = {s.var.name: s.var for s in walk_stmts(kernel.entry.body) if isinstance(s, For)}
    form = replace(
        low.form,
        outer=tuple(loops[v.name] for v in low.form.outer),
        panels={loops[v.name]: loops[w.name] for v, w in low.form.panels.items()},
        reductions=tuple(_reduction(r, kernel, loops) for r in low.form.reductions),
    )
    kernel = replace(kernel, locs=low.kernel.locs)
    return Family(replace(low, kernel=kernel, form=form, dims=tuple(kernel.entry.scalars)), first.frame, tuple(words))


def _reduction(r: Reduction, kernel: Kernel, loops: Mapping[str, Var]) -> Reduction:
    """A reduction of a nest in the kernel of its family, which has the same names."""
    acc = next(s.buf for s in walk_stmts(kernel.entry.body) if isinstance(s, Alloc) and s.buf.name == r.acc.name)
    sums = [s.value for s in walk_stmts(kernel.entry.body) if isinstance(s, Store) and s.buf is acc and free(s.value)]
    around, inner = (tuple(loops[v.name] for v in vs) for vs in (r.around, r.loops))
    step = sums[-1]
    assert isinstance(step, Op)
    term, *factor = (a for a in step.args if a is not acc[0])  # a product is contracted (`scatter.combine`)
    return replace(r, acc=acc, loops=inner, term=term * factor[0] if factor else term, around=frozenset(around))


def _filled(frame: str, words: Sequence[Number | Varying], word: Callable[[Number | Varying], str]) -> str:
    """A frame with its numbers."""
    it = iter(words)
    return re.sub("#", lambda m: word(next(it)), frame)


def _ratio(column: Sequence[Number]) -> tuple[tuple[int, ...], int]:
    """Integers divided by their greatest common divisor, and the divisor."""
    g = math.gcd(*column)  # type: ignore[arg-type]
    return tuple(int(n) // g for n in column), g


def _dim(least: int, most: int | None, divisor: int) -> str:
    """The type of a size that is at least `least` in all members, where it is small, and a multiple of `divisor`."""
    step = LANES if divisor % LANES == 0 else 1
    return f"dim[{max(min(least, LANES), step)}, {most}, {step}]"


def _bits(x: float) -> int:
    """The bits of a float32 as an integer."""
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def _innermost(lowered: Lowered) -> int:
    """Iterations of the innermost loop over outputs; where sums are made, of the innermost of more than one."""
    sizes = [value(extent(v)) or 0 for v in lowered.form.outer]
    return next((n for n in reversed(sizes) if n != 1), 1) if lowered.form.reductions else sizes[-1]


def _as_vectors(lowered: Lowered) -> Lowered | None:
    """A chain over whole arrays, all in the same order, as a loop over one axis; None if it is something else."""
    loops: list[For] = []
    entry = lowered.kernel.entry
    body: Block = entry.body
    while len(body) == 1 and isinstance(body[0], For):
        loops.append(body[0])
        body = body[0].body
    stores = [s for s in body if isinstance(s, Store)]
    if [s.var for s in loops] != list(lowered.form.outer) or len(stores) < len(body):
        return None
    first: dict[Expr, Expr] = {s.var: const(0) for s in loops if value(s.extent) == 1}
    count = math.prod(value(s.extent) or 0 for s in loops)
    place: Expr = const(0)
    for s in loops:
        place = place * s.extent + s.var
    place = substitute(place, first)
    axis = loop_var("i", const(0), const(count))
    vectors: dict[Buffer, Buffer] = {}
    for b in entry.buffers:
        n = value(b.size())
        if b.strides is not None or n not in (1, count):
            return None
        vectors[b] = Buffer(b.name, b.dtype, (const(n),))

    def at(b: Buffer, idx: Sequence[Expr]) -> Expr | None:
        here = substitute(b.offset(tuple(idx)), first)
        if count > 1 and here is place:
            return axis
        return here if value(here) == 0 and value(b.size()) == 1 else None

    def vector(e: Expr) -> Expr:
        if not isinstance(e, Load):
            return rebuild(e, vector)
        i = None if e.limit is not None or e.lanes > 1 or e.buf not in vectors else at(e.buf, e.idx)
        return e if i is None else load(vectors[e.buf], (i,))

    made = []
    for st in stores:
        i, e = at(st.buf, st.idx), vector(st.value)
        if i is not axis or not free(e) <= {axis} or any(isinstance(x, Load) and x.buf in vectors for x in walk(e)):
            return None
        made.append(Store(vectors[st.buf], (axis,), e))
    params: tuple[Param, ...] = tuple(vectors[p] if isinstance(p, Buffer) else p for p in entry.params)
    name = "copy" if len(made) == 1 and isinstance(made[0].value, Load) else entry.name
    nest = For(axis, const(0), const(count), "range", tuple(made))
    kernel = Kernel((replace(entry, name=name, params=params, body=(nest,)),), lowered.kernel.locs)
    return replace(lowered, kernel=kernel, form=Map(outer=(axis,)))
