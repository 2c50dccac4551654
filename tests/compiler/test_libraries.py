"""Calls of cuBLASLt and cuDNN as steps of programs: out of a log into a program, its report, its file; with libraries
that are fakes, so that everything but the libraries themselves runs here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_libraries import FakeBlas, FakeDnn

import dnnc
from dnnc.autotune.log.file import Log
from dnnc.autotune.log.record import Winner
from dnnc.autotune.runners.machine import Machine, machine_of
from dnnc.autotune.runners.worker import build
from dnnc.autotune.search.space import with_libraries
from dnnc.autotune.search.task import Setting, Task, extract
from dnnc.backends.cuda import library
from dnnc.backends.cuda.interpreted import InterpretedDevice
from dnnc.backends.registry import open_backend
from dnnc.compile_program import schedule
from dnnc.ir.errors import AccuracyError, TargetError, TuneError
from dnnc.ir.graph.interp import run
from dnnc.options import make_options
from dnnc.passes.schedule.problem import Choice
from dnnc.tools.sample_graphs import graph_of
from dnnc.tune_option import setting_of
from support.devices import install, interpreted

ARCH = "cuda -arch=sm_90a"
LAYERS = """
def net(x: f32[24, 48], *, w: f32[48, 64], b: f32[64], v: f32[64, 40]):
    h = relu(add(matmul(x, w), b))
    return matmul(h, v)
"""
GELU = """
def net(x: f32[2, 12, 48], *, w: f32[48, 32], b: f32[32], v: f32[32, 16]):
    return matmul(gelu(add(matmul(x, w), b), approximate="tanh"), v)
"""
BATCH = "def net(x: f32[3, 12, 16], y: f32[3, 16, 20]):\n    return matmul(x, y)\n"
CONV = """
def net(x: f32[2, 8, 9, 9], *, w: f32[16, 8, 3, 3], b: f32[16], v: f32[24, 16, 1, 1]):
    h = relu(conv(x, w, b, pads=(1, 0, 1, 2), strides=(2, 1)))
    return conv(h, v)
"""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> InterpretedDevice:
    own = InterpretedDevice()
    install(monkeypatch, own)
    return own


@pytest.fixture
def fakes(device: InterpretedDevice, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Both libraries, installed."""
    found = {"cublaslt": FakeBlas(device), "cudnn": FakeDnn(device)}
    library.version_of.cache_clear()
    monkeypatch.setattr(library, "opened", found.__getitem__)
    return found


@pytest.fixture(autouse=True)
def forget() -> Any:
    yield
    library.version_of.cache_clear()


def tasks_in(text: str, **options: Any) -> list[Task]:
    opts = make_options({"target": ARCH, "cache": False, **options})
    program = schedule(graph_of(text), interpreted(), opts)
    return [t for t, _ in extract(program, Setting(ARCH, opts.numerics))]


def winners(text: str, choose: Callable[[Task], Choice | None], **options: Any) -> dict[str, Choice]:
    return {t.key: c for t in tasks_in(text, **options) if (c := choose(t)) is not None}


def call(name: str, number: int) -> Callable[[Task], Choice | None]:
    """Of each task that a library can do, its call by a suggestion."""
    knob = "algo" if name == "cublaslt" else "plan"
    anchor = "matmul" if name == "cublaslt" else "conv"
    return lambda task: Choice(name, ((knob, number),)) if task.name.startswith(anchor) else None


def compiled(text: str, tune: Any, **options: Any) -> Any:
    return dnnc.compile(graph_of(text), **{"target": ARCH, "cache": False, "tune": tune, **options})


def check(f: Any, text: str, tolerance: float = 1e-5) -> None:
    g = graph_of(text)
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal(tuple(int(str(d)) for d in v.type.shape)).astype(np.float32) for v in g.inputs]
    (want,) = run(g, arrays, precision="float64")
    for _ in range(2):
        np.testing.assert_allclose(
            np.asarray(f(*arrays), np.float32), want, rtol=tolerance, atol=tolerance * np.abs(want).max()
        )


