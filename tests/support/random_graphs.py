"""Random graphs that a compiler must get right: typed, shape-aware, with values that stay finite and results that
rounding cannot flip.

In: a seed. Out: a graph and arrays for its inputs. Each node is interpreted as it is made, in float64, in the model's
own dtypes, and on operands moved by a few times their rounding error; one whose result is not finite, or that such a
move would change by much (a comparison near a tie, a cast near an integer), is taken back. So whatever a backend's
result differs in is the backend's doing.

Each seed has one op of its own turn, so that as many seeds as there are ops have them all; every third has a pattern
too. Every fourth seed makes larger tensors, whose kernels run on several threads; every fifth has a symbolic dim N:
sizes that are multiples of ANY_SIZE, a prime that no other size has for a factor, become multiples of N.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.ir.dtype import BY_NAME, DType, i64
from dnnc.ir.errors import DnncError, ShapeError
from dnnc.ir.expr import unwrap, var
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.op import Trait
from dnnc.ir.ops import OPS
from dnnc.ir.ops.common import WORDS
from dnnc.ir.types import TensorType

Array = np.ndarray[Any, Any]
SIZES = (1, 1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33)
DTYPES: tuple[str, ...] = (
    ("f32",) * 24
    + ("f16",) * 4
    + ("bf16", "bf16", "f64", "f64", "i64", "i64", "i64", "i32", "i32", "u8", "u8", "i8", "i8", "bool", "bool")
)
DTYPES += ("i16", "u16", "u32", "u64", "f8e4m3fn", "f8e5m2", "i4", "u4")
EMPTY = 0.015  # the share of shapes with an axis of size 0
LARGER = (1, 2, 16, 17, 24, 40, 64, 65, 96, 100)
MAX_ELEMENTS, MAX_LARGER = 6000, 80_000
ANY_SIZE = 13  # of a symbolic dim while the graph is made
MAX_ANY = 24
MAX_NUMBER = {
    "f16": 500.0,
    "bf16": 1e4,
    "f8e4m3fn": 100.0,
    "f8e5m2": 1e3,
}  # of a float result, 1e5 where nothing is said
MOVES = 2  # trials with moved operands
MOVE = 8.0  # how far, in rounding errors
EVERY = 3  # of so many seeds one has a pattern of random_patterns
CONTROL = {n for n, d in OPS.items() if Trait.CONTROL in d.traits}


@dataclass(eq=False)
class Made:
    """A value with its contents: in float64 (`exact`), as the model rounds, and the error of a backend."""

    value: Value
    exact: Array
    rounded: Array
    error: float

    @property
    def type(self) -> TensorType:
        return self.value.type

    @property
    def dtype(self) -> DType:
        return self.value.type.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.exact.shape)


def random_graph(seed: int, nodes: int = 12) -> tuple[Graph, list[Array]]:
    """A graph of about that many nodes and arrays for its inputs. Equal seeds give equal graphs."""
    from support.random_patterns import PATTERNS  # they add to a Generator, which is made here
    from support.random_recipes import NAMES, RECIPES, add_sample

    g = Generator(np.random.default_rng(seed), large=seed % 4 == 3, symbolic=seed % 5 == 4)
    g.recipes = RECIPES

    def turn() -> None:
        add_sample(g, NAMES[seed % len(NAMES)])
        if seed % EVERY == EVERY - 1:
            PATTERNS[seed // EVERY % len(PATTERNS)](g)

    return g.make(nodes, turn)


class Generator:
    recipes: Sequence[Callable[[Generator], None]]
    bounds_all = False  # do all loops have a length?

    def __init__(self, rng: np.random.Generator, large: bool, symbolic: bool, around: Generator | None = None) -> None:
        """`around`: the Generator of the graph in which this one's is a body."""
        self.rng, self.large, self.around = rng, large, around
        self.depth: int = 0 if around is None else around.depth + 1
        self.captured: list[Made] = []  # values of the graph around that are the body's last inputs
        self.limit = MAX_LARGER if large else MAX_ELEMENTS
        self.any = var("N", i64, 1, MAX_ANY) if symbolic else None
        self.graph = Graph("fuzz")
        self.b = Builder(self.graph)
        self.pool: list[Made] = []
        self.arrays: list[Array] = []

    def inner(self, name: str) -> Generator:
        """A Generator for a body, with the same dims and recipes."""
        g = Generator(self.rng, False, False, self)
        g.any, g.recipes, g.graph, g.limit = self.any, self.recipes, Graph(name), min(self.limit, MAX_ELEMENTS)
        g.b = Builder(g.graph)
        return g

    def capture(self, m: Made) -> Made:
        """A value of the graph around as an input of this body."""
        self.captured.append(m)
        inside = Made(self.graph.add_input("c", m.type), m.exact, m.rounded, m.error)
        self.pool.append(inside)
        return inside

    # --- choices ------------------------------------------------------------------------------------------------------

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def below(self, n: int) -> int:
        return int(self.rng.integers(n))

    def one_of(self, items: Sequence[Any]) -> Any:
        return items[self.below(len(items))]

    def shape(self, rank: int | None = None) -> tuple[int, ...]:
        rank = self.one_of((0, 1, 2, 2, 3, 3, 4, 4, 5)) if rank is None else rank
        while True:
            s = tuple(int(self.one_of(LARGER if self.large else SIZES)) for _ in range(rank))
            if self.any is not None and s and self.chance(0.7):
                s = (ANY_SIZE, *s[1:]) if self.chance(0.7) else (*s[:-1], ANY_SIZE)
            if s and self.chance(EMPTY):
                k = self.below(len(s))
                s = (*s[:k], 0, *s[k + 1 :])
            if np.prod(s, dtype=np.int64) <= self.limit:
                return s

    def pick(self, kinds: str = "f", rank: int = 0) -> Made:
        """A value of one of these kinds and at least that rank; recent ones more often, so that chains grow."""
        fits = [m for m in self.pool if m.dtype.kind in kinds and len(m.shape) >= rank]
        if not fits or self.chance(0.08):
            return self.source(kinds, self.shape(max(rank, self.one_of((1, 2, 3, 4)))))
        return fits[-1 - min(int(self.rng.exponential(2.5)), len(fits) - 1)] if self.chance(0.7) else self.one_of(fits)

    def dtype(self, kinds: str) -> DType:
        return BY_NAME[
            self.one_of(
                [d for d in DTYPES if BY_NAME[d].kind in kinds] or [{"u": "u8", "i": "i64"}.get(kinds[0], "f32")]
            )
        ]

    def dims(self, shape: Sequence[int]) -> tuple[Any, ...]:
        """Sizes with N where it stands for one."""
        if self.any is None:
            return tuple(shape)
        return tuple(unwrap(self.any * (d // ANY_SIZE)) if d and d % ANY_SIZE == 0 else d for d in shape)

    # --- inputs and constants -----------------------------------------------------------------------------------------

    def draw(self, dtype: DType, shape: tuple[int, ...], low: float = -2.0, high: float = 2.0) -> Array:
        a: Array
        if dtype.kind == "b":
            a = self.rng.integers(0, 2, shape)
        elif dtype.kind == "s":
            a = self.rng.choice(np.array(WORDS, object), shape)
        elif dtype.is_int:
            lo, hi = max(dtype.range[0], int(np.ceil(low))), min(dtype.range[1], int(np.floor(high)))
            a = self.rng.integers(min(lo, hi), max(lo, hi), shape, endpoint=True)
        else:
            a = self.rng.uniform(low, high, shape)
        return np.asarray(a).astype(dtype.numpy)

    def source(
        self, kinds: str, shape: tuple[int, ...], dtype: DType | None = None, low: float = -2.0, high: float = 2.0
    ) -> Made:
        """A new input or constant."""
        dtype = dtype or self.dtype(kinds)
        if dtype.is_int and (low, high) == (-2.0, 2.0):
            low, high = -9.0, 9.0
        if self.around is not None and (self.chance(0.3) or self.dims(shape) != shape):
            return self.capture(self.around.source(kinds, shape, dtype, low, high))
        a = self.draw(dtype, shape, low, high)
        if self.around is None and (self.chance(0.5) or self.dims(shape) != shape):
            v = self.graph.add_input(f"x{len(self.arrays)}", TensorType(dtype, self.dims(shape)))
            self.arrays.append(a)
        else:
            v = self.graph.constant(a, "w")
        m = Made(v, a.astype(np.float64) if dtype.is_float else a, a, 0.0)
        self.pool.append(m)
        return m

    def like(self, m: Made, shape: tuple[int, ...], low: float = -2.0, high: float = 2.0) -> Made:
        """A value of m's dtype and this shape: one that is there, if it is in range, or a new one."""
        fits = [x for x in self.pool if x.dtype is m.dtype and x.shape == shape and within(x, low, high)]
        return self.one_of(fits) if fits and self.chance(0.6) else self.source(m.dtype.kind, shape, m.dtype, low, high)

    # --- nodes --------------------------------------------------------------------------------------------------------

    def add(self, name: str, *operands: Made | None, **attrs: Any) -> Made | None:
        """A node, unless it does not fit or would be too sensitive."""
        values = [None if m is None else m.value for m in operands]
        dims = dict(self.graph.dims)
        try:
            out = self.b.op(name, *values, **attrs)
        except ShapeError:
            self.graph.dims = dims
            return None
        node: Node = (out[0] if isinstance(out, tuple) else out).node
        try:
            made = self.evaluate(node, operands)
        except (
            DnncError,
            IndexError,
            ValueError,
        ):  # a size that this node's operands do not tell, an index that is none, a border of nothing
            made = None
        if made is None:
            self.graph.erase(node)
            self.graph.dims = dims
            return None
        self.pool += made
        return made[0]

    def evaluate(self, node: Node, operands: Sequence[Made | None]) -> list[Made] | None:
        if any(isinstance(v.type.size, int) and v.type.size > self.limit for v in node.outputs):
            return None
        given = [m for m in operands if m is not None]
        exact = _interpret(node, [m.exact for m in given], "float64")
        if any(a.size > self.limit for a in exact):
            return None
        rounded = _interpret(node, [m.rounded for m in given], "as-is")
        errors = [_distance(r, e) for r, e in zip(rounded, exact)]
        for _ in range(MOVES if any(m.error for m in given) else 0):
            moved = _interpret(node, [self.moved(m) for m in given], "float64")
            errors = [max(d, _distance(x, e) / MOVE) for d, x, e in zip(errors, moved, exact)]
        made = []
        for v, e, r, d in zip(node.outputs, exact, rounded, errors):
            if v.type.dtype.kind == "s":
                made.append(Made(v, e, r, 0.0))
                continue
            scale = float(np.abs(e.astype(np.float64)).max(initial=0.0))
            if not np.isfinite(e.astype(np.float64)).all() or (
                v.type.dtype.is_float and scale > MAX_NUMBER.get(v.type.dtype.name, 1e5)
            ):
                return None
            if d > (0.01 * scale if v.type.dtype.is_float and v.type.dtype.bits >= 16 else 0.0):
                return None
            made.append(Made(v, e, r, d))
        return made

    def moved(self, m: Made) -> Array:
        return m.exact + self.rng.uniform(-1, 1, m.shape) * m.error * MOVE if m.error and m.dtype.is_float else m.exact

    def into(self, m: Made | None, low: float, high: float) -> Made | None:
        """A float value brought into a range."""
        if m is None or within(m, low, high):
            return m
        if self.chance(0.5):
            return self.add("clip", m, low=low, high=high)
        s = self.add("sigmoid", m)
        s = s and self.add("mul", s, self.number(m.dtype, high - low))
        return s and self.add("add", s, self.number(m.dtype, low))

    def number(self, dtype: DType, x: float) -> Made:
        a = np.asarray(x).astype(dtype.numpy)
        return Made(self.graph.constant(a, "k"), a.astype(np.float64) if dtype.is_float else a, a, 0.0)

    # --- the whole ----------------------------------------------------------------------------------------------------

    def make(self, nodes: int, turn: Callable[[], Any]) -> tuple[Graph, list[Array]]:
        for _ in range(1 + self.below(3)):
            self.source("f", self.shape(self.one_of((1, 2, 3, 4))))
        focus = [self.one_of(self.recipes) for _ in range(3)]  # each graph has its habits
        turn()
        for _ in range(nodes * 4):
            if len(self.graph) >= nodes:
                break
            recipe: Callable[[Generator], Any] = self.one_of(focus) if self.chance(0.5) else self.one_of(self.recipes)
            recipe(self)
        self.choose_outputs()
        return self.graph, self.arrays

    def choose_outputs(self) -> None:
        made = [m.value for m in self.pool if m.value.node is not None]
        leaves = [v for v in made if not v.uses]
        outs = [v for v in leaves if self.chance(0.8)] + [v for v in made if self.chance(0.12)]
        if self.chance(0.1):
            outs.append(self.one_of(self.pool).value)  # an input or a constant straight out
        if outs and self.chance(0.1):
            outs.append(self.one_of(outs))  # one value twice
        self.graph.outputs = list(outs if len(set(outs)) < len(outs) and self.chance(0.3) else dict.fromkeys(outs)) or [
            self.pool[-1].value
        ]


def within(m: Made, low: float, high: float) -> bool:
    if m.dtype.kind == "s":
        return True
    a = m.exact.astype(np.float64)
    return bool(a.size == 0 or (a.min() >= low and a.max() <= high))


def _interpret(node: Node, arrays: Sequence[Array], precision: Any) -> list[Array]:
    """The outputs of one node on these operands."""
    g = Graph("one")
    values: list[Value | None] = []
    for v in node.inputs:
        values.append(None if v is None else g.add_input(f"x{len(g.inputs)}", v.type))
    n = g.append(Node(node.op, values, node.attrs, [o.type for o in node.outputs]))
    g.outputs = list(n.outputs)
    return run(g, list(arrays), precision=precision)


def _distance(a: Array, b: Array) -> float:
    if a.shape != b.shape:
        return np.inf
    if a.size == 0 or a.dtype.kind in "OUST":
        return 0.0 if np.array_equal(a, b) else np.inf
    with np.errstate(all="ignore"):
        d = np.abs(a.astype(np.float64) - b.astype(np.float64)).max()
    return float(d) if np.isfinite(d) else np.inf
