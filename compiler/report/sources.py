"""The texts of a program: graph, operator IR, LLVM IR, assembly. Each is made when asked for, of loaded programs and
cached kernels too.

The operator IR of its kernels is all that a program keeps as text; LLVM IR and assembly follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dnnc.backends.llvm.compile import asm_text
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.entry import entry_text
from dnnc.backends.llvm.features import CpuTarget
from dnnc.backends.llvm.native import Native
from dnnc.backends.runtime.program import Call, NativeKernel
from dnnc.ir.errors import InputError
from dnnc.ir.loops.text import parse_kernel

STAGES = ("graph", "operator", "llvm", "asm")
COMMENT = {"graph": "#", "operator": "#", "llvm": ";", "asm": "#"}


@dataclass(frozen=True)
class Sources:
    """What the texts of a program are made of.

    Attributes:
        kernels: the unique kernels, numbered in order of their first call.
        calls: gives the calls of the entry function.
        graph_text: the graph after the passes; with True, with node names as comments.
        target: the CPU.
        naive: symbol -> operator IR before the schedule, where that is to be shown.
        flush: see Native.
    """

    kernels: tuple[NativeKernel, ...]
    calls: Callable[[], Sequence[Call]]
    graph_text: Callable[[bool], str]
    target: CpuTarget
    naive: Mapping[str, str] | None = None
    flush: bool = False

    def find(self, wanted: str | None) -> list[tuple[int, NativeKernel]]:
        """The kernels that a number, a kernel's name, a node's name or the beginning of a symbol means; all for None.

        InputError lists what there is.
        """
        return find_kernels(self.kernels, wanted)

    def kernel_text(self, k: NativeKernel, stage: str) -> str:
        """One kernel as operator IR, LLVM IR or assembly."""
        if k.control:
            return (
                self._lowered(entry_text((), functions=[x.text for x in self.kernels if x.control]), stage)
                if stage == "asm"
                else k.text
            )
        if stage == "operator":
            return k.text if self.naive is None else self.naive[k.symbol]
        return self._lowered(emit_kernel(parse_kernel(k.text), k.symbol, self.target.feature_set), stage)

    def text(self, stage: str, kernel: str | None = None, locs: bool = False) -> str:
        """The text of a stage.

        Args:
            stage: one of STAGES. `graph` is the graph after the passes.
            kernel: one kernel by its number, name, symbol or a node that it computes; None shows all, in `llvm` and
                `asm` the entry too.
            locs: node names as comments in the graph.

        Raises:
            InputError: a stage or kernel that there is not.
        """
        if not isinstance(stage, str) or stage not in STAGES:
            raise InputError(f"there is no stage {stage!r} for this target; there are {', '.join(STAGES)}")
        if stage == "graph":
            return self.graph_text(locs)
        naive = self.naive is not None and stage == "operator"
        texts = [kernel_header(n, k, COMMENT[stage], naive) + self.kernel_text(k, stage) for n, k in self.find(kernel)]
        if kernel is None and stage in ("llvm", "asm"):
            control = [k.text for k in self.kernels if k.control]
            entry = entry_text(list(self.calls()), functions=control, flush=self.flush)
            texts.append(f"{COMMENT[stage]} the entry function\n" + self._lowered(entry, stage))
        return "\n".join(texts)

    def _lowered(self, text: str, stage: str) -> str:
        return text if stage == "llvm" else asm_text(text, self.target.cpu, self.target.features)


def find_kernels(kernels: Sequence[NativeKernel], wanted: str | None) -> list[tuple[int, NativeKernel]]:
    """The kernels, numbered, that a number, a kernel's name, a node's name or the beginning of a symbol means; all for
    None.

    InputError lists what there is.
    """
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


def kernel_header(number: int, k: NativeKernel, comment: str, naive: bool) -> str:
    """What stands above a kernel's text: its number and name, its schedule, and the nodes of each of its calls."""
    calls = f"{len(k.calls)} call{'s' if len(k.calls) > 1 else ''}"
    how = "before its schedule" if naive else f"schedule {k.choice}"
    lines = [f"kernel {number}: {k.name}, {calls}, {how}", *(f"  {nodes}" for nodes in k.calls)]
    return "".join(f"{comment} {line}\n" for line in lines)


def sources_of(native: Native, target: CpuTarget) -> Sources:
    """The texts of a program that can be called."""
    return Sources(native.kernels, lambda: native.calls, native.graph_text, target, flush=native.flush)
