"""The fused graph as ONNX functions: what Netron opens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import dnnc
from dnnc.export.fused import FUSED, OPS, write_fused
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.graph.text import parse
from dnnc.tools.sample_graphs import graph_of
from support.random_graphs import random_graph

DIGITS = Path(__file__).resolve().parents[3] / "examples" / "digits.onnx"


def check(model: onnx.ModelProto) -> None:
    """Every node is a call of a function of the file or an op of dnnc, and reads what is there."""
    onnx.checker.check_model(model)
    functions = {f.name: f for f in model.functions}

    def graph(g: onnx.GraphProto) -> None:
        known = {v.name for v in (*g.input, *g.initializer)} | {""}
        for n in g.node:
            assert n.domain in (OPS, FUSED) and set(n.input) <= known
            if n.domain == FUSED:
                f = functions[n.op_type]
                assert len(f.input) == len(n.input) and len(f.output) == len(n.output)
                made = set(f.input) | {""}
                for m in f.node:
                    assert set(m.input) <= made
                    made |= set(m.output)
                assert set(f.output) <= made
            known |= set(n.output)
            for a in n.attribute:
                if a.HasField("g"):
                    graph(a.g)
        assert {v.name for v in g.output} <= known

    graph(model.graph)


def test_equal_kernels_share_a_function(tmp_path: Path) -> None:
    text = """def g(x: f32[4, 16], *, a: f32[16, 16], b: f32[16, 16]):
    return relu(matmul(relu(matmul(x, a)), b))"""
    model = write_fused(dnnc.compile(graph_of(text), cache=False), tmp_path / "m.onnx")
    check(onnx.load(tmp_path / "m.onnx"))
    calls = [n.op_type for n in model.graph.node if n.domain == FUSED]
    assert len(calls) == 2 and len(set(calls)) == 1
    assert [m.op_type for m in model.functions[0].node] == ["matmul", "relu"]
    facts = {p.key for p in model.graph.node[-1].metadata_props}
    assert {"kernel", "kind", "schedule"} <= facts


def test_a_model_of_a_file(tmp_path: Path) -> None:
    f = dnnc.compile(str(DIGITS), dims={"N": 1})
    check(write_fused(f, tmp_path / "m.onnx", "digits"))
    assert (tmp_path / "m.onnx").stat().st_size < 100_000, "large weights are inputs"


def test_host_steps_are_refused(tmp_path: Path) -> None:
    f = dnnc.compile(parse("n: dim[0, 8]\ndef g(x: f32[8]):\n    return nonzero(x, size=n)"), cache=False)
    f(np.ones(8, np.float32))
    with pytest.raises(UnsupportedError, match="steps on the host"):
        write_fused(f, tmp_path / "m.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_graphs(seed: int, tmp_path: Path) -> None:
    graph, arrays = random_graph(seed)
    f = dnnc.compile(graph, verify=False)
    f(*arrays)
    if not f.report.host:
        check(write_fused(f, tmp_path / "m.onnx"))
