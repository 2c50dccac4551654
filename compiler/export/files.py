"""ONNX models on disk: written at once, large weights in a file beside; and checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from dnnc.ir.errors import InputError, InternalError, ModelError, UnsupportedError
from dnnc.ir.files import replacing

LIMIT = (1 << 31) - (1 << 20)  # bytes of a protobuf, with room for all that is no weight
LARGE = 1 << 10  # bytes from which on a tensor goes into the other file
ALIGN = 1 << 12
SPARSE = 6  # version of the file format that has sparse initializers
DATA = ".data"  # appended to the name of a model: the file of its large weights


def nbytes(model: onnx.ModelProto) -> int:
    return sum(len(t.raw_data) for t in model.graph.initializer)


def write(model: onnx.ModelProto, path: str | os.PathLike[str]) -> None:
    """Write a model, weights beyond a protobuf's limit to `path` + ".data". ModelError: a file cannot be written."""
    target = Path(path)
    try:
        with replacing(target) as file:
            if nbytes(model) < LIMIT:
                file.write(model.SerializeToString())
                return
            name = target.name + DATA
            with replacing(
                target.with_name(name)
            ) as weights:  # renamed last but one: a full disk leaves both old files
                _move_out(model, weights, name)
                file.write(model.SerializeToString())
                file.flush()
    except OSError as e:
        raise ModelError(f"{target} cannot be written: {e}") from e


def with_sparse_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose large weights of many zeros are sparse initializers, where these take less room: 8 bytes an index.

    What is not stored reads as 0: negative zeros are stored. Inputs with default values stay dense.
    """
    out, given = onnx.ModelProto(), {v.name for v in model.graph.input}
    out.CopyFrom(model)
    del out.graph.initializer[:]
    for t in model.graph.initializer:
        made = _sparse(t) if len(t.raw_data) >= LARGE and t.data_type == TensorProto.FLOAT else None
        if made is None or t.name in given:
            out.graph.initializer.append(t)
        else:
            out.graph.sparse_initializer.append(made)
            out.ir_version = max(out.ir_version, SPARSE)
    return out


def _sparse(t: onnx.TensorProto) -> onnx.SparseTensorProto | None:
    """A float32 tensor with sorted flat indices; None where the dense one is no larger."""
    array = numpy_helper.to_array(t).reshape(-1)
    at = np.flatnonzero(array.view(np.uint32))
    if len(at) * (array.itemsize + 8) >= array.nbytes:
        return None
    values, indices = (numpy_helper.from_array(a, t.name) for a in (array[at], at.astype(np.int64)))
    return helper.make_sparse_tensor(values, indices, list(t.dims))


def _move_out(model: onnx.ModelProto, f: Any, name: str) -> None:
    """Write the data of large tensors to a file, and leave their places in the model."""
    at = 0
    for t in model.graph.initializer:
        size = len(t.raw_data)
        if size < LARGE:
            continue
        gap = -at % ALIGN
        f.write(bytes(gap) + t.raw_data)
        t.ClearField("raw_data")
        t.data_location = TensorProto.EXTERNAL
        del t.external_data[:]
        for key, value in (("location", name), ("offset", at + gap), ("length", size)):
            t.external_data.add(key=key, value=str(value))
        at += gap + size


def check(model: onnx.ModelProto, path: str | os.PathLike[str] | None) -> None:
    """Run onnx's checker, with shape inference. InternalError where it finds a fault: the model is ours."""
    large = nbytes(model) >= LIMIT or any(t.data_location == TensorProto.EXTERNAL for t in model.graph.initializer)
    if large and path is None:
        raise InputError("the model is larger than 2 GB, which a protobuf cannot hold: give a path")
    try:
        onnx.checker.check_model(os.fspath(path) if large and path is not None else model, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as e:
        if "unsupported type" in str(e):
            raise UnsupportedError(f"ONNX's operators do not take a type that stands here: {e}") from e
        raise InternalError(
            f"the exported model is not valid: {e}; please report it with the graph (`print(graph)`)"
        ) from e
