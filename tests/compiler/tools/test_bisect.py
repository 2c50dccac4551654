"""Planted bugs, each in one part of the compiler: the part is named, and a small graph shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dnnc.backends.llvm import kernel_code
from dnnc.backends.runtime import link
from dnnc.cli import main
from dnnc.ir.dtype import boolean, f32, i64
from dnnc.ir.errors import InternalError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.constant_text import save_constants
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.types import TensorType
from dnnc.options import CompileOptions
from dnnc.passes import pipelines
from dnnc.tools.bisect import bisect
from dnnc.tools.sample_graphs import graph_of

NET = """def net(x: f32[8, 16], *, w: f32[16, 24], b: f32[24], v: f32[24, 8]):
    h = relu(add(matmul(x, w), b))
    t = softmax(matmul(h, v))
    y = sub(t, 1.0)
    return y, h"""
OPTIONS = CompileOptions(cache=False, threads=2)


@pytest.fixture
def net() -> Graph:
    return graph_of(NET)


@pytest.fixture
def inputs() -> list[Any]:
    return [np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)]


def break_pass(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Graph, Any], bool]) -> None:
    """`change` in place of the pass of this name."""
    passes = tuple(replace(p, run=change) if p.name == name else p for p in pipelines.LEVELS[3])
    monkeypatch.setitem(pipelines.LEVELS, 3, passes)


def drop_relu(graph: Graph, ctx: Any) -> bool:
    for n in list(graph.nodes()):
        if n.op.name == "relu":
            assert n.inputs[0] is not None
            graph.replace_all_uses(n.outputs[0], n.inputs[0])
            return True
    return False


def break_kernels(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Machine code of another kernel than the one that was scheduled."""
    emit = kernel_code.emit_kernel

    def wrong(kernel: Any, *args: Any) -> str:
        return emit(parse_kernel(show_kernel(kernel).replace(old, new)), *args)

    monkeypatch.setattr(kernel_code, "emit_kernel", wrong)


