"""Compare a whole model's results with the float64 graph interpreter, by the bounds of tolerances.py.

A bound on rounding holds for a well-conditioned model only. Where it is exceeded, the interpreter runs once more in the
dtypes in which values are stored: what rounding alone does to that run, a right backend may do too. A model that stores
f16 or bf16, by itself or because `precision` asks for it, has the reduced contract; the reference is float64
throughout, with the model's own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dnnc.ir.dtype import DType, bf16, f16
from dnnc.ir.errors import AccuracyError, InputError
from dnnc.ir.expr import Expr, Var
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.interp import run
from dnnc.ir.op import Trait
from dnnc.ir.shapes import as_env, bind_dims, resolve
from dnnc.ir.tolerances import bound, reduced
from dnnc.ir.types import TensorType
from dnnc.passes.base import pass_context
from dnnc.passes.rewrites.precision import STORAGE, precision

Array = np.ndarray[Any, Any]
ROUNDINGS = 16.0  # errors of the interpreter in the model's dtypes that a backend may make: it rounds in another order
REDUCED_ROUNDINGS = 4.0  # the same where nearly all of them are those of storing, which both make
UNSTABLE = 0.02  # of the largest number: when rounding alone does that much, no comparison tells anything
REDUCED_UNSTABLE = 0.25  # the same where values have 8 or 11 bits


def check_model(
    call: Callable[..., Any],
    graph: Graph,
    dims: Mapping[Var, int],
    names: Sequence[str],
    asked: str | None = None,
    seed: int = 0,
) -> None:
    """Run `call` on random inputs and compare with the interpreter. AccuracyError names the first output that is off.

    Args:
        call: arrays in, one array or a tuple out.
        graph: what `call` should compute.
        dims: sizes of the graph's symbolic dims.
        names: of the outputs, for messages.
        asked: the precision that `call` was compiled for; None is the graph's.
    """
    for top in (2, 1):  # 1: an index into an axis of size 1 can only be 0
        inputs = random_inputs(graph, dims, np.random.default_rng(seed), top)
        try:
            got = call(*inputs)
            wrong = first_difference(graph, inputs, [got] if len(graph.outputs) == 1 else list(got), asked)
        except (InputError, IndexError):
            if top == 1:
                raise
            continue
        if wrong is not None:
            raise AccuracyError(
                f"output {names[wrong[0]]} of the compiled model is off: {wrong[1]}; inputs are random ones of seed "
                f"{seed}"
            )
        return


def random_inputs(graph: Graph, dims: Mapping[Var, int], rng: np.random.Generator, top: int = 2) -> list[Array]:
    """Floats uniform in [-1, 1), integers in [0, top), bools."""
    env: dict[Expr, Expr] = as_env(dims)
    return [_draw(rng, resolve(v.type, env), top) for v in graph.inputs]


def _draw(rng: np.random.Generator, t: TensorType, top: int) -> Array:
    shape = tuple(int(str(d)) for d in t.shape)
    if t.dtype.is_float:
        return np.asarray(rng.random(shape) * 2 - 1).astype(t.dtype.numpy)
    return np.asarray(rng.integers(0, 2 if t.dtype.kind == "b" else top, shape)).astype(t.dtype.numpy)


def first_difference(
    graph: Graph, inputs: Sequence[Array], got: Sequence[Array], asked: str | None = None
) -> tuple[int, str] | None:
    """Return the first output that rounding does not explain, and why; None if right. Unsure integers pass."""
    return next(differences(graph, inputs, got, run(graph, inputs, precision="float64"), asked), None)


def differences(
    graph: Graph, inputs: Sequence[Array], got: Sequence[Array], want: Sequence[Array], asked: str | None = None
) -> Iterator[tuple[int, str]]:
    """The outputs that rounding does not explain, and why; `want` is what the interpreter gives in float64."""
    k = longest_reduction(graph, bind_dims(graph, [a.shape for a in inputs]))
    storage = stored_type(graph, asked)
    form = "tf32" if asked == "tf32" else storage.name if storage is not None else ""
    roundings, unstable = (ROUNDINGS, UNSTABLE) if storage is None else (REDUCED_ROUNDINGS, REDUCED_UNSTABLE)
    rounded: list[Array] | None = None
    for i, (v, a, b) in enumerate(zip(graph.outputs, got, want)):
        t = v.type.dtype
        if a.shape != b.shape or a.dtype != t.numpy:
            yield i, f"{a.dtype}{list(a.shape)} where {t}{list(b.shape)} was expected"
            continue
        limit = bound(t, k, b)
        if form and t.is_float:
            limit = max(limit, reduced(form, depth(graph), b))
        if _worst(a, b)[0] <= limit:
            continue
        rounded = rounded if rounded is not None else run(as_stored(graph, asked), inputs)
        loss = _worst(rounded[i], b)[0]
        if loss > unstable * _scale(b) or (not t.is_float and (loss or storage is not None)):
            continue
        limit += roundings * loss
        error, at = _worst(a, b)
        if error > limit:
            yield (
                i,
                f"element {at} is {a[at]!r}, the float64 reference says {b[at]!r}; the bound for {storage or t} is "
                f"{limit:.3g}",
            )


def stored_type(graph: Graph, asked: str | None) -> DType | None:
    """The half type in which values are stored, the coarser one if there are both; None if there is none."""
    if asked is not None:
        return STORAGE[asked] if STORAGE[asked] in (f16, bf16) else None
    held = {v.type.dtype for v in (*graph.inputs, *graph.constants, *(o for n in graph.nodes() for o in n.outputs))}
    return next((t for t in (bf16, f16) if t in held), None)


def as_stored(graph: Graph, asked: str | None) -> Graph:
    """The graph with the types that values are stored in."""
    if asked is None:
        return graph
    graph = graph.copy()
    precision(graph, pass_context(precision=asked))
    return graph


def depth(graph: Graph) -> int:
    """Nodes on the longest path that compute something."""
    known: dict[Value, int] = {}
    for n in graph.nodes():
        reached = max((known.get(v, 0) for v in n.inputs if v is not None), default=0)
        known.update((v, reached + (Trait.MOVEMENT not in n.op.traits)) for v in n.outputs)
    return max(known.values(), default=0)


def _worst(a: Array, b: Array) -> tuple[float, tuple[int, ...]]:
    """The largest difference and where it is; NaN equals NaN, and infinities themselves."""
    if not a.size:
        return 0.0, ()
    if a.dtype.kind in "OUST":
        different = a != b
        at = tuple(int(i) for i in np.unravel_index(int(different.argmax()), a.shape))
        return float(different[at]), at
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        x, y = a.astype(wide), b.astype(wide)
        error = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
    error = np.where(np.isnan(error), np.inf, error)
    at = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
    return float(error[at]), at


def _scale(a: Array) -> float:
    finite = (
        np.abs(a[np.isfinite(a)])
        if a.dtype.kind in "fc"
        else np.abs(a.astype(np.float64))
        if a.dtype.kind in "iub"
        else np.zeros(0)
    )
    return float(finite.max(initial=0.0))


def longest_reduction(graph: Graph, dims: Mapping[Var, int]) -> int:
    """The most terms that any node sums."""
    env: dict[Expr, Expr] = as_env(dims)
    return max((_terms(n, env) for n in graph.nodes()), default=1)


def _terms(n: Node, env: Mapping[Expr, Expr]) -> int:
    if not n.op.traits & {Trait.CONTRACTION, Trait.REDUCTION, Trait.ACCUMULATES}:
        return 1
    read = [_elements(v.type, env) for v in n.inputs if v is not None]
    made = max(_elements(n.outputs[0].type, env), 1)
    if n.op.terms is not None:
        terms = n.op.terms(*(None if v is None else v.type for v in n.inputs), **n.attrs)
        return max(_elements(TensorType(n.outputs[0].type.dtype, (terms,)), env), 1)
    if Trait.CONTRACTION in n.op.traits:
        return max(read[1], 1)
    sizes = (_elements(TensorType(n.outputs[0].type.dtype, (d,)), env) for d in n.outputs[0].type.shape)
    return max(read[0] // made, *sizes, 1)


def _elements(t: TensorType, env: Mapping[Expr, Expr]) -> int:
    n = resolve(t, env).size
    return n if isinstance(n, int) else 1
