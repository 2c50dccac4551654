"""An entry -> an .onnx file, the outputs that PyTorch (or ONNX Runtime without optimizations) has for its inputs, and
its row of the index.
"""

from __future__ import annotations

import collections
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
import zoo
from onnx import AttributeProto, ModelProto

from families.apart import Tell
from families.entry import Drawn, Entry, Flat, Made, sizes_at, symbols_of
from families.index import Row, Variation, alternatives, fraction, variation
from families.weights import settle

Array = np.ndarray[Any, Any]
MOST_BYTES = 8_000_000  # of outputs that are stored


def build(entry: Entry, folder: Path, tell: Tell) -> Row:
    """Write `folder/NAME.onnx` and its outputs `NAME.npz`; the model's row. `attempts`: what did not export."""
    start, seed = time.perf_counter(), int(fraction(entry.name, "seed") * 2**31)
    wanted = variation(entry.name)
    torch.manual_seed(seed)
    torch.set_grad_enabled(False)
    warnings.filterwarnings("ignore")
    tell("building")
    made = entry.make(wanted.batch)
    row: Row = {"name": entry.name, "family": entry.family, "source": entry.source, "seed": seed % 100_000}
    row["batch"] = wanted.batch if any("batch" in i["shape"] for i in made.inputs) else 1
    row["inputs"] = [{**i, "shape": sizes_at(i["shape"], row["batch"])} for i in made.inputs]
    path = folder / f"{entry.name}.onnx"
    if isinstance(made, Drawn):
        onnx.checker.check_model(made.model)
        onnx.save(made.model, str(path))
        outputs = run_reference(made.model, row)
        return finish(row | {"exporter": "graph", "attempts": []}, path, outputs, start)
    net = Flat(made)
    if made.settled:
        settle(net, samples(made, row, max(row["batch"], 4)), seed)
    given = samples(made, row, row["batch"])
    tell("running")
    outputs = [t.numpy() for t in net.eval()(*given)]
    done, attempts = export(net, made, row, wanted, path, len(outputs), tell)
    return finish(row | {"exporter": done.exporter, "attempts": attempts}, path, outputs, start)


def finish(row: Row, path: Path, outputs: list[Array], start: float) -> Row:
    """The whole row of a written model; its expected outputs lie beside it."""
    store(path.with_suffix(".npz"), outputs)
    model = onnx.load(str(path))
    row |= {"symbolic": symbolic_inputs(model)} | describe(model, outputs)
    return row | {"file_bytes": path.stat().st_size, "build_s": round(time.perf_counter() - start, 1)}


def run_reference(model: ModelProto, row: Row) -> list[Array]:
    """The outputs by ONNX Runtime without its optimizations; ONNX' own reference takes minutes for convolutions."""
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(a) for a in session.run(None, zoo.make_inputs(row))]


def samples(made: Made, row: Row, batch: int) -> list[torch.Tensor]:
    """Inputs as tensors with another batch."""
    inputs = [{**i, "shape": sizes_at(i["shape"], batch)} for i in made.inputs]
    arrays = zoo.make_inputs({"seed": row["seed"], "inputs": inputs})
    return [torch.from_numpy(np.array(arrays[i["name"]])) for i in inputs]


# --- exporters --------------------------------------------------------------------------------------------------------


def export(
    net: Flat, made: Made, row: Row, wanted: Variation, path: Path, outputs: int, tell: Tell
) -> tuple[Variation, list[str]]:
    """Export by the wanted variation, else by its alternatives: (what worked, why those before did not)."""
    failed: list[str] = []
    for v in alternatives(wanted):
        tell(f"exporting by {v.exporter}, opset {v.opset}")
        try:
            _export(net, made, row, v, path, outputs)
            onnx.checker.check_model(str(path))
            _check_runs(path, row)
            return v, failed
        except Exception as e:
            failed.append(
                f"{v.exporter} {v.opset}{' symbolic' if v.symbolic else ''}: {type(e).__name__}: {_brief(str(e))}"
            )
    raise RuntimeError(" | ".join(failed))


def _export(net: Flat, made: Made, row: Row, v: Variation, path: Path, outputs: int) -> None:
    names = [i["name"] for i in made.inputs]
    symbols = [symbols_of(i["shape"]) if v.symbolic else {} for i in made.inputs]
    common: dict[str, Any] = {
        "input_names": names,
        "opset_version": v.opset,
        "output_names": [f"out{k}" for k in range(outputs)],
    }
    if v.exporter == "torchscript":
        given = tuple(samples(made, row, row["batch"]))
        axes = {n: s for n, s in zip(names, symbols) if s}
        torch.onnx.export(net, given, str(path), dynamo=False, dynamic_axes=axes or None, **common)
        return
    batch = max(row["batch"], 2) if v.symbolic else row["batch"]  # torch.export takes a size of 1 for a constant
    given = tuple(samples(made, row, batch))
    shapes = (tuple({k: torch.export.Dim.DYNAMIC for k in s} for s in symbols),) if v.symbolic else None
    program = torch.onnx.export(net, given, dynamo=True, dynamic_shapes=shapes, verbose=False, **common)
    program.save(str(path), external_data=False)


def _check_runs(path: Path, row: Row) -> None:
    """Exporters write models that no runtime takes. What ONNX Runtime merely lacks is no fault of the model."""
    try:
        run_reference(onnx.load(str(path)), row)
    except ort.capi.onnxruntime_pybind11_state.NotImplemented:
        return


def _brief(text: str) -> str:
    return " ".join(text.split())[:300]


# --- rows -------------------------------------------------------------------------------------------------------------


def store(path: Path, outputs: list[Array]) -> None:
    """The outputs of PyTorch, unless they are many."""
    if sum(a.nbytes for a in outputs) <= MOST_BYTES:
        np.savez_compressed(path, *outputs)


def describe(model: ModelProto, outputs: list[Array]) -> Row:
    """What a file and a run of it tell."""
    ops = collections.Counter(operators(model))
    return {
        "opset": next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx")),
        "nodes": sum(ops.values()),
        "ops": dict(ops.most_common()),
        "outputs": [_output_row(a) for a in outputs],
    }


def operators(model: ModelProto) -> Iterator[str]:
    """The operator of every node, in subgraphs and functions too."""
    nodes = [*model.graph.node, *(n for f in model.functions for n in f.node)]
    while nodes:
        n = nodes.pop()
        yield n.op_type if n.domain in ("", "ai.onnx") else f"{n.domain}.{n.op_type}"
        nodes += [m for a in n.attribute if a.type == AttributeProto.GRAPH for m in a.g.node]


def symbolic_inputs(model: ModelProto) -> list[str]:
    """The names of the inputs' symbolic sizes."""
    dims = [d.dim_param for i in model.graph.input for d in i.type.tensor_type.shape.dim]
    return list(dict.fromkeys(d for d in dims if d))


def _output_row(a: Array) -> Row:
    x = a.astype(np.float64)
    finite = bool(np.isfinite(x).all())
    return {
        "dtype": str(a.dtype),
        "shape": list(a.shape),
        "finite": finite,
        "std": float(x.std()) if x.size and finite else 0.0,
    }
