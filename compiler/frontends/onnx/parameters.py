"""Weights that are parameters: initializers become inputs before the import, which cannot read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import GraphProto, helper

from dnnc.frontends.onnx.reader import Model, initial_arrays
from dnnc.ir.errors import InputError

Array = np.ndarray[Any, Any]
Bound = dict[str, Any]


def bound_weights(model: Model, parameters: Mapping[str, Any] | Sequence[str] | bool) -> tuple[Model, Bound]:
    """Make initializers of these names (True: all floats) inputs, and return their values. InputError: no such."""
    arrays = initial_arrays(model.graph, model.folder)
    wanted: Mapping[str, Any]
    if isinstance(parameters, bool):
        wanted = {n: None for n, a in arrays.items() if parameters and a.size > 1 and _is_float(a)}
    else:
        wanted = parameters if isinstance(parameters, Mapping) else dict.fromkeys(parameters)
    for n in wanted:
        if n not in arrays:
            raise InputError(
                f"parameters: the model has no initializer {n!r}; it has {', '.join(list(arrays)[:20]) or 'none'}"
            )
    g = GraphProto()
    for field in ("node", "output", "value_info", "quantization_annotation", "metadata_props"):
        getattr(g, field).extend(getattr(model.graph, field))
    g.name = model.graph.name
    elements = {t.name: t.data_type for t in model.graph.initializer}
    elements |= {t.values.name: t.values.data_type for t in model.graph.sparse_initializer}
    g.initializer.extend(t for t in model.graph.initializer if t.name not in wanted)
    g.sparse_initializer.extend(t for t in model.graph.sparse_initializer if t.values.name not in wanted)
    g.input.extend(i for i in model.graph.input if i.name not in wanted)
    for n in wanted:
        g.input.append(helper.make_tensor_value_info(n, elements[n], arrays[n].shape))
    return replace(model, graph=g), {n: arrays[n] if a is None else a for n, a in wanted.items()}


def _is_float(a: Array) -> bool:
    return bool(a.dtype.kind == "f" or a.dtype.name == "bfloat16")
