"""The texts of a program: graph, operator IR, LLVM IR, assembly. Each is made from the program when asked for, cached kernels included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dnnc.backends.llvm.build import calls, lay_out_constants, symbol_of
from dnnc.backends.llvm.compile import asm_text
from dnnc.backends.llvm.emit import emit_kernel
from dnnc.backends.llvm.entry import entry_text
from dnnc.backends.llvm.features import CpuTarget
from dnnc.ir.errors import InputError
from dnnc.ir.operator.text import show_kernel
from dnnc.passes.lower import lower
from dnnc.passes.program import Program, Step
from dnnc.report.collect import step_nodes, unique_kernels

STAGES = ("graph", "operator", "llvm", "asm")
COMMENT = {"graph": "#", "operator": "#", "llvm": ";", "asm": "#"}


@dataclass(frozen=True)
class Entry:
    """A unique kernel of a program: its number, the steps that call it, and its symbol."""

    number: int
    steps: tuple[Step, ...]
    symbol: str

    @property
    def name(self) -> str:
        return self.steps[0].kernel.name

    @property
    def nodes(self) -> set[str]:
        """Names of the model's nodes that it computes."""
        return {loc.name for s in self.steps for n in s.group.nodes for loc in n.locs}


def entries(program: Program, target: CpuTarget) -> list[Entry]:
    """The unique kernels, numbered in order of their first call."""
    return [Entry(k, tuple(steps), symbol_of(text, target)) for k, (text, steps) in enumerate(unique_kernels(program).items())]


def find(found: list[Entry], wanted: str) -> list[Entry]:
    """The kernels that a number, a kernel's name, a node's name or the beginning of a symbol means. InputError lists what there is."""
    if wanted.isdigit():
        chosen = [e for e in found if e.number == int(wanted)]
    else:
        chosen = [e for e in found if e.name == wanted or wanted in e.nodes or (len(wanted) > 3 and e.symbol.startswith(wanted))]
    if not chosen:
        listed = ", ".join(f"{e.number} {e.name}" for e in found)
        raise InputError(f"the program has no kernel {wanted!r}; there are {listed or 'none'}")
    return chosen


def source(program: Program, target: CpuTarget, stage: str, kernel: str | None = None, naive: bool = False, locs: bool = False) -> str:
    """The text of a stage.

    Args:
        program: what the passes made.
        target: the CPU, for the names of kernels and for assembly.
        stage: one of STAGES. `graph` is the graph after the passes.
        kernel: one kernel by its number, name, symbol or a node that it computes; None shows all, in `llvm` and `asm` the entry function too.
        naive: operator IR before its schedule.
        locs: node names as comments in the graph.

    Raises:
        InputError: a stage or kernel that there is not.
    """
    if stage not in STAGES:
        raise InputError(f"there is no stage {stage!r} for this target; there are {', '.join(STAGES)}")
    if stage == "graph":
        return program.graph.text(locs)
    found = entries(program, target)
    chosen = found if kernel is None else find(found, kernel)
    texts = [_header(e, stage, naive) + kernel_text(program, target, e, stage, naive) for e in chosen]
    if kernel is None and stage in ("llvm", "asm"):
        texts.append(f"{COMMENT[stage]} the entry function\n" + _entry(program, target, stage))
    return "\n".join(texts)


def kernel_text(program: Program, target: CpuTarget, e: Entry, stage: str, naive: bool = False) -> str:
    """One kernel as operator IR, LLVM IR or assembly."""
    s = e.steps[0]
    if stage == "operator":
        return show_kernel(lower(program.graph, s.group.nodes, s.group.output, program.memory.inplace.get(s.group)).kernel) if naive else s.text
    text = emit_kernel(s.kernel, e.symbol, target.feature_set)
    return text if stage == "llvm" else asm_text(text, target.cpu, target.features)


def _header(e: Entry, stage: str, naive: bool) -> str:
    calls_ = f"{len(e.steps)} call{'s' if len(e.steps) > 1 else ''}"
    how = "before its schedule" if naive and stage == "operator" else f"schedule {e.steps[0].choice}"
    lines = [f"kernel {e.number}: {e.name}, {calls_}, {how}", *(f"  {step_nodes(s)}" for s in e.steps)]
    return "".join(f"{COMMENT[stage]} {line}\n" for line in lines)


def _entry(program: Program, target: CpuTarget, stage: str) -> str:
    symbols: Mapping[str, str] = {s.text: symbol_of(s.text, target) for s in program.steps}
    text = entry_text(calls(program, symbols, lay_out_constants(program)[1]))
    return text if stage == "llvm" else asm_text(text, target.cpu, target.features)
