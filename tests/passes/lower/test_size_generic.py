"""One kernel for nests that differ in sizes: which are one, and that they compute the same bits."""

from __future__ import annotations

import re
import zlib
from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.backends.llvm import facts, kernel_code
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates import templates
from dnnc.ir.errors import InternalError
from dnnc.ir.graph import Graph
from dnnc.ir.loops.text import show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.lower.size_generic import Family, Nest, family_of, nest_of
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.planning.program import lower_group
from dnnc.passes.schedule.cascade import in_rows
from dnnc.passes.schedule.problem import Problem
from dnnc.passes.schedule.step import schedule
from dnnc.tools.sample_graphs import graph_of

LLVM = {"target": "llvm", "cache": False}


def nests(*texts: str) -> list[Nest | None]:
    """The nest of each graph's only group."""
    graphs = [graph_of(t) for t in texts]
    return [nest_of(lower_group(g, plan_fusion(g).groups[0])) for g in graphs]


def family(*texts: str) -> tuple[Family, list[Nest]]:
    found = [n for n in nests(*texts) if n is not None]
    assert len(found) == len(texts) and len({(n.kind, n.frame) for n in found}) == 1
    made = family_of(found)
    assert made is not None
    verify_kernel(made.lowered.kernel)
    return made, found


def test_sizes_in_the_same_ratio_are_one() -> None:
    made, found = family(
        *(f"def g(x: f32[8, {c}, {h}, {h}], s: f32[{c}, 1, 1]): return relu(add(x, s))" for c, h in ((4, 16), (12, 32)))
    )
    assert [made.sizes(n) for n in found] == [(4, 16), (12, 32)]
    assert "s0: dim[4, None], s1: dim[16, None, 16]" in show_kernel(made.lowered.kernel)


def test_chains_over_whole_arrays_are_vectors_of_any_rank() -> None:
    shapes = ["64, 3, 3, 3", "64", "128, 64", "32, 1, 1"]
    made, found = family(*(f"def g(p: f32[{s}], d: f32[{s}], r: f32): return sub(p, mul(d, r))" for s in shapes))
    assert [made.sizes(n) for n in found] == [(1728,), (64,), (8192,), (32,)]


def test_a_float_that_differs_is_passed_as_its_bits() -> None:
    made, found = family(
        *(f"def g(x: f32[{n}]): return mul(x, full(value={1 / n}, dtype=f32, shape=()))" for n in (32, 96))
    )
    bits = [int(np.float32(1 / n).view(np.uint32)) for n in (32, 96)]
    assert [made.sizes(n) for n in found] == [(32, bits[0]), (96, bits[1])]


def test_a_division_that_a_store_of_half_precision_hides_keeps_its_divisor() -> None:
    body = "def g(x: f16[8, {n}, 32]): return reduce_mean(x, axes=(1,), keepdims=False)"
    found = nests(*(body.format(n=n) for n in (14, 20)))  # by 14, it is a product with 1 / 14
    assert None not in found and family_of([n for n in found if n is not None]) is None


def test_a_nest_that_only_looks_alike_is_no_member() -> None:
    one = "def g(x: f32[{a}, {b}]): return transpose(x, perm=(1, 0))"
    made, _ = family(one.format(a=32, b=32), one.format(a=64, b=64))
    (other,) = nests(one.format(a=32, b=64))
    assert other is not None and made.sizes(other) is None
    text = "def g(x: f32[{n}]): return slice(x, starts=(0,), steps=(1,), shape=({m},))"
    made, _ = family(text.format(n=64, m=32), text.format(n=128, m=64))
    (other,) = nests(text.format(n=64, m=48))
    assert other is not None and made.sizes(other) is None


def test_places_of_vectors_are_not_divided_by_sizes() -> None:
    body = "def g(x: f32[1, {c}, {n}, {n}, 16], s: f32[1, {c}, 1, 1, 16]): return mul(x, s)"
    made, _ = family(*(body.format(c=c, n=n) for c, n in ((6, 20), (4, 40), (12, 28))))
    kernel, _ = schedule(Problem(made.lowered, 0), templates(parse_target("llvm -threads=2")))
    text = show_kernel(kernel)
    assert "parallel" in text and "s1" in text and "//" not in text and "%" not in text


