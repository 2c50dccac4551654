"""Schedule primitive: a reduction factored over the lanes of a vector, which are added up at its end (Suriana, Adams
and Kamil, "Parallel associative reductions in Halide", 2017).

    for r in range(n):                                  part[0:16] = 0
        for l in range(16):                             for r in range(n):
            acc[0] = fma(a[r, l], b[r, l], acc[0])  ->      part[0:16] = fma(a[r, 0:16], b[r, 0:16], part[0:16])
                                                        acc[0] = acc[0] + hsum(part[0:16])

`vector_reduce` does so for one loop; here the loop over lanes is the innermost of a nest of reduction loops.
"""

from __future__ import annotations

from dnnc.ir.errors import ScheduleError
from dnnc.ir.expr import Load, Op, const, fma, load, value
from dnnc.ir.loops.stmt import Alloc, Block, Buffer, For, Store, call, substitute_block
from dnnc.passes.schedule.loops import guarded, guards_of, is_reduction
from dnnc.passes.schedule.memory import Vectorizer
from dnnc.passes.schedule.state import edit, find, make_loop, replace_stmt


def round_up(b: Block, name: str, factor: int) -> Block:
    """`for r in range(20)` -> `for r in range(32)`: a product sum over padded rows, where both factors hold 0."""
    return edit(
        b,
        name,
        lambda s: (
            make_loop(
                name,
                (s.extent + (factor - 1)) // factor * factor,
                s.kind,
                lambda v: substitute_block(s.body, {s.var: v}),
            ),
        ),
    )


def rfactor(b: Block, outer: str, lane: str) -> Block:
    """Sum products over the lanes of `lane` apart, from the loop `outer` on. The order of the sum changes."""

    def go(s: For) -> Block:
        loop = find((s,), lane)
        conds, body = guards_of(loop.body)
        st, lanes = body[0], value(loop.extent)
        if len(body) != 1 or not isinstance(st, Store) or not is_reduction(st) or lanes is None:
            raise ScheduleError(f"{lane} is no loop over the lanes of a sum")
        assert isinstance(st.value, Op)
        acc = next(a for a in reversed(st.value.args) if isinstance(a, Load) and a.buf is st.buf)
        terms = [a for a in st.value.args if a is not acc]  # integers have no fma, but a product that is added
        if st.value.name != "fma" and not (st.value.name == "+" and isinstance(p := terms[0], Op) and p.name == "*"):
            raise ScheduleError(f"{lane} is no loop over the lanes of a sum of products")
        part = Buffer(f"{st.buf.name}_{lane}", st.buf.dtype, (const(lanes),), "register")
        at = (loop.var - loop.lo,)
        more = fma(terms[0], terms[1], load(part, at)) if st.value.name == "fma" else load(part, at) + terms[0]
        step = guarded(conds, (Store(part, at, more),))
        vector = Vectorizer(loop.var, loop.lo, lanes).block(step)
        zero = const(0.0 if st.buf.dtype.is_float else 0, st.buf.dtype)
        total = Store(st.buf, st.idx, acc + call("hsum", part.at(0, lanes=lanes)))
        return (Alloc(part), Store(part, (const(0),), zero, lanes), *replace_stmt((s,), loop, lambda: vector), total)

    return edit(b, outer, go)
