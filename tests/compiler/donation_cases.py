"""Graphs with donated inputs, on the CPU and on a device."""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir.graph import Graph

# name, graph, pairs, outputs that are made where they end: without fusion, with it
CASES = [
    ("element-wise", "def g(x: f32[4, 8], y: f32[4, 8]):\n    z: f32[4, 8] = relu(add(x, y))\n    return z\n",
    {"x": "z"}, "z", "z"),
    ("a product reads on", "def g(x: f32[8, 8], y: f32[8, 8]):\n    z: f32[8, 8] = matmul(x, y)\n    return z\n",
    {"x": "z"}, "", ""),
    (
        "read before",
        "def g(x: f32[8, 8], y: f32[8, 8]):\n    t: f32[8, 8] = matmul(matmul(x, y), y)\n    z: f32[8, 8] = "
        "softmax(t)\n    return z\n",
        {"x": "z"}, "z", "z",
    ),
    ("read later", "def g(x: f32[4, 8]):\n    z: f32[4, 8] = exp(x)\n    w: f32[4, 8] = softmax(x)\n    return z, w\n",
    {"x": "z"}, "", ""),
    (
        "other places",
        "def g(x: f32[8, 8]):\n    w: f32[8, 8] = exp(transpose(x, perm=(1, 0)))\n    return w\n",
        {"x": "w"}, "w", "",
    ),
    (
        "a loop's state",
        "def g(x: f32[4], y: f32[4]):\n    def body(k: i64, s: f32[4], c: f32[4]):\n        return add(mul(s, c), c)\n"
        "    z: f32[4] = loop(None, None, x, y, body=body, carried=1, length=5)\n    return z\n",
        {"x": "z"}, "z", "z",
    ),
    (
        "a state that is read besides",
        "def g(x: f32[4]):\n    def body(k: i64, s: f32[4], c: f32[4]):\n        return add(mul(s, c), c)\n"
        "    z: f32[4] = loop(None, None, x, x, body=body, carried=1, length=5)\n    return z\n",
        {"x": "z"}, "", "",
    ),
    (
        "rows move up",
        "def g(x: f32[6, 8], n: f32[1, 8]):\n    a: f32[5, 8] = slice(x, starts=(1, 0), steps=(1, 1), shape=(5, 8))\n"
        "    z: f32[6, 8] = concat(a, n, axis=0)\n    return z\n",
        {"x": "z"}, "", "",
    ),
    (
        "through views",
        "def g(x: f32[6, 8], n: f32[48]):\n    r: f32[48] = reshape(x, shape=(48,))\n    z: f32[6, 8] = reshape(mul(r, "
        "n), shape=(6, 8))\n    return z\n",
        {"x": "z"}, "z", "z",
    ),
    ("itself", "def g(x: f32[6, 8]):\n    z: f32[6, 8] = identity(x)\n    return z\n", {"x": "z"}, "z", "z"),
    (
        "crosswise",
        "def g(x: f32[6, 8], y: f32[6, 8]):\n    a: f32[6, 8] = add(x, y)\n    b: f32[6, 8] = sub(x, y)\n    return a, "
        "b\n",
        {"x": "b", "y": "a"}, "b", "b",
    ),
]  # fmt: skip


def many(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) else (made,)


def donating(g: Graph, seed: int) -> dict[str, str]:
    """Donate inputs of a random graph to values of their types, which become its first outputs o0, o1, ..."""
    rng = np.random.default_rng(seed)
    values = [v for n in g.nodes() for v in n.outputs]
    chosen: dict[str, Any] = {}
    for v in g.inputs:
        fits = [w for w in values if w.type == v.type and w not in chosen.values() and v.type.dtype.kind != "s"]
        if fits:
            chosen[v.name] = fits[int(rng.integers(len(fits)))]
    g.outputs = [*chosen.values(), *[v for v in g.outputs if v not in chosen.values()][:2]]
    return {n: f"o{k}" for k, n in enumerate(chosen)}
