"""One node as a model: run by dnnc, compiled, and by another engine, with the same inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import dnnc

Array = Any


def node_model(
    op: str,
    inputs: Sequence[Array | None],
    outputs: int = 1,
    domain: str = "com.microsoft",
    opset: int = 1,
    constants: Sequence[int] = (),
    kinds: Mapping[int, int] | None = None,
    **attrs: Any,
) -> onnx.ModelProto:
    """A model of one node. Inputs whose numbers are in `constants` are initializers; `kinds` gives outputs' dtypes that
    are not f32.
    """
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    made = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, names, made, domain=domain, **attrs)
    given = [(i, x) for i, x in enumerate(inputs) if x is not None]
    kind = [TensorProto.STRING if x.dtype == object else helper.np_dtype_to_tensor_dtype(x.dtype) for _, x in given]
    infos = [helper.make_tensor_value_info(f"x{i}", k, x.shape) for (i, x), k in zip(given, kind) if i not in constants]
    results = [
        helper.make_tensor_value_info(y, (kinds or {}).get(i, TensorProto.FLOAT), None) for i, y in enumerate(made)
    ]
    held = [numpy_helper.from_array(x, f"x{i}") for i, x in given if i in constants]
    graph = helper.make_graph([node], "one", infos, results, held)
    opsets = [helper.make_opsetid("", 21), *([helper.make_opsetid(domain, opset)] if domain else [])]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def feeds(inputs: Sequence[Array | None], constants: Sequence[int] = ()) -> dict[str, Array]:
    return {f"x{i}": x for i, x in enumerate(inputs) if x is not None and i not in constants}


def run_dnnc(model: onnx.ModelProto, feed: Mapping[str, Array], **options: Any) -> list[Array]:
    y = dnnc.compile(model, cache=False, verify=False, **options)(dict(feed))
    return list(y) if isinstance(y, tuple) else [y]


def run_ort(model: onnx.ModelProto, feed: Mapping[str, Array]) -> list[Array]:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(
        None, dict(feed)
    )


# --- ai.onnx.ml -------------------------------------------------------------------------------------------------------


def words(*values: str) -> Any:
    out = np.empty(len(values), object)
    out[:] = values
    return out


def both(
    op: str, inputs: list[Any], outputs: int = 1, opset: int = 3, kinds: dict[int, int] | None = None, **attrs: Any
) -> None:
    model = node_model(op, inputs, outputs, "ai.onnx.ml", opset, kinds=kinds, **attrs)
    feed = feeds(inputs)
    for got, want in zip(run_dnnc(model, feed), run_ort(model, feed), strict=True):
        compare(got, want)


def compare(got: Any, want: Any) -> None:
    assert got.shape == want.shape
    if want.dtype.kind == "f":
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    else:
        assert got.tolist() == want.tolist()


def ours(
    op: str, inputs: list[Any], outputs: int = 1, opset: int = 4, kinds: dict[int, int] | None = None, **attrs: Any
) -> list[Any]:
    return run_dnnc(node_model(op, inputs, outputs, "ai.onnx.ml", opset, kinds=kinds, **attrs), feeds(inputs))
