"""The one table of converters: (domain, operator) -> function of a Call that returns what the node makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dnnc.frontends.onnx.call import Call
from dnnc.frontends.onnx.control import CONTROL
from dnnc.frontends.onnx.dynamic import DYNAMIC
from dnnc.frontends.onnx.elementwise import ELEMENTWISE
from dnnc.frontends.onnx.image import IMAGE
from dnnc.frontends.onnx.image_decode import IMAGE_DECODE
from dnnc.frontends.onnx.index import INDEX
from dnnc.frontends.onnx.linear import LINEAR
from dnnc.frontends.onnx.maps import MAPS
from dnnc.frontends.onnx.microsoft import MICROSOFT, UNLISTED
from dnnc.frontends.onnx.ml import ML
from dnnc.frontends.onnx.nn import NN
from dnnc.frontends.onnx.norm import NORM
from dnnc.frontends.onnx.quantize import QUANTIZE
from dnnc.frontends.onnx.random_ops import RANDOM
from dnnc.frontends.onnx.reduce import REDUCE
from dnnc.frontends.onnx.resize import RESIZE
from dnnc.frontends.onnx.rnn import RNN
from dnnc.frontends.onnx.sequence import SEQUENCE
from dnnc.frontends.onnx.signal import SIGNAL
from dnnc.frontends.onnx.sort import SORT
from dnnc.frontends.onnx.strings import STRINGS
from dnnc.frontends.onnx.svm import SVM
from dnnc.frontends.onnx.tensor import TENSOR
from dnnc.frontends.onnx.text import TEXT
from dnnc.frontends.onnx.training import TRAINING
from dnnc.frontends.onnx.trees import TREES
from dnnc.frontends.onnx.vision import VISION

FAMILIES: tuple[dict[str, Callable[[Call], Any]], ...] = (
    ELEMENTWISE,
    REDUCE,
    LINEAR,
    NN,
    NORM,
    TENSOR,
    INDEX,
    DYNAMIC,
    QUANTIZE,
    CONTROL,
    SEQUENCE,
    RANDOM,
    RESIZE,
    RNN,
    SIGNAL,
    IMAGE,
    IMAGE_DECODE,
    STRINGS,
    TEXT,
    SORT,
    VISION,
)
CONVERTERS: dict[tuple[str, str], Callable[[Call], Any]] = {("", name): f for family in FAMILIES for name, f in family.items()}
CONVERTERS |= {("ai.onnx.preview.training", name): f for name, f in TRAINING.items()}
CONVERTERS |= {("ai.onnx.ml", name): f for name, f in (MAPS | ML | SVM | TREES).items()}
CONVERTERS |= {("com.microsoft", name): f for name, f in MICROSOFT.items()}
# operators that converters know, but for which ONNX has no schema
WITHOUT_SCHEMA = frozenset([("com.microsoft", name) for name in MICROSOFT] + [("", name) for name in UNLISTED])
CONVERTERS |= {("", name): f for name, f in UNLISTED.items()}
