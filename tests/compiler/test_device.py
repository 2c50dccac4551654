"""Programs for a CUDA device without one: the driver, the plan, the recorded graphs and the calls are those of a GPU;
its kernels run in the interpreter of the operator IR, on memory in which every stray address is noticed.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_programs import NET, ODD_ROWS, RECURRENT, STACKED, WHILE

import dnnc
import dnnc.ir.errors
from dnnc.backends.cuda.instance import MAX_FRAMES
from dnnc.backends.cuda.interpreted import DeviceBuffer, InterpretedBackend, InterpretedDevice
from dnnc.backends.runtime.program import Program
from dnnc.executable import Executable
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.passes.schedule.problem import Template
from dnnc.tools.sample_graphs import graph_of
from support.devices import install

COUNTED = """
def net(n: i64, x: f32[3, 8], y: f32[8]):
    def body(k: i64, a: f32[3, 8], b: f32[8]):
        return softmax(add(a, b)), sub(b, reduce_mean(a, axes=(0,)))
    (p, q) = loop(n, None, x, y, body=body, carried=2)
    return add(p, q), q
"""
BRANCH = """
def net(n: i64, x: f32[3, 8], y: f32[3, 8]):
    def a(x: f32[3, 8], y: f32[3, 8]):
        return softmax(add(x, y)), x
    def b(x: f32[3, 8], y: f32[3, 8]):
        return mul(x, y), relu(y)
    (p, q) = cond(equal(mod(n, 2), 0), x, y, then=a, other=b)
    return add(p, q), q
"""
NESTED = """
def net(n: i64, x: f32[6, 6]):
    def body(k: i64, h: f32[6, 6]):
        def inner(j: i64, a: f32[6, 6], kk: i64):
            return add(mul(matmul(a, a), 0.02), mul(cast(add(j, kk), to=f32), 0.1))
        return tanh(loop(k, None, h, k, body=inner, carried=1))
    return loop(n, None, x, body=body, carried=1)
"""
CUT = """
n: dim[0, 10]
def main(x: f32[10, 4], count: i64):
    r: f32[10, 4] = relu(x)
    t: f32[n, 4] = truncate(r, count, size=n)
    y: f32[n, 4] = exp(t)
    z: f32[4] = reduce_sum(y, axes=(0,))
    return y, z
"""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> InterpretedDevice:
    """The device of `target="cuda"` in a test."""
    own = InterpretedDevice()
    install(monkeypatch, own)
    return own


def compiled(text: str | Graph, **options: Any) -> Any:
    return dnnc.compile(
        graph_of(text) if isinstance(text, str) else text, **{"target": "cuda", "cache": False, **options}
    )


def arrays_for(g: Graph, n: int = 3, seed: int = 0) -> list[Any]:
    """Random floats; `n` for numbers, indices below 3."""
    rng = np.random.default_rng(seed)
    out: list[Any] = []
    for v in g.inputs:
        shape = tuple(int(str(d)) for d in v.type.shape)
        whole = np.full(shape, n, np.int64) if not shape else rng.integers(0, 3, shape)
        out.append(rng.standard_normal(shape).astype(np.float32) if v.type.dtype.is_float else whole)
    return out


def check(f: Any, g: Graph, arrays: list[Any]) -> None:
    got = f(*arrays)
    for a, b in zip(got if isinstance(got, tuple) else (got,), run(g, arrays, precision="float64"), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        assert isinstance(a, np.ndarray) and a.shape == b.shape


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 3])
def test_a_net(level: int, device: InterpretedDevice) -> None:
    g = graph_of(NET)
    f = compiled(g, opt_level=level)
    assert isinstance(f, Executable) and f.programs[0].checks == {}
    for seed in range(3):
        check(f, g, arrays_for(g, seed=seed))
    assert device.graphs == 1  # recorded by the first call, started by all


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    ("text", "recorded"),
    [(STACKED, 1), (RECURRENT, 1), (ODD_ROWS, 1), (COUNTED, 0), (WHILE, 0), (BRANCH, 0), (NESTED, 0)],
)
def test_control_flow(text: str, recorded: int, device: InterpretedDevice) -> None:
    g = graph_of(text)
    f = compiled(g)
    for n in (0, 1, 2, 3):
        check(f, g, arrays_for(g, n, seed=n))
    assert device.graphs == recorded
    assert bool(f.report.fallbacks) == (not recorded)  # what the host steps through is told
    assert recorded or "the host reads its condition" in f.report.fallbacks[0]


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "pieces"), [(4, True), (3, False)])
def test_pieces_of_a_concatenation_begin_where_kernels_may_load_vectors(
    rows: int, pieces: bool, device: InterpretedDevice
) -> None:
    text = f"""