@pytest.mark.family("cases")
@pytest.mark.parametrize(("text", "calls"), [(LAYERS, 2), (GELU, 2), (BATCH, 1)])
@pytest.mark.parametrize(("precision", "tolerance"), [(None, 1e-5), ("float16", 4e-3), ("bfloat16", 3e-2)])
def test_products(text: str, calls: int, precision: str | None, tolerance: float, fakes: dict[str, Any]) -> None:
    """They pass the gate, are recorded, have a workspace of their own, and stand in the report."""
    f = compiled(text, winners(text, call("cublaslt", 2), precision=precision), precision=precision)
    kernels = [k for k in f.report.programs[-1].kernels if k.choice == "cublaslt(algo=2)"]
    assert len(kernels) == calls
    fakes["cublaslt"].calls.clear()
    check(f, text, tolerance)
    assert fakes["cublaslt"].calls == [2] * (2 * calls)
    told = str(f.report)
    assert "is a library call: cuBLASLt, suggestion 2" in told and "version 13.1.0" in told
    assert "calls a library" in f.source("cuda", kernels[0].symbol) and "for " in f.source(
        "operator", kernels[0].symbol
    )
    assert f.profile(
        *[np.zeros([int(str(d)) for d in v.type.shape], np.float32) for v in graph_of(text).inputs], repeats=1
    ).kernels


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [(None, 1e-5), ("float16", 4e-3)])
def test_convolutions(precision: str | None, tolerance: float, fakes: dict[str, Any]) -> None:
    """Float32 products leave out the way that uses tensor cores, halves do not. cuDNN makes no float32 of halves: the
    kernel behind it does.
    """
    number = 1 if precision is None else 2
    f = compiled(CONV, winners(CONV, call("cudnn", number), precision=precision), precision=precision)
    assert [k.choice for k in f.report.programs[-1].kernels].count(f"cudnn(plan={number})") == 2
    fakes["cudnn"].calls.clear()
    check(f, CONV, tolerance)
    assert set(fakes["cudnn"].calls) == {2}
    assert "cuDNN, suggestion" in str(f.report)


