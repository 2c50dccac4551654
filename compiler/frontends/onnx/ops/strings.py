"""Operators on strings of ONNX's own domain, and the forms that Equal, Cast and CastLike have on strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dnnc.frontends.onnx.call import Call
from dnnc.frontends.onnx.unbacked_dims import fresh_dim
from dnnc.ir.dtype import DType, f32, string
from dnnc.ir.errors import ModelError
from dnnc.ir.graph import Value

CASES = {"NONE": "none", "LOWER": "lower", "UPPER": "upper"}


def concat(c: Call) -> Any:
    return c.b.string_concat(c.x(0), c.x(1))


def full_match(c: Call) -> Any:
    return c.b.string_match(c.x(), pattern=c.text("pattern"))


def split(c: Call) -> Any:
    maxsplit = c.integer("maxsplit", -1)
    return c.b.string_split(
        c.x(), size=fresh_dim(c), delimiter=c.text("delimiter"), maxsplit=maxsplit if maxsplit > 0 else -1
    )


def normalize(c: Call) -> Any:
    """`locale` is not looked at: case is Unicode's, whatever the locale."""
    x = c.x()
    action = c.text("case_change_action", "NONE")
    if action not in CASES:
        raise ModelError(f"attribute case_change_action must be one of {', '.join(CASES)}; got {action!r}")
    stopwords = c.texts("stopwords") or ()
    most = x.type.shape[-1] if x.type.rank else 1
    if stopwords and isinstance(most, int):
        most = max(most, 1)  # none left is one empty string
    size = fresh_dim(c, most if isinstance(most, int) else None) if stopwords else most
    return c.b.string_normalize(
        x, size=size, case=CASES[action], stopwords=stopwords, sensitive=c.flag("is_case_sensitive")
    )


def cast(c: Call, x: Value, to: DType) -> Any:
    """Convert between strings and numbers. Narrow floats are parsed as f32 and printed with their own digits."""
    if to is string:
        return x if x.type.dtype is string else c.b.to_string(x)
    if to.bits >= 32 or not to.is_float:
        return c.b.from_string(x, to=to)
    return c.b.cast(c.b.from_string(x, to=f32), to=to, saturate=c.flag("saturate", True))


STRINGS: dict[str, Callable[[Call], Any]] = {
    "StringConcat": concat,
    "StringSplit": split,
    "StringNormalizer": normalize,
    "RegexFullMatch": full_match,
}
