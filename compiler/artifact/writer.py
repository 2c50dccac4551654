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
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

import dnnc
from dnnc.artifact.format import write_artifact
from dnnc.artifact.manifest import (
    Range,
    SavedCall,
    SavedConstant,
    SavedData,
    SavedKernel,
    SavedModel,
    SavedPass,
    SavedPlace,
    SavedProgram,
    SavedReport,
)
from dnnc.artifact.reader import places_of
from dnnc.backends.base import Backend
from dnnc.backends.runtime.codec import encode
from dnnc.backends.runtime.program import CompiledKernel, MemoryRef, Program, offsets_of_constants
from dnnc.ir.dtype import u8
from dnnc.ir.errors import Loc
from dnnc.ir.graph import Graph
from dnnc.ir.graph.constant_text import large_constants, to_bytes
from dnnc.ir.graph.types_text import numbered, show_types
from dnnc.ir.types import TensorType
from dnnc.options import CompileOptions
from dnnc.program_cache import OnnxParts, only_for_devices
from dnnc.report import KernelReport, ProgramReport
from dnnc.tune_option import plain_winners

if TYPE_CHECKING:
    from dnnc.graph_compiler import GraphCompiler
    from dnnc.hybrid import HybridCompiler

Array = np.ndarray[Any, Any]
ALIGN = 64  # of data within a section
OWN_SECTION = 1 << 16  # bytes from which data has a section of its own, and is not copied to be written
# the target has its place, the cache is of the machine that compiled, of `tune` the winners are kept, no functions
MACHINE_OPTIONS = ("target", "cache", "tune", "custom_ops")
Destination = str | os.PathLike[str] | BinaryIO


def save_model(
    path: Destination,
    compiler: GraphCompiler,
    programs: Mapping[tuple[int, ...], Any],
    small: bool,
    archs: Sequence[str],
) -> None:
    """Write a model with what was compiled of it.

    Args:
        path: the file.
        compiler: of the model.
        programs: by the sizes that they serve.
        small: leave out constants in the order in which kernels read them.
        archs: other architectures to compile for.

    Raises:
        ArtifactError: the file cannot be written.
        InputError: the target has no architectures.
    """
    backend = compiler.backend
    if backend.saves_programs:
        only_for_devices(archs)
        _save_programs(path, compiler, programs, small)
        return
    if not backend.compiles:
        only_for_devices(archs)
        save_graph(path, "graph", compiler)
        return
    save_graph(path, "graph", compiler, _code_for(compiler, programs, archs))


def _save_programs(
    path: Destination, compiler: GraphCompiler, programs: Mapping[tuple[int, ...], Program], small: bool
) -> None:
    f = _File()
    linked = list(programs.values())
    constants = [] if small else [p.constants for p in linked]
    sections = f.packed(constants, [offsets_of_constants(p.calls) for p in linked]) or [""] * len(linked)
    saved = [f.program(*x) for x in zip(programs, linked, compiler.log.programs, sections)]
    onnx = None if compiler.onnx is None else f.onnx(compiler.onnx())
    model = _graph_model(f, "programs", compiler, compiler.backend if programs else None)
    f.write(path, dataclasses.replace(model, onnx=onnx, programs=tuple(saved)))


def _code_for(
    compiler: GraphCompiler, programs: Mapping[tuple[int, ...], Program], archs: Sequence[str]
) -> tuple[dict[str, bytes], set[str]]:
    """Machine code of the programs so far, for this architecture and others, and the symbols that are checked."""
    code: dict[str, bytes] = {}
    checked: set[str] = set()
    dims = [dict(zip(sorted(compiler.graph.dims.values(), key=lambda v: v.name), sizes)) for sizes in programs]
    others = [compiler.elsewhere(a) for a in dict.fromkeys(archs) if a != getattr(compiler.target, "arch", "")]
    for p in (*(c.compile(d) for c in others for d in dims), *programs.values()):
        code.update(p.code)
        checked |= set(p.code) - set(p.checks)
    return code, checked


def save_graph(
    path: Destination,
    kind: str,
    compiler: GraphCompiler | HybridCompiler,
    code: tuple[Mapping[str, bytes], Collection[str]] | None = None,
) -> None:
    """Write a graph that loading compiles again, and perhaps machine code that it then finds.

    Args:
        path: the file. ArtifactError: it cannot be written.
        kind: see SavedModel.
        compiler: of the model.
        code: by symbol, and the symbols of kernels that a device has checked.
    """
    f = _File()
    data = None if compiler.onnx is None else f.onnx(compiler.onnx())
    model = _graph_model(f, kind, compiler, None)
    if code is not None:
        objects, checked = code
        index = [[symbol, *f.objects.add(data), symbol in checked] for symbol, data in sorted(objects.items())]
        f.sections.append(("code", json.dumps(index, separators=(",", ":")).encode()))
    f.write(path, dataclasses.replace(model, onnx=data))


