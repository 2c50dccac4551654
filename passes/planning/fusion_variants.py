"""Other ways to compute a fused group, by several kernels or another algorithm, for search and log.

    conv + add + relu        ->   conv, then add + relu: the epilogue in a kernel of its own
    mul + reduce_sum         ->   mul, then reduce_sum: what was computed again wherever it is read is kept in memory
    mean + sub + mul + mean  ->   mean, then sub + mul + mean: reductions of the same rows in kernels of their own
    conv with winograd4 ...  ->   conv with other weights: Winograd's convolution with other tiles, or the direct one

In comes a planned region, out comes another one. A variant is data that outlives the graph: nodes go by their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dnnc.ir.encodings import Winograd
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.op import ContractionForm, Trait
from dnnc.ir.target import WIDE_CORE, CoreRates
from dnnc.ir.types import Encoding, TensorType
from dnnc.ir.winograd import TILES
from dnnc.passes.analysis.kinds import is_kernel, is_view, kind_of
from dnnc.passes.planning.fuse import FusionPlan, Group
from dnnc.passes.planning.inplace import find_inplace
from dnnc.passes.planning.memory_plan import Region
from dnnc.passes.rewrites.orders import filters, winograd_filters
from dnnc.passes.rewrites.winograd import cycles, takes_winograd

MOST_CUTS = 4  # variants of a group that keep results in memory
REACH = 2.0  # times the estimated cycles of the algorithm in use, up to which another one is worth measuring


@dataclass(frozen=True)
class Variant:
    """Another way to make a group."""

    # numbers of the nodes, besides the last one, that end a kernel: what they make is kept in memory
    cuts: tuple[int, ...] = ()
    # of the group's convolution: m of Winograd's F(m x m, 3 x 3), 0 for the direct one; None leaves it as it is
    tile: int | None = None


def variants(graph: Graph, group: Group, strict: bool = False, rates: CoreRates = WIDE_CORE) -> list[Variant]:
    """What may be measured in place of a group, likely ones first.

    Args:
        graph: of the group.
        group: a kernel.
        strict: nothing varies, for sums of another kernel may be added up in another order, and what is kept in memory
            may be rounded.
        rates: of a core of the target.
    """
    if strict or not is_kernel(group.kind) or len(group.outputs) != 1 or len(group.nodes[-1].outputs) != 1:
        return []
    return [*(Variant(tile=t) for t in _tiles(graph, group, rates)), *(Variant(c) for c in _cuts(group))]


def cut(group: Group, cuts: tuple[int, ...]) -> tuple[Group, ...]:
    """Return the kernels of a group that keeps some results in memory; none if other parts must be kept too."""
    if any(not 0 <= k < len(group.nodes) - 1 for k in cuts):
        return ()
    ends = {group.nodes[k] for k in cuts} | {group.nodes[-1]}
    end_of: dict[Node, Node] = {}
    members: dict[Node, list[Node]] = {}
    for n in reversed(group.nodes):
        readers = {end_of[u] for v in n.outputs for u, _ in v.uses if u in end_of}
        if n not in ends and len(readers) != 1:
            return ()
        end = n if n in ends else readers.pop()
        end_of[n] = end
        members.setdefault(end, []).append(n)
    parts = [tuple(ns[::-1]) for ns in reversed(members.values())]
    if any(len(ns[-1].outputs) != 1 or is_view(ns[-1]) or all(map(is_view, ns)) for ns in parts):
        return ()  # what only renames memory is no kernel
    return tuple(Group(ns, tuple(ns[-1].outputs), _kind(ns)) for ns in parts)


def vary(region: Region, chosen: Mapping[Group, Variant]) -> Region:
    """Return the region with some groups remade, nested ones too. Repacked weights are new constants."""
    groups: list[Group] = []
    fresh: list[Group] = []
    kept: list[Value] = []
    for g in region.fusion.groups:
        variant = chosen.get(g)
        if variant is None:
            groups.append(g)
            kept += [v for v in g.outputs if v in region.inplace]
            continue
        if variant.tile is not None:
            _retile(region.graph, g, variant.tile)
        parts = cut(g, variant.cuts)
        fresh += parts
        groups += parts  # where the group stood: they read what it read, and what read it comes behind
    plan = FusionPlan(tuple(groups), region.fusion.views, region.fusion.apart)
    inplace = {v: region.inplace[v] for v in kept}
    nested = {g: tuple(vary(r, chosen) for r in inner) for g, inner in region.nested.items()}
    inplace |= find_inplace(region.graph, FusionPlan(tuple(fresh), plan.views))
    return Region(region.graph, plan, inplace, nested)


# --- what is kept in memory -------------------------------------------------------------------------------------------


def _cuts(group: Group) -> list[tuple[int, ...]]:
    """Parts: an anchor, its epilogue's rest, its reads, reductions ahead; without anchor, non-local reads."""
    nodes = group.nodes
    number = {n: k for k, n in enumerate(nodes)}
    anchors = [n for n in reversed(nodes) if group.kind != "map" and kind_of(n) == group.kind]
    if anchors:
        wanted = [
            anchors[0],
            *(v.node for v in anchors[0].inputs if v is not None and v.node is not None),
            *anchors[1:],
        ]
    else:
        wanted = [n for n in nodes if any(u in number and _elsewhere(n, u) for u, _ in n.outputs[0].uses)]
    single = [(number[n],) for n in dict.fromkeys(wanted) if n in number and n is not nodes[-1]]
    every = tuple(sorted(k for (k,) in single))
    found = [*single[: MOST_CUTS - 1], *([every] if len(every) > 1 else [])]
    return [c for c in found if cut(group, c)]


