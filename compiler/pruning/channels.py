"""Which channels of which tensors go together: what must be removed from the rest of a graph with a channel.

Each output channel of a layer is an atom. Values carry the atoms of one of their axes; residuals, gates and grouped
convolutions join atoms, concatenations, slices and reshapes line them up, and what is not understood holds them. In
the end an atom stands for positions along axes of weights, biases and scales: removing these removes the channel
exactly.

    conv1.w[atoms, :] -> relu -> conv2.w[:, atoms]          removable
    conv1.w[atoms, :] -> softmax over channels              held
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from dnnc.pruning import channel_rules, channel_shapes
from dnnc.pruning.lays import Array, Edit, Entry, Extent, Lay, Left, Place, Written
from dnnc.quantization.onnx_graph import Model

ENOUGH = 4  # different channels along an axis that others are tied for


class Channels:
    """The channels of a model.

    Attributes:
        places: the atoms along axes of constants, as roots.
        depthwise: names of convolutions in as many groups as channels, whose `group` follows what stays.
        summed: channels that products of activations add up, so that no weights read them.
        edits: operands that count channels.
        layers: by the constant of their weights, nodes whose output channels may go beside convolutions and products.
        spans: parts of concatenations and slices, as roots: of each at least one channel stays.
        choices: axes that the channels of a Reshape can lie along, and the channels of the one that was taken.
    """

    def __init__(self, m: Model, taken: Mapping[str, int] | int = 0) -> None:
        """All channels.

        Args:
            taken: where a Reshape cuts channels into several axes, as in heads, groups or pixels: the number of the
                axis along which they go, by the node's name; or the same for all.
        """
        self.model = m
        self.taken = taken
        self._parents: list[int] = []
        self._held: dict[int, str] = {}  # atoms that stay, and what needs them
        self._lays: dict[str, Lay] = {}
        self._places: dict[tuple[str, int], Place] = {}
        self._atoms: dict[Place, Array] = {}
        self._read: dict[str, int] = {}  # how often a constant's channels were entered
        self._spans: list[Array] = []
        self._written: dict[tuple[str, int, int], list[tuple[str, Array]]] = {}  # entries of Concat: readers, channels
        self._counted: list[tuple[Extent, Array]] = []  # computed entries, and the channels that they must count
        self.entries: dict[str, list[Entry]] = {}  # of integers that are computed from shapes
        self.choices: dict[str, tuple[int, Array]] = {}
        self.depthwise: list[str] = []
        self.summed: list[Array] = []
        self.layers: dict[str, str] = {}
        self.edits: list[Edit] = []
        for n in m.graph.node:
            self._node(n)
        outputs = {v.name for v in m.graph.output}
        for name in m.pinned:
            self.hold(f"the output {name}" if name in outputs else f"a loop or branch that reads {name}", name)
        self._hold_shared()
        self._hold_counted()
        self.roots = np.array([self._root(k) for k in range(len(self._parents))], np.int64)
        self.places = {p: self.roots[a] for p, a in self._atoms.items()}
        self.spans = [self.roots[a] for a in self._spans]
        self._held = {int(self.roots[k]): why for k, why in reversed(self._held.items())}

    def removable(self) -> set[int]:
        """Roots that stand along the outputs of a layer and that nothing holds."""
        out = [a for p, a in self.places.items() if p.made]
        return {int(r) for a in out for r in np.unique(a)} - self._held.keys()

    def holder(self, weight: str) -> str:
        """What needs output channels of a layer; empty where nothing does."""
        atoms = [a for p, a in self.places.items() if p.tensor == weight and p.made]
        return next((self._held[int(r)] for a in atoms for r in a if int(r) in self._held), "")

    def left(self, gone: set[int]) -> Left:
        """Which atoms stay without these roots."""
        roots = np.array(sorted(gone), np.int64)
        return lambda atoms: ~np.isin(self.roots[atoms], roots)

    def useful(self) -> dict[str, bool]:
        """Reshape nodes that had a choice: can enough different channels go along the axis that was taken?"""
        free = self.removable()
        return {n: len(free & set(self.roots[a].tolist())) >= ENOUGH for n, (_, a) in self.choices.items()}

    def size(self) -> float:
        """How many elements of weights lie along channels that can go."""
        free = np.array(sorted(self.removable()), np.int64)
        return sum(
            float(np.isin(a, free).mean()) * self.model.constants[p.tensor].size
            for p, a in self.places.items()
            if p.made and np.unique(a).size >= ENOUGH
        )

    # --- atoms --------------------------------------------------------------------------------------------------------

    def fresh(self, count: int) -> Array:
        """New atoms."""
        first = len(self._parents)
        self._parents.extend(range(first, first + count))
        return np.arange(first, first + count)

    def _root(self, k: int) -> int:
        while self._parents[k] != k:
            self._parents[k] = self._parents[self._parents[k]]
            k = self._parents[k]
        return k

    def join(self, a: Array, b: Array) -> None:
        """Atoms that go together."""
        if a is b:
            return
        for x, y in zip(a.tolist(), b.tolist()):
            x, y = self._root(x), self._root(y)
            if x != y:
                self._parents[max(x, y)] = min(x, y)

    def tied(self, atoms: Array, axis: int) -> Array:
        """Atoms along one axis of several: what lies at one position of it goes together."""
        columns = np.moveaxis(atoms, axis, 0).reshape(atoms.shape[axis], -1)
        for k in range(1, columns.shape[1]):
            self.join(columns[:, 0], columns[:, k])
        return columns[:, 0]

    def hold_atoms(self, why: str, atoms: Array) -> None:
        """These stay."""
        for k in atoms.tolist():
            self._held.setdefault(k, why)

    def hold(self, why: str, *values: str) -> None:
        """The channels of values stay, and those that computed shapes count."""
        for v in values:
            if v in self._lays:
                self.hold_atoms(why, self._lays[v].atoms)
        self.hold_entries(why, *values)

    def hold_entries(self, why: str, *values: str) -> None:
        """The channels stay that computed shapes count."""
        for e in (e for v in values for e in self.entries.get(v, ())):
            if isinstance(e, Extent) and e.atoms is not None:
                self.hold_atoms(why, e.atoms)

    def kept(self, why: str, count: int) -> Array:
        """New atoms that stay."""
        out = self.fresh(count)
        self.hold_atoms(why, out)
        return out

    def span(self, atoms: Array) -> None:
        """Of these at least one stays."""
        self._spans.append(atoms)

    def put(self, tensor: str, axis: int, atoms: Array, role: str) -> None:
        """Atoms along an axis of a constant; once for each reader."""
        same = self._places.get((tensor, axis))
        if same is None:
            same = self._places[tensor, axis] = Place(tensor, axis, role)
            self._atoms[same] = atoms
            return
        self.join(self._atoms[same], atoms)
        if role not in (same.role, "side") and same.role != "both":
            new = self._places[tensor, axis] = Place(tensor, axis, role if same.role == "side" else "both")
            self._atoms[new] = self._atoms.pop(same)

    def counted(self, tensor: str) -> None:
        """A reader of a constant whose channels are in their places."""
        self._read[tensor] = self._read.get(tensor, 0) + 1

    def count_must_be(self, e: Entry, reader: str, atoms: Array) -> None:
        """An entry of a computed shape that stands for the number of these atoms."""
        if isinstance(e, Extent):
            self._counted.append((e, atoms))
        elif isinstance(e, Written):
            self._written.setdefault((e.node, e.operand, e.at), []).append((reader, atoms))

    def _hold_shared(self) -> None:
        """Hold channels of constants that others read too."""
        for t, count in _constant_uses(self.model).items():
            found = [p for p in self._atoms if p.tensor == t]
            if found and count != self._read.get(t, 0):
                for p in found:
                    self.hold_atoms(f"another reader of {t}", self._atoms[p])

    def _hold_counted(self) -> None:
        """Edit the numbers of channels in computed shapes; hold those that do not follow."""
        by_operand: dict[tuple[str, int], list[tuple[int, Array]]] = {}
        nodes = {n.name: n for n in self.model.graph.node}
        for (node, operand, at), reads in self._written.items():
            readers = {n.name for n in self.model.readers.get(nodes[node].output[0], ())}
            same = len({a.size for _, a in reads}) == 1
            if nodes[node].output[0] in self.model.pinned or readers != {r for r, _ in reads} or not same:
                for _, a in reads:
                    self.hold_atoms(f"{node} (Concat)", a)
                continue
            for _, a in reads[1:]:
                self.join(reads[0][1], a)
            by_operand.setdefault((node, operand), []).append((at, reads[0][1]))
        for (node, operand), found in by_operand.items():
            old = self.model.constants[nodes[node].input[operand]]
            self.edits.append(Edit(node, operand, channel_shapes.numbers(old, found)))
        for e, atoms in self._counted:
            assert e.atoms is not None
            whole, own = (Counter(self._root(k) for k in x.tolist()) for x in (e.atoms, atoms))
            if {k: v * e.ratio for k, v in whole.items()} != dict(own):
                self.hold_atoms(f"a shape of {e.value}", e.atoms)
                self.hold_atoms(f"a shape of {e.value}", atoms)

    # --- nodes --------------------------------------------------------------------------------------------------------

    def _node(self, n: onnx.NodeProto) -> None:
        rule = channel_shapes.rule(n) or channel_rules.rule(n)
        lays = rule(self, n) if rule is not None else None
        if lays is None:
            self.hold(named(n), *n.input)
            return
        if n.op_type not in channel_shapes.COUNTING and n.output[0] not in self.entries:
            self.hold_entries(named(n), *n.input)
        for o, lay in zip(n.output, lays if isinstance(lays, list) else [lays]):
            if o and lay is not None:
                self._lays[o] = lay

    def known(self, v: str) -> Lay | None:
        """The channels of a value."""
        return self._lays.get(v)

    def rank(self, v: str) -> int | None:
        """Of a value; None where it is not known."""
        return self.model.rank(v)

    def shape(self, v: str) -> tuple[int | None, ...] | None:
        """Of a value or constant."""
        if v in self.model.constants:
            return tuple(self.model.constants[v].shape)
        found = self.model.types.get(v)
        return None if found is None else found[1]

    def place(self, lay: Lay | None, v: str) -> int | None:
        """The axis of a value's channels from the left."""
        rank = self.rank(v)
        return None if lay is None or rank is None else rank + lay.axis

    def along(self, v: str, axis: int) -> Lay | None:
        """The channels of a value, where they lie along an axis from the left."""
        lay = self._lays.get(v)
        return lay if self.place(lay, v) == axis else None

    def sizes(self, v: str) -> tuple[int | str, ...] | None:
        """The shape of a value, with expressions for open sizes, equal ones for equal sizes."""
        found = self.shape(v)
        if v in self.model.open or found is None:
            return self.model.open.get(v)
        return tuple(f"{v}[{k}]" if d is None else d for k, d in enumerate(found))

    def constant(self, n: onnx.NodeProto, k: int) -> Array | None:
        """A constant operand."""
        name = n.input[k] if len(n.input) > k else ""
        return self.model.constants.get(name) if name else None

    def extent(self, v: str, axis: int) -> int | None:
        """Of a value without channels, along an axis from the right; 1 where it has none."""
        shape = self.shape(v)
        return None if shape is None else 1 if len(shape) < -axis else shape[axis]

    def edit(self, n: onnx.NodeProto, operand: int, made: Any) -> None:
        """Change an operand."""
        self.edits.append(Edit(n.name, operand, made))


def analysed(m: Model) -> Channels:
    """The channels of a model, where each Reshape that cuts channels into axes takes the first axis that is useful.

    So heads of attention go as a whole, and channels that are shuffled between groups go from each of the groups.
    """
    first = Channels(m)
    most = max((count for count, _ in first.choices.values()), default=1)
    if most < 2 or all(first.useful().values()):
        return first
    tries = [first, *(Channels(m, k) for k in range(1, most))]
    useful = [t.useful() for t in tries]
    names = {n for t in tries for n in t.choices}
    taken = {n: next((k for k, u in enumerate(useful) if u.get(n)), 0) for n in names}
    return max((Channels(m, taken), *tries), key=lambda c: c.size())


def named(n: onnx.NodeProto) -> str:
    """A node in a reason."""
    return f"{n.name or n.output[0]} ({n.op_type})"


def _constant_uses(m: Model) -> dict[str, int]:
    """How often nodes read each constant."""
    return dict(Counter(i for n in m.graph.node for i in n.input if i in m.constants))
