"""Programs of earlier compilations: records in the kernel cache, by `dnnc.program_key`.

An entry has what a linked program consists of, without weights: these are named by what they are of the model's
(`dnnc.constant_sources`). What passes computed of weights is kept by its content, once for all programs that read it.
Machine code is that of the kernel cache, by symbol. So neither passes nor plans nor schedules run again. An entry that
is damaged, or of which some part is gone, is a miss.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from dnnc.backends.runtime import codec
from dnnc.backends.runtime.device import Launch
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.link import block_of
from dnnc.backends.runtime.program import Branch, Call, CompiledKernel, ConstantPlace, Loop, Program
from dnnc.backends.runtime.prologue import Prologue
from dnnc.constant_sources import Source, Sources, elements, model_constants
from dnnc.ir.arena import Arena, Life, Piece
from dnnc.ir.dtype import u8
from dnnc.ir.errors import DnncError
from dnnc.ir.expr import Var
from dnnc.ir.graph import Graph
from dnnc.ir.graph.constant_text import large_constants
from dnnc.ir.graph.text import parse
from dnnc.ir.graph.types_text import numbered, read_types, show_types
from dnnc.ir.types import Dim, TensorType
from dnnc.passes.base import PassRecord
from dnnc.program_key import ProgramKey

if TYPE_CHECKING:
    from dnnc.backends.base import Backend

Array = np.ndarray[Any, Any]
MOST_SHARE = 32  # of the limit of the cache that such constants of a program may take, or it is not kept


@dataclass(frozen=True)
class KeptPrologue:
    """The graph of a prologue, and its large constants by content hash."""

    text: str
    constants: tuple[tuple[str, Source], ...]


@dataclass(frozen=True)
class KeptProgram:
    """See Program. A dim is a number, or -1 - k for the k-th dim of the first type of `types`."""

    # dims that are no numbers; dims of a call, inputs, outputs, constants, the prologue's arrays and its constants
    types: str
    inputs: int
    outputs: int
    slots: tuple[int, ...]
    lives: tuple[Life, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    placed: tuple[tuple[int, ...], int] | None
    kernels: tuple[CompiledKernel, ...]
    work: tuple[tuple[int, int], ...]
    calls: tuple[Call, ...]
    controls: tuple[Union[Loop, Branch], ...]
    launches: dict[str, Launch]
    params: dict[str, tuple[str, ...]]
    code: dict[str, bytes]  # that is no kernel's
    symbols: tuple[str, ...]  # of kernels' code, which the cache has
    constants: tuple[tuple[int, Source], ...]  # each with its byte in the block
    constant_bytes: int
    prologue: KeptPrologue | None
    donated: tuple[tuple[int, int], ...]
    flush: bool
    passes: tuple[PassRecord, ...]


class KeptPrograms:
    """The programs in a cache."""

    def __init__(self, cache: KernelCache) -> None:
        self.cache = cache

    def find(
        self, key: ProgramKey, graph: Graph, code: Callable[[str], bytes | None], backend: Backend
    ) -> tuple[Program, tuple[PassRecord, ...]] | None:
        """A program that was kept, its code loaded, and the records of its passes.

        Args:
            key: of the compilation.
            graph: of the compilation, which has the weights.
            code: gives machine code of kernels by symbol.
            backend: loads code.
        """
        data = self.cache.get(key.key)
        if data is None:
            return None
        try:
            head, tail, inside = _sections(data)
            record = codec.loads(KeptProgram, key.lines.put_in(zlib.decompress(head).decode()).encode())
            found = {symbol: data for symbol in record.symbols if (data := code(symbol)) is not None}
            if len(found) < len(record.symbols):
                return None
            made = _Reader(record, graph, inside, self.cache).program({**found, **record.code})
            backend.load(made)
        except (ValueError, KeyError, IndexError, TypeError, zlib.error, DnncError):
            return None
        made.graph_text = lambda locs: str(json.loads(key.lines.put_in(zlib.decompress(tail).decode()))[locs])
        return made, record.passes

    def put(self, key: ProgramKey, graph: Graph, program: Program, passes: Sequence[PassRecord]) -> None:
        """Keep a program, if the cache has the code of its kernels, and what passes made of constants is not too much.

        Args:
            key: of its compilation.
            graph: of its compilation, before all passes.
            program: all of whose kernels are checked.
            passes: their records.
        """
        symbols = tuple(s for s in program.code if s.startswith("k_"))
        if self.cache.reason or program.checks or not all(s[2:] in self.cache for s in symbols):
            return
        writer = _Writer(Sources(graph, self.cache.limit_bytes // MOST_SHARE))
        record = writer.record(program, symbols, tuple(passes))
        if writer.sources.too_much:
            return
        for name, a in writer.sources.kept.items():
            if name not in self.cache:
                self.cache.put(name, a.tobytes())
        texts = json.dumps([program.graph_text(False), program.graph_text(True)])
        head, tail = (
            zlib.compress(key.lines.taken_out(text).encode(), 1) for text in (codec.dumps(record).decode(), texts)
        )
        self.cache.put(key.key, _joined(head, tail, bytes(writer.sources.inside)))


def _joined(*sections: bytes) -> bytes:
    return b"".join([*(len(s).to_bytes(8, "little") for s in sections), *sections])


def _sections(data: bytes) -> tuple[bytes, bytes, bytes]:
    a, b, c = (int.from_bytes(data[k : k + 8], "little") for k in (0, 8, 16))
    if len(data) != 24 + a + b + c:
        raise ValueError("the entry has other sections")
    return data[24 : 24 + a], data[24 + a : 24 + a + b], data[24 + a + b :]


class _Writer:
    """Makes the record of a program."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.dims: list[Dim] = []

    def record(self, p: Program, symbols: tuple[str, ...], passes: tuple[PassRecord, ...]) -> KeptProgram:
        slots = tuple(map(self.dim, p.arena.sizes))
        work = tuple((self.dim(p.work[k.symbol][0]), self.dim(p.work[k.symbol][1])) for k in p.kernels)
        types = [("exprs", TensorType(u8, tuple(self.dims))), ("dims", TensorType(u8, p.dims))]
        types += [*numbered("in", p.inputs), *numbered("out", p.outputs)]
        types += numbered("constant", [t for _, _, t in p.constant_places])
        if p.prologue is not None:
            held = [TensorType(dtype, a.shape) for dtype, a in large_constants(p.prologue.graph).values()]
            types += [*numbered("bound", p.prologue.types), *numbered("held", held)]
        return KeptProgram(
            show_types("program", types),
            len(p.inputs),
            len(p.outputs),
            slots,
            p.arena.lives,
            p.arena.pieces,
            p.placed,
            p.kernels,
            work,
            p.calls,
            tuple(p.controls.values()),
            dict(p.launches),
            dict(p.params),
            {s: c for s, c in p.code.items() if s not in symbols},
            symbols,
            tuple((at, self.sources.of(a, t.dtype)) for at, a, t in p.constant_places),
            p.constant_bytes,
            None if p.prologue is None else self.prologue(p.prologue),
            tuple(p.donated.items()),
            p.flush,
            passes,
        )

    def dim(self, d: Dim) -> int:
        if isinstance(d, int):
            return d
        self.dims.append(d)
        return -len(self.dims)

    def prologue(self, p: Prologue) -> KeptPrologue:
        large = large_constants(p.graph).items()
        constants = tuple((key, self.sources.of(a, dtype)) for key, (dtype, a) in large)
        return KeptPrologue(p.graph.text(), constants)


