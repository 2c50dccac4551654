"""`dnnc.custom_op`: ops that users define by a tensor expression, or by the naive loop nest of one.

In: a function of tensors, as the ops' own records have one. Out: a callable on arrays, whose results are lazy like all
others. A call makes a record (`OpDef`) that its node carries: there is no list of ops to add to. The record is called
by the op's name and a digest of what it computes, so that two definitions never mix, here or in the kernel cache.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from dnnc.array.core import array_of, scalar
from dnnc.array.creation import asarray
from dnnc.array.custom_products import Product, multiplied, products, replaced
from dnnc.array.lazy import apply_all
from dnnc.array.operators import NUMBERS
from dnnc.array.sizes import Size
from dnnc.ir import te
from dnnc.ir.errors import DnncError, InputError, ShapeError
from dnnc.ir.expr import Var, free
from dnnc.ir.graph.attributes import normal
from dnnc.ir.graph.show import show_definition
from dnnc.ir.graph.text import read_definition
from dnnc.ir.loops.text import parse_kernel
from dnnc.ir.lru import LRU
from dnnc.ir.op import OpDef, Trait
from dnnc.ir.te.raised import raised
from dnnc.ir.types import TensorType

RECORDS = 256  # kept by one op, for different types and attributes


@dataclass(frozen=True)
class Record:
    """What a call does for operands of some types."""

    products: tuple[Product, ...]  # what becomes products of matrices
    # the record of the remainder, which reads these operands (the call's, then the products); None without one
    op: OpDef | None
    reads: tuple[int, ...]  # these numbers
    sizes: dict[str, Var]  # those that are names in the operands' types, as attributes of the node
    results: tuple[int, ...]  # for each result the number of a product, or -1 for the next result of the op
    several: bool  # are the results a tuple?


class CustomOp:
    """A function of arrays; see `custom_op`."""

    def __init__(
        self,
        name: str,
        compute: Callable[..., Any],
        type: Callable[..., Any] | None,
        reference: Callable[..., Any] | None,
    ) -> None:
        self.name, self._compute, self._type, self._reference = name, compute, type, reference
        self._usual = {
            p.name: p.default
            for p in inspect.signature(compute).parameters.values()
            if p.kind is p.KEYWORD_ONLY and p.default is not p.empty
        }
        self._records: LRU[Any, Record] = LRU(RECORDS)

    def __call__(self, *arrays: Any, **attrs: Any) -> Any:
        """The results for arrays of real numbers; a Python number is one of the dtype of the first array.

        Args:
            *arrays: of `dnnc.array`, NumPy or DLPack.
            **attrs: what `compute` takes as keywords: numbers, strings, and tuples of these. Another value is another
                program.

        Returns:
            A lazy array, or a tuple of them where `compute` gives one.

        Raises:
            InputError: an operand is complex; ShapeError: shapes or dtypes do not fit, as `type` or `compute` says.
        """
        numbers = (*NUMBERS, Size)
        first = next((x for x in arrays if not isinstance(x, numbers)), None)
        if first is None:
            raise InputError(
                f"{self.name}: expected arrays, got {', '.join(type(x).__name__ for x in arrays) or 'nothing'}"
            )
        lead = asarray(first).dtype
        xs = [scalar(x, lead) if isinstance(x, numbers) else asarray(x) for x in arrays]
        for x in xs:
            if x.dtype.kind == "c":
                raise InputError(
                    f"{self.name}: expected real numbers, got {x.dtype}; give the real and the imaginary parts"
                )
        parts = [x._parts[0] for x in xs]
        r = self.record([p.type for p in parts], {k: normal(v) for k, v in {**self._usual, **attrs}.items()})
        made = [multiplied(p, *(parts[k] for k in p.operands)) for p in r.products]
        every = [*parts, *made]
        rest = iter(() if r.op is None else apply_all(r.op, *(every[k] for k in r.reads), **r.sizes))
        results = tuple(array_of(next(rest) if k < 0 else made[k]) for k in r.results)
        return results if r.several else results[0]

    def record(self, types: Sequence[TensorType], attrs: dict[str, Any]) -> Record:
        """What a call of operands of these types does."""
        key = tuple(types), tuple(attrs.items())
        found = self._records.find(key)
        if found is None:
            found = self._records[key] = self._made(types, attrs)
        return found

    def _made(self, types: Sequence[TensorType], attrs: dict[str, Any]) -> Record:
        inputs = [te.placeholder(f"x{k}", t.dtype, t.shape) for k, t in enumerate(types)]
        said = None if self._type is None else self._type(*types, **attrs)
        made = self._traced(inputs, attrs)
        outputs = made if isinstance(made, tuple) else (made,)
        self._compare(said, outputs)
        found = products(inputs, outputs) if self._reference is None else []  # which is of the whole
        stand_ins = [te.placeholder(f"p{k}", p.stage.dtype, p.stage.dims) for k, p in enumerate(found)]
        number = {p.stage: k for k, p in enumerate(found)}
        rest = replaced([t for t in outputs if t not in number], {p.stage: s for p, s in zip(found, stand_ins)})
        every = [*inputs, *stand_ins]
        read = te.operands(rest)
        reads = tuple(k for k, t in enumerate(every) if t in read)
        op = self._record([every[k] for k in reads], rest, attrs) if rest else None
        sizes = {
            v.name: v
            for t in (*inputs, *te.stages(rest))
            for d in t.shape
            for v in sorted(free(d), key=lambda v: v.name)
        }
        return Record(
            tuple(found), op, reads, sizes, tuple(number.get(t, -1) for t in outputs), isinstance(made, tuple)
        )

    def _record(self, inputs: Sequence[te.Tensor], outputs: Sequence[te.Tensor], attrs: dict[str, Any]) -> OpDef:
        """What a node carries: the definition as its text has it, which is what other processes read."""
        digest = hashlib.sha256(te.text(inputs, outputs).encode()).hexdigest()[:12]
        op = read_definition(show_definition(f"{self.name}_{digest}", inputs, outputs))
        if self._reference is None:
            return op
        asked = inspect.signature(self._reference).parameters
        given = partial(self._reference, **{k: v for k, v in attrs.items() if k in asked})

        def at(arrays: Sequence[Any], points: Any, **sizes: Any) -> Any:
            return np.asarray(given(*arrays))[tuple(points.T)]

        return replace(
            op,
            traits=op.traits | {Trait.FOREIGN},
            reference=lambda *arrays, **sizes: given(*arrays),
            reference_at=at if len(outputs) == 1 else None,
        )

    def _compare(self, said: Any, outputs: Sequence[te.Tensor]) -> None:
        """ShapeError where the user's rule says other types than the expressions have."""
        many = tuple(said) if isinstance(said, (tuple, list)) else (said,)
        made = tuple(TensorType(t.dtype, t.dims) for t in outputs)
        if said is not None and many != made:
            raise ShapeError(
                f"{self.name}: its type rule says {', '.join(map(str, many))}, its expression makes "
                f"{', '.join(map(str, made))}"
            )

    def _traced(self, tensors: Sequence[te.Tensor], attrs: dict[str, Any]) -> Any:
        """What `compute` makes."""
        try:
            made = self._compute(*tensors, **attrs)
        except DnncError:
            raise
        except (TypeError, ValueError, IndexError) as e:
            shown = ", ".join(f"{t.dtype}{list(t.shape)}" for t in tensors)
            hint = ""
            if isinstance(e, TypeError) and "Tensor" in str(e):
                hint = "; compute elements of tensors, such as te.compute(x.dims, x.dtype, lambda i: x[i] * 2)"
            raise ShapeError(f"{self.name}: its expression cannot be made for operands {shown}: {e}{hint}") from e
        many = made if isinstance(made, tuple) else (made,)
        if not many or not all(isinstance(t, te.Tensor) and t.stage is not None for t in many):
            raise InputError(
                f"{self.name}: its expression must give te.compute(...), te.reduce(...) or a tuple of such, got "
                f"{made!r}"
            )
        return made


