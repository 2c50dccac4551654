"""Random chains of reductions over the same rows and their readers: normalize, weigh and compare rows."""

from __future__ import annotations

import random

REDUCTIONS = ("reduce_mean", "reduce_sum", "reduce_max", "reduce_min", "reduce_l2", "reduce_log_sum_exp")
SHAPES = (
    ((12, 40), (1,)), ((9, 1000), (1,)), ((40, 12), (0,)), ((70, 33), (0,)), ((3, 5, 64), (2,)), ((4, 21, 18), (1,)),
    ((2, 3, 4, 50), (2, 3)),
    ((6, 10, 5, 8), (0, 2, 3)), ((9, 8, 7), (0, 2)), ((1, 17), (1,)), ((1030, 32), (0,)), ((8, 1, 36), (1, 2)),
    ((5, 130), (0, 1)),
)  # fmt: skip

IMAGES = (
    ((6, 16, 5, 8), (0, 2, 3)), ((3, 32, 7, 5), (2, 3)), ((2, 6, 9, 4), (0, 2, 3)), ((4, 20, 3, 6), (2, 3)),
    ((5, 64, 4, 4), (0, 2, 3)), ((2, 48, 6, 6), (3,)),
)  # fmt: skip


def random_rows(seed: int, dtype: str = "f32", blocked: bool = False) -> str:
    """The text of a graph over rows of some shape; values stay near one, so that errors do not grow. `blocked`: rows of
    images that convolutions make, in blocks of channels on a CPU.
    """
    rng = random.Random(seed)
    shape, axes = rng.choice(IMAGES if blocked else SHAPES)
    rows = tuple(1 if k in axes else d for k, d in enumerate(shape))
    short = tuple(d for k, d in enumerate(shape) if k not in axes)
    lines: list[str] = []
    elements, numbers = ["x", "z"], ["p"]

    def put(expression: str, into: list[str]) -> None:
        lines.append(f"v{len(lines)} = {expression}")
        into.append(f"v{len(lines) - 1}")

    def reduce() -> None:
        x, op = rng.choice(elements), rng.choice(REDUCTIONS)
        scaled = f"mul({x}, {1 / 8})" if op == "reduce_sum" else x
        if rng.random() < 0.6:
            put(f"{op}({scaled}, axes={axes}, keepdims=True)", numbers)
        else:
            lines.append(f"s{len(lines)} = {op}({scaled}, axes={axes}, keepdims=False)")
            put(f"reshape({rng.choice((f's{len(lines) - 1}', f'neg(s{len(lines) - 1})'))}, shape={rows})", numbers)

    def number() -> None:
        a, b = rng.choice(numbers), rng.choice(numbers)
        put(
            rng.choice(
                (
                    f"sqrt(add(mul({a}, {a}), 0.5))",
                    f"tanh({a})",
                    f"sub({a}, tanh({b}))",
                    f"max({a}, {b})",
                    f"div(1.0, add(exp(neg({a})), 1.0))",
                )
            ),
            numbers,
        )

    def element() -> None:
        x, y, a = rng.choice(elements), rng.choice(elements), rng.choice(numbers)
        calm = f"tanh({a})"
        put(
            rng.choice((
                f"sub({x}, {calm})", f"div({x}, add(mul({a}, {a}), 1.0))", f"tanh(mul({x}, {a}))",
                f"mul({x}, tanh({y}))", f"sigmoid(sub({x}, {a}))",
                f"exp(min(sub({x}, {a}), 1.0))", f"add({x}, relu({y}))", f"where(less({x}, {a}), {x}, {calm})",
                f"softmax({x}, axis={axes[0]})" if len(axes) == 1 else f"mean_variance_norm({x}, axes={axes}, "
                    "epsilon=0.1)",
            )),
            elements,
        )  # fmt: skip

    for _ in range(rng.randint(2, 4)):
        reduce()
        for _ in range(rng.randint(0, 2)):
            number()
        for _ in range(rng.randint(1, 2)):
            element()
    if rng.random() < 0.4:
        reduce()
        result = numbers[-1] if rng.random() < 0.5 else f"reshape({numbers[-1]}, shape={short})"
    else:
        result = elements[-1]
    given: list[tuple[str, tuple[int, ...]]] = [("x", shape), ("z", shape), ("p", rows)]
    if blocked:
        c = shape[1]
        conv = "strides=(1, 1), pads=(0, 0, 0, 0), dilations=(1, 1), group=1"
        given = [("x_", shape), ("z_", shape), ("p", rows), ("k", (c, c, 1, 1))]
        lines[:0] = [f"{name} = mul(conv({name}_, k, {conv}), {1 / c})" for name in "xz"]
    args = ", ".join(f"{name}: {dtype}[{', '.join(map(str, s))}]" for name, s in given)
    return f"def g({args}):\n" + "\n".join(f"    {line}" for line in lines) + f"\n    return {result}\n"
