"""Option `tune`: CompileOptions in; out: options with `tune` None or Winners, and scheduling's `choose`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dnnc.autotune.search.task import Setting
from dnnc.backends.registry import open_backend
from dnnc.ir.errors import TargetError, TuneError
from dnnc.options import CompileOptions
from dnnc.passes.base import PassManager, PassRecord
from dnnc.passes.planning.program import ScheduledGraph
from dnnc.passes.schedule.step import Choose, first_choice

if TYPE_CHECKING:
    from dnnc.backends.base import Backend
    from dnnc.backends.runtime.kernel_cache import KernelCache
    from dnnc.passes.planning.program import Revise

RECORD = "tuning log"  # the name of the record in the report


def resolved(opts: CompileOptions) -> CompileOptions:
    """The options with the winners of the log in place of its path; once they are resolved they stay as they are.

    TuneError: the log cannot be used, or `tune` is a budget: whoever takes one measures before, and gives the winners.
    """
    tune = opts.tune
    if tune is None:
        return opts
    if isinstance(tune, _logs("replay").Winners):
        return opts
    if isinstance(tune, Mapping):
        winners = _logs("replay").Winners(tune)
    elif isinstance(tune, (int, float)):
        raise TuneError(
            f"tune={tune!r}: a budget cannot be spent here; measure with `dnnc tune` and give the path of its log"
        )
    else:
        winners = _logs("replay").Winners(_logs("file").read(tune, trials=False).winners(), str(tune))
    return replace(opts, tune=winners, dims=dict(opts.dims))


def setting_of(opts: CompileOptions, backend: Backend | None = None) -> Setting:
    """Where and how the kernels of a compilation run, as tuning logs say it.

    Args:
        opts: of the compilation.
        backend: of its target, if it is open already.

    Raises:
        TargetError: the target has no kernels to tune.
    """

    backend = backend or open_backend(opts.target, opts.threads)
    if not backend.compiles:
        raise TargetError(f"target {backend.name!r} has no kernels to tune")
    return Setting(backend.text, opts.numerics, backend.rounds_products and rounds_products(opts))


def rounds_products(opts: CompileOptions) -> bool:
    """May a GPU round operands of float32 products to TF32?"""
    return opts.precision == "tf32" or (opts.numerics == "fast" and opts.precision is None)


def choose_of(opts: CompileOptions, backend: Backend, kept: KernelCache | None = None) -> Choose:
    """How schedules are chosen: by the winners of a log, else without measuring. `kept`: where picks are kept."""
    tuned = resolved(opts).tune
    if not isinstance(tuned, Mapping):
        return unmeasured(opts, backend, kept)
    choose: Choose = _logs("replay").chooser(tuned, setting_of(opts, backend), unmeasured(opts, backend, kept))
    return choose


def revise_of(choose: Choose) -> Revise | None:
    """Return the log's decision on fusion as a change of the plan before kernels are chosen; None without one."""
    revise: Revise | None = getattr(choose, "revise", None)
    return revise


def unmeasured(opts: CompileOptions, backend: Backend, kept: KernelCache | None = None) -> Choose:
    """What the cost model that ships takes for fastest; without optimization the templates' own first choice."""
    if opts.opt_level < 3 or backend.limits is None:
        return first_choice

    @cache
    def model() -> Choose:  # not loaded where all schedules are known
        from dnnc.autotune.runners.machine import Machine  # loads the search
        from dnnc.autotune.search.choose import pretrained  # loads the search

        return pretrained(Machine(backend), setting_of(opts, backend), kept=kept)

    return lambda problem, candidates: model()(problem, candidates)


def tell(choose: Choose, program: ScheduledGraph, manager: PassManager | None) -> None:
    """Say in the report what was replayed."""
    if manager is None or not hasattr(choose, "report"):
        return  # nothing is loaded for programs that replay nothing
    if isinstance(choose, _logs("replay").Replay):
        nodes = len(program.graph)
        manager.records.append(
            PassRecord(RECORD, 0.0, nodes, nodes, bool(choose.found or choose.fusions.taken), choose.report(program))
        )


def plain_winners(tune: Mapping[str, Any]) -> dict[str, Any]:
    """Winners as JSON data, which the option takes as well."""
    return {key: _logs("record").plain_choice(c) for key, c in _logs("replay").Winners(tune).items()}


def _logs(module: str) -> Any:
    """Return a module of tuning logs; a compilation without one loads none."""
    return import_module(f"dnnc.autotune.log.{module}")
