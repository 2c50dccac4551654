"""Kernels of shapes that nobody chose, from which the cost model learns: what gather.py measures.

In: a kind of target, a seed. Out: workloads, each a graph as text with one or a few kernels, and the tasks of such a
graph. Families take turns, and each workload is drawn from its own number alone: every prefix of the list is a balanced
sample, and the list never changes when it is made longer. No shape comes from a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dnnc.autotune.runners.machine import machine_of
from dnnc.autotune.search.task import Setting, Task, task_of
from dnnc.ir.dtype import BY_NAME
from dnnc.ir.graph import Graph
from dnnc.ir.graph.text import parse
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.pipelines import LEVELS
from dnnc.passes.planning.memory_plan import plan_memory
from dnnc.passes.planning.program import plan_region

Rng = np.random.Generator
WEIGHT_PERIOD = (
    65_537  # numbers after which constants repeat: their values do not matter, and drawing millions takes time
)


@dataclass(frozen=True)
class Scale:
    """How large kernels of a kind of target are: FLOPs of contractions, elements of everything else, bytes of all
    operands at most.
    """

    flops: tuple[float, float]
    elements: tuple[float, float]
    nbytes: int
    dtypes: tuple[str, ...]
    kind: str


SCALES = {
    "llvm": Scale((3e5, 1.5e9), (1 << 13, 1 << 23), 48 << 20, ("f32",), "llvm"),
    "cuda": Scale((2e6, 2e11), (1 << 15, 1 << 26), 256 << 20, ("f16", "f16", "f32"), "cuda"),
}


@dataclass(frozen=True)
class Workload:
    """A graph as text: inputs, after `*` constants."""

    family: str
    number: int
    text: str

    def graph(self) -> Graph:
        return parse(self.text, _Weights(self.text))


class _Weights(Mapping[str, np.ndarray[Any, Any]]):
    """Some numbers for each constant that a text declares."""

    def __init__(self, text: str) -> None:
        head = text.split("*, ", 1)[1].split(")", 1)[0] if "*, " in text else ""
        self.types = dict(p.split(": ") for p in head.replace("], ", "]|").split("|") if p)

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        dtype, dims = self.types[name].rstrip("]").split("[")
        shape = tuple(int(d) for d in dims.split(","))
        numbers = np.random.default_rng(0).standard_normal(min(WEIGHT_PERIOD, int(np.prod(shape)))) * 0.05
        return np.resize(numbers.astype(BY_NAME[dtype].numpy), shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.types)

    def __len__(self) -> int:
        return len(self.types)


# --- drawing ----------------------------------------------------------------------------------------------------------


def size(rng: Rng, low: float, high: float, multiple: int = 16) -> int:
    """Log-uniform; two of three are a multiple of 16 where that is possible, as in most networks."""
    n = round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))
    return max(n // multiple * multiple, multiple) if n >= multiple and rng.random() < 0.66 else max(n, 1)


def fitting(rng: Rng, s: Scale, work: tuple[float, float], draw: Callable[[], tuple[float, float, str]]) -> str:
    """Draw (work, bytes, text) until the work is near a log-uniform one and the operands are small enough."""
    want = float(np.exp(rng.uniform(*np.log(work))))
    best, text = float("inf"), ""
    for _ in range(400):
        done, nbytes, made = draw()
        off = abs(np.log(done / want)) if nbytes <= s.nbytes else float("inf")
        if off < best:
            best, text = off, made
        if best < 0.35:
            break
    return text


def after(rng: Rng, shape: str, channels: str, dtype: str, kinds: int = 5) -> tuple[list[str], list[str], list[str]]:
    """What follows a contraction: inputs, constants and lines from `h` to `y`. `shape`: of the result; `channels`: that
    broadcasts along it.
    """
    kind = int(rng.integers(kinds))
    act = str(rng.choice(("relu", "relu", "gelu", "sigmoid", "tanh", "swish")))
    if kind == 0:
        return [], [], ["y = identity(h)"]
    lines = ["s = add(h, c)"]
    if kind == 1:
        return [], [f"c: {dtype}[{channels}]"], [*lines, "y = relu(s)"]
    if kind == 2:
        return [], [f"c: {dtype}[{channels}]"], [*lines, f"y = {act}(s)"]
    if kind == 3:
        return (
            [f"r: {dtype}[{shape}]"],
            [f"c: {dtype}[{channels}]"],
            [*lines, "t = add(s, r)", "y = relu(t)" if rng.random() < 0.5 else "y = identity(t)"],
        )
    return [], [f"c: {dtype}[{channels}]"], ["y = add(h, c)"]


def text_of(inputs: list[str], constants: list[str], lines: list[str]) -> str:
    if lines[-1] == "y = identity(h)":  # a copy would be a kernel of its own
        lines = [*[f"y{x[1:]}" if x.startswith("h = ") else x for x in lines[:-1]]]
    if lines[-1] == "y = identity(t)":
        lines = [*[f"y{x[1:]}" if x.startswith("t = ") else x for x in lines[:-1]]]
    head = ", ".join([*inputs, *(["*", *constants] if constants else [])])
    return f"def g({head}):\n" + "".join(f"    {x}\n" for x in lines) + "    return y\n"


# --- families ---------------------------------------------------------------------------------------------------------


def dense(rng: Rng, s: Scale, dtype: str, rows: tuple[int, int] = (5, 4096), sides: tuple[int, int] = (8, 6144)) -> str:
    """A fully connected layer: activations times weights."""
    b = BY_NAME[dtype].bytes

    def draw() -> tuple[float, float, str]:
        m, n, k = size(rng, *rows), size(rng, *sides), size(rng, *sides)
        more, constants, lines = after(rng, f"{m}, {n}", f"{n}", dtype)
        text = text_of(
            [f"x: {dtype}[{m}, {k}]", *more], [f"w: {dtype}[{k}, {n}]", *constants], ["h = matmul(x, w)", *lines]
        )
        return 2.0 * m * n * k, b * (m * k + k * n + 2.0 * m * n), text

    return fitting(rng, s, s.flops, draw)


def products(rng: Rng, s: Scale, dtype: str) -> str:
    """Activations times activations, with batches."""
    b = BY_NAME[dtype].bytes

    def draw() -> tuple[float, float, str]:
        batch, m, n, k = size(rng, 1, 64, 4), size(rng, 4, 1024), size(rng, 4, 1024), size(rng, 8, 1024)
        turned = rng.random() < 0.4
        w = f"{batch}, {n}, {k}" if turned else f"{batch}, {k}, {n}"
        lines = ["u = transpose(w, perm=(0, 2, 1))", "y = matmul(x, u)"] if turned else ["y = matmul(x, w)"]
        text = text_of([f"x: {dtype}[{batch}, {m}, {k}]", f"w: {dtype}[{w}]"], [], lines)
        return 2.0 * batch * m * n * k, float(b * batch * (m * k + k * n + m * n)), text

    return fitting(rng, s, s.flops, draw)


def conv(
    rng: Rng,
    s: Scale,
    dtype: str,
    taps: tuple[int, ...],
    strides: tuple[int, ...],
    channels: tuple[int, int] = (8, 768),
) -> str:
    """A convolution of square windows, dense in its channels."""
    b = BY_NAME[dtype].bytes

    def draw() -> tuple[float, float, str]:
        c, o = size(rng, *channels), size(rng, 8, 768)
        side = size(rng, 5, 128, 7)
        h, w = side, side if rng.random() < 0.7 else size(rng, 5, 128, 7)
        r, t = int(rng.choice(taps)), int(rng.choice(strides))
        n = 1 if s.kind == "llvm" or rng.random() < 0.5 else size(rng, 1, 64, 4)
        d = 2 if r > 1 and t == 1 and rng.random() < 0.08 else 1
        p = r // 2 * d
        hh, ww = ((x + 2 * p - d * (r - 1) - 1) // t + 1 for x in (h, w))
        if min(hh, ww) < 1:
            return 1.0, float("inf"), ""
        more, constants, lines = after(rng, f"{n}, {o}, {hh}, {ww}", f"{o}, 1, 1", dtype)
        attrs = f"strides=({t}, {t}), pads=({p}, {p}, {p}, {p})" + (f", dilations=({d}, {d})" if d > 1 else "")
        text = text_of(
            [f"x: {dtype}[{n}, {c}, {h}, {w}]", *more],
            [f"w: {dtype}[{o}, {c}, {r}, {r}]", *constants],
            [f"h = conv(x, w, {attrs})", *lines],
        )
        return 2.0 * n * o * c * r * r * hh * ww, b * (n * c * h * w + o * c * r * r + 2.0 * n * o * hh * ww), text

    return fitting(rng, s, s.flops, draw)


def depthwise(rng: Rng, s: Scale, dtype: str) -> str:
    """A convolution of every channel for itself."""
    b = BY_NAME[dtype].bytes

    def draw() -> tuple[float, float, str]:
        c, h, w = size(rng, 8, 1024), size(rng, 5, 160, 7), size(rng, 5, 160, 7)
        n = 1 if s.kind == "llvm" or rng.random() < 0.5 else size(rng, 1, 64, 4)
        r, t = int(rng.choice((3, 3, 5, 7))), int(rng.choice((1, 1, 2)))
        p = r // 2
        hh, ww = ((x + 2 * p - r) // t + 1 for x in (h, w))
        _, constants, lines = after(rng, f"{n}, {c}, {hh}, {ww}", f"{c}, 1, 1", dtype, 3)
        line = f"h = conv(x, w, strides=({t}, {t}), pads=({p}, {p}, {p}, {p}), group={c})"
        text = text_of(
            [f"x: {dtype}[{n}, {c}, {h}, {w}]"], [f"w: {dtype}[{c}, 1, {r}, {r}]", *constants], [line, *lines]
        )
        return float(n * c * h * w), b * 2.0 * n * c * h * w, text

    return fitting(rng, s, s.elements, draw)


def attention(rng: Rng, s: Scale, dtype: str) -> str:
    """Queries, keys and values; a mask now and then."""
    b = BY_NAME[dtype].bytes

    def draw() -> tuple[float, float, str]:
        batch, m = size(rng, 1, 512, 4), size(rng, 1, 1024)  # heads of all sequences
        n = m if rng.random() < 0.6 else size(rng, 8, 2048)
        d = int(rng.choice((16, 32, 40, 64, 64, 80, 96, 128)))
        mask = rng.random() < 0.3
        inputs = [f"q: {dtype}[{batch}, {m}, {d}]", f"k: {dtype}[{batch}, {n}, {d}]", f"v: {dtype}[{batch}, {n}, {d}]"]
        inputs += [f"mask: {dtype}[{m}, {n}]"] if mask else []
        lines = ["kt = transpose(k, perm=(0, 2, 1))", "p = matmul(q, kt)", "sc = mul(p, 0.125)"]
        lines += ["sm = add(sc, mask)", "a = softmax(sm)"] if mask else ["a = softmax(sc)"]
        return (
            4.0 * batch * m * n * d,
            float(b * batch * (2 * m * d + 2 * n * d) + (4 * b * batch * m * n if s.kind == "llvm" else 0)),
            text_of(inputs, [], [*lines, "y = matmul(a, v)"]),
        )

    return fitting(rng, s, s.flops, draw)


def _shape(rng: Rng, s: Scale, inner: tuple[int, int] = (16, 8192), middle: bool = True) -> tuple[int, ...]:
    """Two or three axes of a number of elements that is drawn log-uniformly."""
    total = float(np.exp(rng.uniform(*np.log(s.elements))))
    last = size(rng, inner[0], min(inner[1], total))
    if middle and rng.random() < 0.5:
        mid = size(rng, 1, max(total / last, 1.0), 8)
        return max(round(total / last / mid), 1), mid, last
    return max(round(total / last), 1), last


def reduction(rng: Rng, s: Scale, dtype: str) -> str:
    """Sums, means and maxima over the last, a middle or the first axis."""
    shape = _shape(rng, s)
    op = str(rng.choice(("reduce_sum", "reduce_max", "reduce_mean", "reduce_sum_square")))
    axis = len(shape) - 1 if rng.random() < 0.6 else int(rng.integers(len(shape)))
    lines = [f"y = {op}(x, axes=({axis},), keepdims=False)"]
    if rng.random() < 0.3:
        lines = ["e = sigmoid(x)", f"y = {op}(e, axes=({axis},), keepdims=False)"]
    return text_of([f"x: {dtype}[{', '.join(map(str, shape))}]"], [], lines)


def norm(rng: Rng, s: Scale, dtype: str) -> str:
    """Softmax and normalizations of rows, what is added before and the scales behind included."""
    shape = _shape(rng, s, (32, 4096))
    dims, last = ", ".join(map(str, shape)), shape[-1]
    kind = int(rng.integers(4))
    if kind == 0:
        axis = len(shape) - 1 if rng.random() < 0.8 else len(shape) - 2
        return text_of([f"x: {dtype}[{dims}]"], [], [f"y = softmax(x, axis={axis})"])
    if kind == 1:
        return text_of(
            [f"x: {dtype}[{dims}]", f"m: {dtype}[{last}]"], [], ["e = mul(x, 0.125)", "f = add(e, m)", "y = softmax(f)"]
        )
    if kind == 2:
        return text_of(
            [f"x: {dtype}[{dims}]"], [f"w: {dtype}[{last}]", f"c: {dtype}[{last}]"], ["y = layer_norm(x, w, c)"]
        )
    line = ["h = add(x, r)", "y = layer_norm(h, w, c)"]
    return text_of([f"x: {dtype}[{dims}]", f"r: {dtype}[{dims}]"], [f"w: {dtype}[{last}]", f"c: {dtype}[{last}]"], line)


def chain(rng: Rng, s: Scale, dtype: str) -> str:
    """A few element-wise operations, operands broadcast or not."""
    shape = _shape(rng, s)
    dims = ", ".join(map(str, shape))
    inputs, lines, at = [f"x: {dtype}[{dims}]"], [], "x"
    for k in range(int(rng.integers(1, 5))):
        if rng.random() < 0.5:
            lines.append(
                f"v{k} = {rng.choice(('relu', 'sigmoid', 'tanh', 'gelu', 'neg', 'exp', 'abs', 'swish'))}({at})"
            )
        else:
            other = str(rng.choice((dims, dims, f"{shape[-1]}", f"{shape[0]}" + ", 1" * (len(shape) - 1))))
            inputs.append(f"a{k}: {dtype}[{other}]")
            lines.append(f"v{k} = {rng.choice(('add', 'mul', 'sub', 'max'))}({at}, a{k})")
        at = f"v{k}"
    return text_of(inputs, [], [*lines[:-1], "y" + lines[-1][lines[-1].index(" ") :]])


def moved(rng: Rng, s: Scale, dtype: str) -> str:
    """Transposes of two to four axes, slices, concatenations."""
    kind = int(rng.integers(5))
    if kind == 4:
        shape = _shape(rng, s)
        other = (*shape[:-1], size(rng, 4, 512))
        a, b = (", ".join(map(str, x)) for x in (shape, other))
        return text_of(
            [f"x: {dtype}[{a}]", f"z: {dtype}[{b}]"],
            [],
            ["e = relu(x)", "f = tanh(z)", f"y = concat(e, f, axis={len(shape) - 1})"],
        )
    shape = _shape(rng, s, (4, 1024), middle=False)
    rows, cols = shape
    if kind == 0:
        return text_of([f"x: {dtype}[{rows}, {cols}]"], [], ["y = transpose(x, perm=(1, 0))"])
    heads = int(rng.choice((4, 8, 12, 16)))
    d = max(cols // heads, 4)
    if kind == 1:
        return text_of([f"x: {dtype}[{rows}, {heads}, {d}]"], [], ["y = transpose(x, perm=(1, 0, 2))"])
    if kind == 2:
        return text_of([f"x: {dtype}[{rows}, {heads}, {d}]"], [], ["y = transpose(x, perm=(1, 2, 0))"])
    batch = int(rng.choice((1, 2, 4)))
    return text_of(
        [f"x: {dtype}[{batch}, {max(rows // batch, 1)}, {heads}, {d}]"], [], ["y = transpose(x, perm=(0, 2, 1, 3))"]
    )


def pooling(rng: Rng, s: Scale, dtype: str) -> str:
    """Maxima and means of windows."""
    b = BY_NAME[dtype].bytes

    def draw() -> tuple[float, float, str]:
        c, h, w = size(rng, 8, 512), size(rng, 6, 160, 7), size(rng, 6, 160, 7)
        n = 1 if s.kind == "llvm" or rng.random() < 0.5 else size(rng, 1, 64, 4)
        r, t = int(rng.choice((2, 3, 3, 5))), int(rng.choice((1, 2, 2)))
        p = r // 2 if r > 2 else 0
        line = (
            f"{rng.choice(('max_pool', 'avg_pool'))}(x, kernel=({r}, {r}), strides=({t}, {t}), pads=({p}, {p}, "
            f"{p}, {p}))"
        )
        lines = (
            [f"y = {line}"]
            if rng.random() < 0.5
            else ["e = relu(x)", f"h = {line.replace('(x', '(e')}", "y = identity(h)"]
        )
        return float(n * c * h * w), b * 2.0 * n * c * h * w, text_of([f"x: {dtype}[{n}, {c}, {h}, {w}]"], [], lines)

    return fitting(rng, s, s.elements, draw)


Family = Callable[[Rng, Scale, str], str]
FAMILIES: tuple[tuple[str, Family], ...] = (
    ("dense", dense),
    ("conv1x1", partial(conv, taps=(1,), strides=(1,))),
    ("norm", norm),
    ("conv3x3", partial(conv, taps=(3,), strides=(1,))),
    ("products", products),
    ("chain", chain),
    ("conv_other", partial(conv, taps=(1, 3, 3, 5, 7), strides=(2, 2, 1))),
    ("few_rows", partial(dense, rows=(1, 4))),
    ("reduction", reduction),
    ("attention", attention),
    ("depthwise", depthwise),
    ("moved", moved),
    ("stem", partial(conv, taps=(3, 5, 7), strides=(1, 2), channels=(1, 7))),
    ("pooling", pooling),
    (
        "streams",
        partial(dense, rows=(8192, 400_000), sides=(16, 640)),
    ),  # 1x1 convolutions of large images: memory is what counts
)


def workload(kind: str, number: int, seed: int = 0) -> Workload:
    """The workload of a number, for "llvm" or "cuda"."""
    name, family = FAMILIES[number % len(FAMILIES)]
    s = SCALES[kind]
    turn = number // len(FAMILIES)
    rng = np.random.default_rng((seed, number, sorted(SCALES).index(kind)))
    return Workload(name, number, family(rng, s, s.dtypes[turn % len(s.dtypes)]))


# --- tasks ------------------------------------------------------------------------------------------------------------


def context(setting: Setting) -> PassContext:
    """What graph passes know in a compilation for this setting."""
    return machine_of(setting.target).context(setting)


def tasks(w: Workload, setting: Setting) -> list[Task]:
    """The kernels of a workload, as a model that holds it would have them. Nothing is scheduled. Copies between
    layouts, which stand around each convolution here and around few in a model, are kept for one workload of four.
    """
    graph, ctx = w.graph(), context(setting)
    PassManager().run(graph, LEVELS[3], ctx)
    region = plan_region(graph, facts=ctx.facts)
    memory = plan_memory(graph, region.fusion, region.inplace, region.nested)
    found = [
        task_of(graph, g, memory.inplace, setting) for g in region.fusion.groups if g.kind not in ("host", "control")
    ]
    copies = (w.number // len(FAMILIES)) % 4 == 0
    return list({t.key: t for t in found if copies or t.name not in ("pack", "cast")}.values())
