"""Norms within the products that read them: which nodes are put together, the kernels interpreted (values, races), and
compiled without spills.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dnnc.backends.cuda.emit import emit_kernel
from dnnc.backends.cuda.interpreted import InterpretedDevice
from dnnc.backends.cuda.nvrtc import compile_cuda
from dnnc.backends.cuda.target import GpuTarget
from dnnc.backends.cuda.templates import templates
from dnnc.backends.cuda.templates.contraction import gemv_norm
from dnnc.backends.cuda.templates.contraction.gemv_norm import takes
from dnnc.ir.errors import ScheduleError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.tolerances import bound
from dnnc.options import CompileOptions
from dnnc.passes.lower.nests import Lowered, lower
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.rewrites.channels_last import assign_channels_last
from dnnc.passes.schedule.problem import Knobs, Problem, classify
from dnnc.tools.sample_graphs import graph_of
from support.devices import compile_interpreted

H200 = GpuTarget()
Array = Any


def groups(text: str) -> list[str]:
    plan = plan_fusion(graph_of(text), normed=takes)
    return [" + ".join(n.op.name for n in g.nodes) for g in plan.groups]


def net(norm: str, rows: str, k: int, n: int, t: str = "f32", end: str = "{}") -> str:
    product = f"matmul({norm}, w)"
    return (
        f"def g(x: {t}[{rows}, {k}], r: {t}[{rows}, {n}], *, w: {t}[{k}, {n}], s: {t}[{k}], b: {t}[{k}], c: "
        f"{t}[{n}]):\n    return " + end.format(product)
    )


LAYER, RMS, END = "layer_norm(x, s, b)", "rms_norm(x, s)", "add(gelu(add({}, c)), r)"


# --- which nodes ------------------------------------------------------------------------------------------------------


def test_a_norm_joins_the_product_that_reads_it() -> None:
    assert groups(net(LAYER, "1", 64, 96, end=END)) == ["layer_norm + matmul + add + gelu + add"]
    assert groups(net(RMS, "2, 2", 64, 96)) == ["rms_norm + matmul"]


def test_with_casts_and_what_is_cheap_between_them() -> None:
    text = """def g(x: f16[1, 64], *, w: f16[64, 96], s: f32[64]):
    h = cast(mul(rms_norm(neg(cast(x, to=f32)), s), 0.5), to=f16)
    return relu(matmul(h, w))"""
    assert groups(text) == ["cast + neg + rms_norm + mul + cast + matmul + relu"]


APART = {
    "two readers": """def g(x: f32[1, 64], *, w: f32[64, 96], v: f32[64, 96], s: f32[64]):
    h = rms_norm(x, s)
    return add(matmul(h, w), matmul(h, v))""",
    "a result of the graph": """def g(x: f32[1, 64], *, w: f32[64, 96], s: f32[64]):
    h = rms_norm(x, s)
    return matmul(h, w), h""",
    "weights that are computed": """def g(x: f32[1, 64], w: f32[64, 96], *, s: f32[64]):
    return matmul(rms_norm(x, s), w)""",
    "the second operand": """def g(x: f32[64, 64], *, w: f32[1, 64], s: f32[64]):
    return matmul(w, rms_norm(x, s))""",
    "a square": """def g(x: f32[64, 64], *, s: f32[64]):
    h = rms_norm(x, s)
    return matmul(h, h)""",
    "costly nodes between": """def g(x: f32[1, 64], *, w: f32[64, 96], s: f32[64]):
    return matmul(gelu(rms_norm(x, s)), w)""",
    "another axis": """def g(x: f32[1, 4, 64], *, w: f32[64, 96], s: f32[4, 64]):
    return matmul(layer_norm(x, s, axis=1), w)""",
    "too many rows": net(RMS, "5", 64, 96),
    "rows too long": net(RMS, "4", 4096, 96),
    "too many columns": net(RMS, "1", 32, 16385),
    "a row that is no row": net(RMS, "4", 64, 4),
}


@pytest.mark.family("cases")
@pytest.mark.parametrize("name", APART)
def test_what_stays_apart(name: str) -> None:
    assert all("matmul" not in g or "norm" not in g for g in groups(APART[name]))


def test_only_where_it_is_asked_for() -> None:
    assert len(plan_fusion(graph_of(net(LAYER, "1", 64, 96))).groups) == 2


def test_what_moves_data_before_the_norm_stays_before_it() -> None:
    text = """def g(i: i64[1], *, e: f32[9, 64], w: f32[64, 96], s: f32[64]):
    return matmul(rms_norm(gather(e, i, axis=0), s), w)"""
    assert groups(text) == ["gather", "rms_norm + matmul"]


# --- kernels ----------------------------------------------------------------------------------------------------------


def problem(text: str) -> tuple[Graph, Lowered, Problem]:
    """The one group of a graph whose values lie as on a GPU."""
    g = graph_of(text)
    assign_channels_last(g)
    (group,) = plan_fusion(g, normed=takes).groups
    low = lower(g, group.nodes, group.outputs)
    return g, low, classify(group.nodes, low, g.constants)


def interpret(g: Graph, low: Lowered, p: Problem, knobs: Knobs) -> None:
    kernel = verify_kernel(gemv_norm.apply(p, dict(knobs), H200))
    text = show_kernel(kernel)
    assert show_kernel(parse_kernel(text)) == text
    rng = np.random.default_rng(0)
    values: dict[Any, Array] = {
        v: rng.standard_normal([int(str(d)) for d in v.type.shape]).astype(v.type.dtype.numpy) for v in g.inputs
    }
    (want,) = run(g, list(values.values()), "float64")
    values.update(g.constants)
    out = np.full([int(str(d)) for d in g.outputs[0].type.shape], 99).astype(g.outputs[0].type.dtype.numpy)
    placed = {v: a if v.type.row_major else np.ascontiguousarray(a.T) for v, a in values.items()}
    run_kernel(kernel, {b.name: placed.get(v, out) for v, b in zip(low.params, kernel.entry.buffers)})
    length = int(str(g.inputs[0].type.shape[-1]))
    assert np.abs(out.astype(np.float64) - want).max() <= bound(g.outputs[0].type.dtype, length, want)


KERNELS = [
    net(LAYER, "1", 96, 72, end=END),
    net(RMS, "2, 2", 96, 70, end=END),  # columns in no whole number of vectors
    net(LAYER, "1", 96, 72, "f16", END),
    net(LAYER, "3", 300, 40, "f16"),  # the last vectors of a row are some threads' alone
    net(RMS, "4", 75, 33, "bf16", END),  # nothing is a multiple of anything
    net(RMS, "1", 2600, 24),  # several vectors for a thread
    "def g(x: f16[1, 1, 96], *, w: f16[96, 64], s: f32[96], b: f32[1]):\n    return matmul(cast(layer_norm(cast(x, "
    "to=f32), s, b), to=f16), w)",
    "def g(x: f32[1, 96], *, w: f32[96, 64], s: f32[96]):\n    return matmul(add(rms_norm(mul(x, 2.0), s), 1.0), w)",
]


@pytest.mark.family("cases")
@pytest.mark.parametrize("text", KERNELS)
def test_values(text: str) -> None:
    g, low, p = problem(text)
    offered = gemv_norm.candidates(p, H200)
    assert p.kind == "normed" and offered and len(set(offered)) == len(offered)
    for knobs in (offered[0], offered[-1]):
        interpret(g, low, p, knobs)


def test_no_other_template_comes_first() -> None:
    p = problem(KERNELS[0])[2]
    offered = [t.name for t in templates(H200) if t.candidates(p)]
    assert offered == ["gemv_norm", "threads"]


def test_other_problems_are_refused() -> None:
    g = graph_of("def g(x: f32[1, 64], *, w: f32[64, 96]):\n    return matmul(x, w)")
    (group,) = plan_fusion(g).groups
    p = classify(group.nodes, lower(g, group.nodes, group.outputs), g.constants)
    assert p.kind == "contraction" and gemv_norm.candidates(p, H200) == []
    with pytest.raises(ScheduleError, match="no product of rows"):
        gemv_norm.apply(p, {"per": 1, "parts": 1, "threads": 256}, H200)


def test_constants_are_read_before_the_wait() -> None:
    """Weights, scale, bias and what is added at the end, but for the residual and the rows."""
    _, low, p = problem(net(LAYER, "1", 96, 72, "f16", END))
    kernel = gemv_norm.apply(p, dict(gemv_norm.candidates(p, H200)[0]), H200)
    names = {v.name[0]: b.name for v, b in zip(low.params, kernel.entry.buffers)}
    before, after = show_kernel(kernel).split("pdl_wait()")
    body = before[before.index("for block") :]
    assert all(f"{names[v]}[" in body and f"{names[v]}[" not in after for v in "wsbc")
    assert all(f"{names[v]}[" not in body and f"{names[v]}[" in after for v in "xr")
    early = show_kernel(gemv_norm.apply(p, dict(gemv_norm.candidates(p, H200)[0]), GpuTarget("sm_80")))
    assert "pdl" not in early


# --- models -----------------------------------------------------------------------------------------------------------

BLOCK = """def g(x: f32[1, {rows}, 64], *, s1: f32[64], b1: f32[64], w1: f32[64, 192], c1: f32[192], s2: f32[64],
    b2: f32[64], w2: f32[192, 64], w3: f32[64, 64]):
    h = gelu(add(matmul(layer_norm(x, s1, b1), w1), c1))
    y = add(matmul(h, w2), x)
    z = matmul(layer_norm(y, s2, b2), w3)
    return add(y, z)"""


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("rows, launches", [(1, 3), (8, 5)])
@pytest.mark.parametrize("precision", [None, "float16"])
def test_a_block(rows: int, launches: int, precision: str | None) -> None:
    g = graph_of(BLOCK.format(rows=rows))
    device = InterpretedDevice()
    options = CompileOptions(target="cuda", precision=precision, verify=False)
    f = compile_interpreted(g.copy(), (["x"], ["y"]), options, device)
    x = np.random.default_rng(0).standard_normal((1, rows, 64), np.float32)
    (want,) = run(g, [x], "float64")
    got = f(x)
    assert np.abs(got - want).max() <= (2e-2 if precision else 1e-5) * np.abs(want).max()
    assert device.launched == launches


def shapes() -> Sequence[tuple[str, str]]:
    big = [
        ("1", 768, 3072, "f16"),
        ("4", 2048, 512, "bf16"),
        ("1", 8192, 2048, "f16"),
        ("1", 768, 2304, "f32"),
        ("4", 2048, 8192, "f32"),
    ]
    return [(net(LAYER, rows, k, n, t, END), arch) for rows, k, n, t in big for arch in ("sm_80", "sm_90a")]


def compiled(text: str, arch: str, count: int) -> None:
    p = problem(text)[2]
    target = GpuTarget(arch)
    for knobs in gemv_norm.candidates(p, target)[:count]:
        made = compile_cuda(emit_kernel(verify_kernel(gemv_norm.apply(p, dict(knobs), target)), "k", target), arch)
        assert not made.spills and not made.local_bytes, f"{knobs}: {made.log}"


@pytest.mark.slow
def test_compiled() -> None:
    compiled(net(LAYER, "1", 768, 2304, "f16", END), "sm_90a", 1)


@pytest.mark.family("shapes")
@pytest.mark.slow
@pytest.mark.parametrize("text, arch", shapes())
def test_compiled_corners(text: str, arch: str) -> None:
    compiled(text, arch, 1)
