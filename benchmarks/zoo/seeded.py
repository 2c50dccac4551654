"""Models that travel without their weights: every larger tensor is replaced by a recipe, from which NumPy makes values
of the same kind.

In: an onnx.ModelProto. Out: a small one whose tensors over LIMIT bytes are marked as external data with location
`seeded` and a recipe in JSON beside it: rule, seed, and the moments and range of the original. `materialize` fills them
again, bit for bit the same everywhere: the numbers come from the raw stream of PCG64 by integer arithmetic. The values
differ from the originals, the work does not.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

Array = np.ndarray[Any, Any]
Recipe = dict[str, Any]
LIMIT = 1024  # bytes of a tensor that stays in the file
LOCATION = "seeded"
SAMPLE = 1 << 16  # bytes that tell whether a tensor is worth compressing
CHUNK = 1 << 22  # numbers made at a time
DATA_FIELDS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data", "external_data")


def tensors(model: ModelProto) -> Iterator[TensorProto]:
    """All tensors of a model in a fixed order: initializers and attributes, in subgraphs and functions too."""
    yield from _graph_tensors(model.graph)
    for f in model.functions:
        for n in f.node:
            yield from _node_tensors(n)


def _graph_tensors(g: GraphProto) -> Iterator[TensorProto]:
    yield from g.initializer
    for n in g.node:
        yield from _node_tensors(n)


def _node_tensors(n: NodeProto) -> Iterator[TensorProto]:
    for a in n.attribute:
        if a.type == AttributeProto.TENSOR:
            yield a.t
        elif a.type == AttributeProto.GRAPH:
            yield from _graph_tensors(a.g)
        elif a.type == AttributeProto.GRAPHS:
            for g in a.graphs:
                yield from _graph_tensors(g)


def recipe_of(t: TensorProto) -> Recipe | None:
    """The recipe of a marked tensor."""
    entries = {e.key: e.value for e in t.external_data}
    return json.loads(entries["recipe"]) if entries.get("location") == LOCATION else None


def mark(t: TensorProto, recipe: Recipe) -> None:
    """Put a recipe in the place of a tensor's data."""
    for field in DATA_FIELDS:
        t.ClearField(field)
    t.data_location = TensorProto.EXTERNAL
    for key, value in (("location", LOCATION), ("recipe", json.dumps(recipe))):
        t.external_data.add(key=key, value=value)


def seed_model(model: ModelProto) -> ModelProto:
    """The model with a recipe for every tensor over LIMIT bytes."""
    small = ModelProto()
    small.CopyFrom(model)
    for k, t in enumerate(tensors(small)):
        if t.data_type == TensorProto.STRING:
            continue
        a = numpy_helper.to_array(t)
        if a.nbytes > LIMIT:
            mark(t, describe(a, k + 1))
    for n in small.graph.node:  # stack traces of the exporter
        n.ClearField("metadata_props")
        n.ClearField("doc_string")
    return small


def describe(a: Array, seed: int) -> Recipe:
    """A recipe for an array: `exact` for what has structure (masks, tables of indices), else its distribution.

    Positive floats (variances, gains) stay positive by a normal distribution of their logarithm; bytes of quantized
    weights are rounded.
    """
    kind = a.dtype.kind
    by_chance = kind in "fV" or (a.dtype.itemsize == 1 and kind in "iu")
    values = a.astype(np.float64) if by_chance else a
    if not by_chance or not np.isfinite(values).all() or _has_structure(a):
        return {"rule": "exact", "zlib": base64.b64encode(zlib.compress(a.tobytes(), 9)).decode()}
    low, high = float(values.min()), float(values.max())
    rule = "lognormal" if kind in "fV" and low > 0 else "normal"
    base = np.log(values) if rule == "lognormal" else values
    return {"rule": rule, "seed": seed, "mean": float(base.mean()), "std": float(base.std()), "low": low, "high": high}


def _has_structure(a: Array) -> bool:
    """Few different values, or regular ones: random weights do not compress to a tenth."""
    head = a.tobytes()[:SAMPLE]
    return len(zlib.compress(head, 1)) * 10 < len(head)


def scaled(recipe: Recipe, factor: float) -> Recipe:
    """The recipe of the same tensor times `factor`, which is positive."""
    out = {**recipe, "low": recipe["low"] * factor, "high": recipe["high"] * factor}
    if recipe["rule"] == "lognormal":
        return {**out, "mean": recipe["mean"] + float(np.log(factor))}
    return {**out, "mean": recipe["mean"] * factor, "std": recipe["std"] * factor}


def regenerate(recipe: Recipe, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """The array that a recipe stands for."""
    if recipe["rule"] == "exact":
        return np.frombuffer(zlib.decompress(base64.b64decode(recipe["zlib"])), dtype).reshape(shape)
    out = np.empty(int(np.prod(shape)), dtype)
    bits = np.random.PCG64(recipe["seed"])
    for start in range(0, out.size, CHUNK):
        x = _bell(bits, min(CHUNK, out.size - start))
        x *= recipe["std"]
        x += recipe["mean"]
        if recipe["rule"] == "lognormal":
            np.exp(x, out=x)
        if dtype.kind in "iu":
            np.rint(x, out=x)
        out[start : start + x.size] = np.clip(x, recipe["low"], recipe["high"], out=x)
    return out.reshape(shape)


def _bell(bits: np.random.PCG64, n: int) -> Array:
    """n numbers of mean 0, deviation 1: sums of four uniform 16-bit integers, near normal to 3.4 deviations."""
    words = np.asarray(bits.random_raw(n)).view(np.uint16).reshape(n, 4)
    total = words[:, 0].astype(np.float64)
    for k in (1, 2, 3):
        total += words[:, k]
    total -= 2 * 65535
    total *= np.sqrt(3.0 / (65536.0**2 - 1))  # the variance of one is (65536^2 - 1) / 12
    return total


def materialize(path: str | Path) -> ModelProto:
    """A model with all its data, from a seeded file or an ordinary one; ordinary external data must lie beside it."""
    path = Path(path)
    model = onnx.load(str(path), load_external_data=False)
    ordinary = [t for t in tensors(model) if t.data_location == TensorProto.EXTERNAL and recipe_of(t) is None]
    for t in ordinary:
        onnx.external_data_helper.load_external_data_for_tensor(t, str(path.parent))
        t.data_location = TensorProto.DEFAULT
        t.ClearField("external_data")
    fill(model)
    return model


def fill(model: ModelProto) -> None:
    """Regenerate the data of all marked tensors in place."""
    for t in tensors(model):
        recipe = recipe_of(t)
        if recipe is None:
            continue
        dtype = onnx.helper.tensor_dtype_to_np_dtype(t.data_type)
        t.raw_data = regenerate(recipe, tuple(t.dims), np.dtype(dtype)).tobytes()
        t.ClearField("external_data")
        t.data_location = TensorProto.DEFAULT
