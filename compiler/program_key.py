"""The key of a program in the cache: a hash of everything that decides what a compilation gives.

    graph      its text (names, types, dims, nodes, content hashes of constants), parameters, donations, locations
    sizes      for which the program is made
    options    every field of CompileOptions that is not in APART
    backend    its class, target and facts, and what machine code depends on
    versions   of dnnc and its sources, Python and NumPy

Files and lines of locations are numbered in the order in which they occur (`SourceLines`): a script that is edited
above a traced function gives the same key, and the texts of the program name the new lines.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from dnnc.backends.runtime.frames import cpu_count
from dnnc.ir.errors import Loc
from dnnc.ir.graph import Graph
from dnnc.ir.graph.show import every_node
from dnnc.ir.op import Trait, known_ops
from dnnc.options import CompileOptions, steps_down
from dnnc.schedules import sources_version
from dnnc.tune_option import plain_winners

if TYPE_CHECKING:
    from dnnc.backends.base import Backend

FORMAT = "program-1"  # of entries
APART = {  # options that have no part in the key, each with the reason
    "target": "the backend's target and facts have all of it",
    "threads": "the backend's target has the threads of a call; others only compile",
    "dims": "the graph has the sizes and bounds",
    "outputs": "the graph has them",
    "donate": "the graph has the pairs",
    "tune": "its winners are in the key",
    "verify": "whether kernels are checked is in the key; the model is checked at each compilation",
    "strict_compile": "whether a compilation may step down is in the key, which environment variables decide too",
    "custom_ops": "the graph has their nodes",
    "cache": "it says where programs are kept, not what they are",
}
MARK = "\x01"  # around the number of a line; JSON text has no such character
PARALLEL = 1 << 24  # bytes of constants from which they are hashed by several threads


class SourceLines:
    """The lines of source files that a graph's locations name, by number in the order in which they occur."""

    def __init__(self, graph: Graph) -> None:
        self.numbers: dict[tuple[str, int], int] = {}
        self._texts: dict[Loc, str] = {}
        self.text = "\n".join(",".join(map(self._text, locs)) for locs in _locations(graph))
        self._lines = [json.dumps(f"{file}:{line}")[1:-1] for file, line in self.numbers]

    def _text(self, loc: Loc) -> str:
        """A location without its line."""
        found = self._texts.get(loc)
        if found is None:
            at = self.numbers.setdefault((loc.file, loc.line), len(self.numbers)) if loc.file else ""
            found = self._texts[loc] = repr((loc.name, loc.op, loc.opset, loc.derivative, at))
        return found

    def taken_out(self, text: str) -> str:
        """JSON text with numbers in the place of lines."""
        if not self._lines:
            return text
        known = {line: f"{MARK}{k}{MARK}" for k, line in enumerate(self._lines)}
        files = sorted({line.rpartition(":")[0] for line in known}, key=lambda file: (-len(file), file))
        pattern = re.compile(rf"(?:{'|'.join(map(re.escape, files))}):\d+")
        return pattern.sub(lambda m: known.get(m[0], m[0]), text)

    def put_in(self, text: str) -> str:
        """JSON text with the lines of this graph. ValueError, IndexError: it is of another graph."""
        parts = text.split(MARK)
        parts[1::2] = [self._lines[int(k)] for k in parts[1::2]]
        return "".join(parts)


def _locations(g: Graph) -> Iterator[tuple[Loc, ...]]:
    """The locations of a graph's values and nodes, in the order of its text."""
    for v in (*g.inputs, *g.parameters, *g.constants):
        yield v.locs
    for n in g.nodes():
        for s in n.subgraphs():
            yield from _locations(s)
        yield n.locs
        for o in n.outputs:
            yield o.locs


@dataclasses.dataclass(frozen=True)
class ProgramKey:
    """A hex SHA-256, and the lines that texts of the program name."""

    key: str
    lines: SourceLines


