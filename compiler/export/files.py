"""ONNX models on disk: written at once, large weights in a file beside; and checked."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto

from dnnc.ir.errors import InputError, InternalError, ModelError, UnsupportedError
from dnnc.ir.files import replacing

LIMIT = (1 << 31) - (1 << 20)  # bytes of a protobuf, with room for all that is no weight
LARGE = 1 << 10  # bytes from which on a tensor goes into the other file
ALIGN = 1 << 12
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
