"""Operators on strings against ONNX's evaluator, n-grams against ONNX Runtime, images against Pillow."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
import PIL.Image
import pytest
from onnx import TensorProto as T
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import dnnc
from dnnc.ir.errors import DnncError, InputError, ModelError, UnsupportedError

S = T.STRING


def texts(*words: str, shape: Sequence[int] | None = None) -> Any:
    a = np.array(words, object)
    return a if shape is None else a.reshape(shape)


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


GRID = texts("a", "bb", "c", "dd", "e", "ff", shape=(2, 3))
GRID4 = texts("a", "b", "c", "d", shape=(1, 4, 1, 1))
MASK = np.array([[1, 0, 1], [0, 1, 1]], bool)


def model(
    op: str,
    feeds: dict[str, Any],
    outputs: Sequence[int],
    constants: dict[str, Any] | None = None,
    symbolic: bool = False,
    **attrs: Any,
) -> Any:
    """One node; constants follow the inputs, `outputs` are the results' dtypes."""
    made = [f"o{k}" for k in range(len(outputs))]
    node = helper.make_node(op, [*feeds, *(constants or {})], made, **attrs)
    shapes = {n: [f"{n}_{k}" for k in range(a.ndim)] if symbolic else a.shape for n, a in feeds.items()}
    ins = [
        helper.make_tensor_value_info(
            n, S if a.dtype == object else helper.np_dtype_to_tensor_dtype(a.dtype), shapes[n]
        )
        for n, a in feeds.items()
    ]
    outs = [helper.make_tensor_value_info(n, t, None) for n, t in zip(made, outputs)]
    weights = [numpy_helper.from_array(a, n) for n, a in (constants or {}).items()]
    return helper.make_model(
        helper.make_graph([node], "g", ins, outs, weights), opset_imports=[helper.make_opsetid("", 20)], ir_version=9
    )


def results(m: Any, feeds: dict[str, Any], **options: Any) -> list[Any]:
    got = dnnc.compile(m, cache=False, **options)(feeds)
    return list(got) if isinstance(got, tuple) else [got]


# --- movement ---------------------------------------------------------------------------------------------------------

MOVES: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ("Identity", {"x": GRID}, {}, {}),
    ("Where", {"c": MASK, "x": GRID, "y": texts("z")}, {}, {}),
    ("Gather", {"x": GRID, "i": ints(2, -1)}, {}, {"axis": 1}),
    ("GatherElements", {"x": GRID, "i": np.array([[2], [0]])}, {}, {"axis": 1}),
    ("GatherND", {"x": GRID, "i": np.array([[0, 1], [1, 2]])}, {}, {}),
    ("ScatterElements", {"x": GRID, "i": np.array([[2], [0]]), "u": texts("q", "r", shape=(2, 1))}, {}, {"axis": 1}),
    ("ScatterND", {"x": GRID, "i": np.array([[1]]), "u": texts("q", "r", "s", shape=(1, 3))}, {}, {}),
    ("Reshape", {"x": GRID}, {"s": ints(3, -1)}, {}),
    ("Concat", {"x": GRID, "y": GRID[:1]}, {}, {"axis": 0}),
    ("Expand", {"x": GRID}, {"s": ints(2, 2, 3)}, {}),
    ("Tile", {"x": GRID}, {"s": ints(2, 1)}, {}),
    ("Slice", {"x": GRID}, {"s": ints(0, 1), "e": ints(2, 3)}, {}),
    ("Transpose", {"x": GRID}, {}, {"perm": [1, 0]}),
    ("Squeeze", {"x": GRID[:1]}, {"s": ints(0)}, {}),
    ("Unsqueeze", {"x": GRID}, {"s": ints(0)}, {}),
    ("Flatten", {"x": GRID}, {}, {"axis": 0}),
    ("Pad", {"x": GRID}, {"p": ints(0, 1, 0, 0), "v": np.array("P", object)}, {}),
    ("DepthToSpace", {"x": GRID4}, {}, {"blocksize": 2}),
    ("ReverseSequence", {"x": GRID, "l": ints(2, 3)}, {}, {"batch_axis": 0, "time_axis": 1}),
    ("Compress", {"x": GRID, "c": np.array([1, 0, 1], bool)}, {}, {"axis": 1}),
    ("Trilu", {"x": GRID}, {}, {}),
]


@pytest.mark.parametrize("op,feeds,constants,attrs", MOVES, ids=[m[0] for m in MOVES])
def test_movement(op: str, feeds: dict[str, Any], constants: dict[str, Any], attrs: dict[str, Any]) -> None:
    m = model(op, feeds, [S], constants, **attrs)
    (want,) = ReferenceEvaluator(m).run(None, feeds)
    (got,) = results(m, feeds)
    assert got.dtype == object and got.shape == want.shape and got.tolist() == want.tolist()


