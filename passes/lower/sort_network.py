"""A `sort_network` -> one naive kernel: rows of keys sorted side by side, one in each element of a vector.

    for each block of ROWS rows:
        t[n, ROWS] = the block's keys, turned
        for each stage of the network:
            for each of its pairs i < j:
                t[i], t[j] = min(t[i], t[j]), max(t[i], t[j])
        the first keys, turned back

The network is odd-even merge sort (Batcher, Sorting networks and their applications, 1968): about n * log2(n)^2 / 4
pairs, whatever the keys are. Rows that do not have 2^k keys end with copies of the largest one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from dnnc.ir.dtype import u64
from dnnc.ir.expr import const, free, load, maximum, minimum, value
from dnnc.ir.graph import Node
from dnnc.ir.loops.stmt import Buffer, Builder, Func, Kernel
from dnnc.ir.ops.common import clamp
from dnnc.passes.lower.form import Scan
from dnnc.passes.lower.nests import Lowered

ROWS = 8  # of a block: 512 bits of keys
LAST = (1 << 64) - 1


@dataclass(frozen=True)
class Stage:
    """Pairs (a * step + b * 2 * apart + begin + c, the same + apart) for a < blocks, b < runs, c < apart."""

    step: int
    blocks: int
    begin: int
    runs: int
    apart: int


def stages(n: int) -> Iterator[Stage]:
    """The stages of a network for n keys, a power of two: pairs of sorted runs of `size` are merged."""
    for level in range(n.bit_length() - 1):
        size = 1 << level
        yield Stage(2 * size, n // (2 * size), 0, 1, size)
        for k in reversed(range(level)):
            yield Stage(2 * size, n // (2 * size), 1 << k, (size >> k) - 1, 1 << k)


def lower_network(node: Node) -> Lowered:
    """The naive kernel of a `sort_network`."""
    (x,) = node.inputs
    assert x is not None
    given, made = (Buffer(name, u64, tuple(map(const, v.type.shape))) for name, v in (("x0", x), ("y", node.output)))
    rows, keep = given.shape[0], value(made.shape[1])
    n = value(given.shape[1])
    assert n is not None and keep is not None, "type rule: rows of keys have constant sizes"
    whole = 1 << (n - 1).bit_length()
    b = Builder()
    with b.loop("block", (rows + (ROWS - 1)) // ROWS) as block:
        t = b.alloc("t", u64, whole, ROWS, space="local")
        with b.loop("j", n) as j, b.loop("r", ROWS) as r:
            b.store(t, (j, r), given[minimum(block * ROWS + r, rows - 1), j])
        with b.loop("j", whole - n) as j:
            b.store(t, (j + n, 0), const(LAST, u64), ROWS)
        pairs = 0
        for s in stages(whole):
            pairs += s.blocks * s.runs * s.apart
            with ExitStack() as loops:
                sizes = zip("akc", (s.blocks, s.runs, s.apart))
                a, k, c = (loops.enter_context(b.loop(v, m)) if m > 1 else const(0) for v, m in sizes)
                first = a * s.step + k * (2 * s.apart) + c + s.begin
                low, high = (b.let(v, load(t, (at, 0), ROWS)) for v, at in (("low", first), ("high", first + s.apart)))
                b.store(t, (first, 0), minimum(low, high), ROWS)
                b.store(t, (first + s.apart, 0), maximum(low, high), ROWS)
        with b.loop("r", ROWS) as r, b.when(block * ROWS + r < rows), b.loop("j", keep) as j:
            b.store(made, (clamp(block * ROWS + r, rows), j), t[j, r])
    dims = tuple(sorted({v for d in given.shape for v in free(d)}, key=lambda v: v.name))
    kernel = Kernel((Func("sort_network", (*dims, given, made), b.block()),), node.locs)
    return Lowered(kernel, (x, node.output), dims, Scan(outer=(block,), steps=pairs * ROWS), (1,))
