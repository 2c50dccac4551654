"""Value and gradient of models beside their forward in training mode, and beside PyTorch's, on the CPU.

    python benchmarks/gradients.py [--only resnet50] [--batch 8] [--threads 2] [--seconds 40] [--profile]

A model of the table is a module whose result is a loss. It is exported as ONNX in training mode with its parameters as
inputs, since they change with every step. Its forward is that graph, value and gradient the same with the cotangents of
all parameters. Engines take turns; figures are medians. Memory is what a step needs beside parameters and
inputs: of dnnc the arena and the results, of PyTorch the highest resident memory of a process that does one step.
"""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import dnnc
from dnnc.frontends.onnx import read
from dnnc.ir.autodiff.reverse import pullback
from dnnc.ir.graph import Graph
from dnnc.ir.graph.builder import Builder
from dnnc.tools.timing import alternate

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Model:
    """A loss as a module, and tensors to call it with."""

    loss: nn.Module
    inputs: tuple[Tensor, ...]


# --- models -----------------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """ResNet's block: fewer channels by 1x1, 3x3, back by 1x1, and what it was."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        made = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, made, 1, bias=False), nn.BatchNorm2d(made)
        change = nn.Sequential(nn.Conv2d(inputs, made, 1, stride, bias=False), nn.BatchNorm2d(made))
        self.shortcut = change if stride != 1 or inputs != made else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class Classifier(nn.Module):
    """The cross entropy of a network's logits."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x), labels)


def resnet50(batch: int, size: int = 224, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64) -> Model:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = width
    for k, count in enumerate(blocks):
        for j in range(count):
            layers.append(Bottleneck(channels, width << k, 2 if k and not j else 1))
            channels = 4 * (width << k)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return Model(Classifier(*layers), (torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))))


def mlp(batch: int) -> Model:
    sizes = (784, 1024, 1024, 10)
    layers = [f for i, o in itertools.pairwise(sizes) for f in (nn.Linear(i, o), nn.ReLU())][:-1]
    return Model(Classifier(*layers), (torch.randn(batch, 784), torch.randint(0, 10, (batch,))))


class Encoder(nn.Module):
    """BERT's layer: attention and a hidden layer, each added to its input and normalized."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, steps, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, steps, width)
        x = self.norm1(x + self.out(y))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    """A classifier of sentences by BERT's encoder, without dropout."""

    def __init__(self, words: int, steps: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(steps, width) * 0.02)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(Encoder(width, heads) for _ in range(layers)))
        self.pool, self.last = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.layers(self.norm(self.words(tokens) + self.places))
        return F.cross_entropy(self.last(torch.tanh(self.pool(x[:, 0]))), labels)


