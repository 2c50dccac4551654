"""Element-wise ops: most have an operator of their own, the others are a few nodes."""

from __future__ import annotations

import numpy as np

from dnnc.export.call import Call, Convert
from dnnc.export.writer import ELEMENTS, Writer, schema_type, takes
from dnnc.ir.dtype import DType, f32, f64, i64, u8, u16, u32, u64
from dnnc.ir.errors import UnsupportedError

UNSIGNED = {8: u8, 16: u16, 32: u32, 64: u64}


def same(op: str) -> Convert:
    """An operator whose operands and result are of one type."""
    return lambda c: c.w.typed(op, c.dtype, *c.inputs)


def predicate(op: str) -> Convert:
    """An operator whose operands are of one type and whose result is bool."""
    return lambda c: c.w.typed(op, c.dtype, *c.inputs, keeps=False)


def with_attrs(op: str, *names: str) -> Convert:
    """An operator that has these attributes of the op."""
    return lambda c: c.w.typed(op, c.dtype, *c.inputs, **{n: c.attrs[n] for n in names})


# --- arithmetic -------------------------------------------------------------------------------------------------------


def div(c: Call) -> str:
    """Integers truncate, and x / 0 is 0: a divisor of 0 becomes 1 and the result 0."""
    if c.dtype.is_float:
        return c.w.typed("Div", c.dtype, *c.inputs)
    zero, one = c.w.number(0, c.dtype), c.w.number(1, c.dtype)
    if c.array(1) is not None and np.all(c.array(1) != 0):
        return c.w.typed("Div", c.dtype, *c.inputs)
    none = c.w.typed("Equal", c.dtype, c.x(1), zero, keeps=False)
    quotient = c.w.typed("Div", c.dtype, c.x(0), where(c.w, none, one, c.x(1), c.dtype))
    return where(c.w, none, zero, quotient, c.dtype)


def where(w: Writer, condition: str, a: str, b: str, t: DType) -> str:
    """Integers as i64, and bools by logic: ONNX Runtime has no other kernels of it."""
    if t.kind == "b":
        return w.op("Or", w.op("And", condition, a), w.op("And", w.op("Not", condition), b))  # type: ignore[no-any-return]
    run = i64 if t.is_int else w.type_for("Where", t, 1)
    made: str = w.op("Where", condition, w.cast(a, t, run), w.cast(b, t, run))
    return w.cast(made, run, t)


def mod(c: Call) -> str:
    """The remainder with the sign of the divisor; of integers x mod 0 is 0."""
    if c.dtype.is_float:
        r = c.w.typed("Mod", c.dtype, *c.inputs, fmod=1)
        zero = c.w.number(0, c.dtype)
        some = c.w.op("Not", c.w.typed("Equal", c.dtype, r, zero, keeps=False))
        signs = c.w.op("Xor", *(c.w.typed("Less", c.dtype, v, zero, keeps=False) for v in (r, c.x(1))))
        return where(c.w, c.w.op("And", some, signs), c.w.typed("Add", c.dtype, r, c.x(1)), r, c.dtype)
    return _remainder(c, 0)


def fmod(c: Call) -> str:
    return c.w.typed("Mod", c.dtype, *c.inputs, fmod=1) if c.dtype.is_float else _remainder(c, 1)


def _remainder(c: Call, fmod: int) -> str:
    zero, one = c.w.number(0, c.dtype), c.w.number(1, c.dtype)
    none = c.w.typed("Equal", c.dtype, c.x(1), zero, keeps=False)
    rest = c.w.typed("Mod", c.dtype, c.x(0), where(c.w, none, one, c.x(1), c.dtype), fmod=fmod or None)
    return where(c.w, none, zero, rest, c.dtype)


def trunc(c: Call) -> str:
    below = c.w.typed("Less", c.dtype, c.x(), c.w.number(0, c.dtype), keeps=False)
    return where(c.w, below, c.w.typed("Ceil", c.dtype, c.x()), c.w.typed("Floor", c.dtype, c.x()), c.dtype)


def expm1(c: Call) -> str:
    """2 t / (1 - t) with t = tanh(x / 2) near 0, where exp(x) - 1 loses digits."""
    w, t = c.w, c.dtype
    half = w.typed("Tanh", t, w.typed("Mul", t, c.x(), w.number(0.5, t)))
    near = w.typed("Div", t, w.typed("Add", t, half, half), w.typed("Sub", t, w.number(1, t), half))
    far = w.typed("Sub", t, w.typed("Exp", t, c.x()), w.number(1, t))
    return where(w, _small(w, c.x(), t), near, far, t)


