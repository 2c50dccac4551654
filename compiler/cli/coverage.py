"""Table of ONNX operators for `dnnc ops --onnx` and the docs, by the front end's tables and ONNX's schemas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dnnc.frontends.onnx import schemas
from dnnc.frontends.onnx.ops.dynamic import DYNAMIC
from dnnc.frontends.onnx.ops.image_decode import IMAGE_DECODE
from dnnc.frontends.onnx.ops.strings import STRINGS
from dnnc.frontends.onnx.reader import LATEST
from dnnc.frontends.onnx.shape_inference import RULES
from dnnc.frontends.onnx.tables import CONVERTERS, WITHOUT_SCHEMA

ON_HOST = frozenset(
    (*STRINGS, *IMAGE_DECODE)
)  # all others are native, but for strings and for cutting a result to its size
# What a schema allows and the converter refuses, by domain and operator; a slow test reads every type of each.
REFUSED: dict[tuple[str, str], str] = {
    ("", "BitCast"): "c64 c128 f4e2m1 i2 i4 u2 u4",
    ("", "GridSample"): "i8 i16 i32 i64 u8 u16 u32 u64 bool str c64 c128",
    ("", "MeanVarianceNormalization"): "f16 bf16 f64",
    ("", "PRelu"): "u32 u64",
    ("", "QuantizeLinear"): "i32",
    ("ai.onnx.preview.training", "Gradient"): "i8 i16 i32 i64 u8 u16 u32 u64 bool str c64 c128",
}
DOMAINS = {
    "": "The default domain, also called `ai.onnx`.",
    "ai.onnx.ml": "Classical models.",
    "ai.onnx.preview": "",
    "ai.onnx.preview.training": "",
    "com.microsoft": "Operators of ONNX Runtime. ONNX has no schemas for them, and so no list of types. The types are\n"
    "those of the operators that replace them.",
}
SPANS = {
    "f16..f64": "f16 bf16 f32 f64",
    "f8": "f8e4m3fn f8e4m3fnuz f8e5m2 f8e5m2fnuz f8e8m0",
    "i8..i64": "i8 i16 i32 i64",
    "u8..u64": "u8 u16 u32 u64",
}


@dataclass(frozen=True)
class Operator:
    """An ONNX operator as dnnc reads it.

    `opsets` are those at which its meaning changed, the first one that it came with. `types` are element types of its
    first input, as dnnc writes them; empty where ONNX has no schema. `how` is empty if it is not read. `runs` tells
    where: a graph is divided into kernels and host steps ahead of targets, so it is the same for all that compile.
    """

    domain: str
    name: str
    opsets: tuple[int, ...]
    types: tuple[str, ...]
    how: str
    runs: str


def coverage() -> list[Operator]:
    """All operators of ONNX's domains, old ones included, and the ONNX Runtime ones read; by domain and name."""
    known: dict[tuple[str, str], list[Any]] = {key: [] for key in WITHOUT_SCHEMA}
    for s in schemas.history():
        if s.since_version <= LATEST.get(s.domain, s.since_version) and "test" not in s.domain:
            known.setdefault((s.domain, s.name), []).append(s)
    return [_operator(*key, sorted(known[key], key=lambda s: s.since_version)) for key in sorted(known)]


BODY, SHAPES = "its function body", "shape arithmetic"


def _operator(domain: str, name: str, versions: Sequence[Any]) -> Operator:
    how = _how(domain, name, versions)
    if how == BODY:
        versions = [s for s in versions if schemas.has_body(s)]
    types = schemas.element_types(versions[-1]) if versions else ()
    types = tuple(t for t in types if t not in REFUSED.get((domain, name), "").split())
    runs = "" if not how else "native" if how == SHAPES else _runs(domain, name, types)
    return Operator(domain, name, tuple(s.since_version for s in versions) or (1,), types, how, runs)


def _how(domain: str, name: str, versions: Sequence[Any]) -> str:
    if (domain, name) in CONVERTERS:
        return "a converter"
    if any(schemas.has_body(s) for s in versions[-1:]):
        return BODY
    return SHAPES if (domain, name) in RULES else ""


def _runs(domain: str, name: str, types: Sequence[str]) -> str:
    if (not domain and name in ON_HOST) or types == ("str",):
        return "host"
    parts = ["native"]
    if domain in ("", "com.microsoft") and name in DYNAMIC:
        parts.append("cut to size on the host")
    return "; ".join([*parts, *(["strings on the host"] if "str" in types else [])])


# --- as text ----------------------------------------------------------------------------------------------------------


def show_types(types: Iterable[str]) -> str:
    """Types in one line, whole families by one name."""
    left, out = list(types), []
    for span, members in SPANS.items():
        if set(members.split()) <= set(left):
            out.append(span)
            left = [t for t in left if t not in members.split()]
    return " ".join([*out, *left])


def cells(o: Operator) -> tuple[str, ...]:
    """One row of the table: name, opsets, types, how it is read, where it runs."""
    return o.name, ", ".join(map(str, o.opsets)), show_types(o.types), o.how or "not read", o.runs


COLUMNS = ("operator", "opsets", "types", "read by", "runs")


def markdown(operators: Sequence[Operator]) -> str:
    """The page docs/operators.md."""
    read = [o for o in operators if o.how]
    out = ["# ONNX operators", "", INTRODUCTION.format(read=len(read), all=len(operators))]
    for domain in dict.fromkeys(o.domain for o in operators):
        rows = [o for o in operators if o.domain == domain]
        out += ["", f"## {domain or 'ai.onnx'}", ""]
        out += [DOMAINS[domain], ""] if DOMAINS.get(domain) else []
        out += [
            f"{sum(bool(o.how) for o in rows)} of {len(rows)}.",
            "",
            f"| {' | '.join(COLUMNS)} |",
            f"|{'---|' * len(COLUMNS)}",
        ]
        out += [f"| {' | '.join(cells(o))} |" for o in rows]
    return "\n".join(out) + "\n"


INTRODUCTION = """dnnc supports {read} of {all} operators. `dnnc ops --onnx --markdown > docs/operators.md` writes this
page.

- **opsets**: versions that introduced or changed the operator. dnnc supports them and all versions between.
- **types**: element types of the first input at the newest opset, or of the first output without inputs. `f16..f64`
  are f16, bf16, f32 and f64, `f8` the five types of 8 bits, `i8..i64` and `u8..u64` four integers each.
- **read by**: a *converter* translates the operator to [ops of the graph IR](internals/tour.md). A *function body* of
  the ONNX standard replaces it. *Shape arithmetic* is evaluated at import and generates no code.
- **runs**: as native code, or as a [host step](dynamic_shapes.md#host-steps). The column holds for the targets `llvm`
  and `cuda`; the target `reference` interprets everything in NumPy."""
