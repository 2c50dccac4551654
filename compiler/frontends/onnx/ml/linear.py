"""Converters of ai.onnx.ml without the trees: scaling, encodings, linear models and support vector machines.

Lookups of numbers are a binary search, of strings a dictionary on the host; all else is arithmetic. A classifier's
first output is the label of the best class (the first of equal ones), the second its scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dnnc.frontends.onnx.call import Call
from dnnc.frontends.onnx.tensors import Array
from dnnc.ir.dtype import DType, f32, f64, from_numpy, i64, string
from dnnc.ir.errors import ModelError, count
from dnnc.ir.graph import Value

Converter = Callable[[Call], Any]
Labels = tuple[int, ...] | tuple[str, ...]
TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
PROBIT_A = 0.147  # of Winitzki's approximation of the inverse error function, which ONNX Runtime uses too

# --- what classifiers share -------------------------------------------------------------------------------------------


def transformed(c: Call, y: Value, name: str) -> Any:
    """Scores [rows, classes] after `post_transform`."""
    b = c.b
    if name not in TRANSFORMS:
        raise ModelError(f"attribute post_transform must be one of {', '.join(TRANSFORMS)}, got {name!r}")
    if name == "LOGISTIC":
        return b.sigmoid(y)
    if name == "SOFTMAX":
        return b.softmax(y, axis=-1)
    if name == "SOFTMAX_ZERO":
        return _softmax_zero(c, y)
    return _probit(c, y) if name == "PROBIT" else y


def _softmax_zero(c: Call, y: Value) -> Any:
    """A softmax in which scores of 0 stay 0."""
    b = c.b
    top = b.reduce_max(y, axes=(-1,), keepdims=True)
    zero = c.const(0.0, y.type.dtype)
    e = b.where(b.greater(b.abs(y), 1e-7), b.exp(b.sub(y, top)), b.mul(y, b.exp(b.neg(top))))
    total = b.reduce_sum(e, axes=(-1,), keepdims=True)
    return b.where(b.equal(total, zero), c.const(0.5, y.type.dtype), b.div(e, total))


def _probit(c: Call, y: Value) -> Any:
    """sqrt(2) erfinv(2 y - 1)"""
    b = c.b
    x = b.sub(b.mul(y, 2.0), 1.0)
    log = b.log(b.mul(b.sub(c.const(1.0, y.type.dtype), x), b.add(x, 1.0)))
    v = b.add(b.mul(log, 0.5), 2.0 / (np.pi * PROBIT_A))
    size = b.sqrt(b.sub(b.sqrt(b.sub(b.mul(v, v), b.mul(log, 1.0 / PROBIT_A))), v))
    return b.mul(b.where(b.less(x, c.const(0.0, x.type.dtype)), b.neg(size), size), 1.41421356)


def labels_of(c: Call) -> Labels:
    """Return the class labels from `classlabels_ints`, `classlabels_int64s` or `classlabels_strings`."""
    found = c.integers("classlabels_int64s") or c.integers("classlabels_ints") or c.texts("classlabels_strings")
    if not found:
        raise ModelError(
            "one of the attributes classlabels_strings and classlabels_ints (classlabels_int64s) must hold the "
            "classes' labels"
        )
    return found


def labelled(c: Call, index: Value, labels: Labels) -> Any:
    """Map class positions to labels. A single integer label is the positive class, the other one is 0."""
    if len(labels) == 1:
        return index if isinstance(labels[0], int) else c.b.gather(strings(c, ["", labels[0]]), index, axis=0)
    if isinstance(labels[0], int):
        return (
            index
            if labels == tuple(range(len(labels)))
            else c.b.gather(c.b.constant(np.array(labels, np.int64)), index, axis=0)
        )
    return c.b.gather(strings(c, labels), index, axis=0)


def strings(c: Call, values: Sequence[Any]) -> Value:
    out = np.empty(len(values), object)
    out[:] = list(values)
    return c.b.constant(out)


def rows_of(c: Call, x: Value) -> Any:
    """A vector as one row, in f32 unless it is f64."""
    x = x if x.type.dtype is f64 else c.cast(x, f32)
    return c.b.reshape(x, shape=(1, x.type.shape[0])) if x.type.rank == 1 else x


def _matrix(c: Call, name: str, rows: int, x: Value) -> Array:
    """Coefficients [rows, features]."""
    given = np.asarray(c.numbers(name) or (), np.float64)
    if rows < 1 or given.size % rows or (isinstance(x.type.shape[1], int) and given.size != rows * x.type.shape[1]):
        raise ModelError(
            f"attribute {name} has {given.size} numbers, which are not {rows} rows of the features of {x.type}"
        )
    return given.reshape(rows, -1)


def _affine(c: Call, x: Value, weights: Array, offsets: Sequence[float] | None) -> Any:
    y = c.b.matmul(x, c.const(weights.T, x.type.dtype))
    if not offsets:
        return y
    if len(offsets) not in (1, weights.shape[0]):
        raise ModelError(
            f"attribute intercepts has {count(len(offsets), 'number')} for {weights.shape[0]} rows of coefficients"
        )
    return c.b.add(y, c.const(np.array(offsets), x.type.dtype))


# --- element by element -----------------------------------------------------------------------------------------------


def binarizer(c: Call) -> Any:
    x = c.x()
    return c.cast(c.b.greater(x, c.const(c.number("threshold", 0.0), x.type.dtype)), x.type.dtype)


def scaler(c: Call) -> Any:
    x = c.x()
    x = x if x.type.dtype is f64 else c.cast(x, f32)
    offset, scale = (np.array(c.numbers(n) or (d,)) for n, d in (("offset", 0.0), ("scale", 1.0)))
    return c.cast(c.b.mul(c.b.sub(x, c.const(offset, x.type.dtype)), c.const(scale, x.type.dtype)), f32)


def imputer(c: Call) -> Any:
    x = c.x()
    whole = not x.type.dtype.is_float
    values = c.integers("imputed_value_int64s") if whole else c.numbers("imputed_value_floats")
    old = c.integer("replaced_value_int64") if whole else c.number("replaced_value_float")
    if not values:
        raise ModelError(f"attribute imputed_value_{'int64s' if whole else 'floats'} is missing, {x.type} needs it")
    hit = c.b.isnan(x) if old != old else c.b.equal(x, c.const(old, x.type.dtype))
    return c.b.where(hit, c.const(np.array(values), x.type.dtype), x)


def normalizer(c: Call) -> Any:
    """Each row divided by its largest element, its sum of magnitudes, or its length; a row whose divisor is 0 stays."""
    b, x = c.b, c.x()
    x = x if x.type.dtype is f64 else c.cast(x, f32)
    norm = c.text("norm", "MAX")
    rules = {"MAX": b.reduce_max, "L1": b.reduce_l1, "L2": b.reduce_l2}
    if norm not in rules:
        raise ModelError(f"attribute norm must be one of {', '.join(rules)}, got {norm!r}")
    size = rules[norm](x, axes=(-1,), keepdims=True)
    return c.cast(b.where(b.equal(size, c.const(0.0, x.type.dtype)), x, b.div(x, size)), f32)


def feature_vectorizer(c: Call) -> Any:
    """Rows of all inputs side by side, each cut or filled up with zeros to the size that it is declared to have."""
    xs = [c.x(i) for i in range(len(c.items))]
    sizes = c.integers("inputdimensions") or tuple(x.type.shape[-1] for x in xs)  # type: ignore[misc]
    if len(sizes) != len(xs):
        raise ModelError(f"attribute inputdimensions has {count(len(sizes), 'size')} for {count(len(xs), 'input')}")
    return c.b.concat(*(_sized(c, x, n) for x, n in zip(xs, sizes)), axis=1)


def _sized(c: Call, x: Value, size: int) -> Any:
    x = c.cast(x, f32)
    x = c.b.reshape(x, shape=(1, x.type.shape[0])) if x.type.rank == 1 else x
    have = x.type.shape[1]
    if not isinstance(have, int) or have == size:
        return x
    return c.b.pad(x, pads=(0, 0, 0, size - have))


def array_feature_extractor(c: Call) -> Any:
    """Some columns; of a vector some elements, as one row."""
    x, index = c.x(0), c.x(1)
    size = index.type.size
    y = c.b.gather(x, c.b.reshape(index, shape=(size,)), axis=-1)
    return c.b.reshape(y, shape=(1, size)) if x.type.rank == 1 else y


# --- tables -----------------------------------------------------------------------------------------------------------


def _positions(c: Call, x: Value, keys: Sequence[Any]) -> tuple[Any, list[int]]:
    """Where each element stands among the keys, -1 if it is none of them, and the keys' places in that order."""
    if x.type.dtype is string:
        return c.b.string_index(x, strings(c, keys)), list(range(len(keys)))
    array = np.array(keys, x.type.dtype.numpy)
    order = [k for k in np.argsort(array, kind="stable").tolist() if array[k] == array[k]]
    nan = [k for k in range(len(keys)) if array[k] != array[k]]
    place = c.b.lookup(x, c.b.constant(array[order])) if order else c.b.full(shape=x.type.shape, value=-1, dtype=i64)
    if nan:
        place = c.b.where(c.b.isnan(x), c.const(len(order), i64), place)
    return place, [*order, *nan]


