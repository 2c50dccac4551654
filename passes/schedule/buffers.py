"""Schedule step: adjacent axes of a row-major buffer that one index walks become one, by fusing loops.

    y: f32[7, 45];  y[e // 45, e % 45] = ..      ->      y: f32[315];  y[e] = ..
    y: f32[45, 1];  y[e, 0] = ..                 ->      y: f32[45];  y[e] = ..

The memory stays as it is, and a parameter keeps its place, so callers see no difference; vectors get unit stride.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from dnnc.ir.expr import Expr, Load, Op, Ref, const, load, rebuild, ref, value, walk
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, Param, Stmt, Store, accesses, map_stmt, walk_stmts

Index = tuple[Expr, ...]


def collapse(params: Sequence[Param], body: Block, keep: Collection[str] = ()) -> tuple[tuple[Param, ...], Block]:
    """The parameters and the body with every pair of axes joined that makes some index simpler and none harder.

    `keep`: names of buffers that are left alone, because guards speak of their axes one by one."""
    uses = [(x.buf, x.idx) for x in accesses(body)]
    uses += [(s.buf, s.idx) for s in walk_stmts(body) if isinstance(s, Store)]
    private = [s.buf for s in walk_stmts(body) if isinstance(s, Alloc)]
    made, index = joined_axes([*private, *(p for p in params if isinstance(p, Buffer))], uses, keep)
    return tuple(made.get(p, p) if isinstance(p, Buffer) else p for p in params), swap_buffers(body, made, index)


def flatten(params: Sequence[Param], body: Block) -> tuple[tuple[Param, ...], Block]:
    """The parameters and the body with every buffer that is both read and written as one axis: `x[i, k]` is
    `x[5*i + k]`, whose places other passes can compare.
    """
    read, written = {x.buf for x in accesses(body)}, {s.buf for s in walk_stmts(body) if isinstance(s, Store)}
    made = {
        p: Buffer(p.name, p.dtype, (p.size(),), p.space)
        for p in params
        if isinstance(p, Buffer) and p in read & written and p.strides is None and not p.swizzle
    }
    swapped = swap_buffers(body, made, lambda buf, idx: (buf.offset(idx),))
    return tuple(made.get(p, p) if isinstance(p, Buffer) else p for p in params), swapped


def joined_axes(
    buffers: Iterable[Buffer], uses: Iterable[tuple[Buffer, Index]], keep: Collection[str]
) -> tuple[dict[Buffer, Buffer], Callable[[Buffer, Index], Index]]:
    """What takes the place of buffers some of whose axes are joined, and their indices as those of these."""
    every: dict[Buffer, list[Index]] = {}
    for buf, idx in uses:
        every.setdefault(buf, []).append(idx)
    made: dict[Buffer, Buffer] = {}
    groups: dict[Buffer, list[int]] = {}
    for buf in set(buffers) & every.keys():
        if buf.strides is None and not buf.swizzle and buf.name not in keep:
            shape, axes = _joined(buf, every[buf])
            if axes:
                made[buf], groups[buf] = Buffer(buf.name, buf.dtype, shape, buf.space), axes
    return made, lambda buf, idx: _index(buf, idx, groups[buf])


def _joined(buf: Buffer, uses: list[Index]) -> tuple[tuple[Expr, ...], list[int]]:
    """The new shape, and the axes that are joined to their right neighbour, each given by its number at the time."""
    shape = buf.shape
    joined: list[int] = []
    for k in range(len(shape) - 2, -1, -1):
        now = [_join(shape, i, k) for i in uses]
        cost = [(_divisions(i[k : k + 2]), _divisions(j[k : k + 1])) for i, j in zip(uses, now)]
        simpler = all(after <= before for before, after in cost) and any(after < before for before, after in cost)
        if simpler or value(shape[k + 1]) == 1:
            uses, joined = now, [*joined, k]
            shape = (*shape[:k], shape[k] * shape[k + 1], *shape[k + 2 :])
    return shape, joined


def _index(buf: Buffer, idx: Index, joined: list[int]) -> Index:
    shape = buf.shape
    for k in joined:
        idx = _join(shape, idx, k)
        shape = (*shape[:k], shape[k] * shape[k + 1], *shape[k + 2 :])
    return idx


def _join(shape: Sequence[Expr], idx: Index, k: int) -> Index:
    """An index with axes k and k+1 as one. The index of an axis of one element is 0, however it is spelled."""
    outer, inner = (const(0) if value(shape[j]) == 1 else idx[j] for j in (k, k + 1))
    return (*idx[:k], outer * shape[k + 1] + inner, *idx[k + 2 :])


def _divisions(idx: Index) -> int:
    """Distinct divisions that an index needs."""
    return len({x for i in idx for x in walk(i) if isinstance(x, Op) and x.name in ("//", "%")})


def swap_buffers(
    b: Block, bufs: dict[Buffer, Buffer], index: Callable[[Buffer, tuple[Expr, ...]], tuple[Expr, ...]] | None = None
) -> Block:
    """Replace buffers, with their indices changed by `index(old buffer, old index)`."""
    if not bufs:
        return b
    at = index or (lambda _, idx: idx)
    fe = rereading(bufs, at)

    def go(block: Block) -> Block:
        out: list[Stmt] = []
        for s in block:
            if isinstance(s, Store) and s.buf in bufs:
                s = Store(bufs[s.buf], at(s.buf, s.idx), s.value, s.lanes, s.limit)
                out.append(Store(s.buf, s.idx, fe(s.value), s.lanes, s.limit))
            elif isinstance(s, Alloc):
                out.append(Alloc(bufs.get(s.buf, s.buf)))
            else:
                out.append(map_stmt(s, fe, go))
        return tuple(out)

    return go(b)


def rereading(
    bufs: dict[Buffer, Buffer], at: Callable[[Buffer, tuple[Expr, ...]], tuple[Expr, ...]]
) -> Callable[[Expr], Expr]:
    """Expressions that read other buffers in place of some."""
    memo: dict[Expr, Expr] = {}

    def go(e: Expr) -> Expr:
        r = memo.get(e)
        if r is None:
            if isinstance(e, Load) and e.buf in bufs:
                r = load(bufs[e.buf], at(e.buf, tuple(map(go, e.idx))), e.lanes, e.limit)
            elif isinstance(e, Ref) and e.buf in bufs:
                r = ref(bufs[e.buf], at(e.buf, tuple(map(go, e.idx))), e.lanes)
            else:
                r = rebuild(e, go)
            memo[e] = r
        return r

    return go
