"""Parameters of user-defined kernels: their notation, and the arguments of a call in the types that they say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.array.core import Array, as_operand, scalar
from dnnc.array.notation import ARITY, C_TYPES, DTYPES, Source
from dnnc.array.operators import NUMBERS
from dnnc.array.promotion import DType, kind_of, promoted
from dnnc.ir.errors import InputError, a_type, count


@dataclass(frozen=True, slots=True)
class Parameter:
    """`type` is a dtype's name, or a type variable: a single letter."""

    name: str
    type: str

    @property
    def generic(self) -> bool:
        return len(self.type) == 1


def parameters(source: Source) -> tuple[Parameter, ...]:
    """`"T x, float32 y"`. ParseError, or UnsupportedError for raw parameters."""
    out: list[Parameter] = []
    for part in re.finditer(r"[^,]+|(?<=,)(?=,|$)", source.text):
        words = part[0].split()
        at = part.start() + len(part[0]) - len(part[0].lstrip())
        if not words and not out and part[0] == source.text:
            return ()
        if words and words[0] == "raw":
            raise source.unsupported(
                at, "raw parameters are not supported: a kernel sees one element of each parameter at a time"
            )
        if "*" in part[0]:
            raise source.unsupported(part.start() + part[0].index("*"), "there are no pointers")
        if len(words) != 2 or not words[1].isidentifier():
            raise source.error(at, "expected a type and a name, as in 'float32 x' or 'T x'")
        out.append(_parameter(source, at, *words))
    return tuple(out)


def _parameter(source: Source, at: int, type_: str, name: str) -> Parameter:
    if type_.startswith("complex"):
        raise source.unsupported(at, "complex numbers are not supported in kernels: pass real and imaginary parts")
    if type_ not in DTYPES and not (len(type_) == 1 and type_.isalpha()):
        hint = f"; C's {type_} is {C_TYPES[type_]}" if C_TYPES.get(type_) else ""
        raise source.error(
            at,
            f"{type_!r} is no type of parameters: expected one of {', '.join(sorted(DTYPES))}, or a letter such as "
            f"T{hint}",
        )
    if name in ("i", "n") or name.startswith("_") or name in ARITY or name in C_TYPES or name in DTYPES:
        raise source.error(at + len(type_) + 1, f"a parameter cannot be called {name!r}: choose another name")
    return Parameter(name, type_)


def signature(what: str, in_params: str, out_params: str) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    sources = Source(f"{what}, inputs", in_params), Source(f"{what}, outputs", out_params)
    inputs, outputs = map(parameters, sources)
    for s, given in zip(sources, (inputs, outputs)):
        if not given:
            raise s.error(0, "expected at least one parameter")
    names = [p.name for p in (*inputs, *outputs)]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None or {p.type for p in (*inputs, *outputs) if p.generic} & set(names):
        raise sources[1].error(
            0, f"the name {twice!r} is given twice" if twice else "a parameter has the name of a type variable"
        )
    return inputs, outputs


def bound(what: str, params: Sequence[Parameter], given: Sequence[Any]) -> tuple[list[Array], dict[str, DType]]:
    """Convert arguments to the parameters' types and bind the type variables. InputError where they do not fit."""
    if len(given) != len(params):
        raise InputError(
            f"{what} expects {count(len(params), 'argument')} ({', '.join(p.name for p in params)}), got {len(given)}"
        )
    types: dict[str, DType] = {}
    args = [as_operand(x) for x in given]
    for p, x in zip(params, args):
        if isinstance(x, Array):
            wanted = types.setdefault(p.type, x.dtype) if p.generic else np.dtype(p.type)
            if x.dtype.kind == "c":
                raise InputError(
                    f"{what}: {p.name} is an array of {x.dtype}; pass real and imaginary parts, kernels have no "
                    "complex numbers"
                )
            if x.dtype != wanted:
                raise InputError(
                    f"{what}: {p.name} is an array of {x.dtype}, expected "
                    f"{p.type}{f', which is {wanted}' if p.generic else ''}; use astype"
                )
        elif not isinstance(x, NUMBERS):
            raise InputError(f"{what}: {p.name} is {a_type(x)}, expected an array or a number")
    numbers = {
        p.type: [x for q, x in zip(params, args) if q.type == p.type]
        for p in params
        if p.generic and p.type not in types
    }
    types |= {name: promoted(*xs) for name, xs in numbers.items()}
    return [x if isinstance(x, Array) else _number(what, p, x, types) for p, x in zip(params, args)], types


def _number(what: str, p: Parameter, x: Any, types: dict[str, DType]) -> Array:
    dtype = types[p.type] if p.generic else np.dtype(p.type)
    if "biufc".index(kind_of(x)) > "buifc".index(dtype.kind) or isinstance(x, complex):
        raise InputError(f"{what}: {p.name} is {x!r}, expected a number of {dtype}")
    return scalar(x, dtype)


def variables_of(what: str, inputs: Sequence[Parameter], outputs: Sequence[Parameter], out_params: str) -> set[str]:
    known = {p.type for p in inputs if p.generic}
    free = next((p.type for p in outputs if p.generic and p.type not in known), None)
    if free is not None:
        raise Source(f"{what}, outputs", out_params).error(
            out_params.index(free), f"no input tells what {free} is: give a type"
        )
    return known
