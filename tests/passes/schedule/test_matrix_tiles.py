"""Sums in matrix tiles: text before and after, the same numbers, and what is refused."""

from __future__ import annotations

import pytest

from dnnc.ir.errors import ScheduleError, VerifyError
from dnnc.ir.loops.text import parse_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.schedule.matrix_tiles import matrix_tiles
from dnnc.passes.schedule.state import Schedule
from support.schedules import check_schedule

LOOPS = ("i_1", "j_1", "r_1", "q", "l_1", "d")
SUM = """\
def k(x: u8[8, 24], w: i8[2, 6, 32], y: i32[8, 16]):
    for p in range(2):
        acc: i32[2, 2, 2, 8] @ register
        for i in range(2):
            for j in range(2):
                for r in range(2):
                    for l in range(8):
                        acc[i, j, r, l] = i32(0)
        for s in range(2):
            for i_1 in range(2):
                for j_1 in range(2):
                    for r_1 in range(2):
                        for q in range(3):
                            for l_1 in range(8):
                                for d in range(4):
                                    acc[i_1, j_1, r_1, l_1] = acc[i_1, j_1, r_1, l_1] + \
cast_i32(x[4*p + 2*i_1 + r_1, 12*s + 4*q + d])*cast_i32(w[j_1, 3*s + q, 4*l_1 + d])
        for i_2 in range(2):
            for j_2 in range(2):
                for r_2 in range(2):
                    y[4*p + 2*i_2 + r_2, 8*j_2:+8] = acc[i_2, j_2, r_2, 0:+8]
"""


def test_sums_of_bytes_are_products_of_tiles() -> None:
    check_schedule(
        SUM,
        lambda s: s.apply(matrix_tiles, *LOOPS),
        """\
def k(x: u8[8, 24], w: i8[2, 6, 32], y: i32[8, 16]):
    for p in range(2):
        acc_t: i32[4, 2, 8] @ tile
        x_t: u8[2, 2, 12] @ tile
        w_t: i8[2, 3, 32] @ tile
        acc_s: i32[2, 2, 2, 8] @ local
        for i_1_z in unroll(2):
            for j_1_z in unroll(2):
                tile_zero(addr(acc_t[2*i_1_z + j_1_z, 0, 0]))
        for s in range(2):
            for i_1_a in unroll(2):
                tile_load(addr(x_t[i_1_a, 0, 0]), addr(x[2*i_1_a + 4*p, 12*s]), 1)
            for j_1_a in unroll(2):
                tile_load(addr(w_t[j_1_a, 0, 0]), addr(w[j_1_a, 3*s, 0]), 1)
            for i_1_d in unroll(2):
                for j_1_d in unroll(2):
                    tile_dot(addr(acc_t[2*i_1_d + j_1_d, 0, 0]), addr(x_t[i_1_d, 0, 0]), addr(w_t[j_1_d, 0, 0]))
        for i_1_s in unroll(2):
            for j_1_s in unroll(2):
                tile_store(addr(acc_s[i_1_s, j_1_s, 0, 0]), addr(acc_t[2*i_1_s + j_1_s, 0, 0]), 1)
        for i_2 in range(2):
            for j_2 in range(2):
                for r_2 in range(2):
                    y[2*i_2 + 4*p + r_2, 8*j_2:+8] = acc_s[i_2, j_2, r_2, 0:+8]
""",
    )


@pytest.mark.parametrize(
    "old,new",
    [
        ("4*l_1 + d]", "l_1 + 8*d]"),  # the bytes of a lane are not side by side
        ("2*i_1 + r_1, 12*s", "2*i_1 + (r_1 + j_1) % 2, 12*s"),  # rows are not equally far from each other
        ("u8[8, 24]", "i16[8, 24]"),
        ("= i32(0)", "= i32(1)"),  # tiles begin with zeros
        ("acc[i_1, j_1, r_1, l_1] + ", "acc[i_1, j_1, r_1, l_1] - "),
        ("for q in range(3)", "for q in range(p + 2)"),
    ],
)
def test_what_is_no_product_of_tiles_is_refused(old: str, new: str) -> None:
    s = Schedule(parse_kernel(SUM.replace(old, new)))
    with pytest.raises(ScheduleError):
        s.apply(matrix_tiles, *LOOPS)


BF16 = """\
def k(x: bf16[6, 8], w: bf16[4, 16], y: f32[3, 8]):
    t: f32[1, 3, 8] @ tile
    a: bf16[1, 3, 8] @ tile
    b: bf16[1, 4, 16] @ tile
    tile_zero(addr(t[0, 0, 0]))
    tile_load(addr(a[0, 0, 0]), addr(x[0, 0]), 2)
    tile_load(addr(b[0, 0, 0]), addr(w[0, 0]), 1)
    tile_dot(addr(t[0, 0, 0]), addr(a[0, 0, 0]), addr(b[0, 0, 0]))
    tile_store(addr(y[0, 0]), addr(t[0, 0, 0]), 1)
"""


@pytest.mark.parametrize(
    "old,new,message",
    [
        ("addr(x[0, 0]), 2", "addr(x[0, 0]), 3", "cannot show"),  # rows beyond the matrix
        ("addr(x[0, 0]), 2", "addr(x[0, 1]), 2", "cannot show"),
        ("bf16[1, 3, 8] @ tile", "bf16[1, 3, 6] @ tile", "no product"),
        ("t: f32[1, 3, 8] @ tile", "t: f32[1, 17, 8] @ tile", "at most 16 rows of 64 bytes"),
        ("t: f32[1, 3, 8] @ tile", "t: f32[9, 3, 8] @ tile", "11 tiles; a function has 8"),
        ("tile_zero(addr(t[0, 0, 0]))", "tile_zero(addr(y[0, 0]))", "takes the address of a tile"),
        ("tile_zero(addr(t[0, 0, 0]))", "tile_zero(addr(t[0, 1, 0]))", "takes the address of a tile"),
        ("y: f32[3, 8]", "y: i32[3, 8]", "moves"),
        ("w: bf16[4, 16]", "w: f16[4, 16]", "moves"),
    ],
)
def test_operands_are_verified(old: str, new: str, message: str) -> None:
    verify_kernel(parse_kernel(BF16))
    with pytest.raises(VerifyError, match=message):
        verify_kernel(parse_kernel(BF16.replace(old, new)))
