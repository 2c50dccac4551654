"""The one table of converters: (domain, operator) -> function of a Call that returns what the node makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dnnc.frontends.onnx.call import Call
from dnnc.frontends.onnx.control import CONTROL
from dnnc.frontends.onnx.elementwise import ELEMENTWISE
from dnnc.frontends.onnx.image import IMAGE
from dnnc.frontends.onnx.index import INDEX
from dnnc.frontends.onnx.linear import LINEAR
from dnnc.frontends.onnx.nn import NN
from dnnc.frontends.onnx.norm import NORM
from dnnc.frontends.onnx.quantize import QUANTIZE
from dnnc.frontends.onnx.reduce import REDUCE
from dnnc.frontends.onnx.resize import RESIZE
from dnnc.frontends.onnx.rnn import RNN
from dnnc.frontends.onnx.signal import SIGNAL
from dnnc.frontends.onnx.tensor import TENSOR
from dnnc.frontends.onnx.training import TRAINING

FAMILIES: tuple[dict[str, Callable[[Call], Any]], ...] = (
    ELEMENTWISE,
    REDUCE,
    LINEAR,
    NN,
    NORM,
    TENSOR,
    INDEX,
    QUANTIZE,
    CONTROL,
    RESIZE,
    RNN,
    SIGNAL,
    IMAGE,
)
CONVERTERS: dict[tuple[str, str], Callable[[Call], Any]] = {("", name): f for family in FAMILIES for name, f in family.items()}
CONVERTERS |= {("ai.onnx.preview.training", name): f for name, f in TRAINING.items()}
