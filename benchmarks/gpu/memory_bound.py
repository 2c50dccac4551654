"""Single memory-bound groups on one GPU: our kernels beside PyTorch, and the rate at which they read and write.

    python benchmarks/gpu/memory_bound.py [--only WORD,WORD] [--candidates N] [--warm] [--repeats N] [--json OUT]
        [--emit-only]
    PYTHONPATH=.types python3 benchmarks/gpu/memory_bound.py     where dnnc is not installed; `make .types` makes that
                                                                 folder

What a line says, and how it is measured, stands in single.py. GB/s count every input and output once; a copy has 4,256
on an H200.
"""

from __future__ import annotations

import sys
from typing import Any

from single import Case, Schedules, case, options, run

GENERIC = ("map", "reduce", "scatter", "sequence", "threads")


def softmax(x: Any) -> Any:
    return x.softmax(-1)


def layer_norm(x: Any, w: Any, b: Any) -> Any:
    import torch

    return torch.nn.functional.layer_norm(x, w.shape, w, b)


def gelu_chain(x: Any, s: Any, b: Any, r: Any) -> Any:
    import torch

    return torch.nn.functional.gelu(x * s + b) + r


def pool(x: Any) -> Any:
    import torch

    return torch.nn.functional.max_pool2d(x, 3, 2, 1)


def add_rows(x: Any, at: Any, u: Any) -> Any:
    return x.index_add(0, at[:, 0], u)


def cases() -> list[Case]:
    big = "f16[16384, 4096]"
    out = [
        case("neg", f"x: {big}", "y = neg(x)", lambda x: -x),
        case("add", f"x: {big}, z: {big}", "y = add(x, z)", lambda x, z: x + z),
        case("add_f32", "x: f32[16384, 4096], z: f32[16384, 4096]", "y = add(x, z)", lambda x, z: x + z),
        case(
            "gelu_chain",
            f"x: {big}, s: f16[4096], b: f16[4096], r: {big}",
            "a = mul(x, s); c = add(a, b); d = gelu(c); y = add(d, r)",
            gelu_chain,
        ),
        case("sum_rows", "x: f32[16384, 4096]", "y = reduce_sum(x, axes=(1,), keepdims=False)", lambda x: x.sum(1)),
        case("sum_columns", "x: f32[16384, 4096]", "y = reduce_sum(x, axes=(0,), keepdims=False)", lambda x: x.sum(0)),
        case("sum_middle", "x: f16[64, 1024, 512]", "y = reduce_sum(x, axes=(1,), keepdims=False)", lambda x: x.sum(1)),
        case("sum_all", "x: f32[1000000]", "y = reduce_sum(x, keepdims=False)", lambda x: x.sum()),
        case("sum_all_large", "x: f32[67108864]", "y = reduce_sum(x, keepdims=False)", lambda x: x.sum()),
        case(
            "mean_7x7",
            "x: f16[256, 2048, 7, 7]",
            "y = reduce_mean(x, axes=(2, 3), keepdims=False)",
            lambda x: x.mean((2, 3)),
        ),
        case(
            "mean_image", "x: f16[1, 12544, 32]", "y = reduce_mean(x, axes=(1,), keepdims=False)", lambda x: x.mean(1)
        ),
        case(
            "mean_image_half",
            "x: f16[112, 112, 32]",
            "y = reduce_mean(x, axes=(1,), keepdims=False)",
            lambda x: x.mean(1),
        ),
        case(
            "mean_image_rest", "x: f32[112, 32]", "y = reduce_mean(x, axes=(0,), keepdims=False)", lambda x: x.mean(0)
        ),
        case("mean_14", "x: f16[196, 480]", "y = reduce_mean(x, axes=(0,), keepdims=False)", lambda x: x.mean(0)),
        case("sum_all_half", "x: f32[256, 262144]", "y = reduce_sum(x, axes=(1,), keepdims=False)", lambda x: x.sum(1)),
        case("argmax", "x: f16[512, 50257]", "y = argmax(x, axis=1, keepdims=False)", lambda x: x.argmax(1)),
        case(
            "max_pool",
            "x: f16[64, 64, 112, 112]",
            "y = max_pool(x, kernel=(3, 3), strides=(2, 2), pads=(1, 1, 1, 1))",
            pool,
        ),
        case("transpose_f32", "x: f32[8192, 8192]", "y = transpose(x, perm=(1, 0))", lambda x: x.t().contiguous()),
        case("transpose_f16", "x: f16[8192, 8192]", "y = transpose(x, perm=(1, 0))", lambda x: x.t().contiguous()),
        case(
            "heads",
            "x: f16[64, 512, 16, 64]",
            "y = transpose(x, perm=(0, 2, 1, 3))",
            lambda x: x.permute(0, 2, 1, 3).contiguous(),
        ),
        case(
            "to_nhwc",
            "x: f16[64, 256, 56, 56]",
            "y = transpose(x, perm=(0, 2, 3, 1))",
            lambda x: x.permute(0, 2, 3, 1).contiguous(),
        ),
        case("cumsum", "x: f32[4096, 1024]", "y = cumsum(x, axis=1)", lambda x: x.cumsum(1)),
        case("softmax_middle", "x: f32[64, 256, 512]", "y = softmax(x, axis=1)", lambda x: x.softmax(1)),
        case("softmax_f32", "x: f32[16384, 2048]", "y = softmax(x)", softmax),
    ]
    for r, n in ((16384, 4096), (65536, 128), (16384, 1024), (131072, 512), (2048, 32000), (1536, 128), (4096, 16384)):
        out.append(case(f"softmax_{r}_{n}", f"x: f16[{r}, {n}]", "y = softmax(x)", softmax))
    for r, n in ((16384, 4096), (4096, 768), (65536, 768), (128, 768), (32768, 320)):
        out.append(
            case(
                f"layer_norm_{r}_{n}",
                f"x: f16[{r}, {n}], w: f16[{n}], b: f16[{n}]",
                "y = layer_norm(x, w, b)",
                layer_norm,
            )
        )
    for n, m, width in (
        (4096, 32768, 128),
        (100000, 1000000, 64),
        (50257, 2048, 768),
        (169343, 1166243, 1),
        (64, 8192, 1000),
        (1000, 100000, 3),
    ):
        inputs = f"x: f32[{n}, {width}], at: i64[{m}, 1], u: f32[{m}, {width}]"
        out.append(
            case(f"scatter_{n}_{m}_{width}", inputs, "y = scatter_nd(x, at, u, reduction='add')", add_rows, below=n)
        )
    elements = "x: f32[256, 4096], at: i64[256, 1000], u: f32[256, 1000]"
    out.append(
        case(
            "scatter_elements",
            elements,
            "y = scatter_elements(x, at, u, axis=1, reduction='add')",
            lambda x, at, u: x.scatter_add(1, at, u),
            below=4096,
        )
    )
    return out


def main() -> int:
    ap = options(__doc__)
    ap.add_argument("--candidates", type=int, default=4, help="schedules of each case, best guess first")
    a = ap.parse_args()
    schedules = Schedules()
    return run(cases(), lambda p: schedules.offered(p, GENERIC)[: a.candidates], schedules, a)


if __name__ == "__main__":
    sys.exit(main())
