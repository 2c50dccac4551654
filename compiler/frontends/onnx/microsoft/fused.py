"""Converters of com.microsoft: results of ONNX Runtime's optimizer, and operators that preceded ONNX's.

ONNX has no schemas of this domain, so the attributes that a converter knows stand beside it, and all others are
refused. The quantized operators are in `quantized.py`, attention is in `attention.py`; `MICROSOFT` is all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dnnc.frontends.onnx.call import Call, Item, of_array
from dnnc.frontends.onnx.microsoft.attention import ATTENTION
from dnnc.frontends.onnx.microsoft.quantized import QUANTIZED
from dnnc.frontends.onnx.ops.dynamic import unique as unique_
from dnnc.frontends.onnx.ops.gather_scatter import gather_nd, range_, trilu
from dnnc.frontends.onnx.ops.image import grid_sample as grid_sample_
from dnnc.frontends.onnx.ops.movement import pad as pad_
from dnnc.frontends.onnx.ops.nn import conv as conv_
from dnnc.frontends.onnx.ops.nn import conv_transpose, max_pool
from dnnc.frontends.onnx.ops.norm import layer_normalization
from dnnc.frontends.onnx.ops.random import dropout
from dnnc.frontends.onnx.schemas import check_names
from dnnc.frontends.onnx.standard import last_to_second, second_to_last, standard
from dnnc.ir.dtype import f32, i64
from dnnc.ir.errors import ModelError, UnsupportedError
from dnnc.ir.graph import Value
from dnnc.ir.shapes import normalize_axis

Converter = Callable[[Call], Any]
CONV = "auto_pad dilations group kernel_shape pads strides"
ACTIVATION = "activation activation_params"
TRANSPOSED = "alpha transA transB transBatchA transBatchB"
GAMMAS = "activation activation_alpha activation_beta activation_gamma"

# --- activations ------------------------------------------------------------------------------------------------------


def activated(c: Call, y: Value, name: str, params: Sequence[float]) -> Any:
    """A fused activation with its parameters in ONNX Runtime's order."""
    b, p = c.b, list(params)
    if not name:
        return y
    plain = {"Relu": b.relu, "Tanh": b.tanh, "Sigmoid": b.sigmoid, "Softsign": b.softsign, "Softplus": b.softplus}
    if name in plain:
        return plain[name](y)
    if name in ("LeakyRelu", "ThresholdedRelu", "Elu"):
        op, default = {
            "LeakyRelu": ("leaky_relu", 0.01),
            "ThresholdedRelu": ("thresholded_relu", 1.0),
            "Elu": ("elu", 1.0),
        }[name]
        return b.op(op, y, alpha=p[0] if p else default)
    if name == "Clip":
        return b.clip(y, low=p[0], high=p[1])
    if name == "HardSigmoid":
        return b.hard_sigmoid(y, alpha=p[0] if p else 0.2, beta=p[1] if len(p) > 1 else 0.5)
    if name == "Gelu":
        return b.gelu(y)
    raise UnsupportedError(f"the fused activation {name!r}")


def _gammas(c: Call) -> list[float]:
    return [c.number(n) for n in ("activation_alpha", "activation_beta", "activation_gamma") if n in c.attrs]


def fast_gelu(c: Call) -> Any:
    x = c.x() if not c.has(1) else c.b.add(c.x(0), c.x(1))
    return c.b.gelu(x, approximate="tanh")


def bias_gelu(c: Call) -> Any:
    return c.b.gelu(c.b.add(c.x(0), c.x(1)))


def quick_gelu(c: Call) -> Any:
    x = c.x()
    return c.b.mul(x, c.b.sigmoid(c.b.mul(x, c.number("alpha", 1.702))))


def bias_add(c: Call) -> Any:
    return c.b.add(c.b.add(c.x(0), c.x(1)), c.x(2))


