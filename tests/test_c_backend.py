"""The example of a backend outside of dnnc: found by its entry point, it prints C99 and runs models."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import dnnc
from dnnc.backends import registry
from dnnc.ir.errors import AccuracyError, InputError, InternalError, TargetError
from dnnc.ir.graph.text import parse
from dnnc.onnx_backend import run_node
from support.cli import invoke
from support.onnx_suite import load_cases, run_case

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest depends on it there

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "c_backend"
MLP = """
def mlp(x: f32[4, 20], *, w: f32[20, 30], b: f32[30], v: f32[30, 10]):
    return softmax(matmul(tanh(add(matmul(x, w), b)), v), axis=1)
"""
# Operators of the suite whose cases the backend must pass: element-wise ones on floats, products and convolutions.
OPERATORS = (
    "abs acos acosh add asin asinh atan atanh ceil celu clip conv cos cosh div elu erf exp floor gelu hardsigmoid "
    "hardswish leakyrelu log matmul max mean min mish mul neg pow prelu reciprocal relu round selu sigmoid sign sin "
    "sinh softplus softsign sqrt sub sum tan tanh thresholdedrelu"
).split()
F, H, B = np.float32, np.float16, np.int8
NODES: list[tuple[str, dict[str, Any], tuple[tuple[Any, tuple[int, ...]], ...]]] = [  # op, attributes, inputs
    ("Conv", {"strides": [2, 2], "pads": [1, 1, 0, 1]}, ((F, (2, 3, 7, 6)), (F, (4, 3, 3, 3)), (F, (4,)))),
    ("MatMul", {}, ((F, (2, 3, 4)), (F, (2, 4, 5)))),
    ("Gelu", {"approximate": "tanh"}, ((F, (3, 40)),)),
    ("Mod", {}, ((B, (50,)), (B, (50,)))),
    ("Div", {}, ((B, (50,)), (B, (50,)))),
    ("Cast", {"to": onnx.TensorProto.FLOAT16}, ((F, (30,)),)),
    ("Cast", {"to": onnx.TensorProto.UINT8}, ((F, (30,)),)),
    ("Add", {}, ((H, (30,)), (H, (30,)))),
    ("ReduceMax", {"keepdims": 0}, ((F, (4, 5)),)),
]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The example, as `pip install` leaves it: a folder of modules, and one that names its entry points."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = tmp_path / "dnnc_c-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = [
        line
        for group, names in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in names.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(points))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLE))
    registry._registered.cache_clear()
    yield
    registry._registered.cache_clear()


def constants(rng: np.random.Generator, **shapes: tuple[int, ...]) -> dict[str, Any]:
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


@pytest.fixture
def mlp(rng: np.random.Generator) -> Any:
    return parse(MLP, constants(rng, w=(20, 30), b=(30,), v=(30, 10)))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.slow
def test_the_entry_point_is_found() -> None:
    assert "c" in registry.names()
    shown = invoke(["targets"]).output
    assert "c: available" in shown and "compiler" in shown


@pytest.mark.slow
def test_a_package_that_cannot_be_imported_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.BACKENDS, "broken", "no_such_package:Backend")
    assert "broken: not available" in invoke(["targets"]).output
    with pytest.raises(TargetError, match="its backend no_such_package:Backend cannot be loaded: No module named"):
        dnnc.compile(parse("def g(x: f32[2]):\n    return exp(x)\n"), target="broken")


@pytest.mark.slow
def test_a_compiler_that_is_missing_is_an_error(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TargetError, match=r"'no-cc' is not in PATH; install gcc or clang"):
        dnnc.compile(mlp, target="c -cc=no-cc", cache=False)
    with pytest.raises(TargetError, match="there is no option -mcpu; there is -cc=COMPILER"):
        dnnc.compile(mlp, target="c -mcpu=znver4", cache=False)
    from dnnc_c.compile import identity

    identity.cache_clear()
    monkeypatch.setenv("PATH", "")
    found = registry.availability("c")
    identity.cache_clear()
    assert not found["available"] and "install gcc" in found["reason"]


@pytest.mark.slow
def test_mlp(mlp: Any, rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 20), dtype=np.float32)
    f = dnnc.compile(mlp, target="c", cache=False, verify="model")
    np.testing.assert_allclose(f(x), dnnc.compile(mlp, target="reference")(x), rtol=1e-5, atol=1e-6)
    assert re.search(r"^// kernel 0.*\n(.*\n)+void k_\w+\(float \* restrict", f.source("c"))
    assert f.source("c", kernel="1").count("void k_") == 1


@pytest.mark.slow
def test_code_is_kept(mlp: Any, tmp_path: Path) -> None:
    first, second = (dnnc.compile(mlp, target="c", cache=tmp_path / "kernels") for _ in range(2))
    assert [f.report.programs[-1].compiled for f in (first, second)] == [len(first.report.programs[-1].kernels), 0]


@pytest.mark.slow
def test_digits() -> None:
    samples = np.load(ROOT / "examples" / "digits_samples.npz")
    f = dnnc.compile(ROOT / "examples" / "digits.onnx", target="c", cache=False)
    for count in (1, 12):  # a program for each
        assert (f(samples["images"][:count]).argmax(1) == samples["labels"][:count]).all()


@pytest.mark.slow
def test_parameters_are_bound_by_reference(mlp: Any, rng: np.random.Generator) -> None:
    held = {"w": rng.standard_normal((20, 30), dtype=np.float32)}
    f = dnnc.compile(mlp, target="c", cache=False, parameters=held)
    x, before = rng.standard_normal((4, 20), dtype=np.float32), held["w"].copy()
    y = f(x)
    f.refit({"w": -before})
    assert np.abs(f(x) - y).max() > 1e-3
    f.refit({"w": before})
    np.testing.assert_array_equal(f(x), y)


@pytest.mark.slow
def test_saved_models(mlp: Any, rng: np.random.Generator, tmp_path: Path) -> None:
    x = rng.standard_normal((4, 20), dtype=np.float32)
    f = dnnc.compile(mlp, target="c", cache=False)
    f.save(tmp_path / "mlp.dnnc")
    np.testing.assert_array_equal(dnnc.load(tmp_path / "mlp.dnnc", cache=False)(x), f(x))


def test_indices_outside_are_an_error() -> None:
    graph = parse("def rows(x: f32[5, 3], i: i64[2]):\n    return gather(x, i, axis=0)\n")
    f = dnnc.compile(graph, target="c", cache=False)
    x = np.arange(15, dtype=np.float32).reshape(5, 3)
    np.testing.assert_array_equal(f(x, np.array([4, 0])), x[[4, 0]])
    with pytest.raises(InputError, match="outside of its axis"):
        f(x, np.array([5, 0]))


# --- kernels that fail ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_cannot_be_printed_steps_down(mlp: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    from dnnc_c import backend, emit

    def emit_short(kernel: Any, symbol: str) -> str:
        text = emit.emit_kernel(kernel, symbol)
        if "tanh" in text and "fmaf(v" in text:
            raise InternalError("too long")
        return text

    monkeypatch.setattr(backend, "emit_kernel", emit_short)
    with pytest.raises(InternalError, match="too long"):
        dnnc.compile(mlp, target="c", cache=False)
    monkeypatch.delenv("DNNC_STRICT")
    x = rng.standard_normal((4, 20), dtype=np.float32)
    f = dnnc.compile(mlp, target="c", cache=False)
    np.testing.assert_allclose(f(x), dnnc.compile(mlp, target="reference")(x), rtol=1e-5, atol=1e-6)
    assert "too long" in str(f.report)


def test_wrong_code_is_refused(mlp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dnnc_c import backend, emit

    monkeypatch.setattr(backend, "emit_kernel", lambda k, symbol: emit.emit_kernel(k, symbol).replace(" / ", " * "))
    with pytest.raises(AccuracyError, match="the float64 reference says"):
        dnnc.compile(mlp, target="c", cache=False)


# --- nodes, control flow ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op,attrs,inputs", NODES, ids=lambda v: v if isinstance(v, str) else "")
def test_nodes(op: str, attrs: dict[str, Any], inputs: Any, rng: np.random.Generator) -> None:
    node = helper.make_node(op, [f"x{k}" for k in range(len(inputs))], ["y"], **attrs)
    arrays = [(rng.standard_normal(shape) * 4 + 0.5).astype(dtype) for dtype, shape in inputs]
    (got,), (want,) = (run_node(node, arrays, target=t, cache=False) for t in ("c", "reference"))
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_loops_and_branches(rng: np.random.Generator) -> None:
    def f(x: Any, n: Any) -> Any:
        x = dnnc.cond(n > 3, lambda v: v * 2, lambda v: v - 1, x)
        k, x = dnnc.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * 0.5), (n * 0, x))
        return dnnc.scan(lambda total, row: (total + row, total), x[0], x, reverse=True), k

    x = rng.standard_normal((5, 3), dtype=np.float32)
    shapes = [dnnc.Spec((5, 3), "float32"), dnnc.Spec((), "int64")]
    programs = [dnnc.compile(f, inputs=shapes, target=t, cache=False) for t in ("c", "reference")]
    for n in (0, 3, 4):
        for got, want in zip(*(p(x, np.int64(n)) for p in programs), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)
    assert "control" in programs[0].source("c")


# --- ONNX's conformance suite -----------------------------------------------------------------------------------------


def run(model: Any, inputs: dict[str, Any]) -> Sequence[Any]:
    out = dnnc.compile(model, target="c")(**inputs)
    return list(out) if isinstance(out, tuple) else [out]


def run_all(cases: Sequence[Any]) -> None:
    failed = {}
    for case in cases:
        try:
            run_case(run, case)
        except Exception as e:
            failed[case.name] = str(e)[:300]
    assert cases and not failed


@pytest.mark.family("long")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy in the suite's own references
@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_of_the_suite(operator: str) -> None:
    run_all(load_cases(["node"], rf"^test_(basic_)?{operator}(_|$)"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_other_cases() -> None:
    """Others for each seed, which is the day's by default."""
    cases = load_cases(["node", "simple", "pytorch-operator"], "")
    run_all(random.Random(os.environ["DNNC_TEST_SEED"]).sample(cases, 60))