def _elsewhere(n: Node, u: Node) -> bool:
    """Does u read what n makes at other places than where u writes?"""
    return Trait.ELEMENTWISE not in u.op.traits or n.outputs[0].type.shape != u.outputs[0].type.shape


def _kind(nodes: tuple[Node, ...]) -> str:
    """Of a group, as the fusion pass sets it: that of its last node that is no map."""
    return next((k for k in map(kind_of, reversed(nodes)) if k != "map"), "map")


# --- Winograd or direct -----------------------------------------------------------------------------------------------


def _tiles(graph: Graph, group: Group, rates: CoreRates) -> list[int]:
    """Tiles of the convolution other than its own that may be faster."""
    found = _blocked_conv(graph, group)
    if found is None:
        return []
    conv, lanes, now = found
    limit = REACH * cycles(conv, lanes, now, rates)
    return [t for t in (0, *TILES) if t != now and cycles(conv, lanes, t, rates) < limit]


def _blocked_conv(graph: Graph, group: Group) -> tuple[Node, int, int] | None:
    """The convolution whose weights may lie transformed or not, the channels of a block, and its tile now."""
    conv = next((n for n in group.nodes if n.op.contraction is ContractionForm.CONVOLUTION), None)
    if conv is None or conv.inputs[0] is None or conv.inputs[1] is None or not takes_winograd(conv):
        return None
    x, w = conv.inputs[0].type, conv.inputs[1]
    if x.row_major or w not in graph.constants:
        return None
    lanes, now = x.encoding.block(1), w.type.encoding.m if isinstance(w.type.encoding, Winograd) else 0
    return (conv, lanes, now) if w.type.encoding == weights_encoding(x.rank, lanes, now) else None


def weights_encoding(rank: int, lanes: int, tile: int) -> Encoding:
    """The encoding of the weights of a convolution of images in blocks: for Winograd's tiles, or direct where 0."""
    return winograd_filters(lanes, tile) if tile else filters(rank, lanes, True)


def _retile(graph: Graph, group: Group, tile: int) -> None:
    found = _blocked_conv(graph, group)
    assert found is not None
    conv, lanes, _ = found
    old = conv.inputs[1]
    assert old is not None
    made = TensorType(old.type.dtype, old.type.shape, weights_encoding(old.type.rank, lanes, tile))
    conv.set_input(1, graph.constant(graph.constants[old], old.name, old.locs, made))
    if not old.uses and old not in graph.outputs:
        graph.erase_constant(old)
