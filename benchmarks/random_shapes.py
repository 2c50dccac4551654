"""Kernels of shapes that nobody chose: how even is their speed?

    python benchmarks/random_shapes.py [COUNT] [--seed 0] [--seconds 0.1] [--family grouped]
        also: python benchmarks/cpu.py --random-shapes COUNT

Convolutions (plain, grouped, depthwise, dilated, transposed, over one axis, over three), matrix products, reductions of
rows, scatters, running sums and top-k in turns, drawn from a seed. Each runs on one thread; its efficiency is the share
of its time that the machine's ceilings explain, which the same run measures in turns with it: for contractions its
operations at the FMA peak, or its bytes at the speed at which a loop reads as many, whichever takes longer (a depthwise
convolution of small windows waits for memory); for reductions and scatters its bytes (a scatter's are its updates,
indices, what it starts from and its result, each once); for running sums and top-k a copy of their rows. All by their
shortest times, less the cost of an empty call. The figure to watch is the tenth percentile over the median: a compiler
that is good at a few shapes alone has a low one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from single_kernel import aligned, case, measure, whole

from dnnc.backends.llvm.ceilings import Probe, empty_probe, fma_probe, read_probe
from dnnc.backends.llvm.features import CpuTarget, parse_target

Rng = np.random.Generator
WORK = 2e6, 1e9  # FLOPs of a contraction: shorter ones are lost in the cost of a call
ELEMENTS = 1 << 16, 1 << 24  # of what a reduction reads: from the second-level cache to memory
MAX_BYTES = 64 << 20  # of all operands
WORST = 10
PROGRAM = "program"  # several kernels


@dataclass(frozen=True)
class Shape:
    """A graph with one heavy node of class `kind`. `name` says its sizes; integer inputs are below `below`."""

    family: str
    name: str
    text: str
    kind: str = "contraction"
    below: int = 0


@dataclass(frozen=True)
class Result:
    shape: Shape
    share: float  # 0 for a kernel that fails
    ms: float = 0.0
    choice: str = ""
    error: float = 0.0
    failure: str = ""


# --- shapes -----------------------------------------------------------------------------------------------------------


def _size(rng: Rng, low: int, high: int) -> int:
    """Log-uniform; every second one a multiple of 16 where that is possible, as in most networks."""
    n = round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))
    return n // 16 * 16 if n >= 16 and rng.random() < 0.5 else n


def gemm(rng: Rng) -> Shape:
    while True:
        m, n, k = _size(rng, 8, 1024), _size(rng, 8, 4096), _size(rng, 8, 4096)
        if WORK[0] <= 2.0 * m * n * k <= WORK[1]:
            text = f"def g(a: f32[{m}, {k}], *, b: f32[{k}, {n}]):\n    y = matmul(a, b)\n    return y"
            return Shape("gemm", f"{m} x {n} x {k} (m, n, k)", text)


def conv(rng: Rng) -> Shape:
    while True:
        c, o, h, w = _size(rng, 3, 512), _size(rng, 8, 512), _size(rng, 5, 112), _size(rng, 5, 112)
        r, stride = int(rng.choice((1, 3, 3, 5, 7))), int(rng.choice((1, 1, 1, 2)))
        pad = r // 2
        flops = 2.0 * o * c * r * r * (h // stride) * (w // stride)
        if WORK[0] <= flops <= WORK[1] and 4 * (c * h * w + o * c * r * r + o * h * w) <= MAX_BYTES and min(h, w) >= r:
            attrs = f"strides=({stride}, {stride}), pads=({pad}, {pad}, {pad}, {pad})"
            text = (
                f"def g(a: f32[1, {c}, {h}, {w}], *, b: f32[{o}, {c}, {r}, {r}]):\n    y = conv(a, b, {attrs})\n"
                "    return y"
            )
            return Shape("conv", f"{c} -> {o} at {h} x {w}, {r}x{r} / {stride}", text)


@dataclass(frozen=True)
class Geometry:
    """A convolution over any number of axes."""

    channels: int
    outputs: int
    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: int = 1
    dilation: int = 1
    group: int = 1
    transposed: bool = False

    def shape(self, family: str) -> Shape | None:
        """The graph, None where it is too small or too large."""
        rank, reach = len(self.sizes), [(k - 1) * self.dilation for k in self.kernel]
        per_output = self.channels // self.group * math.prod(self.kernel)
        steps = math.prod(self.sizes) if self.transposed else math.prod(-(-n // self.stride) for n in self.sizes)
        made = math.prod(n * self.stride for n in self.sizes) if self.transposed else steps
        moved = 4 * (self.channels * math.prod(self.sizes) + self.outputs * (made + per_output))
        if (
            not WORK[0] <= 2.0 * self.outputs * per_output * steps <= WORK[1]
            or moved > MAX_BYTES
            or any(r >= n for r, n in zip(reach, self.sizes))
        ):
            return None
        pads = [r // 2 for r in reach]
        if self.transposed:  # as many elements as the stride asks for, or nearly
            pads = [max(k - self.stride, 0) // 2 for k in self.kernel]
        attrs = (
            f"strides={(self.stride,) * rank}, pads={(*pads, *pads)}, dilations={(self.dilation,) * rank}, "
            f"group={self.group}"
        )
        w = (
            (self.outputs, self.channels // self.group)
            if not self.transposed
            else (self.channels, self.outputs // self.group)
        )
        op, x, filters = (
            "conv_transpose" if self.transposed else "conv",
            [1, self.channels, *self.sizes],
            [*w, *self.kernel],
        )
        text = f"def g(a: f32{x}, *, b: f32{filters}):\n    y = {op}(a, b, {attrs})\n    return y"
        name = f"{self.channels} -> {self.outputs} at {_by(self.sizes)}, {_by(self.kernel)} / {self.stride}"
        more = f", dilation {self.dilation}" * (self.dilation > 1) + f", {self.group} groups" * (self.group > 1)
        return Shape(family, name + more, text)


def _by(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def _drawn(family: str, draw: Callable[[], Geometry]) -> Shape:
    while True:
        shape = draw().shape(family)
        if shape is not None:
            return shape


def grouped(rng: Rng) -> Shape:
    """Groups of any width; some with more outputs than inputs, or fewer."""

    def draw() -> Geometry:
        group, inputs, n = _size(rng, 2, 64), _size(rng, 2, 128), _size(rng, 5, 112)
        outputs = inputs if rng.random() < 0.7 else _size(rng, 2, 128)
        return Geometry(
            group * inputs,
            group * outputs,
            (n, n),
            (int(rng.choice((1, 3, 3, 5))),) * 2,
            int(rng.choice((1, 1, 2))),
            1,
            group,
        )

    return _drawn("grouped", draw)


def depthwise(rng: Rng) -> Shape:
    """One input to a group, with one output or several; kernels up to 31 x 31."""

    def draw() -> Geometry:
        c, n, times = _size(rng, 8, 1024), _size(rng, 7, 112), int(rng.choice((1, 1, 1, 2, 3)))
        return Geometry(
            c, c * times, (n, n), (int(rng.choice((3, 3, 5, 7, 13, 31))),) * 2, int(rng.choice((1, 1, 2))), 1, c
        )

    return _drawn("depthwise", draw)


def conv_1d(rng: Rng) -> Shape:
    """Audio: long rows, few channels or many, long kernels."""

    def draw() -> Geometry:
        c, o, n = _size(rng, 1, 768), _size(rng, 1, 768), _size(rng, 50, 32000)
        return Geometry(
            c,
            o,
            (n,),
            (int(rng.choice((1, 2, 3, 3, 7, 11, 16))),),
            int(rng.choice((1, 1, 2, 4))),
            int(rng.choice((1, 1, 3, 9))),
        )

    return _drawn("1-D", draw)


def conv_3d(rng: Rng) -> Shape:
    def draw() -> Geometry:
        c, o, depth, n = _size(rng, 1, 256), _size(rng, 4, 256), _size(rng, 4, 32), _size(rng, 5, 64)
        return Geometry(
            c,
            o,
            (depth, n, n),
            (int(rng.choice((1, 3, 3))), *(int(rng.choice((1, 3, 3))),) * 2),
            int(rng.choice((1, 1, 2))),
        )

    return _drawn("3-D", draw)


def dilated(rng: Rng) -> Shape:
    def draw() -> Geometry:
        c, o, n, d = _size(rng, 8, 512), _size(rng, 2, 512), _size(rng, 14, 112), int(rng.choice((2, 2, 4, 6, 12)))
        return Geometry(c, o, (n, n), (int(rng.choice((3, 3, 5))),) * 2, 1, d)

    return _drawn("dilated", draw)


def transposed(rng: Rng) -> Shape:
    """The convolutions alone that it becomes, without interleaving the phases."""

    def draw() -> Geometry:
        axes, stride, group = (
            int(rng.choice((1, 2, 2, 3))),
            int(rng.choice((1, 2, 2, 4, 8))),
            int(rng.choice((1, 1, 1, 4))),
        )
        c, o, n = (group * _size(rng, *ends) for ends in ((4, 512 // group), (1, 256 // group), (5, 64)))
        kernel = stride * int(rng.choice((1, 2))) if stride > 1 else 3
        return Geometry(c, o, (n // group * (16 if axes == 1 else 1),) * axes, (kernel,) * axes, stride, 1, group, True)

    return _drawn("transposed", draw)


def rows(rng: Rng) -> Shape:
    while True:
        n, width = _size(rng, 1, 8192), _size(rng, 16, 65536)
        if ELEMENTS[0] <= n * width <= ELEMENTS[1]:
            op = str(rng.choice(("reduce_sum", "reduce_max", "reduce_mean")))
            return Shape(
                "rows",
                f"{op} of {n} rows of {width}",
                f"def g(a: f32[{n}, {width}]):\n    y = {op}(a, axes=(1,))\n    return y",
                "reduction",
            )


REDUCTIONS = ("none", "add", "add", "max")


def scatter_elements(rng: Rng) -> Shape:
    """Along any axis of a matrix, an index for each element."""
    while True:
        n, m, other, axis = _size(rng, 8, 1 << 18), _size(rng, 8, 1 << 20), _size(rng, 1, 2048), int(rng.integers(2))
        if ELEMENTS[0] <= (n + m) * other <= ELEMENTS[1] // 2:
            x, u = ([size, other] if axis == 0 else [other, size] for size in (n, m))
            how = str(rng.choice(REDUCTIONS))
            inputs = f"a: f32{u}, *, x: f32{x}, at: i64{u}"
            text = f"def g({inputs}):\n    y = scatter_elements(x, at, a, axis={axis}, reduction='{how}')\n    return y"
            return Shape("scatter_elements", f"{how}: {_by((*u,))} into {_by((*x,))} along {axis}", text, "scatter", n)


def scatter_nd(rng: Rng) -> Shape:
    """Rows, or elements of a matrix."""
    while True:
        n, m, width, pairs = (
            _size(rng, 8, 1 << 18),
            _size(rng, 8, 1 << 20),
            _size(rng, 1, 2048),
            bool(rng.random() < 0.3),
        )
        if ELEMENTS[0] <= n * width + m * (1 if pairs else width) <= ELEMENTS[1]:
            how, below = str(rng.choice(REDUCTIONS)), min(n, width) if pairs else n
            u = [m] if pairs else [m, width]
            inputs = f"a: f32{u}, *, x: f32[{n}, {width}], at: i64[{m}, {1 + pairs}]"
            text = f"def g({inputs}):\n    y = scatter_nd(x, at, a, reduction='{how}')\n    return y"
            return Shape("scatter_nd", f"{how}: {_by((*u,))} into {n} x {width}", text, "scatter", below)


def segments(rng: Rng) -> Shape:
    """Sums of rows by segment, as graph networks and pooling of sets have them."""
    while True:
        n, m, width = (
            _size(rng, 1, 1 << 16),
            _size(rng, 64, 1 << 20),
            int(rng.choice((1, 4, 8, 16, 32, 64, 64, 128, 256))),
        )
        if n <= m and ELEMENTS[0] <= (n + m) * width <= ELEMENTS[1]:
            inputs = f"a: f32[{m}, {width}], *, x: f32[{n}, {width}], at: i64[{m}, 1]"
            text = f"def g({inputs}):\n    y = scatter_nd(x, at, a, reduction='add')\n    return y"
            return Shape("segments", f"{m} rows of {width} into {n}", text, "scatter", n)


def scan(rng: Rng) -> Shape:
    """Running sums along or across memory, of one row or many."""
    while True:
        n, rows = _size(rng, 64, 1 << 23), 1 if rng.random() < 0.4 else _size(rng, 2, 4096)
        if ELEMENTS[0] <= n * rows <= ELEMENTS[1] // 2:
            axis, more = (
                int(rng.random() < 0.7),
                f"exclusive={bool(rng.random() < 0.3)}, reverse={bool(rng.random() < 0.3)}",
            )
            shape = [rows, n] if axis else [n, rows]
            text = f"def g(a: f32{shape}):\n    y = cumsum(a, axis={axis}, {more})\n    return y"
            return Shape("scan", f"{_by((*shape,))} along {axis}, {more}", text, PROGRAM)


def topk(rng: Rng) -> Shape:
    """The largest of rows: from one of each to a thousand."""
    while True:
        n, rows, k = _size(rng, 1000, 1 << 20), 1 if rng.random() < 0.5 else _size(rng, 2, 256), _size(rng, 1, 1000)
        if ELEMENTS[0] <= n * rows <= ELEMENTS[1] // 4 and k <= n:
            text = f"def g(a: f32[{rows}, {n}]):\n    y, i = sort(a, axis=1, descending=True, keep={k})\n    return y"
            return Shape("topk", f"{k} of {rows} rows of {n}", text, PROGRAM)


FAMILIES: tuple[Callable[[Rng], Shape], ...] = (
    conv,
    grouped,
    depthwise,
    conv_1d,
    conv_3d,
    dilated,
    transposed,
    gemm,
    rows,
    scatter_elements,
    scatter_nd,
    segments,
    scan,
    topk,
)


def shapes(count: int, seed: int, families: Sequence[str] = ()) -> list[Shape]:
    """`count` shapes, the families in turns: all, or those of these names."""
    rng = np.random.default_rng(seed)
    chosen = [f for f in FAMILIES if not families or f.__name__ in families]
    return [chosen[k % len(chosen)](rng) for k in range(count)]


# --- measuring --------------------------------------------------------------------------------------------------------


def efficiency(shape: Shape, target: CpuTarget, top: Probe, empty: Probe, seconds: float, target_text: str) -> Result:
    """One kernel, or program, against its bound."""
    if shape.kind == PROGRAM:
        return copying(shape, target_text, seconds)
    try:
        item = case(shape.name, shape.text, target, shape.kind, below=shape.below)
    except Exception as e:  # a shape that the compiler fails at is a result too
        return Result(shape, 0.0, failure=f"{type(e).__name__}: {e}".splitlines()[0])
    reading = read_probe(target, aligned(np.zeros(item.bytes // 4, np.float32)))
    computing, read, mine, call = (min(t) for t in measure([top, reading, item, empty], seconds))
    floor = (read - call) * item.bytes / reading.bytes
    if shape.kind == "contraction":
        floor = max(floor, (computing - call) * item.flops / top.flops)
    return Result(shape, floor / max(mine - call, 1e-9), max(mine - call, 0.0) * 1e3, item.choice, item.error)


def copying(shape: Shape, target: str, seconds: float) -> Result:
    """A program against one that writes as many elements as the first one reads."""
    try:
        item = whole(shape.name, shape.text, target)
        rows = shape.text[shape.text.index("(a: ") : shape.text.index("):")]
        copy, empty = (
            whole("neg", f"def g{of}):\n    y = neg(a)\n    return y", target) for of in (rows, "(a: f32[16]")
        )
    except Exception as e:  # a shape that the compiler fails at is a result too
        return Result(shape, 0.0, failure=f"{type(e).__name__}: {e}".splitlines()[0])
    mine, limit, call = (min(t) for t in measure([item, copy, empty], seconds))
    return Result(shape, max(limit - call, 1e-9) / max(mine - call, 1e-9), (mine - call) * 1e3, item.choice, item.error)


def run(
    count: int,
    seed: int = 0,
    seconds: float = 0.1,
    target_text: str = "llvm",
    console: Console | None = None,
    families: Sequence[str] = (),
) -> list[Result]:
    """Measure `count` shapes and print the summary and the worst ones."""
    console = console or Console()
    target = parse_target(target_text)
    top, empty = fma_probe(target), empty_probe(target)
    todo = track(shapes(count, seed, families), "random shapes", console=console, transient=True)
    results = [efficiency(s, target, top, empty, seconds, target_text) for s in todo]
    console.print(summary(results, target))
    console.print(worst(results))
    return results


def summary(results: list[Result], target: CpuTarget) -> Table:
    table = Table(title=f"{target.cpu}, one thread: share of the measured peak, shapes drawn at random")
    for column in ("family", "shapes", "p10", "median", "p10 / median", "worst", "largest error / scale", "failed"):
        table.add_column(column, justify="left" if column == "family" else "right")
    for family in (*dict.fromkeys(r.shape.family for r in results), "all"):
        of = [r for r in results if family in (r.shape.family, "all")]
        if of:
            p10, middle, least = (float(np.percentile([r.share for r in of], q)) for q in (10, 50, 0))
            error, failed = max(r.error for r in of), sum(bool(r.failure) for r in of)
            figures = (
                f"{p10:.1%}",
                f"{middle:.1%}",
                f"{p10 / middle if middle else 0:.2f}",
                f"{least:.1%}",
                f"{error:.1e}",
                str(failed),
            )
            table.add_row(family, str(len(of)), *figures, end_section=family == results[-1].shape.family)
    return table


def worst(results: list[Result]) -> Table:
    table = Table(title=f"the {min(WORST, len(results))} worst")
    for column in ("family", "shape", "share", "ms", "schedule"):
        table.add_column(column, justify="right" if column in ("share", "ms") else "left")
    for r in sorted(results, key=lambda r: r.share)[:WORST]:
        table.add_row(r.shape.family, r.shape.name, f"{r.share:.1%}", f"{r.ms:.4f}", r.failure or r.choice)
    return table


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("count", type=int, nargs="?", default=60)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--seconds", type=float, default=0.1, help="per shape")
    ap.add_argument("--target", default="llvm")
    ap.add_argument("--family", action="append", default=[], choices=[f.__name__ for f in FAMILIES], help="only these")
    a = ap.parse_args()
    run(a.count, a.seed, a.seconds, a.target, Console(width=150), a.family)


if __name__ == "__main__":
    main()