def test_split_into_several() -> None:
    m = model("Split", {"x": GRID}, [S] * 3, axis=1, num_outputs=3)
    assert [r.tolist() for r in results(m, {"x": GRID})] == [[["a"], ["dd"]], [["bb"], ["e"]], [["c"], ["ff"]]]


@pytest.mark.parametrize("op,want", [("Shape", [2, 3]), ("Size", 6)])
def test_shapes_of_strings(op: str, want: Any) -> None:
    assert results(model(op, {"x": GRID}, [T.INT64]), {"x": GRID})[0].tolist() == want


def test_one_hot() -> None:
    m = model("OneHot", {"i": ints(1, 0)}, [S], {"d": ints(3), "v": texts("off", "on")})
    assert results(m, {"i": ints(1, 0)})[0].tolist() == [["off", "on", "off"], ["on", "off", "off"]]


@pytest.mark.slow
def test_unique_and_nonzero() -> None:
    x = texts("b", "", "b", "c", "a")
    m = model("Unique", {"x": x}, [S, T.INT64, T.INT64, T.INT64], sorted=0)
    assert [r.tolist() for r in results(m, {"x": x})] == [
        ["b", "", "c", "a"],
        [0, 1, 3, 4],
        [0, 1, 0, 2, 3],
        [2, 1, 1, 1],
    ]
    m = model("Unique", {"x": x}, [S, T.INT64], sorted=1)
    assert [r.tolist() for r in results(m, {"x": x})] == [["", "a", "b", "c"], [1, 4, 0, 3]]
    assert results(model("NonZero", {"x": x}, [T.INT64]), {"x": x})[0].tolist() == [[0, 2, 3, 4]]


# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["llvm", "reference"])
def test_comparison_and_concatenation(target: str) -> None:
    feeds = {"x": GRID, "y": texts("a", "e", "x")}
    assert results(model("Equal", feeds, [T.BOOL]), feeds, target=target)[0].tolist() == [
        [True, False, False],
        [False, True, False],
    ]
    assert results(model("StringConcat", feeds, [S]), feeds, target=target)[0].tolist() == [
        ["aa", "bbe", "cx"],
        ["dda", "ee", "ffx"],
    ]


@pytest.mark.parametrize("delimiter,maxsplit,want", [
    (",", None, [["a", "b", ""], ["", "", ""], ["x y", "", "z"]]),
    (",", 1, [["a", "b"], ["", ""], ["x y", ",z"]]),
    (None, None, [["a,b", ""], ["", ""], ["x", "y,,z"]]),
])  # fmt: skip
def test_splitting(delimiter: str | None, maxsplit: int | None, want: list[list[str]]) -> None:
    attrs = {k: v for k, v in (("delimiter", delimiter), ("maxsplit", maxsplit)) if v is not None}
    x = texts("a,b", "", "x y,,z")
    parts, counts = results(model("StringSplit", {"x": x}, [S, T.INT64], **attrs), {"x": x})
    assert parts.tolist() == want
    assert counts.tolist() == [len(s.split(delimiter, -1 if maxsplit is None else maxsplit)) for s in x]


@pytest.mark.parametrize("attrs,want", [
    ({"case_change_action": "UPPER"}, ["MON", "TUE", "ÉTÉ"]),
    ({"stopwords": ["mon"], "is_case_sensitive": 1}, ["Mon", "tue", "été"]),
    ({"stopwords": ["mon"], "is_case_sensitive": 0}, ["tue", "été"]),
    ({"stopwords": ["MON", "TUE", "ÉTÉ"], "case_change_action": "LOWER"}, [""]),
    ({"stopwords": ["tue"], "case_change_action": "LOWER", "is_case_sensitive": 1}, ["mon", "été"]),
])  # fmt: skip
def test_normalizing(attrs: dict[str, Any], want: list[str]) -> None:
    for x in (texts("Mon", "tue", "été"), texts("Mon", "tue", "été", shape=(1, 3))):
        (got,) = results(model("StringNormalizer", {"x": x}, [S], **attrs), {"x": x})
        assert got.shape == (*x.shape[:-1], len(want)) and got.reshape(-1).tolist() == want


@pytest.mark.parametrize("pattern,words,want", [
    (r"[[:alpha:]]+\z", ["abc", "ab1", ""], [True, False, False]),
    (r"\Qa.b\E+", ["a.b", "a.bb", "axb"], [True, True, False]),
    (r"\\z", ["\\z", "", "z"], [True, False, False]),
    (r"\d+", ["12", "\u0661", "1 "], [True, False, False]),
    (r"a|bc", ["a", "bc", "ac"], [True, True, False]),
])  # fmt: skip
def test_patterns(pattern: str, words: list[str], want: list[bool]) -> None:
    x = texts(*words)
    assert results(model("RegexFullMatch", {"x": x}, [T.BOOL], pattern=pattern), {"x": x})[0].tolist() == want


