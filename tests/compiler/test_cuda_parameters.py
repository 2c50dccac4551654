"""Parameters that lie on a real CUDA device: kernels read them in their owner's memory. `make gpu` runs these; they
need CuPy, and one of them torch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dnnc
import dnnc.array as xp

pytestmark = pytest.mark.gpu
Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(7)
SHAPES = {"table": (8192, 256), "w": (256, 512), "b": (512,), "v": (128, 512)}


def net(params: Any, i: Any) -> Any:
    """Kernels read the table, `w` and `b` as they lie; of `v` they may want another order."""
    h = xp.tanh(params["table"][i] @ params["w"] + params["b"])
    return h @ params["v"].T


def expected(p: dict[str, Array], i: Array) -> Array:
    p = {n: a.astype(np.float64) for n, a in p.items()}
    return np.tanh(p["table"][i] @ p["w"] + p["b"]) @ p["v"].T


def contents() -> dict[str, Array]:
    return {n: (RNG.standard_normal(s) * 0.05).astype(np.float32) for n, s in SHAPES.items()}


def compiled(params: Any) -> Any:
    return dnnc.compile(net, inputs=[dnnc.Spec((16,), "int64")], parameters={"params": params}, target="cuda")


def close(got: Any, want: Array) -> None:
    np.testing.assert_allclose(got.get() if hasattr(got, "get") else np.asarray(got), want, rtol=2e-3, atol=2e-3)


def test_cupy() -> None:
    import cupy

    host, i = contents(), RNG.integers(0, SHAPES["table"][0], 16)
    params = {n: cupy.asarray(a) for n, a in host.items()}
    f = compiled(params)
    there = cupy.asarray(i)
    out = cupy.empty((16, 128), np.float32)
    for _ in range(2):
        close(f(there), expected(host, i))
        close(f(i), expected(host, i))
    (native,) = f.programs
    read = {r.array.address for r in native.loaded.references}
    assert {params[n].data.ptr for n in ("table", "b")} <= read
    params["table"] *= 2  # the owner writes into one, and says so
    params["v"] += 0.125
    f.refit()
    host = {n: a.get() for n, a in params.items()}
    close(f(there), expected(host, i))
    call = f.bind([there], [out])
    call()
    close(out, expected(host, i))
    for k in range(3):  # others of the same types, some of them on the host
        host = contents()
        f.refit({"params": {n: a if k == 2 and n == "table" else cupy.asarray(a) for n, a in host.items()}})
        close(f(there), expected(host, i))
        close(f(i), expected(host, i))


def test_no_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted where it is taken: what the device says is free depends on other processes too. The kernel's check takes
    some for a moment.
    """
    import cupy

    from dnnc.backends.cuda.device import CupyDevice

    live: dict[int, int] = {}
    malloc, free, pool = CupyDevice.malloc, CupyDevice.free, cupy.get_default_memory_pool()

    def counted(device: CupyDevice, nbytes: int) -> int:
        address = malloc(device, nbytes)
        live[address] = nbytes
        return address

    def freed(device: CupyDevice, address: int) -> None:
        live.pop(address, None)
        free(device, address)

    monkeypatch.setattr(CupyDevice, "malloc", counted)
    monkeypatch.setattr(CupyDevice, "free", freed)
    big, i = cupy.ones((1 << 16, 1024), np.float32), cupy.arange(4)  # 256 MB
    held = pool.total_bytes()
    f = dnnc.compile(lambda t, i: t[i] * 2, inputs=[dnnc.Spec((4,), "int64")], parameters={"t": big}, target="cuda")
    assert (f(i) == 2).all()
    assert live and sum(live.values()) + pool.total_bytes() - held < big.nbytes // 2


def test_torch() -> None:
    import torch

    host, i = contents(), RNG.integers(0, SHAPES["table"][0], 16)
    params = {n: torch.tensor(a, device="cuda") for n, a in host.items()}
    f = compiled(params)
    there = torch.tensor(i, device="cuda")
    close(f(there).cpu(), expected(host, i))
    for p in params.values():
        p.mul_(0.5)
    f.refit()
    close(f(there).cpu(), expected({n: a * np.float32(0.5) for n, a in host.items()}, i))


def test_arrays_of_dnnc() -> None:
    host, i = contents(), RNG.integers(0, SHAPES["table"][0], 16)
    params = {n: xp.asarray(a, device="cuda:0") for n, a in host.items()}
    f = dnnc.jit(net, parameters="params")
    there = xp.asarray(i, device="cuda:0")
    for k in range(3):
        close(f(params, there).numpy(), expected(host, i))
        host["b"] = host["b"] + np.float32(k)
        params["b"] = params["b"] + k
    assert f.traces == 1


def test_errors() -> None:
    import cupy

    w = cupy.ones(64, np.float32)
    f = dnnc.compile(
        lambda x, w: x * w, inputs=[dnnc.Spec((64,))], parameters={"w": w}, donate={"x": "result"}, target="cuda"
    )
    x = cupy.full(64, 3, np.float32)
    with pytest.raises(dnnc.InputError, match="input x is donated, and a parameter lies in its memory"):
        f(w)
    with pytest.raises(dnnc.InputError, match="output result overlaps another buffer"):
        f.run([x], [w])
    with pytest.raises(dnnc.InputError, match="parameter w: expected float32, got float64"):
        f.refit({"w": cupy.ones(64)})
    assert f(x) is x and (x == 3).all()
