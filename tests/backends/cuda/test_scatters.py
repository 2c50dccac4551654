"""Scatters that share a kernel: caches of keys and values that take a token each."""

from __future__ import annotations

import numpy as np
import pytest

import dnnc
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse

CACHES = """def g(
    keys: {t}[2, 6, 8], values: {t}[2, 6, 8], at: i64[3, 2], other: i64[3, 2], k: {t}[3, 8], v: {t}[3, 8]
):
    a = scatter_nd(keys, at, mul(k, 2.0){how})
    b = scatter_nd(values, {at}, v{how})
    return a, b"""


def compiled(text: str, **options: object) -> dnnc.Executable:
    return dnnc.compile(parse(text), target="cuda-interpreted", cache=False, **options)


@pytest.mark.parametrize("t, how", [("f16", ""), ("f32", ""), ("f32", ", reduction='add'")])
@pytest.mark.parametrize("repeated", [False, True])
def test_updates_of_the_same_places_are_one_kernel(t: str, how: str, repeated: bool) -> None:
    text = CACHES.format(t=t, at="at", how=how)
    f = compiled(text, donate={"keys": "a", "values": "b"})
    assert [k.choice.partition("(")[0] for k in f.report.programs[-1].kernels] == ["scatter"]
    rng = np.random.default_rng(0)
    kind = np.dtype("float16" if t == "f16" else "float32")
    at = np.array([[0, 1], [1, 1], [0, 1]] if repeated else [[0, 1], [1, -1], [1, 2]])
    given = [rng.integers(-4, 5, s).astype(kind) for s in ((2, 6, 8), (2, 6, 8), (3, 8), (3, 8))]
    inputs = [given[0], given[1], at, at, *given[2:]]
    wants = run(parse(text), inputs, "float64")
    for got, want in zip(f(*inputs), wants, strict=True):
        np.testing.assert_array_equal(np.asarray(got), want)


F32 = CACHES.format(t="f32", at="at", how="")
BOTH = {"keys": "a", "values": "b"}


@pytest.mark.parametrize(
    "text, donate",
    [
        (CACHES.format(t="f32", at="other", how=""), BOTH),  # other places
        (F32, {"keys": "a"}),  # a copy of one array
        (F32.replace("at, v)", "at, v, reduction='add')"), BOTH),
        (F32.replace("scatter_nd(values", "scatter_nd(a"), {"keys": "b"}),
        (F32.replace("8]", "8192]"), BOTH),  # large updates
    ],
)
def test_others_keep_kernels_of_their_own(text: str, donate: dict[str, str]) -> None:
    if "scatter_nd(a" in text:
        text = text.replace("return a, b", "return b").replace("values: f32[2, 6, 8], ", "")
    f = compiled(text, donate=donate)
    assert [k.choice.partition("(")[0] for k in f.report.programs[-1].kernels] == ["scatter"] * 2
