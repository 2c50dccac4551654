"""Parameters that lie on the device, which is the interpreter: kernels read them there, what is packed is packed when
they are bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_device import GPU, one_device, there
from test_parameters import LOOP, NET, contents

import dnnc
import dnnc.array as xp
from dnnc.backends.cuda.interpreted import InterpretedDevice
from dnnc.backends.runtime.prologue import LEAST
from dnnc.compile_graph import compile_graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.options import make_options

Array = np.ndarray[Any, Any]
TABLE = "def g(i: i64[3], e: f32[512, 4], b: f32[4]):\n    y: f32[3, 4] = add(gather(e, i), b)\n    return y\n"
INDICES = np.array([0, 4, 1])


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[InterpretedDevice]:
    yield from one_device(monkeypatch, tmp_path)


def compiled(text: str, held: dict[str, Any], **options: Any) -> Any:
    g = parse(text)
    return compile_graph(
        g,
        ([v.name for v in g.inputs], [v.name for v in g.outputs]),
        make_options({"cache": False, "target": "cuda", **options}),
        parameters=held,
    )


def test_examples_are_not_copied(device: InterpretedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a trace is given to see a shape, and what becomes a parameter, stays where it is."""
    taken: list[int] = []
    alloc = device.alloc
    monkeypatch.setattr(device, "alloc", lambda nbytes: taken.append(nbytes) or alloc(nbytes))
    e, i = there(device, np.ones((512, 64), np.float32), INDICES)
    taken.clear()
    g = dnnc.trace(lambda t, i: t[i] * 2, e, i)
    assert not taken
    assert [str(v.type) for v in g.inputs] == ["f32[512, 64]", "i64[3]"]
    held = device.allocated
    f = dnnc.compile(
        lambda t, i: t[i] * 2, inputs=[dnnc.Spec((3,), "int64")], parameters={"t": e}, target="cuda", cache=False
    )
    assert (f(i).get() == 2).all()
    assert (dnnc.jit(lambda t, i: t[i] * 2)(e, i).numpy() == 2).all()
    assert device.allocated - held < e.nbytes // 2
    assert e.nbytes not in taken  # the check of the kernel takes more, for a moment


def test_kernels_read_the_owners_memory(device: InterpretedDevice) -> None:
    e, b = there(device, np.ones((512, 4), np.float32), np.zeros(4, np.float32))
    before = device.allocated
    f = compiled(TABLE, {"e": e, "b": b})
    (i,) = there(device, INDICES)
    assert (f(i).get() == 1).all() and (f(INDICES) == 1).all()
    assert device.allocated - before < e.nbytes
    e.set(np.full((512, 4), 2, np.float32))  # seen at once, as there are no copies
    b.set(np.full(4, 5, np.float32))
    assert (f(i).get() == 7).all() and (f(INDICES) == 7).all()
    (other,) = there(device, np.full((512, 4), 3, np.float32))
    f.refit({"e": other})
    assert (f(i).get() == 8).all() and (f(INDICES) == 8).all()
    e.set(np.zeros((512, 4), np.float32))
    assert (f(i).get() == 8).all()
    f.refit({"e": np.full((512, 4), 1, np.float32)})  # one of NumPy's is copied
    assert (f(i).get() == 6).all()
    assert np.array_equal(run(f.frozen(), [INDICES])[0], np.full((3, 4), 6, np.float32))


