"""Saved models: what is loaded behaves as what was saved, wherever and whenever, or says why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.parser
import pytest
from saved_models import CONSTANTS, MODELS, NET, ROWS, arrays, linear

import dnnc
import dnnc.artifact.load
from dnnc.artifact.format import open_artifact
from dnnc.backends.llvm import backend as llvm_backend
from dnnc.executable import Executable
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.tools.sample_graphs import graph_of
from support.random_graphs import random_graph


def listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple) else [results]


def same(f: Any, g: Any, x: list[Any]) -> None:
    """Both give the same bits."""
    for a, b in zip(listed(f(*x)), listed(g(*x)), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def compiling_is_forbidden(m: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something is compiled")

    m.setattr("dnnc.compile_program.compile_program", refuse)


# --- what is loaded behaves as what was saved -------------------------------------------------------------------------


@pytest.mark.family("cases")
@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name: str, small: bool, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = dnnc.compile(graph_of(NET) if MODELS[name] == NET else parse(MODELS[name], CONSTANTS))
    f.save(path, small=small)
    if not small:
        compiling_is_forbidden(monkeypatch)
    g = dnnc.load(path)
    assert isinstance(g, Executable) and len(g.programs) == 1 and g.programs[0].compiled == 0
    assert (g.inputs, g.outputs) == (f.inputs, f.outputs)
    same(f, g, arrays(f.graph))
    assert str(g.graph) == str(f.graph)
    g.save(path.with_suffix(".again"), small=small)
    assert path.with_suffix(".again").read_bytes() == path.read_bytes()


@pytest.mark.slow
def test_random_graphs(path: Path) -> None:
    for seed in range(8):
        graph, x = random_graph(seed, 8)
        f = dnnc.compile(graph, verify=False)
        f(*x)
        f.save(path)
        g = dnnc.load(path)
        same(f, g, x)
        again = dnnc.load(path, code=False)
        same(f, again, x)
        if not f.report.host:
            assert [k.symbol for k in again.programs[0].kernels] == [k.symbol for k in f.programs[0].kernels], seed
        again.save(path.with_suffix(".again"))
        assert path.with_suffix(".again").read_bytes() == path.read_bytes(), seed


@pytest.mark.slow
def test_texts_and_report_come_back(net: Executable, path: Path) -> None:
    f = net
    f.save(path)
    g = dnnc.load(path)
    for stage in ("graph", "operator", "llvm", "asm"):
        assert g.source(stage) == f.source(stage)
    assert g.source("operator", "softmax") == f.source("operator", "softmax")
    (then,), (now,) = f.report.programs, g.report.programs
    assert now.kernels == then.kernels and now.memory == then.memory and now.fallbacks == then.fallbacks
    assert [(p.name, p.nodes_before, p.nodes_after, p.changed) for p in now.passes] == [
        (p.name, p.nodes_before, p.nodes_after, p.changed) for p in then.passes
    ]
    assert g.report.notes == (f"loaded from {path}",) and f"loaded from {path}" in str(g.report)
    assert g.report.import_seconds > 0 and json.loads(g.report.to_json())["notes"] == [f"loaded from {path}"]
    (one,), (two,) = f.programs, g.programs
    assert two.calls == one.calls and two.kernels == one.kernels and two.outputs == one.outputs
    assert two.scheduled is None


@pytest.mark.slow
def test_constants_are_used_where_they_lie_in_the_file(net: Executable, path: Path) -> None:
    f = net
    f.save(path)
    g = dnnc.load(path)
    c = g.programs[0].constants
    assert not c.flags.owndata and not c.flags.writeable and c.ctypes.data % 64 == 0
    assert c.tobytes() == f.programs[0].constants.tobytes()
    path.unlink()  # the mapping stays
    same(f, g, arrays(f.graph))


@pytest.mark.slow
def test_one_program_for_all_sizes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = dnnc.compile(graph_of(ROWS), dims={"N": (2, 40)})
    f(*arrays(f.graph, {"N": 3}))
    f.save(path)
    compiling_is_forbidden(monkeypatch)
    g = dnnc.load(path)
    for n in (2, 7, 40):
        same(f, g, arrays(f.graph, {"N": n}))
    assert len(g.programs) == 1 and g.report.programs[0].symbolic
    for n in (1, 41):
        with pytest.raises(dnnc.InputError, match=f"dim N of .* must be at least 2, at most 40; got {n}"):
            g(*arrays(f.graph, {"N": n}))


@pytest.mark.slow
def test_sizes_at_which_a_value_is_empty(path: Path) -> None:
    text = (
        "N: dim[2, 64]\ndef g(x: f32[3, N]):\n"
        "    a = relu(slice(x, starts=(0, 2), steps=(1, 1), shape=(3, N - 2)))\n"
        "    return reduce_sum(a, axes=(1,)), a"
    )
    f = dnnc.compile(parse(text), dims={"N": (2, 64)})
    f(*arrays(f.graph, {"N": 5}))
    f.save(path)
    g = dnnc.load(path)
    for n in (5, 2, 64):
        same(f, g, arrays(f.graph, {"N": n}))
    assert len(g.programs) == 2


@pytest.mark.slow
def test_programs_for_several_sizes_and_one_that_is_compiled_later(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = dnnc.compile(graph_of(ROWS))
    for n in (3, 5):
        f(*arrays(f.graph, {"N": n}))
    f.save(path)
    g = dnnc.load(path)
    with monkeypatch.context() as m:
        compiling_is_forbidden(m)
        for n in (5, 3):
            same(f, g, arrays(f.graph, {"N": n}))
        assert [p.dims for p in g.report.programs] == [{"N": 3}, {"N": 5}]
    same(f, g, arrays(f.graph, {"N": 8}))
    assert [p.dims for p in g.report.programs] == [{"N": 3}, {"N": 5}, {"N": 8}] == [p.dims for p in f.report.programs]
    assert g.source("asm") == f.source("asm")
    g.save(path)
    assert len(dnnc.load(path).programs) == 3


@pytest.mark.slow
def test_a_symbolic_model_that_was_never_called(path: Path) -> None:
    f = dnnc.compile(graph_of(ROWS))
    f.save(path)
    g = dnnc.load(path)
    assert g.programs == [] and g.report.programs == () and [s.shape for s in g.inputs] == [("N", 4), ("2*N", 4)]
    same(f, g, arrays(f.graph, {"N": 3}))


@pytest.mark.slow
def test_fixed_sizes_and_added_outputs_are_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ROWS.replace(
        "return softmax(matmul(concat(x, y, axis=0), w))", "c = concat(x, y, axis=0)\n    return softmax(matmul(c, w))"
    )
    f = dnnc.compile(graph_of(text), dims={"N": 3}, outputs=["c"], numerics="strict", threads=1)
    f.save(path)
    with monkeypatch.context() as m:
        compiling_is_forbidden(m)
        g = dnnc.load(path)
        assert [s.name for s in g.outputs][-1] == "c" and g.inputs[1].shape == (6, 4) and g.report.threads == 1
        same(f, g, arrays(f.graph))
    again = dnnc.load(path, code=False)
    same(f, again, arrays(f.graph))
    assert again.source("operator") == f.source("operator")


def test_indices_out_of_range_are_told_as_before(path: Path) -> None:
    f = dnnc.compile(graph_of("def g(x: f32[5, 3], i: i64[2]):\n    return gather(x, i, axis=0)"))
    f.save(path)
    messages = []
    for call in (f, dnnc.load(path)):
        with pytest.raises(dnnc.InputError, match="an index read at run time") as e:
            call(np.ones((5, 3), np.float32), np.array([0, 9]))
        messages.append(str(e.value))
    assert messages[0] == messages[1]


def test_run_and_bind(path: Path) -> None:
    f = dnnc.compile(graph_of("def g(x: f32[3, 5]):\n    return relu(x)"))
    f.save(path)
    g = dnnc.load(path, threads=1)
    x, out = -np.ones((3, 5), np.float32), np.empty((3, 5), np.float32)
    call = g.bind([x], [out])
    call()
    assert (out == 0).all()
    x[:] = 2
    assert g.run([x], [out]) is out and (out == 2).all()


def test_the_reference_target(path: Path) -> None:
    f = dnnc.compile(parse(MODELS["halves"], CONSTANTS), target="reference")
    f.save(path)
    g = dnnc.load(path)
    same(f, g, arrays(f.graph))
    assert str(g.graph) == str(f.graph) and g.inputs == f.inputs


# --- ONNX -------------------------------------------------------------------------------------------------------------

LATE = """<ir_version: 8, opset_import: ["": 17]>
m (float[A, B] x, int64[R] shape) => (float[C, D] y) {
    r = Relu (x)
    y = Reshape (r, shape)
}"""


def test_names_and_nodes_of_an_onnx_model(path: Path) -> None:
    f = dnnc.compile(linear(4))
    f.save(path)
    for g in (dnnc.load(path), dnnc.load(path, code=False)):
        assert (g.inputs, g.outputs) == (f.inputs, f.outputs) and g.inputs[0].name == "the x"
        assert g.report.programs[0].kernels == f.report.programs[0].kernels
        assert g.report.programs[0].kernels[0].nodes == ("first (MatMul), second (Relu)",)
        assert g.source("operator", "second") == f.source("operator")
        assert g.graph.text(locs=True) == f.graph.text(locs=True)
        np.testing.assert_array_equal(g({"the x": np.ones((4, 16), np.float32)}), f(np.ones((4, 16), np.float32)))


@pytest.mark.slow
def test_empty_inputs_are_compiled_from_the_onnx_model_in_the_file(path: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "m.onnx").write_bytes(linear("N", tmp_path / "model").SerializeToString())
    f = dnnc.compile(tmp_path / "model" / "m.onnx")
    f(np.ones((3, 16), np.float32))
    f.save(path)
    for file in (tmp_path / "model").iterdir():
        file.unlink()
    g = dnnc.load(path)
    assert g(np.ones((0, 16), np.float32)).shape == (0, 32)
    assert g(np.ones((2, 16), np.float32)).shape == (2, 32)
    g.save(path.with_suffix(".again"))
    w = open_artifact(path.with_suffix(".again"))
    assert dnnc.load(path.with_suffix(".again"))(np.ones((0, 16), np.float32)).shape == (0, 32)
    data = np.random.default_rng(0).standard_normal((16, 32)).astype(np.float32).tobytes()
    assert (
        sum(bytes(w.section(s)).count(data) for s in w.sections) == 1
    )  # the initializer and the graph's constant share it


@pytest.mark.parametrize("target", ["llvm", "reference"])
def test_models_that_are_read_at_the_call(target: str, path: Path, tmp_path: Path) -> None:
    model = onnx.parser.parse_model(LATE)
    (tmp_path / "late.onnx").write_bytes(model.SerializeToString())
    f = dnnc.compile(tmp_path / "late.onnx", target=target)
    f.save(path)
    (tmp_path / "late.onnx").unlink()
    g = dnnc.load(path)
    assert f.deferred and g.deferred and g.inputs == f.inputs
    x = np.arange(-6, 6, dtype=np.float32).reshape(3, 4)
    for shape in ((4, 3), (2, 6)):
        np.testing.assert_array_equal(g(x, np.array(shape)), np.maximum(x, 0).reshape(shape))
    g.save(path.with_suffix(".again"))
    assert path.with_suffix(".again").read_bytes() == path.read_bytes()


# --- code that is not used --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_without_code_everything_is_compiled_again(net: Executable, path: Path, tmp_path: Path) -> None:
    f = net
    f.save(path)
    g = dnnc.load(path, code=False, cache=tmp_path / "empty")
    assert g.programs[0].compiled == len(g.programs[0].kernels) and g.programs[0].scheduled is not None
    same(f, g, arrays(f.graph))
    assert g.report.notes == (f"compiled again from {path}: code=False",)
    assert g.source("llvm") == f.source("llvm")


def test_small_files_hold_each_weight_once_and_keep_the_code(path: Path, tmp_path: Path) -> None:
    f = dnnc.compile(graph_of("def g(x: f32[4, 300], *, w: f32[300, 500]):\n    return relu(matmul(x, w))"))
    f.save(path)
    f.save(tmp_path / "small.dnnc", small=True)
    assert path.stat().st_size - (tmp_path / "small.dnnc").stat().st_size >= f.programs[0].constants.nbytes
    g = dnnc.load(tmp_path / "small.dnnc", cache=tmp_path / "empty")
    assert g.programs[0].compiled == 0 and g.programs[0].scheduled is not None
    same(f, g, arrays(f.graph))


def recompiled(path: Path, reason: str) -> Any:
    with pytest.warns(dnnc.ArtifactWarning, match=f"model.dnnc: {reason}; compiling again from the graph in the file"):
        g = dnnc.load(path)
    assert len(g.report.notes) == 1 and reason in g.report.notes[0] and g.programs[0].scheduled is not None
    assert reason in str(g.report)
    return g


@pytest.mark.slow
def test_a_cpu_that_lacks_features(net: Executable, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = net
    f.save(path)
    cpu, flags = llvm_backend.host_cpu()
    monkeypatch.setattr(
        llvm_backend, "host_cpu", lambda: ("other", ",".join(x for x in flags.split(",") if x != "+sse4.2"))
    )
    g = recompiled(path, f"it was compiled for {cpu}, and this CPU lacks sse4.2")
    same(f, g, arrays(f.graph))


@pytest.mark.slow
def test_a_cpu_that_has_more_features_runs_the_code(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = dnnc.compile(parse(MODELS["halves"], CONSTANTS), target="llvm -mcpu=x86-64-v3")
    f.save(path)
    compiling_is_forbidden(monkeypatch)
    g = dnnc.load(path)
    same(f, g, arrays(f.graph))
    assert g.source("asm") == f.source("asm") and "zmm" not in g.source("asm") and "ymm" in g.source("asm")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("FORMAT", "0", "it was compiled for kernel format 1, LLVM .*, this is kernel format 0, LLVM .*"),
        ("llvm_version", lambda: "1.2.3", "it was compiled for kernel format 1, LLVM .*, this is .*, LLVM 1.2.3"),
    ],
)
def test_other_versions(name: str, value: Any, reason: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    f = dnnc.compile(graph_of(MODELS["views"]))
    f.save(path)
    monkeypatch.setattr(llvm_backend, name, value)
    with pytest.warns(dnnc.ArtifactWarning, match=reason):
        g = dnnc.load(path)
    same(f, g, arrays(f.graph))


@pytest.mark.slow
def test_threads(net: Executable, path: Path) -> None:
    dnnc.compile(graph_of(NET), target="llvm -threads=1").save(path)
    assert dnnc.load(path).report.threads == 1
    with pytest.raises(dnnc.TargetError, match="-threads=1, but threads=2"):
        dnnc.load(path, threads=2)
    f = net
    f.save(path)
    with pytest.raises(dnnc.InputError, match="threads=0"):
        dnnc.load(path, threads=0)
    g = dnnc.load(path, threads=1)
    assert g.report.threads == 1
    same(f, g, arrays(f.graph))


# --- other processes --------------------------------------------------------------------------------------------------

WRITE = """
import sys, dnnc
from dnnc.tools.sample_graphs import graph_of
f = dnnc.compile(graph_of({net!r}), cache=False)
f.save(sys.argv[1])
f.save(sys.argv[1] + ".small", small=True)
"""
READ = """
import sys, numpy as np, dnnc
f = dnnc.load(sys.argv[1])
with np.load(sys.argv[2]) as z:
    x = [z[k] for k in z.files]
