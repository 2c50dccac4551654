"""The node models of ONNX's conformance suite: imported, exported, and imported again, with the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx.backend.test.case.node import collect_testcases

from dnnc.export import to_onnx
from dnnc.export.graph import Refused
from dnnc.frontends.onnx import NeedsValues, from_onnx, read_model
from dnnc.ir.errors import DnncError
from dnnc.ir.graph.interp import run

pytestmark = pytest.mark.slow

LEAST = 1300  # models that are compared; the others have no tensors for inputs, or sizes that only their inputs tell
REFUSED: set[str] = set()


def same(a: Any, b: Any) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if b.dtype == object:
        return bool((a == b).all())
    bound = 1e-5 if b.dtype.itemsize >= 4 else 0.02 if b.dtype.itemsize == 2 else 0.3
    x, y = (v if b.dtype.kind == "c" else v.astype(np.float64) for v in (a, b))
    scale = np.abs(y[np.isfinite(y)]).max(initial=1)
    return bool(np.allclose(x, y, rtol=0, atol=bound * scale, equal_nan=True))


def test_node_models() -> None:
    compared, refused = 0, set()
    for case in collect_testcases(None):
        try:
            made = read_model(case.model)
            feed = dict(zip((i.name for i in case.model.graph.input), case.data_sets[0][0]))
            arrays = [np.asarray(feed[n]).astype(v.type.dtype.numpy) for n, v in zip(made.inputs, made.graph.inputs)]
            want = run(made.graph, arrays)
        except (DnncError, KeyError, ValueError, TypeError, AttributeError, IndexError):
            continue  # not a model that can be read ahead of a call
        try:
            again = from_onnx(to_onnx(made.graph))
        except Refused as e:
            refused.add(str(e).split("(")[1].split(",")[0])
            continue
        except NeedsValues:
            continue
        got = run(again, arrays)
        assert all(same(a, b) for a, b in zip(got, want, strict=True)), case.name
        compared += 1
    assert compared >= LEAST and refused == REFUSED
