"""Quantized models layer by layer: each layer on the codes of the reference, so that no layer inherits differences.

    python benchmarks/quantized_layers.py DIR [DIR] [--ours] [--only NAME,NAME] [--cache DIR] [--threads 2]
        [--targets ...]

Folders are those of `quantized.py build` and `zoo build`; their quantized models are taken, or with `--ours` what
`dnnc.quantize` makes of their float models, calibrated with their inputs.

A model is cut at all nodes that make codes, QuantizeLinear, DynamicQuantizeLinear and the QLinear operators: what they
make becomes outputs, and what reads it reads inputs, which are given the codes that ONNX Runtime makes without graph
optimizations. Each target compiles the cut model. For each are told how many codes equal the reference's, how many are
within one step of them, and how many are the same as those of the first target.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zoo
from onnx import ModelProto, TensorProto, helper
from quantized import reference

import dnnc
from dnnc.tools.peers import several

Array = np.ndarray[Any, Any]
ZERO = {  # operators that make codes, and which of their inputs is the zero point of the result; QLinear others: 4
    "QuantizeLinear": 2, "QLinearConv": 7, "QLinearMatMul": 7, "QLinearAdd": 7, "QLinearMul": 7, "QLinearConcat": 1,
    "QLinearWhere": 8, "QGemm": 8,
}  # fmt: skip
TARGETS = ("llvm", "llvm -mcpu=haswell", "llvm -mcpu=x86-64")


def exposed(model: ModelProto) -> tuple[ModelProto, list[str]]:
    """The model with all that MAKERS make as its outputs, and their names."""
    out = ModelProto()
    out.CopyFrom(model)
    zeros = {t.name: t.data_type for t in out.graph.initializer}
    types: dict[str, int] = {}
    for n in out.graph.node:
        at = ZERO.get(n.op_type, 4 if n.op_type.startswith("QLinear") else None)
        if at is not None:
            types[n.output[0]] = zeros[n.input[at]] if len(n.input) > at else TensorProto.UINT8
        elif n.op_type == "DynamicQuantizeLinear":
            types.update(zip(n.output, (TensorProto.UINT8, TensorProto.FLOAT, TensorProto.UINT8)))
    del out.graph.output[:]
    out.graph.output.extend(helper.make_tensor_value_info(name, t, None) for name, t in types.items())
    return out, list(types)


def cut(model: ModelProto, codes: Mapping[str, Array]) -> ModelProto:
    """The model whose layers read these codes from inputs, `NAME_given`, and whose outputs are the layers'."""
    out, _ = exposed(model)
    for n in out.graph.node:
        n.input[:] = [f"{i}_given" if i in codes else i for i in n.input]
    for name, a in codes.items():
        kind = helper.np_dtype_to_tensor_dtype(a.dtype)
        out.graph.input.append(helper.make_tensor_value_info(f"{name}_given", kind, a.shape))
    return out


def check(folder: Path, name: str, a: argparse.Namespace) -> None:
    row = zoo.read_manifest(folder)[name]
    model, inputs = zoo.load(folder, row), zoo.make_inputs(row)
    if zoo.is_quantized({"ops": [n.op_type for n in model.graph.node]}) == a.ours:
        return
    if a.ours:
        model = dnnc.quantize(model, [inputs], measure=False).model
    whole, names = exposed(model)
    codes = dict(zip(names, reference(whole, inputs)))
    layers = cut(model, codes)
    given = {**inputs, **{f"{n}_given": v for n, v in codes.items()}}
    first: list[Array] = []
    for target in a.targets:
        f = dnnc.compile(layers, target=target, threads=a.threads, cache=a.cache)
        got = several(f(*(given[i.name] for i in f.inputs)))
        pairs = [(g.astype(np.int64), codes[n].astype(np.int64)) for g, n in zip(got, names) if g.dtype.kind in "iu"]
        off = np.concatenate([np.abs(g - w).reshape(-1) for g, w in pairs])
        lowest = min(float(np.mean(np.abs(g - w) <= 1)) for g, w in pairs)
        first = first or got
        same = float(np.mean(np.concatenate([(g == w).reshape(-1) for g, w in zip(got, first)])))
        print(
            f"| {name} | {target} | {len(pairs)} | {np.mean(off == 0):.5%} | {np.mean(off <= 1):.5%} | {lowest:.5%} | "
            f"{off.max()} | {same:.5%} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--ours", action="store_true", help="what `dnnc.quantize` makes of the float models")
    parser.add_argument("--only", type=lambda text: text.split(","))
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--targets", type=lambda text: text.split(","), default=TARGETS)
    a = parser.parse_args()
    rows = [(folder, n) for folder in a.folders for n in zoo.read_manifest(folder) if n in (a.only or [n])]
    print("| model | target | quantized tensors | equal | within a step | in the worst tensor | largest | same bits |")
    print("|" + "---|" * 8)
    with tempfile.TemporaryDirectory() as scratch:
        a.cache = a.cache or Path(scratch)
        for folder, name in rows:
            check(folder, name, a)


if __name__ == "__main__":
    main()
