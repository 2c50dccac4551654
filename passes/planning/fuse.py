"""Group nodes into kernels: a FusionPlan that prints, drives lowering, and tuning may vary (`variants`).

A group is a connected set of nodes around at most one *anchor* (a contraction, a reduction, a row op). Nodes are
visited backwards; one joins the group of its readers when they are all in one group and the rules below allow it. So
diamonds (x * sigmoid(x)) stay together, and every group of this walk has one output by construction. Then groups that
read the same elements are joined (`join_groups`).

Reductions of the same rows are one anchor (`rows`), with what reads their results within the row:

    reduce_mean(mul(d, d), axes=(1,)), d = sub(x, reduce_mean(x, axes=(1,), keepdims=True))

Where the target has a kernel for both (`PassContext.normed`), a norm joins the contraction that alone reads its result,
in front of it:

    matmul(layer_norm(cast(x, to=f32), s, b), w)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, prod

from dnnc.ir.encodings import quads_of
from dnnc.ir.expr import const, value
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.op import ContractionForm, Cost, Trait
from dnnc.ir.types import product
from dnnc.passes.analysis.alias import find_aliases, root
from dnnc.passes.analysis.kinds import is_kernel, is_pointwise, is_view, kind_of, numbers_of_bytes
from dnnc.passes.analysis.outputs import main_output
from dnnc.passes.analysis.rows import Rows, chain, find_numbers, is_reduced, rows_of
from dnnc.passes.planning.join_groups import MAX_NODES, Joiner, Part, Several, computing
from dnnc.passes.planning.order import in_order
from dnnc.passes.rewrite import producer
from dnnc.passes.rewrites.stored_weights import decodes

IN_PLACE_BYTES = 1 << 16  # of smaller arrays a second copy costs less than the start of another kernel
L1_SETS, L1_WAYS, LINE = 64, 8, 64  # of a first-level cache of 32 KB, which all have; bytes
MOST_QUERIES = 16  # of a head, that the block that reads them may compute
MOST_READS = 16  # of an element of bytes, by the windows that see it
LEAST_COPIED = 128  # terms of a sum for which an operand is copied first
CUT = "it is kept apart: no schedule held for the larger kernel, or the tuner measured that apart is faster"
UNFUSED = "this optimization level fuses nothing"
Normed = Callable[[Node, Node], bool]  # see PassContext


@dataclass(frozen=True)
class Group:
    """Nodes in order, the values they make for others, in order, and the class of the anchor ("contraction",
    "reduction", "scatter", "map", "host", "control").
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Value, ...]
    kind: str

    def __str__(self) -> str:
        names = ", ".join(v.name for v in self.outputs)
        return f"{self.kind}: {' + '.join(n.op.name for n in self.nodes)} -> {names}"


@dataclass(frozen=True)
class FusionPlan:
    """Groups in order of execution, and the values that lie in another one's memory: (value, that one, byte).

    `apart`: of nodes that did not join their readers' group, the reason, for people.
    """

    groups: tuple[Group, ...]
    views: tuple[tuple[Value, Value, int], ...]
    apart: Mapping[Node, str] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        views = (f"view: {a.name} = {b.name}" + (f" + {at}" if at else "") for a, b, at in self.views)
        return "\n".join([*(f"group {k}: {g}" for k, g in enumerate(self.groups)), *views])


def plan_fusion(
    graph: Graph,
    fuse: bool = True,
    align: int = 1,
    normed: Normed | None = None,
    cut: Collection[Node] = (),
    serial_rows: bool = False,
    stores_several: Several | None = None,
) -> FusionPlan:
    """Group nodes with layouts. `fuse=False`: each alone; `align`, `normed`, `serial_rows`, `stores_several`: see
    TargetFacts; `cut`: kept apart.
    """
    apart: set[Node] = set()
    while True:
        fuser = _Fuser(graph, fuse, align, normed, apart, cut, serial_rows, stores_several)
        fuser.walk()
        broken = fuser.broken()
        if not broken:
            return fuser.plan()
        apart |= broken