def custom_op(
    name: str,
    compute: Callable[..., Any] | str,
    type: Callable[..., Any] | None = None,
    *,
    reference: Callable[..., Any] | None = None,
) -> CustomOp:
    """A custom operator for array code, traced functions and graphs, on all targets.

    It is fused, scheduled, tuned and checked like those that are built in.

    Args:
        name: an identifier.
        compute: takes a `dnnc.ir.te.Tensor` for each operand, and attributes as keywords; gives `te.compute(...)`,
            `te.reduce(...)`, or a tuple.
        type: takes the operands' types and the attributes, and gives the type of each result; raises ShapeError
            (`dnnc.ir.op.require`) where they do not fit. By default the types are those of the expressions.
        reference: the same in NumPy, of arrays and those attributes that it names, in float64 where operands are, which
            kernels are checked against. By default it is the expression itself, interpreted in float64.

    Raises:
        InputError: the name is no identifier.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise InputError(f"custom_op: the name of an op is an identifier, got {name!r}")
    return CustomOp(name, nest(compute) if isinstance(compute, str) else compute, type, reference)


def nest(text: str) -> Callable[..., Any]:
    """The expressions of a naive loop nest, as a function of tensors. ParseError where the text is none."""
    kernel = parse_kernel(text)

    def compute(*tensors: te.Tensor) -> Any:
        made = raised(kernel, tensors)
        return made if len(made) > 1 else made[0]

    return compute
