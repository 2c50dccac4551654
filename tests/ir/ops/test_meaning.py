"""What ops mean, against formulas: decompositions, special values, coordinates, refused types."""

from __future__ import annotations

from collections.abc import Callable
from math import erf, exp
from typing import Any

import numpy as np
import pytest
from te_eval import evaluate

from dnnc.ir import te
from dnnc.ir.dtype import BY_NAME, f32, from_numpy
from dnnc.ir.errors import ShapeError
from dnnc.ir.expr import dim
from dnnc.ir.graph import Graph
from dnnc.ir.graph.attributes import complete
from dnnc.ir.graph.builder import Builder
from dnnc.ir.graph.interp import run
from dnnc.ir.ops import OPS
from dnnc.ir.ops.common import draw
from dnnc.ir.ops.resize import coordinates, rational
from dnnc.ir.ops.slices import normalize_slice
from dnnc.ir.types import TensorType, tensor

NAN, INF = float("nan"), float("inf")


def apply(name: str, *arrays: Any, **attrs: Any) -> Any:
    """The op by the interpreter (its decomposition, where it has one); a tuple of several results."""
    g = Graph("g")
    values = [g.add_input(f"x{k}", TensorType(from_numpy(a.dtype), a.shape)) for k, a in enumerate(arrays)]
    made = Builder(g).op(name, *values, **attrs)
    g.outputs = list(made) if isinstance(made, tuple) else [made]
    found = run(g, list(arrays))
    return tuple(found) if isinstance(made, tuple) else found[0]


def channel(p: Any, rank: int) -> Any:
    return p.reshape((-1,) + (1,) * (rank - 2))


def standardized(x: Any, axes: tuple[int, ...], epsilon: float) -> Any:
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + epsilon)


def batch_norm_training(x: Any, s: Any, b: Any, epsilon: float) -> Any:
    """The result, and mean and variance of each channel."""
    axes = (0, *range(2, x.ndim))
    return standardized(x, axes, epsilon) * channel(s, x.ndim) + channel(b, x.ndim), x.mean(axes), x.var(axes)


def cumprod_backward(x: Any, g: Any, axis: int, exclusive: bool, reverse: bool) -> Any:
    """For each element the products behind it without it, weighed by g; term by term."""
    x, g = (np.moveaxis(v, axis, 0)[:: -1 if reverse else 1] for v in (x, g))
    out = np.zeros_like(x)
    for j in range(len(x)):
        for k in range(j + exclusive, len(x)):
            out[j] += g[k] * np.delete(x[: k + 1 - exclusive], j, 0).prod(0)
    return np.moveaxis(out[:: -1 if reverse else 1], 0, axis)


def group_norm(x: Any, s: Any, b: Any, groups: int, epsilon: float = 1e-5) -> Any:
    y = standardized(x.reshape(x.shape[0], groups, -1), (2,), epsilon).reshape(x.shape)
    return y * channel(s, x.ndim) + channel(b, x.ndim)


