"""Models with host steps: results, data-dependent sizes, memory that nobody shares, files, reports."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx.parser
import pytest

import dnnc
from dnnc.driver import compile as compile_model
from dnnc.executable import Executable
from dnnc.graph_compiler import GraphCompiler
from dnnc.hybrid import HostStep, HybridCompiler, NativeStep
from dnnc.ir.errors import AccuracyError, DnncError, InputError, ScheduleError
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.ir.op import OpDef, Sample
from dnnc.ir.ops import OPS
from dnnc.ir.ops.common import draw
from dnnc.program_cache import MAX_PROGRAMS, ProgramCache
from support.cli import invoke

HOSTED = [(op, s) for op in OPS.values() if op.host is not None for s in op.samples]
CUT = """
n: dim[0, 10]
def main(x: f32[10, 4], count: i64):
    r: f32[10, 4] = relu(x)
    t: f32[n, 4] = truncate(r, count, size=n)
    y: f32[n, 4] = exp(t)
    z: f32[4] = reduce_sum(y, axes=(0,))
    return y, z
"""
X = np.linspace(-2, 2, 40, dtype=np.float32).reshape(10, 4)
WORDS = """<ir_version: 8, opset_import: ["": 20]>
m (string[N] s, float[N] x) => (string[N] t, float[N] y) {
    t = StringConcat (s, s)
    y = Relu (x)
}"""


def staged(text: str, **options: Any) -> Executable:
    f = compile_model(parse(text), **{"cache": False, **options})
    assert isinstance(f._compiler, HybridCompiler)
    return f


def count(n: int) -> Any:
    return np.array(n, np.int64)


def check_cut(f: Any, n: int) -> None:
    y, z = f(X, count(n))
    want = np.exp(np.maximum(X[:n], 0))
    np.testing.assert_allclose(y, want, rtol=1e-6)
    np.testing.assert_allclose(z, want.sum(0), rtol=1e-6)


# --- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.family("cases")
@pytest.mark.parametrize("op,s", HOSTED, ids=lambda c: c.name if isinstance(c, OpDef) else "-".join(map(str, c.inputs)))
def test_every_host_op(op: OpDef, s: Sample) -> None:
    g = Graph("g")
    found = Builder(g).op(op, *(g.add_input(f"x{k}", t) for k, t in enumerate(s.inputs)), **dict(s.attrs))
    g.outputs = list(found) if isinstance(found, tuple) else [found]
    arrays = draw(s, 1)
    got = compile_model(g, cache=False)(*arrays)
    for a, b in zip(got if isinstance(got, tuple) else (got,), run(g, arrays), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_one_program_serves_all_sizes_but_none() -> None:
    f = staged(CUT)
    assert [type(s) for s in f.programs[0].steps] == [NativeStep, HostStep, NativeStep]
    programs = [len(p.programs) for p in f.programs[-1].segments]
    assert programs == [1, 1]  # compiled ahead of the first call
    for n in (3, 10, 1, 7):
        check_cut(f, n)
    assert [len(p.programs) for p in f.programs[-1].segments] == [1, 1]
    check_cut(f, 0)
    assert [len(p.programs) for p in f.programs[-1].segments] == [1, 2]
    assert len(f.programs) == 1


@pytest.mark.slow
def test_a_size_without_an_array() -> None:
    f = staged("""
k: dim[0, 100]
def main(x: f32[N, 4], count: i64):
    m: u8[k, 0] = measure(count, size=k)
    i: i64[k] = iota(shape=(k,))
    f: f32[k] = cast(i, to=f32)
    s: f32 = reduce_sum(x, axes=(0, 1))
    y: f32[k] = mul(f, s)
    return y
