"""Records of a saved model's manifest, by `dnnc.backends.runtime.codec`. A `Range` points into sections."""

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


SavedPlace = tuple[str, int, int, int, int]  # the fields of MemoryRef but `life`


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
    """One compiled program."""

    sizes: tuple[int, ...]  # the sizes that it serves, in the order of the dims' names; () serves all
    types: str  # its dims, outputs and arena slots as the signature of a graph; see `dnnc.ir.graph.types_text`
    outputs: int  # how many outputs there are
    lives: tuple[tuple[int, int], ...]  # first and last step of each slot
    # of slots that several kernels fill: the byte, the bytes, and the step that writes them
    pieces: tuple[tuple[tuple[int, int, int], ...], ...]
    calls: tuple[SavedCall, ...]  # what the entry function does
    kernels: tuple[SavedKernel, ...]  # the unique kernels
    code: dict[str, Range]  # machine code by symbol, in the section "objects"
    constants: str  # the section of the constants; empty in a small file, which has none
    graph: Range  # the graph after the passes, in the section "graphs"
    graph_locs: Range  # the same with node names as comments
    report: SavedReport  # what its compilation told


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
    """A saved model."""

    # "programs" (linked programs, ready to run), "graph" (a graph to compile or interpret, perhaps with machine code
    # for its kernels), or "onnx" (a model that is read for the inputs of a call)
    kind: str
    dnnc: str  # version that wrote it
    code_version: str  # of the backend; changes with everything that machine code depends on
    target: str  # as the user gave it
    machine: dict[str, Any] | None  # facts of the machine that code is for; None if there is no code
    options: dict[str, Any]  # the compile options that are not the machine's
    inputs: tuple[str, ...]  # what users call the inputs
    outputs: tuple[str, ...]  # what users call the outputs
    input_types: str  # the inputs as the signature of a graph
    output_types: str  # the outputs so
    shared: dict[str, int] | None  # see GraphCompiler
    constants: tuple[SavedConstant, ...]  # of the imported graph, whose text is the section "model"
    # the tensors of the ONNX model, which is the section "onnx"; None where there is none
    onnx: tuple[SavedData, ...] | None
    programs: tuple[SavedProgram, ...]  # oldest first


def ranges(model: SavedModel) -> Iterator[tuple[str, Range]]:
    """Every place in a section that a model names."""
    yield from ((c.section, c.place) for c in model.constants)
    yield from ((d.section, d.place) for d in model.onnx or ())
    for p in model.programs:
        yield from (("objects", place) for place in p.code.values())
        yield from (("graphs", p.graph), ("graphs", p.graph_locs))
        for k in p.kernels:
            yield "operator", k.text
