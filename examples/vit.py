"""A vision transformer in array code, compiled once, its weights bound by reference and replaced without compiling.

    python examples/vit.py [--size 32] [--steps 2] [--device cuda:0]

The model is a function of its parameters, a dict of dicts and lists of arrays, and of one image; `dnnc.vmap` makes it
one of a batch. It takes its functions from a namespace of the array API standard: with `dnnc.array` it is traced and
compiled, with NumPy the same code checks the result. Look at `parameters=` in `main`, which gives arrays that are no
part of the program, and at the time that `refit` takes beside that of compiling.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import dnnc.array

PATCH, WIDTH, HEADS, CLASSES, BATCH = 4, 64, 4, 10, 8
Params = dict[str, Any]


def norm(p: Params, x: Any, xp: Any) -> Any:
    """Layer norm along the last axis."""
    mean = xp.mean(x, axis=-1, keepdims=True)
    spread = xp.mean(xp.square(x - mean), axis=-1, keepdims=True)
    return (x - mean) / xp.sqrt(spread + 1e-5) * p["scale"] + p["shift"]


def linear(p: Params, x: Any) -> Any:
    return x @ p["w"] + p["b"]


def attention(p: Params, x: Any, xp: Any) -> Any:
    """Each of t tokens looks at all, with HEADS heads: [t, WIDTH] -> [t, WIDTH]."""
    t = x.shape[0]
    q, k, v = (xp.moveaxis(xp.reshape(linear(p[name], x), (t, HEADS, -1)), 0, 1) for name in ("q", "k", "v"))
    scores = q @ xp.moveaxis(k, 1, 2) / (WIDTH // HEADS) ** 0.5
    e = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    seen = e / xp.sum(e, axis=-1, keepdims=True) @ v
    return linear(p["out"], xp.reshape(xp.moveaxis(seen, 0, 1), (t, WIDTH)))


def gelu(x: Any, xp: Any) -> Any:
    return 0.5 * x * (1 + xp.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def vit(p: Params, image: Any, xp: Any = dnnc.array) -> Any:
    """Logits [CLASSES] of an image [3, size, size]: patches become tokens, whose mean after the blocks is read."""
    n = image.shape[1] // PATCH
    patches = xp.moveaxis(xp.reshape(image, (3, n, PATCH, n, PATCH)), (1, 3), (0, 1))
    x = linear(p["embed"], xp.reshape(patches, (n * n, 3 * PATCH**2))) + p["position"]
    for block in p["blocks"]:
        x = x + attention(block["attention"], norm(block["norm1"], x, xp), xp)
        x = x + linear(block["down"], gelu(linear(block["up"], norm(block["norm2"], x, xp)), xp))
    return linear(p["head"], xp.mean(norm(p["norm"], x, xp), axis=0))


def fresh(rng: np.random.Generator, size: int, blocks: int) -> Params:
    """Random parameters."""

    def dense(n: int, m: int) -> Params:
        return {"w": (rng.standard_normal((n, m)) / n**0.5).astype(np.float32), "b": np.zeros(m, np.float32)}

    def ones() -> Params:
        return {"scale": np.ones(WIDTH, np.float32), "shift": np.zeros(WIDTH, np.float32)}

    def block() -> Params:
        looks = {name: dense(WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
        return {
            "norm1": ones(),
            "attention": looks,
            "norm2": ones(),
            "up": dense(WIDTH, 4 * WIDTH),
            "down": dense(4 * WIDTH, WIDTH),
        }

    position = rng.normal(0, 0.1, ((size // PATCH) ** 2, WIDTH)).astype(np.float32)
    made = {"embed": dense(3 * PATCH**2, WIDTH), "position": position, "blocks": [block() for _ in range(blocks)]}
    return made | {"norm": ones(), "head": dense(WIDTH, CLASSES)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="A vision transformer in array code.")
    parser.add_argument("--size", type=int, default=32, help=f"height and width of the images, a multiple of {PATCH}")
    parser.add_argument("--steps", type=int, default=2, help="number of transformer blocks")
    parser.add_argument("--device", default="cpu", help="cpu or cuda:0")
    args = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    params, others = (fresh(rng, args.size, args.steps) for _ in range(2))
    colors = rng.normal(0, 2, (BATCH, 3, 1, 1))
    images = (colors + rng.standard_normal((BATCH, 3, args.size, args.size))).astype(np.float32)

    start = time.perf_counter()
    batched = dnnc.vmap(vit, in_axes=(None, 0))  # the parameters are the same for all images
    target = "llvm" if args.device == "cpu" else args.device
    f = dnnc.compile(
        lambda params, images: batched(params, images), inputs=[images], parameters={"params": params}, target=target
    )
    logits = f(images)
    ready = time.perf_counter() - start
    report = f.report.programs[0]
    print(
        f"{len(f.parameters)} parameters, such as {f.parameters[3].name}; {report.calls} calls of "
        f"{len(report.kernels)} kernels; ready in {ready:.2f} s"
    )
    check("with its first weights", logits, params, images)

    start = time.perf_counter()
    f.refit({"params": others})  # other arrays, of the same shapes
    print(f"other weights in {(time.perf_counter() - start) * 1e3:.1f} ms, and nothing was compiled")
    check("with other weights", f(images), others, images)


def check(what: str, logits: np.ndarray, params: Params, images: np.ndarray) -> None:
    """Compare with the same function in NumPy, image by image."""
    expected = np.stack([vit(params, image, np) for image in images])
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=1e-3)
    print(f"{what}: classes {logits.argmax(1)}, as in NumPy; logits to {np.abs(logits - expected).max():.0e}")


if __name__ == "__main__":
    main()
