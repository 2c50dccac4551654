"""Element-wise kernels of equal structure and different sizes -> one kernel that takes the sizes as arguments.

    def mul(x: f32[8, 4, 64, 16], y: f32[64]): for i0 in range(8): for i1 in range(4): ...
    def mul(x: f32[8, 2, 256, 16], y: f32[32]): for i0 in range(8): for i1 in range(2): ...

    def mul(s0: dim[1, None], s1: dim[64, None, 64], x: f32[8, s0, s1, 16], y: f32[16*s0]): ...

In: naive nests without reductions, in which every element is computed by itself. Out: families with a symbolic nest,
and the sizes with which each member calls it. Texts are anti-unified (Plotkin, 1970): numbers that differ, in the same
ratio in all members, are multiples of one size; floats that differ, such as one divided by a size, are passed as their
bits. A chain over whole arrays is a loop over one axis first, whatever its rank, so that updates of all parameters are
one family. A nest is a member if the symbolic text with its sizes is its own text. Any order of computing gives the
same bits.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dnnc.ir.expr import Expr, Load, const, free, load, rebuild, substitute, terms, value, walk
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, For, Kernel, Param, Store, loop_var, walk_stmts
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.passes.lower.form import Map
from dnnc.passes.lower.nests import Lowered

# An integer or a float32 of a text: no part of a name, no number with a type such as f16(0.5).
NUMBER = re.compile(r"(?<![\w.])(?<!\d\()(?<!\de[-+])(\d+\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+|\d+(?![\w.]))")
RESERVED = re.compile(r"\bs\d+\b")  # names of sizes
LANES = 16  # sizes of the innermost loop that are multiples of it have no tail on any CPU
LARGE = 16 << 20  # bytes of an array for which a target may have code of its own, such as non-temporal stores
PLACES = 4096  # numbers of a text, beyond which it is not worth the time

Number = int | float
Kind = tuple[object, ...]


@dataclass(frozen=True)
class Nest:
    """A naive nest as text: `frame` has no numbers."""

    lowered: Lowered
    text: str
    frame: str
    numbers: tuple[Number, ...]

    @property
    def kind(self) -> Kind:
        """Equal for nests that may be one family."""
        entry = self.lowered.kernel.entry
        return entry.name, tuple((b.dtype, len(b.shape)) for b in entry.buffers), _innermost(self.lowered) % LANES == 0

    @property
    def floats(self) -> list[float]:
        return [n for n in self.numbers if isinstance(n, float)]


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
        if any(n % v.div or n < v.lo for n, v in zip(sizes, self.lowered.dims)):  # type: ignore[operator]
            return None
        given = iter(floats)

        def word(w: Number | Varying) -> str:
            if isinstance(w, Varying) and not w.is_float:
                return str(w.factor * sizes[w.size])
            x = next(given) if isinstance(w, (float, Varying)) else w
            return repr(x if isinstance(w, Varying) else w)

        return sizes if show_kernel(parse_kernel(_filled(self.frame, self.words, word))) == nest.text else None


def nest_of(lowered: Lowered) -> Nest | None:
    """A kernel as a possible member of a family; None if it has reductions, memory of its own, symbolic sizes or large
    arrays.
    """
    if type(lowered.form) is not Map or lowered.dims or len(lowered.kernel.funcs) > 1 or not lowered.form.outer:
        return None
    lowered = _as_vectors(lowered) or lowered
    entry = lowered.kernel.entry
    if any(isinstance(s, Alloc) for s in walk_stmts(entry.body)) or not _innermost(lowered):
        return None
    if any((value(b.size()) or 0) * b.dtype.bytes >= LARGE for b in entry.buffers):
        return None
    text = show_kernel(lowered.kernel)
    numbers = tuple(int(w) if w.isdigit() else float(w) for w in NUMBER.findall(text))
    if len(numbers) > PLACES or RESERVED.search(text):
        return None
    return Nest(lowered, text, NUMBER.sub("#", text), numbers)


def family_of(nests: Sequence[Nest]) -> Family | None:
    """The family of nests with the same frame, of which at least two differ; None if their kinds of numbers do."""
    columns = list(zip(*(n.numbers for n in nests)))
    divisors: dict[tuple[int, ...], int] = {}  # by ratio of the members' numbers, the divisor of all with this ratio
    floats: dict[tuple[Number, ...], None] = {}
    for c in columns:
        if len({type(n) for n in c}) > 1:
            return None
        if len(set(c)) > 1 and isinstance(c[0], float):
            floats[c] = None
        elif len(set(c)) > 1:
            ratio, g = _ratio(c)
            divisors[ratio] = math.gcd(divisors.get(ratio, 0), g)
    order, behind = list(divisors), list(floats)
    words: list[Number | Varying] = []
    for c in columns:
        if len(set(c)) == 1:
            words.append(c[0])
        elif c in floats:
            words.append(Varying(len(order) + behind.index(c), is_float=True))
        else:
            ratio, g = _ratio(c)
            words.append(Varying(order.index(ratio), g // divisors[ratio]))
    low = nests[0].lowered

    def word(w: Number | Varying) -> str:
        if not isinstance(w, Varying):
            return repr(w)
        if w.is_float:
            return f"bits_f32(cast_i32(s{w.size}))"
        return f"s{w.size}" if w.factor == 1 else f"({w.factor}*s{w.size})"

    head = [*(_dim(min(ratio) * g, g) for ratio, g in divisors.items()), *("dim[0, None]" for _ in floats)]
    params = "".join(f"s{k}: {t}, " for k, t in enumerate(head))
    frame = nests[0].frame
    kernel = parse_kernel(_filled(frame, tuple(words), word).replace("(", f"({params}", 1))
    loops = {s.var.name: s.var for s in walk_stmts(kernel.entry.body) if isinstance(s, For)}
    form = Map(
        outer=tuple(loops[v.name] for v in low.form.outer),
        panels={loops[v.name]: loops[w.name] for v, w in low.form.panels.items()},
    )
    kernel = replace(kernel, locs=low.kernel.locs)
    return Family(replace(low, kernel=kernel, form=form, dims=tuple(kernel.entry.scalars)), frame, tuple(words))


def _filled(frame: str, words: Sequence[Number | Varying], word: Callable[[Number | Varying], str]) -> str:
    """A frame with its numbers."""
    it = iter(words)
    return re.sub("#", lambda m: word(next(it)), frame)


def _ratio(column: Sequence[Number]) -> tuple[tuple[int, ...], int]:
    """Integers divided by their greatest common divisor, and the divisor."""
    g = math.gcd(*column)  # type: ignore[arg-type]
    return tuple(int(n) // g for n in column), g


def _dim(least: int, divisor: int) -> str:
    """The type of a size that is at least `least` in all members, where it is small, and a multiple of `divisor`."""
    step = LANES if divisor % LANES == 0 else 1
    return f"dim[{min(least, LANES)}, None, {step}]"


def _bits(x: float) -> int:
    """The bits of a float32 as an integer."""
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def _innermost(lowered: Lowered) -> int:
    """Iterations of the innermost loop."""
    v = lowered.form.outer[-1]
    assert isinstance(v.hi, int)
    return v.hi + 1


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
