"""A compiled model to a file: the records of its manifest, and the sections with its texts, machine code and weights.

The file depends on the model, the options (winners of a tuning log among them), the CPU and the versions alone: nothing
of when, where or how fast it was made goes into it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

import dnnc
from dnnc.artifact.format import write_artifact
from dnnc.artifact.manifest import (
    Range,
    SavedCall,
    SavedConstant,
    SavedCpu,
    SavedData,
    SavedKernel,
    SavedModel,
    SavedPass,
    SavedPlace,
    SavedProgram,
    SavedReport,
)
from dnnc.artifact.reader import places_of
from dnnc.backends.llvm.compile import llvm_version
from dnnc.backends.llvm.native import ENTRY, FORMAT, Native, offsets_of_constants
from dnnc.backends.runtime.codec import encode
from dnnc.backends.runtime.program import Place
from dnnc.cpu_compiler import CpuCompiler
from dnnc.ir.dtype import u8
from dnnc.ir.errors import Loc
from dnnc.ir.graph import Graph
from dnnc.ir.graph.constant_text import large_constants, to_bytes
from dnnc.ir.types import TensorType
from dnnc.options import CompileOptions
from dnnc.program_cache import OnnxParts
from dnnc.report import KernelReport, ProgramReport
from dnnc.tune_option import plain_winners

Array = np.ndarray[Any, Any]
ALIGN = 64  # of data within a section
OWN_SECTION = 1 << 16  # bytes from which data has a section of its own, and is not copied to be written
MACHINE_OPTIONS = (
    "target",
    "cache",
    "tune",
)  # the target has its place, the cache is of the machine that compiled, of `tune` the winners are kept
Destination = str | os.PathLike[str] | BinaryIO
Programs = Sequence[tuple[tuple[int, ...], Native]]


def save_programs(
    path: Destination, compiler: CpuCompiler, programs: Programs, reports: Sequence[ProgramReport], small: bool
) -> None:
    """Write a model with the programs compiled so far. ArtifactError where the file cannot be written."""
    f = _File()
    constants = [] if small else [n.constants for _, n in programs]
    names = f.packed(constants, [offsets_of_constants(n.calls) for _, n in programs])
    saved = [
        f.program(sizes, n, r, name) for (sizes, n), r, name in zip(programs, reports, names or [""] * len(programs))
    ]
    cpu = SavedCpu(**dataclasses.asdict(compiler.target)) if programs else None
    onnx = None if compiler.onnx is None else f.onnx(compiler.onnx())
    model = _graph_model(f, "programs", compiler.graph, compiler, cpu)
    f.write(path, dataclasses.replace(model, onnx=onnx, programs=tuple(saved)))


def save_reference(
    path: Destination, graph: Graph, inputs: Sequence[str], outputs: Sequence[str], options: CompileOptions
) -> None:
    """Write a model that the interpreter runs. ArtifactError where the file cannot be written."""
    f = _File()
    f.write(path, _graph_model(f, "reference", graph, _Names(inputs, outputs, options), None))


def save_staged(
    path: Destination,
    graph: Graph,
    inputs: Sequence[str],
    outputs: Sequence[str],
    options: CompileOptions,
    onnx: OnnxParts | None,
) -> None:
    """Write a model with host steps: its graph, which loading divides and compiles. ArtifactError where the file cannot
    be written.
    """
    f = _File()
    data = None if onnx is None else f.onnx(onnx)
    model = _graph_model(f, "staged", graph, _Names(inputs, outputs, options), None)
    f.write(path, dataclasses.replace(model, onnx=data))


def save_late(path: Destination, options: CompileOptions, onnx: OnnxParts) -> None:
    """Write a model that is read at the call. ArtifactError where the file cannot be written."""
    f = _File()
    data = f.onnx(onnx)
    model = SavedModel(
        "late", *_versions(), str(options.target), None, _plain_options(options), (), (), "", "", None, (), data, ()
    )
    f.write(path, model)


def save_device(
    path: Destination,
    graph: Graph,
    names: tuple[Sequence[str], Sequence[str]],
    options: CompileOptions,
    code: tuple[Mapping[str, bytes], Collection[str]],
    onnx: OnnxParts | None,
) -> None:
    """Write a model for a device: its graph, and `code`: machine code by symbol, and the symbols that a device has
    checked.

    Loading runs the passes and finds the code. ArtifactError where the file cannot be written.
    """
    f = _File()
    data = None if onnx is None else f.onnx(onnx)
    model = _graph_model(f, "device", graph, _Names(*names, options), None)
    cubins, checked = code
    index = [[symbol, *f.objects.add(cubin), symbol in checked] for symbol, cubin in sorted(cubins.items())]
    f.sections.append(("cubins", json.dumps(index, separators=(",", ":")).encode()))
    f.write(path, dataclasses.replace(model, onnx=data))


@dataclass(frozen=True)
class _Names:
    inputs: Sequence[str]
    outputs: Sequence[str]
    options: CompileOptions
    shared: None = None


def _graph_model(f: _File, kind: str, graph: Graph, origin: CpuCompiler | _Names, cpu: SavedCpu | None) -> SavedModel:
    """The model with its imported graph."""
    constants = f.graph(graph)
    types = (
        types_text(graph.name, [(v.name, v.type) for v in graph.inputs]),
        types_text(graph.name, _numbered("out", [v.type for v in graph.outputs])),
    )
    names = tuple(origin.inputs), tuple(origin.outputs)
    shared = None if origin.shared is None else dict(origin.shared)
    target, options = str(origin.options.target), _plain_options(origin.options)
    return SavedModel(kind, *_versions(), target, cpu, options, *names, *types, shared, constants, None, ())


def _versions() -> tuple[str, str, str]:
    return dnnc.__version__, FORMAT, llvm_version()


def _plain_options(options: CompileOptions) -> dict[str, Any]:
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.name not in MACHINE_OPTIONS}
    winners = {"tune": plain_winners(options.tune)} if isinstance(options.tune, Mapping) else {}
    return {**values, **winners, "dims": dict(options.dims), "donate": dict(options.donate)}


def types_text(name: str, typed: Sequence[tuple[str, TensorType]]) -> str:
    """Names and types as the text of a graph without nodes, which `dnnc.ir.graph.text.parse` reads with all that is
    known of their dims.
    """
    g = Graph(name)
    for n, t in typed:
        g.add_input(n, t)
    return str(g)


def _numbered(stem: str, types: Sequence[TensorType]) -> list[tuple[str, TensorType]]:
    return [(f"{stem}{k}", t) for k, t in enumerate(types)]


# --- locations --------------------------------------------------------------------------------------------------------


def _locations(graph: Graph) -> bytes:
    """JSON: the locations that occur, and for each place of `places_of` the numbers of its own."""
    numbers: dict[Loc, int] = {}
    places = [[numbers.setdefault(loc, len(numbers)) for loc in x.locs] for x in places_of(graph)]
    table = [[loc.name, loc.op, loc.opset, Path(loc.file).name, loc.line] for loc in numbers]
    return json.dumps([table, places], separators=(",", ":")).encode()


# --- sections ---------------------------------------------------------------------------------------------------------


@dataclass
class _File:
    """The sections of a file as they come together. Equal data is stored once, in whatever section it came up first."""

    sections: list[tuple[str, Any]] = field(default_factory=list)
    objects: _Joined = field(default_factory=lambda: _Joined())
    operator: _Joined = field(default_factory=lambda: _Joined())
    graphs: _Joined = field(default_factory=lambda: _Joined())
    weights: _Joined = field(default_factory=lambda: _Joined(ALIGN))
    known: dict[int, list[tuple[str, int, Array]]] = field(
        default_factory=dict
    )  # by size up to the next multiple of ALIGN

    def write(self, path: Destination, model: SavedModel) -> None:
        joined = {"objects": self.objects, "operator": self.operator, "graphs": self.graphs, "weights": self.weights}
        small = [(name, bytes(j.data)) for name, j in joined.items() if j.data]
        write_artifact(path, encode(model), [*small, *self.sections])

    def packed(self, blocks: Sequence[Array], offsets: Sequence[Sequence[int]]) -> list[str]:
        """Sections for blocks of packed constants; what the imported graph has in the same form is found in them."""
        names: list[str] = []
        for k, (block, starts) in enumerate(zip(blocks, offsets)):
            same = next((j for j in range(k) if blocks[j] is block or np.array_equal(blocks[j], block)), None)
            names.append(names[same] if same is not None else f"constants{k}")
            if same is not None:
                continue
            self.sections.append((names[k], block.data))
            for start, end in zip(starts, [*starts[1:], block.nbytes]):
                self.known.setdefault(end - start, []).append((names[k], start, block[start:end]))
        return names

    def data(self, a: Array) -> tuple[str, Range]:
        """The place of some bytes (uint8[n])."""
        n = a.nbytes
        alike = self.known.setdefault(-(-n // ALIGN) * ALIGN, [])
        for section, start, have in alike:
            if np.array_equal(have[: min(n, ALIGN)], a[:ALIGN]) and np.array_equal(have[:n], a):
                return section, (start, n)
        if n < OWN_SECTION:
            section, start = "weights", self.weights.add(a.tobytes())[0]
        else:
            section, start = f"weights{len(self.sections)}", 0
            self.sections.append((section, a.data))
        alike.append((section, start, a))
        return section, (start, n)

    def graph(self, g: Graph) -> tuple[SavedConstant, ...]:
        """The imported graph: its text, its locations, and its constants, which are given back."""
        self.sections.append(("model", g.text().encode()))
        self.sections.append(("locations", _locations(g)))
        out = []
        for key, (dtype, a) in large_constants(g).items():
            section, place = self.data(to_bytes(a, dtype))
            out.append(SavedConstant(key, dtype.name, a.shape, section, place))
        return tuple(out)

    def onnx(self, parts: OnnxParts) -> tuple[SavedData, ...]:
        proto, data = parts
        self.sections.append(("onnx", proto))
        return tuple(SavedData(*self.data(a)) for a in data)

    def program(self, sizes: tuple[int, ...], native: Native, report: ProgramReport, constants: str) -> SavedProgram:
        slots = [TensorType(u8, (n,)) for n in native.arena.sizes]
        typed = [("dims", TensorType(u8, native.dims)), *_numbered("out", native.outputs), *_numbered("slot", slots)]
        number = {k.symbol: n for n, k in enumerate(native.kernels)}
        kernels = tuple(self._kernel(native, k, report.kernels[k]) for k in range(len(native.kernels)))
        calls = tuple(SavedCall(number[c.symbol], _places(c.args), _places(c.writes), c.dims) for c in native.calls)
        return SavedProgram(
            sizes,
            types_text("program", typed),
            len(native.outputs),
            native.arena.lives,
            native.arena.pieces,
            calls,
            kernels,
            self.objects.add(native.objects[ENTRY]),
            constants,
            self.graphs.add(native.graph_text(False).encode()),
            self.graphs.add(native.graph_text(True).encode()),
            _report(report),
        )

    def _kernel(self, native: Native, number: int, r: KernelReport) -> SavedKernel:
        k = native.kernels[number]
        text, code = (
            self.operator.add(k.text.encode()),
            self.objects.add(native.objects[ENTRY if k.control else k.symbol]),
        )
        return SavedKernel(
            k.name, k.symbol, text, code, k.choice, k.parallel, k.where, k.calls, k.nodes, r.flops, r.bytes
        )


@dataclass
class _Joined:
    """Pieces of bytes, one behind the other; equal ones once."""

    align: int = 1
    data: bytearray = field(default_factory=bytearray)
    known: dict[bytes, int] = field(default_factory=dict)

    def add(self, piece: bytes) -> Range:
        at = self.known.get(piece)
        if at is None:
            self.data += bytes(-len(self.data) % self.align)
            at = self.known[piece] = len(self.data)
            self.data += piece
        return at, len(piece)


def _places(places: Sequence[Place]) -> tuple[SavedPlace, ...]:
    return tuple((p.space, p.number, p.offset, p.nbytes, p.inside) for p in places)


def _report(r: ProgramReport) -> SavedReport:
    passes = tuple(SavedPass(x.name, x.nodes_before, x.nodes_after, x.changed, x.notes) for x in r.passes)
    return SavedReport(
        dict(r.dims), r.symbolic, passes, (r.memory.arena, r.memory.lower_bound, r.memory.constants), r.fallbacks
    )
