"""What `sparse_rows` means: products of a sparse matrix's rows, one element after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dnnc.ir.expr import Ref, load
from dnnc.ir.loops.interp_eval import Evaluator
from dnnc.ir.loops.interp_values import column
from dnnc.ir.loops.intrinsics import TABLE
from dnnc.ir.loops.stmt import ImmediateRows, SparseRows


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
        first, part = divmod(int(number), s.spans)
        members = range(first * s.run, min((first + 1) * s.run, len(groups)))
        sums = {r: np.zeros((1, y.lanes), np.float32) for r in range(s.group * len(members))}
        if part:
            sums = {r: of.value(load(y.buf, (*y.idx[:-2], y.idx[-2] + r, y.idx[-1]), y.lanes)) for r in sums}
        places = [(k, r + j * s.group) for j, g in enumerate(members) for k, r in zip(*np.nonzero(groups[g]))]
        for n, (k, r) in enumerate(places, int(ahead[members[0]])):
            if s.span and int(k) // s.span != part:
                continue
            words = np.asarray(of.value(load(w.buf, (w.idx[0] + n,)))).astype(np.uint32)
            row, tap = divmod(int(k), len(s.taps))
            vector = of.value(load(x.buf, (*x.idx[:-2], x.idx[-2] + row, x.idx[-1] + s.taps[tap]), y.lanes))
            sums[r] = fma(column(words.view(np.float32)), vector, sums[r])
        for r, total in sums.items():
            if s.finish is not None:
                if (first * s.run * s.group) + r >= s.pattern.blocks.shape[0]:
                    continue
                total = _finished(of, s, r, total)
            of.start()
            of.write(of.place(y.buf, (*y.idx[:-2], y.idx[-2] + r, y.idx[-1]), y.lanes), total)
        of.state = outer


def immediate_rows(of: Evaluator, s: ImmediateRows) -> None:
    """Groups one after the other, each for the threads of the state that ask for it."""
    y, group = s.args[:2]
    assert isinstance(y, Ref)
    fma = TABLE["fma"].meaning
    assert fma is not None
    outer, numbers = of.state, np.broadcast_to(of.value(group), (of.state.rows,))
    for number in np.unique(numbers[of.active()]):
        of.state = replace(outer, mask=of.active() & (numbers == number))
        sums: dict[int, Any] = {r: np.zeros(1, np.float32) for r in range(s.rows)}
        known: dict[int, Any] = {}
        for k, r, w in zip(*s.members(int(number))):
            if k not in known:
                channel, tap = divmod(int(k), len(s.taps))
                x, inside = s.taps[tap]
                assert isinstance(x, Ref)
                known[k] = of.value(load(x.buf, (*x.idx[: s.axis], x.idx[s.axis] + channel, *x.idx[s.axis + 1 :])))
                if inside is not None:
                    known[k] = np.where(of.value(inside), known[k], np.float32(0))
            sums[r] = fma(w, known[k], sums[r])
        for r, total in sums.items():
            of.start()
            of.write(of.place(y.buf, (*y.idx[:-1], y.idx[-1] + r), 1), total)
        of.state = outer


def _finished(of: Evaluator, s: SparseRows, r: int, total: Any) -> Any:
    """Row `r` of a run as `finish` makes it of the sum."""
    y, count = s.args[0], s.args[6]
    assert isinstance(y, Ref)
    for name, number in s.finish or ():
        at = s.reference(name)
        if name == "bias":
            assert isinstance(at, Ref)
            total = total + column(np.asarray(of.value(load(at.buf, (*at.idx[:-1], at.idx[-1] + r)))))
        elif name == "add":
            assert isinstance(at, Ref)
            total = total + of.value(load(at.buf, (*at.idx[:-2], at.idx[-2] + r, at.idx[-1]), y.lanes))
        else:
            total = TABLE[f"f{name}"].meaning(np.float32(number), total)  # type: ignore[misc]
    there = np.arange(y.lanes)[None, :] < column(np.asarray(of.value(count)))
    return np.where(there, total, np.float32(0))
