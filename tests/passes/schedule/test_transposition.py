"""Square tiles by zipping: the same elements at the same places, and refusals that name the reason."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dnnc.ir.errors import ScheduleError
from dnnc.ir.loops.interp import run_kernel
from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.schedule.loops import reorder, split
from dnnc.passes.schedule.state import Schedule
from dnnc.passes.schedule.transposition import transpose_tile, zip_tile
from support.schedules import check_schedule, same_results

TEXT = """
def k(x: f32[11, 13], b: f32[11], y: f32[13, 11]):
    for i in range(13):
        for j in range(11):
            y[i, j] = x[j, i] * 2.0 + b[j]
"""


def tiled(text: str, n: int) -> Schedule:
    s = Schedule(parse_kernel(text))
    s.apply(split, "i", n, ("io", "iv"), tail="overlap").apply(split, "j", n, ("jo", "jv"), tail="overlap")
    return s.apply(reorder, "io", "jo", "iv", "jv").apply(transpose_tile, "iv", "jv")


@pytest.mark.parametrize("n", [2, 4, 8])
def test_meaning(n: int) -> None:
    kernel = verify_kernel(tiled(TEXT, n).done())
    assert show_kernel(parse_kernel(show_kernel(kernel))) == show_kernel(kernel)
    rng = np.random.default_rng(n)
    x, b, y = rng.random((11, 13), np.float32), rng.random(11, np.float32), np.zeros((13, 11), np.float32)
    run_kernel(kernel, {"x": x, "b": b, "y": y})
    np.testing.assert_array_equal(y, x.T * np.float32(2) + b)


@pytest.mark.parametrize("dtype,n", [("f32", 16), ("f64", 8), ("f16", 16), ("i8", 32), ("u8", 16)])
def test_wide_squares(dtype: str, n: int) -> None:
    old = parse_kernel(f"""
def k(x: {dtype}[{n}, {n}], y: {dtype}[{n}, {n}]):
    for i in range({n}):
        for j in range({n}):
            y[i, j] = x[j, i]
""")
    new = verify_kernel(Schedule(old).apply(transpose_tile, "i", "j").done())
    same_results(old, new)
    assert ("interleave_low" in show_kernel(new)) == (dtype != "u8")  # 16 bytes are one group of lanes


def test_text(golden: Callable[..., None]) -> None:
    golden(show_kernel(tiled(TEXT, 4).done()))


@pytest.mark.family("cases")
@pytest.mark.parametrize(
    "text,message",
    [
        (TEXT.replace("x[j, i]", "x[min(j, 9), i % 3]"), "along neither"),
        (TEXT.replace("x[j, i] * 2.0 + b[j]", "b[j]"), "no load runs along iv"),
        (TEXT.replace("y[i, j]", "y[i, 10 - j]"), "store is not unit stride"),
        (TEXT.replace("            y", "            y[i, j] = 0.0\n            y"), "one store alone"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        tiled(text, 4)


def test_a_tile_is_square_and_a_power_of_two() -> None:
    with pytest.raises(ScheduleError, match="square tile"):
        tiled(TEXT, 3)


@pytest.mark.parametrize("rows,columns", [(8, 3), (3, 8), (8, 8), (5, 6)])
def test_a_tile_may_be_smaller_than_its_vectors(rows: int, columns: int) -> None:
    text = f"""
def k(x: f32[{columns}, {rows}], b: f32[{columns}], y: f32[{rows}, {columns}]):
    for i in range({rows}):
        for j in range({columns}):
            y[i, j] = x[j, i] + b[j]
"""
    old = parse_kernel(text)
    if max(rows, columns) < 8:
        with pytest.raises(ScheduleError, match="square tile"):
            Schedule(old).apply(transpose_tile, "i", "j", 8)
        return
    new = verify_kernel(Schedule(old).apply(transpose_tile, "i", "j", 8).done())
    same_results(old, new)
    assert new.entry.body[0] is not old.entry.body[0]


def test_lanes_of_a_block_that_are_not_used_may_be_read() -> None:
    text = """
def k(x: f32[4, 4], y: f32[3, 4]):
    for i in range(3):
        for j in range(4):
            y[i, j] = x[j, i]
