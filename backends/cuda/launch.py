"""How a kernel is launched: which of its loops are the grid and which the threads of a block.

    for b in block.x(G):            grid.x = G
        for c in cluster(C):        grid.x = G * C; C neighbouring blocks form a cluster (may be left out)
            for w in warp(W):       threads = W * 32; w is threadIdx.x / 32
                for l in lane(32):  l is threadIdx.x % 32

Thread loops may follow each other in a block, each with all its threads; what stands outside of them is executed by
every thread alike. A kernel without such loops is run by one thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dnnc.backends.cuda.index import constant
from dnnc.ir.errors import InternalError
from dnnc.ir.expr import value
from dnnc.ir.loops.stmt import Alloc, Block, For, Kernel, Let, Store, blocks, walk_stmts

BLOCKS, THREADS = ("block.x", "block.y", "block.z"), ("thread.x", "warp", "lane")
LIMITS = {"block.x": (1 << 31) - 1, "block.y": 65535, "block.z": 65535}
MAX_THREADS = 1024
MAX_CLUSTER = 8  # blocks that every device can run at once


@dataclass
class Shape:
    """Extents of a kernel's grid, and for each of its loops the C++ that is its number, counted from 0."""

    grid: tuple[int, int, int] = (1, 1, 1)
    threads: int = 1
    cluster: int = 1
    kinds: tuple[str, ...] = (*BLOCKS, "cluster", *THREADS)
    numbers: dict[For, str] = field(default_factory=dict)


def shape_of(kernel: Kernel) -> Shape:
    """Find the grid of a kernel. InternalError if its loops are none."""
    extents: dict[str, int] = {}
    shape = Shape()
    body = kernel.entry.body
    if not any(isinstance(s, For) and s.kind in shape.kinds for s in walk_stmts(body)):
        return shape
    _grid(kernel.name, body, extents, shape)
    extents["block.x"] = extents.get("block.x", 1) * shape.cluster
    shape.grid = tuple(extents.get(k, 1) for k in BLOCKS)  # type: ignore[assignment]
    shape.threads = max(
        (_team(s.body) * constant(s.extent, "the extent of a thread loop") for s in _outermost(body)), default=1
    )
    if not 0 < shape.threads <= MAX_THREADS:
        raise InternalError(f"{kernel.name} has {shape.threads} threads in a block; there may be {MAX_THREADS}")
    for s in _outermost(body):
        n = _team(s.body) * constant(s.extent, "the extent of a thread loop")
        if n != shape.threads:
            raise InternalError(
                f"{kernel.name}: a thread loop has {n} threads, others {shape.threads}; a block has one size"
            )
        _number(s, 1, shape)
    if shape.threads > 1:
        _alone(kernel.name, body)
    return shape


def _grid(name: str, b: Block, extents: dict[str, int], shape: Shape) -> None:
    """Walk down the loops over blocks, which must be around all that does anything."""
    loops = [s for s in b if isinstance(s, For) and s.kind in (*BLOCKS, "cluster")]
    if not loops:
        if any(isinstance(s, For) and s.kind in (*BLOCKS, "cluster") for s in walk_stmts(b)):
            raise InternalError(f"{name}: a loop over blocks stands inside of another statement")
        return
    if len(loops) > 1 or any(not isinstance(s, (Let, Alloc)) for s in b if s is not loops[0]):
        raise InternalError(f"{name}: a loop over blocks must be the only statement at its place; the grid is one")
    s = loops[0]
    n = constant(s.extent, f"the extent of {s.kind} loop {s.var.name}")
    if s.kind == "cluster":
        _cluster(name, s, n, extents, shape)
        return
    if s.kind in extents or shape.cluster > 1:
        raise InternalError(f"{name} has two {s.kind} loops inside of each other")
    if n > LIMITS[s.kind]:
        raise InternalError(f"{name}: {n} blocks along {s.kind}; there may be {LIMITS[s.kind]}")
    extents[s.kind] = n
    shape.numbers[s] = f"blockIdx.{s.kind[-1]}"
    _grid(name, s.body, extents, shape)


def _cluster(name: str, s: For, n: int, extents: dict[str, int], shape: Shape) -> None:
    """Blocks that run at once: neighbours along x. A block's number is then that of its cluster."""
    outer = next((o for o in shape.numbers if o.kind == "block.x"), None)
    if outer is None or shape.cluster > 1 or not 1 <= n <= MAX_CLUSTER:
        raise InternalError(
            f"{name}: a cluster is one loop of up to {MAX_CLUSTER} blocks inside of a block.x loop, not {n} here"
        )
    shape.cluster = n
    shape.numbers[s] = f"blockIdx.x % {n}"
    shape.numbers[outer] = f"blockIdx.x / {n}"
    _grid(name, s.body, extents, shape)


def _outermost(b: Block) -> list[For]:
    """The thread loops that are in no other one."""
    out: list[For] = []
    for s in b:
        if isinstance(s, For) and s.kind in THREADS:
            out.append(s)
        else:
            for inner in blocks(s):
                out += _outermost(inner)
    return out


def _team(b: Block) -> int:
    """Threads of the thread loops in a block."""
    sizes = [constant(s.extent, "the extent of a thread loop") * _team(s.body) for s in _outermost(b)]
    return max(sizes, default=1)


def _number(s: For, outer: int, shape: Shape) -> None:
    """`threadIdx.x / inner % extent`, shortened where provable. outer: threads per iteration of outer loops."""
    inner, n = _team(s.body), value(s.extent) or 0
    text = "threadIdx.x" if inner == 1 else f"threadIdx.x / {inner}"
    shape.numbers[s] = text if outer == 1 else f"{text} % {n}"
    for t in _outermost(s.body):
        _number(t, outer * n, shape)


def _alone(name: str, b: Block) -> None:
    """What stands outside of the thread loops is executed by all threads at once, so it may not write."""
    for s in b:
        if isinstance(s, For) and s.kind in THREADS:
            continue
        if isinstance(s, Store) and s.buf.space in ("global", "shared"):
            raise InternalError(f"{name}: all threads of a block would write {s.buf.name}, outside of its thread loops")
        for inner in blocks(s):
            _alone(name, inner)
