"""Convolutions and their transposes over 1 to 3 spatial axes, of images [N, C, ...] or one image [C, ...]."""

from __future__ import annotations

from typing import Any

from dnnc.array.core import Array
from dnnc.array.errors import ValueInputError
from dnnc.array.manipulation import expand_dims, squeeze
from dnnc.array.replay import replayed
from dnnc.nn.functional.operands import Ints, arrays, ints, op, rank_of


@replayed
def _conv(
    rank: int, input: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int
) -> Array:
    what = f"conv{rank}d"
    x, w, b = arrays(what, input=input, weight=weight, bias=bias)
    single = rank_of(what, x, rank + 1, rank + 2) == rank + 1
    rank_of(what, w, rank + 2, name="weight")
    strides, dilations = ints(what, "stride", stride, rank, 1), ints(what, "dilation", dilation, rank, 1)
    pads = conv_pads(what, padding, rank, w.shape[2:], strides, dilations)
    x = expand_dims(x, axis=0) if single else x
    y = _applied("conv", x, w, b, strides=strides, pads=pads, dilations=dilations, group=groups_of(what, groups))
    return squeeze(y, 0) if single else y


def _applied(name: str, x: Array, w: Array, b: Array | None, **attrs: Any) -> Array:
    return op(name, x, w, **attrs) if b is None else op(name, x, w, b, **attrs)


def groups_of(what: str, groups: Any) -> int:
    return ints(what, "groups", groups, 1, 1)[0]


def conv_pads(what: str, padding: Any, rank: int, kernel: Ints, strides: Ints, dilations: Ints) -> Ints:
    """All pads in front, then all behind. "same" keeps the size; of an odd pad the larger part is behind."""
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ValueInputError(f"{what}: padding={padding!r}: expected integers, 'same' or 'valid'")
        if padding == "same" and any(s != 1 for s in strides):
            raise ValueInputError(f"{what}: padding='same' needs stride 1, got {strides}")
        total = [d * (k - 1) if padding == "same" else 0 for k, d in zip(kernel, dilations)]
        return (*(t // 2 for t in total), *(t - t // 2 for t in total))
    return ints(what, "padding", padding, rank, 0) * 2


def conv1d(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Array:
    """Convolve [N, C, L] (or [C, L]) with filters [O, C / groups, K]; see `conv2d`."""
    return _conv(1, input, weight, bias, stride, padding, dilation, groups)


def conv2d(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Array:
    """Convolve images [N, C, H, W] (or [C, H, W]) with filters [O, C / groups, KH, KW].

    Args:
        bias: [O], added to each output channel.
        stride, dilation: a number, or one for each spatial axis.
        padding: zeros in front of and behind each spatial axis: such numbers, 'valid' (none) or 'same' (as many as
            keep the size; stride 1 only).
        groups: number of groups of channels that are convolved separately.

    Raises:
        InputError: ranks, dtypes or numbers are wrong.
        ShapeError: channels do not fit, or the filter is larger than the padded image.
    """
    return _conv(2, input, weight, bias, stride, padding, dilation, groups)


def conv3d(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Array:
    """Convolve [N, C, D, H, W] (or [C, D, H, W]) with filters [O, C / groups, KD, KH, KW]; see `conv2d`."""
    return _conv(3, input, weight, bias, stride, padding, dilation, groups)


# --- transposed -------------------------------------------------------------------------------------------------------


@replayed
def _conv_transpose(
    rank: int,
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: int,
    dilation: Any,
) -> Array:
    what = f"conv_transpose{rank}d"
    x, w, b = arrays(what, input=input, weight=weight, bias=bias)
    rank_of(what, x, rank + 1, rank + 2)
    rank_of(what, w, rank + 2, name="weight")
    strides, dilations = ints(what, "stride", stride, rank, 1), ints(what, "dilation", dilation, rank, 1)
    more = ints(what, "output_padding", output_padding, rank, 0)
    if any(m >= max(s, d) for m, s, d in zip(more, strides, dilations)):
        raise ValueInputError(
            f"{what}: output_padding={more}: expected less than stride {strides} or dilation {dilations}"
        )
    single = x.ndim == rank + 1
    x = expand_dims(x, axis=0) if single else x
    pads = ints(what, "padding", padding, rank, 0) * 2
    attrs = {"strides": strides, "pads": pads, "dilations": dilations, "output_padding": more}
    y = _applied("conv_transpose", x, w, b, group=groups_of(what, groups), **attrs)
    return squeeze(y, 0) if single else y


def conv_transpose1d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Array:
    """The transpose of `conv1d` by its input; filters [C, O / groups, K]; see `conv_transpose2d`."""
    return _conv_transpose(1, input, weight, bias, stride, padding, output_padding, groups, dilation)


def conv_transpose2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Array:
    """The transpose of `conv2d` by its input; filters [C, O / groups, KH, KW].

    Args:
        padding: elements that are cut off at both ends.
        output_padding: elements that are added behind: less than the stride, or than the dilation.
    """
    return _conv_transpose(2, input, weight, bias, stride, padding, output_padding, groups, dilation)


def conv_transpose3d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Array:
    """The transpose of `conv3d` by its input; filters [C, O / groups, KD, KH, KW]; see `conv_transpose2d`."""
    return _conv_transpose(3, input, weight, bias, stride, padding, output_padding, groups, dilation)