def bert(batch: int, words: int = 30522, steps: int = 128, width: int = 768, layers: int = 12) -> Model:
    net = Bert(words, steps, width, layers, width // 64)
    return Model(net, (torch.randint(0, words, (batch, steps)), torch.randint(0, 2, (batch,))))


class Language(nn.Module):
    """The next word of each place by an LSTM of two layers."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.lstm = nn.Embedding(words, width), nn.LSTM(width, width, 2, batch_first=True)
        self.last = nn.Linear(width, words)

    def forward(self, tokens: Tensor, following: Tensor) -> Tensor:
        y, _ = self.lstm(self.words(tokens))
        return F.cross_entropy(self.last(y).flatten(0, 1), following.flatten())


def lstm_lm(batch: int, words: int = 10000, width: int = 650, steps: int = 35) -> Model:
    return Model(Language(words, width), tuple(torch.randint(0, words, (batch, steps)) for _ in range(2)))


REPEATS = 3
MODELS: dict[str, tuple[Callable[[int], Model], int]] = {  # and its batch
    "mlp": (mlp, 128), "resnet50": (resnet50, 8), "bert_base": (bert, 4), "lstm_lm": (lstm_lm, 20),
}  # fmt: skip


def made(name: str, batch: int) -> Model:
    torch.manual_seed(0)
    model = MODELS[name][0](batch or MODELS[name][1])
    model.loss.train()
    return model


# --- dnnc -------------------------------------------------------------------------------------------------------------


def graph_of(model: Model) -> tuple[Graph, dict[str, Array], list[str]]:
    """The forward with parameters as inputs, the values of its inputs by name, and which of these are parameters."""
    import onnx

    warnings.filterwarnings("ignore")
    names, file = [f"input{k}" for k in range(len(model.inputs))], io.BytesIO()
    torch.onnx.export(
        model.loss,
        model.inputs,
        file,
        dynamo=False,
        input_names=names,
        opset_version=17,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
    )
    proto = onnx.load_from_string(file.getvalue())
    values = dict(zip(names, (x.numpy() for x in model.inputs)))
    wanted = {n for n, _ in (*model.loss.named_parameters(), *model.loss.named_buffers())}
    for t in [t for t in proto.graph.initializer if t.name in wanted]:
        values[t.name] = onnx.numpy_helper.to_array(t).copy()
        proto.graph.initializer.remove(t)
        proto.graph.input.append(onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(proto, str(path))
        g = read(str(path))
    given = [i.name for i in proto.graph.input]
    trained = {n for n, _ in model.loss.named_parameters()}
    names = [v.name for v, n in zip(g.inputs, given) if n in trained]
    return g, {v.name: values[n] for v, n in zip(g.inputs, given)}, names


def with_gradient(g: Graph, names: Sequence[str]) -> Graph:
    """The graph with the cotangents of inputs as further outputs; that of the first output, the loss, is 1."""
    g = g.copy()
    wanted = [v for v in g.inputs if v.name in names]
    one = Builder(g).constant(np.ones(g.outputs[0].type.shape, np.float32))
    found = pullback(g, {g.outputs[0]: one}, wanted)
    g.outputs = [*g.outputs, *(c for c in found if c is not None)]
    return g


def compiled(g: Graph, threads: int, cache: bool) -> tuple[Any, float]:
    start = time.perf_counter()
    f = dnnc.compile(g.copy(), threads=threads, cache="auto" if cache else False)
    return f, time.perf_counter() - start


def needed(f: Any, results: Sequence[Array]) -> float:
    """Megabytes of the arena and of results."""
    arena = max(p.memory.arena for p in f.report.programs)
    return (arena + sum(np.asarray(r).nbytes for r in results)) / 1e6


# --- PyTorch ----------------------------------------------------------------------------------------------------------


def torch_memory(name: str, batch: int, threads: int, answer: Any) -> None:
    """Put megabytes that one step of PyTorch's takes into a queue."""
    torch.set_num_threads(threads)
    model = made(name, batch)
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    model.loss(*model.inputs).backward()
    answer.put(resident("VmHWM") - before)


def resident(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(key)) / 1e3


def in_child(name: str, batch: int, threads: int) -> float:
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    child = context.Process(target=torch_memory, args=(name, batch, threads, answer))
    child.start()
    found: float = answer.get()
    child.join()
    return found


# --- comparison -------------------------------------------------------------------------------------------------------


def error(model: Model, results: Sequence[Array], names: Sequence[str]) -> float:
    """The median of the differences from PyTorch's gradients, relative to their norms.

    Not the largest: that is of a unit which rounding puts on the other side of a kink.
    """
    wanted = {n.replace(".", "_"): p.grad for n, p in model.loss.named_parameters()}
    pairs = [(torch.from_numpy(np.array(r)), wanted[n.replace(".", "_")]) for n, r in zip(names, results)]
    return statistics.median(float((got - want).norm() / want.norm()) for got, want in pairs if want is not None)


def compare(name: str, a: argparse.Namespace, table: Table, console: Console) -> None:
    model = made(name, a.batch)
    forward, values, names = graph_of(model)
    start = time.perf_counter()
    step = with_gradient(forward, names)
    derived = time.perf_counter() - start
    f, _ = compiled(forward, a.threads, True)
    g, cold = compiled(step, a.threads, not a.cold)
    if a.cold:
        compiled(step, a.threads, True)  # fills the cache
    _, cached = compiled(step, a.threads, True)
    arrays = list(values.values())
    results = [np.asarray(r) for r in g(*arrays)]

    def ahead() -> None:
        with torch.no_grad():
            model.loss(*model.inputs)

    def both() -> None:
        model.loss.zero_grad()
        model.loss(*model.inputs).backward()

    both()
    difference = error(model, results[-len(names) :], names)
    calls = [lambda: f(*arrays), lambda: g(*arrays), ahead, both]
    rounds = alternate(calls, REPEATS, a.seconds, lambda _: None)
    times = [statistics.median(t for repeat in rounds for t in repeat[k]) for k in range(4)]
    cells = [f"{t * 1e3:.1f}" for t in times]
    memory = needed(g, results), in_child(name, a.batch, a.threads)
    table.add_row(
        name, cells[0], cells[1], f"{times[1] / times[0]:.2f}", cells[2], cells[3], f"{times[3] / times[2]:.2f}",
        f"{memory[0]:.0f}", f"{memory[1]:.0f}", f"{derived:.1f} + {cold:.1f}", f"{cached:.1f}", f"{difference:.0e}",
    )  # fmt: skip
    if a.profile:
        print(f.profile(*arrays))
        print(g.profile(*arrays))


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--only", default="", help="part of a name")
    ap.add_argument("--batch", type=int, default=0, help="default: the model's")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--seconds", type=float, default=40, help="for the times of a model; slow ones take longer")
    ap.add_argument("--cold", action="store_true", help="compile value and gradient without the cache first")
    ap.add_argument("--profile", action="store_true", help="print where the time goes")
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    console, table = Console(width=180), Table(title=f"{a.threads} threads; milliseconds, megabytes, seconds")
    for c in ("model", "forward", "gradient", "ratio", "torch fwd", "torch grad", "ratio", "MB", "torch MB"):
        table.add_column(c, justify="left" if c == "model" else "right")
    for c in ("derive + compile", "cached", "error"):
        table.add_column(c, justify="right")
    for name in MODELS:
        if a.only in name:
            compare(name, a, table, console)
    console.print(table)


if __name__ == "__main__":
    main()
