"""Decoders whose weights are stored in few bits, one token at a time: dnnc's storages and ONNX Runtime beside it.

    python benchmarks/weight_only.py [--model gpt2 llama] [--threads 2] [--repeats 30] [--products]
        [--storages w4a16 ...] [--no-peers]

Times are the shortest of interleaved calls. The memory's rate is that of a kernel that reads as many bytes on the same
threads. `--products` times products of one weight alone, 1 to 8 rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from decoders import GPT2, LLAMA, TINY, Shape, _Writer, decoder
from onnx import helper

import dnnc

Array = np.ndarray[Any, Any]
MODELS = {"gpt2": GPT2, "llama": LLAMA, "tiny": TINY}
# name -> (storage of the file, precision)
STORAGES = {
    "float32": ("float", None),
    "bfloat16": ("float", "bfloat16"),
    "w8a16": ("column8", None),
    "w8a16 bf16": ("column8", "bfloat16"),
    "w4a16": ("4", None),
    "w4a16 bf16": ("4", "bfloat16"),
    "w2a16": ("2", None),
}
PEERS = {
    "ONNX Runtime float32": ("float", 0),
    "ONNX Runtime w4": ("4", 0),
    "ONNX Runtime w4, int8 activations": ("4", 4),
}


@dataclass
class Case:
    """A way to run a model. `products`: seconds and bytes of its products' kernels."""

    name: str
    call: Callable[[], Any]
    best: float = float("inf")
    products: tuple[float, int] | None = None


def measured(cases: list[Case], repeats: int) -> None:
    """The shortest of `repeats` interleaved calls."""
    for _ in range(repeats):
        for c in cases:
            start = time.perf_counter()
            c.call()
            c.best = min(c.best, time.perf_counter() - start)


def read_rate(nbytes: int, threads: int) -> float:
    """Bytes per second of a kernel that adds up so many bytes of float32 on the threads."""
    rows = threads * 64
    x = np.ones((rows, nbytes // 4 // rows), np.float32)
    node = helper.make_node("ReduceSum", ["x"], ["y"], keepdims=0)
    info = helper.make_tensor_value_info
    graph = helper.make_graph([node], "read", [info("x", 1, x.shape)], [info("y", 1, ())])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    f = dnnc.compile(model, threads=threads)
    case = Case("read", lambda: f(x))
    measured([case], 20)
    return x.nbytes / case.best


def products_of(case: Case, f: Any, arrays: list[Array]) -> None:
    """Note what the kernels with products of weights take, and how many bytes they read and write."""
    kernels = [k for k in f.profile(*arrays).kernels if "matmul" in k.name and (k.bytes or 0) > (1 << 18) * k.calls]
    case.products = sum(k.seconds for k in kernels), sum(k.bytes or 0 for k in kernels)


def peer_case(name: str, model: Any, inputs: Mapping[str, Array], threads: int) -> Case:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0" if threads == 1 else "1")
    session = ort.InferenceSession(model.SerializeToString(), options)
    session.run(None, dict(inputs))
    return Case(name, lambda: session.run(None, dict(inputs)))


def table(shape: Shape, threads: int, repeats: int, block: int, storages: list[str], peers_too: bool) -> str:
    """One model: a row for each storage."""
    cases, sizes = [], {}
    for name in storages:
        storage, precision = STORAGES[name]
        model, inputs, _ = decoder(shape, storage, block)
        f = dnnc.compile(model, threads=threads, precision=precision)
        arrays = [inputs[i.name] for i in f.inputs]
        f(*arrays)
        case = Case(name, lambda f=f, arrays=arrays: f(*arrays))
        products_of(case, f, arrays)
        cases.append(case)
        sizes[name] = f.report.programs[-1].memory.constants
        del model, f
    measured(cases, repeats)
    peers = []
    for name, (storage, level) in PEERS.items() if peers_too else ():
        model, inputs, _ = decoder(shape, storage, block, level)
        peers.append(peer_case(name, model, inputs, threads))
        del model
        measured(peers[-1:], repeats)  # alone: its threads wait for work by spinning
    rate = read_rate(max(size for size in sizes.values()), threads)
    base = next((c.best for c in cases if c.name == "bfloat16"), float("nan"))
    lines = [
        f"### {shape.name}",
        "",
        f"Reading memory: {rate / 1e9:.1f} GB/s.",
        "",
        "| storage | constants, MB | ms a token | against bfloat16 | products: ms | GB/s | of the reading rate |",
        "|---|---|---|---|---|---|---|",
    ]
    for c in cases:
        seconds, nbytes = c.products or (0.0, 0)
        got = nbytes / seconds if seconds else 0.0
        lines.append(
            f"| {c.name} | {sizes[c.name] / 1e6:.0f} | {c.best * 1e3:.2f} | {base / c.best:.2f} x "
            f"| {seconds * 1e3:.2f} | {got / 1e9:.1f} | {got / rate:.0%} |"
        )
    lines += [f"| {c.name} | | {c.best * 1e3:.2f} | {base / c.best:.2f} x | | | |" for c in peers]
    return "\n".join(lines)


def products(threads: int, repeats: int, block: int, count: int = 8) -> str:
    """Products of 1 to 8 rows with a weight [2048, 8192], as many weights as exceed the caches."""
    lines = ["### Products of few rows with [2048, 8192]", ""]
    lines += ["| rows | storage | microseconds | GB/s |", "|---|---|---|---|"]
    for rows in (1, 2, 4, 8):
        cases, sizes = [], []
        for name, (storage, precision) in STORAGES.items():
            w = _Writer(storage, block, 0, np.random.default_rng(0))
            outs = [w.linear("x", 2048, 8192, False) for _ in range(count)]
            info = helper.make_tensor_value_info
            made = [info(o, 1, (rows, 8192)) for o in outs]
            graph = helper.make_graph(w.nodes, "products", [info("x", 1, (rows, 2048))], made, w.constants)
            opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
            model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
            x = np.random.default_rng(1).standard_normal((rows, 2048)).astype(np.float32)
            f = dnnc.compile(model, threads=threads, precision=precision)
            f(x)
            cases.append(Case(name, lambda f=f, x=x: f(x)))
            sizes.append(f.report.programs[-1].memory.constants)
        measured(cases, repeats)
        lines += [
            f"| {rows} | {c.name} | {c.best / count * 1e6:.0f} | {size / c.best / 1e9:.1f} |"
            for c, size in zip(cases, sizes)
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=MODELS, default=["gpt2", "llama"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--storages", nargs="*", choices=STORAGES, default=list(STORAGES))
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    parts = [
        table(MODELS[m], options.threads, options.repeats, options.block, options.storages, options.peers)
        for m in options.model
    ]
    parts += [products(options.threads, options.repeats, options.block)] if options.products else []
    text = "\n\n".join(parts) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