def break_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that puts everything at the beginning of the arena."""
    right = link.Linker.calls

    def at_zero(place: Any) -> Any:
        return replace(place, offset=0) if place.space == "arena" else place

    def wrong(*args: Any) -> Any:
        return [
            replace(c, args=tuple(map(at_zero, c.args)), writes=tuple(map(at_zero, c.writes))) for c in right(*args)
        ]

    monkeypatch.setattr(link.Linker, "calls", wrong)


@pytest.mark.slow
def test_nothing_is_wrong(net: Graph, inputs: list[Any]) -> None:
    before = str(net)
    assert bisect(net, inputs, OPTIONS) is None
    assert str(net) == before


@pytest.mark.slow
def test_a_broken_pass(net: Graph, inputs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    break_pass(monkeypatch, "cse", drop_relu)
    found = bisect(net, inputs, OPTIONS)
    assert found is not None and (found.stage, found.culprit) == ("pass", "cse")
    assert "the float64 reference says" in found.message
    before, after = found.graph.split("# after cse\n")
    assert before.startswith("# before cse\n") and before.count(" = ") == 1 and "= relu(" in before  # one node is left
    assert after.rstrip().endswith("return v1") and not before.rstrip().endswith("return v1")


def test_a_pass_that_fails(net: Graph, inputs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(graph: Graph, ctx: Any) -> bool:
        if any(n.op.name == "sub" for n in graph.nodes()):
            raise InternalError("no subtraction today")
        return False

    break_pass(monkeypatch, "fold", fail)
    found = bisect(net, inputs, OPTIONS)
    assert found is not None and (found.stage, found.culprit) == ("compile", "InternalError")
    assert "pass fold: no subtraction today" in found.message
    assert "sub(" in found.graph and "matmul" not in found.graph


@pytest.mark.slow
def test_a_broken_kernel(net: Graph, inputs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    break_kernels(monkeypatch, "fmax(0.0, acc", "fmin(0.0, acc")
    found = bisect(net, inputs, OPTIONS)
    assert found is not None and found.stage == "kernel"
    assert found.culprit.startswith("kernel matmul_add_relu, schedule contraction(")
    assert "relu(" in found.graph and "softmax" not in found.graph
    assert "# x" in found.graph  # what its inputs are


@pytest.mark.slow
def test_a_broken_memory_plan(net: Graph, inputs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    deep = graph_of("""def net(x: f32[4, 8], *, w: f32[8, 8]):
    a = softmax(matmul(x, w))
    b = softmax(matmul(a, w))
    c = softmax(matmul(b, w))
    return add(add(matmul(c, w), a), b)""")
    break_memory(monkeypatch)
    found = bisect(deep, [inputs[0][:4, :8].copy()], OPTIONS)
    assert found is not None and found.stage == "memory", found
    assert found.culprit.startswith("call ")
    assert "matmul" in found.graph


def nested_loop(then: bool) -> Graph:
    """A loop of five steps; its body has a branch with `relu` in the branch that `then` says."""
    state, row, square = (TensorType(f32, s) for s in ((8, 16), (16,), (16, 16)))

    def branch(name: str, op: str) -> Graph:
        g = Graph(name)
        x = g.add_input("h", state)
        g.outputs = [Builder(g).op(op, x)]
        return g

    body = Graph("body")
    b = Builder(body)
    _, s, r, w, c = (
        body.add_input(n, t)
        for n, t in (
            ("k", TensorType(i64, ())),
            ("s", state),
            ("r", row),
            ("w", square),
            ("c", TensorType(boolean, ())),
        )
    )
    first, second = ("relu", "tanh") if then else ("tanh", "relu")
    h = b.op("cond", c, b.add(b.matmul(s, w), r), then=branch("yes", first), other=branch("no", second))
    body.outputs = [b.tanh(h), h]
    g = Graph("net")
    x, go, rows = (
        g.add_input("x", state),
        g.add_input("go", TensorType(boolean, ())),
        g.add_input("rows", TensorType(f32, (5, 16))),
    )
    weights = g.constant((np.random.default_rng(1).standard_normal((16, 16)) / 4).astype(np.float32))
    y, all_rows = Builder(g).op(
        "loop", None, None, x, rows, weights, go, body=body, carried=1, scanned=1, length=5, backward=(True, False)
    )
    g.outputs = [Builder(g).exp(y), all_rows]
    return g


@pytest.mark.slow
@pytest.mark.parametrize("then", [True, False])
def test_a_broken_kernel_in_the_branch_of_a_loop(
    then: bool, inputs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = nested_loop(then)
    arrays = [inputs[0], np.array(then), np.random.default_rng(2).standard_normal((5, 16)).astype(np.float32)]
    assert bisect(graph, arrays, OPTIONS) is None
    break_kernels(monkeypatch, "fmax(0.0, ", "fmin(0.0, ")
    found = bisect(graph, arrays, OPTIONS)
    assert found is not None and found.stage == "kernel", found
    assert found.culprit.startswith("kernel relu") and "relu(" in found.graph and "matmul" not in found.graph
    arrays[1] = np.array(not then)
    assert bisect(graph, arrays, OPTIONS) is None  # the branch with the wrong kernel is not taken


@pytest.mark.slow
def test_a_broken_kernel_in_a_loop(inputs: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = nested_loop(True)
    arrays = [inputs[0], np.array(True), np.random.default_rng(2).standard_normal((5, 16)).astype(np.float32)]
    break_kernels(monkeypatch, "+ x", "- x")  # of the addition in the body, which no one outside of it has
    found = bisect(graph, arrays, OPTIONS)
    assert found is not None and found.stage == "kernel" and "matmul_add" in found.culprit, found
    assert "add(" in found.graph


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(net: Graph, tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(str(net))
    save_constants(net, tmp_path / "net.npz")
    return str(tmp_path / "net.py")


def verify(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as e:
        main(["verify", *args, "--cache", "off", "--threads", "2"])
    out = capsys.readouterr()
    return int(e.value.code or 0), out.out, out.err


@pytest.mark.slow
def test_the_command_on_a_right_model(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = verify(capsys, path)
    assert code == 0 and "all outputs are right" in out
    code, out, _ = verify(capsys, path, "--json", "--bisect")
    data = json.loads(out)
    assert code == 0 and data["right"] and data["finding"] is None
    assert [(o["name"], o["shape"]) for o in data["outputs"]] == [("y", [8, 8]), ("h", [8, 24])]
    assert all(o["error"] < 1e-5 < o["scale"] for o in data["outputs"])


@pytest.mark.slow
def test_the_command_on_a_broken_pass(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_pass(monkeypatch, "cse", drop_relu)
    code, out, _ = verify(capsys, path)
    assert code == 1 and out.count("WRONG") == 3 and "--bisect finds" in out
    code, out, _ = verify(capsys, path, "--bisect")
    assert code == 1 and "The first pass that breaks it: cse" in out and "# after cse" in out
    code, out, _ = verify(capsys, path, "--bisect", "--json")
    data = json.loads(out)
    assert (
        code == 1 and not data["right"] and data["finding"]["stage"] == "pass" and data["finding"]["culprit"] == "cse"
    )
    assert all("the float64 reference says" in o["reason"] for o in data["outputs"])


@pytest.mark.slow
def test_the_command_on_a_broken_kernel(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_kernels(monkeypatch, "fmax(0.0, acc", "fmin(0.0, acc")
    code, _, err = verify(capsys, path)
    assert code == 1 and err.startswith("AccuracyError: kernel ")  # the kernel check
    code, out, _ = verify(capsys, path, "--bisect")
    assert code == 1 and "The first kernel that breaks it: kernel " in out


def test_the_command_on_a_compiler_that_gives_up(
    path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(graph: Graph, ctx: Any) -> bool:
        raise InternalError("not today")

    break_pass(monkeypatch, "fold", fail)
    code, _, err = verify(capsys, path)
    assert code == 3 and "pass fold: not today" in err
    code, out, _ = verify(capsys, path, "--bisect")
    assert code == 1 and "The first compile that breaks it: InternalError" in out


def test_the_command_on_a_model_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = verify(capsys, str(tmp_path / "none.onnx"))
    assert code == 1 and "there is no file" in err


@pytest.mark.slow
def test_a_broken_pass_in_a_model_that_runs_on_the_host_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = parse(
        "n: dim[0, 10]\ndef main(x: f32[10, 4], count: i64):\n"
        "    r = relu(sub(x, 1.0))\n    t: f32[n, 4] = truncate(r, count, size=n)\n    return exp(t), r"
    )
    inputs = [np.linspace(-2, 2, 40, dtype=np.float32).reshape(10, 4), np.array(7, np.int64)]
    assert bisect(graph, inputs, OPTIONS) is None
    break_pass(monkeypatch, "cse", drop_relu)
    found = bisect(graph, inputs, OPTIONS)
    assert found is not None and (found.stage, found.culprit) == ("pass", "cse")
    assert "= relu(" in found.graph
