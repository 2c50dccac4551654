"""canonicalize on random graphs: valid, equal bits in strict numerics, at rest after one run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dnnc.ir.dtype import DType, boolean, f16, f32, i32, i64
from dnnc.ir.graph import Graph, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.types import TensorType
from dnnc.passes.base import PassContext
from dnnc.passes.rewrites.canonicalize import RULES, canonicalize
from dnnc.passes.rewrites.cse import cse
from dnnc.passes.rewrites.dce import dce
from dnnc.passes.rewrites.fold import fold
from support.passes import SPECIAL, check_pass, compare, random_inputs

NUMBERS = (0, 0, 1, 1, 2, 3, -1)


class Maker:
    """A random graph made of what the rules look for."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.g = Graph("f")
        self.b = Builder(self.g)
        dtype = self.pick((f32, f32, f16, i32, boolean))
        self.values = [self.g.add_input(f"x{k}", TensorType(dtype, self.shape())) for k in range(2)]

    def pick(self, items: Any) -> Any:
        return items[self.rng.integers(len(items))]

    def shape(self) -> tuple[int, ...]:
        return tuple(int(d) for d in self.rng.integers(1, 4, self.rng.integers(1, 4)))

    def graph(self) -> Graph:
        for _ in range(self.rng.integers(3, 14)):
            x = self.pick(self.values[-4:])
            steps = [self.move, self.cut, self.convert]
            steps += (
                [self.logic, self.logic]
                if x.type.dtype is boolean
                else [self.arithmetic, self.unary, self.compute_with_constant]
            )
            self.values.append(self.pick(steps)(x))
        self.g.outputs = [self.values[-1], self.pick(self.values)]
        return self.g

    def move(self, x: Value) -> Value:
        shape, rank = x.type.shape, x.type.rank
        k = self.rng.integers(5)
        if k == 0:
            return self.b.transpose(x, perm=tuple(int(p) for p in self.rng.permutation(rank)))  # type: ignore[no-any-return]
        if k == 1:
            return self.b.reshape(x, shape=self.pick([(-1,), shape, (1, *shape), (*shape[::-1],)]))  # type: ignore[no-any-return]
        if k == 2:
            return self.b.expand(x, shape=self.pick([shape, (2, *shape)]))  # type: ignore[no-any-return]
        if k == 3:
            return self.b.concat(*[x] * int(self.rng.integers(1, 3)), axis=int(self.rng.integers(rank)))  # type: ignore[no-any-return]
        return self.b.identity(x)  # type: ignore[no-any-return]

    def cut(self, x: Value) -> Value:
        axis = int(self.rng.integers(x.type.rank))
        n = int(x.type.shape[axis])  # type: ignore[call-overload]
        if self.rng.random() < 0.3 and x.type.rank > 1:
            return self.b.gather(x, np.int64(self.rng.integers(-n, n)), axis=axis)  # type: ignore[no-any-return]
        first, last = sorted(int(i) for i in self.rng.integers(0, n, 2))
        starts, steps, shape = [0] * x.type.rank, [1] * x.type.rank, list(x.type.shape)
        starts[axis], steps[axis], shape[axis] = self.pick([(first, 1, last - first + 1), (last, -1, last - first + 1)])
        return self.b.slice(x, starts=tuple(starts), steps=tuple(steps), shape=tuple(shape))  # type: ignore[no-any-return]

    def convert(self, x: Value) -> Value:
        if x.type.dtype.is_float:
            return self.b.cast(x, to=self.pick((f32, f16)))  # type: ignore[no-any-return]
        return self.b.cast(x, to=self.pick((i32, i64, f32)))  # type: ignore[no-any-return]

    def logic(self, x: Value) -> Value:
        if self.rng.random() < 0.4:
            return self.b.logical_not(x)  # type: ignore[no-any-return]
        k = self.b.constant(bool(self.rng.integers(2)))
        if self.rng.random() < 0.3:
            return self.b.where(self.pick((x, k)), x, self.b.logical_not(x))  # type: ignore[no-any-return]
        return self.b.op(self.pick(("logical_and", "logical_or", "logical_xor")), *self.pick(((x, k), (k, x))))  # type: ignore[no-any-return]

    def unary(self, x: Value) -> Value:
        return self.b.op(self.pick(("neg", "neg", "abs", "relu", "relu")), x)  # type: ignore[no-any-return]

    def arithmetic(self, x: Value) -> Value:
        y = self.pick([v for v in self.values if v.type.dtype is x.type.dtype])
        y = y if y.type.shape == x.type.shape else x
        if self.rng.random() < 0.3:
            y = self.b.neg(y)
        return self.b.op(self.pick(("add", "sub", "mul", "max")), x, y)  # type: ignore[no-any-return]

    def compute_with_constant(self, x: Value) -> Value:
        op, number, dtype = self.pick(("add", "sub", "mul", "div", "pow")), self.pick(NUMBERS), x.type.dtype
        if op in ("div", "pow"):
            number = self.pick((1, 2)) if dtype.is_int or op == "pow" else self.pick((1, 2, 0.5, 3, -4))
        k = self.constant(number, dtype, x.type.shape)
        return self.b.op(op, *(self.pick(((x, k), (k, x))) if op in ("add", "mul") else (x, k)))  # type: ignore[no-any-return]

    def constant(self, number: float, dtype: DType, shape: Any) -> Value:
        value = -0.0 if number == 0 and dtype.is_float and self.rng.random() < 0.5 else number
        return self.b.constant(np.full(self.pick(((), shape, shape[-1:])), value), dtype=dtype)


