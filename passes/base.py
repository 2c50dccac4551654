"""Passes and how lists of them run: timed, verified after each, dumped on request, blamed by name.

In come a graph and the passes of a pipeline (`passes/pipelines.py`), out comes the same graph, changed in place, and a
record per pass.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dnnc.ir.errors import DnncError, InputError, InternalError, VerifyError
from dnnc.ir.graph import Graph, Node
from dnnc.ir.graph.verify import verify
from dnnc.ir.op import Trait
from dnnc.ir.target import TargetFacts

NO_FACTS = TargetFacts()
FOLD_LIMIT = 64 << 20


@dataclass(frozen=True, slots=True)
class PassContext:
    """What passes may ask about the compilation; `pass_context` makes it."""

    facts: TargetFacts = NO_FACTS  # of the target
    numerics: str = "standard"  # "strict" (nothing that adds or moves a rounding), "standard" or "fast"
    # how floats are stored: None (as in the graph), "float32", "tf32", "float16" or "bfloat16"
    precision: str | None = None
    # bytes; a constant that is larger than this and than what it is computed from is not computed while compiling
    fold_limit: int = FOLD_LIMIT
    memory: int | None = None  # bytes that intermediate values may take at the peak; None keeps all that is read again
    fallback: bool = False  # is another schedule taken where one turns out not to hold, or is that an error?
    check: bool = False  # verify the graph after each pass
    # called with "before NAME" ahead of the first pass and "after NAME" behind each
    dump: Callable[[str, Graph], None] | None = None
    # called with a rule's name, the node and the reason each time a rewrite rule does not fire
    explain: Callable[[str, Node, str], None] | None = None
    # called with what a user should know of; PassManager puts it into the pass's record
    note: Callable[[str], None] | None = None

    @property
    def strict(self) -> bool:
        return self.numerics == "strict"


def pass_context(
    facts: TargetFacts = NO_FACTS,
    *,
    numerics: str = "standard",
    precision: str | None = None,
    fold_limit: int = FOLD_LIMIT,
    memory: int | None = None,
    fallback: bool = True,
    check: bool = False,
) -> PassContext:
    """The context of a compilation for a target; see PassContext."""
    return PassContext(facts, numerics, precision, fold_limit, memory, fallback, check)


@dataclass(frozen=True, slots=True)
class Pass:
    """A step of the pipeline."""

    name: str  # what `-p NAME` says
    # changes a graph in place, its subgraphs too; returns whether anything changed
    run: Callable[[Graph, PassContext], bool]
    why: str  # one line: what it does and why it stands where it stands


@dataclass(frozen=True, slots=True)
class PassRecord:
    """A pass's record: wall-clock seconds (without checks, dumps), node counts before and after, notes."""

    name: str
    seconds: float
    nodes_before: int
    nodes_after: int
    changed: bool
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = (
            f"{self.name}: {self.seconds * 1e3:.1f} ms, {self.nodes_before} -> {self.nodes_after} "
            f"nodes{'' if self.changed else ', unchanged'}"
        )
        return "\n    ".join([head, *self.notes])


def remark(name: str, nodes: int, notes: tuple[str, ...]) -> PassRecord:
    """A record of what is no pass, for what it says of a graph with so many nodes."""
    return PassRecord(name, 0.0, nodes, nodes, False, notes)


@dataclass(slots=True)
class PassManager:
    """Runs passes and keeps a record of each, in order."""

    records: list[PassRecord] = field(default_factory=list)

    def run(self, graph: Graph, passes: Sequence[Pass], ctx: PassContext) -> bool:
        """Run passes in place; return if anything changed. VerifyError, InternalError: the pass named in it failed."""
        changed = False
        if ctx.dump is not None and passes:
            ctx.dump(f"before {passes[0].name}", graph)
        count = count_nodes(graph)
        notes: list[str] = []
        noting = replace(ctx, note=notes.append)
        for p in passes:
            record = self._one(graph, p, noting, count, notes)
            count, changed = record.nodes_after, changed or record.changed
            notes.clear()
        return changed

    def _one(self, graph: Graph, p: Pass, ctx: PassContext, before: int, notes: Sequence[str]) -> PassRecord:
        start = time.perf_counter()
        try:
            changed = p.run(graph, ctx)
            seconds = time.perf_counter() - start
            if ctx.check:
                verify(graph)
        except Exception as e:
            raise _blamed(p, e) from e
        record = PassRecord(p.name, seconds, before, count_nodes(graph) if changed else before, changed, tuple(notes))
        self.records.append(record)
        if ctx.dump is not None:
            ctx.dump(f"after {p.name}", graph)
        return record


def _blamed(p: Pass, e: Exception) -> Exception:
    """Return the error with the pass's name. A user's error keeps its class, others are the pass's fault."""
    if isinstance(e, VerifyError):
        return VerifyError(f"pass {p.name} broke the graph: {e}")
    if isinstance(e, DnncError):
        return type(e)(f"pass {p.name}: {e}")
    return InternalError(
        f"pass {p.name}: {type(e).__name__}: {e}; please report it with the model's graph (`dnnc inspect MODEL --stage "
        "graph`)"
    )


def parse_passes(text: str, table: Sequence[Pass]) -> list[Pass]:
    """Parse `"fold,cse"` as passes of the table, in order. InputError: a name that no pass of the table has."""
    known = {p.name: p for p in table}
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise InputError(f"there is no pass {name!r}{hint} There are: {', '.join(known)}")
    return [known[name] for name in names]


def graphs(graph: Graph) -> Iterator[Graph]:
    """The graphs nested in a graph, innermost first, then the graph itself; each once."""
    seen: set[Graph] = set()

    def go(g: Graph) -> Iterator[Graph]:
        if g in seen:
            return
        seen.add(g)
        for n in g.nodes():
            for s in n.subgraphs():
                yield from go(s)
        yield g

    return go(graph)


def count_nodes(graph: Graph) -> int:
    """The nodes of a graph and of those nested in it."""
    return sum(len(g) for g in graphs(graph))


def is_pure(n: Node) -> bool:
    """True if the node may be dropped, moved or merged: it and its subgraphs are pure and deterministic."""
    if Trait.PURE not in n.op.traits or Trait.RANDOM in n.op.traits:
        return False
    return all(is_pure(m) for s in n.subgraphs() for m in s.nodes())


def totals(records: Sequence[PassRecord]) -> Mapping[str, float]:
    """Seconds by pass name, the slowest first; a pass that ran several times counts once."""
    out: dict[str, float] = {}
    for r in records:
        out[r.name] = out.get(r.name, 0.0) + r.seconds
    return dict(sorted(out.items(), key=lambda item: -item[1]))
