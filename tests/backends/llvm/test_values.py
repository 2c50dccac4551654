"""Special values by IEEE and the records: NaN, infinities, zeros, denormals, division by zero, shifts."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from native_check import one_node, run_native

from dnnc.backends.llvm.compile import compile_text, load_objects
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.features import CpuTarget, parse_target
from dnnc.driver import compile
from dnnc.ir.dtype import BY_NAME, DType
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.graph.text import parse as graph_parse
from dnnc.ir.loops.intrinsics import TABLE
from dnnc.ir.loops.pieces import ROWS
from dnnc.ir.loops.text import parse_kernel
from dnnc.ir.op import Trait
from dnnc.ir.ops import OPS
from dnnc.ir.types import TensorType

FLOATS = ("f32", "f64", "f16", "bf16")
INTS = ("i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64")
CPUS = ("llvm", "llvm -mcpu=x86-64")


def limits(t: DType) -> Any:
    info: Any = ml_dtypes.finfo
    return info(t.numpy)


def specials(t: DType) -> Any:
    """37 values: two vectors and a tail of every type."""
    info = limits(t)
    edge = [float(x) for x in (info.smallest_subnormal, info.tiny, info.max, info.eps)]
    some = [np.nan, np.inf, 0.0, *edge, 0.5, 1.0, 1.5, 2.5, 3.0, 0.1, 7.25, 1e-3, 100.0, 60000.0, 2.0**23 + 1]
    with np.errstate(all="ignore"):
        return np.array([*some, *(-x for x in some), 0.3], np.float64).astype(t.numpy)


def integers(t: DType) -> Any:
    lo, hi = t.range
    return np.array(
        [lo, lo + 1, hi, hi - 1, 0, 1, 2, 3, 7, 100, *((-1, -2, -7) if t.kind == "i" else (hi // 2, hi // 2 + 1, 5))],
        t.numpy,
    )


def pairs(a: Any) -> tuple[Any, Any]:
    x, y = np.meshgrid(a, a, indexing="ij")
    return x.reshape(-1).copy(), y.reshape(-1).copy()


CONVERSIONS = ("cast", "bit_cast", "to_power")  # their attributes go with the dtype; they have tests of their own


def unary(kind: str) -> list[str]:
    out = []
    for op in OPS.values():
        if (
            Trait.ELEMENTWISE in op.traits
            and op.name not in CONVERSIONS
            and any(len(s.inputs) == 1 and s.inputs[0].dtype.kind == kind for s in op.samples)
        ):
            out.append(op.name)
    return out


def binary(kind: str) -> list[str]:
    return [
        op.name
        for op in OPS.values()
        if Trait.ELEMENTWISE in op.traits
        and op.name != "quantize_linear"
        and any(len(s.inputs) == 2 and {t.dtype.kind for t in s.inputs} == {kind} for s in op.samples)
    ]


def sample_attrs(name: str) -> dict[str, Any]:
    return dict(OPS[name].samples[0].attrs)


CANCELS = ("gelu",)  # 1 + erf(x) near -1: the error is relative to x


def check_floats(got: Any, want: Any, t: DType, given: list[Any], cancels: bool = False) -> None:
    """Element by element: the reference in float64, rounded to the type; 8 units in the last place, nothing below the
    smallest normal.
    """
    with np.errstate(all="ignore"):
        rounded = want.astype(t.numpy).astype(np.float64)
    info = limits(t)
    wide = got.astype(np.float64)
    with np.errstate(all="ignore"):
        near = np.abs(wide - rounded) <= 8 * float(info.eps) * np.abs(
            given[0].astype(np.float64) if cancels else rounded
        ) + float(info.tiny)
        near |= (
            (np.abs(want) > float(info.max) * (1 - 8 * float(info.eps)))
            & (np.abs(wide) >= float(info.max) * 0.99)
            & (np.sign(wide) == np.sign(want))
        )
    ok = near | (wide == rounded) | (np.isnan(wide) & np.isnan(rounded))
    assert ok.all(), f"at {[x[~ok][:4] for x in given]}: got {wide[~ok][:4]}, expected {rounded[~ok][:4]}"


def check(name: str, arrays: list[Any], target: str = "llvm", **attrs: Any) -> None:
    g = one_node(name, [TensorType(BY_NAME[_name(a)], a.shape) for a in arrays], **attrs)
    t = g.outputs[0].type.dtype
    (got,) = run_native(g, arrays, target)
    (want,) = run(g, arrays, "float64")
    assert got.dtype == t.numpy and got.shape == want.shape
    if t.is_float:
        check_floats(got, want, t, arrays, name in CANCELS)
        return
    bad = got != want
    assert not bad.any(), f"at {[x[bad][:4] for x in arrays]}: got {got[bad][:4]}, expected {want[bad][:4]}"


def _name(a: Any) -> str:
    return next(t.name for t in BY_NAME.values() if t.kind not in "sc" and t.numpy == a.dtype)


@pytest.mark.family("cases")
@pytest.mark.parametrize("name", unary("f"))
def test_unary_floats(name: str) -> None:
    for t in FLOATS:
        own = {
            k: BY_NAME[t] if k == "dtype" else a for k, a in sample_attrs(name).items()
        }  # what rounds does so to the type at hand
        check(name, [specials(BY_NAME[t])], **own)


@pytest.mark.family("cases")
@pytest.mark.parametrize("name", binary("f"))
def test_binary_floats(name: str) -> None:
    for t in FLOATS:
        check(name, list(pairs(specials(BY_NAME[t]))), **sample_attrs(name))


@pytest.mark.family("cases")
@pytest.mark.parametrize("target", CPUS)
@pytest.mark.parametrize("number", [np.nan, np.inf, -0.0])
def test_binary_floats_with_a_constant(number: float, target: str) -> None:
    """A constant operand on either side has instructions of its own: none of them takes it for a usual number."""
    x = specials(BY_NAME["f32"])
    g = Graph("g")
    b, v = Builder(g), g.add_input("x", TensorType(BY_NAME["f32"], x.shape))
    c = g.constant(np.float32(number))
    names = [n for n in ("max", "min", "add", "mul", "div", "less", "equal", "greater_equal") for _ in range(2)]
    g.outputs = [b.op(n, *((v, c) if k % 2 else (c, v))) for k, n in enumerate(names)]
    for name, got, want in zip(names, run_native(g, [x], target), run(g, [x])):
        np.testing.assert_array_equal(got, want, name)


@pytest.mark.family("cases")
@pytest.mark.parametrize("name", unary("i"))
def test_unary_integers(name: str) -> None:
    for t in INTS:
        if t[0] == "i" or name in unary("u"):
            check(name, [integers(BY_NAME[t])], **sample_attrs(name))


@pytest.mark.family("cases")
@pytest.mark.parametrize("name", sorted({*binary("i"), *binary("u")}))
def test_binary_integers(name: str) -> None:
    """Division by zero and INT_MIN / -1, shifts by the width and more, wrapping."""
    for t in INTS:
        if name in binary(t[0]):
            a, b = pairs(integers(BY_NAME[t]))
            if name == "pow":  # the record's exponents end at 63, but for bases whose powers do not grow
                a, b = (x[(b < 64) | (np.abs(a.astype(np.float64)) <= 1)] for x in (a, b))
            check(name, [a, b], **sample_attrs(name))


@pytest.mark.family("cases")
@pytest.mark.parametrize("target", CPUS)
@pytest.mark.parametrize("source", [*FLOATS, *INTS, "bool"])
def test_casts(source: str, target: str) -> None:
    """All pairs in one program: saturating, NaN to 0, one rounding."""
    t = BY_NAME[source]
    x = specials(t) if t.is_float else integers(t) if t.is_int else np.array([True, False, True])
    g = Graph("g")
    v = g.add_input("x", TensorType(t, x.shape))
    others = [BY_NAME[n] for n in (*FLOATS, *INTS, "bool") if n != source]
    g.outputs = [Builder(g).op("cast", v, to=o) for o in others]
    for got, want, o in zip(run_native(g, [x], target), run(g, [x]), others, strict=True):
        assert got.dtype == want.dtype
        same = (got == want) | ((got != got) & (want != want))
        assert same.all(), f"{source} to {o}: {x[~same][:4]} gives {got[~same][:4]}, expected {want[~same][:4]}"


@pytest.mark.family("cases")
@pytest.mark.parametrize("target", CPUS)
@pytest.mark.parametrize("source", ["f32", "f64"])
def test_floats_beside_the_ends_of_integer_ranges(source: str, target: str) -> None:
    t = BY_NAME[source]
    ends = np.array([float(e + d) for n in INTS for e in BY_NAME[n].range for d in (-1, -0.5, 0, 0.5, 1)], t.numpy)
    x = np.concatenate([np.nextafter(ends, t.numpy.type(away)) for away in (-np.inf, np.inf)])
    x = np.concatenate([ends, x, np.array([np.nan, np.inf, -np.inf], t.numpy)])
    g = Graph("g")
    v = g.add_input("x", TensorType(t, x.shape))
    g.outputs = [Builder(g).op("cast", v, to=BY_NAME[n]) for n in INTS]
    for got, want, n in zip(run_native(g, [x], target), run(g, [x]), INTS, strict=True):
        assert (got == want).all(), f"{source} to {n}: {x[got != want][:4]} gives {got[got != want][:4]}"


@pytest.mark.parametrize("cpu", ["skylake-avx512", "haswell", "x86-64"])
def test_vectors_become_integers_as_vectors(cpu: str) -> None:
    """LLVM converts `llvm.fptosi.sat` of 16 lanes lane by lane, which takes fifty times as long."""
    target = parse_target(f"llvm -mcpu={cpu}")
    at = f"0:+{target.lanes}"
    for n in ("i8", "u8", "i16", "u16", "i32"):
        text = f"def k(x: f32[64], y: {n}[64]):\n    y[{at}] = cast_{n}(x[{at}])\n"
        code = emit_kernel(parse_kernel(text), "k", target.feature_set)
        assert "fptosi <" in code and ".sat." not in code


SMALL = [n for n, t in BY_NAME.items() if t.is_float and t.bits <= 8]


@pytest.mark.family("cases")
@pytest.mark.parametrize("target", CPUS)
@pytest.mark.parametrize("name", [*SMALL, "f16", "bf16"])
def test_small_floats_bit_for_bit(name: str, target: str) -> None:
    """Every code to float32, and float32 on both sides of every tie to codes."""
    t = BY_NAME[name]
    codes = np.arange(1 << t.bits, dtype=np.uint16 if t.bits == 16 else np.uint8).view(t.numpy)
    (wide,) = run_native(one_node("cast", [TensorType(t, codes.shape)], to=BY_NAME["f32"]), [codes], target)
    np.testing.assert_array_equal(wide, codes.astype(np.float32))
    known = np.unique(wide[np.isfinite(wide)])
    middle = (known[1:].astype(np.float64) + known[:-1]) / 2
    x = np.concatenate(
        [
            known,
            middle,
            np.nextafter(middle.astype(np.float32), np.float32(np.inf)),
            [np.nan, np.inf, -np.inf, -0.0, 3e38, 1e-40],
        ]
    )
    x = x.astype(np.float32)
    (got,) = run_native(one_node("cast", [TensorType(BY_NAME["f32"], x.shape)], to=t, saturate=False), [x], target)
    with np.errstate(all="ignore"):
        want = x.astype(t.numpy)
    got, want = (a.view(np.uint16 if t.bits == 16 else np.uint8) for a in (got, want))
    nan = np.isnan(want.view(t.numpy).astype(np.float32)) & np.isnan(got.view(t.numpy).astype(np.float32))
    bad = (got != want) & ~nan
    assert not bad.any(), f"{x[bad][:4]} gives {got[bad][:4]}, expected {want[bad][:4]}"


def test_extremes_propagate_nan() -> None:
    a, b = pairs(np.array([np.nan, -np.inf, -1, -0.0, 0.0, 1, np.inf], np.float32))
    for name, f in (("max", np.maximum), ("min", np.minimum)):
        (got,) = run_native(one_node(name, ["f32 49", "f32 49"]), [a, b])
        np.testing.assert_array_equal(got, f(a, b))


@pytest.mark.slow
def test_reductions_of_special_values() -> None:
    x = np.array([[np.nan, 1, 2], [np.inf, -np.inf, 0], [-np.inf, 3, 1], [-0.0, 0.0, -0.0]], np.float32).repeat(7, 1)
    for name in ("reduce_max", "reduce_min", "reduce_sum", "reduce_mean", "argmax"):
        check(name, [x], **({"axis": 1} if name == "argmax" else {"axes": (1,)}))


ESTIMATES = {  # CPU -> how it makes 1 / x: by an estimate of 14 or 12 bits, or a quotient
    "skylake-avx512": "llvm.x86.avx512.rcp14.ps.512", "haswell": "llvm.x86.avx.rcp.ps.256", "znver4": "fdiv",
    "x86-64": "fdiv",
}  # fmt: skip


@pytest.mark.parametrize("cpu", ESTIMATES)
def test_reciprocals(cpu: str) -> None:
    """Of all that 1 + exp(-x) can be, 1 and infinity included, and NaN."""
    target = parse_target(f"llvm -mcpu={cpu}")
    text = (
        f"def k(x: f32[{target.lanes}], y: f32[{target.lanes}]):\n"
        f"    y[0:+{target.lanes}] = recip(x[0:+{target.lanes}])\n"
    )
    code = emit_kernel(parse_kernel(text), "k", target.feature_set)
    assert (ESTIMATES[cpu] in code) and ("rcp" in code) == ("rcp" in ESTIMATES[cpu])
    if target.foreign:
        return  # compiled for a CPU that this one is not
    loaded = load_objects([compile_text(code.replace("@k(", "@k_recip("), target.cpu, target.features)])
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int64)(loaded.address("k_recip"))
    x = np.concatenate([[1.0, np.inf, np.nan, 2.0**125], np.exp(np.linspace(0, 87, 4092))]).astype(np.float32)
    y = np.zeros_like(x)
    for at in range(0, x.size, target.lanes):
        call(x[at:].ctypes.data, y[at:].ctypes.data, None, 0, 1)
    assert y[0] == 1.0 and y[1] == 0.0 and np.isnan(y[2])
    want = 1 / x[3:].astype(np.float64)
    assert (np.abs(y[3:] - want) <= 1.2e-7 * want).all()


@pytest.mark.family("cases")
@pytest.mark.parametrize("cpu, steps", [("skylake-avx512", 0), ("haswell", 3), ("znver4", 0), ("x86-64", 0)])
def test_estimates_are_refined_where_they_have_fewer_than_14_bits(cpu: str, steps: int) -> None:
    target = parse_target(f"llvm -mcpu={cpu}")
    text = (
        f"def k(x: f32[{target.lanes}], y: f32[{target.lanes}]):\n"
        f"    y[0:+{target.lanes}] = estimate(x[0:+{target.lanes}])\n"
    )
    code = emit_kernel(parse_kernel(text), "k", target.feature_set)
    assert ESTIMATES[cpu] in code and len(re.findall(r"= call .*@llvm\.fma", code)) == steps


@pytest.mark.slow
@pytest.mark.parametrize("numerics", ["standard", "strict"])
def test_tanh_is_off_by_at_most_2_ulp(numerics: str) -> None:
    """By this CPU's estimates and by quotients: every 61st float of the range in which tanh is computed."""
    bits = np.arange(np.float32(2.0**-12).view(np.int32), np.float32(10.5).view(np.int32), 61, np.int32)
    x = np.concatenate([bits.view(np.float32), np.array([1e-30, 1e-40, 1e30, np.inf], np.float32)])
    g = graph_parse(f"def g(x: f32[{x.size}]):\n    return tanh(x)\n")
    want = np.tanh(x.astype(np.float64))
    off = np.abs(compile(g, numerics=numerics, cache=False)(x) - want) / np.spacing(want.astype(np.float32)).astype(
        np.float64
    )
    assert off.max() <= 2.0, f"tanh({x[off.argmax()]!r}) is off by {off.max():.2f} ulp"


