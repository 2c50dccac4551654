"""Activations: element-wise functions that nets apply between layers, some of them in terms of other ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from dnnc.ir.autodiff.rules import elementwise as rules
from dnnc.ir.expr import Expr, const, maximum, select
from dnnc.ir.loops.stmt import call
from dnnc.ir.op import ELEMENTWISE, Cost, OpDef, Trait
from dnnc.ir.ops.common import Array, elementwise, require_kind, sample, size_flops
from dnnc.ir.ops.elementwise import binary, meaning, unary
from dnnc.ir.te import Tensor
from dnnc.ir.types import TensorType


def relu_value(x: Expr) -> Expr:
    # fmax(0, x) gives x where x is NaN: one instruction that propagates NaN
    return call("fmax", const(0.0, x.dtype), x) if x.dtype.is_float else maximum(x, 0)


def sigmoid_value(x: Expr) -> Expr:
    return 1.0 / (call("exp", -x) + 1.0)


def _sigmoid(x: Array) -> Array:
    return 1.0 / (np.exp(-x) + 1.0)


def _softplus_value(x: Expr) -> Expr:
    return call("log1p", call("exp", -call("abs", x))) + relu_value(x)  # exp never overflows


def _softplus(x: Array) -> Array:
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


def activation(
    name: str,
    value: Callable[..., Expr],
    reference: Callable[..., Array],
    type_: Callable[..., TensorType],
    *attrs: dict[str, Any],
    flops: int = 4,
    cost: Cost = Cost.CHEAP,
    traits: Iterable[Trait] = (),
    vjp: Callable[..., Any] | None = None,
) -> OpDef:
    """A float op of one operand with attributes; one sample for each given set of them, and one in a half type."""

    def compute(x: Tensor, **a: Any) -> Tensor:
        return elementwise(lambda e: value(e, **a), x)

    def numpy(x: Array, **a: Any) -> Array:
        with np.errstate(all="ignore"):
            return reference(x, **a)

    samples = [sample("f32[3, 17]", **a, domain=(-4.0, 4.0)) for a in attrs]
    samples += [sample("f16[5]", **attrs[0], domain=(-4.0, 4.0)), sample("f64[2, 3]", **attrs[-1], domain=(-4.0, 4.0))]
    return OpDef(
        name,
        type_,
        compute,
        reference=numpy,
        flops=size_flops(flops),
        traits=ELEMENTWISE.union(traits),
        samples=tuple(samples),
        cost=cost,
        vjp=vjp,
    )


def _float(x: TensorType) -> TensorType:
    require_kind("the operand of an activation", x, "f")
    return x


def _alpha_type(default: float) -> Callable[..., TensorType]:
    def type_(x: TensorType, *, alpha: float = default) -> TensorType:
        return _float(x)

    return type_


def _gelu_type(x: TensorType, *, approximate: str = "none") -> TensorType:
    return _float(x)


def _gelu(x: Expr, *, approximate: str) -> Expr:
    if approximate == "tanh":
        inner = (x * x * x * 0.044715 + x) * 0.7978845608028654
        return x * 0.5 * (call("tanh", inner) + 1.0)
    return x * 0.5 * (call("erf", x * 0.7071067811865476) + 1.0)


def _gelu_numpy(x: Array, *, approximate: str = "none") -> Array:
    if approximate == "tanh":
        return x * 0.5 * (np.tanh((x * x * x * 0.044715 + x) * 0.7978845608028654) + 1.0)
    return (x * 0.5 * (meaning("erf")(x * 0.7071067811865476) + 1.0)).astype(x.dtype)


def _hard_sigmoid_type(x: TensorType, *, alpha: float = 0.2, beta: float = 0.5) -> TensorType:
    return _float(x)


def _hard_sigmoid(x: Expr, *, alpha: float, beta: float) -> Expr:
    return call("fmin", const(1.0, x.dtype), call("fmax", const(0.0, x.dtype), x * alpha + beta))


def _prelu_value(x: Expr, slope: Expr) -> Expr:
    return select(x < 0, x * slope, x)


def _elu(x: Expr, *, alpha: float) -> Expr:
    return select(x < 0.0, call("expm1", x) * alpha, x)


def _leaky(x: Expr, *, alpha: float) -> Expr:
    return select(x < 0.0, x * alpha, x)


def _mish(x: Expr) -> Expr:
    return x * call("tanh", _softplus_value(x))


def _selu_type(
    x: TensorType, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875
) -> TensorType:
    return _float(x)


def _selu(b: Any, x: Any, *, alpha: float, gamma: float) -> Any:
    return b.mul(b.elu(x, alpha=alpha), gamma)


def _celu(b: Any, x: Any, *, alpha: float) -> Any:
    # max(x, 0) + min(alpha * (exp(x / alpha) - 1), 0) = alpha * elu(x / alpha) for alpha > 0
    return b.mul(b.elu(b.div(x, alpha), alpha=1.0), alpha)


def _hard_swish(b: Any, x: Any) -> Any:
    return b.mul(x, b.hard_sigmoid(x, alpha=1 / 6, beta=0.5))


def _swish(b: Any, x: Any, *, alpha: float) -> Any:
    return b.mul(x, b.sigmoid(x if alpha == 1.0 else b.mul(x, alpha)))


def _softsign(b: Any, x: Any) -> Any:
    return b.div(x, b.add(b.abs(x), 1.0))


def _thresholded_relu(b: Any, x: Any, *, alpha: float) -> Any:
    return b.where(b.greater(x, alpha), x, b.constant(0.0, dtype=x.type.dtype))


def _shrink_type(x: TensorType, *, bias: float = 0.0, lambd: float = 0.5) -> TensorType:
    require_kind("shrink's operand", x, "f")
    return x


def _shrink(b: Any, x: Any, *, bias: float, lambd: float) -> Any:
    low = b.where(b.less(x, -lambd), b.add(x, bias), b.constant(0.0, dtype=x.type.dtype))
    return b.where(b.greater(x, lambd), b.sub(x, bias), low)


def composed(
    name: str,
    type_: Callable[..., TensorType],
    decompose: Callable[..., Any],
    *attrs: dict[str, Any],
    vjp: Callable[..., Any] | None = None,
) -> OpDef:
    samples = [sample("f32[3, 7]", domain=(-4.0, 4.0), **a) for a in attrs or ({},)]
    return OpDef(
        name,
        type_,
        decompose=decompose,
        flops=size_flops(4),
        traits=ELEMENTWISE,
        samples=(*samples, sample("f16[9]", **(attrs or ({},))[0])),
        vjp=vjp,
    )


ACTIVATION_OPS: tuple[OpDef, ...] = (
    unary("relu", relu_value, lambda x: np.maximum(x, 0), "fi", traits=(Trait.IDEMPOTENT,), vjp=rules.relu),
    unary(
        "sigmoid",
        sigmoid_value,
        _sigmoid,
        flops=10,
        domain=(-9.0, 9.0),
        cost=Cost.COSTLY,
        traits=(Trait.NOT_NEGATIVE,),
        vjp=rules.sigmoid,
    ),
    unary(
        "softplus",
        _softplus_value,
        _softplus,
        flops=16,
        domain=(-9.0, 9.0),
        cost=Cost.COSTLY,
        traits=(Trait.NOT_NEGATIVE,),
        vjp=rules.softplus,
    ),
    unary("mish", _mish, lambda x: x * np.tanh(_softplus(x)), flops=24, cost=Cost.COSTLY, vjp=rules.mish),
    binary("prelu", _prelu_value, lambda x, s: np.where(x < 0, x * s, x), "fi", vjp=rules.prelu),
    activation(
        "gelu",
        _gelu,
        _gelu_numpy,
        _gelu_type,
        {"approximate": "none"},
        {"approximate": "tanh"},
        flops=12,
        cost=Cost.COSTLY,
        traits=(Trait.CANCELS,),
        vjp=rules.gelu,
    ),
    activation(
        "leaky_relu",
        _leaky,
        lambda x, alpha: np.where(x < 0, x * alpha, x),
        _alpha_type(0.01),
        {"alpha": 0.01},
        {"alpha": 0.3},
        vjp=rules.leaky_relu,
    ),
    activation(
        "elu",
        _elu,
        lambda x, alpha: np.where(x < 0, np.expm1(x) * alpha, x).astype(x.dtype),
        _alpha_type(1.0),
        {"alpha": 1.0},
        {"alpha": 0.5},
        flops=12,
        vjp=rules.elu,
    ),
    activation(
        "hard_sigmoid",
        _hard_sigmoid,
        lambda x, alpha, beta: np.minimum(1, np.maximum(0, x * alpha + beta)),
        _hard_sigmoid_type,
        {"alpha": 0.2, "beta": 0.5},
        {"alpha": 1 / 6, "beta": 0.4},
        vjp=rules.hard_sigmoid,
    ),
    composed("selu", _selu_type, _selu, {}, vjp=rules.selu),
    composed("celu", _alpha_type(1.0), _celu, {"alpha": 1.0}, {"alpha": 0.7}, vjp=rules.celu),
    composed("hard_swish", _float, _hard_swish, vjp=rules.hard_swish),
    composed("swish", _alpha_type(1.0), _swish, {"alpha": 1.0}, {"alpha": 1.7}),
    composed("softsign", _float, _softsign, vjp=rules.softsign),
    composed("thresholded_relu", _alpha_type(1.0), _thresholded_relu, {"alpha": 1.0}, {"alpha": -0.5}),
    composed("shrink", _shrink_type, _shrink, {"bias": 0.0, "lambd": 0.5}, {"bias": 0.25, "lambd": 1.0}),
)