def test_there_are_rules() -> None:
    assert len({r.name for r in RULES}) == len(RULES) >= 30
    for r in RULES:
        assert "->" in (r.apply.__doc__ or ""), f"{r.name} does not say what it rewrites"


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.booleans())
def test_random_graphs(seed: int, strict: bool) -> None:
    g = Maker(seed).graph()
    verify(g)
    ctx = PassContext(numerics="strict" if strict else "standard")
    old, hidden = g.copy(), "pow" in {n.op.name for n in g.nodes()}  # NumPy's pow is not always correctly rounded
    inputs = random_inputs(g, seed, SPECIAL if strict else ())
    for p in (fold, canonicalize, cse, canonicalize, dce):
        p(g, ctx)
        verify(g)
    with np.errstate(all="ignore"):
        compare(run(old, inputs), run(g, inputs), exact=strict and not hidden)
    assert canonicalize(g, ctx) is False
    assert len(g) <= len(old) + 2 * sum(n.op.name == "gather" for n in old.nodes()) + sum(
        n.op.name == "where" for n in old.nodes()
    )


@pytest.mark.parametrize("numerics", ["strict", "standard", "fast"])
def test_rules_meet(numerics: str) -> None:
    check_pass(
        canonicalize,
        """
def f(x: f32[1, 4, 6], *, one: f32[4, 1] = [[1.0], [1.0], [1.0], [1.0]]):
    a = transpose(x, perm=(1, 0, 2))
    b = mul(one, reshape(a, shape=(4, -1)))
    c = neg(neg(identity(b)))
    d = reshape(c, shape=(2, 12))
    return exp(d)
""",
        "def f(x: f32[1, 4, 6]):\n    d = reshape(x, shape=(2, 12))\n    return exp(d)\n",
        ctx=PassContext(numerics=numerics),
        exact=True,
    )


def test_text_of_the_docstring() -> None:
    g = parse("def f(x: f32[2, 3]):\n    return add(-0.0, reshape(reshape(x, shape=(6,)), shape=(3, 2)))\n")
    assert canonicalize(g, PassContext()) and [n.op.name for n in g.nodes()] == ["reshape"] and not g.constants
