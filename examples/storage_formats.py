"""Formats of one's own: weights stored as ternary numbers, powers of two, or a small float, read by every kernel.

    python examples/storage_formats.py

Two expressions make a format: what a number becomes, and what a code means. A product with decoded weights reads codes.
"""

from __future__ import annotations

import argparse

import numpy as np

import dnnc
from dnnc.ir.dtype import f32, i32
from dnnc.ir.expr import Expr, cast, const, maximum, minimum, select
from dnnc.ir.loops.stmt import call

# -1, 0 and 1 in two bits
ternary = dnnc.storage_format(
    "ternary",
    "u2",
    encode=lambda x: cast(call("rint", maximum(minimum(x, 1.0), -1.0)) + 1.0, i32),
    decode=lambda q: cast(q - 1, f32),
)


def _power(x: Expr) -> Expr:
    """The nearest power of two from 2^-6 to 1 as its exponent and 6, and the sign in the highest of four bits."""
    size = maximum(call("abs", x), 2.0**-9)
    exponent = maximum(minimum(call("rint", call("log", size) * 1.4426950408889634), 0.0), -7.0)
    return cast(exponent + 7.0, i32) + select(x < 0.0, 8, cast(exponent, i32) * 0)


logarithmic = dnnc.storage_format(
    "logarithmic",
    "u4",
    encode=_power,
    decode=lambda q: call("ldexp", select(q < 8, const(1.0, f32), const(-1.0, f32)), cast(q % 8 - 7, f32)),
)


def _root(x: Expr) -> Expr:
    size = call("rint", 127.0 * call("sqrt", minimum(call("abs", x), 1.0)))
    return cast(select(x < 0.0, 0.0 - size, size), i32)


# a byte in steps of 1/32 near 0 and of 1/4 far away: the sign and the square root of the size
rooted = dnnc.storage_format(
    "rooted",
    "i8",
    encode=_root,
    decode=lambda q: cast(q, f32) * call("abs", cast(q, f32)) * (1.0 / 127**2),
)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=512)
    n = parser.parse_args(argv).size
    rng = np.random.default_rng(0)
    w = np.clip(rng.standard_normal((n, n)).astype(np.float32) * 0.4, -1, 1)
    x = rng.standard_normal((1, n)).astype(np.float32)
    for format in (ternary, logarithmic, rooted):
        codes = np.asarray(format.encode(w))
        plain = np.asarray(format.decode(codes))
        product = dnnc.compile(lambda x, c=codes, f=format: x @ f.decode(c), inputs=[x])
        right = np.allclose(product(x), x @ plain, atol=1e-4 * n**0.5)
        error = np.abs(plain - w).max()
        size = product.report.programs[-1].memory.constants
        read = size <= n * n * format.codes.bits / 8 + 64
        print(
            f"{format.name}: error {error:.3f}, {size} bytes of {4 * n * n}, {'right' if right and read else 'WRONG'}"
        )


if __name__ == "__main__":
    main()