def log1p(c: Call) -> str:
    """log(u) * x / (u - 1) with u = 1 + x near 0 (Kahan), where log(1 + x) loses digits."""
    w, t = c.w, c.dtype
    one = w.number(1, t)
    u = w.typed("Add", t, c.x(), one)
    log, rest = w.typed("Log", t, u), w.typed("Sub", t, u, one)
    none = w.typed("Equal", t, rest, w.number(0, t), keeps=False)
    ratio = w.typed("Div", t, c.x(), where(w, none, one, rest, t))
    near = where(w, none, c.x(), w.typed("Mul", t, log, ratio), t)
    return where(w, _small(w, c.x(), t), near, log, t)


def _small(w: Writer, x: str, t: DType) -> str:
    return w.typed("Less", t, w.typed("Abs", t, x), w.number(0.5, t), keeps=False)


# --- comparisons and bits ---------------------------------------------------------------------------------------------


def not_equal(c: Call) -> str:
    return c.w.op("Not", c.w.typed("Equal", c.dtype, *c.inputs, keeps=False))  # type: ignore[no-any-return]


def power(c: Call) -> str:
    """Of integers modulo 2^64, so that their sign does not matter."""
    run = i64 if c.dtype is u64 else c.dtype
    return c.w.cast(c.w.typed("Pow", run, *(c.w.cast(c.x(k), c.dtype, run) for k in (0, 1))), run, c.dtype)


def _word(t: DType) -> DType:
    """The unsigned type of the same width."""
    if t.bits not in UNSIGNED:
        raise UnsupportedError(f"ONNX's BitShift takes no {t}")
    return UNSIGNED[t.bits]


def shift_left(c: Call) -> str:
    """Bits as unsigned numbers; a shift by all bits or more gives 0."""
    w, t = c.w, c.dtype
    word = _word(t)
    x, by = w.cast(c.x(0), t, word), w.cast(c.x(1), t, word)
    made = w.typed("BitShift", word, x, by, direction="LEFT")
    return w.cast(_within(w, by, word, made, w.number(0, word)), word, t)


def _within(w: Writer, by: str, word: DType, shifted: str, else_: str) -> str:
    """The shifted bits where the shift is less than the width."""
    fits = w.typed("Less", word, by, w.number(word.bits, word), keeps=False)
    return where(w, fits, shifted, else_, word)


def shift_right(c: Call) -> str:
    """Of signed numbers that are negative the complement is shifted, and complemented."""
    w, t = c.w, c.dtype
    word = _word(t)
    by = w.cast(c.x(1), t, word)
    if t.kind == "u":
        return _within(w, by, t, w.typed("BitShift", t, c.x(0), by, direction="RIGHT"), w.number(0, t))
    below = w.typed("Less", t, c.x(0), w.number(0, t), keeps=False)
    positive = where(w, below, w.typed("BitwiseNot", t, c.x(0)), c.x(0), t)
    shifted = _within(
        w, by, word, w.typed("BitShift", word, w.cast(positive, t, word), by, direction="RIGHT"), w.number(0, word)
    )
    made = w.cast(shifted, word, t)
    return where(w, below, w.typed("BitwiseNot", t, made), made, t)


def select(c: Call) -> str:
    return where(c.w, c.x(0), c.x(1), c.x(2), c.out.dtype)


# --- activations ------------------------------------------------------------------------------------------------------


def clip(c: Call) -> str:
    w, t = c.w, c.dtype
    low, high = c.attrs["low"], c.attrs["high"]
    bounds = [None if b is None else w.number(b if t.is_float else int(b), t) for b in (low, high)]
    x = c.x()
    if not c.attrs["keeps_nan"] and t.is_float:
        x = where(w, w.typed("IsNaN", t, x, keeps=False), w.number(low, t), x, t)
    return w.typed("Clip", t, x, *bounds)


def prelu(c: Call) -> str:
    """x < 0 ? x * slope : x, for slopes that broadcast either way."""
    return below_zero(c, c.w.typed("Mul", c.dtype, *c.inputs))


def below_zero(c: Call, y: str) -> str:
    """x < 0 ? y : x"""
    below = c.w.typed("Less", c.dtype, c.x(), c.w.number(0, c.dtype), keeps=False)
    return where(c.w, below, y, c.x(), c.dtype)


# ONNX's attributes are float32, in which a slope of 0.01 is another number: float64 is computed step by step.


def leaky_relu(c: Call) -> str:
    if c.dtype is not f64:
        return c.w.typed("LeakyRelu", c.dtype, c.x(), alpha=c.attrs["alpha"])
    return below_zero(c, c.w.op("Mul", c.x(), c.w.number(c.attrs["alpha"], f64)))