def net(x: f32[{rows}, 1025], y: f32[5, 1025]):
    return relu(concat(softmax(x), softmax(y), axis=0))
"""
    g = parse(text)
    f = compiled(g)
    check(f, g, arrays_for(g))
    inside = f.programs[0].scheduled.memory.inside.values()
    assert bool(inside) == pieces and all(at % 16 == 0 for at in inside)


@pytest.mark.slow
def test_shapes_get_programs_of_their_own(device: InterpretedDevice) -> None:
    g = parse("N: dim[1, 9]\ndef net(x: f32[N, 4]):\n    return softmax(x)")
    f = compiled(g, dims={"N": (1, 9)})
    assert f.programs == []
    for n in (3, 5, 3):
        x = np.random.default_rng(n).standard_normal((n, 4)).astype(np.float32)
        np.testing.assert_allclose(f(x).sum(1), 1, rtol=1e-6)
    assert len(f.programs) == 2 and [p.dims for p in f.report.programs] == [{"N": 3}, {"N": 5}]
    with pytest.raises(dnnc.InputError, match=r"x: axis 1 of f32\[N, 4\] must be 4, got 5"):
        f(np.zeros((2, 5), np.float32))


@pytest.mark.slow
def test_programs_for_several_shapes_share_their_weights(device: InterpretedDevice) -> None:
    g = graph_of("def net(x: f32[N, 64], *, w: f32[64, 1024]):\n    return matmul(x, w)")
    f = compiled(g)
    sizes = []
    for n in (1, 2, 3):
        check(f, g, [np.ones((n, 64), np.float32)])
        sizes.append(device.allocated)
    assert sizes[0] > 4 * 64 * 1024 > sizes[2] - sizes[0]


def test_nothing_to_compute(device: InterpretedDevice) -> None:
    f = compiled("def net(x: f32[0, 4], y: f32[0]):\n    return relu(x), reduce_sum(concat(y, y, axis=0), axes=(0,))")
    a, b = f(np.zeros((0, 4), np.float32), np.zeros(0, np.float32))
    assert a.shape == (0, 4) and b == 0


def test_a_wrong_kernel_is_found_before_it_is_used(device: InterpretedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    load = device.load
    monkeypatch.setattr(device, "load", lambda cubin, *rest: load(cubin.replace(b"max(", b"min("), *rest))
    with pytest.raises(dnnc.AccuracyError, match=r"kernel relu.* is .*, the float64 reference says"):
        compiled("def net(x: f32[40]):\n    return relu(x)")
    assert compiled("def net(x: f32[40]):\n    return relu(x)", verify=False) is not None


@pytest.mark.slow
def test_verify_model(device: InterpretedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled(NET, verify="model")
    monkeypatch.setattr(
        "dnnc.backends.runtime.link.ConstantBlock.block", lambda placed: np.zeros(placed.nbytes, np.uint8)
    )
    with pytest.raises(dnnc.AccuracyError, match=r"output .* of the compiled model is off"):
        compiled(NET, verify="model")


def test_constants_are_taken_when_a_program_is_made(device: InterpretedDevice) -> None:
    w, x = np.arange(40, dtype=np.float32), np.linspace(0, 3, 40, dtype=np.float32)
    f, want = compiled(parse("def net(x: f32[40], *, w: f32[40]):\n    return mul(x, w)", {"w": w})), x * w
    w[:] = 7  # nobody should
    np.testing.assert_array_equal(f(x), want)


def test_host_steps_between_device_segments(device: InterpretedDevice) -> None:
    f = compiled(parse(CUT))
    x = np.linspace(-2, 2, 40, dtype=np.float32).reshape(10, 4)
    for n in (3, 10, 0, 3):
        y, z = f(x, np.array(n, np.int64))
        want = np.exp(np.maximum(x[:n], 0))
        np.testing.assert_allclose(y, want, rtol=1e-6)
        np.testing.assert_allclose(z, want.sum(0), rtol=1e-5)
    assert any("truncate" in h for h in f.report.fallbacks) and device.launched > 0


def test_host_steps_take_and_give_arrays_on_the_device(
    device: InterpretedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("hybrid", "executable"):
        monkeypatch.setattr(f"dnnc.{module}.to_host", lambda a: a.get())
    f = compiled(parse(CUT))
    x, n = np.linspace(-2, 2, 40, dtype=np.float32).reshape(10, 4), np.array(3, np.int64)
    want = f(x, n)
    for got in (f(on_device(device, x), n), f.run({"count": on_device(device, n), "x": on_device(device, x)})):
        assert all(isinstance(r, DeviceBuffer) for r in got)
        for a, b in zip(got, want):
            np.testing.assert_array_equal(a.get(), b)
    outs = [device.empty(w.shape, w.dtype) for w in want]
    f.run([on_device(device, x), n], outs)
    np.testing.assert_array_equal(outs[1].get(), want[1])
    with pytest.raises(dnnc.InputError, match="output y: expected a writable array"):
        f.run([on_device(device, x), n], [device.empty((4, 4), np.dtype("f4")), outs[1]])
    np.testing.assert_array_equal(f(x, on_device(device, n))[1], want[1])


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_index_outside_is_an_error_once(device: InterpretedDevice) -> None:
    g = graph_of(NET)
    f = compiled(g)
    x, i = arrays_for(g)
    for _ in range(2):
        with pytest.raises(dnnc.InputError, match=r"an index read at run time, 7, lies outside of its axis, in gather"):
            f(x, np.array([0, 7, 1]))
        check(f, g, [x, i])


def on_device(device: InterpretedDevice, a: Any) -> DeviceBuffer:
    return device.empty(a.shape, a.dtype).set(a)


@pytest.mark.slow
def test_arrays_on_the_device_stay_there(device: InterpretedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    g = graph_of(NET)
    f = compiled(g)
    x, i = arrays_for(g)
    want = f(x, i)
    given = on_device(device, x), on_device(device, i)
    status = []
    monkeypatch.setattr(device, "download", lambda to, source, stream: status.append(to.nbytes))
    got = f(*given)
    assert all(isinstance(r, DeviceBuffer) for r in got)
    assert status == [16]  # of the host nothing but the status of the gather is wanted
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a.get(), b)


@pytest.mark.slow
def test_the_first_input_decides(device: InterpretedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    g = graph_of(NET)
    f = compiled(g)
    x, i = arrays_for(g)
    monkeypatch.setattr("dnnc.executable.to_host", lambda a: a.get())
    want = f(x, i)
    mixed = f(on_device(device, x), i)
    host = f(x, on_device(device, i))
    for a, b, c in zip(want, mixed, host):
        assert isinstance(b, DeviceBuffer) and isinstance(c, np.ndarray)
        np.testing.assert_array_equal(a, b.get())
        np.testing.assert_array_equal(a, c)


@pytest.mark.slow
def test_run_into_buffers(device: InterpretedDevice) -> None:
    g = graph_of(NET)
    f = compiled(g)
    x, i = arrays_for(g)
    want = f(x, i)
    outs = [np.empty_like(w) for w in want]
    assert f.run([x, i], outs)[0] is outs[0]
    there = [device.empty(w.shape, w.dtype) for w in want]
    f.run({"x": on_device(device, x), "i": on_device(device, i)}, there, stream=0)
    for a, b, c in zip(want, outs, there):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c.get())


@pytest.mark.slow
def test_bound_calls_copy_nothing(device: InterpretedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    g = graph_of(NET)
    f = compiled(g)
    x, i = arrays_for(g)
    dx, di = on_device(device, x), on_device(device, i)
    outs = [device.empty(s, d) for s, d in (((3, 24), np.dtype("f4")), ((4,), np.dtype("f4")))]
    call = f.bind([dx, di], outs)
    monkeypatch.setattr(device, "copy", lambda *args: pytest.fail("a copy"))
    for seed in range(3):
        x, _ = arrays_for(g, seed=seed)
        dx.set(x)
        call()
        call.check()
        np.testing.assert_allclose(outs[0].get(), run(g, [x, i], precision="float64")[0], rtol=1e-5, atol=1e-7)
    di.set(np.array([0, 99, 0]))
    call()
    with pytest.raises(dnnc.InputError, match="outside of its axis"):
        call.check()
    call.check()  # told once


def test_bound_to_numpy_arrays(device: InterpretedDevice) -> None:
    x, y = np.ones(5, np.float32), np.empty(5, np.float32)
    call = compiled("def net(x: f32[5]):\n    return mul(x, 3.0)").bind([x], [y])
    call()
    assert (y == 3).all()
    x[:] = 2
    call()
    assert (y == 6).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d, x, y: ([d.empty((4,), np.dtype("f8"))], [y]), "input x: expected float32, got float64"),
        (lambda d, x, y: ([d.empty((2, 2), np.dtype("f4"))], [y]), "input x: expected 1 dimension,"),
        (
            lambda d, x, y: ([x], [d.empty((5,), np.dtype("f4"))]),
            r"output v0: expected a contiguous array float32 \(4,\), got float32 \(5,\)",
        ),
        (lambda d, x, y: ([x], [np.empty(4, np.float32)]), "output v0: expected an array on the device"),
        (lambda d, x, y: ([x], [x]), "output v0 overlaps another buffer"),
        (lambda d, x, y: ([x], []), "the model has 1 output, got 0 buffers"),
    ],
)
def test_refused_buffers(change: Any, message: str, device: InterpretedDevice) -> None:
    f = compiled("def net(x: f32[4]):\n    return relu(x)")
    inputs, outputs = change(device, device.empty((4,), np.dtype("f4")), device.empty((4,), np.dtype("f4")))
    with pytest.raises(dnnc.InputError, match=message):
        f.run(inputs, outputs)


def test_calls_from_many_threads_share_a_bounded_number_of_frames(device: InterpretedDevice) -> None:
    f = compiled("def net(x: f32[64]):\n    return mul(add(x, 1.0), 2.0)")
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(5):
            if not (f(np.full(64, k, np.float32)) == 2 * (k + 1)).all():
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2 * MAX_FRAMES)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and device.graphs <= MAX_FRAMES


def test_memory_is_given_back(device: InterpretedDevice) -> None:
    f = compiled(STACKED)
    g = graph_of(STACKED)
    check(f, g, arrays_for(g))
    assert device.allocated > 0
    del f
    assert device.allocated == 0


# --- without a device, files, texts -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_where_no_device_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = InterpretedDevice()

    def absent() -> Any:
        raise dnnc.TargetError("there is none")

    install(monkeypatch, own, present=False)
    monkeypatch.setattr(InterpretedBackend, "_open", lambda self: absent())
    g = graph_of(NET)
    f = compiled(g)
    kernels = len(f.programs[0].code)
    assert own.launched == 0 and f"{kernels} kernels unverified" in str(f.report)
    with pytest.raises(dnnc.TargetError, match="there is none"):
        f(*arrays_for(g))
    f.save(tmp_path / "m.dnnc")
    monkeypatch.undo()
    install(monkeypatch, own)
    monkeypatch.setattr(
        "dnnc.backends.cuda.interpreted.TextCompiler.compile", lambda *_: pytest.fail("it is in the file")
    )
    loaded = dnnc.load(tmp_path / "m.dnnc", cache=False)
    assert own.launched >= kernels and loaded.programs[0].checks == {}  # checked where it was first loaded
    check(loaded, g, arrays_for(g))
    loaded.save(tmp_path / "checked.dnnc")
    before = own.launched
    dnnc.load(tmp_path / "checked.dnnc", cache=False)
    assert own.launched == before


@pytest.mark.slow
def test_code_false_compiles_again(tmp_path: Path, device: InterpretedDevice) -> None:
    compiled(NET).save(tmp_path / "m.dnnc")
    f = dnnc.load(tmp_path / "m.dnnc", code=False, cache=False)
    assert f.programs[0].compiled == len(f.programs[0].code) and "code=False" in f.report.notes[0]
    assert dnnc.load(tmp_path / "m.dnnc", cache=False).programs[0].compiled == 0


@pytest.mark.slow
def test_kernels_come_from_the_cache_checked(tmp_path: Path, device: InterpretedDevice) -> None:
    first = compiled(NET, cache=tmp_path)
    before = device.launched
    again = compiled(NET, cache=tmp_path)
    assert first.programs[0].compiled > 0 == again.programs[0].compiled and device.launched == before


@pytest.mark.slow
def test_sources(device: InterpretedDevice) -> None:
    f = compiled(NET)
    native: Program = f.programs[0]
    assert f.source("graph") == native.graph_text(False)
    assert "block.x" in f.source("operator", "0")
    text = f.source("cuda")
    assert all("void __launch_bounds__" in text and s in text for s in native.code)
    with pytest.raises(
        dnnc.InputError, match="there is no stage 'llvm' for this target; there are graph, operator, cuda, ptx"
    ):
        f.source("llvm")
    assert "2 times" not in f.source("operator") and "5 times" in compiled(STACKED).source("operator")


@pytest.mark.slow
def test_profile(device: InterpretedDevice) -> None:
    g = graph_of(STACKED)
    p = compiled(g).profile(*arrays_for(g), repeats=3)
    assert p.repeats == 3 and len(p.calls) == sum(k.calls for k in p.kernels) >= 10
    assert all(
        c.seconds == pytest.approx(1e-6) for c in p.calls
    )  # the interpreted device counts a microsecond a kernel
    assert {"L2", "compute"} >= {k.bound for k in p.kernels} and "kernels (" in str(p)
    assert compiled(WHILE).profile(np.int64(3), np.ones(3, np.float32), repeats=2).calls


def test_targets_that_are_none() -> None:
    with pytest.raises(dnnc.TargetError, match="unknown architecture sm_42"):
        dnnc.compile(graph_of(NET), target="cuda -arch=sm_42")


def test_a_schedule_that_does_not_hold_gives_way(device: InterpretedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(problem: Any, knobs: Any) -> Any:
        raise dnnc.ir.errors.VerifyError("cannot show it")

    install(monkeypatch, device, templates=[Template("first", lambda p: [()], apply)])
    monkeypatch.delenv("DNNC_STRICT")
    g = graph_of(NET)
    f = compiled(g)
    check(f, g, arrays_for(g))
    assert not any(k.choice.startswith("first") for k in f.programs[0].kernels)
    monkeypatch.setenv("DNNC_CHECK", "1")  # who works on schedules wants to know
    with pytest.raises(dnnc.ir.errors.InternalError, match=r"schedule first.. does not apply to .*: cannot show it"):
        compiled(g)
