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
                g, ctx.facts.lanes, ctx.strict, ctx.facts.rates, fixed, ctx.note, ctx.facts.runs_sparse_rows
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
    "operands that only derivatives read are nobody's; first, since gradients were taken before",
)
QUANTIZED = Pass(
    "quantized",
    quantized,
    "products of dequantised operands are products of bytes; ahead of folding, which makes floats of the weights",
)
STORED = Pass(
    "stored-weights",
    stored_weights,
    "products decode weights of few bits; behind products of bytes, which need none, and ahead of folding",
)
INTEGERS = Pass(
    "integers",
    requantized,
    "products of integers are products of bytes; weights less their zero points are constants now",
)
FOLD = Pass("fold", fold, "constants and shape arithmetic first: everything after is cheaper")
SINK = Pass(
    "sink-constants", sink_constants, "weights that a loop captures are constants of its body, which packs them once"
)
BATCH_NORM = Pass(
    "fold-batch-norm", nested(fold_batch_norm), "batch norms and scales go into weights while they are one op each"
)
CONV_TRANSPOSE = Pass(
    "conv-transpose",
    nested(conv_transpose),
    "a transposed convolution is a convolution per phase; after scales went into its weights",
)
DECOMPOSE = Pass("decompose", decompose, "what is defined by other ops becomes those ops")
ATTENTION_PARTS = Pass(
    "attention-parts",
    nested(attention_parts),
    "two products and a softmax are faster than a nest over all of it; before cse, which shares them with gradients",
)
FOLD_AGAIN = Pass("fold-again", fold, "decompositions of weights (transposes of gemm) are constants")
CANONICALIZE = Pass("canonicalize", canonicalize, "one form for each computation, nothing that does nothing")
CSE = Pass("cse", cse, "equal values are computed once; after canonicalize, which makes equal things look equal")
MARKS = Pass(
    "recomputed",
    nested(drop_marks),
    "values that are computed again are ordinary ones, once nothing merges them with those that were kept",
)
CANONICALIZE_AGAIN = Pass("canonicalize-again", canonicalize, "x * x out of two subtractions that are now one")
IDIOMS = Pass(
    "idioms",
    idioms,
    "exporters spell norms, softmax and GELU in small ops; one op fuses and computes better; needs the one form",
)
ATTENTION = Pass(
    "attention",
    attention,
    "the scores stay in a kernel; after the idioms, which find softmax, and before precision, which would cast them",
)
SIBLINGS = Pass(
    "siblings",
    nested(siblings),
    "one product instead of three; after attention, which gives queries, keys and values one form",
)
BATCH_NORM_AGAIN = Pass(
    "fold-batch-norm-again", nested(fold_batch_norm), "scales and shifts that decompositions left beside a contraction"
)
DCE = Pass("dce", dce, "what nobody reads goes before layouts and plans see it")
SCATTERS = Pass(
    "scatters",
    nested(scatters),
    "indices that are constant or expanded name rows and ranges; after folding, which makes them constants",
)
WIDE_SUMS = Pass(
    "wide-sums", nested(wide_sums), "scatters add up in f32; after precision, which says how floats are stored"
)
RECOMPUTE = Pass(
    "recompute",
    recompute,
    "what a gradient's kernel can compute of its operands is not kept for it; after all that merges equal values",
)
REMATERIALIZE = Pass(
    "rematerialize",
    rematerialize,
    "with a budget of memory, values are computed again in the place of kept; after all that merges equal ones",
)
PRECISION = Pass(
    "precision",
    nested(precision),
    "how floats are stored; after all folding, which is done in the model's types, and where norms are one op each",
)
PROLOGUE = Pass(
    "prologue",
    hoist,
    "what depends on parameters alone runs when these change; after precision, which casts weights, and before layouts",
)
SPLIT_REDUCE = Pass(
    "split-reduce",
    nested(split_reductions),
    "few long sums leave threads without work: they become two kernels; before layouts",
)
SPLIT_FILTERS = Pass(
    "split-filters",
    nested(split_filters),
    "few filters leave multiprocessors without work: parts of the images do not; before their sums are split",
)
SPLIT_SCANS = Pass(
    "split-scans",
    nested(split_scans),
    "few long running sums leave cores without work: parts of them do not; before layouts",
)
SPLIT_TRANSPOSES = Pass(
    "split-transposes",
    nested(split_transposes),
    "large transposed copies are made in parts, in memory that a cache holds; after all that moves transposes",
)
SCALARS = Pass(
    "scalars",
    nested(scalars),
    "a kernel for one number takes longer than to compute it where it is read; after cse, which would merge them again",
)
RECURRENCE = Pass(
    "recurrence",
    recurrence,
    "loops that are one kernel; their bodies are in the form in which they are computed, and get no layouts",
)
GROUPED = Pass(
    "grouped-filters",
    nested(grouped_filters),
    "filters' gradients of narrow groups are those of groups that fill vectors; before layouts, which then have blocks",
)
LAYOUT = Pass(
    "layout", layout, "blocks for vectors, or channels last; last of the rewrites, since it fixes how values lie"
)
STATE = Pass(
    "state-layouts",
    state_layouts,
    "state is not packed in each step; after the layouts, which say what it is packed for",
)
IN_ROWS = Pass(
    "results-in-rows",
    nested(in_rows),
    "an update in rows packs its gradient alone; after the layouts of state, of which nothing is packed any more",
)
DCE_AGAIN = Pass("dce-again", dce, "layout relabels constants and leaves the old ones without readers")
HOIST = Pass(
    "hoist-invariants",
    hoist_invariants,
    "weights that a loop captures are packed once, in front of it; after layout, which says that they are packed",
)
REPEAT = Pass(
    "repeat",
    nested(repeat_shared),
    "a value that several kernels can compute of what they read is none of its own; behind all that changes kernels",
)
COPY_OUTPUTS = Pass(
    "copy-outputs",
    nested(copy_outputs),
    "outputs are memory of their own; after layout, which may add the last node itself",
)
PLACE_CONCATS = Pass(
    "place-concats",
    nested(place_concats),
    "operands are written where the result has them; what cannot be is copied; needs the layouts",
)

PASSES = (
    FORGET, QUANTIZED, STORED, FOLD, INTEGERS, SINK, BATCH_NORM, CONV_TRANSPOSE, DECOMPOSE, ATTENTION_PARTS, FOLD_AGAIN,
    CANONICALIZE, CSE, MARKS,
    CANONICALIZE_AGAIN, IDIOMS, ATTENTION, SIBLINGS, BATCH_NORM_AGAIN, SCATTERS, DCE,
    PRECISION, WIDE_SUMS, PROLOGUE, RECOMPUTE, REMATERIALIZE, SPLIT_SCANS, GROUPED, SPLIT_FILTERS, SPLIT_REDUCE,
    SPLIT_TRANSPOSES, SCALARS, RECURRENCE, LAYOUT, STATE, IN_ROWS, DCE_AGAIN, HOIST, REPEAT, COPY_OUTPUTS,
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
