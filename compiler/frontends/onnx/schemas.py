"""What ONNX's schemas tell: an operator's attributes, number of inputs, and the function that defines it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from onnx import defs

from dnnc.frontends.onnx.call import Call, Item, attribute_value
from dnnc.frontends.onnx.tensors import ONNX_NUMBERS
from dnnc.ir.dtype import ALL, DType
from dnnc.ir.errors import ModelError


@functools.lru_cache(maxsize=1024)
def find(domain: str, op: str, opset: int) -> Any:
    """The schema of an operator at an opset, or None."""
    try:
        return defs.get_schema(op, opset, domain)
    except defs.SchemaError:
        return None


@functools.lru_cache(maxsize=8)
def names(domain: str) -> frozenset[str]:
    """All operators of a domain."""
    return frozenset(s.name for s in defs.get_all_schemas() if s.domain == domain)


def history() -> list[Any]:
    """Every version of every operator that ONNX defines, in all domains."""
    return list(defs.get_all_schemas_with_history())


def has_body(schema: Any) -> bool:
    """Does a function body define the operator?"""
    return bool(schema.has_function or schema.has_context_dependent_function)


def element_types(schema: Any) -> tuple[str, ...]:
    """Return the element types that dnnc has of an operator's first input, or of its first output without one."""
    numbers = {_element(t) for p in (schema.inputs or schema.outputs)[:1] for t in p.types}
    return tuple(d.name for d in ALL if ONNX_NUMBERS.get(d.name) in numbers)


def _element(text: str) -> int:
    """ONNX's number of the element type in `tensor(float)`, `seq(tensor(float))`, `map(int64, float)` and the like."""
    inner = text.replace(")", "").rpartition("(")[2].rpartition(",")[2].strip()
    return int(onnx.TensorProto.DataType.Value(inner.upper()))


@functools.lru_cache(maxsize=256)
def since(domain: str, op: str) -> int:
    """The opset that an operator came with; 0 when ONNX has none of that name."""
    return min(
        (s.since_version for s in defs.get_all_schemas_with_history() if s.domain == domain and s.name == op), default=0
    )


@functools.lru_cache(maxsize=1024)
def _attributes(schema_key: tuple[str, str, int]) -> tuple[frozenset[str], frozenset[str]]:
    schema = find(*schema_key)
    table = schema.attributes
    return frozenset(table), frozenset(n for n, a in table.items() if a.required)


def check(schema: Any, attrs: Mapping[str, Any], count: int, present: Sequence[bool]) -> None:
    """Raise ModelError for unknown or missing attributes of a node, or too few or too many inputs."""
    known, required = _attributes((schema.domain, schema.name, schema.since_version))
    for a in attrs:
        if a not in known and not a.startswith("__"):  # ONNX reserves such names for engines
            raise ModelError(
                f"attribute {a!r} does not exist; {schema.name} (since opset {schema.since_version}) has "
                f"{', '.join(sorted(known)) or 'none'}"
            )
    for a in required:
        if a not in attrs:
            raise ModelError(f"attribute {a!r} is required")
    if count > schema.max_input or sum(present) < _needed(schema):
        raise ModelError(f"{schema.name} takes {schema.min_input} to {schema.max_input} inputs, {count} are given")


def check_types(c: Call) -> None:
    """ModelError for an input of a type that no version of ONNX's operator takes, or of another one than its like."""
    seen: dict[str, tuple[str, DType]] = {}
    for k, p in enumerate(defs.get_schema(c.op, "").inputs):
        if not c.has(k):
            continue
        dtype = c.type_of(k).dtype
        known = [d.name for d in ALL if ONNX_NUMBERS.get(d.name) in {_element(t) for t in p.types}]
        if dtype.name not in known:
            raise ModelError(f"{p.name} is {dtype}; {c.op} takes {', '.join(known)} there")
        other, expected = seen.setdefault(p.type_str, (p.name, dtype))
        if dtype is not expected:
            raise ModelError(f"{p.name} is {dtype}; it has to be {expected}, as {other} is")


def check_names(op: str, attrs: Mapping[str, Any], known: Sequence[str]) -> None:
    """ModelError where a node of an operator without a schema has an attribute that is not `known`."""
    for a in attrs:
        if a not in known and not a.startswith("__"):
            raise ModelError(f"attribute {a!r} is not known; {op} has {', '.join(sorted(known)) or 'none'}")


def _needed(schema: Any) -> int:
    """How many inputs are not optional."""
    return sum(p.option == defs.OpSchema.FormalParameterOption.Single for p in schema.inputs)


def with_defaults(schema: Any, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes with the schema's defaults for those not given."""
    out = dict(attrs)
    for name, a in schema.attributes.items():
        if name not in out and a.default_value is not None and a.default_value.type:
            out[name] = attribute_value(a.default_value)
    return out


def function_body(schema: Any, c: Call, node: onnx.NodeProto) -> onnx.FunctionProto | None:
    """The body by which the schema defines the operator, for these inputs, or None."""
    data = b""
    versions = [v for v in schema.function_opset_versions if v <= c.opset]
    if schema.has_function and versions:
        data = schema.get_function_with_opset_version(max(versions))
    elif schema.has_context_dependent_function:
        versions = [v for v in schema.context_dependent_function_opset_versions if v <= c.opset]
        if versions:
            types = [_type_proto(i).SerializeToString() for i in c.items]
            data = schema.get_context_dependent_function_with_opset_version(
                max(versions), _resolved(node, c.attrs).SerializeToString(), types
            )
    if not data:
        return None
    f = onnx.FunctionProto()
    f.ParseFromString(data)
    if not f.opset_import:
        f.opset_import.append(onnx.helper.make_opsetid(c.domain, c.opset))
    return f


def _resolved(node: onnx.NodeProto, attrs: Mapping[str, Any]) -> onnx.NodeProto:
    """The node with the values of attributes that refer to those of the function around it."""
    if not any(a.ref_attr_name for a in node.attribute):
        return node
    out = onnx.NodeProto()
    out.CopyFrom(node)
    del out.attribute[:]
    out.attribute.extend(a for a in node.attribute if not a.ref_attr_name)
    out.attribute.extend(
        onnx.helper.make_attribute(a.name, attrs[a.name]) for a in node.attribute if a.ref_attr_name and a.name in attrs
    )
    return out


def _type_proto(item: Item | None) -> onnx.TypeProto:
    if item is None:
        return onnx.TypeProto()
    if item.items is not None:
        inner = item.items[0] if item.items else None
        return onnx.helper.make_sequence_type_proto(_type_proto(inner))
    dims = [d if isinstance(d, int) else f"d{k}" for k, d in enumerate(item.shape)]
    return onnx.helper.make_tensor_type_proto(ONNX_NUMBERS[item.type.dtype.name], dims)
