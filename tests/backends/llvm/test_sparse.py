"""Products of sparse weights: kernels in the interpreter and natively against float64; the choice and its report."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels import TARGET

import dnnc
from dnnc.backends.check import subgraph, unpack
from dnnc.backends.llvm import kernel_code
from dnnc.backends.llvm.facts import facts
from dnnc.backends.llvm.features import parse_target
from dnnc.backends.llvm.templates import sparse, templates
from dnnc.backends.runtime.link import pack
from dnnc.ir.errors import ScheduleError, VerifyError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.ir.sparse import Pattern, Sparse
from dnnc.ir.target import TargetFacts
from dnnc.ir.tolerances import bound
from dnnc.passes.base import PassContext
from dnnc.passes.pipelines import compile_program
from dnnc.passes.rewrites import sparse as rules
from dnnc.passes.rewrites import sparse_windows

RNG = np.random.default_rng(0)
Array = Any


def pruned(*shape: int, density: float = 0.1) -> Array:
    w = np.where(RNG.random(shape) < density, RNG.standard_normal(shape), 0).astype(np.float32)
    w[:, 0] = 0
    w[1] = 0
    w[2] = 1
    return w


def conv(
    c: int, o: int, h: int, w: int, k: int = 1, n: int = 1, stride: int = 1, blocks: bool = True, dilation: int = 1
) -> Graph:
    """A convolution of an image that lies in blocks of channels, as another one left it, or in rows."""
    arrays = {"w": pruned(o, c, k, k), "b": RNG.standard_normal(o).astype(np.float32)}
    image = "x"
    if blocks:
        arrays["a"] = RNG.standard_normal((c, c, 1, 1)).astype(np.float32)
        image = "conv(x, a)"
    declared = ", ".join(f"{name}: f32[{', '.join(map(str, a.shape))}]" for name, a in arrays.items())
    text = f"""def g(x: f32[{n}, {c}, {h}, {w}], *, {declared}):
    y = relu(conv({image}, w, b, pads=({k // 2}, {k // 2}, {k // 2}, {k // 2}), strides=({stride}, {stride}),
        dilations=({dilation}, {dilation})))
    return y"""
    return parse(text, arrays)


def chain(width: int, tail: str, o: int = 40) -> Graph:
    """Sparse convolutions that leave each other vectors of pixels, behind a dense one, in front of rows."""
    sizes = {"a": (20, 20, 1, 1), "w": (o, 20, 1, 1), "v": (o, o, 1, 1), "z": (18, o, 1, 1)}
    arrays = {n: pruned(*shape) if n != "a" else RNG.standard_normal(shape) for n, shape in sizes.items()}
    arrays = {n: a.astype(np.float32) for n, a in arrays.items()} | {"b": RNG.standard_normal(o).astype(np.float32)}
    declared = ", ".join(f"{name}: f32[{', '.join(map(str, a.shape))}]" for name, a in arrays.items())
    text = f"""def g(x: f32[1, 20, 3, {width}], *, {declared}):
    p = relu(conv(conv(x, a), w, b))
    c = conv(p, v, b)
    q = {tail}
    y = conv(q, z)
    return y"""
    return parse(text, arrays)


def product(rows: int, k: int, columns: int, weights: Array | None = None) -> Graph:
    w = pruned(columns, k).T.copy() if weights is None else weights.astype(np.float32)
    text = f"""def g(x: f32[{rows}, {k}], *, w: f32[{k}, {columns}], b: f32[{columns}]):
    y = relu(add(matmul(x, w), b))
    return y"""
    return parse(text, {"w": w, "b": RNG.standard_normal(columns).astype(np.float32)})


def heads(*shape: int) -> Graph:
    """A product whose columns are several axes, of which the last one stays the last: heads of attention."""
    w = pruned(math.prod(shape[1:]), 40).T.copy()
    text = f"""def g(x: f32[{shape[0]}, 40], *, w: f32[40, {w.shape[1]}], b: f32[{w.shape[1]}]):
    y = transpose(reshape(add(matmul(x, w), b), shape={shape}), perm={(*range(1, len(shape) - 1), 0, len(shape) - 1)})
    return y"""
    return parse(text, {"w": w, "b": RNG.standard_normal(w.shape[1]).astype(np.float32)})


@pytest.fixture
def always(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are sparse wherever there is a kernel for them: as code, in a loop, or in blocks of rows."""
    for name in ("GAIN", "WINDOW_GAIN", "UNKNOWN_GAIN"):
        monkeypatch.setattr(rules, name, 0.0)
    for module in (rules, sparse_windows):
        monkeypatch.setattr(module, "code_cycles", lambda *_: 1e9 if request.param == "loop" else 1.0)
    blocks = request.param == "blocks"
    monkeypatch.setattr(rules, "block_cycles", lambda *_: 1e-6 if blocks else 1e12)
    if blocks:
        monkeypatch.setattr(rules, "ACROSS", 0.0)
    monkeypatch.setattr(rules, "filled", lambda *_: 0 if blocks else 1 << 40)


CASES = {
    "rows": lambda: conv(20, 24, 7, 7, blocks=False),
    "whole rows": lambda: conv(16, 16, 8, 14, blocks=False),
    "blocks": lambda: conv(20, 40, 9, 5),
    "window": lambda: conv(18, 17, 6, 7, k=3),
    "stride": lambda: conv(32, 16, 9, 9, stride=2, n=2),
    "strided window": lambda: conv(16, 16, 9, 8, k=3, stride=2),
    "wide window": lambda: conv(21, 20, 11, 6, k=5, n=2, stride=2),
    "dilated window": lambda: conv(16, 33, 7, 19, k=3, dilation=2),
    "window of several runs": lambda: conv(70, 26, 8, 5, k=3),
    "vectors of pixels": lambda: chain(16, "relu(add(c, p))"),
    "vectors past rows": lambda: chain(30, "mul(c, sigmoid(c))"),
    "short vectors": lambda: chain(14, "relu(c)", 52),
    "product": lambda: product(33, 40, 24),
    "odd product": lambda: product(17, 37, 21),
    "wide product": lambda: product(16, 900, 25),  # columns and values beyond what a displacement reaches
    "heads": lambda: heads(17, 3, 32),
    "heads of three products": lambda: heads(16, 3, 2, 32),
    "one row": lambda: product(1, 45, 24),
    "few rows": lambda: product(3, 40, 33),
    "rows of half a vector": lambda: product(8, 300, 117),  # and two runs of two groups, one of one
    "rows of less than a vector": lambda: product(12, 200, 96),
    "aligned rows": lambda: product(3, 64, 33),
    "few pixels": lambda: conv(32, 64, 2, 2),
    "few pixels in rows": lambda: conv(32, 64, 2, 2, blocks=False),
    "one element": lambda: product(16, 16, 16, np.eye(16, dtype=np.float32)[:, ::-1] * (np.arange(16) == 3)),
}

BLOCKED = ("blocks", "stride", "window", "strided window", "vectors past rows", "odd product", "aligned rows")
BLOCKED += ("few pixels in rows",)
FORMS = [(form, case) for form, cases in (("code", CASES), ("loop", CASES), ("blocks", BLOCKED)) for case in cases]


def compiled(g: Graph, target: Any = TARGET) -> Any:
    return compile_program(g, PassContext(facts(target, "standard")), templates(target))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("always", "cpu", "case"),
    [
        (form, cpu, case)
        for form, case in FORMS
        for cpu in ("skylake-avx512", "haswell", "x86-64")[: 1 if form == "code" else 3]
    ],
    indirect=["always"],
)
def test_the_kernel_means_the_product(always: None, cpu: str, case: str) -> None:
    g, target = CASES[case](), parse_target(f"llvm -mcpu={cpu}", 2)
    steps = [s for s in compiled(g, target).kernels if s.choice.template in ("sparse", "sparse_windows")]
    assert len(steps) == (3 if "vectors" in case else 1)
    for step in steps:
        (pattern,) = (e.pattern for v in step.params if isinstance(e := v.type.encoding, Sparse))
        assert (pattern.height > 1) == (rules.filled(*[None] * 3) == 0)
        agree(g, step)


@pytest.mark.slow
@pytest.mark.parametrize("always", ["code"], indirect=True)
def test_the_verifier_sees_what_windows_read(always: None) -> None:
    steps = compiled(CASES["window"](), parse_target("llvm -mcpu=skylake-avx512", 2)).kernels
    step = next(s for s in steps if s.choice.template == "sparse_windows")
    assert "24x1@0:16:" in step.text
    for taps, message in (("@-16:16:", "-16"), ("@0:100000:", "100000"), ("@0:8:16:", "has all taps")):
        with pytest.raises(VerifyError, match=message):
            verify_kernel(parse_kernel(step.text.replace("@0:16:", taps)))


def agree(g: Graph, step: Any) -> None:
    """A kernel's text is read again, and the interpreter computes with it what its nodes are."""
    assert show_kernel(parse_kernel(step.text)) == step.text
    inputs = {v: RNG.standard_normal([int(str(d)) for d in v.type.shape]).astype(np.float32) for v in step.params}
    inputs.update({v: g.constants[v] for v in step.params if v in g.constants})
    t = step.group.outputs[0].type
    arrays = {b.name: np.array(pack(inputs[v], v.type)) for v, b in zip(step.params, step.kernel.entry.buffers)}
    out = step.kernel.entry.buffers[step.outputs[0]].name
    arrays[out][...] = np.nan
    run_kernel(step.kernel, arrays)
    names = [v for v in step.params if v not in step.group.outputs]
    (want,) = run(subgraph(step, names, {}, step.group.outputs[0]), [inputs[v] for v in names], "float64")
    got = unpack(arrays[out], t, tuple(int(str(d)) for d in t.shape), step)
    assert np.abs(got - want).max() <= bound(t.dtype, 300, want)


@pytest.mark.slow
@pytest.mark.parametrize(("always", "case"), FORMS, indirect=["always"])
def test_native_code_agrees(always: None, case: str) -> None:
    g = CASES[case]()
    x = RNG.standard_normal([int(str(d)) for d in g.inputs[0].type.shape]).astype(np.float32)
    (want,) = run(g.copy(), [x], "float64")
    f = dnnc.compile(g, threads=2, cache=False)
    assert ("sparse(" in str(f.report) or "sparse_windows(" in str(f.report)) and not f.report.steps_down
    assert np.abs(f(x) - want).max() <= bound(g.outputs[0].type.dtype, 300, want)


def test_the_report_says_what_is_sparse_and_why_not() -> None:
    half = RNG.permuted(np.arange(16 * 64) < 600).astype(np.float32)  # too many on every machine
    w = {"w": pruned(64, 64, 1, 1), "v": half.reshape(16, 64, 1, 1)}
    g = parse(
        """def g(x: f32[1, 64, 28, 28], *, w: f32[64, 64, 1, 1], v: f32[16, 64, 1, 1]):
    y = conv(conv(x, w), v)
    return y""",
        w,
    )
    report = str(dnnc.compile(g.copy(), threads=1, cache=False).report)
    assert "sparse, " in report and "times the speed is expected of a sparse kernel" in report
    for numerics, some in (("standard", True), ("strict", False)):
        made = compile_program(g.copy(), PassContext(TargetFacts(), numerics), templates(TARGET, numerics == "strict"))
        assert any(isinstance(v.type.encoding, Sparse) for s in made.kernels for v in s.params) == some


@pytest.mark.slow
@pytest.mark.parametrize("always", ["code"], indirect=True)
def test_a_smaller_group_rather_than_all_zeros(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DNNC_STRICT")
    apply, g = sparse.apply, heads(17, 3, 32)

    def fails(problem: Any, *more: Any) -> Any:
        if "transpose" in problem.kernel.name:
            raise ScheduleError("planted")
        return apply(problem, *more)

    monkeypatch.setattr(sparse, "apply", fails)
    f = dnnc.compile(g.copy(), cache=False)
    x = RNG.standard_normal((17, 40)).astype(np.float32)
    np.testing.assert_allclose(f(x), run(g, [x], precision="float64")[0], rtol=1e-4, atol=1e-4)
    choices = [k.choice.split("(")[0] for k in f.report.programs[0].kernels]
    assert "sparse" in choices and "reduce" not in choices


def masks(*seeds: int) -> Graph:
    """Layers of equal shapes and about as many weights: only the places tell one from the other."""
    rngs = [np.random.default_rng(s) for s in seeds]
    w = [r.permuted(np.arange(64 * 64) < 400 + k).astype(np.float32) for k, r in enumerate(rngs)]
    arrays = {
        f"w{k}": (m * RNG.standard_normal(m.shape)).astype(np.float32).reshape(64, 64, 1, 1) for k, m in enumerate(w)
    }
    declared = ", ".join(f"{name}: f32[64, 64, 1, 1]" for name in arrays)
    value = "x"
    for name in arrays:
        value = f"relu(conv({value}, {name}))"
    return parse(f"def g(x: f32[1, 64, 8, 8], *, {declared}):\n    y = {value}\n    return y", arrays)


def test_layers_whose_masks_differ_have_code_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed, emit = [], kernel_code.emit_kernel
    monkeypatch.setattr(kernel_code, "emit_kernel", lambda k, *more: printed.append(k) or emit(k, *more))
    x = RNG.standard_normal((1, 64, 8, 8)).astype(np.float32)
    for g in (masks(1, 2, 5), masks(3, 4, 6)):  # the second one meets what the cache has of the first one
        (want,) = run(g.copy(), [x], "float64")
        printed.clear()
        f = dnnc.compile(g, threads=1, cache=tmp_path, verify=False)
        assert str(f.report).count("sparse(") == 3 and not f.report.steps_down
        assert sum("sparse_rows" in show_kernel(k) for k in printed) < 3  # layers in a row are one text
        assert np.abs(f(x) - want).max() <= bound(g.outputs[0].type.dtype, 100, want)


@pytest.mark.slow
def test_a_row_that_another_layer_has_right_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DNNC_STRICT")
    made, code = [], kernel_code.machine_code

    def wrong(s: Any) -> bytes:
        made.append(s)
        if len(made) < 3:
            return code(s)
        blocks = s.pattern.blocks.copy()
        blocks[RNG.integers(64)] ^= True
        return code(replace(s, pattern=Pattern.of(blocks)))

    monkeypatch.setattr(kernel_code, "machine_code", wrong)
    g, x = masks(1, 2, 5, 7), RNG.standard_normal((1, 64, 8, 8)).astype(np.float32)
    (want,) = run(g.copy(), [x], "float64")
    f = dnnc.compile(g, threads=1, cache=False)
    assert len(made) > 3 and f.report.steps_down
    assert np.abs(f(x) - want).max() <= bound(g.outputs[0].type.dtype, 100, want)