def mapping(c: Call, x: Value, keys: Sequence[Any], values: Sequence[Any], default: Any, to: DType) -> Any:
    """`values[k]` where an element is `keys[k]` (the last one of equal keys), else the default."""
    if len(keys) != len(values):
        raise ModelError(f"there are {count(len(keys), 'key')} and {count(len(values), 'value')}")
    known = {("nan" if k != k else k): (k, v) for k, v in zip(keys, values)}
    pairs = list(known.values())
    if not pairs:
        raise ModelError("the mapping has no keys")
    place, order = _positions(c, x, [k for k, _ in pairs])
    shown = [*(pairs[k][1] for k in order), default]
    table = strings(c, shown) if to is string else c.const(np.array(shown, to.numpy), to)
    found = c.b.where(c.b.less(place, 0), c.const(len(pairs), i64), place)
    return c.b.gather(table, found, axis=0)


# attribute's ending -> dtype and default
_ENDINGS: tuple[tuple[str, DType, Any], ...] = (
    ("int64s", i64, -1),
    ("floats", f32, -0.0),
    ("strings", string, "_Unused"),
)


def label_encoder(c: Call) -> Any:
    if c.opset == 1:
        classes = c.texts("classes_strings") or ()
        if c.type_of(0).dtype is string:
            return mapping(c, c.x(), classes, range(len(classes)), c.integer("default_int64", -1), i64)
        return mapping(c, c.x(), range(len(classes)), classes, c.text("default_string", "_Unused"), string)
    keys, _, _ = _table(c, "keys")
    values, to, default = _table(c, "values")
    x = c.x()
    if x.type.dtype is not string:
        keys = [np.asarray(k).astype(x.type.dtype.numpy).item() for k in keys]
    return mapping(c, x, keys, values, default, to)


