"""Kernels that users write in CuPy's notation: typed parameters and C-like expressions.

In: texts such as `"T x, T y"` and `"z = (x - y) * (x - y)"`. Out: callables on arrays, whose results are lazy like all
others: a kernel is the graph IR ops of its text, so it fuses, and is scheduled, tuned and checked as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.array.c_values import BOOL, Evaluator, Value, converted, literal
from dnnc.array.core import Array, array_of
from dnnc.array.errors import ValueInputError
from dnnc.array.kernel_parameters import Parameter, bound, signature, variables_of
from dnnc.array.lazy import Lazy, apply
from dnnc.array.manipulation import Axes, axes_of, broadcast_shapes, broadcast_to
from dnnc.array.notation import C_TYPES, DTYPES, Assignment, Cast, Expression, Name, Number, Operation, Source
from dnnc.array.notation_parser import parse_expression, parse_statements
from dnnc.array.promotion import DType
from dnnc.ir.errors import InputError

Result = Any  # an Array, or a tuple of them where a kernel has several outputs


def _results(
    outputs: Sequence[Parameter], evaluator: Evaluator, known: dict[str, Value], shape: tuple[int, ...]
) -> list[Array]:
    return [broadcast_to(array_of(converted(known[p.name], evaluator.dtype(p.type)).lazy), shape) for p in outputs]


# --- element-wise kernels ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ElementwiseKernel:
    """A function of arrays and numbers, which broadcast. Made by `elementwise_kernel`."""

    name: str
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]
    source: Source
    statements: tuple[Assignment, ...]

    def __call__(self, *args: Any) -> Result:
        """The outputs for arrays and numbers, one for each input.

        Returns:
            A lazy Array of the shape to which the inputs broadcast, or a tuple of them where there are several outputs.

        Raises:
            InputError: the arguments' number or types do not fit.
            ParseError: an operator of the text does not take the types of this call.
        """
        what = f"kernel {self.name!r}"
        arrays, types = bound(what, self.inputs, args)
        evaluator = Evaluator(self.source, types)
        known = evaluator.run(list(self.statements), {p.name: Value(x._parts[0]) for p, x in zip(self.inputs, arrays)})
        made = _results(self.outputs, evaluator, known, broadcast_shapes(*(x.shape for x in arrays)))
        return made[0] if len(made) == 1 else tuple(made)


def elementwise_kernel(in_params: str, out_params: str, operation: str, name: str = "kernel") -> ElementwiseKernel:
    """A function of each element, in CuPy's notation.

    Args:
        in_params: types and names, as in `"T x, float32 y"`; a single letter is a type variable, the dtype of the
            arrays given for it.
        out_params: the same for the results; their type variables occur among the inputs.
        operation: C-like assignments, as in `"float d = x - y; z = d * d"`.
        name: name of the kernel in errors.

    Raises:
        ParseError: a text does not follow the notation; the message shows the place.
        UnsupportedError: it uses loops, pointers, indices or other constructs that kernels do not have.
    """
    what = f"kernel {name!r}"
    inputs, outputs = signature(what, in_params, out_params)
    variables = variables_of(what, inputs, outputs, out_params)
    source = Source(what, operation)
    statements = parse_statements(source, [p.name for p in inputs], {p.name: p.type for p in outputs}, variables)
    return ElementwiseKernel(name, inputs, outputs, source, tuple(statements))


# --- reductions -------------------------------------------------------------------------------------------------------

_REDUCTIONS = {
    "+": "reduce_sum",
    "*": "reduce_prod",
    "min": "reduce_min",
    "max": "reduce_max",
    "&&": "reduce_min",
    "||": "reduce_max",
}
_NEUTRAL = {"+": 0, "*": 1, "&&": 1, "||": 0}


@dataclass(frozen=True)
class ReductionKernel:
    """A function of arrays and numbers that combines the elements along axes. Made by `reduction_kernel`."""

    name: str
    inputs: tuple[Parameter, ...]
    outputs: tuple[Parameter, ...]
    map: tuple[Source, Expression]
    combine: str
    post: tuple[Source, tuple[Assignment, ...]]
    identity: int | float | None
    reduce_type: str

    def __call__(self, *args: Any, axis: Axes = None, keepdims: bool = False) -> Result:
        """The outputs for arrays and numbers, one for each input.

        Args:
            args: arrays and numbers, which broadcast.
            axis: what is combined: an axis, a tuple of them, or all.
            keepdims: do they stay, with size 1?

        Raises:
            InputError: the arguments' number or types do not fit, or there is nothing to combine and no identity.
            ParseError: an operator of the text does not take the types of this call.
        """
        what = f"kernel {self.name!r}"
        arrays, types = bound(what, self.inputs, args)
        shape = broadcast_shapes(*(x.shape for x in arrays))
        before, after = Evaluator(self.map[0], types), Evaluator(self.post[0], types)
        mapped = before.value(self.map[1], {p.name: Value(x._parts[0]) for p, x in zip(self.inputs, arrays)})
        a = self._combined(what, mapped, after.dtype(self.reduce_type), shape, axes_of(axis, len(shape)), keepdims)
        made = _results(self.outputs, after, after.run(list(self.post[1]), {"a": a}), a.lazy.shape)
        return made[0] if len(made) == 1 else tuple(made)

    def _combined(
        self, what: str, mapped: Value, dtype: DType, shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool
    ) -> Value:
        logical = self.combine in ("&&", "||") or dtype == BOOL
        v = converted(converted(mapped, BOOL), np.dtype(np.uint8)) if logical else converted(mapped, dtype)
        if any(shape[k] == 0 for k in axes):
            if self.identity is None:
                raise ValueInputError(
                    f"{what}: no elements along axis {axes} of {shape}, and the kernel has no identity"
                )
            left = tuple(1 if k in axes else d for k, d in enumerate(shape) if keepdims or k not in axes)
            return Value(broadcast_to(array_of(_limited(self.identity, dtype).lazy), left)._parts[0])
        whole = broadcast_to(array_of(v.lazy), shape)._parts[0]
        op = (
            {"+": "reduce_max", "*": "reduce_min"}.get(self.combine, _REDUCTIONS[self.combine])
            if logical
            else _REDUCTIONS[self.combine]
        )
        made: Lazy = apply(op, whole, axes=axes, keepdims=keepdims) if axes else whole
        result = converted(converted(Value(made), BOOL), dtype) if logical else Value(made)
        if self.combine in ("min", "max") and self.identity is not None and not np.isinf(self.identity):
            return Value(apply(self.combine, result.lazy, _limited(self.identity, dtype).lazy))
        return result


def _limited(identity: int | float, dtype: DType) -> Value:
    """The identity in the type of the reduction; infinity is the largest integer where there is none."""
    if np.isinf(identity) and dtype.kind in "iu":
        return literal(int(np.iinfo(dtype).max if identity > 0 else np.iinfo(dtype).min), dtype)
    return converted(
        literal(identity, np.dtype(np.float64) if isinstance(identity, float) else np.dtype(np.int64)), dtype
    )


def reduction_kernel(
    in_params: str, out_params: str, map_expr: str, reduce_expr: str, post_map_expr: str,
    identity: str | int | float | None = None,
    name: str = "reduce_kernel", reduce_type: str | None = None,
) -> ReductionKernel:  # fmt: skip
    """A reduction of an element-wise expression, in CuPy's notation.

    Args:
        in_params, out_params: types and names, as of `elementwise_kernel`.
        map_expr: an expression of the inputs, as in `"x * x"`.
        reduce_expr: how `a` and `b` are combined: `a + b`, `a * b`, `min(a, b)`, `max(a, b)`, `a && b` or `a || b`.
        post_map_expr: assignments to the outputs of the reduced value, which is called `a`, as in `"y = sqrt(a)"`.
        identity: the result of no elements, as in `"0"`; None where there is none. `min` and `max` combine it with the
            elements.
        name: name of the kernel in errors.
        reduce_type: the type in which elements are combined; that of the first output by default.

    Raises:
        ParseError, UnsupportedError: as of `elementwise_kernel`.
    """
    what = f"kernel {name!r}"
    inputs, outputs = signature(what, in_params, out_params)
    variables = variables_of(what, inputs, outputs, out_params)
    sources = [
        Source(f"{what}, {part}", text)
        for part, text in (("map", map_expr), ("reduce", reduce_expr), ("post map", post_map_expr))
    ]
    mapped = parse_expression(sources[0], [p.name for p in inputs], variables)
    combine = _combination(sources[1], variables)
    post = parse_statements(sources[2], ["a"], {p.name: p.type for p in outputs}, variables)
    kind = _reduce_type(what, reduce_type or outputs[0].type, variables)
    start = _identity(Source(f"{what}, identity", identity), combine) if isinstance(identity, str) else identity
    if start is not None and combine in _NEUTRAL and start != _NEUTRAL[combine]:
        raise InputError(f"{what}: the identity of {reduce_expr!r} is {_NEUTRAL[combine]}, got {identity}")
    return ReductionKernel(name, inputs, outputs, (sources[0], mapped), combine, (sources[2], tuple(post)), start, kind)


def _combination(source: Source, variables: set[str]) -> str:
    tree = parse_expression(source, ("a", "b"), variables)
    if (
        isinstance(tree, Operation)
        and tree.op in _REDUCTIONS
        and sorted(x.name for x in tree.operands if isinstance(x, Name)) == ["a", "b"]
    ):
        return tree.op
    raise source.unsupported(tree.at, "elements are combined by a + b, a * b, min(a, b), max(a, b), a && b or a || b")


def _reduce_type(what: str, given: str, variables: set[str]) -> str:
    name = C_TYPES.get(given, given)
    if name not in DTYPES and name not in variables:
        raise Source(f"{what}, reduce_type", given).error(0, f"expected one of {', '.join(sorted(DTYPES | variables))}")
    return name


def _identity(source: Source, combine: str) -> int | float | None:
    if not source.text.strip():
        return None
    tree = parse_expression(source, (), ())
    sign = 1
    while isinstance(tree, Cast) or (isinstance(tree, Operation) and tree.op in ("-", "+") and len(tree.operands) == 1):
        sign = -sign if isinstance(tree, Operation) and tree.op == "-" else sign
        tree = tree.operand if isinstance(tree, Cast) else tree.operands[0]
    if not isinstance(tree, Number):
        raise source.error(tree.at, "expected a number")
    return sign * tree.value
