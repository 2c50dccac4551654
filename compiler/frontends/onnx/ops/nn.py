"""Converters of convolutions and pooling. All ways to give padding become explicit pads: all begins, then all ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dnnc.frontends.onnx.call import Call, number
from dnnc.ir.errors import ModelError, UnsupportedError
from dnnc.ir.expr import const, maximum, unwrap
from dnnc.ir.graph import Value
from dnnc.ir.types import Dim, product

Converter = Callable[[Call], Any]
Ints = tuple[int, ...]
AUTO = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


def _window(c: Call, spatial: Sequence[Dim], kernel: Sequence[Dim]) -> tuple[Ints, Ints, tuple[Dim, ...]]:
    """Strides, dilations and pads of a window over `spatial`."""
    rank = len(spatial)
    strides, dilations = c.integers("strides") or (1,) * rank, c.integers("dilations") or (1,) * rank
    pads: tuple[Dim, ...] = c.integers("pads") or (0,) * 2 * rank
    for name, a, n in (
        ("strides", strides, rank),
        ("dilations", dilations, rank),
        ("pads", pads, 2 * rank),
        ("kernel_shape", kernel, rank),
    ):
        if len(a) != n:
            raise ModelError(f"attribute {name} needs {n} numbers for {rank} spatial dims, got {list(a)}")
    if any(s < 1 for s in (*strides, *dilations)):
        raise ModelError(f"strides {list(strides)} and dilations {list(dilations)} must be positive")
    auto = auto_pad(c)
    if auto.startswith("SAME"):
        totals = [_same(n, k, s, d) for n, k, s, d in zip(spatial, kernel, strides, dilations)]
        pads = halves(totals, auto == "SAME_UPPER")
    elif auto == "VALID":
        pads = (0,) * 2 * rank
    return strides, dilations, pads


def auto_pad(c: Call) -> str:
    auto = c.text("auto_pad", "NOTSET") or "NOTSET"
    if auto not in AUTO:
        raise ModelError(f"attribute auto_pad must be one of {', '.join(AUTO)}, got {auto!r}")
    return auto


def _same(n: Dim, k: Dim, stride: int, dilation: int) -> Dim:
    """All padding that makes the output ceil(n / stride) long."""
    reach = (const(k) - 1) * dilation + 1
    out = (const(n) + (stride - 1)) // stride
    total: Dim = unwrap(maximum((out - 1) * stride + reach - n, 0))
    return total


def halves(totals: Sequence[Dim], more_at_end: bool) -> tuple[Dim, ...]:
    """Padding split in two; an odd rest goes to the end or to the beginning."""
    small = [unwrap(const(t) // 2) for t in totals]
    large = [unwrap(const(t) - s) for t, s in zip(totals, small)]
    return (*small, *large) if more_at_end else (*large, *small)


def conv(c: Call) -> Any:
    x, w = c.x(0), c.x(1)
    return c.b.conv(x, w, c.opt(2), **conv_attributes(c, x, w))


def conv_attributes(c: Call, x: Value, w: Value) -> dict[str, Any]:
    """Strides, pads, dilations and groups of a convolution of x with w."""
    kernel = w.type.shape[2:]
    declared = c.integers("kernel_shape")
    if declared is not None and tuple(declared) != tuple(kernel):
        raise ModelError(f"attribute kernel_shape is {list(declared)}, the weights are {w.type}")
    strides, dilations, pads = _window(c, x.type.shape[2:], kernel)
    return {"strides": strides, "pads": pads, "dilations": dilations, "group": c.integer("group", 1)}


def conv_transpose(c: Call) -> Any:
    """`output_shape`, and auto_pad SAME (output = input * stride), say how much padding there is."""
    x, w = c.x(0), c.x(1)
    spatial, kernel = x.type.shape[2:], w.type.shape[2:]
    rank = len(spatial)
    strides, dilations = c.integers("strides") or (1,) * rank, c.integers("dilations") or (1,) * rank
    extra = c.integers("output_padding") or (0,) * rank
    pads: tuple[Dim, ...] = c.integers("pads") or (0,) * 2 * rank
    wanted: Sequence[Dim] | None = c.integers("output_shape")
    auto = auto_pad(c)
    if wanted is not None:
        wanted = wanted[-rank:]  # some exporters include batch and channels
    elif auto.startswith("SAME"):
        wanted = [unwrap(const(n) * s) for n, s in zip(spatial, strides)]
    elif auto == "VALID":
        pads = (0,) * 2 * rank
    if wanted is not None:
        full = [
            (const(n) - 1) * s + e + (const(k) - 1) * d + 1
            for n, s, e, k, d in zip(spatial, strides, extra, kernel, dilations)
        ]
        pads = halves([unwrap(f - n) for f, n in zip(full, wanted)], auto == "SAME_UPPER")
    group = c.integer("group", 1)
    return c.b.conv_transpose(
        x, w, c.opt(2), strides=strides, pads=pads, dilations=dilations, output_padding=extra, group=group
    )


# --- pooling ----------------------------------------------------------------------------------------------------------


def _pool_window(c: Call, x: Value) -> tuple[dict[str, Any], Ints]:
    """The window's attributes, and how much of each end pad only rounding up has added (ceil_mode)."""
    kernel = c.integers("kernel_shape")
    if kernel is None:
        raise ModelError("attribute kernel_shape is missing")
    spatial = x.type.shape[2:]
    strides, dilations, pads = _window(c, spatial, kernel)
    more: Ints = (0,) * len(kernel)
    if c.flag("ceil_mode"):
        rank = len(kernel)
        parts = zip(spatial, kernel, strides, dilations, pads[:rank], pads[rank:])
        more = tuple(
            _rounding(number(n, "a spatial dim (with ceil_mode)"), k, s, d, b, e) for n, k, s, d, b, e in parts
        )
        pads = (*pads[:rank], *(unwrap(const(e) + m) for e, m in zip(pads[rank:], more)))
        more = tuple(max(m, 0) for m in more)
    return {"kernel": kernel, "strides": strides, "dilations": dilations, "pads": pads}, more