class _Fuser:
    """Walk nodes backwards: a node joins its readers' group if they all share one and the rules allow it."""

    def __init__(
        self,
        graph: Graph,
        fuse: bool,
        align: int,
        normed: Normed | None,
        apart: Collection[Node],
        cut: Collection[Node],
        serial_rows: bool,
        stores_several: Several | None,
    ) -> None:
        self.graph, self.fuse, self.normed, self.apart, self.cut = graph, fuse, normed, apart, cut
        self.serial_rows, self.stores_several = serial_rows, stores_several
        self.nodes = list(graph.nodes())
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.outputs = set(graph.outputs)
        self.aliases = find_aliases(graph, align=align)
        self.donors = {root(self.aliases.of, graph.outputs[k])[0]: graph.inputs[j] for k, j in graph.donated.items()}
        self.members: dict[int, list[Node]] = {}  # of each group, last node first
        self.kind: dict[int, str] = {}
        self.group_of: dict[Node, int] = {}
        self.ahead: dict[
            Node, Node
        ] = {}  # norms, and what is between them and the contraction whose group they are in, with that
        self.aligned: set[Node] = set()  # nodes whose output elements are, one for one, those of their group's output
        self.numbers = find_numbers(graph)
        self.rows: dict[int, Rows] = {}  # of each group that reduces rows
        self.promised: dict[Node, list[Node]] = {}  # nodes whose numbers are made within the group -> what makes them
        self.along: set[Node] = set()  # nodes that are computed along the rows of their group, or once for each
        self.indexing: set[Node] = set()  # nodes of which an index is made within their group
        self.reasons: dict[Node, str] = {}  # why nodes are in none of their readers' groups

    def walk(self) -> None:
        """Put each node into a group."""
        for n in reversed(self.nodes):
            g = self.target(n) if self.fuse and n not in self.cut else self.stay(n, CUT if self.fuse else UNFUSED)
            if g is None:
                g = self.order[n]
                self.members[g], self.kind[g] = [], "map"
                self.aligned.add(n)
            self.members[g].append(n)
            self.group_of[n] = g
            if self.kind[g] == "map":
                self.kind[g] = kind_of(n)
            self.note_rows(n, g)

    def plan(self) -> FusionPlan:
        """Join groups; what is left are kernels."""
        parts = {g: Part(tuple(ns[::-1]), self.kind[g]) for g, ns in self.members.items()}
        joiner = Joiner(
            self.graph, parts, self.numbers, self.no_kernel, self.cut, self.serial_rows, self.stores_several
        )
        parts = joiner.run() if self.fuse else parts
        groups: list[Group] = []
        inside: set[Value] = set()  # values that no one but their own group sees
        for p in parts.values():
            if len(p.nodes) == 1 and self.no_kernel(p.nodes[0]):
                continue
            last = p.nodes[-1]
            outs = joiner.outputs(p.nodes) or list(last.outputs[:1])
            one = p.kind in ("map", "reduction", "contraction", "scatter") and self.one_kernel(p, outs)
            inside.update(v for n in p.nodes[:-1] for v in n.outputs if not joiner.is_read(v, p.nodes))
            made = [tuple(last.outputs)] if p.kind == "control" else [tuple(outs)] if one else [(v,) for v in outs]
            groups += [Group(p.nodes, vs, p.kind) for vs in made]
        return FusionPlan(
            tuple(in_order(self.graph, groups, self.order, self.aliases.of)),
            tuple((v, source, at) for v, (source, at) in self.aliases.of.items() if v not in inside),
            self.reasons,
        )

    def one_kernel(self, p: Part, outputs: Sequence[Value]) -> bool:
        """Does one kernel make all outputs of a group? Else each is made by one of its own."""
        n = p.nodes[-1]
        alone = len(n.outputs) > 1 and (not self.fuse or n in self.cut or Trait.SEQUENTIAL in n.op.traits)
        return not alone and main_output(p.nodes, outputs) is not None

    def no_kernel(self, n: Node) -> bool:
        """Is the node's result memory of others, for which nothing needs to be computed?"""
        return n.outputs[0] in self.aliases.made

    def target(self, n: Node) -> int | None:
        """The group that a node joins, or None for one of its own; `reasons` then has the reason."""
        why = self.fixed_apart(n)
        if why:
            return self.stay(n, why)
        users = [u for u, _ in n.output.uses]
        groups = {self.group_of[u] for u in users}
        if len(groups) != 1:
            return self.stay(n, "several kernels read its result, which is computed once")
        g = groups.pop()
        if not is_kernel(self.kind[g]):
            return self.stay(n, "its reader is a loop, a branch, or a step on the host")
        if computing([n, *self.members[g][::-1]]) > MAX_NODES:
            return self.stay(n, f"the kernel would have more than {MAX_NODES} nodes")
        if len(self.members[g]) == 1 and self.no_kernel(self.members[g][0]):
            return self.stay(n, "its reader takes the memory as it is")
        if self.stays_in_row(n, g):
            return g
        if self.no_kernel(n) and not self.permuted_view(n) and not self.few_queries(n):
            return self.stay(n, "it is a view of memory, for which nothing is computed")
        product = self.product_of(n)
        if product is not None:
            self.ahead[n] = product
            return g
        anchored = kind_of(n) != "map"
        if anchored and self.kind[g] != "map":
            return self.stay(n, f"a {kind_of(n)} and its reader's {self.kind[g]} do not share a loop nest")
        if kind_of(n) == "contraction" and self.updates(g):
            return self.stay(n, "the update behind it works in place, and tiles of a contraction overlap")
        for u in users:
            if not self.allowed(n, u, anchored):
                return self.stay(n, f"{u.op.name} would read its elements in another order, or compute them repeatedly")
        if n.op.name == "concat" and is_reduced(n, self.members[g]):
            return self.stay(n, "each element that is reduced behind it would choose among its operands")
        if any(self.reads_index(u, n.output) for u in users):
            if Trait.ELEMENTWISE not in n.op.traits and not self.repeats_index(n, users):
                # an index is written several times into an expression: chains of gathers would grow exponentially
                return self.stay(n, "it is an index, which its reader would compute repeatedly")
            self.indexing.add(n)
        if self.kind[g] == "contraction" and any(self.feeds_product(u) and not self.few_queries(u) for u in users):
            return self.stay(n, "it would be computed again for every tile of the contraction that reads it")
        follows = self.kind[g] == "map" and all(self.follows(n.output, u) for u in users)
        if not anchored and not follows and not _widens(n) and self.epilogue_of(n):
            # better at the end of the contraction that feeds it, where the value is in registers
            return self.stay(n, "it is the epilogue of the contraction ahead, whose result is in registers")
        if all(self.follows(n.output, u) for u in users):
            self.aligned.add(n)
        return g

    def fixed_apart(self, n: Node) -> str:
        """Why a node joins no group, whatever reads it; empty where it may."""
        if len(n.outputs) != 1:
            return "it has several results"
        if n.output in self.outputs:
            return "its result is an output of the graph"
        if not is_kernel(kind_of(n)) or not n.op.traits.isdisjoint((Trait.SEQUENTIAL, Trait.SCATTER)):
            return f"{n.op.name} is a kernel of its own"
        return "" if n.output.uses else "nothing reads its result"

    def stay(self, n: Node, why: str) -> int | None:
        """No group; `why` for people."""
        self.reasons[n] = why
        return None

    def updates(self, g: int) -> bool:
        """Does an element-wise group give a large donated input new contents that it computes of the old ones?"""
        made = self.members[g][0].outputs[0]
        donor, size = self.donors.get(root(self.aliases.of, made)[0]), made.type.nbytes
        if donor is None or not isinstance(size, int) or size < IN_PLACE_BYTES:
            return False
        if not all(map(is_pointwise, self.members[g])):
            return False
        todo, seen = [made], {made}
        while todo:  # what was computed of the old contents may not be in the group yet
            v = todo.pop()
            if root(self.aliases.of, v) == (donor, 0):
                return True
            if v.node is not None and is_pointwise(v.node):
                inputs = {x for x in v.node.inputs if x is not None} - seen
                todo += inputs
                seen |= inputs
        return False

    def feeds_product(self, u: Node) -> bool:
        """Does a node of a contraction's group move its operand, elements of which many results read?"""
        return (
            u not in self.aligned
            and Trait.MOVEMENT in u.op.traits
            and all(Trait.CONTRACTION in w.op.traits and not _is_vector(w) for w, _ in u.output.uses)
        )

    def reads_index(self, u: Node, v: Value) -> bool:
        """Does u read v as an index, or to make one?"""
        return u in self.indexing or (u.op.index is not None and u.op.index.loads and u.inputs[u.op.index.operand] is v)

    def repeats_index(self, n: Node, users: Sequence[Node]) -> bool:
        """Does a broadcast give one index to all updates of a row? Then their scatter looks at it once."""
        return producer(n.output, "expand") is n and all(kind_of(u) == "scatter" for u in users)

    def stays_in_row(self, n: Node, g: int) -> bool:
        """True if a group over rows takes a node that reduces them, or computes from their numbers (if `broken`)."""
        rows = self.numbers.get(n.output) or rows_of(n)
        if rows is None or n in self.apart or not rows.worth() or self.rows.get(g, rows) != rows:
            return False
        if any(kind_of(m) != "map" and rows_of(m) != rows for m in self.members[g]):
            return False  # two anchors would run in one nest
        made = chain(
            n, self.numbers
        )  # what would have to be kept in memory, and be made by a kernel of its own, does not help
        if len(self.members[g]) + len(made) > MAX_NODES or any(m.output in self.outputs for m in made):
            return False
        if not all(
            self.group_of.get(u, g) == g and self.reads_row(rows, m, u, k) for m in made for u, k in m.output.uses
        ):
            return False
        self.rows[g] = rows
        if len(made) > 1:
            self.promised[n] = made
        return True

    def broken(self) -> set[Node]:
        """Return nodes in their readers' group without the reductions behind them: better computed once, with those."""
        return {n for n, made in self.promised.items() if any(self.group_of[m] != self.group_of[n] for m in made)}

    def reads_row(self, rows: Rows, n: Node, u: Node, k: int) -> bool:
        """True if operand k of u, inlined, reads of n only the element or row number that it is computed for."""
        v, made = n.output, u.outputs[0]
        if rows_of(u) == rows:
            return k == 0 and rows.of_elements(v)
        if u not in self.along and u in self.group_of:
            return False
        if self.numbers.get(made) == rows:
            return self.numbers.get(v) == rows
        return (
            is_pointwise(u)
            and rows.of_elements(made)
            and (rows.of_elements(v) or rows.reads_own(v))
            and not self.epilogue_of(u)
        )

    def once_in_row(self, n: Node, u: Node) -> bool:
        """Is what n makes computed once, or cheaper than memory, where the reduction u passes over it?"""
        rows = rows_of(u)
        if rows is None or not rows.worth() or not rows.of_elements(n.output):
            return False
        return rows.lie_in_one_piece() or (
            Trait.ROWWISE not in u.op.traits and (n.op.cost is Cost.LIGHT or all(v is u for v, _ in n.output.uses))
        )

    def note_rows(self, n: Node, g: int) -> None:
        """What a node that is in a group now says of the rows there."""
        rows, out = rows_of(n), n.outputs[0]
        at = self.rows.setdefault(g, rows) if rows is not None else self.rows.get(g)
        along = n in self.aligned and out.type.shape == self.members[g][0].outputs[0].type.shape
        if at is not None and not along and (is_pointwise(n) or rows == at or self.numbers.get(out) == at):
            along = (at.of_elements(out) or self.numbers.get(out) == at) and all(
                self.reads_row(at, n, u, k) for u, k in out.uses
            )
        if along:
            self.along.add(n)

    def allowed(self, n: Node, u: Node, anchored: bool) -> bool:
        """Rules for node `u` of a group reading what `n` makes."""
        v, out = n.output, u.outputs[0].type
        if len(u.outputs) != 1:
            return False
        if u in self.ahead and not ((is_pointwise(n) or producer(v, "slice")) and _same(v.type.shape, out.shape)):
            return False  # what stands ahead of a contraction reads its operands where they are, or a part of them
        if anchored:  # an epilogue: applied to the accumulator before it is stored, perhaps at a permuted place
            permuted = not is_pointwise(u)
            return self.follows(v, u) and not (permuted and kind_of(n) != "contraction")
        if kind_of(u) == "scatter":  # what it starts from and each update are computed once
            read = [k for m, k in v.uses if m is u]
            return read in ([0], [2]) or (read == [1] and self.repeats_index(n, [u]))
        if is_pointwise(u):
            return (
                _same(v.type.shape, out.shape) or n.op.cost < Cost.LIGHT
            )  # a broadcast operand is computed again for each element
        if u.op.name == "interleave" and Trait.RELAYOUT in n.op.traits:
            return False  # zipped where each phase is a row of its own
        if n.op.name == "resize" and n.attrs["mode"] == "cubic" and Trait.RELAYOUT in u.op.traits:
            return False  # whole vectors of a block are interpolated, and change places afterwards
        if Trait.MOVEMENT in u.op.traits:
            return n.op.cost < Cost.LIGHT or _same_count(v, u)
        if Trait.ROWWISE in u.op.traits and _crosses(n, u):
            return False  # its rows, which are read more than once, would be read across
        if Trait.REDUCTION in u.op.traits:  # not a window, which reads each element several times
            again = n.op.cost >= Cost.LIGHT and not self.once_in_row(n, u)
            slides = Trait.WINDOW in u.op.traits and not self.reads_bytes(n, u)
            return v is u.inputs[0] and not again and not slides
        if Trait.RESAMPLES in u.op.traits:
            return self.reads_bytes(n, u)
        if self.queries_of(u) is v:
            return True
        if Trait.CONTRACTION in u.op.traits:
            if Trait.STORED in n.op.traits:
                return decodes(u, v)
            # reading through a transpose costs address arithmetic alone: in the broadcast operand of vectors, and in
            # both where tiles are copied to near memory first
            product = u.op.contraction is ContractionForm.PRODUCT and not self.serial_rows
            turned = (v is u.inputs[0] or product) and producer(v, "transpose") is not None
            if turned and (_reads_fours(u, v) or (self.serial_rows and copied_first(v, u))):
                return False
            return v.type.row_major and (turned or _looks_up_matrices(n, u))
        return False

    def reads_bytes(self, n: Node, u: Node) -> bool:
        """Had a window or a resize better read the bytes that n makes numbers of, a quarter of the memory?

        It makes the numbers again for each element that it computes of them. Light steps with constants take less time
        than memory where these are few.
        """
        kernel, strides = (u.attrs.get(name) or (1,) for name in ("kernel", "strides"))
        return self.serial_rows and prod(kernel) <= MOST_READS * prod(strides) and numbers_of_bytes(n)

    def queries_of(self, u: Node) -> Value | None:
        """The queries of an attention, if they are so few that a block has all of a head: it computes them itself."""
        q = u.inputs[0] if u.op.contraction is ContractionForm.ATTENTION and not self.serial_rows else None
        if q is None or u.inputs.count(q) > 1:
            return None
        rows = value(const(q.type.shape[-2]))
        return q if rows is not None and rows <= MOST_QUERIES else None

    def few_queries(self, n: Node) -> bool:
        """Is a node a view of an array whose one reader is an attention with few queries?"""
        users = {u for u, _ in n.output.uses}
        return is_view(n) and len(users) == 1 and self.queries_of(next(iter(users))) is n.output

    def product_of(self, n: Node) -> Node | None:
        """Return the contraction behind norm n (or element-wise nodes of one) if the target fuses both; behind an
        element-wise node too, where each block of the product computes its rows in little time.
        """
        users = {u for u, _ in n.output.uses}
        u = next(iter(users))
        if self.normed is None or len(users) != 1 or Trait.NORM in u.op.traits:
            return None
        product, norm = self.ahead.get(u, u), n
        if (
            kind_of(product) != "contraction"
            or not self.is_constant(product.inputs[1])
            or (u is product and (u, 1) in n.output.uses)
        ):
            return None
        if is_pointwise(n) and not self.epilogue_of(n) and self.normed(n, product):
            return product
        while Trait.NORM not in norm.op.traits:
            before = self.element_before(norm)
            if before is None:
                return None
            norm = before
        return product if self.normed(norm, product) else None

    def is_constant(self, v: Value | None) -> bool:
        """Is an operand the same in each call, perhaps decoded of what is?"""
        if v is not None and v.node is not None and Trait.STORED in v.node.op.traits:
            return all(x is None or self.graph.variance(x).call_invariant for x in v.node.inputs)
        return v is not None and self.graph.variance(v).call_invariant

    def element_before(self, n: Node) -> Node | None:
        """Return the node of the one non-constant operand of an element-wise node, its only reader by element."""
        made = [v for v in n.inputs if v is not None and not self.graph.variance(v).call_invariant]
        if not is_pointwise(n) or n.op.cost >= Cost.LIGHT or len(made) != 1 or not self.same_elements(made[0], n):
            return None
        (v,) = made
        alone = {u for u, _ in v.uses} == {n} and v not in self.outputs
        return v.node if alone and v.node is not None and len(v.node.outputs) == 1 else None

    def follows(self, v: Value, u: Node) -> bool:
        """Can u be computed where v is, element for element, with whole vectors?"""
        if u not in self.aligned:
            return False
        if is_pointwise(u):
            return self.same_elements(v, u) and v.type.encoding == u.outputs[0].type.encoding
        return self.keeps_last(u, v)

    def same_elements(self, v: Value, u: Node) -> bool:
        return is_pointwise(u) and _same(v.type.shape, u.outputs[0].type.shape)

    def permuted_view(self, n: Node) -> bool:
        """A free view belongs in a nest only between a contraction and a transpose of its result."""
        users = [u for u, _ in n.output.uses]
        source = n.inputs[0]
        if not is_view(n) or source is None:
            return False
        fed = self.anchor_of(source) is not None
        return (
            fed
            and len(users) == 1
            and users[0].op.name == "transpose"
            and self.keeps_last(users[0], n.output)
            and self.keeps_last(n, source)
        )

    def epilogue_of(self, n: Node) -> bool:
        """Could a contraction take this node as the end of its nest?"""
        if not is_pointwise(n):
            return False
        bits = n.output.type.dtype.bits
        return any(
            v is not None and _same(v.type.shape, n.output.type.shape) and self.anchor_of(v, bits) is not None
            for v in n.inputs
        )

    def anchor_of(self, v: Value, bits: int = 0) -> Node | None:
        """The contraction that makes v through element-wise nodes of one size that only the next one reads. None where
        one of the values between has fewer than so many bits: memory had better hold that.
        """
        while v.node is not None and v not in self.outputs and len({u for u, _ in v.uses}) == 1:
            n = v.node
            if kind_of(n) == "contraction":
                return n
            if not is_pointwise(n) or v.type.dtype.bits < bits:
                return None
            same = [x for x in n.inputs if x is not None and x.node is not None and _same(x.type.shape, v.type.shape)]
            if not same:
                return None
            v = max(same, key=lambda x: self.order[x.node] if x.node is not None else -1)
        return None

    def keeps_last(self, n: Node, v: Value) -> bool:
        """Does each vector along v's last axis stay a vector along the output's last axis?"""
        if not v.type.row_major or not n.output.type.row_major:
            return False
        if n.op.name == "transpose":
            return bool(n.attrs["perm"][-1] == v.type.rank - 1)
        if not is_view(n) or not n.output.type.shape:
            return False
        last = n.output.type.shape[-1]
        return isinstance(last, int) and last % 16 == 0


