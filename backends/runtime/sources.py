"""The texts of a program: its graph, the operator IR of its kernels, and the backend's own languages.

The operator IR of its kernels is all that a program keeps as text; other stages follow from it when asked for, so
loaded programs and cached kernels have them too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dnnc.backends.runtime.program import CompiledKernel, Program
from dnnc.ir.errors import InputError

if TYPE_CHECKING:
    from dnnc.backends.base import Backend


@dataclass(frozen=True)
class Sources:
    """What the texts of a program are made of."""

    program: Program  # kernels are numbered in order of their first call
    backend: Backend  # prints them
    naive: Mapping[str, str] | None = None  # symbol -> operator IR before the schedule, where that is to be shown

    def find(self, wanted: str | None) -> list[tuple[int, CompiledKernel]]:
        """Return kernels by number, name, node name or symbol prefix; all for None. InputError lists what there is."""
        return find_kernels(self.program.kernels, wanted)

    def kernel_text(self, k: CompiledKernel, stage: str) -> str:
        """One kernel at a stage behind "graph"."""
        if stage != "operator":
            return self.backend.kernel_text(k, stage)
        return k.text if self.naive is None or k.control else self.naive[k.symbol]

    def text(self, stage: str, kernel: str | None = None, locs: bool = False) -> str:
        """The text of a stage.

        Args:
            stage: one of the backend's stages. "graph" is the graph after the passes.
            kernel: one kernel by its number, name, symbol or a node that it computes; None shows the whole program.
            locs: node names as comments in the graph.

        Raises:
            InputError: there is no such stage or kernel.
        """
        stages = self.backend.stages
        if not isinstance(stage, str) or stage not in stages:
            raise InputError(f"there is no stage {stage!r} for this target; there are {', '.join(stages)}")
        if stage == "graph":
            return self.program.graph_text(locs)
        own = stage not in ("graph", "operator")
        comment = self.backend.comments.get(stage, "#")
        naive = self.naive is not None and stage == "operator"
        texts = [kernel_header(n, k, comment, naive) + self.kernel_text(k, stage) for n, k in self.find(kernel)]
        if own and kernel is None and (rest := self.backend.program_text(self.program, stage)):
            texts.append(rest)
        return "\n".join(texts)


def find_kernels(kernels: Sequence[CompiledKernel], wanted: str | None) -> list[tuple[int, CompiledKernel]]:
    """Return the numbered kernels that a number, name, node or symbol prefix means, or all. InputError lists them."""
    found = list(enumerate(kernels))
    if wanted is None:
        return found
    if isinstance(wanted, int) and not isinstance(wanted, bool):
        wanted = str(wanted)
    if not isinstance(wanted, str):
        raise InputError(f"kernel={wanted!r}: expected a number, a name or a symbol")
    if wanted.isdigit():
        chosen = [(n, k) for n, k in found if n == int(wanted)]
    else:
        chosen = [
            (n, k)
            for n, k in found
            if k.name == wanted or wanted in k.nodes or (len(wanted) > 3 and k.symbol.startswith(wanted))
        ]
    if not chosen:
        listed = ", ".join(f"{n} {k.name}" for n, k in found)
        raise InputError(f"the program has no kernel {wanted!r}; there are {listed or 'none'}")
    return chosen


def kernel_header(number: int, k: CompiledKernel, comment: str, naive: bool) -> str:
    """What stands above a kernel's text: its number and name, its schedule, and the nodes of each of its calls."""
    calls = f"{len(k.calls)} call{'s' if len(k.calls) > 1 else ''}"
    how = "before its schedule" if naive else f"schedule {k.choice}"
    lines = [f"kernel {number}: {k.name}, {calls}, {how}", *(f"  {nodes}" for nodes in k.calls)]
    return "".join(f"{comment} {line}\n" for line in lines)
