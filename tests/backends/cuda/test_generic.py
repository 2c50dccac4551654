"""Schedules for GPUs of every kernel that the lowering makes: interpreted (races and bounds included) against the naive
kernel, and compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from scheduled import check_all, check_same, graph_of, problems, schedules

from dnnc.backends.cuda.emit import launch_of
from dnnc.ir.dtype import i8
from dnnc.ir.loops.stmt import Eval, Kernel, walk_stmts
from dnnc.ir.loops.text import show_kernel
from dnnc.ir.op import OpDef, Sample, Trait
from dnnc.ir.ops import OPS
from dnnc.passes.lower.nests import lower
from dnnc.passes.schedule.problem import Problem, classify

SAMPLES = [(op, s) for op in OPS.values() if op.host is None and Trait.HOST not in op.traits for s in op.samples]

# shapes that fill several chunks, teams and tiles, with and without remainders: (op, types, attributes)
CASES: list[tuple[str, list[str], dict[str, Any]]] = [
    ("softmax", ["f16 2 2048"], {"axis": 1}), ("softmax", ["f32 5 1000"], {"axis": 1}),
    ("softmax", ["f32 70 10"], {"axis": 1}),
    ("softmax", ["f32 2 40 65"], {"axis": 1}), ("log_softmax", ["bf16 3 520"], {"axis": 1}),
    ("softmax", ["f64 1 5000"], {"axis": 1}),
    ("layer_norm", ["f16 9 768", "f16 768", "f16 768"], {}), ("layer_norm", ["f32 3 5 8 12", "f32 8 12"], {"axis": 2}),
    ("reduce_sum", ["f32 300 70"], {"axes": (0,)}), ("reduce_sum", ["f32 9000"], {}),
    ("reduce_max", ["i8 7 333"], {"axes": (1,)}),
    ("reduce_mean", ["f16 4 6 33 32"], {"axes": (2, 3)}), ("reduce_prod", ["f64 3 100 5"], {"axes": (1,)}),
    ("argmax", ["f32 6 1200"], {"axis": 1}), ("argmin", ["f16 6 300 40"], {"axis": 1}),
    ("argmax", ["i64 5 129"], {"axis": 1}),
    ("reduce_sum", ["f32 4 70 6 36"], {"axes": (1, 3)}),
    ("max_pool", ["f32 1 16 20 20"], {"kernel": (3, 3), "strides": (2, 2), "pads": (1, 1, 1, 1)}),
    ("reduce_log_sum_exp", ["f32 4 1030"], {"axes": (1,)}), ("add", ["f16 33 512", "f16 512"], {}),
    ("add", ["f32 71 99", "f32 71 99"], {}),
    ("gelu", ["f16 5003"], {}), ("transpose", ["f32 70 45"], {"perm": (1, 0)}),
    ("transpose", ["f16 3 64 50"], {"perm": (0, 2, 1)}),
    ("transpose", ["i8 2 33 3 65"], {"perm": (3, 1, 2, 0)}), ("transpose", ["f64 2 12 70 8"], {"perm": (0, 2, 1, 3)}),
    ("concat", ["f32 3 900", "f32 3 1000"], {"axis": 1}), ("pad", ["f32 3 50 50"], {"pads": (0, 1, 2, 0, 3, 4)}),
    ("cast", ["f32 33 64"], {"to": i8}),
    ("cumsum", ["f32 5 100"], {"axis": 1}), ("where", ["bool 40 40", "f32 40 40", "f32 40"], {}),
    ("gather", ["f32 50 64", "i64 300"], {"axis": 0}),
    ("scatter_nd", ["f32 50 64", "i64 300 1", "f32 300 64"], {"reduction": "add"}),
    ("scatter_nd", ["f16 9 7 5", "i32 40 2", "f16 40 5"], {}),
    ("scatter_elements", ["i8 700", "i64 900", "i8 900"], {"reduction": "max"}),
    ("scatter_elements", ["f64 3 50", "i64 2 80", "f64 2 80"], {"axis": 1}),
]  # fmt: skip


def label(case: Any) -> str:
    if isinstance(case, OpDef):
        return case.name
    if isinstance(case, Sample):
        return f"{'-'.join(map(str, case.inputs))}-{'-'.join(f'{k}={v}' for k, v in case.attrs)}".replace(" ", "")
    return str(case).replace(" ", "")


def named(cases: Sequence[Any]) -> list[Any]:
    return [pytest.param(*c, id="-".join(map(label, c))) for c in cases]


@pytest.mark.family("samples")
@pytest.mark.parametrize("op,s", named(SAMPLES))
def test_sample(op: OpDef, s: Sample) -> None:
    check_all(graph_of(op.name, s.inputs, **dict(s.attrs)))


@pytest.mark.slow
@pytest.mark.family("shapes")
@pytest.mark.parametrize("name,types,attrs", named(CASES))
def test_shapes(name: str, types: list[str], attrs: dict[str, Any]) -> None:
    assert check_all(graph_of(name, types, **attrs)) >= 2


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    "name,types",
    [("add", ["f32 0 4", "f32 4"]), ("softmax", ["f32 0 4"]), ("reduce_sum", ["f32 0 4"]), ("exp", ["f32 3 0"])],
)
def test_no_elements(name: str, types: list[str]) -> None:
    check_all(graph_of(name, types))


def chain(*ops: str, dtype: str = "f32 9 96", inplace: bool = False) -> Problem:
    """Unary ops, one after the other, as one group; the result over the input when `inplace`."""
    g = graph_of(ops[0], [dtype])
    from dnnc.ir.graph.builder import Builder

    b, v = Builder(g), g.outputs[0]
    for op in ops[1:]:
        v = b.op(op, v)
    g.outputs = [v]
    nodes = list(g.nodes())
    return classify(nodes, lower(g, nodes, [v], {v: g.inputs[0]} if inplace else {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "ops,inplace", [(("exp", "softmax", "neg"), False), (("relu", "sigmoid"), True), (("softmax", "softmax"), False)]
)
def test_groups(ops: tuple[str, ...], inplace: bool) -> None:
    p = chain(*ops, inplace=inplace)
    assert p.inplace == inplace
    for choice, kernel in schedules(p):
        check_same(p, kernel, str(choice))


def best(name: str, types: list[str], **attrs: Any) -> Kernel:
    (p,) = problems(graph_of(name, types, **attrs))
    return next(kernel for _, kernel in schedules(p))


def grid(kernel: Kernel) -> tuple[int, int]:
    launch = launch_of(kernel)
    return launch.grid[0], launch.block[0]


def test_best_guesses_fill_the_device() -> None:
    """Many short rows go to warps, long rows to blocks; few columns are split."""
    assert grid(best("softmax", ["f16 16384 4096"])) == (16384, 128)
    assert grid(best("softmax", ["f16 16384 1024"])) == (2048, 256)
    assert grid(best("reduce_sum", ["f32 1 50000"], axes=(1,)))[1] == 1024
    blocks, threads = grid(best("reduce_sum", ["f32 16384 4096"], axes=(0,)))
    assert blocks * threads >= 128 * 1024
    blocks, threads = grid(best("add", ["f16 4096 4096", "f16 4096 4096"]))
    assert blocks * threads * 16 == 4096 * 4096


def test_rows_are_read_once() -> None:
    """A softmax loads its row once, 16 bytes at a time, keeps it in registers and meets twice at a barrier."""
    kernel = best("softmax", ["f16 2048 4096"])
    text = show_kernel(kernel)
    assert text.count("= x0[") == 1 and "x0[b, 1024*q + 8*t:+8]" in text and "@ local" not in text
    assert sum(isinstance(s, Eval) and s.name == "barrier" for s in walk_stmts(kernel.entry.body)) == 2


def test_transposed_tiles_load_and_store_along_neighbours() -> None:
    text = show_kernel(best("transpose", ["f32 512 512"], perm=(1, 0)))
    loads, stores = (line for line in text.splitlines() if " = x0[" in line or line.strip().startswith("y["))
    assert ", t % 32 + 32*" in loads.split("=")[1] and "+ t % 32] = " in stores


def test_a_large_private_row_takes_no_memory_per_thread() -> None:
    for choice, kernel in schedules(chain("softmax", dtype="f32 3 700")):
        assert "@ local" not in show_kernel(kernel), choice
