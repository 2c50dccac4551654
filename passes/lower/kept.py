"""Which intermediate tensors of a group a thread keeps for a whole row, in `local` memory, in place of computing them
again for each of their readers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dnnc.ir import te
from dnnc.ir.expr import Expr, Load, Op, const, free, unwrap, value, walk
from dnnc.ir.loops.intrinsics import COSTLY
from dnnc.ir.types import product

LOCAL_LIMIT = 16384  # elements of a row kept in a thread's own memory (64 KB of float32, an L2-resident buffer)
LOCAL_BYTES = 3 << 16  # of all rows that a kernel keeps: no more than the shared memory of a multiprocessor
Resolve = Callable[[Expr], Expr]


def choose_kept(results: Sequence[te.Tensor], resolve: Resolve, kept: dict[te.Tensor, int]) -> None:
    """Enter the costly element-wise tensors that feed a reduction and something else beside it (exp in softmax), each
    with the number of leading axes that are fixed where it is kept. `resolve` inlines what is not among them.
    """
    users: dict[te.Tensor, set[te.Tensor]] = {}
    order = list(te.stages(results))
    for t in order:
        assert t.stage is not None
        for x in walk(t.stage.value):
            if isinstance(x, Load) and isinstance(x.buf, te.Tensor) and x.buf.stage is not None:
                users.setdefault(x.buf, set()).add(t)
    used = 0  # elements of all rows that are kept
    for t in order:
        stage = t.stage
        assert stage is not None
        readers = users.get(t, set()) | ({t} if len(results) > 1 and t in results else set())
        if stage.reduce or len(readers) < 2 or not any(r.stage is not None and r.stage.reduce for r in readers):
            continue
        fixed = _fixed_axes(t, readers)
        size = value(const(product([unwrap(d) for d in t.shape[fixed:]])))
        if size is None or not 1 < size <= LOCAL_LIMIT or (used + size) * t.dtype.computed.bytes > LOCAL_BYTES:
            continue
        if _is_costly(stage, fixed, resolve) and _is_row(t, fixed, readers, resolve):
            kept[t] = fixed
            used += size


def _is_costly(stage: te.Stage, fixed: int, resolve: Resolve) -> bool:
    """Does an element take more than simple arithmetic, by itself or through what is inlined in it? Numbers of the
    row are computed once.
    """
    own = set(stage.axes[fixed:])
    return any(
        isinstance(x, Op) and x.name in COSTLY and not own.isdisjoint(free(x)) for x in walk(resolve(stage.value))
    )


def _is_row(t: te.Tensor, fixed: int, readers: set[te.Tensor], resolve: Resolve) -> bool:
    """Does every reduction that the tensor is made of have one value for what lies behind the fixed axes, and every
    one that reads it go over all of that?
    """
    assert t.stage is not None
    own = set(t.stage.axes[fixed:])
    if not all(own.isdisjoint(v for i in x.idx for v in free(i)) for x in pending(resolve(t.stage.value), {})):
        return False
    stages = [r.stage for r in readers if r.stage is not None and r.stage.reduce]
    read = [(s, i) for s in stages for x in walk(s.value) if isinstance(x, Load) and x.buf is t for i in x.idx[fixed:]]
    return all(free(i) <= set(s.reduce) for s, i in read)


def _fixed_axes(t: te.Tensor, readers: set[te.Tensor]) -> int:
    """Leading axes that every reader indexes by its own axis of that number: rows of one loop nest."""
    n = len(t.shape)
    for r in readers:
        assert r.stage is not None
        for x in walk(r.stage.value):
            if isinstance(x, Load) and x.buf is t:
                same = 0
                while (
                    same < min(n, len(r.stage.axes))
                    and x.idx[same] is r.stage.axes[same]
                    and r.stage.axes[same] not in r.stage.reduce
                ):
                    same += 1
                n = min(n, same if r.stage.reduce else min(same, n))
    reduced = min((len(r.stage.axes) for r in readers if r.stage is not None and r.stage.reduce), default=n)
    return min(n, reduced)


def pending(e: Expr, placed: Mapping[Expr, Expr]) -> list[Load]:
    """Loads of stages in an expression that have no place yet, in a deterministic order."""
    return [
        x for x in reversed(list(walk(e))) if isinstance(x, Load) and isinstance(x.buf, te.Tensor) and x not in placed
    ]
