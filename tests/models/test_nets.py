"""Whole networks, small and seeded: every level, threads, batch sizes, against the float64 interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dnnc
from dnnc.ir.graph import Graph
from dnnc.ir.graph.text import parse
from dnnc.tools.accuracy import first_difference
from dnnc.tools.sample_graphs import graph_of

pytestmark = [pytest.mark.family("shapes"), pytest.mark.slow]

# `N` is the batch. Sizes are odd on purpose: channels that fill no vector, images that fill no tile.
NETS = {
    "residual": """def net(x: f32[N, 3, 19, 19], *, w0: f32[24, 3, 5, 5], s0: f32[24], w1: f32[24, 24, 3, 3],
        b1: f32[24], w2: f32[24, 24, 3, 3], w3: f32[40, 24, 1, 1], w4: f32[40, 40, 3, 3], m: f32[40, 11], c: f32[11]):
    a = relu(batch_norm(conv(x, w0, strides=(2, 2), pads=(2, 2, 2, 2)), s0, s0, s0, abs(s0)))
    p = max_pool(a, kernel=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1))
    r1 = relu(add(conv(relu(conv(p, w1, b1, pads=(1, 1, 1, 1))), w2, pads=(1, 1, 1, 1)), p))
    d = conv(r1, w3, strides=(2, 2))
    r2 = relu(add(conv(d, w4, pads=(1, 1, 1, 1)), d))
    return softmax(gemm(flatten(global_avg_pool(r2)), m, c))
""",
    (
        "separable with gates"
    ): """def net(x: f32[N, 8, 14, 14], *, e: f32[40, 8, 1, 1], d: f32[40, 1, 5, 5], q: f32[10, 40, 1, 1],
        u: f32[40, 10, 1, 1], p: f32[8, 40, 1, 1]):
    h = hard_swish(conv(x, e))
    h2 = hard_swish(conv(h, d, group=40, pads=(2, 2, 2, 2)))
    g = hard_sigmoid(conv(relu(conv(global_avg_pool(h2), q)), u))
    return add(conv(mul(h2, g), p), x)
""",
    "attention": """def net(x: f32[N, 9, 32], m: f32[N, 1, 1, 9], *, q: f32[32, 32], k: f32[32, 32], v: f32[32, 32],
        o: f32[32, 32], s: f32[32], b: f32[32], f: f32[32, 70], g: f32[70, 32]):
    hq = transpose(reshape(matmul(x, q), shape=(N, 9, 2, 16)), perm=(0, 2, 1, 3))
    hk = transpose(reshape(matmul(x, k), shape=(N, 9, 2, 16)), perm=(0, 2, 3, 1))
    hv = transpose(reshape(matmul(x, v), shape=(N, 9, 2, 16)), perm=(0, 2, 1, 3))
    w = softmax(add(mul(matmul(hq, hk), 0.25), m))
    c = reshape(transpose(matmul(w, hv), perm=(0, 2, 1, 3)), shape=(N, 9, 32))
    y = layer_norm(add(matmul(c, o), x), s, b)
    return layer_norm(add(matmul(gelu(matmul(y, f)), g), y), s, b)
""",
    (
        "down and up"
    ): """def net(x: f32[N, 3, 12, 12], *, a: f32[16, 3, 3, 3], b: f32[33, 16, 3, 3], t: f32[33, 16, 2, 2],
        c: f32[16, 32, 3, 3], o: f32[2, 16, 1, 1]):
    h = relu(conv(x, a, pads=(1, 1, 1, 1)))
    l = relu(conv(max_pool(h, kernel=(2, 2), strides=(2, 2)), b, pads=(1, 1, 1, 1)))
    u = conv_transpose(l, t, strides=(2, 2))
    j = relu(conv(concat(h, u, axis=1), c, pads=(1, 1, 1, 1)))
    return sigmoid(conv(j, o)), argmax(conv(j, o), axis=1)
""",
    (
        "densely connected"
    ): """def net(x: f32[N, 16, 7, 7], *, a: f32[12, 16, 3, 3], b: f32[12, 28, 3, 3], s: f32[40], t: f32[20, 40, 1, 1]):
    y = concat(x, relu(conv(x, a, pads=(1, 1, 1, 1))), axis=1)
    z = concat(y, relu(conv(y, b, pads=(1, 1, 1, 1))), axis=1)
    return avg_pool(conv(relu(batch_norm(z, s, s, s, abs(s))), t), kernel=(2, 2), strides=(2, 2)), y
