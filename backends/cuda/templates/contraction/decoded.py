"""Products of few rows with weights of 4 or 8 bits: problems, and schedules of `decoded_kernel.py`.

Weights are constants of whole blocks, in the order in which lanes read them. Rows may be made by a norm or by
element-wise nodes, which every block then computes for itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates.contraction import gemv, gemv_norm
from dnnc.backends.cuda.templates.contraction.decoded_choice import cycles, shapes, steps_of
from dnnc.backends.cuda.templates.contraction.decoded_kernel import FLIGHT, VECTOR, Decoded, Shape, Writer
from dnnc.backends.cuda.templates.contraction.gemv_norm import elements_ahead, normed_product
from dnnc.backends.cuda.templates.contraction.mma import raw_operand
from dnnc.backends.cuda.templates.contraction.staging import readable
from dnnc.ir.dtype import f32
from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Expr, const, substitute, value
from dnnc.ir.graph import Node, Value
from dnnc.ir.loops.stmt import Buffer, Kernel
from dnnc.ir.types import Encoding
from dnnc.passes.lower.form import Contraction
from dnnc.passes.rewrites.channels_last import DEPTH, WIDTH, code_layout, number_layout
from dnnc.passes.rewrites.stored_weights import is_decoded
from dnnc.passes.schedule.problem import Knobs, Problem

MOST_ROWS = 64  # of x: of more, tensor cores take longer than the codes
MADE_ROWS = gemv_norm.ROWS  # that every block may compute for itself
ORDER = ("cols", "slices", "split")


def takes(rows: int, k: int, n: int, bits: int, block: int) -> bool:
    """Is there a kernel for a product of so many rows by weights [k, n] in 16-bit floats?"""
    whole = k % DEPTH == 0 and n % WIDTH == 0 and (block % DEPTH == 0 or block >= k)
    return 0 < rows <= MOST_ROWS and whole and bits in (4, 8)


def makes_rows(n: Node, product: Node) -> bool:
    """Does the product's kernel compute its rows, which a norm or an element-wise node makes?"""
    w = product.inputs[1] if len(product.inputs) > 1 else None
    if not is_decoded(w) or w is None or w.node is None:
        return gemv_norm.takes(n, product)
    d, q = w.node, w.node.inputs[0]
    if q is None or len(d.inputs) < 2 or w.type.dtype.bits != 16 or not gemv_norm.fits(n, product, math.inf):
        return False
    k, m = int(str(w.type.shape[0])), int(str(product.output.type.size)) // int(str(w.type.shape[1]))
    sized = takes(m, k, int(str(w.type.shape[1])), q.type.dtype.bits, int(d.attrs["block"]))
    return sized and offset_of(d) is not None and not d.attrs["axis"] % 2


def offset_of(d: Node) -> int | None:
    """What codes are moved by: the table of 4 bits says so, bytes are themselves. None where a table is no line."""
    table = d.attrs["table"]
    q = d.inputs[0]
    assert q is not None
    if q.type.dtype.bits == 8:
        return 0 if not table else None
    line = len(table) == 16 and all(v == k + table[0] for k, v in enumerate(table))
    return int(-table[0]) if line and 0 <= -table[0] <= 15 else None


