"""Random graphs: some in every test run, and the tools that make them and make failures small."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dnnc.ir.encodings import Winograd
from dnnc.ir.graph import Graph, Node
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.verify import verify
from dnnc.ir.ops import OPS
from dnnc.ir.target import TargetFacts
from dnnc.passes.base import PassContext, PassManager
from dnnc.passes.pipelines import PASSES
from support.fuzz import OTHER_WAYS, Failure, Watch, check, check_seed, input_dims, settings, shrink, variations
from support.random_graphs import ANY_SIZE, Generator, random_graph
from support.random_patterns import PATTERNS
from support.random_recipes import NAMES

REACHED = {
    "_wide_conv": "winograd", "_siblings": "siblings", "_norm": "idioms", "_gelu": "idioms", "_softmax": "idioms",
    "_attention": "attention",
    "_scaled": "fold-batch-norm", "_growing": "place-concats", "_gated": "layout",
}  # fmt: skip
SEEDS, PARTS = 40, 14  # the fast tier has one part: three seeds, one with a symbolic dim and a pattern


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("kernels")


@pytest.mark.slow
@pytest.mark.family("random")
@pytest.mark.parametrize("part", range(PARTS))
def test_random_graphs(part: int, cache: Any) -> None:
    for seed in range(part, SEEDS, PARTS):
        failure = check_seed(seed, 12, settings(seed=seed), cache)
        assert failure is None, f"seed {seed}: {failure}"


@pytest.mark.slow
def test_graphs_are_valid_equal_for_equal_seeds_and_of_many_ops() -> None:
    ops: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    symbolic = outputs_in_the_middle = passed_through = dead = empty = by_data = 0
    for seed in range(200):
        g, arrays = random_graph(seed)
        verify(g)
        again, same = random_graph(seed)
        assert str(g) == str(again) and all(np.array_equal(a, b) for a, b in zip(arrays, same))
        for n in all_nodes(g):
            ops[n.op.name] += 1
            empty += any(0 in v.type.shape for v in n.outputs)
            dtypes.update(str(v.type.dtype) for v in n.outputs)
            dead += n.graph is g and not any(v.uses or v in g.outputs for v in n.outputs)
        symbolic += bool(input_dims(g))
        by_data += len(g.dims) > len(input_dims(g))
        outputs_in_the_middle += any(v.uses for v in g.outputs)
        passed_through += any(v.node is None for v in g.outputs)
        assert all(
            r.dtype.kind == "O" or np.isfinite(np.asarray(r, np.float64)).all() for r in run(g, arrays, "float64")
        )
    assert len(ops) > 110 and set(ops) <= set(OPS)
    assert len(dtypes) >= 12
    assert min(symbolic, outputs_in_the_middle, passed_through, dead, empty, by_data, ops["loop"], ops["cond"]) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("pattern", dict.fromkeys(PATTERNS), ids=lambda p: p.__name__.strip("_"))
def test_patterns_reach_their_passes(pattern: Any) -> None:
    reached: Counter[str] = Counter()
    for seed in range(12):
        g = Generator(np.random.default_rng(seed), large=seed == 3, symbolic=seed == 4)
        g.source("f", g.shape(3))
        pattern(g)
        g.choose_outputs()
        verify(g.graph)
        manager = PassManager()
        manager.run(g.graph, PASSES, PassContext(TargetFacts(fuses_attention=True)))
        reached.update(r.name for r in manager.records if r.changed)
        reached["winograd"] += any(isinstance(v.type.encoding, Winograd) for v in g.graph.constants)
    assert reached[REACHED[pattern.__name__]] >= 2, reached


def all_nodes(g: Graph) -> Iterator[Node]:
    """The nodes of a graph and of the bodies within it."""
    for n in g.nodes():
        yield n
        for body in n.subgraphs():
            yield from all_nodes(body)


@pytest.mark.slow
def test_every_op_has_its_turn() -> None:
    made = {n.op.name for seed in range(len(NAMES)) for n in all_nodes(random_graph(seed)[0])}
    assert len(made) > 0.95 * len(NAMES), sorted(set(NAMES) - made)


def test_a_seed_has_a_way_of_its_own() -> None:
    ways = [settings(seed=seed) for seed in range(len(OTHER_WAYS))]
    assert all(
        len(w) == 5 and w[2:4] == settings(levels=(3,)) and [o["opt_level"] for o in w[:2]] == [0, 1] for w in ways
    )
    assert {w[4].get("numerics", "") for w in ways} == {"", "strict", "fast"}
    assert {"reference", "llvm -mcpu=haswell"} < {w[4]["target"] for w in ways}
    later = settings(seed=len(OTHER_WAYS))  # the same other way, and the other numbers of threads
    assert later[2:] == ways[0][2:] and [o["threads"] for o in later[:2]] == [2, 1] != [
        o["threads"] for o in ways[0][:2]
    ] == [1, 2]


def test_sizes_and_special_numbers_are_varied() -> None:
    g = parse("N: dim[1, 24]\ndef g(x: f32[N, 4], i: i64[2*N]):\n    return relu(x), i")
    x = np.ones((ANY_SIZE, 4), np.float32)
    found = list(variations(g, [x, np.arange(2 * ANY_SIZE)]))
    assert [a.shape for a, _ in found] == [(13, 4), (1, 4), (2, 4), (16, 4), (19, 4)]
    assert [i.shape for _, i in found] == [(26,), (2,), (4,), (32,), (38,)]
    assert not np.isfinite(found[0][0]).all() and all(np.isfinite(a).all() for a, _ in found[1:])
    needs_three = parse("N: dim[1, 24]\ndef g(x: f32[1, 1, N], w: f32[1, 1, 3]):\n    return conv(x, w)")
    sizes = [
        x.shape[2] for x, _ in variations(needs_three, [np.ones((1, 1, ANY_SIZE), "f4"), np.ones((1, 1, 3), "f4")])
    ]
    assert sizes == [13, 16, 19]  # the window fits none below


def test_what_winograd_spreads_over_tiles_stays_finite() -> None:
    g = parse(
        "def g(x: f32[1, 4, 6, 6], y: f32[1, 4, 6, 6], *, w: f32[4, 4, 3, 3]):\n    return conv(tanh(x), w), tanh(y)",
        {"w": np.ones((4, 4, 3, 3), "f4")},
    )
    arrays = [np.ones((1, 4, 6, 6), np.float32)] * 2
    for tiled in (False, True):
        ((x, y),) = variations(g, arrays, tiled=tiled)
        assert np.isfinite(x).all() == tiled and not np.isfinite(y).all()


# --- what happens when something is wrong -----------------------------------------------------------------------------

WRONG = """def g(x: f32[4, 6], y: f32[4, 6]):
    a = relu(x)
    b = add(a, y)
    c = tanh(b)
    d = mul(c, a)
    e = reduce_sum(d, axes=(1,))
    return e, b, exp(y)"""


def test_check_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, cache: Any) -> None:
    g = parse(WRONG)
    x = [np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32) for _ in range(2)]
    options = settings(levels=(3,), threads=(1,))[0]
    assert check(g, x, options, cache) is None

    def compile_wrongly(graph: Graph, **options: Any) -> Any:
        return lambda *arrays: tuple(r + (r.ndim == 1) for r in run(graph, arrays))

    monkeypatch.setattr("dnnc.driver.compile", compile_wrongly)
    message = check(g, x, options, cache)
    assert (
        message is not None
        and message.startswith("wrong result: output e, element")
        and "inputs x [4, 6], y [4, 6]" in message
    )

    def refuse(graph: Graph, **options: Any) -> Any:
        raise KeyError("lost")

    monkeypatch.setattr("dnnc.driver.compile", refuse)
    assert check(g, x, options, cache) == "escaped KeyError: 'lost'"


def test_shrinking_keeps_what_fails() -> None:
    g = parse(WRONG)
    x = [np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32) for _ in range(2)]

    def fails(graph: Graph, arrays: Any) -> str | None:
        verify(graph)
        assert len(arrays) == len(graph.inputs)
        run(graph, arrays)
        bad = any(
            n.op.name == "mul" and any(v is not None and v.node and v.node.op.name == "tanh" for v in n.inputs)
            for n in graph.nodes()
        )
        return "wrong result: here" if bad else None

    small = shrink(Failure(g, x, {"opt_level": 3}, "wrong result: there"), fails)
    assert [n.op.name for n in small.graph.nodes()] == ["tanh", "mul"]
    assert len(small.graph.outputs) == 1 and len(small.inputs) == 2
    assert str(small).splitlines()[:2] == ["wrong result: here", "compiled with opt_level=3"]


def test_shrinking_does_not_change_the_kind_of_failure() -> None:
    g = parse(WRONG)
    x = [np.ones((4, 6), np.float32)] * 2
    small = shrink(
        Failure(g, x, {}, "wrong result: a"),
        lambda graph, arrays: "wrong result: b" if len(graph) > 3 else "InternalError: c",
    )
    assert len(small.graph) == 4 and small.message == "wrong result: b"


@pytest.mark.slow
def test_command_line() -> None:
    words = [sys.executable, "-m", "support.fuzz", "--seeds", "0:3", "--nodes", "4"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, "0 failures\n"), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="processes are stopped by signals")
def test_the_watch_ends_what_is_silent_and_does_not_count_while_it_stands_still() -> None:
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(words, text=True) as silent:
        Watch(silent, 0.05)
        assert silent.wait(10) != 0
    script = (
        "import subprocess, sys, time; from support.fuzz import Watch\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], text=True)\n"
        "Watch(child, 1.5); print(flush=True); time.sleep(0.5); print(child.poll(), flush=True); child.kill()"
    )
    with subprocess.Popen([sys.executable, "-c", script], text=True, stdout=subprocess.PIPE) as p:
        assert p.stdout is not None and p.stdout.readline()
        p.send_signal(signal.SIGSTOP)
        time.sleep(2)
        p.send_signal(signal.SIGCONT)
        assert p.stdout.readline() == "None\n"
