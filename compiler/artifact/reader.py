"""The parts of a saved model as objects: its signature, its graph, its programs, each made when it is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from dnnc.artifact.format import REMEDY, Artifact
from dnnc.artifact.manifest import Range, SavedModel, SavedPlace, SavedProgram
from dnnc.backends.base import Backend
from dnnc.backends.runtime.program import Call, CompiledKernel, MemoryRef, Program
from dnnc.ir.arena import Arena
from dnnc.ir.dtype import BY_NAME
from dnnc.ir.errors import ArtifactError, DnncError, Loc, count
from dnnc.ir.expr import Var
from dnnc.ir.graph import Graph
from dnnc.ir.graph.constant_text import from_bytes
from dnnc.ir.graph.text import parse
from dnnc.ir.types import TensorType
from dnnc.program_cache import OnnxParts
from dnnc.report import KernelReport, MemoryReport, ProgramReport

Array = np.ndarray[Any, Any]
SPACES = ("buffer", "constant", "arena")


class Restored:
    """An open file with its manifest. Errors in it are ArtifactErrors that name the file and the part."""

    def __init__(self, file: Artifact, model: SavedModel) -> None:
        self.file, self.model, self.path = file, model, file.path

    def piece(self, section: str, place: Range) -> memoryview:
        at, size = place
        return self.file.section(section)[at : at + size] if size else memoryview(b"")

    def text(self, section: str, place: Range | None = None) -> str:
        data = self.file.section(section) if place is None else self.piece(section, place)
        try:
            return data.tobytes().decode()
        except UnicodeDecodeError as e:
            raise self.wrong(f"section {section!r}", e) from None

    def wrong(self, what: str, error: object) -> ArtifactError:
        return ArtifactError(f"{self.path}: {what} is not what it should be: {error}; {REMEDY}")

    def parsed(self, text: str, what: str, constants: dict[str, Array] | None = None) -> Graph:
        try:
            return parse(text, constants)
        except (DnncError, RecursionError, MemoryError) as e:
            raise self.wrong(what, e) from None

    # --- the model ----------------------------------------------------------------------------------------------------

    @cached_property
    def interface(self) -> Graph:
        """The inputs and outputs with their types; no nodes."""
        g = self.parsed(self.model.input_types, "the types of the inputs")
        g.outputs = self.parsed(self.model.output_types, "the types of the outputs").inputs
        if len(g.inputs) != len(self.model.inputs) or len(g.outputs) != len(self.model.outputs):
            raise self.wrong(
                "the signature",
                f"{len(g.inputs)} and {count(len(g.outputs), 'type')} for "
                f"{count(len(self.model.inputs), 'input')} and {len(g.outputs)} "
                "outputs",
            )
        return g

    @cached_property
    def graph(self) -> Graph:
        """The imported graph, with locations."""
        constants = {c.key: self._constant(c.dtype, c.shape, c.section, c.place) for c in self.model.constants}
        g = self.parsed(self.text("model"), "the graph", constants)
        try:
            table, places = json.loads(self.text("locations"))
            locs = [Loc(str(n), str(op), int(v), str(file), int(line), bool(d)) for n, op, v, file, line, d in table]
            for x, numbers in zip(places_of(g), places, strict=True):
                x.locs = tuple(locs[k] for k in numbers)
        except (ValueError, TypeError, IndexError) as e:
            raise self.wrong("section 'locations'", e) from None
        return g

    def _constant(self, dtype: str, shape: tuple[int, ...], section: str, place: Range) -> Array:
        try:
            return from_bytes(self.piece(section, place), BY_NAME[dtype], shape)
        except (ValueError, KeyError) as e:
            raise self.wrong(f"a constant {dtype}{list(shape)} in section {section!r}", e) from None

    def onnx(self) -> OnnxParts:
        """The ONNX model that it was read from."""
        data = [np.frombuffer(self.piece(d.section, d.place), np.uint8) for d in self.model.onnx or ()]
        return self.file.section("onnx").tobytes(), data

    def onnx_model(self) -> Any:
        """The same as a ModelProto."""
        from dnnc.frontends.onnx.serialize import put_together  # loads onnx

        return put_together(*self.onnx())

    def code(self) -> tuple[dict[str, bytes], frozenset[str]]:
        """Machine code by symbol, and the symbols of kernels that a device has checked."""
        if "code" not in self.file.sections:
            return {}, frozenset()
        try:
            index = [(str(s), (int(at), int(n)), bool(checked)) for s, at, n, checked in json.loads(self.text("code"))]
        except (ValueError, TypeError) as e:
            raise self.wrong("section 'code'", e) from None
        size = self.file.section("objects").nbytes if index else 0
        if any(at < 0 or n < 0 or at + n > size for _, (at, n), _ in index):
            raise self.wrong("section 'code'", f"it names code outside of section 'objects', which has {size} bytes")
        return {s: self._object(place) for s, place, _ in index}, frozenset(s for s, _, checked in index if checked)

    # --- programs -----------------------------------------------------------------------------------------------------

    def kernels(self) -> dict[str, bytes]:
        """Machine code of the kernels of all programs, by symbol."""
        return {
            k.symbol: self._object(p.code[k.symbol])
            for p in self.model.programs
            for k in p.kernels
            if k.symbol in p.code
        }

    def _object(self, place: Range) -> bytes:
        return self.piece("objects", place).tobytes()

    def program(self, p: SavedProgram, backend: Backend) -> Program:
        """A program, loaded; its constants are those in the file."""
        dims, inputs, outputs, arena = self._types(p)
        constants = np.frombuffer(self.file.section(p.constants), np.uint8)

        def graph_text(locs: bool) -> str:
            return self.text("graphs", p.graph_locs if locs else p.graph)

        program = Program(
            tuple(self._kernel(p, n) for n in range(len(p.kernels))),
            {symbol: self._object(place) for symbol, place in p.code.items()},
            self._calls(p, constants.nbytes, len(dims)),
            {},
            dims,
            inputs,
            outputs,
            arena,
            constants.nbytes,
            lambda: constants,
            graph_text,
            flush=self.model.options.get("numerics") == "fast",
        )
        try:
            backend.load(program)
        except DnncError as e:
            raise self.wrong("section 'objects'", e) from None
        return program

    def _types(self, p: SavedProgram) -> tuple[tuple[Var, ...], tuple[TensorType, ...], tuple[TensorType, ...], Arena]:
        """Dims, inputs, outputs and arena of a program."""
        types = [v.type for v in self.parsed(p.types, "the types of a program").inputs]
        dims = tuple(d for d in types[0].shape if isinstance(d, Var)) if types else ()
        slots = types[1 + p.outputs :]
        if (
            not types
            or len(dims) != types[0].rank
            or p.outputs != len(self.model.outputs)
            or not len(slots) == len(p.lives) == len(p.pieces)
            or any(t.rank != 1 for t in slots)
        ):
            raise self.wrong(
                "the types of a program",
                f"{len(types)} for dims, {count(len(self.model.outputs), 'output')} and {count(len(p.lives), 'slot')}",
            )
        inputs = tuple(v.type for v in self.interface.inputs)
        return dims, inputs, tuple(types[1 : 1 + p.outputs]), Arena(tuple(t.shape[0] for t in slots), p.lives, p.pieces)

    def _kernel(self, p: SavedProgram, number: int) -> CompiledKernel:
        k = p.kernels[number]
        return CompiledKernel(
            k.name, k.symbol, self.text("operator", k.text), k.choice, k.parallel, k.where, k.calls, k.nodes
        )

    def _calls(self, p: SavedProgram, constants: int, dims: int) -> tuple[Call, ...]:
        buffers = len(self.model.inputs) + len(self.model.outputs)
        limits = {**dict(zip(SPACES, (buffers, constants, len(p.lives)))), "size": 1 << 63}

        def places(saved: Sequence[SavedPlace]) -> tuple[MemoryRef, ...]:
            for space, number, *_ in saved:
                if not 0 <= number < limits.get(space, 0):
                    raise self.wrong("a call", f"it reads {space} {number}, of which there are {limits.get(space, 0)}")
            lives = [
                p.lives[number] if space == "arena" and offset < 0 and not p.pieces[number] else None
                for space, number, offset, *_ in saved
            ]
            return tuple(MemoryRef(*x, life=life) for x, life in zip(saved, lives))

        out = []
        for c in p.calls:
            if not 0 <= c.kernel < len(p.kernels) or any(not 0 <= d < dims for d in c.dims):
                raise self.wrong(
                    "a call", f"it is of kernel {c.kernel} of {len(p.kernels)} with dims {list(c.dims)} of {dims}"
                )
            k = p.kernels[c.kernel]
            out.append(Call(k.symbol, places(c.args), places(c.writes), c.dims, k.parallel))
        return tuple(out)

    def reporter(self, p: SavedProgram) -> Callable[[], ProgramReport]:
        """Gives what the compilation of a program told, but for times, which a file does not keep."""

        def read() -> ProgramReport:
            from dnnc.passes.base import PassRecord  # loads passes, which a saved model does without

            r = p.report
            passes = tuple(PassRecord(x.name, 0.0, x.nodes_before, x.nodes_after, x.changed, x.notes) for x in r.passes)
            kernels = tuple(
                KernelReport(k.name, k.symbol, len(k.calls), k.choice, k.parallel, k.flops, k.bytes, k.calls)
                for k in p.kernels
            )
            return ProgramReport(r.dims, r.symbolic, passes, kernels, MemoryReport(*r.memory), 0, r.fallbacks, {})

        return read


def places_of(graph: Graph) -> list[Any]:
    """All of a graph and its subgraphs that carries locations (values and nodes), in a fixed order."""
    out: list[Any] = [*graph.inputs, *graph.constants]
    for n in graph.nodes():
        out += [n, *n.outputs]
        for s in n.subgraphs():
            out += places_of(s)
    return out
