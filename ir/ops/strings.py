"""Ops on strings, which run on the host: elements are Python `str` in NumPy object arrays.

They do only what needs the text. What can be numbers is made numbers at once: `string_index` turns words into positions
in a vocabulary, and all else is native. Movement ops (gather, reshape, concat, where, ...) take strings as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dnnc.ir.dtype import DType, boolean, f32, i32, i64, string
from dnnc.ir.errors import InputError, UnsupportedError
from dnnc.ir.expr import dim as symbol
from dnnc.ir.op import PURE, OpDef, Trait, require
from dnnc.ir.ops.common import Array, broadcast_type, sample
from dnnc.ir.types import Dim, TensorType

BITS = frozenset((Trait.PURE, Trait.BITS))  # the text of a half float is that of its own digits
SIZED = frozenset((Trait.PURE, Trait.SIZED))
CASES = ("none", "lower", "upper")


def require_strings(*types: TensorType) -> None:
    """ShapeError unless all are strings."""
    require(all(t.dtype is string for t in types), "the operands must be strings; got {}", ", ".join(map(str, types)))


def mapped(f: Callable[[Any], Any], x: Array, dtype: Any = object) -> Array:
    """An array of `f` of each element."""
    out = np.empty(x.size, dtype)
    out[:] = [f(e) for e in x.reshape(-1)]
    return out.reshape(x.shape)


# --- two strings ------------------------------------------------------------------------------------------------------


def _equal_type(a: TensorType, b: TensorType) -> TensorType:
    require_strings(a, b)
    return broadcast_type(a, b, dtype=boolean)


def _concat_type(a: TensorType, b: TensorType) -> TensorType:
    require_strings(a, b)
    return broadcast_type(a, b)


def _concat(a: Array, b: Array) -> Array:
    return np.asarray(np.add(a, b), object)


# --- patterns and vocabularies ----------------------------------------------------------------------------------------


POSIX = {
    "alnum": "0-9A-Za-z", "alpha": "A-Za-z", "ascii": r"\x00-\x7f", "blank": r"\t ", "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9", "graph": "!-~",
    "lower": "a-z", "print": " -~", "punct": r"!-/:-@\[-`{-~", "space": r"\t\n\v\f\r ", "upper": "A-Z",
    "word": "0-9A-Za-z_", "xdigit": "0-9A-Fa-f",
}  # fmt: skip


def python_pattern(pattern: str) -> re.Pattern[str]:
    """An RE2 pattern for Python's `re`. UnsupportedError where it has no such form, or is no pattern."""
    text = re.sub(r"\\Q(.*?)(?:\\E|\Z)", lambda m: re.escape(m[1]), pattern, flags=re.DOTALL)
    text = re.sub(r"\[:(\w+):\]", lambda m: POSIX.get(m[1], m[0]), text)
    text = re.sub(r"(?<!\\)((?:\\\\)*)\\z", r"\1\\Z", text)
    try:
        return re.compile(text, re.ASCII)  # in RE2, \d, \s and \w are of ASCII
    except (re.error, OverflowError, RecursionError) as e:
        raise UnsupportedError(f"the pattern {pattern!r} is no regular expression that dnnc knows: {e}") from None


def _match_type(x: TensorType, *, pattern: str) -> TensorType:
    require_strings(x)
    python_pattern(pattern)
    return TensorType(boolean, x.shape)


def _match(x: Array, *, pattern: str) -> Array:
    p = python_pattern(pattern)
    return mapped(lambda s: p.fullmatch(s) is not None, x, np.bool_)


def _index_type(x: TensorType, keys: TensorType) -> TensorType:
    require_strings(x, keys)
    require(keys.rank == 1, "the keys must be a vector; got {}", keys)
    return TensorType(i64, x.shape)


def _index(x: Array, keys: Array) -> Array:
    first: dict[str, int] = {}
    for k, key in enumerate(keys):
        first.setdefault(key, k)
    return mapped(lambda s: first.get(s, -1), x, np.int64)


def _rank_type(x: TensorType) -> TensorType:
    require_strings(x)
    return TensorType(i64, x.shape)


def _rank(x: Array) -> Array:
    order = {s: k for k, s in enumerate(sorted(set(x.reshape(-1))))}
    return mapped(order.__getitem__, x, np.int64)


# --- parts of a string ------------------------------------------------------------------------------------------------


def _split_type(x: TensorType, *, size: Dim, delimiter: str = "", maxsplit: int = -1) -> tuple[TensorType, TensorType]:
    require_strings(x)
    return TensorType(string, (*x.shape, size)), TensorType(i64, x.shape)


def _split(x: Array, *, size: Any = None, delimiter: str = "", maxsplit: int = -1) -> tuple[Array, Array]:
    parts = [s.split(delimiter or None, maxsplit) for s in x.reshape(-1)]
    width = max(map(len, parts), default=0)
    pieces = np.full((len(parts), width), "", object)
    for row, p in zip(pieces, parts):
        row[: len(p)] = p
    return pieces.reshape((*x.shape, width)), np.array([len(p) for p in parts], np.int64).reshape(x.shape)


def _normalize_type(
    x: TensorType, *, size: Dim, case: str = "none", stopwords: tuple[str, ...] = (), sensitive: bool = True
) -> TensorType:
    require_strings(x)
    ok = x.rank == 1 or (x.rank == 2 and x.shape[0] == 1)
    require(ok, "the strings must be a vector, or a matrix of one row; got {}", x)
    require(case in CASES, "case must be one of {}; got {!r}", ", ".join(CASES), case)
    return TensorType(string, (*x.shape[:-1], size))