def elu(c: Call) -> str:
    if c.dtype is not f64:
        return c.w.typed("Elu", c.dtype, c.x(), alpha=c.attrs["alpha"])
    return below_zero(c, c.w.op("Mul", expm1(c), c.w.number(c.attrs["alpha"], f64)))


def hard_sigmoid(c: Call) -> str:
    w, a = c.w, c.attrs
    if c.dtype is not f64:
        return w.typed("HardSigmoid", c.dtype, c.x(), alpha=a["alpha"], beta=a["beta"])
    line = w.op("Add", w.op("Mul", c.x(), w.number(a["alpha"], f64)), w.number(a["beta"], f64))
    return w.op("Clip", line, w.number(0, f64), w.number(1, f64))  # type: ignore[no-any-return]


def rounded(c: Call) -> str:
    """What is stored in a half type is rounded to it anyway."""
    if c.dtype.computed is c.dtype:
        return c.w.op("Identity", c.x())  # type: ignore[no-any-return]
    return c.w.cast(c.w.cast(c.x(), c.dtype, f32), f32, c.dtype)


def cast(c: Call) -> str:
    """Floats that an integer type does not hold saturate here, and NaN is 0; ONNX leaves that open."""
    w, have, want = c.w, c.dtype, c.attrs["to"]
    if have.is_float and want.is_int:
        wide = have if have.computed is have else f32
        x = w.cast(c.x(), have, wide)
        nan = w.typed("IsNaN", wide, x, keeps=False)
        x = where(w, nan, w.number(0, wide), x, wide)
        low, high = want.range
        top = _below(high, wide)
        inside = w.cast(w.typed("Clip", wide, x, w.number(float(low), wide), w.number(top, wide)), wide, want)
        if int(top) == high:
            return inside
        return where(w, w.typed("Less", wide, w.number(top, wide), x, keeps=False), w.number(high, want), inside, want)
    if want.kind == "b" and have.is_float:
        return c.w.op("Not", w.typed("Equal", have, c.x(), w.number(0, have), keeps=False))  # type: ignore[no-any-return]
    return w.cast(c.x(), have, want, c.attrs["saturate"])


def _below(high: int, t: DType) -> float:
    """The largest number of a float type that is no larger than an integer."""
    x = t.numpy.type(high)
    return float(x if int(x) <= high else np.nextafter(x, t.numpy.type(0)))


def bit_cast(c: Call) -> str:
    have, want = c.dtype, c.attrs["to"]
    if have.bits != want.bits:
        raise UnsupportedError(f"ONNX's BitCast keeps the width; got {have} and {want}")
    return c.w.op("BitCast", c.x(), to=ELEMENTS[want.name])  # type: ignore[no-any-return]


# --- quantization -----------------------------------------------------------------------------------------------------


def quantize(c: Call) -> str:
    _check_types(c, "QuantizeLinear")
    axis, block = c.attrs["axis"], c.attrs["block"]
    known = _quantized_constant(c)
    if known is not None:
        return c.w.constant(known, c.attrs["dtype"], f"{c.x(0)}_q")
    zero = c.maybe(2) or c.w.constant(np.zeros(c.type(1).shape, c.attrs["dtype"].numpy), c.attrs["dtype"])
    saturate = None if c.attrs["saturate"] else 0
    return c.w.op("QuantizeLinear", c.x(0), c.x(1), zero, axis=axis, block_size=block or None, saturate=saturate)  # type: ignore[no-any-return]


def _quantized_constant(c: Call) -> np.ndarray | None:
    """Weights as the integers that they are quantized to; None for what is no constant, or no plain case."""
    x, scale, to = c.array(0), c.array(1), c.attrs["dtype"]
    zero = c.array(2) if c.maybe(2) is not None else 0
    if x is None or scale is None or zero is None or c.attrs["block"] or not to.is_int or scale.ndim > 1:
        return None
    along = (-1, *(1,) * (x.ndim - 1 - c.attrs["axis"] % x.ndim)) if scale.size > 1 else ()
    low, high = to.range
    q = np.rint(x / scale.reshape(along)) + np.asarray(zero, np.float32).reshape(along if np.ndim(zero) else ())
    clipped: np.ndarray = np.clip(q, low, high).astype(to.numpy)
    return clipped


def _check_types(c: Call, op: str) -> None:
    """These two take few types; others are left to what the ops are defined by."""
    if any(schema_type(c.type(k).dtype) not in (takes(op, c.w.opset, k) or ()) for k in (0, 1)):
        raise UnsupportedError(f"ONNX's {op} takes no {c.dtype} with a scale in {c.type(1).dtype}")


