"""What a backend is: one target, for which kernels are made, and on which programs run.

`dnnc.backends.registry` finds a backend by the first word of a target. The compiler, the tuner, reports, profiles and
the command line ask a `Backend`; none of them knows one by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from dnnc.backends.runtime.codec import encode
from dnnc.backends.runtime.device import Device, Weights
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.backends.runtime.program import Call, CompiledKernel, MemoryRef, Program
from dnnc.ir.errors import InputError, TargetError, TuneError, UnsupportedError
from dnnc.ir.expr import Var
from dnnc.ir.target import Limits, TargetFacts

if TYPE_CHECKING:
    from dnnc.backends.runtime.host_runner import Function
    from dnnc.backends.runtime.operands import Workload
    from dnnc.backends.runtime.prologue import Pack
    from dnnc.ir.graph import Graph, Value
    from dnnc.ir.loops.stmt import Kernel
    from dnnc.passes.base import Pass
    from dnnc.passes.planning.program import ScheduledGraph, Step
    from dnnc.passes.schedule.problem import Choice, Problem, Template

Array = np.ndarray[Any, Any]
Progress = Callable[[str, int, int], None]  # stage, done, of
SECONDS = 1.0  # of measuring a program, where the number of calls is not given
WARM, LEAST, MOST = 3, 10, 1000  # calls before measuring; measured ones at least, and at most


class Instance(Protocol):
    """A program at the sizes of a call.

    Attributes:
        program: what it runs.
        outputs: shape and dtype of each output; None if only a call tells.
        in_place: outputs that are computed in the memory of the input donated for them; others are copied there.
        used: set by the cache of instances when it is asked for again.
    """

    used: bool

    @property
    def program(self) -> Any: ...

    @property
    def outputs(self) -> Sequence[tuple[tuple[int, ...], Any]] | None: ...

    @property
    def in_place(self) -> frozenset[int]: ...

    def call(self, arrays: Sequence[Array]) -> list[Array]:
        """Run on contiguous arrays of the right shapes and dtypes; returns fresh arrays."""
        ...

    def into(self, arrays: Sequence[Array], results: Sequence[Array]) -> None:
        """Run and leave the results in these buffers. InputError: an index read at run time is outside its axis."""
        ...


class Runner(Protocol):
    """Runs the programs of one model."""

    def instance(self, program: Any, dims: Mapping[Var, int], in_place: frozenset[int]) -> Instance:
        """The program at these dims. `program`: what `Backend.build` or `Backend.interpret` returned."""
        ...

    def refitted(self, instances: Sequence[Any]) -> None:
        """Parameters hold other arrays from now on."""
        ...


class ParameterTables(Protocol):
    """Gives a program the addresses of what it reads of parameters."""

    def table(self, program: Program) -> Any: ...


@dataclass(frozen=True)
class BuildJob:
    """How a scheduled graph becomes a program."""

    cache: KernelCache  # where machine code is looked for, and kept
    check: bool = True  # True if new kernels are checked against float64
    progress: Progress | None = None  # told (stage, done, of)
    # machine code by symbol out of a saved model; the cache is not asked for it
    code: Mapping[str, bytes] = field(default_factory=dict)
    checked: frozenset[str] = frozenset()  # symbols of that code which a device has checked
    # takes the code of this program for a second attempt, since the cache may keep none
    spare: dict[str, bytes] = field(default_factory=dict)
    flush: bool = False  # True if denormals are zero while the program runs
    entry: bool = True  # False if an expression loader calls the kernels, so that no entry function is compiled
    loader: Any = None  # of expressions, which has loaded kernels already

    def find(self, symbol: str) -> bytes | None:
        """Machine code of a kernel that needs not be compiled."""
        found = self.code.get(symbol) or self.spare.get(symbol)
        return found if found is not None else self.cache.get(symbol[2:])

    def keep(self, code: Mapping[str, bytes]) -> None:
        """Keep new machine code."""
        for symbol, data in code.items():
            self.cache.put(symbol[2:], data)
        self.spare.update(code)

    def tell(self, stage: str) -> Callable[[int, int], None] | None:
        progress = self.progress
        return None if progress is None else lambda done, of: progress(stage, done, of)


class ExpressionLoader(Protocol):
    """Makes programs of array expressions callable, as quickly as it can."""

    def job(self, check: bool) -> BuildJob:
        """How they are built."""
        ...

    def load(self, program: Program) -> Any | None:
        """The program, callable; None if it cannot run so, or code of it is missing or unchecked."""
        ...


@dataclass(frozen=True)
class Built:
    """Machine code of one kernel with what it takes to run it, for the tuner."""

    symbol: str  # name of the function within the code
    code: bytes  # an object file or a cubin
    facts: dict[str, Any] = field(default_factory=dict)  # what the backend's bench wants to know, as JSON
    spills: int = 0  # bytes per thread that registers were too few for, where the compiler tells
    seconds: float = 0.0  # of printing and compiling

    @property
    def digest(self) -> str:
        """Hex SHA-256 of code and how it is launched; equal for codes that differ in the function's name alone."""
        nameless = self.code.replace(self.symbol.encode(), b"?" * len(self.symbol))
        return hashlib.sha256(nameless + json.dumps(self.facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Level:
    """A level of the memory hierarchy."""

    name: str  # "L1", "memory"
    capacity: int  # bytes that all threads together keep in it; 0 for any number
    read: float  # bytes read per second
    copy: float  # bytes read and written per second

    @property
    def rate(self) -> float:
        return max(self.read, self.copy)


@dataclass(frozen=True)
class Ceilings:
    """Measured or nominal limits: float32 operations per second (a multiply-add is two), nearest memory first."""

    threads: int
    flops: float
    levels: tuple[Level, ...]

    def level(self, nbytes: float) -> Level:
        """The nearest level that holds so many bytes."""
        return next((v for v in self.levels if nbytes <= v.capacity), self.levels[-1])


@dataclass(frozen=True)
class Samples:
    """Measured seconds of a program's runs."""

    calls: tuple[tuple[str, int], ...]  # (symbol, which call of its kernel) of each measured call, in order
    threads: int  # of a run
    total: Array  # [repeat] of whole calls
    overhead: Array  # [repeat] outside of the program
    kernels: Array  # [repeat, call]
    waiting: Array  # [repeat, call] lost at barriers behind a kernel
    balance: Array  # [repeat, call] time of the average thread over that of the slowest
    # [call, thread, 2] begin and end of each in the fastest run; NaN for a thread that has no part in a call
    spans: Array


def numbered(calls: Sequence[Call]) -> tuple[tuple[str, int], ...]:
    """(symbol, how many calls of this kernel come before it) of each call."""
    seen: dict[str, int] = {}
    out = []
    for c in calls:
        seen[c.symbol] = seen.get(c.symbol, -1) + 1
        out.append((c.symbol, seen[c.symbol]))
    return tuple(out)


class BoundKernel(Protocol):
    """A kernel that is bound to operands, ready to be timed."""

    def measure(self, limit: float | None = None) -> float:
        """Seconds of a call, one repeat. Past `limit` seconds the first call is all."""
        ...

    def fastest(self, calls: int) -> float:
        """Seconds of the quickest of some calls."""
        ...

    def check(self, text: str, choice: Choice) -> bool:
        """Compare with float64. False: it is too long for that; AccuracyError: it differs."""
        ...


class Bench(Protocol):
    """Times kernels of one machine, as a model runs them."""

    def load(self, task: Workload, built: Built) -> BoundKernel: ...


class Backend:
    """One target.

    A backend has one of these, everything else has a default:

    - `emit`, `compile`, `functions`: kernels are functions of this process, which get addresses.
    - `build` and `runner`: it makes and runs programs in its own way.
    - `interpret` and `runner`: it compiles nothing.
    """

    name: ClassVar[str]  # first word of its targets
    # names of the texts that it can show, the graph first; the last ones are its own languages
    stages: ClassVar[tuple[str, ...]] = ("graph", "operator")
    comments: ClassVar[Mapping[str, str]] = {}  # what begins a comment in each language; "#" where it is not named
    any_sizes: ClassVar[bool] = False  # True if one program can serve symbolic sizes
    compiles: ClassVar[bool] = True  # False if graphs are interpreted
    saves_programs: ClassVar[bool] = False  # True if a saved program runs without the passes
    check_limit: ClassVar[int] = 1 << 35  # statements that a kernel check may run
    rounds_products: ClassVar[bool] = False  # True if it may round float32 operands of products to TF32
    exclusive: ClassVar[bool] = True  # True if compiling on the host disturbs what is measured
    numbered: ClassVar[bool] = False  # True if its devices have numbers
    target: Any = None  # facts of the machine that code is made for; equal targets have equal `repr`
    threads: int = 1  # of a call
    present: bool = True  # True if programs can run here, so that kernels are checked while compiling

    @property
    def text(self) -> str:
        """Canonical text of the target: the same for equal machines; a tuning log knows a machine by it."""
        return self.name

    @property
    def target_key(self) -> str:
        """All facts of the target, on which code depends: part of the keys of caches."""
        return repr(self.target)

    # --- compilation --------------------------------------------------------------------------------------------------

    def facts(self, numerics: str) -> TargetFacts:
        """What graph passes may ask."""
        return TargetFacts()

    def passes(self, opt_level: int) -> Sequence[Pass]:
        """The graph passes of a level, in order."""
        from dnnc.passes.pipelines import LEVELS  # a saved model does without the passes

        return LEVELS[opt_level]

    def templates(self, numerics: str, rounded: bool = False) -> Sequence[Template]:
        """Schedules of kernels in the order tried; by default kernels stay as lowered. `rounded`: TF32 is allowed."""
        from dnnc.passes.schedule.step import AS_LOWERED  # a saved model does without it

        return (AS_LOWERED,)

    def library_templates(self, numerics: str) -> Sequence[Template]:
        """Calls of vendors' libraries, which a tuner may choose."""
        return ()

    @property
    def code_version(self) -> str:
        """Changes with everything that machine code depends on besides a kernel's text and the target."""
        return ""

    def build(self, scheduled: ScheduledGraph, job: BuildJob) -> Program:
        """Compile, check, link. KernelsFailed: the schedule can step down; else DnncError, the first failure."""
        from dnnc.backends.build import build_program  # a saved model does without it

        return build_program(scheduled, self, job)

    def emit(self, kernel: Kernel, symbol: str) -> str:
        """Print a kernel in the backend's language. Whatever it raises, the next schedule is taken."""
        raise UnsupportedError(f"target {self.name} has no kernels")

    def compile(
        self, texts: Mapping[str, str], failed: dict[str, Exception], tell: Callable[[int, int], None] | None
    ) -> Mapping[str, bytes]:
        """Compile kernels.

        Args:
            texts: by symbol.
            failed: takes the errors of those that do not compile.
            tell: called with (done, of).

        Returns:
            Machine code of the others by symbol.
        """
        raise UnsupportedError(f"target {self.name} has no kernels")

    def functions(self, code: Mapping[str, bytes]) -> Mapping[str, Function]:
        """Load kernels into this process."""
        raise UnsupportedError(f"target {self.name} has no kernels")

    def interpret(self, graph: Graph, precision: str | None, outputs: Sequence[str]) -> Any:
        """A program that interprets a graph, for backends that compile nothing. `outputs`: users' names."""
        raise UnsupportedError(f"target {self.name} interprets no graphs")

    def check(self, program: Program, job: BuildJob) -> None:
        """Check the kernels of a program that waited for a device, if it is here. Raises as `build` does."""

    def describe(self, scheduled: ScheduledGraph) -> Program:
        """The program without machine code, to show its texts."""
        from dnnc.backends.build import symbols_of  # a saved model does without it
        from dnnc.backends.runtime.link import link  # a saved model does without it

        return link(scheduled, symbols_of(scheduled, self))

    def notes(self, scheduled: ScheduledGraph) -> Mapping[str, Sequence[str]]:
        """Remarks for the report by title."""
        return {}

    def fallbacks(self, program: Program) -> tuple[str, ...]:
        """Parts of a program that the host has to steer, for the report."""
        return ()

    # --- execution ----------------------------------------------------------------------------------------------------

    def start(self, cache: KernelCache) -> None:
        """Prepare this process for calls."""

    def load(self, program: Program) -> None:
        """Make the code of a program out of a file or the cache callable."""
        program.loaded = self.functions(program.code)

    def runner(self, parameters: Any | None) -> Runner:
        """What runs the programs of one model. `parameters`: see `dnnc.parameters`."""
        from dnnc.backends.runtime.host_runner import HostRunner  # most backends have a runner of their own

        return HostRunner(parameters)

    def expressions(self, cache: KernelCache, check: bool) -> ExpressionLoader | None:
        """What runs programs of array expressions; None if they go the way of models."""
        return None

    def function(self, kernel: Kernel, cache: KernelCache) -> Callable[[Sequence[Array], Sequence[int]], None] | None:
        """One kernel as a function of host arrays, read and written in place, and sizes; None if it cannot run so."""
        return None

    @property
    def device(self) -> Callable[[], Device] | None:
        """Opens the device on which arrays lie (TargetError: it is not here); None if they lie on the host."""
        return None

    def packer(self, program: Program) -> Pack:
        """Runs the compiled part of a prologue: takes the contents of parameters, gives what kernels read of them."""
        raise UnsupportedError(f"target {self.name} packs no parameters")

    def bind_parameters(self, program: Program, weights: Weights, fetch: Callable[[Any], Array]) -> None:
        """Give a program of a device what its kernels read of parameters. `fetch` brings an array to the host."""
        raise UnsupportedError(f"target {self.name} reads parameters where they lie")

    def unfit(self, code_version: str, target: Any) -> str:
        """Say why code of another version or machine cannot run here; empty if it can. `target`: its facts as JSON."""
        same = code_version == self.code_version and target == encode(self.target)
        return "" if same else "it was compiled for another version or machine"

    def like(self, target: Any) -> Backend:
        """The backend with the facts of another machine whose code runs here, given as JSON data."""
        return self

    def elsewhere(self, arch: str) -> Backend:
        """The backend of another architecture. InputError: the target has no architectures."""
        raise InputError(f"{arch}: code for several architectures is kept of models that run wholly on a CUDA device")

    # --- texts, measurements ------------------------------------------------------------------------------------------

    def kernel_text(self, kernel: CompiledKernel, stage: str) -> str:
        """A kernel in one of the backend's languages."""
        from dnnc.ir.loops.text import parse_kernel  # a saved model does without it

        return kernel.text if kernel.control else self.emit(parse_kernel(kernel.text), kernel.symbol)

    def program_text(self, program: Program, stage: str) -> str:
        """What a program has in this language beside its kernels; empty for nothing."""
        return ""

    def measure(self, instance: Any, arrays: Callable[[], list[Array]], repeats: int | None) -> Samples:
        """Time every kernel of a program. UnsupportedError: this is not possible."""
        raise UnsupportedError(f"target {self.name} cannot be profiled")

    def ceilings(self, threads: int) -> Ceilings:
        """What the machine can do at most."""
        raise UnsupportedError(f"target {self.name} has no ceilings")

    def kernel_runner(self, program: Program, step: Step) -> Callable[[Mapping[Value, Array]], Sequence[Array]] | None:
        """Runs one kernel of a program on its operands; gives its outputs. None if that is not possible."""
        return None

    def run_calls(
        self, program: Program, count: int, arrays: Sequence[Array], threads: int
    ) -> Callable[[MemoryRef, int], bytes] | None:
        """Run the first `count` calls. Gives a function that reads memory afterwards; None if that is not possible."""
        return None

    # --- tuning -------------------------------------------------------------------------------------------------------

    @property
    def limits(self) -> Limits | None:
        """Nominal figures for cost models, the same for equal targets on every machine. None: the target cannot be
        tuned, and kernels take their templates' first choice.
        """
        return None

    @property
    def machine_name(self) -> str:
        """For people: "znver5", "NVIDIA H200"."""
        return self.name

    def here(self) -> str:
        """Name of this machine. TargetError: it does not run code for the target."""
        raise TargetError(f"target {self.name} cannot be tuned")

    def library_choices(self, problem: Problem | None, numerics: str, rounded: bool) -> list[Choice]:
        """Calls of vendors' libraries that compute a problem, none for None. TuneError: there are no libraries."""
        raise TuneError(f"libraries=True: {self.text!r} has none; cuBLASLt and cuDNN are for GPUs, target='cuda'")

    def bench(self) -> Bench:
        """What times kernels in this process. TargetError: the machine is not here."""
        raise TargetError(f"target {self.name} cannot be tuned")

    def compile_kernel(self, kernel: Kernel, symbol: str) -> Built:
        """Machine code of one kernel. InternalError: the text does not compile; TargetError: no compiler."""
        raise TargetError(f"target {self.name} cannot be tuned")

    def trial_symbol(self, text: str) -> str:
        """Name of a kernel under trial."""
        return "k_tried"

    # --- what the command line says -----------------------------------------------------------------------------------

    @classmethod
    def device_problem(cls, number: int) -> str:
        """Why this machine has no such device that can be used; empty if it has."""
        return "" if number == 0 else f"{cls.name} has no device {number}"

    @classmethod
    def arch_here(cls, device: int) -> str:
        """Architecture of a device of this machine; empty if there is none, or if the target has no architectures."""
        return ""

    @classmethod
    def availability(cls) -> dict[str, Any]:
        """For `dnnc targets`: "name", "available", "reason", and facts by name. TargetError: it is not available."""
        return {"name": cls.name, "available": True, "reason": ""}
