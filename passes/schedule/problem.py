"""What a recipe schedules: a lowered group, its class, its work. Recipes live with their backend."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from dnnc.ir.blocks import Blocks
from dnnc.ir.bundles import Bundles
from dnnc.ir.expr import Expr
from dnnc.ir.graph import Node, Value
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.text import show_kernel
from dnnc.ir.op import Trait
from dnnc.ir.pairs import Pairs
from dnnc.ir.sparse import Sparse
from dnnc.passes.lower.form import Contraction, Form, Normed, Weighted
from dnnc.passes.lower.nests import Lowered
from dnnc.passes.lower.recurrence import Recurrent

Knobs = tuple[tuple[str, int | str], ...]


@dataclass(frozen=True, eq=False)
class Problem:
    """`anchor`: the matmul, convolution, attention or recurrence that the kernel is built around. `constants`: names of
    the buffers that no kernel of the program writes; a kernel may read them before those ahead of it have ended.

    Problems are compared by identity: templates keep what they find out about one.
    """

    lowered: Lowered
    flops: int | Expr
    anchor: Node | None = None
    inplace: bool = False
    constants: frozenset[str] = frozenset()

    @property
    def form(self) -> Form:
        return self.lowered.form

    @property
    def kind(self) -> str:
        """contraction, normed, attention, recurrence, sequence, scatter, reduce or map."""
        return self.form.kind

    @property
    def sparse(self) -> bool:
        """Are the weights stored sparse? Other schedules than those for them look each element up, zeros too."""
        factors = self.anchor.inputs[:2] if self.anchor is not None else ()
        return any(v is not None and isinstance(v.type.encoding, (Sparse, Blocks, Pairs, Bundles)) for v in factors)

    @property
    def contraction(self) -> Contraction | None:
        """The `product` that stores one array."""
        c = self.product
        return c if c is not None and not c.more else None

    @property
    def product(self) -> Contraction | None:
        """Return a kernel's contraction, alone, constant and in few loops; None if no loops of a side are left."""
        form = self.form
        if not isinstance(form, Contraction) or isinstance(form, Normed) or form.counts or self.lowered.dims:
            return None
        c = form.joined
        return c if c is not None and c.outer and c.red.loops else None

    @property
    def kernel(self) -> Kernel:
        return self.lowered.kernel

    @cached_property
    def text(self) -> str:
        """What schedules depend on: the naive kernel, and the kind of sparse weights, or their pattern where that
        becomes a part of code.
        """
        sparse = dict.fromkeys(e for v in self.lowered.params if isinstance(e := v.type.encoding, Sparse))
        lines = (f"# {e.digest if e.group > 1 else e.kind}\n" for e in sparse)
        return show_kernel(self.kernel) + "".join(lines)


@dataclass(frozen=True)
class Choice:
    """A schedule as data: the template's name and its knobs. The tuning log stores nothing else."""

    template: str
    knobs: Knobs

    def __str__(self) -> str:
        return f"{self.template}({', '.join(f'{k}={v}' for k, v in self.knobs)})"


def varied(knobs: Knobs, **changes: int | str) -> Knobs:
    """The knobs with some of them set; those that were not there come last."""
    return tuple({**dict(knobs), **changes}.items())


def _nothing(problem: Problem) -> list[Knobs]:
    return []


@dataclass(frozen=True)
class Template:
    """A way to schedule a class of problems.

    candidates(problem) -> knob settings, best guess first (empty: the template does not apply);
    apply(problem, knobs) -> the scheduled kernel, its outer loop `parallel` when that pays;
    more(problem) -> what else is worth measuring, likely ones first: settings that the hardware can hold. The
    candidates may be among them; order: the knobs on which the order of a sum depends. What differs in other knobs
    alone computes the same bits; strict: are results to be the same bits, whatever is chosen? sparse: does it walk the
    stored elements of sparse weights alone?

    A knob that is not set has the value under which a schedule is as it was before there was this knob.
    """

    name: str
    candidates: Callable[[Problem], list[Knobs]]
    apply: Callable[[Problem, Mapping[str, int | str]], Kernel]
    more: Callable[[Problem], list[Knobs]] = _nothing
    order: tuple[str, ...] = ()
    strict: bool = False
    sparse: bool = False

    def space(self, problem: Problem) -> list[Knobs]:
        """All settings to search, the candidates first, each once; none where the template does not apply."""
        return self.widened(problem, self.candidates(problem))

    def widened(self, problem: Problem, candidates: list[Knobs]) -> list[Knobs]:
        """The same, where the candidates are known already."""
        found = list(dict.fromkeys([*candidates, *self.more(problem)])) if candidates else []
        return [k for k in found if self.same_order(k, found[0])] if self.strict else found

    def same_order(self, knobs: Knobs, other: Knobs) -> bool:
        """Is every sum added up in the same order under both settings?"""
        mine, theirs = dict(knobs), dict(other)
        return all(mine.get(k) == theirs.get(k) for k in self.order)


def classify(nodes: Sequence[Node], lowered: Lowered, constants: Container[Value] = ()) -> Problem:
    """The problem of a lowered group. `constants`: the graph's."""
    flops: Expr | int = 0
    for n in nodes:
        if n.op.flops is not None:
            flops = flops + n.op.flops(*(v.type if v is not None else None for v in n.inputs), **n.attrs)
    anchored = isinstance(lowered.form, (Contraction, Weighted))
    anchor = nodes[0] if isinstance(lowered.form, Recurrent) else None
    anchor = next((n for n in nodes if anchored and Trait.CONTRACTION in n.op.traits), anchor)
    buffers = zip(lowered.params, lowered.kernel.entry.buffers)
    return Problem(lowered, flops, anchor, lowered.inplace, frozenset(b.name for v, b in buffers if v in constants))
