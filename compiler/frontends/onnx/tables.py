"""The one table of converters: (domain, operator) -> function of a Call that returns what the node makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dnnc.frontends.onnx.call import Call
from dnnc.frontends.onnx.microsoft.fused import MICROSOFT, UNLISTED
from dnnc.frontends.onnx.ml.linear import ML
from dnnc.frontends.onnx.ml.maps import MAPS
from dnnc.frontends.onnx.ml.ngrams import TEXT
from dnnc.frontends.onnx.ml.svm import SVM
from dnnc.frontends.onnx.ml.trees import TREES
from dnnc.frontends.onnx.ops.control import CONTROL
from dnnc.frontends.onnx.ops.dynamic import DYNAMIC
from dnnc.frontends.onnx.ops.elementwise import ELEMENTWISE
from dnnc.frontends.onnx.ops.gather_scatter import INDEX
from dnnc.frontends.onnx.ops.gradient import DOMAIN, GRADIENT
from dnnc.frontends.onnx.ops.image import IMAGE
from dnnc.frontends.onnx.ops.image_decode import IMAGE_DECODE
from dnnc.frontends.onnx.ops.linear import LINEAR
from dnnc.frontends.onnx.ops.movement import TENSOR
from dnnc.frontends.onnx.ops.nn import NN
from dnnc.frontends.onnx.ops.norm import NORM
from dnnc.frontends.onnx.ops.quantize import QUANTIZE
from dnnc.frontends.onnx.ops.random import RANDOM
from dnnc.frontends.onnx.ops.reduce import REDUCE
from dnnc.frontends.onnx.ops.resize import RESIZE
from dnnc.frontends.onnx.ops.rnn import RNN
from dnnc.frontends.onnx.ops.sequence import SEQUENCE
from dnnc.frontends.onnx.ops.signal import SIGNAL
from dnnc.frontends.onnx.ops.sort import SORT
from dnnc.frontends.onnx.ops.strings import STRINGS
from dnnc.frontends.onnx.ops.training import TRAINING
from dnnc.frontends.onnx.ops.vision import VISION

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
CONVERTERS: dict[tuple[str, str], Callable[[Call], Any]] = {
    ("", name): f for family in FAMILIES for name, f in family.items()
}
CONVERTERS |= {(DOMAIN, name): f for name, f in (TRAINING | GRADIENT).items()}
CONVERTERS |= {("ai.onnx.ml", name): f for name, f in (MAPS | ML | SVM | TREES).items()}
CONVERTERS |= {("com.microsoft", name): f for name, f in MICROSOFT.items()}
# operators that converters know, but for which ONNX has no schema
WITHOUT_SCHEMA = frozenset([("com.microsoft", name) for name in MICROSOFT] + [("", name) for name in UNLISTED])
CONVERTERS |= {("", name): f for name, f in UNLISTED.items()}
