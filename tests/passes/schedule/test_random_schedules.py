"""Any schedule that the primitives accept keeps the meaning of a kernel, and its steps make it again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dnnc.ir.errors import ScheduleError, VerifyError
from dnnc.ir.loops.stmt import Alloc, For, Kernel, count_stmts, walk_stmts
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.schedule import loops, memory
from dnnc.passes.schedule.state import Schedule
from support.schedules import same_results

pytestmark = pytest.mark.slow

KERNELS = (
    """\
def matmul(M: dim[1, 13], x: f32[M, 7], w: f32[7, 12], b: f32[12], y: f32[M, 12]):
    for i in range(M):
        for j in range(12):
            acc: f32[1] @ register
            acc[0] = 0.0
            for r in range(7):
                acc[0] = fma(x[i, r], w[r, j], acc[0])
            y[i, j] = max(acc[0] + b[j], 0.0)
""",
    """\
def convolution(x: f32[3, 9, 10], w: f32[4, 3, 3, 3], y: f32[4, 9, 10]):
    for o in range(4):
        for i in range(9):
            for j in range(10):
                acc: f32[1] @ register
                acc[0] = 0.0
                for c in range(3):
                    for p in range(3):
                        for q in range(3):
                            if 0 <= i + p - 1:
                                if i + p - 1 < 9:
                                    if 0 <= j + q - 1:
                                        if j + q - 1 < 10:
                                            acc[0] = fma(x[c, i + p - 1, j + q - 1], w[o, c, p, q], acc[0])
                y[o, i, j] = acc[0]
""",
    """\
def rows(N: dim[1, 40], x: f32[6, N], y: f32[6, N]):
    for i in range(6):
        m: f32[1] @ register
        m[0] = f32(-inf)
        for r in range(N):
            m[0] = max(m[0], x[i, r])
        for j in range(N):
            y[i, j] = x[i, j] - m[0]
""",
    """\
def transpose(x: f32[10, 14], y: f32[14, 10]):
    for i in range(14):
        for j in range(10):
            y[i, j] = x[j, i] * 2.0
""",
)


class Random:
    """Random steps on a kernel. Refused ones leave no trace."""

    def __init__(self, kernel: Kernel, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.s = Schedule(kernel)
        self.done: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def pick(self, items: Any) -> Any:
        return items[self.rng.integers(len(items))]

    def names(self) -> list[str]:
        return [s.var.name for s in walk_stmts(self.s.body) if isinstance(s, For)]

    def nest(self, name: str) -> list[str]:
        """A loop and the loops perfectly nested in it."""
        out = [self.s.loop(name)]
        while len(out[-1].body) == 1 and isinstance(out[-1].body[0], For):
            out.append(out[-1].body[0])
        return [s.var.name for s in out]

    def step(self) -> None:
        name = self.pick(self.names())
        k = int(self.rng.integers(9))
        n = len(self.done)
        if k <= 1:
            tail = self.pick(("exact", "guard", "peel", "overlap", "clamp"))
            self.apply(loops.split, name, int(self.pick((2, 3, 4, 8))), (f"{name}{n}o", f"{name}{n}i"), tail=tail)
        elif k == 2:
            nest = self.nest(name)[: int(self.rng.integers(2, 4))]
            self.apply(loops.reorder, *(nest[p] for p in self.rng.permutation(len(nest))))
        elif k == 3 and len(self.nest(name)) > 1:
            self.apply(loops.fuse, name, self.nest(name)[1], f"{name}{n}f")
        elif k == 4:
            self.apply(loops.peel, name, int(self.rng.integers(2)), int(self.rng.integers(2)))
        elif k == 5:
            self.apply(loops.annotate, "unroll", name)
        elif k == 6:
            self.apply(self.pick((loops.hoist_guards, loops.narrow, loops.choose)))
        elif k == 7:
            self.apply(memory.distribute, name, int(self.rng.integers(1, 4)))
        else:
            self.apply(self.pick((memory.vectorize, lambda b, x: memory.vector_reduce(b, x, 4, 2))), name)

    def parallelise(self) -> None:
        """Threads share the outermost loop if it holds all that is computed: each thread runs the rest."""
        outer = [s for s in self.s.body if not isinstance(s, Alloc)]
        if len(outer) == 1 and isinstance(outer[0], For):
            self.apply(loops.annotate, "parallel", outer[0].var.name)

    def apply(self, primitive: Any, *args: Any, **more: Any) -> None:
        """A step that the primitive refuses, or whose result the verifier refuses, is taken back."""
        before = self.s.body, list(self.s.steps)
        try:
            self.s.apply(primitive, *args, **more)
            verify_kernel(self.s.done())
        except (ScheduleError, VerifyError):
            self.s.body, self.s.steps = before
            return
        self.done.append((primitive, args, more))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(KERNELS))
def test_meaning_is_kept(seed: int, text: str) -> None:
    keeps_its_meaning(seed, text)


@pytest.mark.thorough
@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(KERNELS))
def test_meaning_is_kept_by_many(seed: int, text: str) -> None:
    keeps_its_meaning(seed, text)


def keeps_its_meaning(seed: int, text: str) -> None:
    kernel = verify_kernel(parse_kernel(text))
    r = Random(kernel, seed)
    for _ in range(10):
        if count_stmts(r.s.done()) < 120 and r.names():
            r.step()
    r.parallelise()
    new = r.s.done()
    assert show_kernel(parse_kernel(show_kernel(new))) == show_kernel(new)
    same_results(kernel, new, seed)
    again = Schedule(kernel)
    for primitive, args, more in r.done:
        again.apply(primitive, *args, **more)
    assert show_kernel(again.done()) == show_kernel(new) and len(again.steps) == len(r.done)