def bias_split_gelu(c: Call) -> Any:
    """The left half of x + bias, times the GELU of the right half."""
    x = c.b.add(c.x(0), c.x(1))
    size = x.type.shape[-1]
    if not isinstance(size, int) or size % 2:
        raise ModelError(f"the last dim of {x.type} must be an even number")
    zeros, ones, shape = (0,) * (x.type.rank - 1), (1,) * x.type.rank, (*x.type.shape[:-1], size // 2)
    left, right = (c.b.slice(x, starts=(*zeros, s), steps=ones, shape=shape) for s in (0, size // 2))
    return c.b.mul(left, c.b.gelu(right))


def bias_softmax(c: Call) -> Any:
    """The bias is broadcast from the left, or (is_inner_broadcast = 0) from the right, like in NumPy."""
    x, bias, axis = c.x(0), c.x(1), c.integer("axis", 1)
    at = normalize_axis(axis, x.type.rank)
    if c.flag("is_inner_broadcast") and bias.type.rank < x.type.rank:
        lead = next(
            (
                k
                for k in range(bias.type.rank)
                if bias.type.shape[k] is not x.type.shape[k] and bias.type.shape[k] != x.type.shape[k]
            ),
            at,
        )
        missing = (1,) * (x.type.rank - bias.type.rank)
        bias = c.b.reshape(bias, shape=(*bias.type.shape[:lead], *missing, *bias.type.shape[lead:]))
    y = c.b.add(x, bias)
    flat = c.b.flatten(y, axis=at) if at != x.type.rank - 1 else y
    return c.b.reshape(c.b.softmax(flat, axis=-1), shape=y.type.shape)


def bias_dropout(c: Call) -> Any:
    x = c.b.add(c.x(0), c.x(1))
    operands = [x, *(c.items[i] if c.has(i) else None for i in (3, 4))]
    made = dropout(standard(c, "Dropout", operands, {k: v for k, v in c.attrs.items() if k == "seed"}))
    y, rest = (made[0], made[1:]) if isinstance(made, tuple) else (made, ())
    y = y.value if isinstance(y, Item) else y
    return (c.b.add(y, c.x(2)) if c.has(2) else y, *rest)


# --- products and convolutions ----------------------------------------------------------------------------------------


def _turned(c: Call, x: Value, flag: str, batch_flag: str) -> Any:
    """An operand with its last two axes exchanged, or its first one moved behind the batch dims."""
    rank = x.type.rank
    perm = list(range(rank))
    if c.flag(batch_flag) and rank > 2:
        perm = [*perm[1:-1], 0, perm[-1]]
    if c.flag(flag) and rank > 1:
        perm = [*perm[:-2], perm[-1], perm[-2]]
    return x if perm == list(range(rank)) else c.b.transpose(x, perm=tuple(perm))


def fused_matmul(c: Call) -> Any:
    y = c.b.matmul(_turned(c, c.x(0), "transA", "transBatchA"), _turned(c, c.x(1), "transB", "transBatchB"))
    alpha = c.number("alpha", 1.0)
    y = y if alpha == 1.0 else c.b.mul(y, alpha)
    if c.text("activation") == "Softmax":
        return c.b.softmax(y, axis=c.integer("activation_axis", -1))
    return activated(c, y, c.text("activation"), _gammas(c))


def fused_gemm(c: Call) -> Any:
    attrs = {
        "alpha": c.number("alpha", 1.0),
        "beta": c.number("beta", 1.0),
        "trans_a": c.flag("transA"),
        "trans_b": c.flag("transB"),
    }
    return activated(c, c.b.gemm(c.x(0), c.x(1), c.opt(2), **attrs), c.text("activation"), _gammas(c))


def fused_conv(c: Call) -> Any:
    """A convolution, plus input 3, then an activation."""
    y = conv_(c)
    y = c.b.add(y, c.x(3)) if c.has(3) else y
    return activated(c, y, c.text("activation"), c.numbers("activation_params") or ())


def nhwc_conv(c: Call) -> Any:
    x = last_to_second(c, c.x(0))
    y = conv_(standard(c, "Conv", [x, *c.items[1:3]]))
    y = c.b.add(y, last_to_second(c, c.x(3))) if c.has(3) else y
    return second_to_last(c, activated(c, y, c.text("activation"), c.numbers("activation_params") or ()))


def nhwc_max_pool(c: Call) -> Any:
    return second_to_last(c, max_pool(standard(c, "MaxPool", [last_to_second(c, c.x(0))])))


def conv_transpose_with_dynamic_pads(c: Call) -> Any:
    """Padding is input 2, the bias input 3."""
    attrs = dict(c.attrs)
    if c.has(2):
        attrs["pads"] = c.ints_in(2, "the padding")
    return conv_transpose(
        standard(c, "ConvTranspose", [c.items[0], c.items[1], c.items[3] if c.has(3) else None], attrs)
    )


# --- normalizations ---------------------------------------------------------------------------------------------------


def skip_layer_norm(c: Call) -> Any:
    """Inputs: x, skip, scale, bias of the normalization, bias of the sum. Outputs: y, mean, 1/deviation, the sum."""
    total = c.b.add(c.x(0), c.x(1))
    total = c.b.add(total, c.x(4)) if c.has(4) else total
    operands = [total, c.items[2], c.items[3] if c.has(3) else None]
    inner = standard(c, "LayerNormalization", operands, {"epsilon": c.number("epsilon", 1e-12)})
    made = layer_normalization(inner)
    y = made if isinstance(made, tuple) else (made, None, None)
    return (*y, total)


def skip_rms_norm(c: Call) -> Any:
    total = c.b.add(c.x(0), c.x(1))
    total = c.b.add(total, c.x(3)) if c.has(3) else total
    epsilon = c.number("epsilon", 1e-12)
    inverse = inverse_rms(c, total, -1, epsilon) if c.wants(2) else None
    return c.b.rms_norm(total, c.x(2), axis=-1, epsilon=epsilon), None, inverse, total


def inverse_rms(c: Call, x: Value, axis: int, epsilon: float) -> Any:
    wide = c.cast(x, f32)
    axes = tuple(range(normalize_axis(axis, x.type.rank), x.type.rank))
    return c.b.reciprocal(c.b.sqrt(c.b.add(c.b.reduce_mean(c.b.mul(wide, wide), axes=axes, keepdims=True), epsilon)))


def simplified_layer_norm(c: Call) -> Any:
    axis, epsilon = c.integer("axis", -1), c.number("epsilon", 1e-5)
    y = c.b.rms_norm(c.cast(c.x(0), c.type_of(1).dtype), c.x(1), axis=axis, epsilon=epsilon)
    return (y, inverse_rms(c, c.x(0), axis, epsilon)) if c.wants(1) else y


def embed_layer_norm(c: Call) -> Any:
    """Normalized sum of word, position and segment embeddings. Outputs: y, tokens per mask row, the sum."""
    b, ids = c.b, c.x(0)
    word = b.gather(c.x(2), ids, axis=0)
    if c.has(8):
        place = b.gather(c.x(3), c.x(8), axis=0)
    else:
        length, hidden = ids.type.shape[1], c.x(3).type.shape[1]
        place = b.slice(c.x(3), starts=(0, 0), steps=(1, 1), shape=(length, hidden))
    total = b.add(word, place)
    if c.has(1):
        total = b.add(total, b.gather(c.x(4), c.x(1), axis=0))
    y = b.layer_norm(total, c.x(5), c.x(6), axis=-1, epsilon=c.number("epsilon", 1e-12))
    dtype = ids.type.dtype
    if c.has(7):
        count = c.cast(b.reduce_sum(c.cast(c.x(7), i64), axes=(1,), keepdims=False), dtype)
    else:
        count = b.full(shape=ids.type.shape[:1], value=0, dtype=dtype)
    return y, count, total


def group_norm(c: Call) -> Any:
    """Channels last by default; `activation` 1 is SiLU."""
    last = c.flag("channels_last", True)
    x = c.x(0)
    y = last_to_second(c, x) if last else x
    wide = c.type_of(1).dtype
    y = c.b.group_norm(c.cast(y, wide), c.x(1), c.x(2), groups=c.integer("groups"), epsilon=c.number("epsilon", 1e-5))
    y = c.b.mul(y, c.b.sigmoid(y)) if c.integer("activation") == 1 else y
    return c.cast(second_to_last(c, y) if last else y, x.type.dtype)


# --- the rest ---------------------------------------------------------------------------------------------------------


def as_standard(op: str, converter: Converter) -> Converter:
    """An operator that ONNX took over as it was."""
    return lambda c: converter(standard(c, op))


def pad(c: Call) -> Any:
    """Pads may be [1, 2 * rank]; a fill may be [1]."""
    return pad_(standard(c, "Pad"))


def unique(c: Call) -> Any:
    """Values in the order in which they come; outputs are the values, their number for each element, and counts."""
    names = [*c.outputs, "", "", ""]
    inner = standard(c, "Unique", c.items[:1], {"sorted": 0})
    inner.outputs = [names[0], "", names[1], names[2]]
    made = unique_(inner)
    return made[0], made[2], made[3]


def range_optional(c: Call) -> Any:
    items = [c.items[0], c.items[1], c.items[2] if c.has(2) else of_array(np.ones((), c.type_of(0).dtype.numpy))]
    return range_(standard(c, "Range", items))


def expand_dims(c: Call) -> Any:
    return c.b.unsqueeze(c.x(0), axes=(c.ints_in(1, "the axis")[0],))


def inverse(c: Call) -> Any:
    return c.b.inverse(c.x())


def cdist(c: Call) -> Any:
    """Distances of all rows of a from all rows of b."""
    metric = c.text("metric", "sqeuclidean")
    if metric not in ("euclidean", "sqeuclidean"):
        raise UnsupportedError(f"CDist with metric {metric!r}; known are euclidean and sqeuclidean")
    off = c.b.sub(c.b.unsqueeze(c.x(0), axes=(1,)), c.b.unsqueeze(c.x(1), axes=(0,)))
    y = c.b.reduce_sum(c.b.mul(off, off), axes=(2,), keepdims=False)
    return y if metric == "sqeuclidean" else c.b.sqrt(y)


def grid_sample(c: Call) -> Any:
    return grid_sample_(standard(c, "GridSample", opset=16))


def complex_mul(c: Call) -> Any:
    """Products of complex numbers, whose parts are the last axis; `ComplexMulConj` takes the second one's conjugate."""
    b, sign = c.b, -1.0 if c.op == "ComplexMulConj" else 1.0
    (ar, ai), (br, bi) = (_parts(c, c.x(i)) for i in (0, 1))
    bi = b.mul(bi, sign)
    return b.concat(b.sub(b.mul(ar, br), b.mul(ai, bi)), b.add(b.mul(ar, bi), b.mul(ai, br)), axis=-1)


def _parts(c: Call, x: Value) -> tuple[Value, Value]:
    shape, zeros = (*x.type.shape[:-1], 1), (0,) * (x.type.rank - 1)
    cut = tuple(c.b.slice(x, starts=(*zeros, k), steps=(1,) * x.type.rank, shape=shape) for k in (0, 1))
    return cut[0], cut[1]


def is_all_finite(c: Call) -> Any:
    """Is no element of any input infinite (unless `isnan_only`) or NaN (unless `isinf_only`)?"""
    b, found = c.b, None
    for x in c.all():
        bad = (
            b.isnan(x)
            if c.flag("isnan_only")
            else b.isinf(x)
            if c.flag("isinf_only")
            else b.logical_or(b.isnan(x), b.isinf(x))
        )
        bad = b.reduce_max(b.cast(bad, to=i64), axes=tuple(range(x.type.rank)), keepdims=False)
        found = bad if found is None else b.max(found, bad)
    return b.equal(found, c.const(0, i64))


# operator -> (its converter, the attributes that it knows)
_OPERATORS: dict[str, tuple[Converter, str]] = {
    "BiasAdd": (bias_add, ""),
    "BiasDropout": (bias_dropout, "seed"),
    "BiasGelu": (bias_gelu, ""),
    "BiasSoftmax": (bias_softmax, "axis is_inner_broadcast"),
    "BiasSplitGelu": (bias_split_gelu, ""),
    "CDist": (cdist, "metric"),
    "ComplexMul": (complex_mul, ""),
    "ComplexMulConj": (complex_mul, ""),
    "ConvTransposeWithDynamicPads": (
        conv_transpose_with_dynamic_pads,
        "auto_pad dilations group kernel_shape output_padding strides",
    ),
    "EmbedLayerNormalization": (embed_layer_norm, "epsilon mask_index_type"),
    "ExpandDims": (expand_dims, ""),
    "FastGelu": (fast_gelu, ""),
    "FusedConv": (fused_conv, f"{CONV} {ACTIVATION}"),
    "FusedGemm": (fused_gemm, f"alpha beta transA transB {GAMMAS}"),
    "FusedMatMul": (fused_matmul, TRANSPOSED),
    "FusedMatMulActivation": (fused_matmul, f"{TRANSPOSED} {GAMMAS} activation_axis"),
    "GatherND": (as_standard("GatherND", gather_nd), ""),
    "Gelu": (lambda c: c.b.gelu(c.x()), ""),
    "GridSample": (grid_sample, "align_corners mode padding_mode"),
    "GroupNorm": (group_norm, "activation channels_last epsilon groups"),
    "Inverse": (inverse, ""),
    "IsAllFinite": (is_all_finite, "isinf_only isnan_only"),
    "NhwcConv": (nhwc_conv, CONV),
    "NhwcFusedConv": (nhwc_conv, f"{CONV} {ACTIVATION}"),
    "NhwcMaxPool": (nhwc_max_pool, "auto_pad ceil_mode dilations kernel_shape pads strides"),
    "Pad": (pad, "mode"),
    "QuickGelu": (quick_gelu, "alpha"),
    "Range": (range_optional, ""),
    "SimplifiedLayerNormalization": (simplified_layer_norm, "axis epsilon stash_type"),
    "SkipLayerNormalization": (skip_layer_norm, "epsilon"),
    "SkipSimplifiedLayerNormalization": (skip_rms_norm, "epsilon"),
    "TransposeMatMul": (fused_matmul, "alpha transA transB"),
    "Trilu": (as_standard("Trilu", trilu), "upper"),
    "Unique": (unique, ""),
    **QUANTIZED,
    **ATTENTION,
}


def _checked(converter: Converter, attributes: str) -> Converter:
    def convert(c: Call) -> Any:
        check_names(c.op, c.attrs, attributes.split())
        return converter(c)

    return convert


MICROSOFT: dict[str, Converter] = {name: _checked(*entry) for name, entry in _OPERATORS.items()}
# ONNX Runtime writes this one into the default domain, where ONNX has none of that name.
UNLISTED: dict[str, Converter] = {"SimplifiedLayerNormalization": MICROSOFT["SimplifiedLayerNormalization"]}
