"""Expressions: interned, immutable, shared by symbolic dims (graph IR) and by indices and values (operator IR).

    e ::= 7 | 1.5 | i | e + e | e * e | e // e | e % e | min(e, e) | e < e | f(e, ...)
        | B[e, ..., e:+16:n] | addr(B[e, ...])

Interned means `is` is structural equality and hashing is free. Integers of type i64 (dims, indices) are kept as *linear
forms* `c0 + c1*t1 + c2*t2 + ...` over sorted terms, built so by every constructor: there is no separate simplify pass.
A variable carries its own bounds, so simplification needs no context. Floats are never rearranged. A scalar operand of
a vector operation is splatted by use. `//` and `%` mean floor division by a positive divisor.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_
from typing import TYPE_CHECKING, Any, Union

from dnnc.ir.dtype import DType, boolean, f32, f64, i64

if TYPE_CHECKING:
    from dnnc.ir.loops.stmt import Buffer

E = Union["Expr", int, float]
Terms = dict["Expr", int]
COMPARE = ("<", "<=", "==", "!=")
MAX_KEY = 240  # characters of a sort key; longer ones end in a digest of the whole


class Expr:
    """Base of all expressions: `dtype` of one lane, number of `lanes`."""

    __slots__ = ("__weakref__", "_free", "_key", "_range", "_reads", "dtype", "lanes")
    dtype: DType
    lanes: int
    _key: str | None
    _range: tuple[int | None, int | None] | None
    _free: frozenset[Var] | None
    _reads: tuple[Load | Ref, ...] | None

    def __add__(self, o: E) -> Expr:
        return op("+", self, o)

    def __radd__(self, o: E) -> Expr:
        return op("+", o, self)

    def __sub__(self, o: E) -> Expr:
        return op("-", self, o)

    def __rsub__(self, o: E) -> Expr:
        return op("-", o, self)

    def __mul__(self, o: E) -> Expr:
        return op("*", self, o)

    def __rmul__(self, o: E) -> Expr:
        return op("*", o, self)

    def __truediv__(self, o: E) -> Expr:
        return op("/", self, o)

    def __rtruediv__(self, o: E) -> Expr:
        return op("/", o, self)

    def __floordiv__(self, o: E) -> Expr:
        return op("//", self, o)

    def __rfloordiv__(self, o: E) -> Expr:
        return op("//", o, self)

    def __mod__(self, o: E) -> Expr:
        return op("%", self, o)

    def __rmod__(self, o: E) -> Expr:
        return op("%", o, self)

    def __neg__(self) -> Expr:
        return op("-", 0 if not self.dtype.is_float else -0.0, self)

    def __and__(self, o: E) -> Expr:
        return op("&", self, o)

    def __or__(self, o: E) -> Expr:
        return op("|", self, o)

    def __xor__(self, o: E) -> Expr:
        return op("^", self, o)

    def __lt__(self, o: E) -> Expr:
        return op("<", self, o)

    def __le__(self, o: E) -> Expr:
        return op("<=", self, o)

    def __gt__(self, o: E) -> Expr:
        return op("<", o, self)

    def __ge__(self, o: E) -> Expr:
        return op("<=", o, self)

    def eq(self, o: E) -> Expr:
        """Element-wise equality (`==` itself is identity, which for interned nodes is structural equality)."""
        return op("==", self, o)

    def ne(self, o: E) -> Expr:
        return op("!=", self, o)

    def __repr__(self) -> str:
        return show(self)

    def __bool__(self) -> bool:
        raise TypeError(f"the truth of {self!r} is not known at compile time")

    def __reduce__(self) -> Any:
        raise TypeError("expressions are pickled as text")


class Arithmetic:
    """The normal form of integer operations. `dnnc.ir.linear`, which needs the classes below, says it, and `dnnc.ir`
    imports both.
    """

    integer: Callable[[str, Expr, Expr], Expr]


class Const(Expr):
    __slots__ = ("value",)
    value: int | float | bool


class Var(Expr):
    """A dim, loop variable, scalar parameter or let. Bounds are inclusive, may be symbolic, and part of it."""

    __slots__ = ("name", "lo", "hi", "div")
    name: str
    lo: int | Expr | None
    hi: int | Expr | None
    div: int


class Op(Expr):
    """Arithmetic that is not linear, comparisons, and calls of intrinsics alike."""

    __slots__ = ("name", "args")
    name: str
    args: tuple[Expr, ...]


class Product(Expr):
    """A monomial of degree >= 2: factors sorted, none constant."""

    __slots__ = ("factors",)
    factors: tuple[Expr, ...]


class Linear(Expr):
    """`const + sum(c * t)`: terms sorted, coefficients not 0, not a single bare term."""

    __slots__ = ("terms", "const")
    terms: tuple[tuple[Expr, int], ...]
    const: int


class Load(Expr):
    """`B[i, j:+lanes:limit]`; lanes past `limit` read 0. An index with lanes gathers."""

    __slots__ = ("buf", "idx", "limit")
    buf: Buffer
    idx: tuple[Expr, ...]
    limit: Expr | None


class Ref(Expr):
    """The address of an element, with how many lanes are meant there: operand of prefetch, copies and calls."""

    __slots__ = ("buf", "idx")
    buf: Buffer
    idx: tuple[Expr, ...]


# --- interning --------------------------------------------------------------------------------------------------------


class _Entry(weakref.ref[Expr]):
    __slots__ = ("key",)
    key: tuple[Any, ...]


_table: dict[tuple[Any, ...], _Entry] = {}
_lock = threading.RLock()  # a collection inside the locked region may run _drop on the same thread


def _drop(entry: _Entry) -> None:
    with _lock:
        if _table.get(entry.key) is entry:
            del _table[entry.key]


def intern(cls: type[Expr], dtype: DType, lanes: int, *fields: Any, key: Any = None) -> Any:
    k = (cls, dtype, lanes, *(fields if key is None else key))
    entry = _table.get(k)
    if entry is not None:
        found = entry()
        if found is not None:
            return found
    with _lock:
        entry = _table.get(k)
        found = entry() if entry is not None else None
        if found is not None:
            return found
        e = object.__new__(cls)
        e.dtype, e.lanes = dtype, lanes
        e._key = e._range = e._free = e._reads = None
        for name, value in zip(cls.__slots__, fields):
            setattr(e, name, value)
        entry = _Entry(e, _drop)
        entry.key = k
        _table[k] = entry
        return e


def const(v: E, dtype: DType = i64) -> Expr:
    """A constant of `dtype` (a Python float given for an integer type makes a float32)."""
    if isinstance(v, Expr):
        return v
    if dtype.kind == "b":
        return _const(bool(v), dtype)  # type: ignore[no-any-return]
    if isinstance(v, float) and not dtype.is_float:
        dtype = f32
    if dtype.is_float:
        x = float(v)
        if dtype is f32 and x == x and abs(x) != float("inf"):
            x = _round_f32(x)
        return intern(Const, dtype, 1, x, key=(struct.pack("<d", x),))  # type: ignore[no-any-return]
    return _const(int(v), dtype)  # type: ignore[no-any-return]


def _const(v: int | bool, dtype: DType) -> Any:
    return _SMALL[v] if dtype is i64 and 0 <= v < len(_SMALL) else intern(Const, dtype, 1, v)


_SMALL = tuple(intern(Const, i64, 1, v) for v in range(65))  # the integers of most indices


def _round_f32(x: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return float("inf") if x > 0 else float("-inf")


def var(
    name: str,
    dtype: DType = i64,
    lo: int | Expr | None = None,
    hi: int | Expr | None = None,
    div: int = 1,
    lanes: int = 1,
) -> Var:
    """A variable; `lo` and `hi` inclusive, `div` a known divisor of its value."""
    lo, hi = (unwrap(b) if isinstance(b, Expr) else b for b in (lo, hi))
    return intern(Var, dtype, lanes, name, lo, hi, div)  # type: ignore[no-any-return]


def dim(name: str, lo: int = 1, hi: int | None = None, div: int = 1) -> Var:
    """A symbolic dimension."""
    return var(name, i64, lo, hi, div)


def load(buf: Buffer, idx: Iterable[E], lanes: int = 1, limit: E | None = None) -> Expr:
    ix = tuple(i if isinstance(i, Expr) else const(i) for i in idx)
    width = max([lanes, *(i.lanes for i in ix)])
    return intern(Load, buf.dtype, width, buf, ix, None if limit is None else const(limit))  # type: ignore[no-any-return]


def ref(buf: Buffer, idx: Iterable[E], lanes: int = 1) -> Expr:
    return intern(Ref, buf.dtype, lanes, buf, tuple(i if isinstance(i, Expr) else const(i) for i in idx))  # type: ignore[no-any-return]


def value(e: E) -> int | None:
    """The number an integer expression stands for, or None."""
    if isinstance(e, int):
        return e
    return e.value if isinstance(e, Const) and not e.dtype.is_float else None  # type: ignore[return-value]


def unwrap(e: E) -> Any:
    """A constant as a plain number, anything else as it is: the form dims have in shapes."""
    return e.value if isinstance(e, Const) else e


# --- the one constructor of operations --------------------------------------------------------------------------------

_REBUILT = frozenset((*COMPARE, "+", "-", "*", "/", "//", "%", "min", "max", "&", "|", "^", "select"))


def op(name: str, *raw: E, dtype: DType | None = None, lanes: int = 0) -> Expr:
    """Type an operation, fold constants, normalize. Numbers take the first expression's type, unless `dtype` is set."""
    if len(raw) == 2 and dtype is None and not lanes:  # two integers first: most operations are on indices
        a, b = raw
        if type(b) is int and isinstance(a, Expr) and a.dtype is i64:
            b = _const(b, i64)
        elif type(a) is int and isinstance(b, Expr) and b.dtype is i64:
            a = _const(a, i64)
        if isinstance(a, Expr) and isinstance(b, Expr) and a.dtype is i64 and a.lanes == b.lanes == 1:
            return Arithmetic.integer(name, a, b)
    lead = next((a.dtype for a in raw if isinstance(a, Expr) and not isinstance(a, Ref)), None)
    if lead is None:
        lead = next((f64 for a in raw if isinstance(a, float)), i64)
    if name == "select" and len(raw) == 3:
        lead = next((a.dtype for a in raw[1:] if isinstance(a, Expr)), lead)
        raw = (const(raw[0], boolean), *raw[1:])
    args = tuple(a if isinstance(a, Expr) else const(a, lead) for a in raw)
    width = lanes or max((a.lanes for a in args if not isinstance(a, Ref)), default=1)
    if dtype is None:
        dtype = boolean if name in COMPARE else args[1].dtype if name == "select" else args[0].dtype
        if width == 1 and len(args) == 2 and args[0].dtype is i64:
            return Arithmetic.integer(name, args[0], args[1])
        if dtype.kind == "b" and len(args) == 2:
            return _logic(name, args[0], args[1], width)
        if name == "select":
            c = args[0]
            if isinstance(c, Const):
                return args[1] if c.value else args[2]
            if args[1] is args[2]:
                return args[1]
    return intern(Op, dtype, width, name, args)  # type: ignore[no-any-return]