def _same(a: Sequence[object], b: Sequence[object]) -> bool:
    return len(a) == len(b) and all(x is y or x == y for x, y in zip(a, b))


def _is_vector(u: Node) -> bool:
    """Is the result of a contraction one column, each of whose elements reads a row of its own?"""
    return value(u.output.type.shape[-1]) == 1


def _looks_up_matrices(n: Node, u: Node) -> bool:
    """True if u is a product of matrices that n looks up in a table: elements are read once, uncopied.

    matmul(gather(table, index, axis=0), v), the experts of a mixture: table [experts, rows, columns], v [..., columns,
    1]; or v, [..., 1, rows], first.
    """
    if (
        n.op.name != "gather"
        or n.attrs["axis"] != 0
        or u.op.contraction is not ContractionForm.PRODUCT
        or n.output.type.rank < 3
    ):
        return False
    single = u.output.type.shape[-1 if n.output is u.inputs[0] else -2 if u.output.type.rank > 1 else 0]
    matrices = len(n.output.type.shape[:-2])
    return (
        value(single) == 1
        and n.inputs[1] is not None
        and n.inputs[1].type.rank == matrices
        and _same(n.output.type.shape[:-2], u.output.type.shape[:-2])
    )


def _widens(n: Node) -> bool:
    """A cast to more bytes: whoever reads it had better read what is cast."""
    x = n.inputs[0] if Trait.CONVERSION in n.op.traits else None
    return x is not None and n.output.type.dtype.bits > x.type.dtype.bits


