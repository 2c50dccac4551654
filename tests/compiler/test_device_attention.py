"""A transformer's attention on a CUDA device, which is the interpreter: heads cut out of one product, a mask that says
never, caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_device import one_device, there

from dnnc.backends.cuda.interpreted import InterpretedDevice
from dnnc.compile_graph import compile_graph
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse
from dnnc.options import make_options

CUT = """\
    y: f32[2, {s}, 96] = add(matmul(x, w), d)
    q: f32[2, 2, {s}, 16] = transpose(reshape(slice(y, starts=(0, 0, 0), steps=(1, 1, 1), shape=(2, {s}, 32)),
        shape=(2, {s}, 2, 16)), perm=(0, 2, 1, 3))
    k: f32[2, 2, {s}, 16] = transpose(reshape(slice(y, starts=(0, 0, 32), steps=(1, 1, 1), shape=(2, {s}, 32)),
        shape=(2, {s}, 2, 16)), perm=(0, 2, 1, 3))
    v: f32[2, 2, {s}, 16] = transpose(reshape(slice(y, starts=(0, 0, 64), steps=(1, 1, 1), shape=(2, {s}, 32)),
        shape=(2, {s}, 2, 16)), perm=(0, 2, 1, 3))
"""
PREFILL = (
    "def g(x: f32[2, 9, 16], *, w: f32[16, 96], d: f32[96], m: f32[9, 9]):\n"
    + CUT.format(s=9)
    + "    return attention(q, k, v, m, scale=0.25)\n"
)
DECODE = (
    "def g(x: f32[2, 1, 16], k0: f32[2, 2, 7, 16], v0: f32[2, 2, 7, 16], *, w: f32[16, 96], d: f32[96]):\n"
    + CUT.format(s=1)
    + "    k1 = concat(k0, k, axis=2)\n    v1 = concat(v0, v, axis=2)\n    return attention(q, k1, v1, scale=0.25), "
    "k1, v1\n"
)
RNG = np.random.default_rng(5)
CONSTANTS = {
    "w": RNG.standard_normal((16, 96)).astype(np.float32) / 4,
    "d": RNG.standard_normal(96).astype(np.float32),
    "m": np.triu(np.full((9, 9), np.finfo(np.float32).min, np.float32), 1),
}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[InterpretedDevice]:
    yield from one_device(monkeypatch, tmp_path)


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("precision", [None, "float16", "bfloat16"])
@pytest.mark.parametrize(("text", "kernels"), [(PREFILL, 2), (DECODE, 4)], ids=["prefill", "decode"])
def test_heads_of_one_product(text: str, kernels: int, precision: str | None, device: InterpretedDevice) -> None:
    def model() -> Any:
        return parse(text, {n: a for n, a in CONSTANTS.items() if f" {n}: " in text})

    g = model()
    arrays = [RNG.standard_normal([int(d) for d in v.type.shape]).astype(np.float32) for v in g.inputs]  # type: ignore[call-overload]
    want = run(model(), arrays, "float64")
    f = compile_graph(
        g,
        ([v.name for v in g.inputs], [v.name for v in g.outputs]),
        make_options({"cache": False, "target": "cuda", "precision": precision}),
    )
    got = f(*there(device, *arrays))
    eps = {None: 2.0**-21, "float16": 2.0**-11, "bfloat16": 2.0**-8}[precision]
    for a, b in zip(got if isinstance(got, tuple) else (got,), want):
        assert (
            np.abs(a.get() - b).max() <= 4 * eps * np.abs(b).max()
        )  # operands, sums and results are rounded once each
    report = f.report.programs[-1]
    casts = [k for k in report.kernels if k.name == "cast"]  # of what comes from the caller and goes there
    assert report.calls - sum(k.count for k in casts if precision) == kernels, [k.name for k in report.kernels]
    assert not any(k.name.startswith(("slice", "transpose")) for k in report.kernels)
