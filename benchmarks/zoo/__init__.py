"""The models that the benchmarks run: a folder of `.onnx` files with a manifest, written by `python benchmarks/zoo
build`.

This module reads such a folder and needs numpy and onnx alone; what builds it (torch, timm, transformers) is imported
by the builder. A row of `manifest.json` describes one model: name, inputs (name, dtype, shape, how to fill them),
operators, GFLOP, and its file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from zoo.seeded import materialize

Array = np.ndarray[Any, Any]
QUANTIZED = (
    "QuantizeLinear",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "Integer",
    "QLinear",
    "DynamicQuantize",
    "QGemm",
)

__all__ = ["is_quantized", "load", "make_inputs", "materialize", "read_manifest"]


def read_manifest(folder: str | Path) -> dict[str, dict[str, Any]]:
    """The rows of a folder's manifest by name, in its order. FileNotFoundError says how to make one."""
    path = Path(folder) / "manifest.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; build models with `python benchmarks/zoo build {folder}`")
    return {row["name"]: row for row in json.loads(path.read_text())["models"]}


def make_inputs(row: Mapping[str, Any], seed: int = 0) -> dict[str, Array]:
    """Arrays for a model's inputs, the same for the same seed.

    How an input is filled: `value` everywhere; with `prefix` the first elements of each row are 1, the others 0 (at
        least one is 1, as in a
    mask of padded sequences); else floats uniform in [lo, hi), or normal with `scale` and `shift`; integers in [lo,
    hi), [0, 2) by default, in ascending order along the last axis with `sorted`; bools that are true with probability
    `p`.
    """
    rng = np.random.RandomState(1000 * row.get("seed", 0) + seed)
    return {i["name"]: _fill(rng, i) for i in row["inputs"]}


def _fill(rng: np.random.RandomState, i: Mapping[str, Any]) -> Array:
    shape, dtype = tuple(i["shape"]), np.dtype(i["dtype"])
    if "value" in i:
        return np.full(shape, i["value"], dtype)
    if i.get("prefix"):
        lengths = rng.randint(1, shape[-1] + 1, (*shape[:-1], 1))
        return np.asarray(np.arange(shape[-1]) < lengths).astype(dtype)
    if dtype.kind == "b":
        return np.asarray(rng.random_sample(shape) < i.get("p", 1.0))
    if dtype.kind in "iu":
        integers = np.asarray(rng.randint(i.get("lo", 0), i.get("hi", 2), shape)).astype(dtype)
        return np.sort(integers, -1) if i.get("sorted") else integers
    if "lo" in i:
        return np.asarray(rng.uniform(i["lo"], i["hi"], shape)).astype(dtype)
    return np.asarray(rng.standard_normal(shape) * i.get("scale", 1.0) + i.get("shift", 0.0)).astype(dtype)


def is_quantized(row: Mapping[str, Any]) -> bool:
    """Does the model compute in integers somewhere?"""
    return any(mark in op for op in row["ops"] for mark in QUANTIZED)


def load(folder: str | Path, row: Mapping[str, Any]) -> onnx.ModelProto:
    """A model with its weights. Initializers are constants: old files list them as inputs too, which keeps runtimes
    from packing them.
    """
    model = materialize(Path(folder) / f"{row['name']}.onnx")
    constant = {t.name for t in model.graph.initializer}
    inputs = [i for i in model.graph.input if i.name not in constant]
    if len(inputs) < len(model.graph.input):
        del model.graph.input[:]
        model.graph.input.extend(inputs)
        model.ir_version = max(model.ir_version, 4)  # from which on an initializer need not be an input
    return model