def _logic(name: str, a: Expr, b: Expr, lanes: int) -> Expr:
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Const) and x.dtype.kind == "b" and name in ("&", "|"):
            keep = bool(x.value) == (name == "&")  # true & y -> y ; false | y -> y
            return y if keep else x
    if a is b and name in ("&", "|"):
        return a
    return intern(Op, boolean, lanes, name, (a, b))  # type: ignore[no-any-return]


def minimum(a: E, b: E) -> Expr:
    return op("min", a, b)


def maximum(a: E, b: E) -> Expr:
    return op("max", a, b)


def select(c: E, a: E, b: E) -> Expr:
    return op("select", c, a, b)


def fma(a: E, b: E, c: E) -> Expr:
    return op("fma", a, b, c)


def cast(e: Expr, dtype: DType) -> Expr:
    """Value conversion; float to integer saturates, NaN becomes 0. A float that was widened comes back as it was."""
    if e.dtype is dtype:
        return e
    if (x := _widened(e)) is not None and x.dtype is dtype:
        return x
    return op("cast_" + dtype.name, e, dtype=dtype)


def _widened(e: Expr) -> Expr | None:
    """x of a converted x in a wider float type. Only conversions round: arithmetic of small floats does not, and the
    computation of an operand may be substituted for its element.
    """
    if not isinstance(e, Op) or e.name != "cast_" + e.dtype.name or not e.dtype.is_float:
        return None
    x = e.args[0]
    rounded = isinstance(x, Op) and x.name == "cast_" + x.dtype.name and x.dtype.is_float
    return x if rounded and x.dtype.bits < e.dtype.bits else None


