"""The report of a compilation, as data: `f.report`. It prints as text and gives JSON; the CLI adds colour.

`dnnc.compile_program` fills it (`collect.py`), `tables.py` lays it out. Calls are not touched: all is noted while
compiling.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union

from dnnc.ir.errors import InputError, count
from dnnc.report.notebook import html_of
from dnnc.report.tables import plain_text, report_tables

if TYPE_CHECKING:
    from dnnc.passes.base import PassRecord
    from dnnc.signature import TensorSpec
    from dnnc.tools.profile import Profile

LADDER = "schedule ladder"  # the record of what had to be scheduled or grouped in another way
Count = Union[int, str]  # a number, or its expression in symbolic dims


@dataclass(frozen=True)
class KernelReport:
    """A unique kernel, called `count` times. `flops`, `bytes` (both ways) are of one call; `nodes` of each call."""

    name: str
    symbol: str
    count: int
    choice: str
    parallel: bool
    flops: Count
    bytes: Count
    nodes: tuple[str, ...]


@dataclass(frozen=True)
class MemoryReport:
    """Bytes: the arena of intermediates, the least that any plan needs (the peak alive), and the constants.

    `alive`: bytes of intermediates that are alive at each step of the program, in order; empty for a loaded one.
    """

    arena: int
    lower_bound: int
    constants: int
    alive: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class ProgramReport:
    """A program: the model at `dims`, or if `symbolic` for all sizes in bounds (memory is told for `dims`).

    `seconds` by stage: passes (graph passes, plans, schedules), compile (code generation of new kernels), check (their
        gate), link (the rest), load (of a program that the cache had as a whole).
    `fallbacks` are the nodes that run on the host.
    `kept`: the cache had the whole program, and `passes` are those of the compilation that made it.
    """

    dims: Mapping[str, int]
    symbolic: bool
    passes: tuple[PassRecord, ...]
    kernels: tuple[KernelReport, ...]
    memory: MemoryReport
    compiled: int
    fallbacks: tuple[str, ...]
    seconds: Mapping[str, float]
    kept: bool = field(default=False, compare=False)

    @property
    def calls(self) -> int:
        """Kernel calls of one run."""
        return sum(k.count for k in self.kernels)

    @property
    def from_cache(self) -> int:
        """Unique kernels that the cache had."""
        return len(self.kernels) - self.compiled


@dataclass(frozen=True, repr=False)
class Report:
    """Facts of a compiled model. `programs`: the last specialisations, oldest first; empty before a call.

    `notes` tell where it comes from when that is not a plain compilation: a file, or why a file was compiled again.
    `host` are nodes that run on the host between programs, which are then segments of the model.
    """

    name: str
    target: str
    threads: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    import_seconds: float
    programs: tuple[ProgramReport, ...]
    notes: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    view: Callable[..., None] | None = field(default=None, compare=False)  # writes the page

    @property
    def fallbacks(self) -> list[str]:
        """Nodes that run on the host, of all programs; empty for a model that is native throughout."""
        return list(dict.fromkeys([*self.host, *(f for p in self.programs for f in p.fallbacks)]))

    @property
    def steps_down(self) -> list[str]:
        """Where a lesser schedule or a smaller group was taken, and why; empty where all first choices held."""
        return list(dict.fromkeys(n for p in self.programs for r in p.passes if r.name == LADDER for n in r.notes))

    @property
    def seconds(self) -> float:
        """All of the compilation, imports included."""
        return self.import_seconds + sum(s for p in self.programs for s in p.seconds.values())

    def as_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers."""
        out = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("inputs", "outputs", "programs", "view")
        }
        out["inputs"], out["outputs"] = ([_plain(s) for s in specs] for specs in (self.inputs, self.outputs))
        out["programs"] = [{**_plain(p), "calls": p.calls, "from_cache": p.from_cache} for p in self.programs]
        return {**out, "fallbacks": self.fallbacks, "seconds": self.seconds}

    def to_json(self) -> str:
        """The report as a JSON object."""
        return json.dumps(self.as_dict(), indent=2)

    def html(self, path: str | os.PathLike[str], profile: Profile | None = None) -> None:
        """Write a page about the model: one file, which loads nothing. `dnnc view` writes the same.

        It has the graph as imported and as fused, folded by layer, and for each node its source, the passes that
        changed it, its kernel, its code and the reason why it is not fused further; memory over the program.

        Args:
            path: the page; it is replaced at once.
            profile: adds times against the roofline: `f.report.html("f.html", f.profile(x))`.

        Raises:
            InputError: the file cannot be written; the report is a copy without its executable.
        """
        if self.view is None:
            raise InputError("html: this report is a copy without its executable; take f.report of the model")
        self.view(path, profile)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "view"}  # the executable stays behind

    def __repr__(self) -> str:
        kernels = sum(len(p.kernels) for p in self.programs)
        return f"<Report of {self.name[:60]} for {self.target[:60]}: {count(kernels, 'kernel')}; print it>"

    def __str__(self) -> str:
        return plain_text(report_tables(self))

    def _repr_html_(self) -> str:
        return html_of(report_tables(self, passes=False))


def _plain(x: Any) -> Any:
    if dataclasses.is_dataclass(x):
        return {f.name: _plain(getattr(x, f.name)) for f in dataclasses.fields(x)}
    if isinstance(x, Mapping):
        return {k: _plain(v) for k, v in x.items()}
    return [_plain(v) for v in x] if isinstance(x, (list, tuple)) else x
