"""Layers of a model: nested scopes for its nodes, by which the page folds graphs.

A node's layer is the path in its ONNX name (`/encoder/layer.0/dense/MatMul`), else that in the names of its weights
(`layer1.0.conv1.weight`), else that of what it reads. Nodes of traced functions are grouped by line. No scope has more
than WIDE members: what would have more is divided into parts, so that large graphs stay usable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import PurePath
from typing import Union

from dnnc.ir.errors import Loc
from dnnc.ir.graph import Graph, Node, Value

WIDE, PARTS = 60, 30  # members of a scope at most; parts of one that has more
SHORT = 3  # nodes of a line that are a scope of their own
WEIGHT = re.compile(r"^(.+?)_(weight|bias|gamma|beta|running_mean|running_var|kernel|scale)(_.*)?$")
Path = tuple[str, ...]


@dataclass
class Scope:
    """A layer: its members are numbers of nodes, and further scopes."""

    name: str
    members: list[Union[Scope, int]] = field(default_factory=list)


def paths(nodes: Sequence[Node]) -> list[Path]:
    """The path of the layer of each node. `nodes`: of one graph and of those nested in it, in order."""
    found: dict[Node, Path] = {}
    outer = _owners(nodes)
    phases = _phases(nodes)
    lines = _lines(nodes)
    for n in nodes:
        own = _named(n) or _by_weights(n) or lines.get(n) or _inherited(n, found)
        found[n] = own
    return [(*_chain(n, outer, phases), *found[n]) for n in nodes]


def _owners(nodes: Sequence[Node]) -> dict[Graph, Node]:
    """The node that a nested graph belongs to."""
    return {s: n for n in nodes for s in n.subgraphs()}


def _chain(n: Node, outer: Mapping[Graph, Node], phases: Mapping[Node, str]) -> Path:
    """The phase of a node, and the loops and branches that it stands in."""
    around: list[str] = []
    owner = outer.get(n.graph) if n.graph is not None else None
    while owner is not None:
        around.insert(0, f"{owner.op.name} {owner.outputs[0].name}")
        n, owner = owner, outer.get(owner.graph) if owner.graph is not None else None
    return (*((phases[n],) if n in phases else ()), *around)


def _named(n: Node) -> Path:
    for loc in n.locs:
        if not loc.file and "/" in loc.name:
            return tuple(p for p in loc.name.split("/")[:-1] if p)
        if not loc.file and "." in loc.name.strip("."):
            return tuple(loc.name.split(".")[:-1])
    return ()


def _by_weights(n: Node) -> Path:
    constants = n.graph.constants if n.graph is not None else {}
    for v in n.inputs:
        found = WEIGHT.match(v.name) if v in constants and v is not None else None
        if found and not v.name.startswith("onnx__"):  # type: ignore[union-attr]
            return tuple(p for p in found[1].split("_") if p)
    return ()


def _inherited(n: Node, found: Mapping[Node, Path]) -> Path:
    """With one operand that is computed, its layer; with several, the layer around the last one."""
    made = [v.node for v in n.inputs if v is not None and v.node in found and v.node is not None]
    if not made:
        return ()
    return found[made[-1]] if len(set(made)) == 1 else max((found[m] for m in made), key=len)[:-1]


def _phases(nodes: Sequence[Node]) -> dict[Node, str]:
    """Of a graph with gradients: what is forward, what backward, and what is computed of gradients (the update)."""
    phases: dict[Node, str] = {}
    for n in nodes:
        if n.locs and n.locs[0].derivative:
            phases[n] = "backward"
        elif any(v is not None and v.node is not None and phases.get(v.node, "forward") != "forward" for v in n.inputs):
            phases[n] = "update"
        else:
            phases[n] = "forward"
    return phases if "backward" in phases.values() else {}


def _lines(nodes: Sequence[Node]) -> dict[Node, Path]:
    """Nodes of traced functions by runs of one line, `model.py:12`; a line that runs again is another layer."""
    out: dict[Node, Path] = {}
    times: dict[Loc, int] = {}
    for loc, run in groupby(nodes, key=lambda n: n.locs[0] if n.locs else None):
        members = list(run)
        if loc is None or not loc.file or len(members) < SHORT:
            continue
        name = f"{PurePath(loc.file).name}:{loc.line}"
        times[loc] = times.get(loc, 0) + 1
        label = name if times[loc] == 1 else f"{name} #{times[loc]}"
        out.update(dict.fromkeys(members, (label,)))
    return out


def tree(where: Sequence[Path]) -> Scope:
    """The scopes of nodes, numbered as they come. Chains of scopes with one member are one scope."""
    root = Scope("")
    known: dict[Path, Scope] = {(): root}
    for k, path in enumerate(where):
        for depth in range(len(path)):
            if path[: depth + 1] not in known:
                known[path[: depth + 1]] = inner = Scope(path[depth])
                known[path[:depth]].members.append(inner)
        known[path].members.append(k)
    return _divided(_joined(root))


def _joined(s: Scope) -> Scope:
    s.members = [_joined(m) if isinstance(m, Scope) else m for m in s.members]
    while len(s.members) == 1 and isinstance(s.members[0], Scope):
        inner = s.members[0]
        s.name, s.members = ".".join(p for p in (s.name, inner.name) if p), inner.members
    s.members = [m.members[0] if isinstance(m, Scope) and len(m.members) == 1 else m for m in s.members]
    return s


def _divided(s: Scope) -> Scope:
    s.members = [_divided(m) if isinstance(m, Scope) else m for m in s.members]
    if len(s.members) > WIDE:
        size = max(-(-len(s.members) // PARTS), 8)
        parts = [s.members[k : k + size] for k in range(0, len(s.members), size)]
        s.members = [_divided(Scope(f"part {k} of {len(parts)}", p)) for k, p in enumerate(parts, 1)]
    return s


def numbered(root: Scope) -> tuple[list[tuple[str, int]], dict[int, int]]:
    """Scopes as (name, number of the scope around it), the root first with -1, and the scope of each node."""
    scopes: list[tuple[str, int]] = []
    home: dict[int, int] = {}

    def visit(s: Scope, outer: int) -> None:
        here = len(scopes)
        scopes.append((s.name, outer))
        for m in s.members:
            if isinstance(m, Scope):
                visit(m, here)
            else:
                home[m] = here

    visit(root, -1)
    return scopes, home


def constants_of(n: Node) -> list[Value]:
    """The weights that a node reads."""
    g = n.graph
    return [] if g is None else [v for v in n.inputs if v is not None and (v in g.constants or v in g.parameters)]
