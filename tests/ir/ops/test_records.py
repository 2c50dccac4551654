"""Every op record against itself, on each of its samples: type rule, NumPy reference, sampled reference and tensor
expression agree.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from inspect import signature
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from te_eval import evaluate

from dnnc.ir import te
from dnnc.ir.dtype import BY_NAME, DType
from dnnc.ir.errors import DnncError
from dnnc.ir.expr import Var, const, dim
from dnnc.ir.graph import Graph
from dnnc.ir.graph.attributes import complete
from dnnc.ir.graph.builder import Builder, infer
from dnnc.ir.graph.interp import run
from dnnc.ir.op import ContractionForm, Cost, OpDef, Sample, Trait
from dnnc.ir.ops import FAMILIES, OPS
from dnnc.ir.ops.common import draw
from dnnc.ir.shapes import resolve
from dnnc.ir.te import Tensor
from dnnc.ir.types import TensorType

CASES = [(op, s) for op in OPS.values() for s in op.samples]
COMPUTED = [(op, s) for op, s in CASES if op.compute is not None]
# ops whose result has a dtype of its own, whatever the operands are
MAKES_DTYPE = {"cast", "bit_cast", "to_power", "full", "iota", "eye"}


def label(case: Any) -> str:
    if isinstance(case, OpDef):
        return case.name
    return (
        f"{'-'.join(map(str, case.inputs))}-{'-'.join(f'{k}={v}' for k, v in case.attrs)}".replace(" ", "")
        if isinstance(case, Sample)
        else ""
    )


def seed_of(op: OpDef, s: Sample) -> int:
    seed = zlib.crc32(f"{op.name} {label(s)}".encode())
    print(f"seed {seed}")
    return seed


def typed(op: OpDef, s: Sample) -> tuple[list[TensorType], dict[str, Any]]:
    """The output types and all attributes."""
    attrs = complete(op, dict(s.attrs))
    found = op.type(*s.inputs, **attrs)
    return (list(found) if isinstance(found, tuple) else [found]), attrs


def referenced(op: OpDef, arrays: list[Any], attrs: dict[str, Any]) -> list[Any]:
    assert op.reference is not None
    found = op.reference(*arrays, **attrs)
    return [np.asarray(a) for a in (found if isinstance(found, tuple) else (found,))]


def epsilon(d: DType) -> float:
    return float(ml_dtypes.finfo(d.numpy).eps)


def check_close(got: Any, want: Any, d: DType, length: int, what: str) -> None:
    """Within c * eps * sqrt(length) * max(|want|), NaN and inf at the same places; integers exactly."""
    if not d.is_float:
        np.testing.assert_array_equal(got, want, what)
        return
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.array_equal(np.isnan(got), np.isnan(want)) and np.array_equal(got[np.isinf(got)], want[np.isinf(got)]), (
        what
    )
    fin = np.isfinite(want)
    if not fin.any():
        return
    bound = 8 * epsilon(d) * np.sqrt(length) * max(np.abs(want[fin]).max(), 1e-3)
    worst = np.abs(got[fin] - want[fin]).max()
    assert worst <= bound, f"{what}: off by {worst}, allowed {bound}"


def reduce_length(outputs: list[Tensor]) -> int:
    n = 1
    for t in te.stages(outputs):
        for r in t.stage.reduce if t.stage else ():
            n *= max(1, int(const(r.hi).value) + 1) if not isinstance(r.hi, Var) else 1
    return n


@pytest.mark.parametrize("op", OPS.values(), ids=label)
def test_record_is_complete(op: OpDef) -> None:
    assert len(op.samples) >= 2 or Trait.CONTROL in op.traits or "body" in signature(op.type).parameters, (
        f"{op.name} needs samples"
    )
    assert op.traits, f"{op.name} has no traits"
    if op.compute is not None and Trait.MOVEMENT not in op.traits and any(s.inputs for s in op.samples):
        assert op.flops is not None or op.name in ("scatter_elements", "scatter_nd", "one_hot"), (
            f"{op.name} does not say its work"
        )


FACTS = [
    (op, s)
    for op, s in COMPUTED
    if op.traits & {Trait.COMMUTATIVE, Trait.IDEMPOTENT, Trait.INVOLUTION, Trait.NOT_NEGATIVE, Trait.KEEPS_SIGN}
    or op.neutral is not None
    or op.reduced is not None
]


@pytest.mark.parametrize("op,s", FACTS, ids=label)
def test_facts_hold_for_the_reference(op: OpDef, s: Sample) -> None:
    _, attrs = typed(op, s)
    arrays = [a.astype(t.dtype.computed.numpy) for a, t in zip(draw(s, seed_of(op, s)), s.inputs)]
    (got,) = referenced(op, arrays, attrs)

    def same(*operands: Any, want: Any) -> None:
        np.testing.assert_array_equal(referenced(op, operands, attrs)[0], want, strict=True)

    if Trait.COMMUTATIVE in op.traits:
        same(*arrays[::-1], want=got)
    if Trait.IDEMPOTENT in op.traits:
        same(got, want=got)
    if Trait.INVOLUTION in op.traits:
        same(got, want=arrays[0])
    if Trait.NOT_NEGATIVE in op.traits and got.dtype.kind == "f":
        assert not np.signbit(got[~np.isnan(got)]).any()
    if Trait.KEEPS_SIGN in op.traits and got.dtype.kind == "f":
        (positive,) = referenced(op, [a if a.dtype.kind == "b" else np.abs(a) for a in arrays], attrs)
        assert not np.signbit(positive[~np.isnan(positive)]).any()
    if op.neutral is not None:
        x = got.dtype.type(0) * np.abs(arrays[0]) if arrays[0].dtype.kind == "f" else arrays[0]
        for a in (arrays[0], x, -x) if x.dtype.kind == "f" else (x,):
            neutral = np.asarray(op.neutral).astype(a.dtype)
            (kept,) = referenced(op, [a, neutral], attrs)
            np.testing.assert_array_equal(kept, a, strict=True)
            assert a.dtype.kind != "f" or (np.signbit(kept) == np.signbit(a)).all()
    if op.reduced is not None:
        axes = op.reduced(arrays[0].ndim, **attrs)
        assert list(axes) == sorted(set(axes))
        shape = [1 if k in axes else d for k, d in enumerate(arrays[0].shape)]
        assert got.shape == arrays[0].shape or got.size == np.prod(shape)


MOVES = [op for op in OPS.values() if Trait.MOVEMENT in op.traits and Trait.RELAYOUT not in op.traits and op.reference]


@pytest.mark.parametrize("op", MOVES, ids=label)
def test_what_moves_elements_adds_none_but_zeros(op: OpDef) -> None:
    """Rewrites move codes like numbers. Ops that add zeros say so: those are no codes of 0."""
    for s in op.samples:
        _, attrs = typed(op, s)
        drawn = [a.astype(t.dtype.computed.numpy) for a, t in zip(draw(s, seed_of(op, s)), s.inputs)]
        data = [k for k, t in enumerate(s.inputs) if k == 0 or (op.index is None and t.dtype is s.inputs[0].dtype)]
        ones = referenced(op, [np.ones_like(a) if k in data else a for k, a in enumerate(drawn)], attrs)
        fills = Trait.FILLS in op.traits and attrs.get("mode", "constant") == "constant"
        assert fills or all((y == 1).all() for y in ones), label(s)


@pytest.mark.parametrize("op", [op for op in OPS.values() if op.index is not None], ids=label)
def test_indices_beyond_the_axes_they_address_are_refused(op: OpDef) -> None:
    assert op.index is not None
    for s in op.samples:
        _, attrs = typed(op, s)
        arrays = draw(s, seed_of(op, s))
        sizes = [int(d) for d in op.index.addressed(*s.inputs, **attrs)]
        assert sizes and all(0 < d for d in sizes) and s.inputs[op.index.operand].dtype.is_int
        arrays[op.index.operand] = np.full_like(arrays[op.index.operand], min(sizes) - 1)
        referenced(op, arrays, attrs)  # the largest index that all axes have


def test_records_that_contradict_themselves_are_refused() -> None:
    def record(**facts: Any) -> OpDef:
        return OpDef("op", lambda x: x, compute=lambda x: x, reference=lambda x: x, **facts)

    pure = frozenset((Trait.PURE,))
    for facts, message in (
        ({"traits": pure | {Trait.VIEW}}, "the trait view, but not movement"),
        ({"traits": pure, "reduced": lambda rank: (0,)}, "has reduced, but not the trait reduction"),
        ({"traits": pure, "contraction": ContractionForm.PRODUCT}, "a form of contraction"),
        ({"traits": pure, "decompose_serial": lambda b, x: x}, "decompose_serial, but no decompose"),
    ):
        with pytest.raises(TypeError, match=message):
            record(**facts)
    assert record(traits=pure | {Trait.LOOPS}).cost is Cost.HEAVY and record(traits=pure).cost is Cost.CHEAP


def test_names_are_unique() -> None:
    assert len(OPS) == sum(map(len, FAMILIES.values()))


@pytest.mark.family("samples")
@pytest.mark.parametrize("op,s", COMPUTED, ids=label)
def test_type_rule_is_the_reference(op: OpDef, s: Sample) -> None:
    types, attrs = typed(op, s)
    seed = seed_of(op, s)
    arrays = [
        a if Trait.BITS in op.traits else a.astype(t.dtype.computed.numpy) for a, t in zip(draw(s, seed), s.inputs)
    ]
    for got, t in zip(referenced(op, arrays, attrs), types, strict=True):
        assert got.shape == t.shape
        want = t.dtype if op.name in MAKES_DTYPE else t.dtype.computed
        assert got.dtype == want.numpy, f"{op.name}: reference gives {got.dtype}, the type rule {want}"


@pytest.mark.family("samples")
@pytest.mark.parametrize("op,s", COMPUTED, ids=label)
def test_float64_stays_float64(op: OpDef, s: Sample) -> None:
    types, attrs = typed(op, s)
    if op.name in MAKES_DTYPE or not any(t.dtype.is_float for t in s.inputs):
        assert types
        return
    arrays = [a.astype(np.float64) if t.dtype.is_float else a for a, t in zip(draw(s, seed_of(op, s)), s.inputs)]
    for got, t in zip(referenced(op, arrays, attrs), types, strict=True):
        assert got.dtype == (np.float64 if t.dtype.is_float else t.dtype.numpy)


@pytest.mark.family("samples")
@pytest.mark.parametrize("op,s", COMPUTED, ids=label)
def test_tensor_expression_is_the_reference(op: OpDef, s: Sample) -> None:
    types, attrs = typed(op, s)
    arrays = draw(s, seed_of(op, s))
    inputs = [te.placeholder(f"x{k}", t.dtype, t.shape) for k, t in enumerate(s.inputs)]
    found = op.compute(*inputs, **attrs)
    outputs = list(found) if isinstance(found, tuple) else [found]
    wide = (
        arrays
        if Trait.BITS in op.traits
        else [a.astype(np.float64) if t.dtype.is_float else a for a, t in zip(arrays, s.inputs)]
    )
    want = referenced(op, wide, attrs)
    got = evaluate(outputs, dict(zip(inputs, arrays)))
    for t, g, w, o in zip(types, got, want, outputs, strict=True):
        assert (o.dims, o.dtype) == (t.shape, t.dtype)
        check_close(g, w, t.dtype, reduce_length(outputs), op.name)


@pytest.mark.family("samples")
@pytest.mark.parametrize("op,s", COMPUTED, ids=label)
def test_other_ranks_are_refused_or_mean_something(op: OpDef, s: Sample) -> None:
    """An operand of one axis less or more: what the type rule lets through, expression and reference take."""
    tried = 0
    for k, t in enumerate(s.inputs):
        for shape in {t.shape[1:], t.shape[:-1], (*t.shape, 1), (1, *t.shape), (*t.shape, 2), (2, *t.shape)} - {
            t.shape
        }:
            changed = replace(s, inputs=(*s.inputs[:k], TensorType(t.dtype, shape), *s.inputs[k + 1 :]))
            tried += 1
            try:
                types, attrs = typed(op, changed)
            except DnncError:
                continue
            inputs = [te.placeholder(f"x{j}", x.dtype, x.shape) for j, x in enumerate(changed.inputs)]
            found = op.compute(*inputs, **attrs)
            assert [o.dims for o in (found if isinstance(found, tuple) else (found,))] == [x.shape for x in types], (
                changed.inputs
            )
            arrays = draw(changed, seed_of(op, changed))
            wide = (
                arrays
                if Trait.BITS in op.traits
                else [a.astype(np.float64) if x.dtype.is_float else a for a, x in zip(arrays, changed.inputs)]
            )
            try:
                want = referenced(op, wide, attrs)
            except IndexError as e:  # the indices were drawn for other sizes
                assert "out of bounds" in str(e)
                continue
            got = evaluate(list(found) if isinstance(found, tuple) else [found], dict(zip(inputs, arrays)))
            for x, g, w in zip(types, got, want, strict=True):
                check_close(g, w, x.dtype, 4096, f"{op.name} of {changed.inputs}")
    assert tried or not s.inputs


@pytest.mark.family("samples")
@pytest.mark.parametrize("op,s", [(op, s) for op, s in CASES if op.reference_at is not None], ids=label)
def test_sampled_reference_is_the_reference(op: OpDef, s: Sample) -> None:
    _, attrs = typed(op, s)
    seed = seed_of(op, s)
    arrays = [a.astype(np.float64) if t.dtype.is_float else a for a, t in zip(draw(s, seed), s.inputs)]
    (want,) = referenced(op, arrays, attrs)
    rng = np.random.default_rng(seed)
    points = np.stack([rng.integers(0, n, 64) for n in want.shape], 1) if want.ndim else np.zeros((3, 0), np.int64)
    got = op.reference_at(arrays, points, **attrs)
    assert got.shape == (len(points),) and got.dtype == want.dtype
    np.testing.assert_allclose(got, want[tuple(points.T)], rtol=1e-12, atol=1e-12)


@pytest.mark.family("samples")
@pytest.mark.parametrize("op,s", CASES, ids=label)
def test_flops_are_a_positive_number(op: OpDef, s: Sample) -> None:
    types, attrs = typed(op, s)
    if op.flops is None:
        assert types
        return
    n = op.flops(*s.inputs, **attrs)
    assert isinstance(n, int) and (n > 0 or op.name == "cast")


@pytest.mark.family("samples")
@pytest.mark.parametrize("op,s", CASES, ids=label)
def test_one_node_graph_interprets(op: OpDef, s: Sample) -> None:
    """Through builder and interpreter: declared types, and half types near the float64 result."""
    g = Graph("g")
    values = [g.add_input(f"x{k}", t) for k, t in enumerate(s.inputs)]
    found = Builder(g).op(op.name, *values, **dict(s.attrs))
    g.outputs = list(found) if isinstance(found, tuple) else [found]
    arrays = draw(s, seed_of(op, s))
    got, want = run(g, arrays), run(g, arrays, "float64")
    for v, a, w in zip(g.outputs, got, want, strict=True):
        assert a.dtype == v.type.dtype.numpy
        assert all(
            n == d for n, d in zip(a.shape, v.type.shape, strict=True) if isinstance(d, int)
        )  # others are sizes that the data tells
        check_close(
            a, w, v.type.dtype, max([64, *(d for t in s.inputs for d in t.shape if isinstance(d, int))]), op.name
        )


# --- symbolic dims ----------------------------------------------------------------------------------------------------

N = dim("N", 1, 64)
SYMBOLIC: dict[str, list[tuple[list[tuple[str, tuple[Any, ...]]], dict[str, Any]]]] = {
    "add": [([("f32", (N, 3)), ("f32", (1, 3))], {}), ([("f32", (N, 1)), ("f32", (N, 5))], {})],
    "gelu": [([("f16", (N, 3))], {})],
    "matmul": [([("f32", (N, 4, 5)), ("f32", (5, 3))], {}), ([("f32", (3, N)), ("f32", (N, 2))], {})],
    "conv": [
        ([("f32", (N, 3, 6, 6)), ("f32", (4, 3, 3, 3))], {"pads": (1, 1, 1, 1)}),
        ([("f32", (1, 2, N, 8)), ("f32", (4, 2, 3, 3)), ("f32", (4,))], {"pads": (1, 1, 1, 1), "strides": (2, 2)}),
    ],
    "max_pool": [([("f32", (1, 2, N, 6))], {"kernel": (3, 3), "pads": (1, 1, 1, 1), "strides": (2, 2)})],
    "avg_pool": [([("f32", (1, 2, N, 6))], {"kernel": (3, 3), "pads": (1, 1, 1, 1)})],
    "conv_transpose": [([("f32", (1, 2, N, 3)), ("f32", (2, 3, 3, 2))], {"strides": (2, 2), "pads": (1, 0, 0, 1)})],
    "softmax": [([("f32", (2, N))], {"axis": 1}), ([("f32", (N, 5))], {"axis": 1})],
    "layer_norm": [([("f32", (N, 5)), ("f32", (5,))], {}), ([("f32", (3, N)), ("f32", (N,))], {})],
    "reduce_mean": [([("f32", (4, N))], {"axes": (1,)}), ([("f32", (N, 3))], {"axes": (0, 1)})],
    "argmax": [([("f32", (4, N))], {"axis": 1})],
    "cumsum": [([("f32", (N, 3))], {"axis": 0, "reverse": True})],
    "transpose": [([("f32", (N, 3, 4))], {"perm": (2, 0, 1)})],
    "reshape": [
        ([("f32", (N, 3, 4))], {"shape": (N, 12)}),
        ([("f32", (N, 12))], {"shape": (-1, 3, 2)}),
        ([("f32", (N, 4))], {"shape": (4, N)}),
        ([("f32", (2, N, 4))], {"shape": (2, N, 2, 2)}),
        ([("f32", (2, N, 6))], {"shape": (-1,)}),
    ],
    "concat": [([("f32", (N, 3)), ("f32", (2, 3)), ("f32", (N, 3))], {"axis": 0})],
    "slice": [([("f32", (N, 3))], {"starts": (N - 1, 0), "steps": (-1, 2), "shape": (N, 2)})],
    "expand": [([("f32", (1, 3))], {"shape": (N, 3)})],
    "tile": [([("f32", (N, 3))], {"repeats": (2, N)})],
    "pad": [
        ([("f32", (N, 3))], {"pads": (1, 2, 0, 3)}),
        *(
            ([("f32", (N, 3))], {"pads": (b, 0, e, 0), "mode": m})
            for m in ("reflect", "edge", "wrap")
            for b, e in [(1, 1), (2, 0), (3, 6), (11, 9)]
        ),
    ],
    "gather": [([("f32", (N, 3)), ("i64", (4,))], {"axis": 0})],
    "scatter_nd": [([("f32", (N, 3)), ("i64", (4, 1)), ("f32", (4, 3))], {})],
    "full": [([], {"shape": (N, 2), "value": 2.0})],
    "iota": [([], {"shape": (2, N), "axis": 1})],
}


@pytest.mark.parametrize("name", SYMBOLIC)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_symbolic_dims(name: str, n: int) -> None:
    """One tensor expression over a symbolic dim gives the reference's result at each of its sizes."""
    op = OPS[name]
    env = {N: const(n)}
    for k, (inputs, given) in enumerate(SYMBOLIC[name]):
        attrs = complete(op, given)
        types = [TensorType(BY_NAME[d], shape) for d, shape in inputs]
        values = [Graph("g").add_input(f"x{j}", t) for j, t in enumerate(types)]
        (out,) = infer(op, values, attrs)
        tensors = [te.placeholder(f"x{j}", t.dtype, t.shape) for j, t in enumerate(types)]
        static = Sample(
            tuple(resolve(t, env) for t in types),
            domain=(-n, n - 1) if name in ("gather", "scatter_nd") else (-2.0, 2.0),
        )
        arrays = draw(static, seed_of(op, static) + k)
        made = op.compute(*tensors, **attrs)
        assert made.dims == out.shape
        (got,) = evaluate([made], dict(zip(tensors, arrays)), {N: n})
        wide = [a.astype(np.float64) if a.dtype.kind in "fV" else a for a in arrays]
        (want,) = referenced(op, wide, {key: resolve(v, env) for key, v in attrs.items()})
        assert got.shape == resolve(out, env).shape == want.shape
        check_close(got, want, out.dtype, 64, name)
