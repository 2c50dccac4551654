"""Float numbers that torch computes from sizes, as values of a graph."""

from __future__ import annotations

from functools import reduce
from typing import Any

from dnnc.frontends.torch.dims import Dims
from dnnc.ir.dtype import f64
from dnnc.ir.errors import UnsupportedError
from dnnc.ir.expr import Expr
from dnnc.ir.graph import Value
from dnnc.ir.graph.builder import Builder

BINARY = {"FloatTrueDiv": "div", "IntTrueDiv": "div", "FloatPow": "pow", "Pow": "pow"}
UNARY = {"OpaqueUnaryFn_sqrt": "sqrt", "OpaqueUnaryFn_log": "log", "OpaqueUnaryFn_exp": "exp"}
MANY = {"Add": "add", "Mul": "mul", "Max": "max", "Min": "min"}


def real(b: Builder, dims: Dims, e: Any) -> Value:
    """A sympy expression as an f64 without axes. UnsupportedError names a function that has no form."""
    kind = type(e).__name__
    if e.is_number:
        made: Value = b.constant(float(e), dtype=f64)
    elif e.is_integer:
        d = dims.of(e)
        made = b.full(shape=(), value=d, dtype=f64) if isinstance(d, Expr) else b.constant(float(d), dtype=f64)
    elif kind == "ToFloat":
        made = real(b, dims, e.args[0])
    elif kind in BINARY or kind in UNARY or kind in MANY:
        op = BINARY.get(kind) or UNARY.get(kind) or MANY[kind]
        args = [real(b, dims, a) for a in e.args]
        made = b.op(op, *args) if kind in UNARY else reduce(lambda x, y: b.op(op, x, y), args)
    else:
        raise UnsupportedError(f"the number {e} depends on sizes; fix them, or compute it in a tensor")
    return made
