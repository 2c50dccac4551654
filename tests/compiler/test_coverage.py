"""The table of ONNX operators: what it says, and that models of all types that it lists are read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

from dnnc.cli.coverage import REFUSED, Operator, coverage, show_types
from dnnc.frontends.onnx import NeedsValues, read_model, schemas
from dnnc.frontends.onnx.reader import standard
from dnnc.frontends.onnx.tables import CONVERTERS
from dnnc.frontends.onnx.tensors import ONNX_NUMBERS
from dnnc.ir.errors import DnncError
from dnnc.passes.base import graphs
from support.onnx_suite import load_cases

TABLE = {(o.domain, o.name): o for o in coverage()}
# What a test case of the operator cannot show: its inputs must have other contents or attributes for other types, or
# are optional values.
NOT_SHOWN = {
    ("", "OptionalHasElement"),
    ("", "OptionalGetElement"),
    ("", "Scan"),
    ("", "TfIdfVectorizer"),
    ("ai.onnx.ml", "LabelEncoder"),
}
SIZED = frozenset(("truncate", "measure"))  # they cut a result to the size that the data tells


def test_every_converter_is_listed() -> None:
    assert set(CONVERTERS) <= set(TABLE)
    assert {o.domain for o in TABLE.values()} == {
        "",
        "ai.onnx.ml",
        "ai.onnx.preview",
        "ai.onnx.preview.training",
        "com.microsoft",
    }
    assert all(o.how for o in TABLE.values())


def test_rows_say_opsets_types_and_place() -> None:
    add = TABLE["", "Add"]
    assert (
        add.opsets == (1, 6, 7, 13, 14) and show_types(add.types) == "f16..f64 i8..i64 u8..u64" and add.runs == "native"
    )
    assert TABLE["", "StringSplit"].runs == "host" and TABLE["", "Shape"].how == "shape arithmetic"
    assert TABLE["", "NonZero"].runs == "native; cut to size on the host; strings on the host"
    assert TABLE["", "Attention"].how == "its function body" and not set(TABLE["", "PRelu"].types) & {"u32", "u64"}


# --- every type is read -----------------------------------------------------------------------------------------------


def single_nodes() -> dict[tuple[str, str], list[Any]]:
    """The models of ONNX's test cases that are one node, by its operator."""
    found = defaultdict(list)
    for c in load_cases(("node",), ""):
        model = c.model if c.model is not None else onnx.load(Path(c.model_dir) / "model.onnx")
        if len(model.graph.node) == 1:
            found[standard(model.graph.node[0].domain), model.graph.node[0].op_type].append(model)
    return found


def with_type(model: Any, schema: Any, dtype: str) -> Any:
    """The model with other elements in its first input, and in all inputs and outputs of the same kind and type."""
    out = onnx.ModelProto.FromString(model.SerializeToString())
    node = out.graph.node[0]
    values = {
        v.name: v.type.tensor_type for v in (*out.graph.input, *out.graph.output) if v.type.HasField("tensor_type")
    }
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    kinds = {
        name: p.type_str
        for p, name in (*_formals(schema.inputs, node.input), *_formals(schema.outputs, node.output))
        if name in values
    }
    if not kinds or (dtype_text := _text(dtype)) not in allowed.get(
        main := schema.inputs[0].type_str if schema.inputs else "", ()
    ):
        return None
    first = {kind: values[name].elem_type for name, kind in reversed(kinds.items())}
    for name, kind in kinds.items():
        if kind == main or (dtype_text in allowed.get(kind, ()) and first[kind] == first.get(main)):
            values[name].elem_type = ONNX_NUMBERS[dtype]
    return out


def _formals(formals: Any, names: Any) -> Iterator[tuple[Any, str]]:
    return ((formals[min(k, len(formals) - 1)], name) for k, name in enumerate(names))


def _text(dtype: str) -> str:
    return f"tensor({onnx.TensorProto.DataType.Name(ONNX_NUMBERS[dtype]).lower()})"


def hosts(model: Any) -> set[str] | None:
    """The host ops that a model is read as; None where it is refused."""
    try:
        graph = read_model(model).graph
    except NeedsValues:
        return set()
    except DnncError:
        return None
    return {n.op.name for g in graphs(graph) for n in g.nodes() if n.op.host is not None} - SIZED


def fits(o: Operator, models: list[Any], dtype: str) -> set[str] | str | None:
    """What `hosts` says of the first model that is read with this type; "untried" where none can have it."""
    tried = "untried"
    for m in models:
        opset = next((i.version for i in m.opset_import if standard(i.domain) == o.domain), 1)
        changed = with_type(m, schemas.find(o.domain, o.name, opset), dtype)
        if changed is None:
            continue
        tried, found = "refused", hosts(changed)
        if found is not None:
            return found
    return None if tried == "refused" else tried


@pytest.mark.slow
def test_models_of_all_listed_types_are_read() -> None:
    models, wrong, read = single_nodes(), [], 0
    for key, o in TABLE.items():
        if key not in models or key in NOT_SHOWN:
            continue
        for dtype in (*o.types, *REFUSED.get(key, "").split()):
            found = fits(o, models[key], dtype)
            if found == "untried":
                continue
            if (found is None) != (dtype not in o.types):
                wrong.append(f"{key} of {dtype} is {'refused' if found is None else 'read'}")
            elif found and dtype != "str" and o.runs == "native":
                wrong.append(f"{key} of {dtype} needs the host for {found}")
            read += found is not None
    assert not wrong and read > 1000, wrong