def test_a_bad_pattern() -> None:
    with pytest.raises(UnsupportedError, match=r"RegexFullMatch.*'\(' is no regular expression"):
        dnnc.compile(model("RegexFullMatch", {"x": GRID}, [T.BOOL], pattern="("))


def test_a_size_that_the_model_implies() -> None:
    """Words joined with two others: a right model has two, a wrong one is told at the call."""
    nodes = [
        helper.make_node("StringNormalizer", ["x"], ["w"], stopwords=["the"]),
        helper.make_node("StringConcat", ["w", "k"], ["y"], name="joined"),
    ]
    weights = [numpy_helper.from_array(texts("1", "2"), "k")]
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", S, [4])], [helper.make_tensor_value_info("y", S, None)], weights
    )
    f = dnnc.compile(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), cache=False)
    assert f.outputs[0].shape == (2,)
    assert f(["the", "a", "the", "b"]).tolist() == ["a1", "b2"]
    with pytest.raises(InputError, match=r"string_normalize at w .*must be 2, got 3"):
        f(["the", "a", "c", "b"])


# --- casts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to,words", [
    (T.FLOAT, ["1.5", "-2", "INF", "-inf", "NaN", " 3e2 "]), (T.DOUBLE, ["0.1"]), (T.FLOAT16, ["0.1", "70000"]),
    (T.INT32, ["1", "-2", "+7"]),
    (T.INT64, ["100.5"]), (T.BOOL, ["1", "0"]),
])  # fmt: skip
def test_numbers_of_text(to: int, words: list[str]) -> None:
    x = texts(*words)
    m = model("Cast", {"x": x}, [to], to=to)
    (want,) = onnxruntime.InferenceSession(m.SerializeToString()).run(None, {"x": x})
    (got,) = results(m, {"x": x})
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)
    like = model("CastLike", {"x": x}, [to], {"y": np.zeros(1, want.dtype)})
    np.testing.assert_array_equal(results(like, {"x": x})[0], want)


@pytest.mark.parametrize(
    "to,word", [(T.FLOAT, "one"), (T.INT8, "300"), (T.INT32, ""), (T.INT32, "inf"), (T.FLOAT, "1_0")]
)
def test_text_that_is_no_number(to: int, word: str) -> None:
    x = texts(word)
    with pytest.raises(InputError, match="cannot convert the text"):
        results(model("Cast", {"x": x}, [to], to=to), {"x": x})


def test_text_of_numbers() -> None:
    x = np.array([0.1, 1 / 3, 1e20, -0.0, np.nan, np.inf, -np.inf], np.float32)
    want = ["0.1", "0.33333334", "1e+20", "-0.0", "NaN", "INF", "-INF"]
    assert results(model("Cast", {"x": x}, [S], to=S), {"x": x})[0].tolist() == want
    half = np.array([0.1], np.float16)
    assert results(model("Cast", {"x": half}, [S], to=S), {"x": half})[0].tolist() == ["0.1"]
    assert results(model("Cast", {"x": ints(-3, 7)}, [S], to=S), {"x": ints(-3, 7)})[0].tolist() == ["-3", "7"]


# --- n-grams ----------------------------------------------------------------------------------------------------------


def _pool(rng: np.random.Generator, longest: int) -> tuple[list[int], list[int], int]:
    starts, pool, seen = [], [], set()
    for n in range(1, longest + 1):
        starts.append(len(pool))
        for _ in range(int(rng.integers(1, 5))):
            gram = tuple(rng.integers(0, 4, n).tolist())
            pool += [] if gram in seen else gram
            seen.add(gram)
    return pool, starts, len(seen)


@pytest.mark.slow
@pytest.mark.family("cases")
@pytest.mark.parametrize("seed", range(12))
def test_ngrams(seed: int) -> None:
    rng = np.random.default_rng(seed)
    longest = int(rng.integers(1, 4))
    pool, starts, count = _pool(rng, longest)
    columns = rng.permutation(count + 2)[:count].tolist()
    attrs = {
        "mode": ("TF", "IDF", "TFIDF")[seed % 3], "min_gram_length": int(rng.integers(1, longest + 1)),
        "max_gram_length": longest,
        "max_skip_count": int(rng.integers(0, 4)), "ngram_counts": starts, "ngram_indexes": columns,
    }  # fmt: skip
    if max(columns) < count:
        attrs["weights"] = rng.random(count).tolist()
    x = rng.integers(0, 5, (3, int(rng.integers(1, 12))) if seed % 4 else int(rng.integers(1, 12)))
    if seed % 2:
        feeds = {"x": np.array([f"w{k}" for k in x.reshape(-1)], object).reshape(x.shape)}
        m = model("TfIdfVectorizer", feeds, [T.FLOAT], symbolic=seed > 5, pool_strings=[f"w{k}" for k in pool], **attrs)
    else:
        feeds = {"x": x}
        m = model("TfIdfVectorizer", feeds, [T.FLOAT], symbolic=seed > 5, pool_int64s=pool, **attrs)
    want = onnxruntime.InferenceSession(m.SerializeToString()).run(None, feeds)[0]
    f = dnnc.compile(m, cache=False)
    np.testing.assert_allclose(f(feeds), want, rtol=1e-6)
    assert f.report.fallbacks == [] if seed % 2 == 0 else all("string_index" in s for s in f.report.fallbacks)


