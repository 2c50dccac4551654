"""What the manifest of a saved model says, as records; `dnnc.backends.runtime.codec` writes and reads them.

Texts, objects and weights are not here but in sections of the file; a `Range` says where.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Union

Range = tuple[int, int]  # offset and bytes in a section
Count = Union[int, str]  # a number, or its expression in symbolic dims


@dataclass(frozen=True)
class SavedKernel:
    """See CompiledKernel and KernelReport. `text` lies in the section "operator"."""

    name: str
    symbol: str
    text: Range
    choice: str
    parallel: bool
    where: str
    calls: tuple[str, ...]
    nodes: tuple[str, ...]
    flops: Count
    bytes: Count


SavedPlace = tuple[str, int, int, int, int]  # the fields of Place


@dataclass(frozen=True)
class SavedCall:
    """See Call; the kernel by number."""

    kernel: int
    args: tuple[SavedPlace, ...]
    writes: tuple[SavedPlace, ...]
    dims: tuple[int, ...]


@dataclass(frozen=True)
class SavedPass:
    """See PassRecord; the time is not kept, so that the same model gives the same file."""

    name: str
    nodes_before: int
    nodes_after: int
    changed: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class SavedReport:
    """See ProgramReport."""

    dims: dict[str, int]
    symbolic: bool
    passes: tuple[SavedPass, ...]
    memory: tuple[int, int, int]
    fallbacks: tuple[str, ...]


@dataclass(frozen=True)
class SavedProgram:
    """One compiled program.

    Attributes:
        sizes: the sizes that it serves, in the order of the dims' names; () serves all.
        types: its dims, outputs and arena slots as the signature of a graph; see `dnnc.artifact.writer.types_text`.
        outputs: how many outputs there are.
        lives: first and last step of each slot.
        pieces: of slots that several kernels fill: the byte, the bytes, and the step that writes them.
        calls: what the entry function does.
        kernels: the unique kernels.
        code: machine code by symbol, in the section "objects".
        constants: the section of the constants; empty in a small file, which has none.
        graph: the graph after the passes, in the section "graphs".
        graph_locs: the same with node names as comments.
        report: what its compilation told.
    """

    sizes: tuple[int, ...]
    types: str
    outputs: int
    lives: tuple[tuple[int, int], ...]
    pieces: tuple[tuple[tuple[int, int, int], ...], ...]
    calls: tuple[SavedCall, ...]
    kernels: tuple[SavedKernel, ...]
    code: dict[str, Range]
    constants: str
    graph: Range
    graph_locs: Range
    report: SavedReport


@dataclass(frozen=True)
class SavedConstant:
    """A constant of the imported graph: what its text calls it by, its type, and where its elements lie."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    section: str
    place: Range


@dataclass(frozen=True)
class SavedData:
    """The bytes of a tensor of the ONNX model."""

    section: str
    place: Range


@dataclass(frozen=True)
class SavedModel:
    """A saved model.

    Attributes:
        kind: "programs" (linked programs, ready to run), "graph" (a graph to compile or interpret, perhaps with machine
            code for its kernels), or "onnx" (a model that is read for the inputs of a call).
        dnnc: version that wrote it.
        code_version: of the backend; changes with everything that machine code depends on.
        target: as the user gave it.
        machine: facts of the machine that code is for; None if there is no code.
        options: the compile options that are not the machine's.
        inputs: what users call the inputs.
        outputs: what users call the outputs.
        input_types: the inputs as the signature of a graph.
        output_types: the outputs so.
        shared: see GraphCompiler.
        constants: of the imported graph, whose text is the section "model".
        onnx: the tensors of the ONNX model, which is the section "onnx"; None where there is none.
        programs: oldest first.
    """

    kind: str
    dnnc: str
    code_version: str
    target: str
    machine: dict[str, Any] | None
    options: dict[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    input_types: str
    output_types: str
    shared: dict[str, int] | None
    constants: tuple[SavedConstant, ...]
    onnx: tuple[SavedData, ...] | None
    programs: tuple[SavedProgram, ...]


def ranges(model: SavedModel) -> Iterator[tuple[str, Range]]:
    """Every place in a section that a model names."""
    yield from ((c.section, c.place) for c in model.constants)
    yield from ((d.section, d.place) for d in model.onnx or ())
    for p in model.programs:
        yield from (("objects", place) for place in p.code.values())
        yield from (("graphs", p.graph), ("graphs", p.graph_locs))
        for k in p.kernels:
            yield "operator", k.text