class _Reader:
    """Makes a program of a record, whatever of it lies elsewhere being there. KeyError: it is not."""

    def __init__(self, record: KeptProgram, graph: Graph, inside: bytes, cache: KernelCache) -> None:
        self.record, self.inside, self.cache = record, inside, cache
        self.model = dict(model_constants(graph))

    def program(self, code: Mapping[str, bytes]) -> Program:
        r = self.record
        exprs, dims, *types = read_types(r.types)
        sizes = [exprs.shape[-1 - d] if d < 0 else d for d in r.slots]
        work = [tuple(exprs.shape[-1 - d] if d < 0 else d for d in w) for w in r.work]
        inputs, types = types[: r.inputs], types[r.inputs :]
        outputs, types = types[: r.outputs], types[r.outputs :]
        held, bound = types[: len(r.constants)], types[len(r.constants) :]
        places: list[ConstantPlace] = [(at, self.constant(c, t), t) for (at, c), t in zip(r.constants, held)]
        return Program(
            r.kernels,
            code,
            r.calls,
            {c.symbol: c for c in r.controls},
            tuple(d for d in dims.shape if isinstance(d, Var)),
            tuple(inputs),
            tuple(outputs),
            Arena(tuple(sizes), r.lives, r.pieces),
            r.constant_bytes,
            lambda: block_of(r.constant_bytes, places),
            lambda locs: "",
            launches=r.launches,
            params=r.params,
            prologue=None if r.prologue is None else self.prologue(r.prologue, bound),
            donated=dict(r.donated),
            flush=r.flush,
            constant_places=places,
            work={k.symbol: (w[0], w[1]) for k, w in zip(r.kernels, work, strict=True)},
            placed=r.placed,
        )

    def prologue(self, p: KeptPrologue, types: Sequence[TensorType]) -> Prologue:
        count = len(types) - len(p.constants)
        arrays = {key: self.constant(c, t) for (key, c), t in zip(p.constants, types[count:])}
        return Prologue(parse(p.text, arrays), tuple(types[:count]))

    def constant(self, c: Source, t: TensorType) -> Array:
        return elements(c, t.dtype, tuple(int(str(d)) for d in t.shape), self.model, self.inside, self.cache)
