"""Operators with results of data-dependent size, compiled: against NumPy, ONNX Runtime and the standard."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import onnxruntime
import pytest

import dnnc

RNG = np.random.default_rng(5)
HEAD = '<ir_version: 8, opset_import: ["": 17]>\n'
KINDS = {
    "float": np.float32,
    "double": np.float64,
    "int64": np.int64,
    "int32": np.int32,
    "int8": np.int8,
    "bool": np.bool_,
    "float16": np.float16,
}


def compiled(text: str, cache: Any = False) -> Any:
    f = dnnc.compile(onnx.parser.parse_model(HEAD + text), cache=cache)
    assert not f.deferred, "shapes must not depend on contents"
    return f


def runtime(text: str, *xs: np.ndarray) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        onnx.parser.parse_model(HEAD + text).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, dict(zip([i.name for i in session.get_inputs()], xs)))


def same(got: Any, want: Any) -> None:
    for g, w in zip(got if isinstance(got, tuple) else (got,), want, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        np.testing.assert_array_equal(g, w)


def sparse(shape: tuple[int, ...], kind: str) -> np.ndarray:
    return (RNG.integers(-3, 4, shape) * (RNG.random(shape) < 0.5)).astype(KINDS[kind])


# --- NonZero, Compress, Unique ----------------------------------------------------------------------------------------


@pytest.mark.family("cases")
@pytest.mark.parametrize("kind", KINDS)
def test_nonzero(kind: str) -> None:
    f = compiled(f"m ({kind}[3,5,2] x) => (int64[R,S] y) {{ y = NonZero (x) }}")
    for x in (sparse((3, 5, 2), kind), np.zeros((3, 5, 2), KINDS[kind]), np.ones((3, 5, 2), KINDS[kind])):
        same(f(x), [np.array(np.nonzero(x), np.int64)])
    assert any("truncate" in where for where in f.report.host)


@pytest.mark.slow
def test_nonzero_of_nan_a_scalar_nothing_and_much() -> None:
    f = compiled("m (float[N] x) => (int64[R,S] y) { y = NonZero (x) }")
    x = np.array([np.nan, 0, -0.0, np.inf], np.float32)
    same(f(x), [np.array([[0, 3]])])
    same(f(x[:0]), [np.zeros((1, 0), np.int64)])
    big = sparse((70000,), "float")  # three levels of blocks
    same(f(big), [np.array(np.nonzero(big))])
    g = compiled("m (float x) => (int64[R,S] y) { y = NonZero (x) }")
    assert g(np.float32(2)).shape == (0, 1) and g(np.float32(0)).shape == (
        0,
        0,
    )  # the specification: no axes, so no rows


@pytest.mark.slow
def test_what_follows_is_compiled_for_all_sizes() -> None:
    f = compiled(
        "m (float[64] x) => (float[S] y, float z) { i = NonZero (x)\n a = Constant <value = int64[1] {0}> ()\n j = "
        "Squeeze (i, a)\n y = Gather (x, j)\n z = ReduceMax <keepdims = 0> (x) }"
    )
    for count in (5, 64, 1, 17, 0):
        x = np.zeros(64, np.float32)
        x[RNG.permutation(64)[:count]] = RNG.normal(size=count) + 3
        same(f(x), [x[x != 0], x.max()])
    # one program for the sizes from 1 on, one for 0
    assert [len(p.programs) for p in f.programs[-1].segments] == [1, 2]


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("axis", ["", "<axis = 0>", "<axis = -1>", "<axis = 1>"])
def test_compress(axis: str) -> None:
    for flags in (4, 2):
        text = f"m (float[4,4,4] x, bool[{flags}] c) => (float[A,B,C] y) {{ y = Compress {axis} (x, c) }}"
        text = text if axis else text.replace("A,B,C", "S")
        f = compiled(text)
        for c in (RNG.random(flags) < 0.5, np.zeros(flags, bool), np.ones(flags, bool)):
            x = RNG.normal(size=(4, 4, 4)).astype(np.float32)
            same(f(x, c), runtime(text, x, c))


def test_constant_flags_are_a_gather() -> None:
    f = compiled(
        "m (float[3,2] x) => (float[S,2] y) { c = Constant <value = bool[3] {1, 0, 1}> ()\n y = Compress <axis = 0> "
        "(x, c) }"
    )
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    same(f(x), [x[[0, 2]]])
    assert f.report.fallbacks == []


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("kind", ["float", "double", "int64", "int8"])
@pytest.mark.parametrize("in_order", [0, 1])
def test_unique(kind: str, in_order: int) -> None:
    text = (
        f"m ({kind}[N] x) => ({kind}[S] y, int64[S] i, int64[N] v, int64[S] c) {{ y, i, v, c = Unique <sorted = "
        f"{in_order}> (x) }}"
    )
    f = compiled(text)
    for x in (
        sparse((90,), kind),
        np.zeros(90, KINDS[kind]),
        RNG.permutation(90).astype(KINDS[kind]),
        np.ones(1, KINDS[kind]),
    ):
        same(f(x), runtime(text, x))
    y, *rest = f(np.ones(0, KINDS[kind]))
    assert y.shape == (0,) and all(r.shape == (0,) for r in rest)


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("in_order", [0, 1])
def test_unique_slices(axis: int, in_order: int) -> None:
    text = (
        "m (int64[4,6,2] x) => (int64[A,B,C] y, int64[S] i, int64[N] v, int64[S] c) { y, i, v, c = Unique <axis "
        f"= {axis}, sorted = {in_order}> (x) }}"
    )
    f = compiled(text)
    for most in (1, 2, 9):
        x = RNG.integers(0, most, (4, 6, 2))
        x[:, 3], x[2] = x[:, 0], x[0]
        same(f(x), runtime(text, x))


@pytest.mark.slow
def test_unique_merges_nan_and_the_zeros() -> None:
    f = compiled("m (float[6] x) => (float[S] y, int64[S] i, int64[N] v, int64[S] c) { y, i, v, c = Unique (x) }")
    y, i, v, c = f(np.array([np.nan, 0, -0.0, np.nan, -1, 0], np.float32))
    np.testing.assert_array_equal(y, np.array([-1, 0, np.nan], np.float32))
    assert i.tolist() == [4, 1, 0] and v.tolist() == [2, 1, 1, 2, 0, 1] and c.tolist() == [1, 3, 2]


# --- NonMaxSuppression ------------------------------------------------------------------------------------------------

NMS = (
    "m (float[B,N,4] b, float[B,C,N] s, int64[1] k, float[1] i, float[1] t) => (int64[S,3] y) {{ y = "
    "NonMaxSuppression <center_point_box = {}> (b, s, k, i, t) }}"
)


def boxes(batches: int, n: int, center: bool) -> np.ndarray:
    at, size = RNG.uniform(0, 10, (batches, n, 2)), RNG.uniform(0.2, 3, (batches, n, 2))
    b = np.concatenate([at, size] if center else [at - size / 2, at + size / 2], -1).astype(np.float32)
    if not center:
        b[:, ::3] = b[:, ::3][..., [2, 1, 0, 3]]  # corners in any order
    return b


def greedy(b: np.ndarray, s: np.ndarray, most: int, threshold: float, least: float | None) -> np.ndarray:
    """The specification, box by box, in float64."""
    low, high = (
        np.minimum(b[..., :2], b[..., 2:]).astype(np.float64),
        np.maximum(b[..., :2], b[..., 2:]).astype(np.float64),
    )
    out = []
    for batch in range(s.shape[0]):
        for c in range(s.shape[1]):
            taken: list[int] = []
            for n in np.argsort(-s[batch, c], kind="stable"):
                if len(taken) >= most or (least is not None and not s[batch, c, n] > least):
                    continue
                inside = [
                    np.prod(
                        np.maximum(
                            np.minimum(high[batch, n], high[batch, j]) - np.maximum(low[batch, n], low[batch, j]), 0
                        )
                    )
                    for j in taken
                ]
                areas = [
                    np.prod(high[batch, n] - low[batch, n]) + np.prod(high[batch, j] - low[batch, j]) for j in taken
                ]
                if all(x / (a - x) <= threshold for x, a in zip(inside, areas)):
                    taken.append(int(n))
            out += [(batch, c, n) for n in taken]
    return np.array(out, np.int64).reshape(-1, 3)


@pytest.mark.slow
@pytest.mark.parametrize("center", [False, True])
def test_nms_against_the_runtime(center: bool) -> None:
    f = compiled(NMS.format(int(center)))
    for batches, classes, n, most, threshold, least in (
        (2, 3, 40, 10, 0.3, 0.2),
        (2, 3, 40, 100, 0.5, 0.9),
        (2, 3, 40, 3, 0, 0),
        (1, 1, 1, 5, 0.5, 0),
        (2, 3, 40, 0, 0.5, 0),
    ):
        xs = boxes(batches, n, center), RNG.random((batches, classes, n)).astype(np.float32)
        scalars = np.array([most], np.int64), np.array([threshold], np.float32), np.array([least], np.float32)
        same(f(*xs, *scalars), runtime(NMS.format(int(center)), *xs, *scalars))


@pytest.mark.slow
def test_nms_against_the_specification() -> None:
    f = compiled(NMS.format(0))
    for _ in range(3):
        b, s = (
            boxes(1, 60, False),
            np.round(RNG.random((1, 2, 60)), 1).astype(np.float32),
        )  # with equal scores: the first box wins
        got = f(b, s, np.array([7], np.int64), np.array([0.2], np.float32), np.array([0.35], np.float32))
        np.testing.assert_array_equal(got, greedy(b, s, 7, 0.2, 0.35))


@pytest.mark.slow
def test_nms_of_few_scores_cuts_no_candidates() -> None:
    fixed = NMS.replace("B,N,4", "1,60,4").replace("B,C,N", "1,2,60")
    assert fixed != NMS
    f = compiled(fixed.format(0))
    assert len(f.report.fallbacks) == 1  # the result's size
    b, s = boxes(1, 60, False), RNG.random((1, 2, 60)).astype(np.float32)
    got = f(b, s, np.array([7], np.int64), np.array([0.2], np.float32), np.array([0.35], np.float32))
    np.testing.assert_array_equal(got, greedy(b, s, 7, 0.2, 0.35))


@pytest.mark.slow
def test_nms_without_candidates_and_without_a_limit() -> None:
    f = compiled(NMS.format(0))
    b, s = boxes(1, 9, False), np.full((1, 2, 9), 0.5, np.float32)
    half = np.array([0.5], np.float32)
    assert f(b, s, np.array([5]), half, half).shape == (0, 3)  # a score must be above the threshold
    s[:] = np.nan
    assert f(b, s, np.array([5]), half, half).shape == (0, 3)
    g = compiled("m (float[1,9,4] b, float[1,2,9] s) => (int64[S,3] y) { y = NonMaxSuppression (b, s) }")
    assert g(b, s).shape == (0, 3)  # the largest number of boxes is 0 where it is not given


@pytest.mark.slow
def test_nms_in_a_model() -> None:
    text = (
        "m (float[1,50,4] b, float[1,1,50] s) => (float[S,4] y) { k = Constant <value = int64 {8}> ()\n i = Constant "
        "<value = float {0.4}> ()\n"
        "p = Sigmoid (s)\n n = NonMaxSuppression (b, p, k, i)\n d = Constant <value = int64[1] {2}> ()\n j = Gather "
        "<axis = 1> (n, d)\n"
        "e = Squeeze (j, o)\n f = Squeeze (b, z)\n y = Gather (f, e) }"
    ).replace(
        "p = Sigmoid", "o = Constant <value = int64[1] {1}> ()\n z = Constant <value = int64[1] {0}> ()\n p = Sigmoid"
    )
    f = compiled(text)
    b, s = boxes(1, 50, False), RNG.normal(size=(1, 1, 50)).astype(np.float32)
    same(f(b, s), [b[0, greedy(b, s, 8, 0.4, None)[:, 2]]])


# --- sizes that are computed ------------------------------------------------------------------------------------------

POSITIVES = (
    "z = Constant <value = float {0}> ()\n g = Greater (x, z)\n c = Cast <to = 7> (g)\n n = ReduceSum <keepdims = 1> "
    "(c)\n"
    "zero = Constant <value = int64[1] {0}> ()\n one = Constant <value = int64[1] {1}> ()\n m = Constant <value = "
    "int64[1] {-1}> ()\n"
)  # n: how many elements of x are positive
INPUTS = [
    np.array(x, np.float32) for x in ([1, -1, 2, -3, 4, 5, -6, 7], [1] * 8, [-1] * 8, [-1, -1, 3, -1, -1, -1, -1, -1])
]


@pytest.mark.family("shapes")
@pytest.mark.parametrize(
    "body",
    [
        "k = Constant <value = int64[1] {3}> ()\n s = Concat <axis = 0> (n, k)\n y = ConstantOfShape <value = float[1] "
        "{2.5}> (s)",
        "y = Slice (x, zero, n)",
        "y = Slice (x, n, m)",
        "k = Neg (n)\n e = Constant <value = int64[1] {100}> ()\n y = Slice (x, k, e)",
        "e = Constant <value = int64[1] {-100}> ()\n s = Constant <value = int64[1] {-3}> ()\n y = Slice (x, n, e, "
        "zero, s)",
        "y = Tile (x, n)",
        "k = Constant <value = int64[1] {8}> ()\n s = Concat <axis = 0> (n, k)\n y = Expand (x, s)",
        "k = Max (n, one)\n d = Div (k, k)\n s = Concat <axis = 0> (m, d)\n r = Reshape (x, s)\n y = Neg (r)",
        "r = Squeeze (n)\n a = Constant <value = int64 {0}> ()\n b = Constant <value = int64 {1}> ()\n i = Range (a, "
        "r, b)\n y = Cast <to = 1> (i)",
    ],
)
def test_computed_sizes(body: str) -> None:
    rank = "A, B" if any(w in body for w in ("Expand", "Reshape", "ConstantOfShape")) else "A"
    text = f"m (float[8] x) => (float[{rank}] y) {{ {POSITIVES}{body} }}"
    f = compiled(text)
    for x in INPUTS:
        same(f(x), runtime(text, x))
    assert f.report.host and len(f.programs) == 1


@pytest.mark.family("cases")
@pytest.mark.parametrize("kind", ["int64", "int32", "float", "double"])
def test_a_range_of_inputs(kind: str) -> None:
    text = f"m ({kind} a, {kind} b, {kind} d) => ({kind}[N] y) {{ y = Range (a, b, d) }}"
    f = compiled(text)
    for bounds in ((1, 10, 3), (10, 1, -4), (1, 10, 9), (1, 1, 1), (5, 1, 1), (-3, 4, 2)):
        xs = [np.array(v, KINDS[kind]) for v in bounds]
        same(f(*xs), runtime(text, *xs))


def test_a_computed_shape_that_does_not_fit_is_an_input_error() -> None:
    f = compiled(
        f"m (float[8] x) => (float[A,B] y) {{ {POSITIVES} s = Concat <axis = 0> (n, m)\n y = Reshape (x, s) }}"
    )
    assert f(INPUTS[1]).shape == (8, 1)
    with pytest.raises(
        dnnc.InputError, match=r"view at y .*the shape \[5, -1\] is computed, to which \[8\] cannot be reshaped"
    ):
        f(INPUTS[0])
    g = compiled(f"m (float[8] x) => (float[A] y) {{ {POSITIVES} y = Expand (x, n) }}")
    assert g(INPUTS[1]).shape == g(INPUTS[3]).shape == (8,)
    with pytest.raises(dnnc.InputError, match="5"):
        g(INPUTS[0])


def test_contents_are_the_last_resort() -> None:
    # Squeeze without axes drops the axis of symbolic size where there is one element: no graph serves both
    text = HEAD + "m (float[6] x) => (int64[S] y) { i = NonZero (x)\n y = Squeeze (i) }"
    f = dnnc.compile(onnx.parser.parse_model(text), cache=False)
    assert f.deferred
    assert f(np.array([0, 1, 0, 2, 0, 0], np.float32)).tolist() == [1, 3]
    assert f(np.array([0, 0, 0, 2, 0, 0], np.float32)).shape == ()
