"""Regions of interest, deformable convolution, determinants: compiled, against ONNX Runtime and formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from dnnc.driver import compile
from dnnc.ir.errors import DnncError

Array = np.ndarray[Any, Any]


def model(op: str, inputs: list[Array | None], attrs: dict[str, Any], opset: int) -> onnx.ModelProto:
    names = ["" if a is None else f"x{k}" for k, a in enumerate(inputs)]
    infos = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for n, a in zip(names, inputs, strict=True)
        if a is not None
    ]
    out = helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(inputs[0].dtype), None)
    graph = helper.make_graph([helper.make_node(op, names, ["y"], **attrs)], "g", infos, [out])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def feeds(inputs: list[Array | None]) -> dict[str, Array]:
    return {f"x{k}": a for k, a in enumerate(inputs) if a is not None}


def ours(op: str, inputs: list[Array | None], attrs: dict[str, Any], opset: int = 22) -> Array:
    return compile(model(op, inputs, attrs, opset), target="llvm", threads=1, cache=False)(feeds(inputs))


def runtime(op: str, inputs: list[Array | None], attrs: dict[str, Any], opset: int = 22) -> Array:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model(op, inputs, attrs, opset).SerializeToString(), options).run(
        None, feeds(inputs)
    )[0]


def regions(rng: np.random.Generator, count: int, low: float, high: float) -> Array:
    corners = rng.uniform(low, high, (count, 2, 2))
    return np.concatenate([corners.min(1), corners.max(1)], 1).astype(np.float32)


@pytest.mark.family("cases")
@pytest.mark.parametrize("opset", [10, 16])
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("ratio", [0, 2])
def test_roi_align(opset: int, mode: str, ratio: int) -> None:
    """Regions within the image, across its border, and larger than it."""
    rng = np.random.default_rng(opset + ratio)
    x = rng.standard_normal((2, 3, 9, 7)).astype(np.float32)
    rois = np.concatenate(
        [regions(rng, 5, 0, 14), regions(rng, 4, -9, 30), np.array([[3, 3, 3, 3], [-20, -20, 60, 60]], np.float32)]
    )
    inputs: list[Array | None] = [x, rois, rng.integers(0, 2, len(rois))]
    attrs = {"output_height": 3, "output_width": 2, "sampling_ratio": ratio, "spatial_scale": 0.5, "mode": mode}
    np.testing.assert_allclose(
        ours("RoiAlign", inputs, attrs, opset), runtime("RoiAlign", inputs, attrs, opset), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_roi_align_without_half_pixel() -> None:
    rng = np.random.default_rng(3)
    inputs: list[Array | None] = [
        rng.standard_normal((1, 2, 6, 6)),
        regions(rng, 4, 0, 6).astype(np.float64),
        np.zeros(4, np.int64),
    ]
    attrs = {"output_height": 2, "output_width": 2, "coordinate_transformation_mode": "output_half_pixel"}
    np.testing.assert_allclose(
        ours("RoiAlign", inputs, attrs, 16), runtime("RoiAlign", inputs, attrs, 16), rtol=1e-6, atol=1e-9
    )


@pytest.mark.slow
def test_roi_align_keeps_infinite_pixels_out_of_other_regions() -> None:
    x = np.zeros((1, 1, 8, 8), np.float32)
    x[0, 0, 7, 7] = np.inf
    got = ours(
        "RoiAlign",
        [x, np.array([[0, 0, 3, 3]], np.float32), np.zeros(1, np.int64)],
        {"output_height": 2, "output_width": 2},
        16,
    )
    np.testing.assert_array_equal(got, np.zeros((1, 1, 2, 2), np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_sampled_grids_keep_infinite_pixels_out_of_places_beyond(mode: str) -> None:
    x = np.full((1, 2, 4, 4), np.inf, np.float32)
    grid = np.array([[[[-3, 0], [0, 5], [9, -9], [2.5, 2.5]]]], np.float32)
    got = ours("GridSample", [x, grid], {"mode": mode, "padding_mode": "zeros"}, 20)
    np.testing.assert_array_equal(got, np.zeros((1, 2, 1, 4), np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_max_roi_pool(scale: float) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 3, 9, 7)).astype(np.float32)
    rois = np.concatenate([np.round(regions(rng, 6, 0, 9 / scale)), np.array([[-4, -4, 50, 60]], np.float32)])
    rois = np.concatenate([rng.integers(0, 2, (len(rois), 1)), rois], 1).astype(np.float32)
    attrs = {"pooled_shape": [3, 2], "spatial_scale": scale}
    np.testing.assert_array_equal(ours("MaxRoiPool", [x, rois], attrs, 1), runtime("MaxRoiPool", [x, rois], attrs, 1))


def deformed(
    x: Array,
    w: Array,
    offset: Array,
    bias: Array,
    mask: Array,
    pad: tuple[int, int],
    stride: int,
    group: int,
    groups: int,
) -> Array:
    """The sum of the definition, one output at a time."""
    n, c, height, width = x.shape
    outputs, per_group, kh, kw = w.shape
    out = np.zeros((n, outputs, *offset.shape[2:]))

    def pixel(image: Array, y: float, z: float) -> float:
        total = 0.0
        for j in (int(np.floor(y)), int(np.floor(y)) + 1):
            for i in (int(np.floor(z)), int(np.floor(z)) + 1):
                if 0 <= j < height and 0 <= i < width:
                    total += float(image[j, i]) * (1 - abs(y - j)) * (1 - abs(z - i))
        return total

    for b, o, p, q in np.ndindex(*out.shape):
        total = float(bias[o])
        for s, ky, kx in np.ndindex(per_group, kh, kw):
            channel = o // (outputs // group) * per_group + s
            tap = channel // (c // groups) * kh * kw + ky * kw + kx
            y = p * stride - pad[0] + ky + offset[b, 2 * tap, p, q]
            z = q * stride - pad[1] + kx + offset[b, 2 * tap + 1, p, q]
            total += pixel(x[b, channel], y, z) * mask[b, tap, p, q] * float(w[o, s, ky, kx])
        out[b, o, p, q] = total
    return out


@pytest.mark.family("shapes")
@pytest.mark.parametrize("group,groups", [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_deform_conv(group: int, groups: int) -> None:
    rng = np.random.default_rng(group * 10 + groups)
    x, w = rng.standard_normal((2, 4, 6, 5)), rng.standard_normal((4, 4 // group, 3, 2))
    offset, mask, bias = (
        rng.uniform(-3, 3, (2, groups * 12, 3, 3)),
        rng.uniform(0, 1, (2, groups * 6, 3, 3)),
        rng.standard_normal(4),
    )
    inputs: list[Array | None] = [a.astype(np.float32) for a in (x, w, offset, bias, mask)]
    attrs = {"pads": [1, 1, 1, 1], "strides": [2, 2], "group": group, "offset_group": groups}
    want = deformed(*inputs, pad=(1, 1), stride=2, group=group, groups=groups)
    np.testing.assert_allclose(ours("DeformConv", inputs, attrs), want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("place", [np.nan, np.inf, -np.inf, 1e30, -9.0])
def test_deform_conv_reads_nothing_outside(place: float) -> None:
    x, w, offset = np.full((1, 3, 4, 4), np.inf), np.ones((2, 3, 2, 2)), np.full((1, 8, 3, 3), place)
    inputs: list[Array | None] = [a.astype(np.float32) for a in (x, w, offset)]
    np.testing.assert_array_equal(ours("DeformConv", inputs, {}), np.zeros((1, 2, 3, 3), np.float32))


@pytest.mark.slow
def test_deform_conv_of_lines_with_symbolic_sizes() -> None:
    rng = np.random.default_rng(5)
    x, w, bias = rng.standard_normal((2, 4, 5)), rng.standard_normal((6, 2, 3)), rng.standard_normal(6)
    offset, mask = rng.uniform(-3, 3, (2, 6, 5)), rng.uniform(0, 1, (2, 6, 5))
    inputs: list[Array | None] = [a.astype(np.float16) for a in (x, w, offset, bias, mask)]
    m = model("DeformConv", inputs, {"pads": [1, 1], "group": 2, "offset_group": 2}, 22)
    for k in (0, 2, 4):
        batch, _, length = m.graph.input[k].type.tensor_type.shape.dim
        batch.dim_param, length.dim_param = "n", "l"
    got = compile(m, target="llvm", threads=1, cache=False)(*inputs)
    lines = x[:, :, None], w[:, :, None], np.stack([0 * offset, offset], 2).reshape(2, 12, 1, 5), bias, mask[:, :, None]
    want = deformed(*lines, pad=(0, 1), stride=1, group=2, groups=2)
    np.testing.assert_allclose(got, want[:, :, 0], rtol=1e-2, atol=2e-2)


@pytest.mark.family("cases")
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 5, 5), (2, 2, 12, 12), (20, 20)])
def test_det(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)
    np.testing.assert_allclose(ours("Det", [x], {}, 11), np.linalg.det(x.astype(np.float64)), rtol=2e-3)


@pytest.mark.slow
def test_det_of_singular_and_exchanged_matrices() -> None:
    x = np.array(
        [[[0, 1], [1, 0]], [[1, 2], [2, 4]], [[0, 0], [0, 0]], [[0, 3], [0, 1]], [[np.nan, 1], [1, 1]]], np.float32
    )
    np.testing.assert_array_equal(ours("Det", [x], {}, 11), np.array([-1, 0, 0, 0, np.nan], np.float32))


def test_what_does_not_fit_is_refused() -> None:
    x, rois = np.zeros((1, 2, 4, 4), np.float32), np.zeros((3, 4), np.float32)
    with pytest.raises(DnncError, match="RoiAlign"):
        ours("RoiAlign", [x[0], rois, np.zeros(3, np.int64)], {}, 16)
    with pytest.raises(DnncError, match="square"):
        ours("Det", [x[0, 0, :3]], {}, 11)
    with pytest.raises(DnncError, match="offset must be"):
        ours("DeformConv", [x, np.zeros((2, 2, 3, 3), np.float32), np.zeros((1, 17, 2, 2), np.float32)], {})