def test_exp_is_off_by_at_most_2_ulp() -> None:
    x = np.concatenate([np.linspace(-86.9, 88.72, 400_000), np.linspace(-1, 1, 100_000)]).astype(np.float32)
    ends = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e30, -1e30, 3.4e38, -3.4e38, 89.0, -200.0, 1e-40], np.float32)
    f = compile(graph_parse(f"def g(x: f32[{x.size + ends.size}]):\n    return exp(x)\n"), cache=False)
    got, want = f(np.concatenate([x, ends])), np.exp(x.astype(np.float64))
    off = np.abs(got[: x.size] - want) / np.spacing(want.astype(np.float32)).astype(np.float64)
    assert off.max() <= 2.0, f"exp({x[off.argmax()]!r}) is off by {off.max():.2f} ulp"
    np.testing.assert_array_equal(
        got[x.size :], np.array([1, 1, np.inf, 0, np.nan, np.inf, 0, np.inf, 0, np.inf, 0, 1], np.float32)
    )


def with_avx512() -> CpuTarget:
    """This CPU if it has AVX-512, else one that has, whose code is compiled only."""
    host = parse_target("llvm")
    return host if "avx512vl" in host.feature_set else parse_target("llvm -mcpu=skylake-avx512")


@pytest.mark.parametrize("lanes", [1, 2, 4, 8, 16, 32, 64])
def test_scaling_by_powers_of_two_and_looking_up(lanes: int) -> None:
    """By AVX-512 on vectors of any length: compiled for a CPU that has it, run if this CPU does."""
    target = with_avx512()
    at = f"0:+{lanes}" if lanes > 1 else "0"
    text = (
        f"def k(x: f32[64], n: f32[64], y: f32[64], z: f32[64]):\n    y[{at}] = scale(x[{at}], n[{at}])\n"
        f"    z[{at}] = piece(x[{at}], i32(5))\n"
    )
    code = emit_kernel(parse_kernel(text), f"k_scale{lanes}", target.feature_set)
    made = compile_text(code, target.cpu, target.features)
    if target.foreign:
        return
    loaded = load_objects([made])
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5, ctypes.c_int64, ctypes.c_int64)(
        loaded.address(f"k_scale{lanes}")
    )
    n = np.array([0.0, -3, 5, 127, -149, 200, -200, np.inf, -np.inf, np.nan, -130, 0.25, -0.75], np.float32)
    m = np.array(
        [1.5, -1.25, 1.0, np.nan, np.float32(2.0) + np.float32(2.0**-20)], np.float32
    )  # infinities are no factor of ours
    for shift in range(0, m.size * n.size, lanes):
        both = np.stack(np.meshgrid(m, n), -1).reshape(-1, 2)
        xs, ns = np.roll(both, -shift, 0)[:64].T.copy()
        y, z = np.zeros(64, np.float32), np.zeros(64, np.float32)
        call(xs.ctypes.data, ns.ctypes.data, y.ctypes.data, z.ctypes.data, None, 0, 1)
        np.testing.assert_array_equal(y[:lanes], TABLE["scale"].meaning(xs, ns)[:lanes])
        np.testing.assert_array_equal(z[:lanes], TABLE["piece"].meaning(xs, 5)[:lanes])
        assert not y[lanes:].any() and not z[lanes:].any()


