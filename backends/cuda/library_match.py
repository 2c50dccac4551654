"""Which kernels a library can do whole: a problem -> the Product or the Convolution that it is, or None.

A library takes one matrix product or convolution with what its epilogue offers: a bias along the last axis, then relu
or GELU, then at most a cast. All else stays with our schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dnnc.backends.cuda.library import Convolution, Image, LibraryCall, Matrix, Product
from dnnc.ir.expr import Expr, terms
from dnnc.ir.graph import Node, Value
from dnnc.ir.op import ContractionForm, Trait
from dnnc.ir.types import Dense, TensorType
from dnnc.passes.lower.form import Axis, Contraction
from dnnc.passes.schedule.problem import Problem

FLOATS = ("f16", "bf16", "f32")
FORM = {"cublaslt": ContractionForm.PRODUCT, "cudnn": ContractionForm.CONVOLUTION}
ORDER = {"add": 0, "relu": 1, "gelu": 1, "cast": 2}  # in which an epilogue does things, each once


@dataclass(frozen=True)
class Chain:
    """What follows a contraction: the bias, the activation, the type of the result."""

    bias: Value | None
    after: str
    gelu: str


def work_of(problem: Problem, library: str, rounded: bool = False) -> Product | Convolution | None:
    """The work of a problem if a library can do all of it. `rounded`: float32 operands may be rounded to TF32."""
    anchor, low, form = problem.anchor, problem.lowered, problem.form
    if anchor is None or not isinstance(form, Contraction) or problem.inplace or low.dims or form.elements == 0:
        return None
    if len(low.outputs) > 1:
        return None
    if anchor.op.contraction is not FORM[library] or anchor.attrs.get("out_dtype") is not None:
        return None
    chain = _chain(anchor, low.params)
    if chain is None:
        return None
    x, w = anchor.inputs[:2]
    operands = [x, w, *([chain.bias] if chain.bias is not None else []), low.params[-1]]
    if x is None or w is None or x is w or len(low.params) != len(operands) or set(low.params) != set(operands):
        return None
    types = _types(x.type, w.type, low.params[-1].type, chain.bias)
    if types is None:
        return None
    math = "tf32" if rounded and types[0] == "f32" else "f32"
    return (
        _product(form, low.params, x, w, chain, types, math)
        if library == "cublaslt"
        else _convolution(low.params, anchor, chain, types, math)
    )


def call_for(problem: Problem, library: str, plan: int, math: str) -> LibraryCall | None:
    """The call of a library that computes a problem."""
    work = work_of(problem, library, math == "tf32")
    return None if work is None or work.math != math else LibraryCall(library, plan, work)


# --- what follows -----------------------------------------------------------------------------------------------------


def _chain(anchor: Node, params: Sequence[Value]) -> Chain | None:
    """From the result back to the contraction; None where something is in between that an epilogue has not."""
    bias = anchor.inputs[2] if len(anchor.inputs) > 2 else None
    after, gelu, level = "", "", len(ORDER)
    v: Value | None = params[-1]
    while v is not None and v.node is not anchor:
        n = v.node
        order = ORDER.get(n.op.name, level) if n is not None else level
        if n is None or order >= level:
            return None
        level = order
        if n.op.name == "add":
            found = _added(n, params)
            if found is None or bias is not None:
                return None
            v, bias = found
            continue
        after = after if Trait.CONVERSION in n.op.traits else n.op.name
        gelu = str(n.attrs.get("approximate", "none")) if n.op.name == "gelu" else gelu
        v = n.inputs[0]
    if after == "gelu" and (
        gelu != "tanh" or anchor.op.contraction is ContractionForm.CONVOLUTION
    ):  # libraries compute GELU by tanh
        return None
    if bias is not None and not _is_bias(bias, anchor):
        return None
    return Chain(bias, after, gelu)


def _added(n: Node, params: Sequence[Value]) -> tuple[Value, Value] | None:
    """Of an addition the operand that goes on, and the one that is added."""
    a, b = n.inputs
    if a is None or b is None or (a in params) == (b in params):
        return None
    v, bias = (b, a) if a in params else (a, b)
    return (v, bias) if v.type.shape == n.outputs[0].type.shape else None


def _is_bias(bias: Value, anchor: Node) -> bool:
    """Is it one number for each column, or channel, of the contraction?"""
    t, y = bias.type, anchor.outputs[0].type
    sizes = _sizes(t)
    if sizes is None or not t.row_major:
        return False
    n, rank = (
        (y.shape[-1], 1) if anchor.op.contraction is ContractionForm.PRODUCT else (y.shape[1], len(y.shape) - 1)
    )  # C, 1, 1 of what is added to channels
    if len(anchor.inputs) > 2 and anchor.inputs[2] is bias:
        rank = 1
    lead, core = sizes[: len(sizes) - rank], sizes[len(sizes) - rank :]
    return len(sizes) >= rank and core == (n, *[1] * (rank - 1)) and all(d == 1 for d in lead)


def _types(x: TensorType, w: TensorType, y: TensorType, bias: Value | None) -> tuple[str, str] | None:
    t, out = x.dtype.name, y.dtype.name
    if t not in FLOATS or w.dtype.name != t or out not in (t, "f32"):
        return None
    if bias is not None and (
        bias.type.dtype.name != t or out != t
    ):  # libraries want the bias in the type of the result
        return None
    return t, out


# --- how it lies ------------------------------------------------------------------------------------------------------


def _sizes(t: TensorType) -> tuple[int, ...] | None:
    return tuple(t.shape) if all(isinstance(d, int) and d > 0 for d in t.shape) else None  # type: ignore[arg-type]


def steps_of(t: TensorType) -> tuple[int, ...] | None:
    """Elements between neighbours along each axis; None where a layout divides an axis into blocks."""
    sizes = _sizes(t)
    if sizes is None or not isinstance(t.encoding, Dense):
        return None
    order = list(range(len(sizes)))
    if t.layout is not None:
        if any(p.div != 1 or p.mod for p in t.layout.parts) or len(t.layout.parts) != len(sizes):
            return None
        order = [p.axis for p in t.layout.parts]
    out, step = [0] * len(sizes), 1
    for axis in reversed(order):
        out[axis], step = step, step * sizes[axis]
    return tuple(out)


def _matrix(arg: int, offset: Expr, batch: Axis, rows: Axis, cols: Axis) -> Matrix | None:
    """How the matrices of an operand lie, whose elements have these offsets."""
    steps, first = dict(terms(offset)[0]), terms(offset)[1]
    if first or not {*batch.loops, *rows.loops, *cols.loops}.issuperset(steps):
        return None
    each, row, col = (sum(steps.get(v, 0) for v in axis.loops) for axis in (batch, rows, cols))
    if cols.size == 1 or col == 1:
        return Matrix(arg, False, row or cols.size, each)
    return Matrix(arg, True, col, each) if rows.size == 1 or row == 1 else None


def _product(
    form: Contraction, params: Sequence[Value], x: Value, w: Value, chain: Chain, types: tuple[str, str], math: str
) -> Product | None:
    c, shared = form.joined, w.type.rank == 2
    if c is None or min(x.type.rank, w.type.rank) < 2 or not (shared or w.type.shape[:-2] == x.type.shape[:-2]):
        return None
    left, right = (c.b, c.a) if c.swapped else (c.a, c.b)
    batch, m, n, k = c.batch, left.axis, right.axis, c.red
    if any(len(axis.loops) > 1 for axis in (batch, m, n, k)):
        return None
    (at,), (to,) = left.loads, right.loads
    mx = _matrix(params.index(x), at.buf.offset(at.idx), batch, m, k)
    mw = _matrix(params.index(w), to.buf.offset(to.idx), batch, k, n)
    my = _matrix(len(params) - 1, c.store.buf.offset(c.store.idx), batch, m, n)
    if mx is None or mw is None or my is None or my.transposed:
        return None
    bias = -1 if chain.bias is None else params.index(chain.bias)
    return Product(m.size, n.size, k.size, batch.size, types, math, mx, mw, my, bias, chain.after)


def _convolution(
    params: Sequence[Value], anchor: Node, chain: Chain, types: tuple[str, str], math: str
) -> Convolution | None:
    x, w, y = anchor.inputs[0], anchor.inputs[1], params[-1]
    assert x is not None and w is not None
    images = [_image(v, params) for v in (x, w, y)]
    if any(i is None for i in images) or anchor.attrs.get("group", 1) != 1:
        return None
    pads = anchor.attrs.get("pads") or (0, 0, 0, 0)
    strides, dilations = anchor.attrs.get("strides") or (1, 1), anchor.attrs.get("dilations") or (1, 1)
    if types[0] != types[1] or (chain.after and chain.bias is None):  # cuDNN 9 has no engine for these
        return None
    if len(pads) != 4 or not all(isinstance(p, int) and p >= 0 for p in pads):
        return None
    bias = -1 if chain.bias is None else params.index(chain.bias)
    at_x, at_w, at_y = images
    assert at_x is not None and at_w is not None and at_y is not None
    both = ((pads[0], pads[2]), (pads[1], pads[3]))
    return Convolution(at_x, at_w, at_y, types, math, both, tuple(strides), tuple(dilations), bias, chain.after)


def _image(v: Value, params: Sequence[Value]) -> Image | None:
    """A value with two spatial axes and channels last."""
    sizes, steps = _sizes(v.type), steps_of(v.type)
    if sizes is None or steps is None or len(sizes) != 4 or (steps[1] != 1 and sizes[1] != 1):
        return None
    return Image(params.index(v), sizes, steps)  # type: ignore[arg-type]
