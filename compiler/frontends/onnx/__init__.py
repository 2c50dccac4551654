"""ONNX models in, graphs out: `read(model)`. Operators become ops of the graph IR with worked-out shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dnnc.frontends.onnx.call import NeedsValues
from dnnc.frontends.onnx.dim_constraints import Refined, given_facts
from dnnc.frontends.onnx.importer import MALFORMED, Importer
from dnnc.frontends.onnx.reader import Model, initial_arrays, load
from dnnc.ir.errors import DnncError, ModelError, ShapeError, UnsupportedError
from dnnc.ir.form import Form
from dnnc.ir.graph import Graph
from dnnc.ir.types import Dim

__all__ = ["Imported", "NeedsValues", "from_onnx", "read", "read_model"]

MAX_READINGS = 200  # each reading adds a fact about a symbol


@dataclass(frozen=True)
class Imported:
    """A graph with users' input and output names. `results`: forms of outputs, as parts of sequences or maps."""

    graph: Graph
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    results: tuple[Form, ...]


def read(
    model: Any,
    *,
    name: str | None = None,
    dims: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int | None]] | None = None,
    values: Mapping[str, Any] | None = None,
) -> Graph:
    """The graph of an ONNX model.

    Args:
        model: the path of an `.onnx` file, its bytes, or a ModelProto.
        name: of the graph; default is the model's.
        dims: symbolic dims to fix (`{"batch": 8}`) or to bound (`{"batch": (1, 64)}`).
        shapes: shapes of inputs, by name, in place of the model's; None leaves a dim symbolic.
        values: contents of inputs, by name, on which shapes depend. These inputs stay in the signature and are not
            read.

    Raises:
        ModelError: not a model, malformed, or unsafe to read.
        UnsupportedError: an operator, opset or dtype that dnnc does not implement; NeedsValues where `values` or `dims`
            would help.
        ShapeError: shapes that do not fit together.
    """
    return read_model(model, name=name, dims=dims, shapes=shapes, values=values).graph


def read_model(
    model: Any,
    *,
    name: str | None = None,
    dims: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[Dim | None]] | None = None,
    values: Mapping[str, Any] | None = None,
    forms: Mapping[str, Form] | None = None,
    decisions: Mapping[str, bool] | None = None,
    training: bool | None = None,
) -> Imported:
    """Like `read`, with the model's own names of inputs and outputs.

    `forms` are the structures of inputs that are sequences, optionals or maps; `shapes` and `values` then name their
    tensors (`xs[0]`). `decisions` are the values of conditions by the names that NeedsValues gives them. A symbol in
    `shapes` is a size of that name. `training`: are dropouts active? None leaves it to the model; if it is given, batch
    normalizations take the running statistics, for the caller to replace.
    """
    parsed = load(model)
    try:
        facts, weights = given_facts(dims or {}), initial_arrays(parsed.graph, parsed.folder)
        return _settled(
            parsed,
            lambda: Importer(parsed, weights, facts, values or {}, shapes or {}, name, forms, decisions, training),
        )
    except DnncError:  # some are also a ValueError
        raise
    except MALFORMED as e:  # outside of any node: a name that is no text, a type that holds nothing
        raise ModelError(f"the graph {parsed.graph.name!r} is malformed: {type(e).__name__}: {e}") from e


def _settled(parsed: Model, reading: Callable[[], Importer]) -> Imported:
    """The graph, read again as long as a reading finds a new fact about a symbol."""
    failed: DnncError | None = None
    for _ in range(MAX_READINGS):
        importer = reading()
        importer.by_contents = failed is not None
        try:
            return Imported(importer.run(), tuple(importer.inputs), tuple(importer.outputs), tuple(importer.results))
        except Refined:
            continue
        except NeedsValues as e:
            known = bool(e.inputs) or e.condition is not None
            if known or failed is not None or not importer.fresh:
                raise e if known else failed or e from None
            failed = e
        except (
            ShapeError,
            UnsupportedError,
        ) as e:  # a size that only the data tells may be what does not fit: then contents must tell it
            if failed is not None or not importer.fresh:
                raise failed or e from None
            failed = e
    raise ShapeError(
        f"the symbolic dims of {parsed.graph.name!r} do not settle after {MAX_READINGS} readings; fix some with "
        f"dims={{...}}"
    )


from_onnx = read
