"""Random graphs against the interpreter: `PYTHONPATH=tests python -m support.fuzz --seeds 0:200[:3] [--nodes 12]
[--target llvm] [--gradients | --quantized]`.

Every seed is a graph with inputs (random_graphs.py). It is compiled at the highest optimization level for one and for
two threads, at each other level for one or two, and once in another way that goes with the seed (numerics, an older
CPU, the interpreter as target), run, and compared with the float64 interpreter. A graph that fails is made small by
dropping nodes while it still fails, and printed as text. Seeds run in child processes, so a crash costs one seed and is
reported like a wrong number.

`--gradients`: graphs with loops and branches, whose gradients are compared with differences, see random_gradients.py;
`--compile-every 10` compiles the gradients of every tenth seed only.

`--quantized`: quantized models, see random_quantized.py; `--nodes` counts layers. Each is compiled at the highest
level and in the other way of its seed.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from onnx import helper

from dnnc.ir.dtype import f32, from_numpy
from dnnc.ir.errors import DnncError
from dnnc.ir.expr import Var, const, free
from dnnc.ir.graph import Graph, Node, Value
from dnnc.ir.graph.interp import Run, run
from dnnc.ir.op import Trait
from dnnc.ir.shapes import Bindings, resolve
from dnnc.tools.accuracy import first_difference
from dnnc.tools.shrink import Failure, shrink
from support import random_gradients, random_graphs, random_quantized
from support.random_graphs import random_graph

Array = np.ndarray[Any, Any]
LEVELS = (0, 1, 3)
OTHER_SIZES = (1, 2, 16, 19)
OTHER_WAYS: tuple[dict[str, Any], ...] = (
    {"numerics": "strict", "threads": 2},
    {"numerics": "fast", "threads": 2},
    {"target": "llvm -mcpu=haswell", "threads": 2},
    {"target": "reference"},
    {"numerics": "strict", "opt_level": 1, "threads": 1},
    {"target": "llvm -mcpu=x86-64", "threads": 1},
    {"target": "llvm -mcpu=haswell", "numerics": "strict", "opt_level": 0, "threads": 1},
)
SPECIAL = (np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40)  # the denormal last
NOISE_DRAWS = 6  # runs of the reference with random last bits
NOISE_BOUND = 64.0  # times the largest difference among them
PATIENCE = 300.0  # seconds that a seed may take
WAITS = 300  # that they are counted in


def settings(
    target: str = "llvm", levels: Sequence[int] = LEVELS, threads: Sequence[int] = (1, 2), seed: int | None = None
) -> list[dict[str, Any]]:
    """The options under which a graph is compiled: all of them, or, with a seed, the ways of that seed, one of
    OTHER_WAYS among them.
    """
    if seed is None:
        return [{"target": target, "opt_level": level, "threads": t} for level in levels for t in threads]
    turns = [(level, threads[(seed // len(OTHER_WAYS) + k) % len(threads)]) for k, level in enumerate(levels[:-1])]
    turns += [(levels[-1], t) for t in threads]
    usual = [{"target": target, "opt_level": level, "threads": t} for level, t in turns]
    return [*usual, {"target": target, **OTHER_WAYS[seed % len(OTHER_WAYS)]}]


def check(
    graph: Graph, inputs: Sequence[Array], options: dict[str, Any], cache: Any, noisy: bool = False
) -> str | None:
    """What goes wrong when a graph is compiled and run, or None.

    `noisy`: the graph computes in float64 as the reference does, and its results are sums that cancel; what the
    reference's own rounding explains is right, too.
    """
    from dnnc.driver import compile as compile_model

    try:
        f = compile_model(
            graph, cache=cache, strict_compile=True, dims={v.name: (v.lo, v.hi) for v in input_dims(graph)}, **options
        )
        numerics, level = options.get("numerics", "standard"), options.get("opt_level", 3)
        tiled = numerics != "strict" and level > 1 and options.get("target") != "reference"
        for arrays in [list(inputs), *variations(graph, inputs, numerics != "fast", tiled)]:
            got = f(*arrays)
            wrong = first_difference(
                graph, arrays, [got] if len(graph.outputs) == 1 else list(got), options.get("precision")
            )
            if wrong is not None and not (noisy and _within_noise(graph, arrays, got)):
                sizes = ", ".join(f"{v.name} {list(a.shape)}" for v, a in zip(graph.inputs, arrays))
                return f"wrong result: output {graph.outputs[wrong[0]].name}, {wrong[1]}; inputs {sizes}"
    except DnncError as e:
        return f"{type(e).__name__}: {e}"
    except Exception as e:  # whatever escapes is the compiler's mistake
        return f"escaped {type(e).__name__}: {e}"
    return None


def _within_noise(graph: Graph, arrays: Sequence[Array], got: Any) -> bool:
    """Are results as near to the reference as its own results with other last bits of all numbers on the way?

    Random rounding estimates the rounding of sums that cancel (Vignes, "A stochastic arithmetic for reliable scientific
    computation", 1993). Errors count beside the largest element of a result.
    """
    want = run(graph, arrays)
    with np.errstate(all="ignore"):
        others = [_Rounded(k).graph(graph, arrays, {}) for k in range(NOISE_DRAWS)]
    for k, (a, b) in enumerate(zip([got] if len(graph.outputs) == 1 else got, want, strict=True)):
        draws = [o[k] for o in others]
        finite = np.isfinite(b) & np.logical_and.reduce([np.isfinite(o) for o in draws])
        if b.dtype.kind != "f" or not np.array_equal(np.isfinite(a) & finite, finite):
            if not np.array_equal(a, b, equal_nan=b.dtype.kind == "f"):
                return False
            continue
        if not finite.any():
            continue
        exact = b[finite]
        noise = max(np.abs(o[finite] - exact).max() for o in draws) + np.finfo(b.dtype).eps * np.abs(exact).max()
        if np.abs(a[finite] - exact).max() > NOISE_BOUND * noise:
            return False
    return True


class _Rounded(Run):
    """The interpreter with the last bits of each float that a node computes changed at random."""

    def __init__(self, seed: int) -> None:
        super().__init__("as-is")
        self.rng = np.random.default_rng(seed)

    def node(self, n: Node, operands: Sequence[Array | None], bound: Bindings) -> list[Array]:
        results = super().node(n, operands, bound)
        if Trait.MOVEMENT in n.op.traits:
            return results
        return [self.changed(a) if a.dtype.kind == "f" else a for a in results]

    def changed(self, a: Array) -> Array:
        steps = self.rng.integers(-1, 2, a.shape) * np.finfo(a.dtype).eps
        return np.asarray(a * (1 + steps), a.dtype)


def input_dims(graph: Graph) -> list[Var]:
    """The symbolic dims that the shapes of the inputs tell; others come from the data."""
    return list(
        dict.fromkeys(
            v for x in graph.inputs for d in x.type.shape for v in sorted(free(const(d)), key=lambda v: v.name)
        )
    )


def variations(
    graph: Graph, inputs: Sequence[Array], denormals: bool = True, tiled: bool = False
) -> Iterator[list[Array]]:
    """The inputs with special numbers among them (tiny ones where they are not flushed); and at other sizes of a
    symbolic dim, where the graph means something there. `tiled`: convolutions may be computed by Winograd's algorithm.

    Graphs that read bits of floats get no special numbers: which zero a maximum of two zeros is, is not told.
    """
    kept, candidates = _kept_finite(graph, tiled), []
    if not any(n.op.name == "bit_cast" for n in graph.nodes()):
        candidates = [[a if v in kept else _special(a, v.name, denormals) for v, a in zip(graph.inputs, inputs)]]
    for n in input_dims(graph)[:1]:
        candidates += [[_resized(a, v.type.shape, n, k) for v, a in zip(graph.inputs, inputs)] for k in OTHER_SIZES]
    for arrays in candidates:
        try:
            run(graph, arrays)
        except (DnncError, IndexError, ValueError):  # an index or a slice that this size does not have
            continue
        yield arrays


def _kept_finite(graph: Graph, tiled: bool) -> set[Value]:
    """What flows into weights of convolutions: whether padding is a product with 0 or a shorter sum shows in 0 * inf
    alone. The transposed one pads its weights, too. And what flows into images whose tiles Winograd's algorithm
    transforms, where one NaN spreads over its tile, or whose groups of channels share a panel. All that flows into a
    body in which there are such values.
    """
    found: set[Value] = set()
    for n in graph.nodes(reverse=True):
        within = (
            n.op.name == "conv_transpose"
            or (tiled and _by_tiles(n))
            or any(_kept_finite(body, tiled) for body in n.subgraphs())
        )
        if within or any(v in found for v in n.outputs):
            found.update(v for v in n.inputs if v is not None)
        elif n.op.name == "conv":
            found.update(v for v in n.inputs[1:2] if v is not None)
    return found


def _by_tiles(n: Node) -> bool:
    """May it be computed by Winograd's algorithm, or by products with zeros for the inputs of other groups?"""
    w = n.inputs[1] if n.op.name == "conv" else None
    return w is not None and (n.attrs["group"] > 1 or (w.type.dtype is f32 and w.type.shape[2:] == (3, 3)))


def _special(a: Array, name: str, denormals: bool) -> Array:
    """One element in ten (one at least) infinite, NaN, a zero of either sign, or tiny: the same ones in a graph that
    was made smaller.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if from_numpy(a.dtype).kind != "f" or not a.size:
        return a
    out = a.copy().reshape(-1)
    at = rng.integers(0, a.size, max(1, a.size // 10))
    with np.errstate(all="ignore"):
        out[at] = rng.choice(SPECIAL if denormals else SPECIAL[:-1], len(at)).astype(a.dtype)
    return out.reshape(a.shape)


def _resized(a: Array, shape: Sequence[Any], n: Var, size: int) -> Array:
    """The array over again, or cut, along the axes whose sizes contain n."""
    for axis, d in enumerate(shape):
        k = resolve(d, {n: const(size)})
        if k != a.shape[axis]:
            a = np.take(a, np.arange(k) % a.shape[axis], axis)
    return np.ascontiguousarray(a)


def check_seed(seed: int, nodes: int, tries: Sequence[dict[str, Any]], cache: Any) -> Failure | None:
    """The first failure of a seed's graph, made small."""
    graph, inputs = random_graph(seed, nodes)
    for options in tries:
        message = check(graph, inputs, options, cache)
        if message is not None:
            return shrink(Failure(graph, inputs, options, message), lambda g, x, o=options: check(g, x, o, cache))  # type: ignore[misc]
    return None


def check_gradient_seed(seed: int, nodes: int, target: str, every: int, cache: Any) -> Failure | None:
    """The first failure of a seed's gradient, made small. Of every so many seeds one is compiled."""
    turn = seed // every
    options = {"target": target, "opt_level": LEVELS[turn % len(LEVELS)], "threads": 1 + turn % 2}
    compiled = None if seed % every else lambda g, x: check(g, x, options, cache, noisy=True)
    return random_gradients.check_seed(seed, nodes, compiled)


def check_quantized_seed(seed: int, layers: int, target: str, cache: Any) -> Failure | None:
    """The first failure of a seed's quantized model, made small."""
    from dnnc.frontends.onnx import read

    model, inputs, exact = random_quantized.random_quantized(seed, layers)
    graph = read(model)
    other = {"target": target, **OTHER_WAYS[seed % len(OTHER_WAYS)]}
    for options in ({"target": target, "threads": 1 + seed // len(OTHER_WAYS) % 2}, other):

        def wrong(g: Graph, arrays: Sequence[Array], options: dict[str, Any] = options) -> str | None:
            return check_quantized(g, arrays, options, cache, exact)

        message = wrong(graph, inputs)
        if message is not None:
            return shrink(Failure(graph, inputs, options, message), wrong)
    return None


def check_quantized(
    graph: Graph, inputs: Sequence[Array], options: dict[str, Any], cache: Any, exact: bool
) -> str | None:
    """What goes wrong when a quantized graph is compiled and run, or None."""
    from dnnc.driver import compile as compile_model

    try:
        dims = {v.name: (v.lo, random_graphs.MAX_ANY) for v in input_dims(graph)}
        got = compile_model(graph, cache=cache, strict_compile=True, dims=dims, **options)(*inputs)
        return random_quantized.first_wrong(graph, inputs, [got] if len(graph.outputs) == 1 else list(got), exact)
    except DnncError as e:
        return f"{type(e).__name__}: {e}"
    except Exception as e:  # whatever escapes is the compiler's mistake
        return f"escaped {type(e).__name__}: {e}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m support.fuzz", description="Compile random graphs and compare with the interpreter."
    )
    parser.add_argument("--seeds", default="0:100", help="first:end or first:end:step")
    parser.add_argument("--nodes", type=int, default=12)
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--gradients", action="store_true", help="check gradients of graphs with loops and branches")
    parser.add_argument("--quantized", action="store_true", help="check quantized models")
    parser.add_argument("--compile-every", type=int, default=1, help="of so many gradients one is compiled, too")
    parser.add_argument("--here", action="store_true", help="in this process: a crash ends the run")
    args = parser.parse_args(argv)
    first, *more = map(int, args.seeds.split(":"))
    todo, failed = range(first, *(more or [first + 1])), 0
    with tempfile.TemporaryDirectory() as cache:
        while todo:
            done, bad = (_here if args.here else _in_child)(todo, args, cache)
            failed += bad
            todo = todo[done:]
    print(f"{failed} failures")
    return int(failed > 0)


def _here(seeds: range, args: argparse.Namespace, cache: str) -> tuple[int, int]:
    import dnnc.driver  # noqa: F401  # with all it needs, so that it is frozen

    gc.collect()
    gc.freeze()  # each program ends with a full collection, which shall not go through the compiler's own objects
    failed = 0
    for seed in seeds:
        print(f"seed {seed}", flush=True)
        if args.gradients:
            failure = check_gradient_seed(seed, args.nodes, args.target, args.compile_every, cache)
        elif args.quantized:
            failure = check_quantized_seed(seed, args.nodes, args.target, cache)
        else:
            failure = check_seed(seed, args.nodes, settings(args.target, seed=seed), cache)
        if failure is not None:
            print(f"FAILED seed {seed}: {failure}", flush=True)
            failed += 1
    if args.gradients:
        print("COUNTS " + ", ".join(f"{k}: {n}" for k, n in sorted(random_gradients.counts.items())), flush=True)
    return len(seeds), failed


def _in_child(seeds: range, args: argparse.Namespace, cache: str) -> tuple[int, int]:
    """Run seeds until the child ends: (seeds that are done, failures)."""
    words = [
        "--here",
        "--seeds",
        f"{seeds.start}:{seeds.stop}:{seeds.step}",
        "--nodes",
        str(args.nodes),
        "--target",
        args.target,
        "--compile-every",
        str(args.compile_every),
        *(["--gradients"] if args.gradients else []),
        *(["--quantized"] if args.quantized else []),
    ]
    child = subprocess.Popen([sys.executable, "-m", "support.fuzz", *words], stdout=subprocess.PIPE, text=True)
    started, failed, lines = 0, 0, []
    assert child.stdout is not None
    watch = Watch(child)
    for line in child.stdout:
        watch.heard()
        started += bool(line.startswith("seed "))
        if line.startswith("seed ") and started % 100 == 0:
            print(f"{line.strip()}, {failed} failures", file=sys.stderr, flush=True)
        failed += bool(line.startswith("FAILED"))
        lines.append(line)
        if not line.startswith("seed ") and not line.endswith(" failures\n"):
            print(line, end="", flush=True)
    child.wait()
    watch.end()
    if child.returncode in (0, 1) and started == len(seeds):
        return started, failed
    at = seeds[max(started - 1, 0)]
    print(
        f"FAILED seed {at}: the process ended with status {child.returncode} (ended here after {PATIENCE:g} s where it "
        f"is -9)\n{_described(at, args)}",
        flush=True,
    )
    return max(started, 1), failed + 1


def _described(seed: int, args: argparse.Namespace) -> Any:
    if args.quantized:
        return helper.printable_graph(random_quantized.random_quantized(seed, args.nodes)[0].graph)
    return (random_gradients.random_differentiable if args.gradients else random_graph)(seed, args.nodes)[0]


class Watch(threading.Thread):
    """Ends a child that says nothing for too long. Short waits are counted: one at most passes while both processes
    are stopped.
    """

    def __init__(self, child: subprocess.Popen[str], seconds: float = PATIENCE) -> None:
        super().__init__(daemon=True)
        self._child, self._wait, self._left = child, seconds / WAITS, WAITS
        self._done = threading.Event()
        self.start()

    def heard(self) -> None:
        """The child has said something."""
        self._left = WAITS

    def end(self) -> None:
        """The child has ended."""
        self._done.set()

    def run(self) -> None:
        while self._left > 0:
            if self._done.wait(self._wait):
                return
            self._left -= 1
        self._child.kill()


if __name__ == "__main__":
    sys.exit(main())