def _crosses(n: Node, u: Node) -> bool:
    """True if a transpose makes rows of scattered elements; unpacked images in channel blocks are whole vectors."""
    x = n.inputs[0] if n.inputs else None
    if Trait.RELAYOUT in n.op.traits and x is not None and not x.type.row_major and n.output.type.row_major:
        return bool(
            u.attrs.get("axis", -1) % x.type.rank != x.type.rank - 1
        )  # rows across the blocks: outputs side by side are the vectors
    if n.op.name != "transpose" or x is None or not x.type.row_major or n.attrs["perm"][-1] == x.type.rank - 1:
        return False
    return x.node is None or Trait.RELAYOUT not in x.node.op.traits


def _reads_fours(u: Node, v: Value) -> bool:
    """Does a product read four bytes of a row of its transposed operand by one instruction? They are not neighbours."""
    turn, w = producer(v, "transpose"), u.inputs[1]
    fours = w is not None and quads_of(w.type) is not None
    return fours and turn is not None and turn.attrs["perm"][-1] != v.type.rank - 1


def copied_first(v: Value, u: Node) -> bool:
    """True if a product reads its transposed left operand so often, by lines of so many rows, that it is copied first.

    A tile of a product reads a line of each of the k rows below. They do not stay in a first-level cache of 64 sets
    of 8 lines where k is large, and in a part of its sets where rows are a multiple of some lines apart: in one of
    them at 4 KB. Each 48 columns of the result read them anew.
    """
    rows, columns = (value(const(d)) for d in (v.type.shape[-1], u.outputs[0].type.shape[-1]))
    if u.op.contraction is not ContractionForm.PRODUCT or rows is None or columns is None or columns < 128:
        return False
    turn = producer(v, "transpose")
    x = turn.inputs[0] if turn is not None else None
    below = value(const(product(x.type.shape[turn.attrs["perm"][-1] + 1 :]))) if turn is not None and x else None
    apart = 1 if below is None else below * v.type.dtype.bits // 8  # bytes
    sets = L1_SETS // gcd(L1_SETS, apart // LINE) if apart % LINE == 0 else L1_SETS
    return bool(rows >= max(L1_WAYS * sets, LEAST_COPIED))


def _same_count(v: Value, n: Node) -> bool:
    return value(const(v.type.size) - const(n.output.type.size)) == 0
