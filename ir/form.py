"""How values are made up that are no single array: lists, dicts and None as trees of arrays.

A model's type says what may come (`Kind`), a call what comes (`Form`): lengths of lists, optional values, keys of
dicts. Graphs know arrays only, so a model is read for the form of its inputs, and tells the form of its outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dnnc.ir.dtype import DType


@dataclass(frozen=True)
class Kind:
    """A value's kind: "tensor", "sequence" (of `element`), "optional" (`element` or None), "map" (`key` dtype).

    `dtype` is of a tensor's elements or a map's values. `rank` is None where nothing is declared, and always within
    sequences: what models declare there is not what they get.
    """

    kind: str
    dtype: DType | None = None
    rank: int | None = None
    element: Kind | None = None
    key: DType | None = None

    @property
    def plain(self) -> bool:
        """Is it a tensor of known rank?"""
        return self.kind == "tensor" and self.rank is not None

    def __str__(self) -> str:
        if self.kind == "tensor":
            return str(self.dtype.numpy) if self.dtype is not None and self.dtype.kind != "s" else "str"
        if self.kind == "map":
            return f"map({self.key}, {self.dtype})"
        return f"{'seq' if self.kind == 'sequence' else self.kind}({self.element})"


@dataclass(frozen=True)
class Form:
    """Structure of a value: "array", "nothing", "list" of `items`, "dict" (array [keys]), "dicts" ([n, keys])."""

    kind: str
    items: tuple[Form, ...] = ()
    keys: tuple[Any, ...] = ()


ARRAY, NOTHING = Form("array"), Form("nothing")


def item_name(name: str, k: int) -> str:
    """What the k-th item of a list is called."""
    return f"{name}[{k}]"
