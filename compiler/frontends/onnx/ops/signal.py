"""Converters of Fourier transforms and what surrounds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dnnc.frontends.onnx.call import Call, Item, number, of_array
from dnnc.ir.dtype import f32
from dnnc.ir.errors import ModelError
from dnnc.ir.shapes import normalize_axis

Converter = Callable[[Call], Any]
Array = np.ndarray[Any, Any]


def dft(c: Call) -> Any:
    """x [..., 1 or 2] along an axis; opset 17 has the axis as an attribute, opset 20 as input 2."""
    x = c.x()
    if x.type.rank < 2 or x.type.shape[-1] not in (1, 2):
        raise ModelError(f"the last dim of {x.type} must be 1 (real) or 2 (real and imaginary part)")
    default = 1 if c.opset < 20 else -2
    axis = normalize_axis(int(c.scalar(2, "axis")) if c.has(2) else c.integer("axis", default), x.type.rank)
    number(x.type.shape[axis], "the transformed dim")
    length = number(c.dims(1, "dft_length")[0], "dft_length") if c.has(1) else None
    return c.b.dft(x, axis=axis, length=length, inverse=c.flag("inverse"), onesided=c.flag("onesided"))


def stft(c: Call) -> Any:
    """Windows of the signal [batch, length, 1 or 2], each transformed. Exporters also write [batch, length]."""
    x = c.x() if c.rank() > 2 else c.b.reshape(c.x(), shape=(*c.x().type.shape, 1))
    step, length = int(c.scalar(1, "frame_step")), number(x.type.shape[1], "the length of the signal")
    n = (
        int(c.scalar(3, "frame_length"))
        if c.has(3)
        else number(c.type_of(2).shape[0], "the window's length")
        if c.has(2)
        else length
    )
    if step < 1 or not 0 < n <= length:
        raise ModelError(f"frames of {n} every {step} samples do not fit a signal of {length}")
    frames = 1 + (length - n) // step
    at = np.arange(frames)[:, None] * step + np.arange(n)
    cut = c.b.gather(x, c.b.constant(at.astype(np.int64)), axis=1)
    if c.has(2):
        cut = c.b.mul(cut, c.b.reshape(c.x(2), shape=(n, 1)))
    return c.b.dft(cut, axis=2, onesided=c.flag("onesided", True))


def mel_weight_matrix(c: Call) -> Item:
    """Triangular filters over the bins of a spectrum, equally wide on the mel scale."""
    names = ("num_mel_bins", "dft_length", "sample_rate", "lower_edge_hertz", "upper_edge_hertz")
    bins, length, rate, low, high = (c.scalar(k, n) for k, n in enumerate(names))
    low, high = (2595 * np.log10(1 + f / 700) for f in (low, high))
    edges = np.arange(bins + 2) * ((high - low) / (bins + 2)) + low
    at = (((length + 1) * (700 * (10 ** (edges / 2595) - 1))) // rate).astype(int)
    j, out = np.arange(length // 2 + 1), np.zeros((length // 2 + 1, bins))
    for k, (left, centre, right) in enumerate(zip(at, at[1:], at[2:])):
        rising = (j >= left) & (j <= centre)
        out[rising, k] = (j[rising] - left) / (centre - left) if centre > left else 1.0
        falling = (j >= centre) & (j < right)
        out[falling, k] = (right - j[falling]) / (right - centre) if right > centre else 0.0
    return of_array(out.astype(c.dtype("output_datatype", f32).numpy))


def window(a0: float, a1: float, a2: float) -> Converter:
    """A window of cosines `a0 - a1*cos(t) + a2*cos(2t)`, of a length that must be known."""

    def convert(c: Call) -> Item:
        (size,) = c.ints_in(0, "the window's length")
        t = 2 * np.pi * np.arange(size) / max(size if c.flag("periodic", True) else size - 1, 1)
        return of_array((a0 - a1 * np.cos(t) + a2 * np.cos(2 * t)).astype(c.dtype("output_datatype", f32).numpy))

    return convert


SIGNAL: dict[str, Converter] = {
    "DFT": dft,
    "STFT": stft,
    "MelWeightMatrix": mel_weight_matrix,
    "HannWindow": window(0.5, 0.5, 0.0),
    "HammingWindow": window(25 / 46, 21 / 46, 0.0),
    "BlackmanWindow": window(0.42, 0.5, 0.08),
}