def decoded(problem: Problem) -> Decoded | None:
    """The product of decoded weights that a problem is; None where it is none that this template takes."""
    c, node, norm = problem.contraction, problem.anchor, None
    w = node.inputs[1] if node is not None and len(node.inputs) > 1 else None
    if c is None and is_decoded(w) and w is not None and w.type.dtype.bits == 16:
        norm, c = normed_product(problem, w.type.dtype) or (None, None)
    if c is None or c.dtype is not f32 or c.batch.loops or not is_decoded(w) or w is None or w.node is None:
        return None
    x = raw_operand(c.a, f32)
    if x is None and norm is None and w.type.dtype.bits == 16 and c.rows.size <= MADE_ROWS:
        norm, c = elements_ahead(c, w.type.dtype) or (None, c)
        x = raw_operand(c.a, f32)
    d = w.node
    q, scale = d.inputs[0], d.inputs[1] if len(d.inputs) > 1 else None
    zeros = d.inputs[2] if len(d.inputs) > 2 else None
    if x is None or q is None or scale is None or w.type.rank != 2 or not w.type.static or x.conds or c.b.conds:
        return None
    k, n = (int(s) for s in w.type.shape)  # type: ignore[arg-type]
    block, bits, offset = int(d.attrs["block"]), q.type.dtype.bits, offset_of(d)
    if d.attrs["axis"] % 2 or offset is None or c.sizes[2:] != (n, k) or not takes(c.rows.size, k, n, bits, block):
        return None
    layouts = [code_layout(bits), number_layout(), number_layout()]
    if any(v is not None and v.type.encoding != lay for v, lay in zip((q, scale, zeros), layouts)):
        return None
    if not readable(x.value, c.red, c.rows, VECTOR):
        return None
    if any(v is not None and v.type.shape != (1 if block >= k else k // block, n) for v in (scale, zeros)):
        return None
    names = {v: b.name for v, b in zip(problem.lowered.params, problem.kernel.entry.buffers)}
    if q not in names or scale not in names or not _reads(c, names[q], q, (k, n)):
        return None
    blocks = 1 if block >= k else k // block

    def view(v: Value, inner: int) -> Buffer:
        return Buffer(names[v], v.type.buffer.dtype, tuple(map(const, (blocks, n // WIDTH, inner))))

    strip = WIDTH * 4 // bits
    shape = (n // strip, k // DEPTH, 32, 4 if bits == 4 else 16)
    codes = Buffer(names[q], q.type.buffer.dtype, tuple(map(const, shape)))
    early = names[q] in problem.constants
    made = replace(c, a=x)
    z = None if zeros is None else view(zeros, WIDTH)
    known = frozenset(gemv.early(problem, GpuTarget())) if norm is not None else frozenset[str]()
    return Decoded(made, codes, view(scale, WIDTH), z, bits, offset, block, early, norm, known)


def _reads(c: Contraction, name: str, q: Value, sizes: tuple[int, int]) -> bool:
    """Does the nest read code (k, n) at index k of the sum and column n? Asked of some elements."""
    found = [x for x in c.b.loads if x.buf.name == name]
    if not found:
        return False
    k, n = sizes
    encoding: Encoding = q.type.encoding
    buf = Buffer("x", q.type.buffer.dtype, tuple(map(const, q.type.buffer.shape)))
    for i, j in product((0, 1, 7, 8, 33, k - 1), (0, 1, 8, 17, n - 1)):
        if i >= k or j >= n:
            continue
        seen: list[Any] = []

        def element(*at: Any, seen: list[Any] = seen) -> Expr:
            seen.append(value(buf.offset(tuple(map(const, at)))))
            return const(0, buf.dtype)

        encoding.load((element,), (const(i), const(j)))
        at = {**c.red.at(const(i)), **c.cols.at(const(j))}
        if any([value(substitute(x.buf.offset(x.idx), at))] != seen for x in found):
            return False
    return True


def candidates(problem: Problem, target: GpuTarget) -> list[Knobs]:
    d = decoded(problem) if target.major >= 8 else None
    if d is None:
        return []
    found = [s for s in shapes(d, target)]
    found.sort(key=lambda s: cycles(d, s, target))
    return [_knobs(s) for s in found[:8]]


def space(problem: Problem, target: GpuTarget) -> list[Knobs]:
    d = decoded(problem) if target.major >= 8 else None
    if d is None:
        return []
    every = sorted(shapes(d, target), key=lambda s: cycles(d, s, target))
    return [_knobs(replace(s, flight=n)) for s in every for n in (FLIGHT, 2, 8) if steps_of(d, n) == n]


def _knobs(s: Shape) -> Knobs:
    found: Knobs = (("cols", s.cols), ("slices", s.slices), ("split", s.split), ("flight", s.flight))
    more = (("stages", s.stages), ("resident", s.resident))
    return (*found, *more) if s.stages else found


def apply(problem: Problem, knobs: Mapping[str, int | str], target: GpuTarget) -> Kernel:
    d = decoded(problem)
    if d is None:
        raise ScheduleError("the nest is no product of few rows by weights of 4 or 8 bits in 16-bit floats")
    return Writer(d, Shape(**{k: int(v) for k, v in knobs.items()})).build()