""")
    for n in (2, 5):
        for k in (3, 0, 9):
            x = np.ones((n, 4), np.float32)
            np.testing.assert_array_equal(f(x, count(k)), np.arange(k, dtype=np.float32) * 4 * n)
    assert len(f.programs) == 2
    with pytest.raises(InputError, match=r"measure.*must be at least 0, at most 100; got 101"):
        f(np.ones((2, 4), np.float32), count(101))
    with pytest.raises(InputError, match="measure: a size is computed to be -1; expected at least 0"):
        f(np.ones((2, 4), np.float32), count(-1))


def test_a_size_that_does_not_fit() -> None:
    f = staged(
        "def main(x: f32[5], c: i64, z: f32[4]):\n    t = truncate(x, c, size=4)\n    y = add(t, z)\n    return y\n"
    )
    assert f(np.ones(5, np.float32), count(4), np.ones(4, np.float32)).tolist() == [2.0] * 4
    with pytest.raises(InputError, match=r"axis 0 of f32\[4\] must be 4, got 3"):
        f(np.ones(5, np.float32), count(3), np.ones(4, np.float32))
    with pytest.raises(InputError, match="computed to be 6; expected at least 0 and at most 5"):
        f(np.ones(5, np.float32), count(6), np.ones(4, np.float32))


def test_a_segment_that_cannot_serve_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ProgramCache.instance

    def refuse(self: ProgramCache, shapes: Any) -> Any:
        if (
            getattr(self.compiler, "shared", None) is not None
            and self.compiler.interface.dims
            and isinstance(self.compiler, GraphCompiler)
        ):
            raise ScheduleError("not for all sizes")
        return real(self, shapes)

    monkeypatch.setattr(ProgramCache, "instance", refuse)
    f = staged(CUT)
    for n in (3, 10, 3):
        check_cut(f, n)
    assert [len(p.programs) for p in f.programs[-1].segments] == [1, 2]  # for 3 and for 10


@pytest.mark.slow
def test_an_error_in_a_segment_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    f = staged(CUT)

    def broken(*args: Any) -> Any:
        raise ScheduleError("never")

    monkeypatch.setattr(ProgramCache, "_new", broken)
    with pytest.raises(DnncError, match="never"):
        f(X, count(4))


@pytest.mark.family("cases")
@pytest.mark.parametrize("target", ["llvm", "reference"])
@pytest.mark.parametrize("precision", [None, "float16"])
def test_targets_and_precisions(target: str, precision: str | None) -> None:
    f = compile_model(parse(CUT), target=target, precision=precision, cache=False)
    y, _ = f(X, count(6))
    np.testing.assert_allclose(y, np.exp(np.maximum(X[:6], 0)), rtol=1e-2 if precision else 1e-6)


def test_half_precision_arrays_reach_the_host_as_they_are() -> None:
    f = staged(
        "n: dim[0, 4]\ndef main(x: bf16[4], c: i64):\n    y = truncate(x, c, size=n)\n    s = to_string(x)\n    return "
        "y, s\n"
    )
    import ml_dtypes

    y, s = f(np.array([0.1, 1, 2, 3], ml_dtypes.bfloat16), count(2))
    assert y.dtype == ml_dtypes.bfloat16 and y.shape == (2,)
    assert list(s) == ["0.100098", "1", "2", "3"]  # bfloat16 has no 0.1


@pytest.mark.slow
def test_a_whole_model_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    check_cut(staged(CUT, verify="model"), 5)
    real = HostStep._run_direct
    monkeypatch.setattr(HostStep, "_run_direct", lambda *args: [a + 1 for a in real(*args)])
    with pytest.raises(AccuracyError, match="output y of the compiled model is off"):
        staged(CUT, verify="model")


# --- symbolic inputs --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_dims_of_inputs_have_plans() -> None:
    f = staged(
        "n: dim[0, N]\ndef main(x: f32[N], c: i64):\n    t = truncate(x, c, size=n)\n    y = exp(t)\n    return y\n"
    )
    assert f.programs == [] and [s.shape for s in f.outputs] == [("n",)]
    with pytest.raises(InputError, match="no program is compiled yet"):
        f.source("graph")
    for n in range(1, MAX_PROGRAMS + 3):
        np.testing.assert_allclose(f(np.ones(n, np.float32), count(n - 1)), np.full(n - 1, np.e, np.float32), rtol=1e-6)
    assert len(f.programs) == MAX_PROGRAMS


@pytest.mark.slow
def test_bounded_dims_have_one_plan() -> None:
    f = staged(
        "n: dim[0, N]\ndef main(x: f32[N], c: i64):\n    t = truncate(x, c, size=n)\n    y = exp(t)\n    return y\n",
        dims={"N": (1, 9)},
    )
    for n in (2, 9, 5):
        assert f(np.zeros(n, np.float32), count(1)).tolist() == [1.0]
    assert len(f.programs) == 1
    with pytest.raises(InputError, match="N"):
        f(np.zeros(10, np.float32), count(1))


def test_empty_inputs_of_an_onnx_model() -> None:
    f = dnnc.compile(onnx.parser.parse_model(WORDS), cache=False)
    t, y = f(np.array(["a", "b"]), np.array([-1, 1], np.float32))
    assert list(t) == ["aa", "bb"] and y.tolist() == [0.0, 1.0]
    t, y = f(np.empty(0, object), np.empty(0, np.float32))
    assert t.shape == y.shape == (0,) and t.dtype == object


# --- memory -----------------------------------------------------------------------------------------------------------


def test_results_are_nobody_elses() -> None:
    f = staged("""