def _normalize(
    x: Array, *, size: Any = None, case: str = "none", stopwords: Sequence[str] = (), sensitive: bool = True
) -> Array:
    same: Callable[[str], str] = str if sensitive else str.lower
    dropped = {same(s) for s in stopwords}
    kept = [s for s in x.reshape(-1) if same(s) not in dropped] if dropped else list(x.reshape(-1))
    change: Callable[[str], str] = {"lower": str.lower, "upper": str.upper}.get(case, str)
    words = [change(s) for s in kept]
    if stopwords and not words:
        words = [""]  # the standard's way to say that none is left
    out = np.empty(len(words), object)
    out[:] = words
    return out.reshape((*x.shape[:-1], len(words)))


# --- numbers ----------------------------------------------------------------------------------------------------------


def _to_string_type(x: TensorType) -> TensorType:
    require(x.dtype.kind in "fiubs", "only numbers and bools have a text; got {}", x)
    return TensorType(string, x.shape)


def number_text(v: Any) -> str:
    """A number as the shortest text that reads back as it; `NaN`, `INF`, `-INF`."""
    if v != v:
        return "NaN"
    if v in (np.inf, -np.inf):
        return "INF" if v > 0 else "-INF"
    return str(v)


def _to_string(x: Array) -> Array:
    return x if x.dtype == object else mapped(number_text, x)


def _from_string_type(x: TensorType, *, to: DType) -> TensorType:
    require_strings(x)
    require(to.kind in "fiub", "a string converts to a number or a bool; got {}", to)
    return TensorType(to, x.shape)


def parsed_number(s: str, to: DType) -> Any:
    """The number that a text holds, for a dtype. InputError where it holds none."""
    text = s.strip()
    try:
        if "_" in text:
            raise ValueError("an underscore")
        if to.is_float:
            return float(text)
        if to.kind == "b" and text.lower() in ("true", "false"):
            return text.lower() == "true"
        n = int(text) if text.lstrip("+-").isdigit() else int(float(text))
    except (ValueError, OverflowError):
        raise InputError(f"cannot convert the text {s!r} to {to}: it is no number of that type") from None
    low, high = to.range
    if to.kind != "b" and not low <= n <= high:
        raise InputError(f"cannot convert the text {s!r} to {to}: it is outside of [{low}, {high}]")
    return n


def _from_string(x: Array, *, to: DType) -> Array:
    return (
        np.array([parsed_number(s, to) for s in x.reshape(-1)], np.float64 if to.is_float else to.numpy)
        .astype(to.numpy)
        .reshape(x.shape)
    )


NUMBERS = ("str[3]", "str[2, 2]")


STRING_OPS: tuple[OpDef, ...] = (
    OpDef(
        "string_equal",
        _equal_type,
        host=lambda a, b: np.asarray(np.equal(a, b), np.bool_),
        traits=PURE,
        samples=(sample("str[3]", "str[3]"), sample("str[2, 3]", "str[1]"), sample("str[]", "str[]")),
    ),
    OpDef(
        "string_concat",
        _concat_type,
        host=_concat,
        traits=PURE,
        samples=(sample("str[3]", "str[3]"), sample("str[2, 1]", "str[3]"), sample("str[]", "str[]")),
    ),
    # does the pattern (RE2 syntax) match the whole string?
    OpDef(
        "string_match",
        _match_type,
        host=_match,
        traits=PURE,
        samples=(sample("str[7]", pattern=r"[[:alpha:]]+\z"), sample("str[2, 3]", pattern=r"\Q\E-?\d+(\.5)?")),
    ),
    # the first position of each string in a vector of keys, or -1
    OpDef(
        "string_index",
        _index_type,
        host=_index,
        traits=PURE,
        samples=(sample("str[7]", "str[3]"), sample("str[2, 3]", "str[1]")),
    ),
    # the place of each string among the different ones in sorted order: numbers that compare as the strings do
    OpDef("string_rank", _rank_type, host=_rank, traits=PURE, samples=(sample("str[7]"), sample("str[2, 3]"))),
    # the parts between delimiters ("": white space), filled up with empty strings, and how many each has
    OpDef(
        "string_split",
        _split_type,
        host=_split,
        traits=SIZED,
        samples=(
            sample("str[5]", size=symbol("n", 0), delimiter="-"),
            sample("str[2, 3]", size=symbol("n", 0)),
            sample("str[4]", size=symbol("n", 0), maxsplit=1),
        ),
    ),
    # strings without stop words, in one case; one empty string where none is left
    OpDef(
        "string_normalize",
        _normalize_type,
        host=_normalize,
        traits=SIZED,
        samples=(
            sample("str[4]", size=4, case="upper"),
            sample("str[1, 9]", size=symbol("n", 1), case="lower", stopwords=("AB", "7"), sensitive=False),
            sample("str[2]", size=symbol("n", 1), stopwords=("", "7", "-1.5", "Ab", "b c", "\u00e9t\u00e9 1")),
        ),
    ),
    OpDef(
        "to_string",
        _to_string_type,
        host=_to_string,
        traits=BITS,
        samples=(sample("f32[5]"), sample("f16[5]"), sample("i64[2, 3]"), sample("bool[2]")),
    ),
    OpDef(
        "from_string",
        _from_string_type,
        host=_from_string,
        traits=PURE,
        samples=(sample("str[0]", to=f32), sample("str[0, 2]", to=i32)),
    ),
)
