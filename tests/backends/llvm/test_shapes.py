"""Shapes at the edges: no elements, no axes, tails of every length around the vector width, six axes, reductions of
length 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from native_check import check_close, one_node, run_native

from dnnc.ir.dtype import BY_NAME
from dnnc.ir.expr import dim
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.types import TensorType

LENGTHS = (*range(1, 18), 31, 32, 33, 63, 64, 65, 127, 130)
Case = tuple[str, Sequence[tuple[int, ...]], dict[str, Any]]  # op, shapes of its inputs, attributes


def check(cases: Sequence[Case], dtype: str = "f32", target: str = "llvm") -> None:
    """All cases as one program."""
    g, b = Graph("g"), None
    t = BY_NAME[dtype]
    rng = np.random.default_rng(3)
    arrays = []
    made: list[tuple[Case, Value]] = []
    for case in cases:
        name, shapes, attrs = case
        values = []
        for s in shapes:
            values.append(g.add_input(f"x{len(arrays)}", TensorType(t, s)))
            arrays.append((rng.random(s) * 4 - 2).astype(t.numpy))
        b = Builder(g)
        made.append((case, b.op(name, *values, **attrs)))
    g.outputs = [v for _, v in made]
    for (case, v), got, want in zip(made, run_native(g, arrays, target), run(g, arrays, "float64"), strict=True):
        try:
            check_close(got, want, v.type.dtype, 200)
        except AssertionError as e:
            raise AssertionError(f"{case}: {e}") from None


@pytest.mark.slow
@pytest.mark.family("shapes")
@pytest.mark.parametrize("target", ["llvm", "llvm -mcpu=haswell"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "i8", "i64"])
def test_every_tail(dtype: str, target: str) -> None:
    check([c for n in LENGTHS for c in (("add", [(n,), (n,)], {}), ("mul", [(3, n), (3, 1)], {}))], dtype, target)


@pytest.mark.slow
@pytest.mark.family("shapes")
@pytest.mark.parametrize(
    "name", ["reduce_sum", "reduce_max", "softmax", "layer_norm", "argmin", "cumsum", "reduce_log_sum_exp"]
)
def test_every_row_length(name: str) -> None:
    reduce = {"axes": (1,)} if name.startswith("reduce") else {} if name == "layer_norm" else {"axis": 1}
    check([(name, [(3, n), (n,)] if name == "layer_norm" else [(3, n)], reduce) for n in LENGTHS])


@pytest.mark.slow
@pytest.mark.family("shapes")
@pytest.mark.parametrize("name", ["reduce_sum", "reduce_min", "reduce_mean", "reduce_prod", "reduce_l2"])
def test_reductions_over_any_axes(name: str) -> None:
    cases: list[Case] = []
    for shape in ((5,), (1, 1), (3, 17), (4, 1, 6), (2, 3, 4, 5), (2, 1, 3, 1, 2, 7)):
        axes = [
            None,
            (),
            *((k,) for k in range(len(shape))),
            tuple(range(0, len(shape), 2)),
            tuple(range(1, len(shape))),
        ]
        cases += [(name, [shape], {"axes": a, "keepdims": keep}) for a in axes for keep in (False, True)]
    check(cases)


@pytest.mark.slow
def test_no_elements() -> None:
    cases: list[Case] = [
        ("add", [(0,), (0,)], {}), ("add", [(3, 0), (1,)], {}), ("exp", [(2, 0, 5)], {}),
        ("reduce_sum", [(0, 3)], {"axes": (1,)}),
        ("reduce_sum", [(0, 3)], {"axes": (0,)}), ("reduce_sum", [(3, 0)], {"axes": (1,)}), ("reduce_sum", [(0,)], {}),
        ("reduce_prod", [(2, 0)], {"axes": (1,)}), ("softmax", [(0, 4)], {"axis": 1}),
        ("softmax", [(4, 0)], {"axis": 1}),
        ("matmul", [(0, 3), (3, 4)], {}), ("matmul", [(2, 0), (0, 4)], {}), ("matmul", [(2, 3), (3, 0)], {}),
        ("matmul", [(0, 2, 3), (3, 4)], {}),
        ("transpose", [(3, 0, 2)], {"perm": (2, 0, 1)}), ("concat", [(2, 0), (2, 3)], {"axis": 1}),
        ("concat", [(0, 3), (0, 3)], {"axis": 0}),
        ("pad", [(0, 2)], {"pads": (1, 1, 2, 0)}), ("tile", [(2, 3)], {"repeats": (0, 2)}),
        ("slice", [(4, 5)], {"starts": (1, 2), "steps": (1, 1), "shape": (0, 3)}),
        ("conv", [(0, 3, 5, 5), (16, 3, 3, 3)], {}), ("layer_norm", [(0, 5), (5,)], {}),
        ("max_pool", [(0, 16, 4, 4)], {"kernel": (2, 2)}),
        ("argmax", [(0, 17, 16)], {"axis": 2}), ("argmin", [(3, 0)], {"axis": 0}),
    ]  # fmt: skip
    for case in cases:
        check([case])
    check(cases)


def test_no_axes() -> None:
    check([("add", [(), ()], {}), ("exp", [()], {}), ("reduce_sum", [()], {}), ("max", [(), ()], {}),
           ("matmul", [(5,), (5,)], {}), ("expand", [()], {"shape": (3, 5)}),
           ("reduce_max", [(7, 3)], {"keepdims": False})])  # fmt: skip


@pytest.mark.slow
def test_six_axes() -> None:
    six = (2, 3, 1, 4, 2, 5)
    check([("add", [six, (3, 1, 1, 2, 1)], {}), ("transpose", [six], {"perm": (5, 0, 3, 2, 1, 4)}),
    ("transpose", [six], {"perm": (0, 1, 2, 4, 3, 5)}),
           ("slice", [six], {"starts": (1, 0, 0, 3, 0, 4), "steps": (1, 2, 1, -1, 1, -2), "shape": (1, 2, 1, 3, 2, 2)}),
           ("softmax", [six], {"axis": 3}), ("concat", [six, six], {"axis": 3}),
           ("pad", [six], {"pads": (0, 1, 0, 2, 0, 1, 1, 0, 0, 0, 0, 3)})])  # fmt: skip


@pytest.mark.family("choices")
@pytest.mark.parametrize("target", ["llvm", "llvm -mcpu=haswell", "llvm -mcpu=x86-64"])
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "i8"])
def test_transposed_tiles(dtype: str, target: str) -> None:
    check([("transpose", [(m, n)], {"perm": (1, 0)}) for m, n in ((16, 16), (17, 33), (64, 20), (15, 40), (3, 50))]
          + [("transpose", [(2, 18, 3, 20)], {"perm": p}) for p in ((0, 2, 3, 1), (3, 1, 2, 0), (0, 3, 1, 2),
          (1, 0, 3, 2))], dtype, target)  # fmt: skip


@pytest.mark.family("shapes")
@pytest.mark.parametrize("sizes", [(1, 1), (1, 40), (40, 1), (5, 17), (16, 16), (33, 31)])
def test_matmul_sizes(sizes: tuple[int, int]) -> None:
    m, n = sizes
    check(
        [("matmul", [(m, k), (k, n)], {}) for k in (1, 2, 16, 19)]
        + [("matmul", [(3, m, 7), (3, 7, n)], {}), ("matmul", [(7,), (7, n)], {})]
    )


@pytest.mark.slow
@pytest.mark.family("shapes")
@pytest.mark.parametrize("channels", [(1, 1), (3, 16), (16, 8), (17, 33), (32, 16)])
def test_conv_sizes(channels: tuple[int, int]) -> None:
    i, o = channels
    check([("conv", [(2, i, h, w), (o, i, k, k)], {"pads": (k // 2,) * 4, "strides": (s, s)})
           for h, w in ((1, 1), (5, 9), (13, 4)) for k in (1, 3) for s in (1, 2)])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_groups_of_few_channels(dtype: str) -> None:
    """Lanes of one register belong to several groups, the last register is not full."""
    check([("conv", [(2, groups * i, 4), (groups * o, i, 3)],
    {"pads": (0, 0), "strides": (1,), "dilations": (1,), "group": groups})
           for groups in (2, 3, 8) for i in (1, 4) for o in (1, 2, 4, 6)], dtype)  # fmt: skip


N = dim("N", 1, 64)
M = dim("M", 1, 64)
SYMBOLIC: list[tuple[str, list[tuple[Any, ...]], dict[str, Any]]] = [
    ("add", [(N, 3), (1, 3)], {}),
    ("add", [(N, M), (N, M)], {}),
    ("exp", [(3, M)], {}),
    ("transpose", [(N, M)], {"perm": (1, 0)}),
    ("softmax", [(N, M)], {"axis": 1}),
    ("softmax", [(M, 20)], {"axis": 0}),
    ("reduce_mean", [(M, 5)], {"axes": (0,)}),
    ("reduce_sum", [(3, M)], {"axes": (1,)}),
    ("layer_norm", [(3, M), (M,)], {}),
    ("matmul", [(N, 7), (7, 5)], {}),
    ("matmul", [(N, M), (M, 33)], {}),
    ("matmul", [(4, M), (M, N)], {}),
    ("matmul", [(2, M, 8), (2, 8, M)], {}),
    ("conv", [(N, 3, 6, 6), (16, 3, 3, 3)], {"pads": (1, 1, 1, 1)}),
    ("conv", [(1, 16, M, 8), (32, 16, 3, 3)], {"pads": (1, 1, 1, 1)}),
    ("conv", [(1, 4, 9, M), (16, 4, 1, 1)], {"strides": (2, 2)}),
    ("max_pool", [(1, 2, M, 6)], {"kernel": (3, 3), "pads": (1, 1, 1, 1), "strides": (2, 2)}),
    ("avg_pool", [(1, 16, M, M)], {"kernel": (3, 3), "pads": (1, 1, 1, 1)}),
    ("reshape", [(N, 3, 4)], {"shape": (N, 12)}),
    ("reshape", [(M, 4)], {"shape": (4, M)}),
    ("concat", [(N, 3), (2, 3), (N, 3)], {"axis": 0}),
    ("concat", [(3, M), (3, 2)], {"axis": 1}),
    ("slice", [(M, 3)], {"starts": (M - 1, 0), "steps": (-1, 2), "shape": (M, 2)}),
    ("expand", [(M, 1)], {"shape": (M, 3)}),
    ("tile", [(M, 3)], {"repeats": (2, 2)}),
    ("pad", [(M, 3)], {"pads": (1, 2, 0, 3)}),
    ("pad", [(3, M)], {"pads": (0, 2, 0, 3)}),
    ("cumsum", [(3, M)], {"axis": 1}),
    ("argmax", [(4, M)], {"axis": 1}),
    ("matmul", [(N, 5, 0), (N, 0, 17)], {}),
]


@pytest.mark.family("shapes")
@pytest.mark.parametrize("name,shapes,attrs", SYMBOLIC, ids=lambda v: str(v).replace(" ", ""))
def test_symbolic_dims(name: str, shapes: list[tuple[Any, ...]], attrs: dict[str, Any]) -> None:
    """One program for all sizes."""
    from dnnc.driver import compile

    g = one_node(name, [TensorType(BY_NAME["f32"], s) for s in shapes], **attrs)
    f = compile(g, threads=2, cache=False, dims={n: (v.lo, v.hi) for n, v in g.dims.items()})
    rng = np.random.default_rng(5)
    for n, m in ((1, 1), (2, 5), (7, 16), (33, 19), (64, 64)):
        arrays = [rng.random([n if d is N else m if d is M else d for d in s], np.float32) for s in shapes]
        (want,) = run(g, arrays, "float64")
        check_close(f(*arrays), want, g.outputs[0].type.dtype, 200)
    assert len(f.programs) == 1


def test_sums_of_nothing() -> None:
    check([("cumsum", [(1, 17, 4)], {"axis": 0, "exclusive": True})])


@pytest.mark.slow
@pytest.mark.parametrize("target", ["llvm", "llvm -mcpu=haswell"])
def test_reductions_in_every_place(target: str) -> None:
    """Rows in registers, two at a time, over axes before the last, of a few elements far apart."""
    cases: list[Case] = []
    for rows, n in ((1, 40), (2, 64), (3, 197), (6, 256), (8, 300), (40, 5), (64, 16)):
        cases += [
            ("softmax", [(rows, n)], {"axis": 1}),
            ("log_softmax", [(rows, n)], {"axis": 1}),
            ("layer_norm", [(rows, n), (n,)], {}),
        ]
        cases += [(op, [(rows, n, 20)], {"axis": 1}) for op in ("softmax", "log_softmax")]
        cases += [(op, [(rows, n)], {"axes": (1,)}) for op in ("reduce_max", "reduce_sum")]
    check(cases, "f32", target)