def logical_not(e: Expr) -> Expr:
    if isinstance(e, Const):
        return const(not e.value, boolean)
    return op("not", e, dtype=boolean)


def terms(e: Expr) -> tuple[tuple[tuple[Expr, int], ...], int]:
    """The linear form of an integer expression: ((term, coefficient), ...) and the constant."""
    if isinstance(e, Linear):
        return e.terms, e.const
    if isinstance(e, Const):
        return (), int(e.value)
    return ((e, 1),), 0


def factors(e: Expr) -> tuple[Expr, ...]:
    return e.factors if isinstance(e, Product) else (e,)


def product(factors: list[Expr]) -> Expr:
    if len(factors) == 1:
        return factors[0]
    return intern(Product, i64, 1, tuple(sorted(factors, key=sort_key)))  # type: ignore[no-any-return]


def sort_key(e: Expr) -> str:
    """A deterministic order, equal in every process. Keys hold their children's, so they are bounded in size."""
    k = e._key
    if k is None:
        k = _sort_key(e)
        if len(k) > MAX_KEY:
            k = f"{k[: MAX_KEY - 33]}#{hashlib.blake2b(k.encode(), digest_size=16).hexdigest()}"
        e._key = k
    return k


def _sort_key(e: Expr) -> str:
    if isinstance(e, Var):
        lo, hi = (sort_key(bound) if isinstance(bound, Expr) else bound for bound in (e.lo, e.hi))
        return f"{e.name}:{e.dtype}:{lo}:{hi}"
    if isinstance(e, Const):
        return repr(e.value)
    if isinstance(e, Linear):
        return "(" + "+".join(f"{c}*{sort_key(t)}" for t, c in e.terms) + f"+{e.const})"
    if isinstance(e, Product):
        return "*".join(map(sort_key, e.factors))
    if isinstance(e, Op):
        return f"{e.name}({','.join(map(sort_key, e.args))})"
    assert isinstance(e, (Load, Ref))
    return f"{e.buf.name}[{','.join(map(sort_key, e.idx))}]"


