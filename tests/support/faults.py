"""Planted faults: `PYTHONPATH=tests python -m support.faults --seeds 50` counts those that the kernel check refuses.

In: kernels of random graphs and of chains that cancel. Each fault changes one place of a kernel; the changed kernel is
compiled and checked as a new one is. A fault without effect on the results (a maximum of equal operands) cannot be
refused, so the share stays below 1.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from dnnc.backends.llvm.check import check_kernel
from dnnc.backends.llvm.compile import compile_text, load_objects
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.features import CpuTarget, parse_target
from dnnc.backends.llvm.templates import templates
from dnnc.ir.errors import AccuracyError, DnncError
from dnnc.ir.expr import Const, Expr, Load, Op, const, load, op, rebuild, select
from dnnc.ir.graph import Graph
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.stmt import Block, For, Kernel, Stmt, Store, map_stmt
from dnnc.ir.target import TargetFacts
from dnnc.passes.base import pass_context
from dnnc.passes.pipelines import compile_program
from dnnc.passes.planning.program import Scheduled, Step
from support.random_graphs import random_graph

Change = Callable[[Any], Any]  # an expression or statement -> the changed one, or None where the fault does not apply
DROPPED = ()  # in place of a statement


def _neighbour(e: Any) -> Any:
    """An input is read one place further along its first long axis, within its bounds."""
    if isinstance(e, Load) and e.buf.space == "global":
        for k, (i, n) in enumerate(zip(e.idx, e.buf.shape)):
            if i.lanes == 1 and (e.lanes == 1 or k < len(e.idx) - 1) and not (isinstance(n, Const) and n.value == 1):
                return load(e.buf, (*e.idx[:k], op("min", i + 1, n - 1), *e.idx[k + 1 :]), e.lanes, e.limit)
    return None


def _missing_term(e: Any) -> Any:
    binary = (
        isinstance(e, Op)
        and e.dtype.is_float
        and len(e.args) == 2
        and e.args[0].dtype is e.dtype
        and e.args[0].lanes == e.lanes
    )
    return e.args[0] if binary else None


def _swapped(e: Any) -> Any:
    if isinstance(e, Op) and e.dtype.is_float and e.name in ("-", "/") and len(e.args) == 2:
        return op(e.name, e.args[1], e.args[0])
    if isinstance(e, Op) and e.name == "select" and e.dtype.is_float:
        return select(e.args[0], e.args[2], e.args[1])
    return None


def _boundary(e: Any) -> Any:
    other = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!="}
    if isinstance(e, Op) and e.name in other and e.args[0].dtype.is_float:
        return op(other[e.name], *e.args)
    return None


def _identity(s: Any) -> Any:
    """An accumulator starts at a half (of a sum) or at 0 (of a maximum)."""
    if isinstance(s, Store) and s.buf.space == "register" and isinstance(s.value, Const) and s.value.dtype.is_float:
        return Store(s.buf, s.idx, const(0.5 if s.value.value == 0 else 0.0, s.value.dtype), s.lanes, s.limit)
    return None


def _last_iteration(s: Any) -> Any:
    if isinstance(s, For) and s.kind in ("range", "parallel") and isinstance(s.hi, Const) and s.hi.value > 1:
        return For(s.var, s.lo, s.hi - 1, s.kind, s.body)
    return None


def _store(s: Any) -> Any:
    return DROPPED if isinstance(s, Store) and s.buf.space == "global" else None


FAULTS: dict[str, Change] = {
    "neighbour": _neighbour,
    "missing term": _missing_term,
    "swapped operands": _swapped,
    "boundary": _boundary,
    "identity": _identity,
    "last iteration": _last_iteration,
    "missing store": _store,
}


def planted(kernel: Kernel, fault: Change, rng: random.Random) -> Kernel | None:
    """The kernel with the fault at one random place, or None where it has no place for it."""
    places = _changed(kernel, fault, -1)[1]
    return _changed(kernel, fault, rng.randrange(places))[0] if places else None


def _changed(kernel: Kernel, fault: Change, place: int) -> tuple[Kernel, int]:
    seen = 0

    def at_place(x: Any) -> Any:
        nonlocal seen
        new = fault(x)
        if new is None:
            return x
        seen += 1
        return new if seen == place + 1 else x

    def fe(e: Expr) -> Expr:
        found: Expr = at_place(rebuild(e, fe))
        return found

    def fb(b: Block) -> Block:
        out: list[Stmt] = []
        for s in b:
            new = at_place(map_stmt(s, fe, fb))
            out += new if isinstance(new, tuple) else [new]
        return tuple(out)

    return kernel.with_body(fb(kernel.entry.body)), seen


def verdict(graph: Graph, step: Step, kernel: Kernel, target: CpuTarget) -> str | None:
    """What the check says of the kernel in place of the step's own, or None where it accepts it. DnncError where it
    does not compile.
    """
    changed = replace(step, scheduled=Scheduled.of(kernel, step.choice), make=lambda: kernel)
    loaded = load_objects([compile_text(emit_kernel(kernel, "k_t", target.feature_set), target.cpu, target.features)])
    try:
        check_kernel(graph, changed, loaded.address("k_t"))
    except AccuracyError as e:
        return str(e)
    return None


# --- graphs -----------------------------------------------------------------------------------------------------------

STARTS = (
    "a",
    "mul(a, 3.0)",
    "round(mul(a, 3.5))",
    "sub(add(a, b), b)",
    "add(expand(c, shape=(9, 40)), mul(a, 1e-4))",
    "where(less(a, b), a, mask)",
)
CHAINS = (
    "relu({})",
    "tanh({})",
    "sub({}, reduce_mean({}, axes=(1,), keepdims=True))",
    "mul({}, 3.0)",
    "add({}, b)",
    "add({}, where(less(a, c), mul(mask, 0.0), mask))",
    "{}",
)
ENDS = (
    "layer_norm({}, s, t)", "softmax({})", "argmax({}, axis=1)", "argmin({}, axis=1, select_last=True)",
    "floor(mul({}, 8.0))",
    "mean_variance_norm({}, axes=(1,))", "cast(round({}), to=i32)", "less({}, b)", "cumsum({}, axis=1)",
    "reduce_prod({}, axes=(1,))",
    "div({}, reduce_sum({}, axes=(1,), keepdims=True))", "cast({}, to=f16)", "exp({})", "cast({}, to=bf16)",
)  # fmt: skip


def cancelling(seed: int) -> Graph:
    """Chains that cancel, tie, overflow or step: norms of equal rows, masks of -FLT_MAX, arg-reductions."""
    rng = random.Random(seed)
    value = rng.choice(STARTS)
    for chain in rng.choices(CHAINS, k=2):
        value = chain.format(*[value] * chain.count("{}"))
    end = ENDS[seed % len(ENDS)]
    value = end.format(*[value] * end.count("{}"))
    given = "a: f32[9, 40], b: f32[9, 40], c: f32[9, 1], s: f32[40], t: f32[40]"
    return parse(f"def g({given}, *, mask: f32[1] = [-3.4028234663852886e+38]):\n    return {value}")


def kernels(graph: Graph, target: CpuTarget) -> Iterator[tuple[Graph, Step]]:
    """The kernels of a graph, each with the graph that they belong to."""
    try:
        p = compile_program(graph.copy(), pass_context(TargetFacts(target.lanes), fallback=False), templates(target))
    except DnncError:  # ops that run on the host
        return
    for step in p.kernels:
        yield p.graph, step


def campaign(graphs: Sequence[Graph], seed: int = 0) -> tuple[Counter[str], Counter[str], list[str]]:
    """Faults planted and refused, by name, and what the check says of right kernels that it refuses."""
    target, rng = parse_target("llvm -threads=1"), random.Random(seed)
    tried: Counter[str] = Counter()
    caught: Counter[str] = Counter()
    refused: list[str] = []
    for g in graphs:
        for graph, step in kernels(g, target):
            message = verdict(graph, step, step.kernel, target)
            if message is not None:
                refused.append(message)
                continue
            for name, fault in FAULTS.items():
                kernel = planted(step.kernel, fault, rng)
                if kernel is None:
                    continue
                try:
                    message = verdict(graph, step, kernel, target)
                except DnncError:
                    continue
                tried[name] += 1
                caught[name] += message is not None
    return tried, caught, refused


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m support.faults", description="Planted faults in kernels, and how many the check refuses."
    )
    p.add_argument("--seeds", type=int, default=50, help="random graphs, and as many chains that cancel")
    p.add_argument("--seed", type=int, default=0, help="the first one")
    a = p.parse_args(argv)
    seeds = range(a.seed, a.seed + a.seeds)
    status = 0
    for what, graphs in (
        ("random graphs", [random_graph(s)[0] for s in seeds]),
        ("chains that cancel", [cancelling(s) for s in seeds]),
    ):
        tried, caught, refused = campaign(graphs, a.seed)
        print(f"{what}: {caught.total()} of {tried.total()} faults refused, {len(refused)} right kernels refused")
        for name in tried:
            print(f"  {name}: {caught[name]} of {tried[name]}")
        for message in refused:
            print(f"  refused: {message[:300]}")
        status |= bool(refused)
    return status


if __name__ == "__main__":
    sys.exit(main())