def depth_to_space(x: Any, block: int, mode: str = "DCR") -> Any:
    n, c, h, w = x.shape
    y = np.zeros((n, c // block**2, h * block, w * block), x.dtype)
    for k, i, j in np.ndindex(y.shape[1:]):
        at = (i % block) * block + j % block
        y[:, k, i, j] = x[:, at * y.shape[1] + k if mode == "DCR" else k * block**2 + at, i // block, j // block]
    return y


def space_to_depth(x: Any, block: int) -> Any:
    n, c, h, w = x.shape
    y = np.zeros((n, c * block**2, h // block, w // block), x.dtype)
    for k, i, j in np.ndindex(c, h, w):
        y[:, ((i % block) * block + j % block) * c + k, i // block, j // block] = x[:, k, i, j]
    return y


def gemm(
    a: Any, b: Any, c: Any = 0.0, alpha: float = 1.0, beta: float = 1.0, trans_a: bool = False, trans_b: bool = False
) -> Any:
    return alpha * ((a.T if trans_a else a) @ (b.T if trans_b else b)) + beta * c


def lp_norm(x: Any, axis: int, p: int) -> Any:
    n = (np.abs(x) ** p).sum(axis, keepdims=True) ** (1 / p)
    return np.divide(x, n, out=np.zeros_like(x), where=n != 0)


def per_axis(p: Any, x: Any, axis: int, block: int) -> Any:
    if p.size == 1:
        return p.reshape(())
    return (
        np.repeat(p, block, axis)[:, : x.shape[1]]
        if block
        else np.moveaxis(p.reshape(p.shape + (1,) * (x.ndim - 1)), 0, axis)
    )


def quantize(x: Any, s: Any, z: Any = None, *, dtype: Any, axis: int = 1, block: int = 0) -> Any:
    q = np.rint(x / per_axis(s, x, axis, block)) + (0 if z is None else per_axis(z, x, axis, block))
    return np.clip(q, *dtype.range).astype(dtype.numpy)


def dequantize(x: Any, s: Any, z: Any = None, axis: int = 1, block: int = 0) -> Any:
    zero = 0.0 if z is None else per_axis(z.astype(np.float64), x, axis, block)
    return (x.astype(np.float64) - zero) * per_axis(s, x, axis, block)


def selu(x: Any, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Any:
    return gamma * np.where(x > 0, x, alpha * (np.exp(x) - 1))


def dft(x: Any, axis: int, length: int | None = None, inverse: bool = False, onesided: bool = False) -> Any:
    z = x[..., 0] + (1j * x[..., 1] if x.shape[-1] == 2 else 0)
    axis = axis if axis >= 0 else axis + 1
    if inverse and onesided:
        return np.fft.irfft(z, length or 2 * (z.shape[axis] - 1), axis)[..., None]
    y = np.fft.ifft(z, length, axis) if inverse else np.fft.fft(z, length, axis)
    y = np.take(y, range(y.shape[axis] // 2 + 1), axis) if onesided else y
    return np.stack([y.real, y.imag], -1)


ORACLES: dict[str, Callable[..., Any]] = {
    "stop_gradient": lambda x: x,
    "det": np.linalg.det,
    "dft": dft,
    "selu": selu,
    "celu": lambda x, alpha: np.maximum(x, 0) + np.minimum(alpha * (np.exp(x / alpha) - 1), 0),
    "hard_swish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "swish": lambda x, alpha: x / (1 + np.exp(-alpha * x)),
    "softsign": lambda x: x / (1 + np.abs(x)),
    "thresholded_relu": lambda x, alpha: np.where(x > alpha, x, 0),
    "shrink": lambda x, bias, lambd: np.where(x < -lambd, x + bias, np.where(x > lambd, x - bias, 0)),
    "gemm": gemm,
    "global_avg_pool": lambda x: x.mean(tuple(range(2, x.ndim)), keepdims=True),
    "global_max_pool": lambda x: x.max(tuple(range(2, x.ndim)), keepdims=True),
    "global_lp_pool": lambda x, p=2: (np.abs(x) ** p).sum(tuple(range(2, x.ndim)), keepdims=True) ** (1 / p),
    "batch_norm": lambda x, s, b, m, v, epsilon: (
        (x - channel(m, x.ndim)) / np.sqrt(channel(v, x.ndim) + epsilon) * channel(s, x.ndim) + channel(b, x.ndim)
    ),
    "batch_norm_training": batch_norm_training,
    "cumprod_backward": cumprod_backward,
    "instance_norm": lambda x, s, b, epsilon=1e-5: (
        standardized(x, tuple(range(2, x.ndim)), epsilon) * channel(s, x.ndim) + channel(b, x.ndim)
    ),
    "group_norm": group_norm,
    "lp_norm": lp_norm,
    "squeeze": lambda x, axes=None: np.squeeze(x, axes),
    "unsqueeze": lambda x, axes: np.expand_dims(x, axes),
    "flatten": lambda x, axis=1: x.reshape(int(np.prod(x.shape[: axis if axis >= 0 else x.ndim + axis])), -1),
    "depth_to_space": depth_to_space,
    "space_to_depth": space_to_depth,
    "quantize_linear": quantize,
    "dequantize_linear": dequantize,
}


ELSEWHERE = {
    "sort",
    "compress",
    "non_max_suppression",
    "nonzero",
    "unique",
    "inverse",
    "random_uniform",
    "random_normal",
    "recurrence",
    "call",
    "checkpoint",
    "custom_vjp",
}  # in a test file of their own


def test_every_decomposition_has_an_oracle() -> None:
    assert set(ORACLES) | ELSEWHERE == {op.name for op in OPS.values() if op.decompose is not None}


@pytest.mark.parametrize("name", ORACLES)
def test_decomposition_means_its_formula(name: str) -> None:
    for seed, s in enumerate(OPS[name].samples):
        print(f"seed {seed}")
        arrays = draw(s, seed)
        with np.errstate(all="ignore"):
            want = ORACLES[name](
                *(a.astype(np.float64) if t.dtype.is_float else a for a, t in zip(arrays, s.inputs)), **dict(s.attrs)
            )
        got = apply(name, *arrays, **dict(s.attrs))
        half = any(t.dtype.bits == 16 for t in s.inputs)
        for a, b in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, want)), strict=True):
            np.testing.assert_allclose(
                a.astype(np.float64),
                np.asarray(b, np.float64),
                rtol=2e-2 if half else 2e-5,
                atol=1e-2 if half else 1e-5,
            )


# --- special values ---------------------------------------------------------------------------------------------------


def elements(name: str, *arrays: Any, **attrs: Any) -> tuple[Any, Any]:
    """(tensor expression, reference) of an op on given operands."""
    op = OPS[name]
    full = complete(op, attrs)
    inputs = [te.placeholder(f"x{k}", from_numpy(a.dtype), a.shape) for k, a in enumerate(arrays)]
    assert op.compute is not None and op.reference is not None
    (got,) = evaluate([op.compute(*inputs, **full)], dict(zip(inputs, arrays)))
    with np.errstate(all="ignore"):
        return got, op.reference(*arrays, **full)


SPECIAL = np.array([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 3e38, -3e38, 1e-40], np.float32)


@pytest.mark.parametrize("rounding", ["up", "down", "nearest"])
def test_the_power_of_zero_is_the_smallest(rounding: str) -> None:
    """Saturated it is 2^-127, code 0; there is no smaller one, and no zero."""
    for got in elements("to_power", np.array([0.0, -0.0, 1.0], np.float32), rounding=rounding):
        assert np.asarray(got).view(np.uint8).tolist() == [0, 0, 127]
    for got in elements("to_power", np.array([0.0, 1.0], np.float32), rounding=rounding, saturate=False):
        assert np.asarray(got).view(np.uint8).tolist() == [255, 127]


SAFE_UNARY = (
    "neg abs sign sqrt floor ceil round trunc exp log relu sigmoid softplus isnan isinf erf tanh reciprocal gelu "
    "elu leaky_relu clip"
).split()


@pytest.mark.parametrize("name", SAFE_UNARY)
def test_nan_and_inf_propagate(name: str) -> None:
    got, want = elements(name, SPECIAL, **({"low": -1.0, "high": 2.0} if name == "clip" else {}))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    if name not in ("isnan", "isinf"):
        assert np.isnan(got[0])


@pytest.mark.parametrize("name", ["max", "min", "add", "mul", "div", "mod", "fmod"])
def test_nan_and_inf_propagate_in_pairs(name: str) -> None:
    a, b = (x.ravel() for x in np.meshgrid(SPECIAL, SPECIAL))
    got, want = elements(name, a, b)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "name", ["reduce_max", "reduce_min", "reduce_sum", "argmax", "argmin", "reduce_log_sum_exp", "softmax", "max_pool"]
)
def test_nan_and_inf_in_rows(name: str) -> None:
    rows = np.array([[1, NAN, 3, NAN], [1, INF, 2, 0], [-INF, -INF, -INF, -INF], [5, 5, -INF, 5]], np.float32)
    attrs: dict[str, Any] = {"axes": (1,)}
    if name in ("argmax", "argmin", "softmax"):
        attrs = {"axis": 1}
    if name == "max_pool":
        rows, attrs = rows[None], {"kernel": (3,), "pads": (1, 1)}
    got, want = elements(name, rows, **attrs)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("name", ["div", "mod", "fmod", "pow", "shift_left", "shift_right"])
@pytest.mark.parametrize("dtype", ["i8", "i32", "i64", "u8"])
def test_integer_corners(name: str, dtype: str) -> None:
    d = BY_NAME[dtype]
    low, high = d.range
    values = np.array(
        sorted({low, low + 1, 0, 1, 2, 3, 7, high - 1, high, max(low, -1), max(low, -2), max(low, -7)}), d.numpy
    )
    a, b = (x.ravel() for x in np.meshgrid(values, values))
    if name.startswith("shift"):
        keep = (b >= 0) & (b < 70)
        a, b = a[keep], b[keep]
    if name == "pow":
        keep = np.abs(b.astype(np.float64)) < 64
        a, b = a[keep], b[keep]
    got, want = elements(name, a, b)
    np.testing.assert_array_equal(got, want)


def test_integer_division_is_defined_everywhere() -> None:
    a, b = np.array([7, -7, 7, -7, 5, -128], np.int8), np.array([2, 2, -2, -2, 0, -1], np.int8)
    assert elements("div", a, b)[0].tolist() == [3, -3, -3, 3, 0, -128]
    assert elements("mod", a, b)[0].tolist() == [1, 1, -1, -1, 0, 0]
    assert elements("fmod", a, b)[0].tolist() == [1, -1, 1, -1, 0, 0]


def test_round_is_half_to_even() -> None:
    assert elements("round", np.array([0.5, 1.5, 2.5, -0.5, -1.5], np.float32))[0].tolist() == [0, 2, 2, 0, -2]


def test_casts_saturate_and_wrap() -> None:
    x = np.array([NAN, INF, -INF, 300.7, -3.9, 2.5], np.float32)
    assert elements("cast", x, to=BY_NAME["i8"])[0].tolist() == [0, 127, -128, 127, -3, 2]
    assert elements("cast", np.array([300, -1, 128], np.int32), to=BY_NAME["i8"])[0].tolist() == [44, -1, -128]
    assert elements("cast", np.array([1e9, -1e9, 3.0], np.float32), to=BY_NAME["f8e4m3fn"])[0].astype(
        np.float32
    ).tolist() == [448, -448, 3]


def test_values_by_hand() -> None:
    x = np.array([-1.5, 0.0, 0.7], np.float32)
    np.testing.assert_allclose(elements("gelu", x)[1], [v * 0.5 * (1 + erf(v / 2**0.5)) for v in x], rtol=1e-6)
    np.testing.assert_allclose(elements("sigmoid", x)[1], [1 / (1 + exp(-v)) for v in x], rtol=1e-6)
    np.testing.assert_allclose(elements("hard_sigmoid", x)[1], [max(0, min(1, 0.2 * v + 0.5)) for v in x], rtol=1e-6)


# --- coordinates and slices -------------------------------------------------------------------------------------------


def test_resize_coordinates() -> None:
    def at(mode: str, i: int, old: int, new: int, roi: tuple[float, float] = (0.0, 1.0)) -> float:
        mul, add, div = coordinates(mode, old, new, rational(new / old), roi)
        return (mul * i + add) / div

    assert at("half_pixel", 3, 4, 8) == (3 + 0.5) / 2 - 0.5
    assert at("asymmetric", 3, 4, 8) == 1.5
    assert at("align_corners", 7, 4, 8) == 3.0
    assert at("pytorch_half_pixel", 0, 4, 1) == 0.0
    assert at("half_pixel_symmetric", 1, 4, 8) == at("half_pixel", 1, 4, 8)
    assert at("tf_crop_and_resize", 2, 5, 3, (0.25, 0.75)) == 3.0
    assert rational(float(np.float32(0.6))).denominator == 5
    with pytest.raises(ShapeError, match="align_corners"):
        coordinates("align_corners", dim("H"), 8, rational(2.0))


def test_nearest_doubling_has_a_plain_index() -> None:
    op = OPS["resize"]
    attrs = complete(op, {"shape": (6, 4), "coords": ((1, 0, 2), (1, 0, 1)), "mode": "nearest", "rounding": "floor"})
    assert op.compute is not None
    made = op.compute(te.placeholder("x", f32, (3, 4)), **attrs)
    assert repr(made.stage.value) == "x[i0 // 2, i1]"


@pytest.mark.parametrize("seed", range(40))
def test_slices_are_pythons(seed: int) -> None:
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    x = np.arange(7 * 5).reshape(7, 5)
    starts, ends = rng.integers(-9, 9, 2).tolist(), rng.integers(-9, 9, 2).tolist()
    steps = rng.choice([-3, -2, -1, 1, 2, 3], 2).tolist()
    want = x[starts[0] : ends[0] : steps[0], starts[1] : ends[1] : steps[1]]
    # Python reads an end of -9 .. -8 with a negative step as "before the first": so does ONNX
    np.testing.assert_array_equal(apply("slice", x, **normalize_slice(x.shape, starts, ends, None, steps)), want)


def test_slice_of_a_symbolic_dim() -> None:
    n = dim("N", 4)
    assert normalize_slice((n, 3), [1], [1 << 62], [0]) == {"starts": (1, 0), "steps": (1, 1), "shape": (n - 1, 3)}
    assert normalize_slice((n, 3), [-1], [n], [0])["starts"][0] is n - 1
    assert normalize_slice((n,), [-1], [-(1 << 63)], [0], [-1]) == {"starts": (n - 1,), "steps": (-1,), "shape": (n,)}


# --- what type rules refuse -------------------------------------------------------------------------------------------

A, B = tensor(f32, 2, 3), tensor(BY_NAME["i64"], 4)
REFUSED: list[tuple[str, tuple[TensorType, ...], dict[str, Any], str]] = [
    ("add", (A, B), {}, "one dtype"),
    ("add", (A, tensor(f32, 4)), {}, "broadcast"),
    ("exp", (B,), {}, "must be float"),
    ("softmax", (A,), {"axis": 2}, "axis 2"),
    ("matmul", (A, A), {}, "must be equal"),
    ("conv", (tensor(f32, 1, 3, 5, 5), tensor(f32, 4, 2, 3, 3)), {}, "channels"),
    ("conv", (tensor(f32, 1, 3, 2, 2), tensor(f32, 4, 3, 3, 3)), {}, "does not fit"),
    ("conv", (tensor(f32, 1, 3, 5, 5), tensor(f32, 4, 3, 3, 3)), {"strides": (1,)}, "strides needs 2"),
    ("reshape", (A,), {"shape": (4, 2)}, "elements"),
    ("reshape", (A,), {"shape": (-1, -1)}, "open"),
    ("transpose", (A,), {"perm": (0, 0)}, "permutation"),
    ("concat", (A, tensor(f32, 3, 3)), {"axis": 1}, "does not fit"),
    ("slice", (A,), {"starts": (0, 2), "steps": (1, 1), "shape": (2, 2)}, "leaves"),
    ("gather", (A, A), {"axis": 0}, "integer"),
    ("squeeze", (A,), {"axes": (0,)}, "size 1"),
    ("reduce_sum", (A,), {"axes": (1, -1)}, "twice"),
    ("where", (A, A, A), {}, "bool"),
    ("pad", (A,), {"pads": (1, 1)}, "pad needs 4"),
    ("scatter_nd", (A, tensor(BY_NAME["i64"], 4, 1), A), {}, "updates"),
    ("argmax", (tensor(f32, 0, 2),), {"axis": 0}, "empty"),
]


@pytest.mark.parametrize("name,types,attrs,message", REFUSED)
def test_type_rules_refuse(name: str, types: tuple[TensorType, ...], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        OPS[name].type(*types, **attrs)


@pytest.mark.parametrize("name", ["max_pool", "avg_pool"])
def test_a_window_larger_than_its_operand_reads_what_there_is(name: str) -> None:
    """Sums and maxima at a place take memory for the operand, not for the window of 10^12 places."""
    x, point = np.arange(40.0).reshape(1, 2, 4, 5), np.array([[0, 1, 0, 0]])
    size, op = 1_000_000, OPS[name]
    assert op.reference_at is not None
    (got,) = op.reference_at([x], point, kernel=(size, size), pads=(0, 0, size - 4, size - 5))
    assert got == (39.0 if name == "max_pool" else x[0, 1].mean())