n: dim[0, 4]
def main(x: f32[4], c: i64, s: str[2], *, k: f32[3] = [1.0, 2.0, 3.0]):
    t = truncate(x, c, size=n)
    u = relu(x)
    v = truncate(u, c, size=n)
    return t, v, v, x, k, s
""")
    x, s = np.ones(4, np.float32), np.array(["a", "b"], object)
    got = f(x, count(3), s)
    for k, a in enumerate(got):
        assert a.flags.c_contiguous and a.flags.writeable
        assert not any(np.may_share_memory(a, b) for b in (x, s, *got[:k], *f.programs[0].constants.values()))
    assert [a.tolist() for a in got] == [[1.0] * 3, [1.0] * 3, [1.0] * 3, [1.0] * 4, [1.0, 2.0, 3.0], ["a", "b"]]


def test_a_small_part_does_not_keep_the_whole() -> None:
    f = staged(
        "n: dim[0, 4096]\ndef main(x: f32[4096], c: i64):\n    u = relu(x)\n    t = truncate(u, c, size=n)\n    return "
        "t\n"
    )
    x = np.ones(4096, np.float32)
    assert f(x, count(8)).base is None  # 32 bytes that would hold 16 KB
    assert f(x, count(4000)).base is not None  # a view: nothing is copied


@pytest.mark.slow
def test_given_buffers() -> None:
    f = staged(CUT)
    y, z = np.empty((3, 4), np.float32), np.empty(4, np.float32)
    assert f.run([X, count(3)], [y, z])[0] is y
    call = f.bind([X, count(3)], [np.zeros_like(y), np.zeros_like(z)])
    assert call() is None
    np.testing.assert_array_equal(f.run({"x": X, "count": count(3)})[0], y)
    for outputs, message in (
        ([y], "2 outputs, got 1 buffer"),
        ([y[:2], z], "output y"),
        ([y, z.astype(np.float64)], "output z"),
    ):
        with pytest.raises(InputError, match=message):
            f.run([X, count(3)], outputs)
    with pytest.raises(InputError, match="input x: bind needs"):
        f.bind([X[:, ::-1], count(3)], [y, z])


@pytest.mark.slow
def test_threads() -> None:
    f = staged(CUT)
    errors: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for _ in range(20):
                check_cut(f, n)
        except BaseException as e:
            errors.append(e)

    workers = [threading.Thread(target=work, args=(n,)) for n in (0, 3, 7, 10)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert errors == []


# --- strings at the boundary ------------------------------------------------------------------------------------------


def test_strings_as_inputs() -> None:
    f = staged("def main(s: str[2]):\n    t = string_concat(s, s)\n    return t\n")
    want = ["aa", "bb"]
    for given in (
        ["a", "b"],
        np.array(["a", "b"]),
        np.array(["a", "b"], object),
        np.array([b"a", "b"], object),
        np.array([b"a", b"b"]),
    ):
        assert f(given).tolist() == want
    with pytest.raises(InputError, match="input s: expected strings, got 7 of type int at position 1"):
        f(np.array(["a", 7], object))
    with pytest.raises(InputError, match="input s"):
        f(np.zeros(2))


# --- reports, texts, files --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_report_and_sources() -> None:
    f = staged(CUT)
    check_cut(f, 4)
    assert f.report.fallbacks == ["truncate"] and "on the host: 1 node\n  truncate" in str(f.report)
    assert json.loads(f.report.to_json())["fallbacks"] == ["truncate"]
    assert next(k.name for p in f.report.programs for k in p.kernels) == "relu"
    graph = f.source("graph")
    assert graph.index("relu(x)") < graph.index("truncate(r, count, size=n)") < graph.index("exp(t)")
    assert "# step 1" not in f.source("operator") and "define" in f.source("llvm", "exp")
    with pytest.raises(InputError, match="sigmoid"):
        f.source("llvm", "sigmoid")


@pytest.mark.slow
def test_a_model_without_native_code() -> None:
    f = staged("def main(s: str[2]):\n    t = string_concat(s, s)\n    return t\n")
    assert f.report.programs == () and "on the host: 1 node" in str(f.report)
    assert f.profile(["a", "b"], repeats=2).kernels[0].choice == "host"


@pytest.mark.slow
def test_profile() -> None:
    f = staged(CUT)
    p = f.profile(X, count(5), repeats=3)
    assert {(k.name, k.choice == "host") for k in p.kernels} >= {("relu", False), ("truncate", True), ("exp", False)}
    assert p.total > 0 and p.dims == {"n": 5} and 0 < sum(k.share for k in p.kernels)
    assert f.profile(X, count(0), repeats=2).dims == {
        "n": 0
    }  # the second segment computes nothing worth a kernel, or little
    with pytest.raises(InputError, match="repeats=0"):
        f.profile(X, count(5), repeats=0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"outputs": ["r"]}, {"target": "reference"}])
def test_saved_and_loaded(tmp_path: Path, options: dict[str, Any]) -> None:
    f = compile_model(parse(CUT), cache=False, **options)
    f.save(tmp_path / "m.dnnc")
    g = dnnc.load(tmp_path / "m.dnnc", cache=False)
    assert type(g) is type(f) and g.inputs == f.inputs and g.outputs == f.outputs
    for a, b in zip(f(X, count(4)), g(X, count(4)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_saved_and_loaded_with_dims_and_strings(tmp_path: Path) -> None:
    f = dnnc.compile(onnx.parser.parse_model(WORDS), cache=False, dims={"N": (1, 8)})
    f.save(tmp_path / "m.dnnc")
    g = dnnc.load(tmp_path / "m.dnnc", cache=False)
    for n in (3, 0):
        t, y = g(["ab"] * n, np.ones(n, np.float32))
        assert list(t) == ["abab"] * n and y.tolist() == [1.0] * n


@pytest.mark.slow
def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cut.py").write_text(CUT)
    np.save("count.npy", count(4))

    def cli(*words: str) -> str:
        done = invoke(words)
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "truncate(r, count, size=n)" in cli("inspect", "cut.py", "--stage", "graph")
    assert "# step 2: native" in cli("inspect", "cut.py", "--stage", "operator")
    assert json.loads(cli("compile", "cut.py", "--json", "--cache", "off", "-o", "cut.dnnc"))["fallbacks"] == [
        "truncate"
    ]
    out = json.loads(
        cli("run", "cut.dnnc", "--input", "x=random", "--input", "count=count.npy", "--json", "--cache", "off")
    )
    assert [o["shape"] for o in out["outputs"]] == [[4, 4], [4]]


LOOP_AFTER = """
n: dim[0, 10]
def main(x: f32[10, 4], count: i64, go: bool):
    t: f32[n, 4] = truncate(x, count, size=n)
    def body(k: i64, a: f32[n, 4], c: f32[10, 4]):
        b = tanh(add(a, reduce_max(c, axes=(0,), keepdims=True)))
        return b, reduce_sum(b, axes=(0,))
    (y, rows) = loop(None, None, t, x, body=body, carried=1, scanned=0, length=3) @ (f32[n, 4], f32[3, 4])
    def then(a: f32[n, 4]):
        return exp(a)
    def other(a: f32[n, 4]):
        return neg(a)
    z: f32[n, 4] = cond(go, y, then=then, other=other)
    return y, rows, z
"""


@pytest.mark.slow
def test_loops_and_branches_over_sizes_that_the_data_tells() -> None:
    """Their functions are made for fixed sizes: each size that comes has programs of its own."""
    g = parse(LOOP_AFTER)
    f = compile_model(g, cache=False)
    for count in (3, 10, 0, 3):
        for go in (True, False):
            given = [X, np.array(count), np.array(go)]
            for got, want in zip(f(*given), run(g, given)):
                assert got.shape == want.shape
                np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-6)
