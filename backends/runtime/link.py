"""Links a scheduled program: its constants in one block, its values at their places, its steps as calls, its loops and
branches as records.

It knows no backend: `dnnc.backends.llvm` makes an entry function of it, `dnnc.backends.cuda` a recorded graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dnnc.backends.runtime.frames import ALIGN, aligned_array, aligned_empty
from dnnc.backends.runtime.program import (
    CONTROL,
    Branch,
    Call,
    Carried,
    CompiledKernel,
    ConstantPlace,
    Control,
    Loop,
    MemoryRef,
    Program,
    Row,
)
from dnnc.ir.errors import Loc, count, locations
from dnnc.ir.expr import const, unwrap, value
from dnnc.ir.graph import Graph, Value
from dnnc.ir.loops.stmt import Buffer, stored
from dnnc.ir.op import Trait
from dnnc.ir.types import Dim, TensorType
from dnnc.passes.analysis.alias import root as root_of
from dnnc.passes.planning.program import AnyStep, ControlStep, ScheduledGraph, Step

Array = np.ndarray[Any, Any]
PROBED = 1024  # elements of a constant that are looked at before it is hashed


def pack(array: Array, type: TensorType) -> Array:
    """The contents of a constant's only buffer, contiguous; padding is 0."""
    return np.ascontiguousarray(_in_order(array, type))


def pack_aligned(array: Array, type: TensorType) -> Array:
    """The same in memory of its own, 64-byte aligned."""
    in_order = _in_order(array, type)
    out = aligned_array(in_order.shape, in_order.dtype)
    out[...] = in_order
    return out


def _in_order(array: Array, type: TensorType) -> Array:
    """The contents of a constant's only buffer, where possible a view of the array."""
    (packed,) = type.encoding.pack(array)
    return packed


def _packed_bytes(type: TensorType) -> int:
    """Bytes of what `pack` returns."""
    return int(str(type.nbytes))


def describe(program: ScheduledGraph, symbols: Mapping[str, str]) -> tuple[CompiledKernel, ...]:
    """The unique kernels of a program as data, in order of their first call."""
    out = []
    for text, steps in unique_kernels(program).items():
        s = steps[0]
        names = dict.fromkeys(loc.name for x in steps for n in x.group.nodes for loc in n.locs)
        calls_ = tuple(map(step_nodes, steps))
        where, parallel = locations(s.nest.locs), any(x.parallel for x in steps)
        out.append(
            CompiledKernel(s.nest.name, symbols[text], text, str(s.choice), parallel, where, calls_, tuple(names))
        )
    return tuple(out)


def describe_control(program: ScheduledGraph, texts: Sequence[str]) -> tuple[CompiledKernel, ...]:
    """The loops and branches of a program as data; `texts`: of their functions, inner ones first."""
    out = []
    for s, symbol, text in zip(program.control, control_names(program), reversed(texts)):
        node = s.node
        names = dict.fromkeys(loc.name for loc in node.locs)
        shown = ", ".join(_short(loc) for loc in dict.fromkeys(node.locs)) or node.op.name
        out.append(
            CompiledKernel(node.op.name, symbol, text, CONTROL, True, locations(node.locs), (shown,), tuple(names))
        )
    return tuple(out)


def work_of(program: ScheduledGraph, symbols: Mapping[str, str]) -> dict[str, tuple[Dim, Dim]]:
    """By symbol, floating-point operations and bytes (both ways) of a call of each kernel, loop and branch: of the
    average call of a kernel that serves several sizes.
    """
    out: dict[str, tuple[Dim, Dim]] = {}
    for text, steps in unique_kernels(program).items():
        work = [(unwrap(const(s.flops)), _moved(s)) for s in (steps if steps[0].sizes else steps[:1])]
        out[symbols[text]] = work[0] if len(work) == 1 else (_mean([f for f, _ in work]), _mean([b for _, b in work]))
    for s, symbol in zip(program.control, control_names(program)):
        length = s.node.attrs.get("length")
        flops = [const(k.flops) * (1 if length is None else length) for k in _kernels(s)]
        out[symbol] = unwrap(sum(flops, const(0))), _moved(s)
    return out


