"""Convolution layers: weights [out, in / groups, ...], of transposed ones [in, out / groups, ...]."""

from __future__ import annotations

import math
from typing import Any

from dnnc.array.core import Array
from dnnc.array.elementwise import add
from dnnc.array.manipulation import reshape
from dnnc.ir.errors import InputError
from dnnc.nn import functional as F
from dnnc.nn import init
from dnnc.nn.functional.conv import conv_pads
from dnnc.nn.functional.operands import array, choice, ints
from dnnc.nn.layers.few import is_faster, sparse_weight, times_pixels
from dnnc.nn.layers.linear import bound_by, empty
from dnnc.nn.module import Module


class _Base(Module):
    rank: int
    transposed = False
    stores_few = True

    def _make(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        output_padding: Any,
        dilation: Any,
        groups: int,
        bias: bool,
        padding_mode: str,
        device: Any,
        dtype: Any,
    ) -> None:
        super().__init__()
        what, rank = type(self).__name__, self.rank
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise InputError(f"{what}: {in_channels} and {out_channels} channels do not divide into {groups} groups")
        choice(what, "padding_mode", padding_mode, "zeros", "reflect", "replicate", "circular")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = ints(what, "kernel_size", kernel_size, rank, 1)
        self.stride, self.dilation = ints(what, "stride", stride, rank, 1), ints(what, "dilation", dilation, rank, 1)
        self.padding = padding if isinstance(padding, str) else ints(what, "padding", padding, rank, 0)
        self.output_padding, self.padding_mode = ints(what, "output_padding", output_padding, rank, 0), padding_mode
        ends = (in_channels, out_channels // groups) if self.transposed else (out_channels, in_channels // groups)
        self.weight = empty((*ends, *self.kernel_size), dtype, device)
        self.register_parameter("bias", empty((out_channels,), dtype, device) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Begin uniform within 1 / sqrt(fan in)."""
        init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        bound_by(self.bias, init.fans(self.weight)[0])

    def extra_repr(self) -> str:
        text = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        zeros = (0,) * self.rank
        for name, usual in (("padding", zeros), ("dilation", (1,) * self.rank), ("output_padding", zeros)):
            value = getattr(self, name)
            text += "" if value == usual else f", {name}={value!r}"
        text += f", groups={self.groups}" if self.groups != 1 else ""
        text += "" if self.bias is not None else ", bias=False"
        return text + (f", padding_mode={self.padding_mode}" if self.padding_mode != "zeros" else "")


class _Conv(_Base):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        self._make(
            in_channels, out_channels, kernel_size, stride, padding, 0, dilation, groups, bias, padding_mode, device,
            dtype,
        )  # fmt: skip

    def forward(self, input: Any) -> Array:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input, padding = F.pad(input, self._around(), mode=self.padding_mode), 0
        few = sparse_weight(self, "weight") if self._pointwise(padding) else None
        if few is not None:
            x = array(type(self).__name__, "input", input)
            if x.ndim == self.rank + 2 and is_faster(x, few):
                y = times_pixels(few, x)
                return y if self.bias is None else add(y, reshape(self.bias, (-1, *(1,) * self.rank)))
        conv = (F.conv1d, F.conv2d, F.conv3d)[self.rank - 1]
        return conv(input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)

    def _pointwise(self, padding: Any) -> bool:
        none = isinstance(padding, str) or padding in (0, (0,) * self.rank)
        return none and self.groups == 1 and self.kernel_size == self.stride == (1,) * self.rank

    def _around(self) -> list[int]:
        """The pads of `padding_mode`, the last axis first."""
        pads = conv_pads(type(self).__name__, self.padding, self.rank, self.kernel_size, self.stride, self.dilation)
        return [n for k in reversed(range(self.rank)) for n in (pads[k], pads[self.rank + k])]


class Conv1d(_Conv):
    """Convolve [N, C, L]; see `dnnc.nn.functional.conv1d`."""

    rank = 1


class Conv2d(_Conv):
    """Convolve [N, C, H, W]; see `dnnc.nn.functional.conv2d`. `padding_mode` fills the pads with other than zeros."""

    rank = 2


class Conv3d(_Conv):
    """Convolve [N, C, D, H, W]; see `dnnc.nn.functional.conv3d`."""

    rank = 3


class _ConvTranspose(_Base):
    transposed = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Any = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if padding_mode != "zeros":
            raise InputError(f"{type(self).__name__}: padding_mode={padding_mode!r}: expected 'zeros'")
        self._make(
            in_channels, out_channels, kernel_size, stride, padding, output_padding, dilation, groups, bias,
            padding_mode, device, dtype,
        )  # fmt: skip

    def forward(self, input: Any, output_size: Any = None) -> Array:
        """`output_size`: of the spatial axes, where several inputs would have this shape."""
        conv = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[self.rank - 1]
        more = self.output_padding if output_size is None else self._more(input, tuple(output_size))
        return conv(input, self.weight, self.bias, self.stride, self.padding, more, self.groups, self.dilation)

    def _more(self, input: Array, size: tuple[int, ...]) -> tuple[int, ...]:
        wanted, more = size[-self.rank :], []
        windows = zip(input.shape[-self.rank :], wanted, self.stride, self.padding, self.dilation, self.kernel_size)
        for n, m, s, p, d, k in windows:
            least = (n - 1) * s - 2 * int(p) + d * (k - 1) + 1
            more.append(m - least)
            if not 0 <= m - least < s:
                raise InputError(
                    f"{type(self).__name__}: output_size={size}: expected {least} to {least + s - 1} in place of {m}"
                )
        return tuple(more)


class ConvTranspose1d(_ConvTranspose):
    """The transpose of a convolution of [N, C, L]; see `dnnc.nn.functional.conv_transpose1d`."""

    rank = 1


class ConvTranspose2d(_ConvTranspose):
    """The transpose of a convolution of [N, C, H, W]; see `dnnc.nn.functional.conv_transpose2d`."""

    rank = 2


class ConvTranspose3d(_ConvTranspose):
    """The transpose of a convolution of [N, C, D, H, W]; see `dnnc.nn.functional.conv_transpose3d`."""

    rank = 3
