"""Checks of schedule primitives on texts: the text after the steps, validity, and equal results in the interpreter."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from dnnc.ir.expr import Var, const, substitute, value
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.schedule.state import Schedule

Array = np.ndarray[Any, Any]
MAX_DIM = 37  # of a symbolic dim whose upper bound is larger or not known


def check_schedule(before: str, steps: Callable[[Schedule], object], after: str) -> Kernel:
    """Schedule a kernel given as text and compare with the text of the result.

    Both kernels must pass the verifier and print and parse to the same text; on random arrays of small whole numbers,
    whose sums and products are exact in any order, both must leave the same numbers in all buffers, for several sizes
    of symbolic dims.
    """
    old = verify_kernel(parse_kernel(before))
    s = Schedule(old)
    steps(s)
    new = s.done()
    text = show_kernel(new)
    diff = "\n".join(difflib.unified_diff(after.splitlines(), text.splitlines(), "expected", "got", lineterm=""))
    assert not diff, diff
    verify_kernel(new)
    assert show_kernel(parse_kernel(text)) == text
    same_results(old, new)
    return new


def same_results(old: Kernel, new: Kernel, seed: int = 0) -> None:
    """AssertionError with the first difference unless both kernels write the same, for every size tried."""
    for dims in sizes(old):
        args = random_arguments(old, dims, seed)
        a, b = ({k: v.copy() if isinstance(v, np.ndarray) else v for k, v in args.items()} for _ in range(2))
        run_kernel(old, a)
        run_kernel(new, b)
        for p in old.entry.buffers:
            bad = np.argwhere(~((a[p.name] == b[p.name]) | (np.isnan(a[p.name]) & np.isnan(b[p.name]))))
            assert not len(bad), (
                f"{p.name}{bad[0].tolist()}: {a[p.name][tuple(bad[0])]} became {b[p.name][tuple(bad[0])]} at "
                f"{dims or 'fixed sizes'}"
            )


def sizes(k: Kernel) -> Iterator[dict[str, int]]:
    """Values of the symbolic dims: all smallest, all largest (MAX_DIM at most), and one in between."""
    dims = [p for p in k.entry.scalars if p.dtype.is_int]
    for part in (0.0, 0.4, 1.0) if dims else (0.0,):
        chosen: dict[str, int] = {}
        for p in dims:
            low, high = _bound(p.lo, 0), _bound(p.hi, MAX_DIM)
            low, high = -(-low // p.div) * p.div, max(min(high, MAX_DIM), low) // p.div * p.div
            chosen[p.name] = low + int((high - low) * part) // p.div * p.div
        yield chosen


def _bound(b: Any, default: int) -> int:
    found = None if b is None else value(const(b))
    return default if found is None else found


def random_arguments(k: Kernel, dims: dict[str, int], seed: int = 0) -> dict[str, Any]:
    """Arrays of whole numbers from -4 to 4 (0 to 8 if unsigned), of float scalars one such number."""
    rng = np.random.default_rng(seed)
    env = {p: const(dims[p.name]) for p in k.entry.scalars if p.name in dims}
    out: dict[str, Any] = {}
    for p in k.entry.params:
        if isinstance(p, Var):
            out[p.name] = dims.get(p.name, float(rng.integers(-4, 5)))
            continue
        low = 0 if p.dtype.kind in "ub" else -4
        high = 2 if p.dtype.kind == "b" else low + 9
        shape = [int(str(substitute(d, env))) for d in p.shape]
        out[p.name] = np.asarray(rng.integers(low, high, shape)).astype(p.dtype.numpy)
    return out
