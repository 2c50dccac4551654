"""What `sparse_rows` means: products of a sparse matrix's rows, one element after the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dnnc.ir.expr import Ref, load
from dnnc.ir.loops.interp_eval import Evaluator
from dnnc.ir.loops.interp_values import column
from dnnc.ir.loops.intrinsics import TABLE
from dnnc.ir.loops.stmt import SparseRows


def sparse_rows(of: Evaluator, s: SparseRows) -> None:
    """Runs of groups one after the other, each for the rows of the state that ask for it."""
    y, x, w, run = s.args[:4]
    assert isinstance(y, Ref) and isinstance(x, Ref) and isinstance(w, Ref)
    fma = TABLE["fma"].meaning
    assert fma is not None
    outer, numbers = of.state, np.broadcast_to(of.value(run), (of.state.rows,))
    groups = s.pattern.by_groups(s.group)
    ahead = np.concatenate([[0], np.cumsum(groups.sum((1, 2)))])
    for number in np.unique(numbers[of.active()]):
        of.state = replace(outer, mask=of.active() & (numbers == number))
        members = range(number * s.run, min((number + 1) * s.run, len(groups)))
        sums = {r: np.zeros((1, y.lanes), np.float32) for r in range(s.group * len(members))}
        places = [(k, r + j * s.group) for j, g in enumerate(members) for k, r in zip(*np.nonzero(groups[g]))]
        for n, (k, r) in enumerate(places, int(ahead[members[0]])):
            words = np.asarray(of.value(load(w.buf, (w.idx[0] + n,)))).astype(np.uint32)
            vector = of.value(load(x.buf, (*x.idx[:-2], x.idx[-2] + int(k), x.idx[-1]), y.lanes))
            sums[r] = fma(column(words.view(np.float32)), vector, sums[r])
        for r, total in sums.items():
            of.start()
            of.write(of.place(y.buf, (*y.idx[:-2], y.idx[-2] + r, y.idx[-1]), y.lanes), total)
        of.state = outer