def _table(c: Call, name: str) -> tuple[list[Any], DType, Any]:
    """The keys or values with their dtype and default."""
    tensor = c.tensor(f"{name}_tensor")
    if tensor is not None:
        default = c.tensor("default_tensor")
        to, standard = _of_array(tensor)
        return tensor.reshape(-1).tolist(), to, standard if default is None else default.reshape(-1).tolist()[0]
    for ending, to, standard in _ENDINGS:
        given = c.attrs.get(f"{name}_{ending}")
        if given is not None:
            return list(given), to, c.attrs.get(f"default_{ending[:-1]}", standard)
    raise ModelError(f"none of the attributes {name}_int64s, {name}_floats, {name}_strings and {name}_tensor is given")


def _of_array(a: Array) -> tuple[DType, Any]:

    to = from_numpy(a.dtype)
    return to, "_Unused" if to is string else -0.0 if to.is_float else -1


def category_mapper(c: Call) -> Any:
    words, numbers, x = c.texts("cats_strings") or (), c.integers("cats_int64s") or (), c.x()
    if x.type.dtype is string:
        return mapping(c, x, words, numbers, c.integer("default_int64", -1), i64)
    return mapping(c, x, numbers, words, c.text("default_string", "_Unused"), string)


def one_hot_encoder(c: Call) -> Any:
    """A category that is not known gives zeros, or with `zeros` = 0 an index error when the model runs."""
    words, numbers, x = c.texts("cats_strings"), c.integers("cats_int64s"), c.x()
    keys: Sequence[Any] = (words if x.type.dtype is string else numbers) or ()
    if not keys:
        raise ModelError(
            f"attribute cats_{'strings' if x.type.dtype is string else 'int64s'} must hold the categories of {x.type}"
        )
    count = len(keys)
    place = mapping(c, x if x.type.dtype is string else c.cast(x, i64), keys, range(count), count, i64)
    lit = np.eye(count + 1 if c.flag("zeros", True) else count, count, dtype=np.float32)
    return c.b.gather(c.b.constant(lit), place, axis=0)


# --- linear models ----------------------------------------------------------------------------------------------------


def linear_regressor(c: Call) -> Any:
    x = rows_of(c, c.x())
    y = _affine(c, x, _matrix(c, "coefficients", c.integer("targets", 1), x), c.numbers("intercepts"))
    return c.cast(transformed(c, y, c.text("post_transform", "NONE")), f32)


def linear_classifier(c: Call) -> Any:
    """One row of coefficients for two classes: its score is the second one's, the opposite the first one's."""
    x, labels, transform = rows_of(c, c.x()), labels_of(c), c.text("post_transform", "NONE")
    rows = max(len(c.numbers("intercepts") or ()), 1)
    if rows == 1 and isinstance(x.type.shape[1], int):
        rows = max(len(c.numbers("coefficients") or ()) // max(x.type.shape[1], 1), 1)
    y = _affine(c, x, _matrix(c, "coefficients", rows, x), c.numbers("intercepts"))
    if rows > 1:
        return labelled(c, c.b.argmax(y, axis=1, keepdims=False), labels), c.cast(transformed(c, y, transform), f32)
    index, y = one_score(c, y, len(labels), transform)
    return labelled(c, index, labels), c.cast(y, f32)


def one_score(c: Call, y: Value, classes: int, transform: str) -> tuple[Value, Any]:
    """Return class (1 if the only score [rows, 1] is positive) and scores; two classes have opposite scores."""
    index = c.cast(c.b.greater(c.b.reshape(y, shape=(y.type.shape[0],)), 0.0), i64)
    return index, transformed(c, c.b.concat(c.b.neg(y), y, axis=1) if classes == 2 else y, transform)


ML: dict[str, Converter] = {
    "ArrayFeatureExtractor": array_feature_extractor,
    "Binarizer": binarizer,
    "CategoryMapper": category_mapper,
    "FeatureVectorizer": feature_vectorizer,
    "Imputer": imputer,
    "LabelEncoder": label_encoder,
    "LinearClassifier": linear_classifier,
    "LinearRegressor": linear_regressor,
    "Normalizer": normalizer,
    "OneHotEncoder": one_hot_encoder,
    "Scaler": scaler,
}
