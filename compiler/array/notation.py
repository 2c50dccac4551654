"""The notation of user-defined kernels: its words, its tree, and errors that show the place.

A text such as `float t = x - y; z = t * t` is cut into tokens here, `notation_parser.py` makes assignments of them, and
`c_values.py` says what the operators mean. Types of values are known when a kernel is called.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Union

from dnnc.array.promotion import NAMES
from dnnc.ir.errors import DnncError, ParseError, UnsupportedError


@dataclass(frozen=True, slots=True)
class Number:
    """A literal. `type` is C's, or empty for a decimal without a suffix, which takes the float type beside it."""

    at: int
    value: int | float | bool
    type: str


@dataclass(frozen=True, slots=True)
class Name:
    at: int
    name: str


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator or a function: `op` is `+`, `!`, `?:` or a name. The operands tell unary from binary."""

    at: int
    op: str
    operands: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Cast:
    at: int
    type: str
    operand: Expression


Expression = Union[Number, Name, Operation, Cast]


@dataclass(frozen=True, slots=True)
class Assignment:
    """`type` is what the value is converted to: a dtype's name, a type variable, or empty for `auto`."""

    at: int
    name: str
    type: str
    value: Expression


@dataclass(frozen=True, slots=True)
class Source:
    """A text and what it is to the user."""

    what: str
    text: str

    def error(self, at: int, message: str, kind: type[DnncError] = ParseError) -> DnncError:
        line = self.text.count("\n", 0, at)
        column = at - (self.text.rfind("\n", 0, at) + 1)
        shown = (self.text.split("\n") or [""])[line]
        return kind(f"{self.what}, line {line + 1}, column {column + 1}: {message}\n    {shown}\n    {' ' * column}^")

    def unsupported(self, at: int, message: str) -> DnncError:
        return self.error(at, message, UnsupportedError)


# --- types and names --------------------------------------------------------------------------------------------------

DTYPES = frozenset(n for n in NAMES if not n.startswith("complex"))
C_TYPES = {
    "float": "float32", "double": "float64", "half": "float16", "char": "int8", "signed char": "int8",
    "unsigned char": "uint8", "short": "int16",
    "unsigned short": "uint16", "int": "int32", "signed int": "int32", "signed": "int32", "unsigned int": "uint32",
    "unsigned": "uint32",
    "long": "int64", "long long": "int64", "unsigned long": "uint64", "unsigned long long": "uint64",
    "size_t": "uint64", "ptrdiff_t": "int64",
    "auto": "",
    **{f"{n}_t": n for n in DTYPES if "int" in n},
}  # fmt: skip
TYPE_WORDS = frozenset(w for n in C_TYPES for w in n.split())
CONSTANTS = {"INFINITY": math.inf, "NAN": math.nan, "M_PI": math.pi, "M_E": math.e}
_FUNCTIONS = {
    1: "abs fabs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh "
       "atanh erf floor ceil trunc "
       "rint round isnan isinf isfinite signbit",
    2: "min max fmin fmax pow fmod atan2 hypot copysign",
    3: "fma",
}  # fmt: skip
ARITY = {name: n for n, names in _FUNCTIONS.items() for name in names.split()}
STATEMENTS = {
    "if": "use c ? x : y", "else": "use c ? x : y", "for": "there are no loops", "while": "there are no loops",
    "do": "there are no loops",
    "switch": "use c ? x : y", "return": "assign to an output", "goto": "there are no jumps",
    "break": "there are no loops",
    "continue": "there are no loops",
}  # fmt: skip
LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", "<=", ">", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
_TOKEN = re.compile(
    r"(?P<space>\s+|//[^\n]*|/\*.*?\*/)"
    r"|(?P<number>0[xX][0-9a-fA-F]+[uUlL]*|(?:\d+\.\d*|\.\d+|\d+)(?:[eE][+-]?\d+)?[uUlLfF]*)"
    r"|(?P<name>[A-Za-z_]\w*)"
    r"|(?P<mark><<=|>>=|\+\+|--|->|::|\|\||&&|==|!=|<=|>=|<<|>>|[-+*/%&|^]=|[-+*/%<>!~?:=;,.(){}\[\]&|^])",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Token:
    kind: str  # number, name, mark or end
    text: str
    at: int


def tokens(source: Source) -> list[Token]:
    out, at = [], 0
    while at < len(source.text):
        found = _TOKEN.match(source.text, at)
        if found is None:
            raise source.error(at, f"{source.text[at]!r} is no part of the notation")
        if found.lastgroup != "space":
            out.append(Token(found.lastgroup or "", found[0], at))
        at = found.end()
    return [*out, Token("end", "", len(source.text.rstrip()))]