def test_what_keeps_its_sizes() -> None:
    along = "def g(x: f32[16, 48]): return reduce_sum(x, axes=(1,), keepdims=False)"  # checked once it is scheduled
    short, tail = (
        f"def g(x: f32[{n}, {m}]): return reduce_sum(x, axes=(0,), keepdims=False)" for n, m in ((7, 32), (8, 20))
    )
    product = "def g(x: f32[8, 16]): return reduce_prod(x, axes=(0,), keepdims=False)"
    symbolic = "def g(x: f32[N, 8]): return relu(x)"
    found = nests(along, short, tail, product, symbolic)
    assert found[0] is not None and found[1:] == [None] * 4


@pytest.mark.parametrize("axes", ["(0,)", "(0, 1)"])
def test_a_family_of_sums_has_bounds_on_its_sizes(axes: str) -> None:
    body = "def g(x: f32[{n}, {m}, {c}]): return reduce_mean(x, axes={axes}, keepdims=False)"
    found = [n for n in nests(*(body.format(n=n, m=m, c=c, axes=axes) for n, m, c in ((8, 9, 32), (512, 18, 64))))]
    made = family_of([n for n in found if n is not None])
    assert made is not None and None not in found
    assert [v.hi for v in made.lowered.dims[:2]] == [512, 512 // 9 if len(axes) > 4 else None]  # of 9 * s1 rows
    assert {str(r.term) for r in made.lowered.form.reductions} == {
        str(r.term) for n in found if n is not None for r in n.lowered.form.reductions
    }
    kernel, _ = schedule(Problem(made.lowered, 0), templates(parse_target("llvm -threads=2")))
    assert in_rows(verify_kernel(kernel), [r.loops for r in made.lowered.form.reductions])


def test_a_size_of_one_leaves_terms_out() -> None:
    body = "def g(x: f32[{a}, {b}, 16]): return transpose(x, perm=(2, 0, 1))"
    sizes = [(2, 16), (4, 32), (1, 48)]
    found = [n for n in nests(*(body.format(a=a, b=b) for a, b in sizes)) if n is not None]
    made = family_of(found)
    assert made is not None and [made.sizes(n) for n in found] == sizes


def test_members_with_tails_have_a_kernel_of_their_own() -> None:
    a, b = nests("def g(x: f32[32]): return relu(x)", "def g(x: f32[10]): return relu(x)")
    assert a is not None and b is not None and a.kind != b.kind


# --- whole programs ---------------------------------------------------------------------------------------------------

STEP: dict[str, Any] = {**LLVM, "donate": {"old": "new"}}
BODIES = {
    "chain": ("{x}: f32[{a}, {b}], {y}: f32[{a}, {b}]", "add(mul({x}, {y}), relu({x}))"),
    "channels": ("{x}: f32[2, {a}, {b}, {b}], {y}: f32[{a}, 1, 1]", "relu(mul({x}, {y}))"),
    "rows": ("{x}: f32[{a}, {b}], {y}: f32[{b}]", "sub({x}, {y})"),
    "turned": ("{x}: f32[{a}, {b}, 3], {y}: f32", "transpose(mul({x}, {y}), perm=(2, 1, 0))"),
    "sums": ("{x}: f32[{a}, {a}, {b}], {y}: f32[{b}]", "mul(reduce_mean({x}, axes=(0, 1), keepdims=False), {y})"),
    "types": ("{x}: i32[{a}, {b}], {y}: f64[{a}, {b}]", "add(cast({x}, to=f64), {y})"),
}


def program(body: str, sizes: list[tuple[int, int]]) -> Graph:
    """A graph with the same computation at several sizes, which replaces a state as a training step does."""
    names = [{"x": f"x{k}", "y": f"y{k}", "a": a, "b": b} for k, (a, b) in enumerate(sizes)]
    params, results = (", ".join(text.format(**n) for n in names) for text in BODIES[body])
    return graph_of(f"def g({params}, old: f32[3]):\n    new = neg(old)\n    return {results}, new")


@pytest.mark.family("kernels")
@pytest.mark.parametrize("body", BODIES)
def test_one_kernel_computes_the_same_bits(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(zlib.crc32(body.encode()))
    unit = 16 if body != "chain" else 4
    sizes = [(unit * int(rng.integers(1, 5)), 16 * int(rng.integers(1, 5))) for _ in range(4)] + [(16, 128), (64, 64)]
    g = program(body, sizes)
    inputs = [(rng.standard_normal(v.type.shape) * 9).astype(v.type.dtype.numpy) for v in g.inputs]

    def run() -> tuple[int, list[Any]]:
        f = dnnc.compile(g.copy(), strict_compile=True, threads=2, **STEP)
        results = f(*inputs[:-1], inputs[-1].copy())
        return len(f.report.programs[0].kernels), [np.asarray(r) for r in results]

    shared, mine = run()
    monkeypatch.setattr(facts, "PARALLEL_FROM", 0)
    own, theirs = run()
    # the state has one, and square sizes have one of their own; sums of 64 x 64 terms are made in two steps
    assert shared <= 3 + (body == "sums") < own
    for a, b in zip(mine, theirs):
        assert a.tobytes() == b.tobytes()


SUMS = (  # of rows x, columns y and the innermost axis z, a multiple of a vector
    "reduce_sum(x, axes=(0, 1), keepdims=False)",
    "reduce_mean(x, axes=(1,), keepdims=False)",
    "reduce_max(x, axes=(0, 1), keepdims=False)",
    "reduce_sum(transpose(x, perm=(1, 0, 2)), axes=(0, 1), keepdims=False)",
    "reduce_sum(transpose(x, perm=(2, 0, 1)), axes=(0, 1), keepdims=False)",
    "reduce_sum(x, axes=(1, 2), keepdims=False)",
    "reduce_sum(x, axes=(0, 2), keepdims=False)",
    "add(reduce_sum(mul(x, x), axes=(0,), keepdims=False), reduce_max(x, axes=(0,), keepdims=False))",
    "reduce_sum(relu(sub(x, reduce_mean(x, axes=(1,), keepdims=True))), axes=(1,), keepdims=False)",
)


@pytest.mark.parametrize("body", SUMS)
@pytest.mark.parametrize("case", range(16))
@pytest.mark.family("random")
def test_sums_of_random_sizes_are_the_same_bits(body: str, case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever kernel a sum gets: one of its own, or that of a family, of whatever members."""
    rng = np.random.default_rng(zlib.crc32(f"{body} {case}".encode()))
    dtype = ("f32", "f32", "f64", "f16")[case % 4]
    rows, columns = ([1, *range(7, 20), 31, 32, 64, 511, 512, 513] for _ in range(2))
    sizes = [(int(rng.choice(rows)), int(rng.choice(columns)), 16 * int(rng.integers(1, 6))) for _ in range(5)]
    sizes = [(a, b, c) for a, b, c in sizes if a * b * c < 1 << 20]
    params = ", ".join(f"x{k}: {dtype}[{a}, {b}, {c}]" for k, (a, b, c) in enumerate(sizes))
    results = ", ".join(re.sub(r"\bx\b", f"x{k}", body) for k in range(len(sizes)))
    g = graph_of(f"def g({params}, old: f32[3]):\n    new = neg(old)\n    return {results}, new")
    inputs = [(rng.standard_normal(v.type.shape) * 9).astype(v.type.dtype.numpy) for v in g.inputs]

    def run() -> list[Any]:
        f = dnnc.compile(g.copy(), strict_compile=True, threads=2, **STEP)
        return [np.asarray(r) for r in f(*inputs[:-1], inputs[-1].copy())]

    mine = run()
    monkeypatch.setattr(facts, "PARALLEL_FROM", 0)
    for a, b in zip(mine, run()):
        assert a.tobytes() == b.tobytes()


def test_where_code_of_several_sizes_fails_each_size_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kernel_code.emit_kernel

    def emit(kernel: Any, *args: Any) -> str:
        if kernel.entry.scalars:
            raise InternalError("no sizes here")
        return whole(kernel, *args)

    monkeypatch.setattr(kernel_code, "emit_kernel", emit)
    monkeypatch.delenv("DNNC_STRICT")
    f = dnnc.compile(program("rows", [(16, 32), (48, 32), (32, 64)]), **STEP)
    x = [np.full(v.type.shape, k, np.float32) for k, v in enumerate(f.graph.inputs)]
    for k, r in enumerate(f(*x)[:3]):
        assert (np.asarray(r) == x[2 * k] - x[2 * k + 1]).all()
    assert len(f.report.programs[0].kernels) == 4


def test_models_for_inference_have_kernels_that_know_their_sizes() -> None:
    sizes = [(16, 32), (48, 32), (32, 64)]
    calls = [
        c
        for f in (dnnc.compile(program("rows", sizes), **o) for o in (LLVM, STEP))
        for c in f.report.programs[0].kernels
    ]
    assert len(calls) == 4 + 2