def _mean(numbers: Sequence[Dim]) -> Dim:
    return unwrap(sum(map(const, numbers), const(0)) // len(numbers))  # type: ignore[no-any-return]


def _moved(s: AnyStep) -> Dim:
    return unwrap(sum((const(v.type.nbytes) for v in s.params), const(0)))  # type: ignore[no-any-return]


def _kernels(s: AnyStep) -> Iterator[Step]:
    """The kernels within a loop or branch."""
    if isinstance(s, Step):
        yield s
        return
    for b in s.bodies:
        for x in b.steps:
            yield from _kernels(x)


def control_names(program: ScheduledGraph) -> list[str]:
    """The symbols of `program.control`."""
    return [f"control_{k}" for k in range(len(program.control))]


def unique_kernels(program: ScheduledGraph) -> dict[str, list[Step]]:
    """The steps by the text of their kernel, in order of the first call."""
    out: dict[str, list[Step]] = {}
    for s in program.kernels:
        out.setdefault(s.text, []).append(s)
    return out


def step_nodes(s: Step) -> str:
    """`conv1 (Conv), relu1 (Relu)`: the nodes of the model that a call computes, or where none is known its ops."""
    locs = dict.fromkeys(loc for n in s.group.nodes for loc in n.locs)
    return ", ".join(_short(loc) for loc in locs) or " + ".join(n.op.name for n in s.group.nodes)


def _short(loc: Loc) -> str:
    return f"{loc.name or '?'} ({loc.op})" if loc.op and not loc.file else str(loc)


@dataclass(frozen=True)
class ConstantBlock:
    """Return the 64-byte aligned places of kernels' constants in a block of `nbytes`: of each value and array."""

    nbytes: int
    offsets: Mapping[Value, int]
    places: tuple[ConstantPlace, ...]

    def block(self) -> Array:
        """The block."""
        return block_of(self.nbytes, self.places)


def block_of(nbytes: int, places: Sequence[ConstantPlace]) -> Array:
    """A block of so many bytes with constants at their places."""
    block = aligned_empty(nbytes)
    block[:] = 0  # the gaps too, so that a saved block is always the same
    for at, a, type in places:  # one after the other, so that no more than one is there twice
        in_order = _in_order(a, type)
        block[at : at + in_order.nbytes].view(in_order.dtype).reshape(in_order.shape)[...] = in_order
    return block


def place_constants(program: ScheduledGraph, parameters: bool = False) -> ConstantBlock:
    """Places of kernels' constants, equal bytes shared. `parameters`: room for what kernels read of them behind."""
    aliases = program.memory.aliases
    places: list[ConstantPlace] = []
    offsets: dict[Value, int] = {}
    alike: dict[tuple[str, bytes], list[tuple[int, Graph, Value]]] = {}
    total = 0
    read = {v: graph for s, graph in program.walk() for v in s.params if program.memory.place[v][0] == "constant"}
    for v, graph in read.items():
        root, inside = root_of(aliases, v)  # a view of a constant is its bytes
        a = graph.constants[root]
        known = alike.setdefault((str(root.type), _probe(a)), [])
        at = next((at for at, g, r in known if g.constants[r] is a or g.digest(r) == graph.digest(root)), None)
        if at is None:
            at = total
            known.append((at, graph, root))
            places.append((at, a, root.type))
            total += -(-_packed_bytes(root.type) // ALIGN) * ALIGN
        offsets[v] = at + inside
    if parameters:
        total = _lay_out_parameters(program, offsets, total)
    return ConstantBlock(max(total, 1), offsets, tuple(places))


def _probe(a: Array) -> bytes:
    """Some elements of an array: arrays that differ in them need not be hashed."""
    return a.reshape(-1)[:: max(a.size // PROBED, 1)].tobytes() if a.flags.c_contiguous else b""


def _lay_out_parameters(program: ScheduledGraph, offsets: dict[Value, int], start: int) -> int:
    """Enter the places of what is read of parameters; gives the byte behind them."""
    memory, at = program.memory, [start]
    for _, t in memory.bound:
        at.append(at[-1] + -(-_packed_bytes(t) // ALIGN) * ALIGN)
    for v in dict.fromkeys(v for s, _ in program.walk() for v in s.params):
        space, number = memory.place[v]
        if space == "parameter":
            offsets[v] = at[number] + memory.inside.get(v, 0)
    return at[-1]


class Linker:
    """Gives the values of a program their places, and its steps their calls; offsets are literal when every size is."""

    def __init__(self, program: ScheduledGraph, symbols: Mapping[str, str], constants: Mapping[Value, int]) -> None:
        self.program, self.symbols, self.constants = program, symbols, constants
        self.static = not program.dims
        self.plan = program.arena
        self.placed = self.plan.offsets({}) if self.static else ([], 0)
        self.arena = self.placed[0]
        self.position = {v: k for k, v in enumerate(program.dims)}
        self.names = dict(zip((s.group for s in program.control), control_names(program)))

    def place(self, v: Value, graph: Graph) -> MemoryRef:
        memory = self.program.memory
        space, number = memory.place[v]
        if space == "constant" or (space == "parameter" and v in self.constants):
            return MemoryRef("constant", self.constants[v])
        inside, size = memory.inside.get(v, 0), value(const(v.type.nbytes))
        if space == "parameter":
            return MemoryRef("parameter", number, inside=inside)
        if space in ("input", "output"):
            at = number + (len(graph.inputs) if space == "output" else 0)
            return MemoryRef("buffer", at, nbytes=-1 if size is None else size, inside=inside)
        return self.slot(number, inside, size)

    def slot(self, number: int, inside: int = 0, size: int | None = None) -> MemoryRef:
        if not self.static:
            return MemoryRef("arena", number, inside=inside, life=self.plan.held(number))
        whole = value(const(self.program.memory.slots[number].nbytes))
        return MemoryRef("arena", number, self.arena[number] + inside, (whole or 0) if size is None else size)

    def entry(self) -> list[Call]:
        """The calls of the entry function."""
        return self.calls(self.program.graph, self.program.steps)

    def calls(self, graph: Graph, steps: Sequence[AnyStep]) -> list[Call]:
        """The steps of a program, or of a body of one of its loops, as calls with places."""
        return [
            self.control_call(s, graph) if isinstance(s, ControlStep) else self.kernel_call(s, graph) for s in steps
        ]

    def kernel_call(self, s: Step, graph: Graph) -> Call:
        written = stored(s.nest.entry.body)
        places = [self.place(v, graph) for v in s.params]
        buffers: Sequence[Buffer] = s.nest.entry.buffers
        writes = tuple(a for a, b in zip(places, buffers) if b in written)
        args = (*(MemoryRef("size", n) for n in s.sizes), *places)
        return Call(self.symbols[s.text], args, writes, tuple(self.position[d] for d in s.dims), s.parallel)

    def control_call(self, s: ControlStep, graph: Graph) -> Call:
        args = (*(self.place(v, graph) for v in s.params), *map(self.slot, s.scratch))
        reads = len(s.params) - len(s.node.outputs)
        return Call(self.names[s.group], args, (*args[reads:], *map(self.slot, s.within)), (), True)

    def controls(self) -> list[Control]:
        """The loops and branches of the program, inner ones before those that call them."""
        return [
            self.loop(s) if Trait.ITERATES in s.node.op.traits else self.branch(s)
            for s in reversed(self.program.control)
        ]

    def loop(self, s: ControlStep) -> Loop:
        node, body = s.node, s.bodies[0]
        arg = iter(range(len(s.params)))
        given = [None if v is None else next(arg) for v in node.inputs]
        made = list(arg)
        n, m = int(node.attrs["carried"]), int(node.attrs["scanned"])
        back = node.attrs["backward"] or (False,) * (m + len(node.outputs) - n)
        rest = [k for k in given[2:] if k is not None]
        scratch = len(s.params)
        carried = tuple(Carried(rest[j], made[j], scratch + j, _bytes(v)) for j, v in enumerate(node.outputs[:n]))
        scanned = tuple(Row(rest[n + j], _bytes(body.graph.inputs[1 + n + j]), back[j]) for j in range(m))
        first = n + (given[1] is not None)
        stacked = tuple(Row(made[n + j], _bytes(v), back[m + j]) for j, v in enumerate(body.graph.outputs[first:]))
        length = node.attrs["length"]
        assert length is None or isinstance(length, int), "programs with loops are made for fixed sizes"
        inner = tuple(self.calls(body.graph, body.steps))
        return Loop(
            self.names[s.group],
            scratch + len(s.scratch),
            given[0],
            given[1],
            length,
            carried,
            scanned,
            tuple(rest[n + m :]),
            stacked,
            scratch + n,
            inner,
        )

    def branch(self, s: ControlStep) -> Branch:
        reads = len(s.params) - len(s.node.outputs)
        then, other = (tuple(self.calls(b.graph, b.steps)) for b in s.bodies)
        captured = tuple(range(reads, len(s.params)))
        return Branch(self.names[s.group], len(s.params), 0, tuple(range(1, reads)), captured, then, other)


def _bytes(v: Value) -> int:
    n = v.type.nbytes
    assert isinstance(n, int), "programs with loops are made for fixed sizes"
    return n


def in_words(c: Control) -> str:
    """A loop or branch as a sentence, for backends whose control flow has no text."""
    if not isinstance(c, Loop):
        return f"{c.symbol}: {count(len(c.then), 'call')} if the condition holds, else {len(c.other)}\n"
    end = "" if c.condition is None else " while the condition holds"
    often = (
        "as often as asked"
        if c.length is None
        else f"{c.length} times"
        if c.trips is None
        else f"as often as asked, {c.length} times at most"
    )
    return f"{c.symbol}: {count(len(c.body), 'call')}, {often}{end}\n"


def link(
    scheduled: ScheduledGraph,
    symbols: Mapping[str, str],
    control_text: Callable[[Control], str] = in_words,
    parameters: bool = False,
) -> Program:
    """A scheduled graph as a program that has no machine code yet.

    Args:
        scheduled: kernels with their plan.
        symbols: names of kernels by their text.
        control_text: what a loop or branch is shown as.
        parameters: True if what kernels read of parameters lies behind the constants.
    """
    constants = place_constants(scheduled, parameters)
    linker = Linker(scheduled, symbols, constants.offsets)
    controls = linker.controls()
    graph = scheduled.graph
    return Program(
        (*describe(scheduled, symbols), *describe_control(scheduled, [control_text(c) for c in controls])),
        {},
        tuple(linker.entry()),
        {c.symbol: c for c in controls},
        scheduled.dims,
        tuple(v.type for v in graph.inputs),
        tuple(v.type for v in graph.outputs),
        linker.plan,
        constants.nbytes,
        constants.block,
        graph.text,
        make_scheduled=lambda: scheduled,
        donated=dict(graph.donated),
        constant_places=constants.places,
        work=work_of(scheduled, symbols),
        placed=(tuple(linker.arena), linker.placed[1]) if linker.static else None,
    )