def save_onnx(path: Destination, options: CompileOptions, onnx: OnnxParts) -> None:
    """Write a model that is read at the call. ArtifactError: the file cannot be written."""
    f = _File()
    data = f.onnx(onnx)
    rest = None, _plain_options(options), (), (), "", "", None, (), data, ()
    f.write(path, SavedModel("onnx", dnnc.__version__, "", str(options.target), *rest))


def _graph_model(f: _File, kind: str, compiler: GraphCompiler | HybridCompiler, backend: Backend | None) -> SavedModel:
    """The model with its imported graph. `backend`: for which it holds programs."""
    graph = compiler.graph
    constants = f.graph(graph)
    types = (
        show_types(graph.name, [(v.name, v.type) for v in graph.inputs]),
        show_types(graph.name, numbered("out", [v.type for v in graph.outputs])),
    )
    names = tuple(compiler.inputs), tuple(compiler.outputs)
    shared = compiler.shared if isinstance(compiler.shared, Mapping) else None
    return SavedModel(
        kind,
        dnnc.__version__,
        "" if backend is None else backend.code_version,
        str(compiler.options.target),
        None if backend is None else encode(backend.target),
        _plain_options(compiler.options),
        *names,
        *types,
        None if shared is None else dict(shared),
        constants,
        None,
        (),
    )


def _plain_options(options: CompileOptions) -> dict[str, Any]:
    values = {f.name: getattr(options, f.name) for f in dataclasses.fields(options) if f.name not in MACHINE_OPTIONS}
    winners = {"tune": plain_winners(options.tune)} if isinstance(options.tune, Mapping) else {}
    return {**values, **winners, "dims": dict(options.dims), "donate": dict(options.donate)}


def _locations(graph: Graph) -> bytes:
    """JSON: the locations that occur, and for each place of `places_of` the numbers of its own."""
    numbers: dict[Loc, int] = {}
    places = [[numbers.setdefault(loc, len(numbers)) for loc in x.locs] for x in places_of(graph)]
    table = [[loc.name, loc.op, loc.opset, Path(loc.file).name, loc.line, loc.derivative] for loc in numbers]
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

    def program(self, sizes: tuple[int, ...], p: Program, report: ProgramReport, constants: str) -> SavedProgram:
        slots = [TensorType(u8, (n,)) for n in p.arena.sizes]
        typed = [("dims", TensorType(u8, p.dims)), *numbered("out", p.outputs), *numbered("slot", slots)]
        number = {k.symbol: n for n, k in enumerate(p.kernels)}
        kernels = tuple(self._kernel(k, report.kernels[n]) for n, k in enumerate(p.kernels))
        calls = tuple(SavedCall(number[c.symbol], _places(c.args), _places(c.writes), c.dims) for c in p.calls)
        return SavedProgram(
            sizes,
            show_types("program", typed),
            len(p.outputs),
            p.arena.lives,
            p.arena.pieces,
            calls,
            kernels,
            {symbol: self.objects.add(code) for symbol, code in sorted(p.code.items())},
            constants,
            self.graphs.add(p.graph_text(False).encode()),
            self.graphs.add(p.graph_text(True).encode()),
            _report(report),
        )

    def _kernel(self, k: CompiledKernel, r: KernelReport) -> SavedKernel:
        text = self.operator.add(k.text.encode())
        return SavedKernel(k.name, k.symbol, text, k.choice, k.parallel, k.where, k.calls, k.nodes, r.flops, r.bytes)


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


def _places(places: Sequence[MemoryRef]) -> tuple[SavedPlace, ...]:
    return tuple((p.space, p.number, p.offset, p.nbytes, p.inside) for p in places)


def _report(r: ProgramReport) -> SavedReport:
    passes = tuple(SavedPass(x.name, x.nodes_before, x.nodes_after, x.changed, x.notes) for x in r.passes)
    return SavedReport(
        dict(r.dims), r.symbolic, passes, (r.memory.arena, r.memory.lower_bound, r.memory.constants), r.fallbacks
    )
