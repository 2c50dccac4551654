"""The compiler's middle, as one flat list: graph passes in order, each with its reason; then plan, lower, schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.op import Trait
from dnnc.passes.analysis.kinds import is_view
from dnnc.passes.base import Pass, PassContext, PassManager, graphs
from dnnc.passes.planning.program import Known, Planner, Revise, ScheduledGraph
from dnnc.passes.planning.prologue import hoist
from dnnc.passes.rewrite import replace_each
from dnnc.passes.rewrites.attention import attention, attention_parts
from dnnc.passes.rewrites.canonicalize import canonicalize
from dnnc.passes.rewrites.capture_loop_constants import sink_constants
from dnnc.passes.rewrites.channels_last import assign_channels_last
from dnnc.passes.rewrites.concat import place_concats
from dnnc.passes.rewrites.conv_transpose import conv_transpose
from dnnc.passes.rewrites.cse import cse
from dnnc.passes.rewrites.dce import dce
from dnnc.passes.rewrites.decompose import decompose
from dnnc.passes.rewrites.fold import fold
from dnnc.passes.rewrites.fold_batch_norm import fold_batch_norm
from dnnc.passes.rewrites.grouped_filters import grouped_filters
from dnnc.passes.rewrites.hoist_invariants import captured, hoist_invariants
from dnnc.passes.rewrites.idioms import idioms
from dnnc.passes.rewrites.layout import assign_layouts
from dnnc.passes.rewrites.merge_parallel_matmuls import siblings
from dnnc.passes.rewrites.pad_images import pad_images
from dnnc.passes.rewrites.precision import precision
from dnnc.passes.rewrites.quantized import quantized, requantized
from dnnc.passes.rewrites.recompute import recompute
from dnnc.passes.rewrites.recurrence import recurrence
from dnnc.passes.rewrites.rematerialize import rematerialize
from dnnc.passes.rewrites.repeat import repeat_shared
from dnnc.passes.rewrites.results_in_rows import results_in_rows
from dnnc.passes.rewrites.scalars import scalars
from dnnc.passes.rewrites.scatters import scatters, wide_sums
from dnnc.passes.rewrites.split_filters import split_filters
from dnnc.passes.rewrites.split_reduce import split_reductions
from dnnc.passes.rewrites.split_scans import split_scans
from dnnc.passes.rewrites.split_transposes import split_transposes
from dnnc.passes.rewrites.state_layouts import assign_state_layouts, relabel_given
from dnnc.passes.rewrites.stored_weights import stored_weights
from dnnc.passes.rewrites.sums_of_products import sums_of_products
from dnnc.passes.schedule.problem import Template
from dnnc.passes.schedule.step import Choose, first_choice


def nested(run: Callable[[Graph, PassContext], bool]) -> Callable[[Graph, PassContext], bool]:
    """A pass on one graph as a pass on it and the bodies of its control flow, innermost first."""

    def on_all(graph: Graph, ctx: PassContext) -> bool:
        return any([run(g, ctx) for g in graphs(graph)])

    return on_all


def layout(graph: Graph, ctx: PassContext) -> bool:
    """Assign layouts in a graph and its subgraphs, but for recurrence bodies, whose kernels read row-major.

    Without vectors (one lane) images lie with their channels last, or all values stay row-major.
    """
    if ctx.facts.lanes == 1 and not ctx.facts.channels_last:
        return False
    bodies = {s for g in graphs(graph) for n in g.nodes() if Trait.RECURRENT in n.op.traits for s in n.subgraphs()}
    others = [g for g in graphs(graph) if g not in bodies]
    loops = [n for g in others for n in g.nodes() if Trait.ITERATES in n.op.traits]
    fixed = {v: length if isinstance(length := n.attrs["length"], int) else inf for n in loops for v in captured(n)}
    given = not ctx.facts.channels_last and relabel_given(graph)
    return given | any(
        [
            assign_channels_last(g, ctx.facts.weighs_sparse, ctx.note)
            if ctx.facts.channels_last
            else assign_layouts(
                g,
                ctx.facts.lanes,
                ctx.strict,
                ctx.facts.rates,
                fixed,
                ctx.note,
                ctx.facts.runs_sparse_rows,
                ctx.facts.l2,
            )
            for g in others
        ]
    )


def state_layouts(graph: Graph, ctx: PassContext) -> bool:
    """Let held inputs lie in blocks where kernels compute with these."""
    return ctx.facts.lanes > 1 and assign_state_layouts(graph)


def in_rows(graph: Graph, ctx: PassContext) -> bool:
    """Let what results in rows be computed in rows."""
    return ctx.facts.lanes > 1 and results_in_rows(graph)


def forget_structures(graph: Graph, ctx: PassContext) -> bool:
    """csr_matmul(.., columns, rows, order)  ->  csr_matmul(.., columns, None, None)"""
    found = [(n, k) for n in graph.nodes() for k in n.op.vjp_operands if k < len(n.inputs) and n.inputs[k] is not None]
    for n, k in found:
        n.set_input(k, None)
    return bool(found)


def drop_marks(graph: Graph, ctx: PassContext) -> bool:
    """recomputed(x, token) -> x"""
    return replace_each(graph, {"recomputed": lambda n: n.inputs[0]})


def copy_outputs(graph: Graph, ctx: PassContext) -> bool:
    """Copy outputs that are inputs, constants, parameters, their views or duplicates to memory of their own."""
    changed = False
    seen: set[Value] = set()
    for k, v in enumerate(graph.outputs):
        root = v
        while root.node is not None and is_view(root.node):
            source = root.node.inputs[0]
            assert source is not None
            root = source
        if root.node is None or root in seen:
            graph.outputs[k] = Builder(graph, None, v.locs).op("pack", v, layout=v.type.layout)
            changed = True
        seen.add(root)
    return changed


FORGET = Pass(
    "forget-structures",
    nested(forget_structures),
    "drop operands that only derivatives read; first, because gradients exist by now",
)
QUANTIZED = Pass(
    "quantized",
    quantized,
    "turn products of dequantized operands into integer products; before folding, which would make the weights float",
)
STORED = Pass(
    "stored-weights",
    stored_weights,
    "let products decode low-bit weights; after integer products, which need no decoding, and before folding",
)
INTEGERS = Pass(
    "integers",
    requantized,
    "turn products of integers into products of bytes, now that weights minus zero points are constants",
)
FOLD = Pass("fold", fold, "evaluate constants and shape arithmetic; early, because it makes all later passes cheaper")
SINK = Pass(
    "sink-constants", sink_constants, "move constants that a loop captures into its body, which packs them once"
)
BATCH_NORM = Pass(
    "fold-batch-norm", nested(fold_batch_norm), "fold batch norms and scales into weights, while each is a single op"
)
CONV_TRANSPOSE = Pass(
    "conv-transpose",
    nested(conv_transpose),
    "split transposed convolutions into one convolution per phase; after folding scales into the weights",
)
DECOMPOSE = Pass("decompose", decompose, "expand ops that are defined by other ops")
ATTENTION_PARTS = Pass(
    "attention-parts",
    nested(attention_parts),
    "expand attention where separate kernels are faster; before cse, which shares the parts with gradients",
)
FOLD_AGAIN = Pass("fold-again", fold, "evaluate what decomposition made of weights, such as transposes of gemm")
CANONICALIZE = Pass("canonicalize", canonicalize, "bring equal computations into one form, remove no-ops")
CSE = Pass("cse", cse, "compute equal values once; after canonicalize, which makes them look equal")
MARKS = Pass(
    "recomputed",
    nested(drop_marks),
    "unmark recomputed values; after cse, which would merge them with the stored ones",
)
CANONICALIZE_AGAIN = Pass(
    "canonicalize-again", canonicalize, "simplify again, for example x * x of two subtractions that cse has merged"
)
IDIOMS = Pass(
    "idioms",
    idioms,
    "recognize norms, softmax and GELU that exporters spell out in small ops; needs the canonical form",
)
ATTENTION = Pass(
    "attention",
    attention,
    "keep attention scores inside one kernel; after idioms, which finds softmax, and before precision, "
    "which would cast the scores",
)
SIBLINGS = Pass(
    "siblings",
    nested(siblings),
    "merge products of the same input; after attention, which gives queries, keys and values one form",
)
SUMS = Pass(
    "sums-of-products",
    nested(sums_of_products),
    "join products that are added up, as gradients of shared weights are; after siblings, before layouts",
)
BATCH_NORM_AGAIN = Pass(
    "fold-batch-norm-again",
    nested(fold_batch_norm),
    "fold scales and shifts that decomposition left beside a contraction",
)
DCE = Pass("dce", dce, "remove unused values, before layouts and plans see them")
SCATTERS = Pass(
    "scatters",
    nested(scatters),
    "turn scatters with constant or expanded indices into updates of rows and ranges; after folding",
)
WIDE_SUMS = Pass(
    "wide-sums", nested(wide_sums), "accumulate scatters in f32; after precision, which decides how floats are stored"
)
RECOMPUTE = Pass(
    "recompute",
    recompute,
    "recompute cheap values in the kernels of gradients instead of storing them; after all passes that "
    "merge equal values",
)
REMATERIALIZE = Pass(
    "rematerialize",
    rematerialize,
    "with a memory budget, recompute values instead of storing them; after all passes that merge equal values",
)
PRECISION = Pass(
    "precision",
    nested(precision),
    "choose how floats are stored; after folding, which uses the model's types, and while norms are single ops",
)
PROLOGUE = Pass(
    "prologue",
    hoist,
    "run once what depends only on parameters; after precision, which casts weights, and before layouts",
)
SPLIT_REDUCE = Pass(
    "split-reduce",
    nested(split_reductions),
    "split few long sums into two kernels, so that all threads have work; before layouts",
)
SPLIT_FILTERS = Pass(
    "split-filters",
    nested(split_filters),
    "split gradients of few filters by images, so that all multiprocessors have work; before split-reduce",
)
SPLIT_SCANS = Pass(
    "split-scans",
    nested(split_scans),
    "split few long running sums, so that all cores have work; before layouts",
)
SPLIT_TRANSPOSES = Pass(
    "split-transposes",
    nested(split_transposes),
    "copy large transposes in parts that fit a cache; after all passes that move transposes",
)
SCALARS = Pass(
    "scalars",
    nested(scalars),
    "compute single numbers where they are read, which is faster than a kernel; after cse, which would "
    "merge them again",
)
RECURRENCE = Pass(
    "recurrence",
    recurrence,
    "turn recurrent loops into one kernel; their bodies get no layouts",
)
GROUPED = Pass(
    "grouped-filters",
    nested(grouped_filters),
    "join narrow groups of filters' gradients so that they fill vectors; before layouts, which then use blocks",
)
PAD_IMAGES = Pass(
    "pad-images",
    nested(pad_images),
    "pad images ahead of convolutions that matrix tiles compute; after precision, which decides on bf16",
)
LAYOUT = Pass(
    "layout",
    layout,
    "choose layouts: channel blocks for vectors, or channels last; last of the rewrites, because it fixes memory order",
)
STATE = Pass(
    "state-layouts",
    state_layouts,
    "keep state in its packed layout between steps; after layout, which chooses the packing",
)
IN_ROWS = Pass(
    "results-in-rows",
    nested(in_rows),
    "pack only the gradient of an update whose state is in rows; after state-layouts",
)
DCE_AGAIN = Pass("dce-again", dce, "remove constants that layout has replaced")
HOIST = Pass(
    "hoist-invariants",
    hoist_invariants,
    "pack weights of a loop once, before it; after layout, which decides the packing",
)
REPEAT = Pass(
    "repeat",
    nested(repeat_shared),
    "repeat cheap values in the kernels that read them; after all passes that change kernels",
)
COPY_OUTPUTS = Pass(
    "copy-outputs",
    nested(copy_outputs),
    "give every output its own memory; after layout, which may add the last node",
)
PLACE_CONCATS = Pass(
    "place-concats",
    nested(place_concats),
    "write operands of concat directly into the result, or copy them; needs the layouts",
)

PASSES = (
    FORGET, QUANTIZED, STORED, FOLD, INTEGERS, SINK, BATCH_NORM, CONV_TRANSPOSE, DECOMPOSE, ATTENTION_PARTS, FOLD_AGAIN,
    CANONICALIZE, CSE, MARKS,
    CANONICALIZE_AGAIN, IDIOMS, ATTENTION, SIBLINGS, SUMS, BATCH_NORM_AGAIN, SCATTERS, DCE,
    PRECISION, WIDE_SUMS, PROLOGUE, RECOMPUTE, REMATERIALIZE, SPLIT_SCANS, GROUPED, SPLIT_FILTERS, SPLIT_REDUCE,
    SPLIT_TRANSPOSES, SCALARS, RECURRENCE, PAD_IMAGES, LAYOUT, STATE, IN_ROWS, DCE_AGAIN, HOIST, REPEAT, COPY_OUTPUTS,
    PLACE_CONCATS,
)  # fmt: skip
LEVELS: dict[int, tuple[Pass, ...]] = {
    0: (DECOMPOSE, MARKS, DCE, PRECISION, WIDE_SUMS, COPY_OUTPUTS),
    1: tuple(p for p in PASSES if p is not LAYOUT),
    3: PASSES,
}


def compile_program(
    graph: Graph,
    ctx: PassContext,
    templates: Sequence[Template],
    choose: Choose = first_choice,
    opt_level: int = 3,
    manager: PassManager | None = None,
    revise: Revise | None = None,
    known: Known | None = None,
    passes: Sequence[Pass] | None = None,
) -> ScheduledGraph:
    """A graph, changed in place by passes -> scheduled kernels with a memory plan.

    `revise`: may fuse differently; `known`: what nests became before; `passes`: None takes those of the level."""
    (manager or PassManager()).run(graph, LEVELS[opt_level] if passes is None else passes, ctx)
    return Planner(graph, ctx, templates, choose, opt_level >= 3, revise, known).program()