def test_each_place_of_each_table_is_found() -> None:
    """Numbers of which the low five bits, and what lies above these, differ."""
    target = with_avx512()
    t = (np.arange(256, dtype=np.int32) * 33 + 0x3F800000).view(np.float32)
    assert set((t.view(np.int32) & 31).tolist()) == set(range(32))
    rows = "".join(f"        y{k}[16*i:+16] = piece(t[16*i:+16], i32({k}))\n" for k in range(len(ROWS)))
    head = ", ".join(f"y{k}: f32[256]" for k in range(len(ROWS)))
    code = emit_kernel(
        parse_kernel(f"def k(t: f32[256], {head}):\n    for i in range(16):\n{rows}"), "k_rows", target.feature_set
    )
    made = compile_text(code, target.cpu, target.features)
    if target.foreign:
        return
    loaded = load_objects([made])
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (len(ROWS) + 2), ctypes.c_int64, ctypes.c_int64)(
        loaded.address("k_rows")
    )
    got = np.zeros((len(ROWS), 256), np.float32)
    call(t.ctypes.data, *(g.ctypes.data for g in got), None, 0, 1)
    np.testing.assert_array_equal(got, ROWS[:, t.view(np.int32) & 31])


@pytest.mark.parametrize("op", ["reduce_max", "reduce_min"])
@pytest.mark.parametrize("target", CPUS)
def test_the_extremum_of_a_row_is_nan_where_any_element_is(op: str, target: str) -> None:
    x = np.random.default_rng(0).standard_normal((40, 37)).astype(np.float32)
    x[range(37), range(37)] = np.nan
    x[38, 5], x[39, 5] = np.inf, -np.inf
    g = one_node(op, ["f32 40 37"], axes=(1,))
    (got,), (want,) = run_native(g, [x], target), run(g, [x], "float64")
    assert np.array_equal(got, want.astype(np.float32), equal_nan=True) and np.isnan(want).sum() == 37