def dequantize(c: Call) -> str:
    _check_types(c, "DequantizeLinear")
    return c.w.op("DequantizeLinear", *c.inputs, axis=c.attrs["axis"], block_size=c.attrs["block"] or None)  # type: ignore[no-any-return]


def decode(c: Call) -> str:
    """Codes, by a table where there is one, less zero points, times scales, both of blocks."""
    table, dtype, wide = c.attrs["table"], c.attrs["dtype"], c.attrs["dtype"].computed
    if table:
        y = c.w.op("Gather", c.w.constant(table, wide), c.w.op("Cast", c.x(), to=ELEMENTS["i64"]))
    else:
        y = c.w.op("Cast", c.x(), to=ELEMENTS[wide.name])
    for k, op in ((2, "Sub"), (1, "Mul")):
        p = c.maybe(k)
        if p is not None:
            y = c.w.op(op, y, _of_blocks(c, c.w.op("Cast", p, to=ELEMENTS[wide.name]), k))
    return c.w.op("Cast", y, to=ELEMENTS[dtype.name])  # type: ignore[no-any-return]


def recode(c: Call) -> str:
    """Bytes by a table."""
    at = c.w.op("Cast", c.x(), to=ELEMENTS["i64"])
    return c.w.op("Gather", c.w.constant(c.attrs["table"], u8), at)  # type: ignore[no-any-return]


def _of_blocks(c: Call, p: str, k: int) -> str:
    """An operand with a number for each block, in a shape that broadcasts to the codes."""
    axis, shape = c.attrs["axis"] % c.type().rank, c.type(k).shape
    n = c.type().shape[axis]
    if shape[axis] == 1 or not isinstance(n, int):
        return p
    return c.w.op("Gather", p, c.w.ints([i // c.attrs["block"] for i in range(n)]), axis=axis)  # type: ignore[no-any-return]


SAME = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "min": "Min", "max": "Max", "neg": "Neg", "abs": "Abs", "sign": "Sign",
    "reciprocal": "Reciprocal", "sqrt": "Sqrt", "floor": "Floor", "ceil": "Ceil", "round": "Round", "exp": "Exp",
    "log": "Log", "erf": "Erf",
    "sin": "Sin", "cos": "Cos", "tan": "Tan", "asin": "Asin", "acos": "Acos", "atan": "Atan", "sinh": "Sinh",
    "cosh": "Cosh", "tanh": "Tanh",
    "asinh": "Asinh", "acosh": "Acosh", "atanh": "Atanh", "logical_and": "And", "logical_or": "Or",
    "logical_xor": "Xor", "logical_not": "Not",
    "bitwise_and": "BitwiseAnd", "bitwise_or": "BitwiseOr", "bitwise_xor": "BitwiseXor", "bitwise_not": "BitwiseNot",
    "relu": "Relu",
    "sigmoid": "Sigmoid", "softplus": "Softplus", "mish": "Mish", "hard_swish": "HardSwish", "softsign": "Softsign",
    "identity": "Identity",
}  # fmt: skip
BOOLEAN = {
    "equal": "Equal", "less": "Less", "less_equal": "LessOrEqual", "greater": "Greater",
    "greater_equal": "GreaterOrEqual", "isnan": "IsNaN",
    "isinf": "IsInf",
}  # fmt: skip

ARITHMETIC: dict[str, Convert] = {
    "recomputed": lambda c: c.w.op("Identity", c.x()),
    **{name: same(op) for name, op in SAME.items()},
    **{name: predicate(op) for name, op in BOOLEAN.items()},
    "not_equal": not_equal,
    "pow": power,
    "div": div,
    "mod": mod,
    "fmod": fmod,
    "trunc": trunc,
    "expm1": expm1,
    "log1p": log1p,
    "shift_left": shift_left,
    "shift_right": shift_right,
    "where": select,
    "clip": clip,
    "prelu": prelu,
    "gelu": with_attrs("Gelu", "approximate"),
    "leaky_relu": leaky_relu,
    "elu": elu,
    "hard_sigmoid": hard_sigmoid,
    "selu": with_attrs("Selu", "alpha", "gamma"),
    "celu": with_attrs("Celu", "alpha"),
    "thresholded_relu": with_attrs("ThresholdedRelu", "alpha"),
    "shrink": with_attrs("Shrink", "bias", "lambd"),
    "swish": with_attrs("Swish", "alpha"),
    "rounded": rounded,
    "cast": cast,
    "bit_cast": bit_cast,
    "quantize_linear": quantize,
    "dequantize_linear": dequantize,
    "decode": decode,
    "recode": recode,
}