@pytest.mark.slow
def test_a_wrong_result_does_not_pass_the_gate(fakes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def negative(self: FakeBlas, *args: Any) -> int:
        self._matrix(args[11], args[10], 0)[...] = -1
        return 0

    monkeypatch.setattr(FakeBlas, "cublasLtMatmul", negative)
    with pytest.raises(AccuracyError, match=r"kernel cublaslt_0_matmul_add_relu.*cublaslt\(algo=0\)"):
        compiled(LAYERS, winners(LAYERS, call("cublaslt", 0)))


@pytest.mark.slow
def test_what_the_library_does_not_offer_is_said(fakes: dict[str, Any]) -> None:
    with pytest.raises(
        TargetError, match="cuBLASLt suggests 3 ways here, so there is none for cuBLASLt, suggestion 5: f32"
    ):
        compiled(LAYERS, winners(LAYERS, call("cublaslt", 5)))
    with pytest.raises(
        TargetError, match=r"cuDNN cannot do cuDNN, suggestion 0.*CUDNN_STATUS_MADE_UP .3007. some words"
    ):
        compiled(CONV, winners(CONV, call("cudnn", 0)))


@pytest.mark.slow
def test_a_missing_library_is_said(device: InterpretedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise TargetError("cuBLASLt is not here (no such file): pip install nvidia-cublas")

    monkeypatch.setattr(library, "opened", missing)
    with pytest.raises(TargetError, match=r"cublaslt_0_matmul_add_relu is a call of cuBLASLt.*not here.*pip install"):
        compiled(LAYERS, winners(LAYERS, call("cublaslt", 0)))
    with pytest.raises(TuneError, match=r"cuBLASLt and cuDNN are not here: pip install -e '\.\[libraries\]'"):
        with_libraries(machine_of(ARCH))
    with pytest.raises(TuneError, match="are for GPUs"):
        dnnc.tune(graph_of(LAYERS), libraries=True, budget=1)


@pytest.mark.slow
def test_never_without_having_been_asked_for(fakes: dict[str, Any]) -> None:
    f = compiled(LAYERS, None)
    assert not any(library.is_library(k.choice) for k in f.report.programs[-1].kernels)
    assert "library call" not in str(f.report)
    check(f, LAYERS)
    assert fakes["cublaslt"].calls == []


@pytest.mark.slow
def test_a_log_and_a_file_keep_the_call(fakes: dict[str, Any], tmp_path: Path) -> None:
    found = winners(LAYERS, call("cublaslt", 1))
    with Log.open(tmp_path / "m.jsonl") as log:
        for task in tasks_in(LAYERS):
            log.append(task)
            if task.key in found:
                log.append(Winner(task.key, found[task.key], 1e-6))
    f = compiled(LAYERS, str(tmp_path / "m.jsonl"))
    f.save(tmp_path / "m.dnnc")
    fakes["cublaslt"].calls.clear()
    loaded = dnnc.load(tmp_path / "m.dnnc", cache=False)
    check(loaded, LAYERS)
    assert fakes["cublaslt"].calls == [1] * 4  # no check again: a device had made it
    assert [k.choice for k in loaded.report.programs[-1].kernels] == [k.choice for k in f.report.programs[-1].kernels]
    fakes["cublaslt"].cublasLtGetVersion = lambda: 130200
    library.version_of.cache_clear()
    other = dnnc.load(tmp_path / "m.dnnc", cache=False)  # another version may compute otherwise: it is checked
    fakes["cublaslt"].calls.clear()
    check(other, LAYERS)
    assert "version 13.2.0" in str(other.report)


@pytest.mark.gpu
def test_on_a_device() -> None:
    """The real libraries, where they are installed; where not, compiling says so."""
    for text, name in ((LAYERS, "cublaslt"), (GELU, "cublaslt"), (BATCH, "cublaslt"), (CONV, "cudnn")):
        for precision, tolerance in ((None, 2e-5), ("float16", 8e-3)):
            opts = make_options({"target": "cuda", "cache": False, "precision": precision})
            program = schedule(graph_of(text), open_backend(opts.target), opts)
            tasks = [t for t, _ in extract(program, setting_of(opts))]
            found = {t.key: c for t in tasks if (c := call(name, 0)(t)) is not None}
            if name not in library.installed():
                with pytest.raises(TargetError, match="not here"):
                    compiled(text, found, target="cuda", precision=precision)
                continue
            f = compiled(text, found, target="cuda", precision=precision)
            assert any(library.is_library(k.choice) for k in f.report.programs[-1].kernels)
            check(f, text, tolerance)


@pytest.mark.slow
def test_descriptors_end_with_the_program(fakes: dict[str, Any], device: InterpretedDevice) -> None:
    f = compiled(LAYERS, winners(LAYERS, call("cublaslt", 1)))
    check(f, LAYERS)
    assert len(fakes["cublaslt"].things) == 1 + 2 * 5  # a handle; two products of five descriptors
    del f
    import gc

    gc.collect()
    assert len(fakes["cublaslt"].things) == 1


@pytest.mark.slow
def test_measuring(fakes: dict[str, Any], device: InterpretedDevice) -> None:
    """What a search offers is built, timed and checked as other schedules are."""
    machine = Machine(interpreted(device))
    bench = machine.bench()
    offered = with_libraries(machine)
    for text, name in ((LAYERS, "cublaslt"), (CONV, "cudnn")):
        task = next(t for t in tasks_in(text) if offered(t))
        choices = offered(task)
        assert len(choices) == (library.PLANS if name == "cublaslt" else library.FEW_PLANS) and {
            c.template for c in choices
        } == {name}
        built, kernel = build(machine, task, choices[1])
        assert library.is_call(built.code) and built.digest != build(machine, task, choices[2])[0].digest
        assert built.facts["version"] in ("13.1.0", "9.28.0")
        loaded = bench.load(task, built)
        assert loaded.measure() > 0 and loaded.check(kernel, choices[1])
        assert fakes[name].calls


@pytest.mark.slow
def test_a_search_measures_them(fakes: dict[str, Any], device: InterpretedDevice) -> None:
    """They are in the space, never the default, and win where they are fastest; the result compiles."""
    from collections.abc import Iterator, Sequence

    from dnnc.autotune.search.trial import Request, Trial

    class Runner:
        def measure(self, requests: Sequence[Request]) -> Iterator[Trial]:
            for r in requests:
                seconds = 1e-6 if r.choice == Choice("cublaslt", (("algo", 1),)) else 1e-5
                yield Trial(r.task.key, r.choice, "ok", (seconds,) * r.repeats, code=str(r.choice), checked=r.check)

        def close(self) -> None:
            pass

    for libraries in (True, False):
        tuned = dnnc.tune(graph_of(LAYERS), ARCH, 20, runner=Runner(), only="matmul*", libraries=libraries, trials=120)
        assert not any(library.is_library(str(o.base)) for o in tuned.result.outcomes)
        assert {o.choice == Choice("cublaslt", (("algo", 1),)) for o in tuned.result.outcomes} == {libraries}
        assert libraries or not any(library.is_library(str(p.choice)) for o in tuned.result.outcomes for p in o.points)
        if libraries:
            fakes["cublaslt"].calls.clear()
            f = tuned.compile()
            check(f, LAYERS)
            assert set(fakes["cublaslt"].calls) == {1}
