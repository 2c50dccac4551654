"""A node as if it were one of ONNX's own operators: what converters of other domains share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dnnc.frontends.onnx.call import Call, Item, of_value
from dnnc.ir.graph import Value

OPSET = 21  # that the converters of other domains take ONNX's own ones at


def standard(
    c: Call,
    op: str,
    items: Sequence[Item | Value | None] | None = None,
    attrs: Mapping[str, Any] | None = None,
    opset: int = OPSET,
) -> Call:
    """Return the call as operator `op` of the default domain, with other inputs or attributes if passed."""
    given = c.items if items is None else [of_value(i) if isinstance(i, Value) else i for i in items]
    return Call(c.b, op, "", opset, given, dict(c.attrs if attrs is None else attrs), c.outputs, c.env)


def last_to_second(c: Call, x: Value) -> Any:
    """Channels from the last axis to axis 1."""
    rank = x.type.rank
    return c.b.transpose(x, perm=(0, rank - 1, *range(1, rank - 1)))


def second_to_last(c: Call, x: Value) -> Any:
    return c.b.transpose(x, perm=(0, *range(2, x.type.rank), 1))