def program_key(
    graph: Graph,
    sizes: Sequence[tuple[str, int]],
    lows: Mapping[str, int] | None,
    names: tuple[Sequence[str], Sequence[str]],
    options: CompileOptions,
    backend: Backend,
) -> ProgramKey | None:
    """The key of the program of a graph before all passes.

    Args:
        graph: what is compiled.
        sizes: of its dims, for which the program is made.
        lows: of a program for all sizes, the bounds of dims that it needs; else None.
        names: users' names of inputs and outputs, which remarks of the report contain.
        options: of the compilation.
        backend: of the target.

    Returns:
        None where an op is a user's code, of which no text tells all.
    """
    if not all(map(_told_by_text, {n.op: n for n in every_node(graph)}.values())):
        return None
    hash_constants(graph)
    lines = SourceLines(graph)
    h = hashlib.sha256()
    dims = list(sizes), None if lows is None else sorted(lows.items())
    for part in (FORMAT, *_graph(graph), lines.text, *_setting(options, backend), *dims, *map(list, names)):
        text = part if isinstance(part, str) else repr(part)
        h.update(b"%d:" % len(text) + text.encode("utf-8", "surrogatepass"))
    return ProgramKey(h.hexdigest(), lines)


def hash_constants(graph: Graph) -> None:
    """Hash the constants of a graph and its subgraphs, which graphs do once for each array."""
    todo = [(g, v) for g in _graphs(graph) for v in g.constants]
    if sum(g.constants[v].nbytes for g, v in todo) < PARALLEL:
        return  # its text hashes them
    with ThreadPoolExecutor(cpu_count()) as pool:
        list(pool.map(lambda at: at[0].digest(at[1]), todo))


def _graphs(graph: Graph) -> list[Graph]:
    return [graph, *(s for n in every_node(graph) for s in n.subgraphs())]


def _told_by_text(n: Any) -> bool:
    """Does the text of a graph tell all of a node's op?"""
    if known_ops().get(n.op.name) is n.op:
        return True
    return Trait.CUSTOM in n.op.traits and Trait.FOREIGN not in n.op.traits and n.op.compute is not None


def _graph(g: Graph) -> Iterator[Any]:
    yield g.text()
    yield sorted(g.donated.items())
    yield [sorted((k, str(e)) for k, e in which.items()) for which in (g.held, g.internal)]
    yield [(v.name, held.name) for v, held in g.parameters.items()]
    yield "" if g.prologue is None else g.prologue.text()


def _setting(options: CompileOptions, backend: Backend) -> Iterator[Any]:
    """What decides beside the graph."""
    yield [(f.name, getattr(options, f.name)) for f in dataclasses.fields(options) if f.name not in APART]
    yield steps_down(options), bool(options.verify)
    if isinstance(options.tune, Mapping):
        yield json.dumps(plain_winners(options.tune), sort_keys=True), str(getattr(options.tune, "source", ""))
    kind = type(backend)
    yield kind.__module__, kind.__qualname__, backend.name, backend.text, backend.code_version
    yield plain(backend.target), plain(backend.facts(options.numerics)), plain(backend.limits)
    yield sources_version(), sys.version_info[:3], np.__version__


def plain(x: Any) -> Any:
    """Facts as data whose `repr` is the same in every process."""
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return type(x).__name__, [(f.name, plain(getattr(x, f.name))) for f in dataclasses.fields(x)]
    if isinstance(x, (set, frozenset)):
        return sorted(map(repr, x))
    if isinstance(x, Mapping):
        return [(k, plain(v)) for k, v in x.items()]
    if isinstance(x, (tuple, list)):
        return [plain(v) for v in x]
    if callable(x):
        inner = getattr(x, "func", x)  # of a partial function, whose arguments are the target's facts
        return getattr(inner, "__module__", ""), getattr(inner, "__qualname__", type(inner).__name__)
    return x