def test_the_owner_is_kept_alive(device: InterpretedDevice) -> None:
    f = compiled(TABLE, dict(zip(("e", "b"), there(device, np.ones((512, 4), np.float32), np.zeros(4, np.float32)))))
    assert (f(INDICES) == 1).all()
    held = device.allocated
    for _ in range(4):
        f.refit({"e": there(device, np.ones((512, 4), np.float32))[0]})
        assert (f(INDICES) == 1).all()
    assert device.allocated < held + 3 * 8192


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("text", [NET, LOOP], ids=["net", "loop"])
@pytest.mark.parametrize("options", [{}, {"precision": "float16"}], ids=str)
@pytest.mark.parametrize("least", [1, LEAST], ids=["by kernels", "by NumPy"])
def test_what_is_packed_and_what_is_not(
    least: int, text: str, options: dict[str, Any], device: InterpretedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some parameters are packed, others read as they lie, some lie on the host."""
    monkeypatch.setattr("dnnc.backends.runtime.prologue.LEAST", least)
    given = contents(text)
    weights = {n: a for n, a in given.items() if n != "x"}
    near = 1e-4 if not options else 5e-2

    def placed(arrays: dict[str, Array], every: int) -> dict[str, Any]:
        return {n: there(device, a)[0] if k % 3 != every else a for k, (n, a) in enumerate(arrays.items())}

    def check(now: dict[str, Array]) -> None:
        want = run(parse(text), [given["x"], *now.values()], precision="float64")[0]
        np.testing.assert_allclose(f(given["x"]), want, rtol=near, atol=near)

    f = compiled(text, placed(weights, 3), **options)
    check(weights)
    assert all((n.prologue.kernels is not None) == (least == 1) for n in f.programs if n.prologue.types)
    for every in range(3):
        weights = {n: a * np.float32(0.9) for n, a in weights.items()}
        f.refit(placed(weights, every))
        check(weights)


def test_memory_that_begins_where_kernels_do_not_count_on(device: InterpretedDevice) -> None:
    block = device.empty((5,), np.dtype(np.float32)).set(np.arange(5, dtype=np.float32))
    b = device.view(block.address + 4, (4,), np.dtype(np.float32), block)
    f = compiled(TABLE, {"e": there(device, np.ones((512, 4), np.float32))[0], "b": b})
    for k in range(2):
        np.testing.assert_array_equal(f(INDICES)[1], np.arange(2, 6) + k)
        block.set(np.arange(5, dtype=np.float32) + 1)
        f.refit()


@pytest.mark.slow
def test_errors(device: InterpretedDevice) -> None:
    e, b, wrong, x = there(
        device, np.ones((512, 4), np.float32), np.zeros(4, np.float32), np.zeros(4), np.ones(4, np.float32)
    )
    f = compiled(TABLE, {"e": e, "b": b})
    for array, message in (
        (wrong, "parameter b: expected float32, got float64"),
        (there(device, np.zeros(3, np.float32))[0], r"expected shape \[4\]"),
    ):
        with pytest.raises(dnnc.InputError, match=message):
            f.refit({"b": array})
        assert (f(INDICES) == 1).all()
    g = compiled("def g(x: f32[4], w: f32[4]):\n    y: f32[4] = mul(x, w)\n    return y\n", {"w": b}, donate={"x": "y"})
    with pytest.raises(dnnc.InputError, match="input x is donated, and a parameter lies in its memory"):
        g(b)
    with pytest.raises(dnnc.InputError, match="output y overlaps another buffer"):
        g.run([x], [b])
    assert g(x) is x


def layer(params: Any, x: Any) -> Any:
    return xp.tanh(x @ params["w"] + params["b"])


def test_functions(device: InterpretedDevice) -> None:
    rng = np.random.default_rng(0)
    host = {"w": rng.standard_normal((4, 8), np.float32), "b": rng.standard_normal(8, np.float32)}
    x = rng.standard_normal((5, 4), np.float32)
    params = {n: xp.asarray(a, device=GPU) for n, a in host.items()}
    f = dnnc.compile(layer, inputs=[dnnc.Spec((5, 4))], parameters={"params": params}, target="cuda", cache=False)
    g = dnnc.jit(layer, parameters="params", cache=False)
    there_x = xp.asarray(x, device=GPU)
    for scale in (1, 2):
        want = np.tanh(x @ host["w"] * scale + host["b"])
        params["w"] = xp.asarray(host["w"] * np.float32(scale), device=GPU)
        f.refit({"params": params})
        for _ in range(3):
            np.testing.assert_allclose(f(x), want, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(g(params, there_x).numpy(), want, rtol=1e-5, atol=1e-5)
    ((program, _),) = g._programs.values()
    refits: list[Any] = []
    program.program.refit = refits.append
    mine = dict(zip(host, there(device, *host.values())))
    for _ in range(3):
        g(mine, there_x)
    assert len(refits) == 1


def test_views_are_read_there_too(device: InterpretedDevice) -> None:
    text = (
        "def g(x: f32[4, 8], w: f32[2, 4, 8]):\n    y: f32[8, 8] = concat(x, x, axis=0)\n"
        "    z: f32[8, 8] = mul(y, reshape(w, shape=(8, 8)))\n    return z\n"
    )
    x, host = np.ones((4, 8), np.float32), np.arange(64, dtype=np.float32).reshape(2, 4, 8)
    (w,) = there(device, host)
    f = compiled(text, {"w": w})
    np.testing.assert_array_equal(f(x), host.reshape(8, 8))
    w.set(host * 2)
    np.testing.assert_array_equal(f(x), host.reshape(8, 8) * 2)