def _rounding(n: int, k: int, stride: int, dilation: int, begin: Any, end: Any) -> int:
    """Return the (perhaps negative) end pad for as many windows as rounding up gives, none starting in padding."""
    room = n + begin + end - (k - 1) * dilation - 1
    windows = -(-room // stride) + 1
    if (windows - 1) * stride >= n + begin:
        windows -= 1
    return 0 if windows == room // stride + 1 else (windows - 1) * stride - room


def max_pool(c: Call) -> Any:
    x = c.x()
    window, _ = _pool_window(c, x)
    y = c.b.max_pool(x, **window)
    if not c.wants(1):
        return y
    return y, _max_pool_index(c, x, window)


def _max_pool_index(c: Call, x: Value, window: dict[str, Any]) -> Any:
    index = c.b.max_pool_index(x, **window)
    if not c.flag("storage_order"):
        return index
    # column-major: within an image the first spatial dim runs fastest
    dims = x.type.shape[2:]
    image = product(dims)
    base = c.b.mul(c.b.div(index, _size(c, image)), _size(c, image))
    rest = c.b.mod(index, _size(c, image))
    total = base
    stride: Dim = 1
    inner = image
    for n in dims:
        inner = unwrap(const(inner) // n)
        total = c.b.add(total, c.b.mul(c.b.div(rest, _size(c, inner)), _size(c, stride)))
        rest = c.b.mod(rest, _size(c, inner))
        stride = unwrap(const(stride) * n)
    return total


def _size(c: Call, d: Dim) -> int:
    return number(d, "a spatial dim (with storage_order)")


def average_pool(c: Call) -> Any:
    x = c.x()
    window, more = _pool_window(c, x)
    return c.b.avg_pool(x, **window, count_include_pad=c.flag("count_include_pad"), uncounted=more)


def lp_pool(c: Call) -> Any:
    x = c.x()
    window, _ = _pool_window(c, x)
    return c.b.lp_pool(x, **window, p=c.integer("p", 2))


def max_unpool(c: Call) -> Any:
    """Values put at the places that MaxPool's second output names, zeros elsewhere."""
    x, index = c.x(0), c.x(1)
    kernel = c.integers("kernel_shape") or ()
    rank = len(kernel)
    strides, pads = c.integers("strides") or (1,) * rank, c.integers("pads") or (0,) * 2 * rank
    sizes = [
        unwrap((const(n) - 1) * s - b - e + k)
        for n, s, k, b, e in zip(x.type.shape[2:], strides, kernel, pads[:rank], pads[rank:])
    ]
    shape = (*x.type.shape[:2], *sizes)
    zeros = c.b.full(shape=(product(shape),), value=0.0, dtype=x.type.dtype)
    flat = (product(x.type.shape),)
    y = c.b.scatter_elements(zeros, c.b.reshape(index, shape=flat), c.b.reshape(x, shape=flat), axis=0)
    y = c.b.reshape(y, shape=shape)
    if not c.has(2):
        return y
    wanted = c.dims(2, "output_shape")
    ends = tuple(unwrap(const(a) - b) for a, b in zip(wanted, shape))
    return y if all(e == 0 for e in ends) else c.b.pad(y, pads=(*(0,) * len(shape), *ends))


def global_pool(op: str) -> Converter:
    return lambda c: c.b.op(op, c.x())


def global_lp_pool(c: Call) -> Any:
    p = c.attrs.get("p", 2)
    if p != int(p):
        raise UnsupportedError(f"GlobalLpPool with p={p}; p must be whole")
    return c.b.global_lp_pool(c.x(), p=int(p))


NN: dict[str, Converter] = {
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "MaxPool": max_pool,
    "AveragePool": average_pool,
    "LpPool": lp_pool,
    "MaxUnpool": max_unpool,
    "GlobalAveragePool": global_pool("global_avg_pool"),
    "GlobalMaxPool": global_pool("global_max_pool"),
    "GlobalLpPool": global_lp_pool,
}