# --- walking ----------------------------------------------------------------------------------------------------------


def children(e: Expr) -> tuple[Expr, ...]:
    kind = type(e)
    if kind is Var or kind is Const:
        return ()
    if kind is Op:
        return e.args  # type: ignore[attr-defined, no-any-return]
    if isinstance(e, Linear):
        return tuple([t for t, _ in e.terms])
    if isinstance(e, Product):
        return e.factors
    if isinstance(e, Load):
        return e.idx if e.limit is None else (*e.idx, e.limit)
    return e.idx if isinstance(e, Ref) else ()


def walk(e: Expr) -> Iterator[Expr]:
    """Every node once, parents first."""
    seen = {e}
    stack = [e]
    while stack:
        x = stack.pop()
        yield x
        for c in children(x):
            if c not in seen:
                seen.add(c)
                stack.append(c)


def reads(e: Expr) -> Iterator[Load | Ref]:
    """Every load and address in an expression once, outer ones first."""
    if e._reads is None:  # without itself: a node that holds itself outlives its users
        e._reads = tuple([x for x in walk(e) if isinstance(x, (Load, Ref)) and x is not e])
    if isinstance(e, (Load, Ref)):
        yield e
    yield from e._reads


def extent(v: Var) -> Expr:
    """How many values a variable takes that counts from 0."""
    assert v.hi is not None
    return const(v.hi) + 1


def free(e: Expr) -> frozenset[Var]:
    """The variables of an expression (buffers' shapes not counted)."""
    if e._free is None:
        if isinstance(e, Var):
            e._free = frozenset((e,))
        else:
            e._free = frozenset().union(*[free(c) for c in children(e)])
    return e._free