"""
    old = parse_kernel(text)
    new = verify_kernel(Schedule(old).apply(transpose_tile, "i", "j", 4).done())
    same_results(old, new)
    assert "x[t0_c, 0:+4]" in show_kernel(new)


@pytest.mark.parametrize("rows,columns", [(4, 4), (4, 3), (3, 4)])
def test_of_several_loads_along_the_rows_the_result_is_transposed(rows: int, columns: int) -> None:
    old = parse_kernel(f"""
def k(x: f32[4, 4], z: f32[4, 4], b: f32[4], s: f32[4], y: f32[{rows}, {columns}]):
    for i in range({rows}):
        for j in range({columns}):
            y[i, j] = x[j, i] * b[j] + z[j, i] * s[i]
""")
    new = verify_kernel(Schedule(old).apply(transpose_tile, "i", "j", 4).done())
    same_results(old, new)
    text = show_kernel(new)
    assert text.count("zip_low") == 2 and "x[tc, 0:+" in text and "b[tc]" in text and "s[0:+" in text


@pytest.mark.parametrize("term", ["w[i, j]", "x[j, i]"])
def test_where_a_load_runs_along_the_columns_each_load_along_the_rows_is_transposed(term: str) -> None:
    old = parse_kernel(f"""
def k(x: f32[4, 4], z: f32[4, 4], w: f32[4, 4], y: f32[4, 4]):
    for i in range(4):
        for j in range(4):
            y[i, j] = {term} * x[j, i] + z[j, i]
""")
    new = verify_kernel(Schedule(old).apply(transpose_tile, "i", "j", 4).done())
    same_results(old, new)
    assert show_kernel(new).count("zip_low") == (4 if term == "w[i, j]" else 2)


def test_zip_tile() -> None:
    check_schedule(
        """\
def k(x: f32[2, 12], b: f32[24], y: f32[24]):
    for ro in range(3):
        for r in range(4):
            for c in range(2):
                y[8*ro + 2*r + c] = x[c, 4*ro + r] * 2.0 + b[8*ro + 2*r + c]
""",
        lambda s: s.apply(zip_tile, "r", "c"),
        """\
def k(x: f32[2, 12], b: f32[24], y: f32[24]):
    for ro in range(3):
        t0_0: f32[2, 4] @ register
        for t0_c in unroll(2):
            t0_0[t0_c, 0:+4] = x[t0_c, 4*ro:+4]
        t0_1: f32[2, 4] @ register
        for t0_h in unroll(1):
            t0_1[2*t0_h, 0:+4] = zip_low(t0_0[t0_h, 0:+4], t0_0[t0_h + 1, 0:+4])
            t0_1[2*t0_h + 1, 0:+4] = zip_high(t0_0[t0_h, 0:+4], t0_0[t0_h + 1, 0:+4])
        for c in unroll(2):
            y[4*c + 8*ro:+4] = t0_1[c, 0:+4] * 2.0 + b[4*c + 8*ro:+4]
""",
    )


@pytest.mark.parametrize("value", ["x[c, r]", "x[0, r]", "x[c, r] + y[0] * 0.0 + x[0, r]"])
def test_zipping_four_rows(value: str) -> None:
    old = parse_kernel(f"""
def k(x: f32[4, 8], z: f32[1], y: f32[32]):
    for r in range(8):
        for c in range(4):
            y[4*r + c] = {value.replace("y[0]", "z[0]")}
""")
    new = verify_kernel(Schedule(old).apply(zip_tile, "r", "c").done())
    same_results(old, new)
    assert "zip_low" in show_kernel(new)


@pytest.mark.parametrize(
    "target,value,message",
    [
        ("y[3*r + c]", "x[c, r]", "store is not unit stride"),
        ("y[2*r + c]", "x[r, c]", "along neither"),
        ("y[2*r + c]", "x[c, r] + select(r < 2, 1.0, 0.0)", "used outside of addresses"),
    ],
)
def test_what_is_not_zipped(target: str, value: str, message: str) -> None:
    text = f"""
def k(x: f32[4, 4], y: f32[16]):
    for r in range(4):
        for c in range(2):
            {target} = {value}
"""
    with pytest.raises(ScheduleError, match=message):
        Schedule(parse_kernel(text)).apply(zip_tile, "r", "c")
