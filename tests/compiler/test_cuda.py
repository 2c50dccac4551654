"""Programs on a real CUDA device: what the interpreted one cannot show. `make gpu` runs these; they need CuPy, and one
of them torch.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_programs import NET, ODD_ROWS, RECURRENT, STACKED, WHILE

import dnnc
from dnnc.backends.cuda.device import open_device
from dnnc.ir.graph import Graph
from dnnc.ir.graph.interp import run
from dnnc.tools.sample_graphs import graph_of

pytestmark = pytest.mark.gpu
PLAIN = """
def net(x: f32[128, 768], *, w: f32[768, 768]):
    return relu(matmul(tanh(x), w))
"""


def compiled(text: str, **options: Any) -> Any:
    return dnnc.compile(graph_of(text), **{"target": "cuda", "cache": False, **options})


def arrays_for(g: Graph, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    shapes = [(v.type.dtype.is_float, tuple(int(str(d)) for d in v.type.shape)) for v in g.inputs]
    return [
        rng.standard_normal(s).astype(np.float32) if is_float else np.asarray(rng.integers(0, 3, s))
        for is_float, s in shapes
    ]


def check(got: Any, g: Graph, arrays: list[Any]) -> None:
    for a, b in zip(got if isinstance(got, tuple) else (got,), run(g, arrays, precision="float64"), strict=True):
        np.testing.assert_allclose(np.asarray(a.get() if hasattr(a, "get") else a), b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", [NET, PLAIN, STACKED, RECURRENT, ODD_ROWS, WHILE])
def test_numpy_and_cupy(text: str) -> None:
    import cupy

    g = graph_of(text)
    f = compiled(text)
    for seed in range(3):
        arrays = arrays_for(g, seed)
        check(f(*arrays), g, arrays)
        made = f(*map(cupy.asarray, arrays))
        assert all(isinstance(r, cupy.ndarray) for r in (made if isinstance(made, tuple) else (made,)))
        check(made, g, arrays)


def test_torch_tensors_on_their_stream() -> None:
    import torch

    g = graph_of(PLAIN)
    f = compiled(PLAIN)
    (x,) = arrays_for(g)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        given = torch.zeros(128, 768, device="cuda")
        for _ in range(50):  # the call must wait for what the stream still does
            given = given + torch.from_numpy(x).cuda() / 50
        made = f(given)
    stream.synchronize()
    assert isinstance(made, torch.Tensor) and made.is_cuda
    np.testing.assert_allclose(made.cpu().numpy(), f(x), rtol=1e-4, atol=1e-4)


def test_half_precision_tensors() -> None:
    import torch

    f = compiled("def net(x: bf16[64, 32]):\n    return mul(x, 2.0)")
    x = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(f(x), x * 2)


def test_an_index_outside_is_an_error_once() -> None:
    g = graph_of(NET)
    f = compiled(NET)
    x, i = arrays_for(g)
    with pytest.raises(dnnc.InputError, match=r"index read at run time, 7, lies outside of its axis, in gather"):
        f(x, np.array([0, 7, 1]))
    check(f(x, i), g, [x, i])


def test_a_bound_call_is_one_launch() -> None:
    import cupy

    g = graph_of(PLAIN)
    f = compiled(PLAIN)
    (x,) = arrays_for(g)
    there, out = cupy.asarray(x), cupy.empty((128, 768), np.float32)
    call = f.bind([there], [out])
    call()
    cupy.cuda.get_current_stream().synchronize()
    check(out, g, [x])
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(20):
            call()
        best = min(best, (time.perf_counter() - start) / 20)
        cupy.cuda.get_current_stream().synchronize()
    assert best < 15e-6


def test_calls_from_many_threads() -> None:
    f = compiled(PLAIN)
    (x,) = arrays_for(graph_of(PLAIN))
    want = f(x)
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(20):
            if not np.array_equal(f(x), want):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_saved_and_loaded(tmp_path: Path) -> None:
    f = compiled(PLAIN)
    (x,) = arrays_for(graph_of(PLAIN))
    f.save(tmp_path / "m.dnnc")
    loaded = dnnc.load(tmp_path / "m.dnnc", cache=False)
    assert loaded.programs[0].compiled == 0 and loaded.programs[0].checks == {}
    np.testing.assert_array_equal(loaded(x), f(x))


def test_profile() -> None:
    p = compiled(PLAIN).profile(*arrays_for(graph_of(PLAIN)), repeats=20)
    assert p.calls and all(0 < c.seconds < 1e-2 for c in p.calls) and p.total < 1


def test_too_much_memory_is_told() -> None:
    device = open_device()
    with pytest.raises(dnnc.TargetError, match="has no room for"):
        device.alloc(1 << 45)


def test_verify_model() -> None:
    compiled(PLAIN, verify="model")
