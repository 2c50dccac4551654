"""What a function takes, as far as a trace has to know it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.array.promotion import dtype_of
from dnnc.array.sizes import Size
from dnnc.ir.errors import InputError
from dnnc.ir.expr import Expr, const, dim, op, unwrap
from dnnc.ir.graph.text import is_reserved

_OPERATORS: dict[type[ast.AST], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%"}


@dataclass(frozen=True)
class Spec:
    """Shape and dtype of an argument: `Spec((32, 10))`, `Spec((), "int64")`, `Spec(("n", 3))`.

    A size that is a name may be any number from 1 on, the same wherever the name stands; `"2*n + 1"` is a size that
    follows from it. In `shape` these are expressions.
    """

    shape: tuple[Any, ...]
    dtype: Any = "float32"

    def __post_init__(self) -> None:
        shape = self.shape if isinstance(self.shape, (tuple, list)) else (self.shape,)
        object.__setattr__(self, "shape", tuple(_dim(d, self.shape) for d in shape))
        object.__setattr__(self, "dtype", dtype_of(self.dtype))

    @property
    def symbolic(self) -> bool:
        return any(isinstance(d, Expr) for d in self.shape)


def _dim(d: Any, shape: Any) -> Any:
    """A size: a number, an expression of names, or what `x.shape` holds."""
    if isinstance(d, (str, Size, Expr)):
        return parsed(d) if isinstance(d, str) else d.dim if isinstance(d, Size) else unwrap(d)
    if isinstance(d, bool) or not isinstance(d, (int, np.integer)) or d < 0:
        raise InputError(
            f"Spec: expected a shape of integers that are not negative, or names such as 'n', got {shape!r}"
        )
    return int(d)


def parsed(text: str) -> Any:
    """A size from text such as `n` or `2*n + 1`. InputError where it is none."""
    try:
        tree = ast.parse(text, mode="eval").body
        return unwrap(_read(tree))
    except (SyntaxError, ValueError, TypeError):
        raise InputError(f"Spec: {text!r} is no size; expected a number, a name, or + - * // % of these") from None


def _read(e: ast.expr) -> Expr:
    if isinstance(e, ast.Constant) and type(e.value) is int:
        return const(e.value)
    if isinstance(e, ast.Name) and not is_reserved(e.id) and e.id.isascii():
        return dim(e.id)
    if isinstance(e, ast.BinOp) and type(e.op) in _OPERATORS:
        return op(_OPERATORS[type(e.op)], _read(e.left), _read(e.right))
    raise ValueError