np.savez(sys.argv[3], *f(*x))
heavy = ("dnnc.passes", "dnnc.driver", "dnnc.ir.ops", "onnx")
print(*sorted(m for m in sys.modules if m.startswith(heavy)))
"""


def python(code: str, *args: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_another_process_gets_the_same_bits_and_loads_no_pass(net: Executable, path: Path, tmp_path: Path) -> None:
    f = net
    f.save(path)
    x = arrays(f.graph)
    np.savez(tmp_path / "x.npz", *x)
    assert python(READ, path, tmp_path / "x.npz", tmp_path / "y.npz").split() == []
    with np.load(tmp_path / "y.npz") as z:
        for name, want in zip(z.files, f(*x), strict=True):
            assert z[name].tobytes() == want.tobytes()


@pytest.mark.slow
def test_the_same_model_gives_the_same_bytes(net: Executable, path: Path, tmp_path: Path) -> None:
    net.save(path)
    for seed in ("1", "2"):
        other = tmp_path / f"other{seed}"
        python(WRITE.format(net=NET), other, PYTHONHASHSEED=seed)
        assert other.read_bytes() == path.read_bytes()
    assert (tmp_path / "other1.small").read_bytes() == (tmp_path / "other2.small").read_bytes()
    text = path.read_bytes()
    assert str(tmp_path).encode() not in text and os.getcwd().encode() not in text


@pytest.mark.slow
def test_results_are_right_and_not_just_equal(net: Executable, path: Path) -> None:
    f = net
    f.save(path)
    x = arrays(f.graph)
    for got, want in zip(dnnc.load(path)(*x), run(f.graph, x, precision="float64"), strict=True):
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=1e-3, atol=1e-3)
