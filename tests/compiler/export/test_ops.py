"""Every op record: its samples exported, checked by onnx, read again, and run by ONNX Runtime, give the numbers of the
record's reference.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from dnnc.export import to_onnx
from dnnc.export.graph import ABSENT, CONTROL, INSIDE, TABLE
from dnnc.frontends.onnx import NeedsValues, from_onnx
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.op import Sample
from dnnc.ir.ops import OPS
from dnnc.ir.types import TensorType

Array = np.ndarray[Any, Any]
RUNTIME = 24  # an opset that ONNX Runtime runs
LATER = {"cumprod", "cumprod_backward", "bit_cast"}  # came with opset 26
BOUNDS = {8: 1e-9, 4: 2e-5, 2: 2e-2, 1: 0.3}  # by bytes of a float, against the largest result
READ_BY_CONTENTS = {
    "truncate",
    "view",
    "measure",
}  # by themselves these give ONNX operators sizes out of inputs, which the import wants to know
OTHERWISE = {
    "pow",
    "gelu",
    "dft",
    "to_string",
    "nonzero",
    "roi_align_max",
}  # ONNX Runtime: through other floats, other digits and points


def by_layouts(sample: Sample) -> bool:
    """Is it a node that the layout pass makes of another?"""
    return bool(dict(sample.attrs).get("panel"))


HERE = {n: op.samples for n, op in OPS.items() if n not in INSIDE | ABSENT | {"pack", "roi_columns"}}
CASES = [(n, k) for n, samples in HERE.items() for k, s in enumerate(samples) if not by_layouts(s)]


def drawn(t: TensorType, domain: tuple[float, float], rng: np.random.Generator) -> Array:
    shape = tuple(d if isinstance(d, int) else 7 for d in t.shape)
    if t.dtype.kind == "s":
        return np.array(rng.choice(["a", "b", "Cc", "d e"], shape), object)
    if t.dtype.is_float:
        return np.asarray(rng.uniform(*domain, shape)).astype(t.dtype.numpy)
    low, high = (0, 1) if t.dtype.kind == "b" else t.dtype.range
    low, high = max(int(np.ceil(domain[0])), low), min(int(domain[1]), high)
    return np.asarray(rng.integers(low, high, shape, endpoint=True)).astype(t.dtype.numpy)


def case(name: str, sample: Sample) -> tuple[Graph, list[Array]]:
    g = Graph(name)
    inputs = [None if t is None else g.add_input(f"x{k}", t) for k, t in enumerate(sample.inputs)]
    made = Builder(g).op(OPS[name], *inputs, **dict(sample.attrs))
    g.outputs = list(made) if isinstance(made, tuple) else [made]
    rng = np.random.default_rng(0)
    return g, [drawn(t, sample.domain, rng) for t in sample.inputs if t is not None]


def assert_same(got: Any, want: list[Array], g: Graph) -> None:
    for a, w, v in zip(got, want, g.outputs, strict=True):
        assert a.shape == w.shape
        if not v.type.dtype.is_float:
            assert (a == w).all()
            continue
        x, y = a.astype(np.float64), w.astype(np.float64)
        scale = max(1.0, np.abs(y[np.isfinite(y)]).max(initial=0))
        assert np.allclose(x, y, rtol=0, atol=BOUNDS[w.dtype.itemsize] * scale, equal_nan=True)


@pytest.mark.family("samples")
@pytest.mark.parametrize(("name", "number"), CASES, ids=[f"{n}-{k}" for n, k in CASES])
def test_reads_back(name: str, number: int) -> None:
    g, arrays = case(name, OPS[name].samples[number])
    model = to_onnx(g, opset=RUNTIME if name not in LATER else None)
    assert [o.name for o in model.graph.output] == [v.name for v in g.outputs]
    if name in READ_BY_CONTENTS:
        with pytest.raises(NeedsValues):
            from_onnx(model)
        return
    if name == "decode_image":
        assert [n.op_type for n in model.graph.node] == ["ImageDecoder"]
        return
    assert_same(run(from_onnx(model), arrays), run(g, arrays), g)


def test_panels_are_refused() -> None:
    for s in filter(by_layouts, OPS["conv"].samples):
        with pytest.raises(UnsupportedError, match="a convolution by panels has no form in ONNX"):
            to_onnx(case("conv", s)[0])


def runtime_has(name: str, sample: Sample) -> bool:
    """Is the sample one that ONNX Runtime has kernels for? Half types and float64 are those that it often lacks."""
    if name in LATER | OTHERWISE:
        return False
    types = [*sample.inputs, *(v.type for v in case(name, sample)[0].outputs)]
    return all(t is None or t.dtype.name in ("f32", "i64", "bool") for t in types)


AT_RUN_TIME = [(n, k) for n, k in CASES if runtime_has(n, OPS[n].samples[k])]
LACKING = {
    "relu-3": "NOT_IMPLEMENTED", "global_lp_pool-0": "NOT_IMPLEMENTED", "global_lp_pool-2": "NOT_IMPLEMENTED",
    "global_lp_pool-3": "NOT_IMPLEMENTED",
    "pad-3": "exceeds", "pad-4": "axis length", "non_max_suppression-0": "threshold",
    "non_max_suppression-1": "threshold", "rounded_softmax-0": "NOT_IMPLEMENTED",
}  # fmt: skip


@pytest.mark.family("samples")
@pytest.mark.parametrize(("name", "number"), AT_RUN_TIME, ids=[f"{n}-{k}" for n, k in AT_RUN_TIME])
def test_runs_elsewhere(name: str, number: int) -> None:
    """ONNX Runtime gives our numbers, or says what it lacks."""
    g, arrays = case(name, OPS[name].samples[number])
    model = to_onnx(g, opset=RUNTIME).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4

    def got() -> Any:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return session.run(None, {v.name: a for v, a in zip(g.inputs, arrays)})

    lacking = LACKING.get(f"{name}-{number}")
    if lacking is not None:
        with pytest.raises(Exception, match=lacking):
            got()
        return
    assert_same(got(), run(g, arrays), g)


def test_every_op_is_known() -> None:
    """A new op record is exported, or it is said why not."""
    without = {n for n, op in OPS.items() if n not in TABLE and n not in CONTROL and op.decompose is None}
    assert without == INSIDE | ABSENT
    told = (Path(__file__).parents[3] / "docs/onnx.md").read_text().split("## Operators that cannot be exported")[1]
    assert without <= set(re.findall(r"\w+", told))


@pytest.mark.parametrize("name", sorted(INSIDE | ABSENT))
def test_others_are_refused(name: str) -> None:
    g, _ = case(name, OPS[name].samples[0])
    with pytest.raises(UnsupportedError, match=rf"^{name}.* cannot be exported: ONNX has no form of it"):
        to_onnx(g)