""",
    "tokens": """def net(i: i64[N, 6], *, e: f32[50, 24], w: f32[24, 24], r: f32[50, 24]):
    h = gather(e, i, axis=0)
    p = cast(unsqueeze(not_equal(i, 0), axes=(2,)), to=f32)
    z = tanh(matmul(mul(h, p), w))
    mean = div(reduce_sum(mul(z, p), axes=(1,)), add(reduce_sum(p, axes=(1,)), 0.001))
    return log_softmax(gemm(mean, r, trans_b=True)), cumsum(i, axis=1)
""",
    "recurrent": """def net(x: f32[N, 3, 10], *, wi: f32[10, 64], wh: f32[16, 64], b: f32[64]):
    h0 = tanh(slice(matmul(x, wi), starts=(0, 0, 0), steps=(1, 1, 1), shape=(N, 3, 16)))
    x1 = reshape(slice(x, starts=(0, 1, 0), steps=(1, 1, 1), shape=(N, 1, 10)), shape=(N, 10))
    h = reshape(slice(h0, starts=(0, 0, 0), steps=(1, 1, 1), shape=(N, 1, 16)), shape=(N, 16))
    g = add(add(matmul(x1, wi), matmul(h, wh)), b)
    i = sigmoid(slice(g, starts=(0, 0), steps=(1, 1), shape=(N, 16)))
    f = sigmoid(slice(g, starts=(0, 16), steps=(1, 1), shape=(N, 16)))
    c = tanh(slice(g, starts=(0, 32), steps=(1, 1), shape=(N, 16)))
    o = sigmoid(slice(g, starts=(0, 48), steps=(1, 1), shape=(N, 16)))
    n = add(mul(f, h), mul(i, c))
    return mul(o, tanh(n)), n
""",
    "quantized": """def net(x: f32[N, 4, 8, 8], *, w: f32[16, 4, 3, 3]):
    s = full(shape=(), value=0.015625)
    q = quantize_linear(clip(x, low=-2.0, high=2.0), s, dtype=i8)
    k = dequantize_linear(quantize_linear(w, s, dtype=i8), s)
    d = dequantize_linear(q, s)
    return relu(conv(d, k, pads=(1, 1, 1, 1))), q
""",
    "half precision": """def net(x: f16[N, 33], y: bf16[N, 5]):
    a = softmax(mul(x, x))
    b = cast(layer_norm(cast(a, to=f32), reduce_max(cast(x, to=f32), axes=(0,))), to=f16)
    return b, relu(neg(y)), cast(y, to=f16)
""",
}


def net(name: str) -> Graph:
    """The network with a symbolic batch of 1 to 20 and seeded weights."""
    text = NETS[name]
    weights = {v.name: a for v, a in graph_of(text, seed=7).constants.items()} if "*," in text else {}
    return parse("N: dim[1, 20]\n" + text, weights)


def inputs_of(g: Graph, n: int) -> list[Any]:
    rng = np.random.default_rng(n)
    out = []
    for v in g.inputs:
        shape = [d if isinstance(d, int) else n for d in v.type.shape]
        a = rng.integers(0, 50, shape) if v.type.dtype.is_int else rng.standard_normal(shape)
        out.append(a.astype(v.type.dtype.numpy))
    return out


def check(f: Any, g: Graph, n: int) -> None:
    inputs = inputs_of(g, n)
    got = f(*inputs)
    wrong = first_difference(g, inputs, got if isinstance(got, tuple) else [got])
    assert wrong is None, f"batch {n}, output {wrong}"


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("level", [0, 1, 3])
def test_levels_and_threads(level: int, name: str, tmp_path: Any) -> None:
    g = net(name)
    for threads in (1, 2):
        check(dnnc.compile(g, dims={"N": 3}, cache=tmp_path, opt_level=level, threads=threads), g, 3)


@pytest.mark.parametrize("name", NETS)
def test_one_program_for_all_batches(name: str) -> None:
    g = net(name)
    f = dnnc.compile(g, dims={"N": (1, 20)}, cache=False)
    for n in (1, 2, 3, 7, 16, 20, 1):
        check(f, g, n)
    assert len(f.programs) == 1
    assert all(s.choice.template != "naive" for s in f.programs[0].scheduled.steps)


def test_verified_as_a_whole() -> None:
    for name in NETS:
        dnnc.compile(net(name), dims={"N": 2}, cache=False, verify="model")