@pytest.mark.slow
def test_ngrams_of_words_that_are_left() -> None:
    """The number of words is known at the call only; counting them is native all the same."""
    nodes = [
        helper.make_node("StringNormalizer", ["x"], ["w"], stopwords=["the"], case_change_action="LOWER"),
        helper.make_node(
            "TfIdfVectorizer", ["w"], ["y"], mode="TF", min_gram_length=1, max_gram_length=2, max_skip_count=0,
            ngram_counts=[0, 2],
            ngram_indexes=[0, 1, 2], pool_strings=["cat", "sat", "cat", "sat"],
        ),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info("x", S, ["N"])], [helper.make_tensor_value_info("y", T.FLOAT, None)]
    )
    f = dnnc.compile(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8),
        cache=False,
        dims={"N": (1, 99)},
    )
    assert f.report.host
    assert f(["The", "cat", "sat", "the", "cat"]).tolist() == [2.0, 1.0, 1.0]
    assert f(["the"]).tolist() == [0.0, 0.0, 0.0]
    assert f(["CAT", "cat", "the", "sat"]).tolist() == [2.0, 1.0, 1.0]


@pytest.mark.parametrize("attrs,message", [
    ({"mode": "X"}, "mode must be one of TF"), ({"ngram_indexes": [0]}, "names 1 column, the pool has 3"),
    ({"ngram_counts": [0, 1]}, "2-grams would be items 1 to 4 of a pool of 4"),
    ({"weights": [1.0], "mode": "IDF"}, "1 number for 3 columns"),
    ({"pool_strings": ["a"]}, "pool_int64s, and that pool only"),
    ({"ngram_indexes": [0, 1, -1]}, "column of the output"),
])  # fmt: skip
def test_bad_pools(attrs: dict[str, Any], message: str) -> None:
    good = {
        "mode": "TF", "min_gram_length": 1, "max_gram_length": 2, "max_skip_count": 0, "ngram_counts": [0, 2],
        "ngram_indexes": [0, 1, 2],
        "pool_int64s": [1, 2, 1, 2],
    }  # fmt: skip
    with pytest.raises(ModelError, match=message):
        dnnc.compile(model("TfIdfVectorizer", {"x": ints(1, 2)}, [T.FLOAT], **{**good, **attrs}))


# --- images -----------------------------------------------------------------------------------------------------------

PIXELS = np.arange(5 * 4 * 3, dtype=np.uint8).reshape(5, 4, 3) * 4


def png(a: Any) -> Any:
    out = io.BytesIO()
    PIL.Image.fromarray(a).save(out, "PNG")
    return np.frombuffer(out.getvalue(), np.uint8)


def test_decoding_images() -> None:
    file = png(PIXELS)
    gray = np.asarray(PIL.Image.fromarray(PIXELS).convert("L"))[..., None]
    for name, want in (("RGB", PIXELS), ("BGR", PIXELS[..., ::-1]), ("Grayscale", gray)):
        f = dnnc.compile(model("ImageDecoder", {"x": file}, [T.UINT8], symbolic=True, pixel_format=name), cache=False)
        np.testing.assert_array_equal(f(file), want)
        assert f(np.zeros(7, np.uint8)).shape == (0, 0, want.shape[2])  # no image
        assert f(file[:40]).shape == (0, 0, want.shape[2])  # the beginning of one


def test_images_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    file = png(PIXELS)
    f = dnnc.compile(model("ImageDecoder", {"x": file}, [T.UINT8]), cache=False)
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UnsupportedError, match=r"pip install -e '\.\[image\]'"):
        f(file)


def test_unknown_pixels() -> None:
    with pytest.raises(DnncError, match="pixel_format must be one of RGB, BGR, Grayscale; got 'CMYK'"):
        dnnc.compile(model("ImageDecoder", {"x": png(PIXELS)}, [T.UINT8], pixel_format="CMYK"))
