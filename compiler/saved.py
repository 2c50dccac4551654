"""What the manifest of a saved model says: plain records to JSON data, and JSON data to records, every piece of it checked.

Texts, objects and weights are not here but in sections of the file; a `Range` says where.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, Union

T = TypeVar("T")
Range = tuple[int, int]  # offset and bytes in a section
Count = Union[int, str]  # a number, or its expression in symbolic dims
LIMIT = 1 << 63


@dataclass(frozen=True)
class SavedCpu:
    """See CpuTarget."""

    cpu: str
    features: str
    vector_bits: int
    registers: int
    threads: int
    l1: int
    l2: int


@dataclass(frozen=True)
class SavedKernel:
    """See NativeKernel and KernelReport. `text` lies in the section "operator", `object` in "objects"."""

    name: str
    symbol: str
    text: Range
    object: Range
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
        types: its dims, outputs and arena slots as the signature of a graph; see `dnnc.artifacts.types_text`.
        outputs: how many outputs there are.
        lives: first and last step of each slot.
        pieces: of slots that several kernels fill: the byte, the bytes, and the step that writes them.
        calls: what the entry function does.
        kernels: the unique kernels.
        entry: the entry function, in the section "objects".
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
    entry: Range
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
        kind: "programs", "staged" (a graph to divide at host steps and compile), "reference" (a graph to interpret), or "late" (a model that is
            read at the call).
        dnnc: version that wrote it; with it, the formats of kernels and of LLVM's objects.
        kernels: the format of kernels and their calling convention.
        llvm: the version that made the objects.
        target: as the user gave it.
        cpu: what the objects were made for; None where there are none.
        options: the compile options that are not the machine's.
        inputs: what users call the inputs.
        outputs: what users call the outputs.
        input_types: the inputs as the signature of a graph.
        output_types: the outputs so.
        shared: see Origin.
        constants: of the imported graph, whose text is the section "model".
        onnx: the tensors of the ONNX model, which is the section "onnx"; None where there is none.
        programs: oldest first.
    """

    kind: str
    dnnc: str
    kernels: str
    llvm: str
    target: str
    cpu: SavedCpu | None
    options: dict[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    input_types: str
    output_types: str
    shared: dict[str, int] | None
    constants: tuple[SavedConstant, ...]
    onnx: tuple[SavedData, ...] | None
    programs: tuple[SavedProgram, ...]


# --- to JSON and back ---------------------------------------------------------------------------------------------------------


def encode(x: Any) -> Any:
    """Records as JSON data."""
    if dataclasses.is_dataclass(x):
        return {f.name: encode(getattr(x, f.name)) for f in dataclasses.fields(x)}
    if isinstance(x, dict):
        return {k: encode(v) for k, v in x.items()}
    return [encode(v) for v in x] if isinstance(x, (tuple, list)) else x


def decode(cls: type[T], data: Any) -> T:
    """JSON data as a record. ValueError says what is expected where, and what is there."""
    made: T = _reader(cls)(data, "")
    return made


Read = Callable[[Any, str], Any]


def _reader(t: Any) -> Read:
    """The function that reads a type: made once, for there are thousands of small records."""
    if dataclasses.is_dataclass(t):
        return _record(t)
    origin, args = typing.get_origin(t), typing.get_args(t)
    if origin in (Union, types.UnionType):
        return _either(args)
    if origin is tuple:
        return _list(_reader(args[0])) if args[-1] is ... else _fixed([_reader(a) for a in args])
    if origin is dict:
        return _mapping(_reader(args[1]))
    if t is Any:
        return lambda data, where: data
    return _plain(t)


def _plain(t: Any) -> Read:
    def read(data: Any, where: str) -> Any:
        if type(data) is not t or (t is int and not -LIMIT <= data < LIMIT):
            raise _wrong(where, {int: "a 64-bit integer", str: "text", bool: "true or false"}[t], data)
        return data

    return read


def _either(options: tuple[Any, ...]) -> Read:
    readers = [None if o is type(None) else _reader(o) for o in options]

    def read(data: Any, where: str) -> Any:
        error: ValueError | None = None
        for reader in readers:
            try:
                if reader is not None:
                    return reader(data, where)
                if data is None:
                    return None
            except ValueError as e:
                error = error or e
        assert error is not None
        raise error

    return read


def _list(item: Read) -> Read:
    def read(data: Any, where: str) -> Any:
        if type(data) is not list:
            raise _wrong(where, "a list", data)
        return tuple([item(v, f"{where}[{k}]") for k, v in enumerate(data)])

    return read


def _fixed(items: list[Read]) -> Read:
    def read(data: Any, where: str) -> Any:
        if type(data) is not list or len(data) != len(items):
            raise _wrong(where, f"a list of {len(items)}", data)
        return tuple([item(v, f"{where}[{k}]") for k, (item, v) in enumerate(zip(items, data))])

    return read


def _mapping(item: Read) -> Read:
    def read(data: Any, where: str) -> Any:
        if type(data) is not dict:
            raise _wrong(where, "an object", data)
        return {k: item(v, f"{where}.{k}") for k, v in data.items()}

    return read


def _record(cls: Any) -> Read:
    hints = typing.get_type_hints(cls)
    readers = [(f.name, _reader(hints[f.name])) for f in dataclasses.fields(cls)]
    names = {name for name, _ in readers}

    def read(data: Any, where: str) -> Any:
        if type(data) is not dict or set(data) != names:
            raise _wrong(where, f"an object with {', '.join(sorted(names))}", data)
        return cls(*[reader(data[name], f"{where}.{name}") for name, reader in readers])

    return read


def _wrong(where: str, expected: str, data: Any) -> ValueError:
    got = f"an object with {', '.join(map(str, list(data)[:20]))}" if isinstance(data, dict) else repr(data)[:80]
    return ValueError(f"{where.lstrip('.') or 'the whole'}: expected {expected}, got {got}")


def ranges(model: SavedModel) -> Iterator[tuple[str, Range]]:
    """Every place in a section that a model names."""
    yield from ((c.section, c.place) for c in model.constants)
    yield from ((d.section, d.place) for d in model.onnx or ())
    for p in model.programs:
        yield "objects", p.entry
        yield from (("graphs", p.graph), ("graphs", p.graph_locs))
        for k in p.kernels:
            yield from (("objects", k.object), ("operator", k.text))