def rebuild(e: Expr, f: Callable[[Expr], Expr]) -> Expr:
    """Rebuild and simplify the node with f applied to its children; the same node if they do not change."""
    if isinstance(e, Linear):
        new = [f(t) for t, _ in e.terms]
        if all(x is t for x, (t, _) in zip(new, e.terms)):
            return e
        r: Expr = const(e.const)
        for x, (_, c) in zip(new, e.terms):
            r = r + x * c
        return r
    if isinstance(e, Product):
        new = list(map(f, e.factors))
        if all(map(is_, new, e.factors)):
            return e
        r = new[0]
        for x in new[1:]:
            r = r * x
        return r
    if isinstance(e, Op):
        args = tuple(map(f, e.args))
        if all(map(is_, args, e.args)):
            return e
        if e.name in _REBUILT:
            return op(e.name, *args)
        widened = max((a.lanes for a in args), default=1) > max((a.lanes for a in e.args), default=1)
        return op(e.name, *args, dtype=e.dtype, lanes=0 if widened else e.lanes)
    if isinstance(e, Load):
        fewer = max([1, *(i.lanes for i in e.idx)])
        return load(e.buf, map(f, e.idx), e.lanes if fewer == 1 else 1, None if e.limit is None else f(e.limit))
    if isinstance(e, Ref):
        return ref(e.buf, map(f, e.idx), e.lanes)
    return e


def substitute(e: Expr, env: Mapping[Any, Expr]) -> Expr:
    """Replace variables (or whole sub-expressions that are keys of env)."""
    memo: dict[Expr, Expr] = {}
    names = {k for k in env if isinstance(k, Var)}
    only_vars = len(names) == len(env)

    def go(x: Expr) -> Expr:
        if x in env:
            return env[x]
        if only_vars and names.isdisjoint(free(x)):
            return x
        r = memo.get(x)
        if r is None:
            r = memo[x] = rebuild(x, go)
        return r

    return go(e)


# --- text -------------------------------------------------------------------------------------------------------------

_PREC = {"|": 1, "^": 2, "&": 3, "+": 5, "-": 5, "*": 6, "/": 6, "//": 6, "%": 6} | dict.fromkeys(COMPARE, 0)


def show(e: Expr, outer: int = -1) -> str:
    """An expression as text; `outer` is the precedence of what stands around it."""
    if isinstance(e, Var):
        return e.name
    if isinstance(e, Const):
        return _literal(e)
    if isinstance(e, Load):
        return show_at(e.buf, e.idx, e.lanes, e.limit)
    if isinstance(e, Ref):
        return f"addr({show_at(e.buf, e.idx, e.lanes, None)})"
    if isinstance(e, Linear):
        return _parens(_show_linear(e), 5, outer)
    if isinstance(e, Product):
        return _parens("*".join(show(f, 7) for f in e.factors), 6, outer)
    assert isinstance(e, Op)
    if e.name == "not":
        return _parens(f"not {show(e.args[0], 0)}", -1, outer)
    p = _PREC.get(e.name)
    if p is None or len(e.args) != 2:
        return f"{e.name}({', '.join(show(a) for a in e.args)})"
    return _parens(f"{show(e.args[0], p + (p == 0))} {e.name} {show(e.args[1], p + 1)}", p, outer)


def _parens(s: str, inner: int, outer: int) -> str:
    return f"({s})" if inner < outer else s


def _literal(e: Const) -> str:
    if e.dtype.kind == "b":
        return str(e.value)
    s = repr(e.value)
    if e.dtype is i64 or (e.dtype is f32 and "n" not in s):
        return s
    return f"{e.dtype}({s})"


def _show_linear(e: Linear) -> str:
    out = ""
    for t, c in e.terms:  # `-a // 2` would be read as `(-a) // 2`: a leading minus takes parentheses
        body = show(t, 6 if out or c > 0 else 7) if abs(c) == 1 else f"{abs(c)}*{show(t, 7)}"
        out += f" {'-' if c < 0 else '+'} {body}" if out else ("-" if c < 0 else "") + body
    return out + (f" {'-' if e.const < 0 else '+'} {abs(e.const)}" if e.const else "")


def show_at(buf: Buffer, idx: tuple[Expr, ...], lanes: int, limit: Expr | None) -> str:
    parts = [show(i) for i in idx]
    if lanes > 1 and (
        limit is not None or not any(i.lanes > 1 for i in idx)
    ):  # a gather that is whole needs no number of lanes
        parts[-1] += f":+{lanes}" + (f":{show(limit)}" if limit is not None else "")
    return f"{buf.name}[{', '.join(parts) or '()'}]"
