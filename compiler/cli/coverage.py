"""How each ONNX operator is read: a table for `dnnc ops --onnx`. Apart from the other commands because it loads onnx."""

from __future__ import annotations

from dnnc.frontends.onnx import schemas
from dnnc.frontends.onnx.image_decode import IMAGE_DECODE
from dnnc.frontends.onnx.known import RULES
from dnnc.frontends.onnx.reader import LATEST
from dnnc.frontends.onnx.strings import STRINGS
from dnnc.frontends.onnx.tables import CONVERTERS

ON_HOST = frozenset((*STRINGS, *IMAGE_DECODE))  # all others are native, but for their forms on strings and for cutting a result to its size


def coverage() -> dict[str, str]:
    """Operator -> how it is read; an empty text where it is not. The operators are those of ONNX's own domain, old ones included."""
    return {name: _how(name) for name in sorted(schemas.names(""))}


def _how(name: str) -> str:
    if ("", name) in CONVERTERS:
        return "a converter; runs on the host" if name in ON_HOST else "a converter"
    schema = schemas.find("", name, LATEST[""])
    if schema is not None and (schema.has_function or schema.has_context_dependent_function):
        return "its function body"
    return "shape arithmetic" if ("", name) in RULES else ""
