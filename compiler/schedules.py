"""Schedules of earlier compilations: nests are looked up in this process, then in the kernel cache.

A record depends on everything that decides a schedule: the nest, the target, the options, the cost model that ships,
and dnnc's sources. It is text alone; a kernel whose code is not in the cache any more is scheduled again, as the record
says. Where a tuning log decides, or passes are to be checked, nothing is looked up.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import dnnc
import dnnc.ir
from dnnc.backends.runtime.kernel_cache import KernelCache
from dnnc.ir.lru import LRU
from dnnc.options import CompileOptions, check_every_pass
from dnnc.passes.planning.program import Scheduled
from dnnc.passes.schedule.problem import Choice, Problem
from dnnc.tune_option import rounds_products

if TYPE_CHECKING:
    from dnnc.backends.base import Backend

FORMAT = "schedule-1"  # of records
MOST = 4096  # records kept in a process, some kilobytes each


class Schedules:
    """The records of one target and one set of options.

    Args:
        store: where records are kept, and other processes find them.
        opts: of which numerics, precision and level decide schedules.
        backend: of the target.
    """

    def __init__(self, store: KernelCache, opts: CompileOptions, backend: Backend) -> None:
        self.store = store
        setting = backend.target_key, opts.numerics, str(opts.opt_level), str(rounds_products(opts))
        self.seed = "\0".join([FORMAT, sources_version(), *setting])
        self._recent: LRU[str, Scheduled] = LRU(MOST)

    def find(self, nest: str, problem: Problem) -> Scheduled | None:
        """What a nest became, if that is known."""
        key = self._key(nest, problem)
        found = self._recent.find(key)
        if found is None and (data := self.store.get(key)) is not None:
            text, template, knobs, parallel, statements = json.loads(data)
            found = Scheduled(text, Choice(template, tuple((k, v) for k, v in knobs)), parallel, statements)
            self._recent[key] = found
        return found

    def record(self, nest: str, problem: Problem, made: Scheduled) -> None:
        """Keep what a nest became."""
        key = self._key(nest, problem)
        self._recent[key] = made
        text = json.dumps([made.text, made.choice.template, made.choice.knobs, made.parallel, made.statements])
        self.store.put(key, text.encode())

    def _key(self, nest: str, problem: Problem) -> str:
        parts = (self.seed, nest, *sorted(problem.constants), problem.kind, str(problem.inplace))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def schedules_for(opts: CompileOptions, backend: Backend, store: KernelCache | None) -> Schedules | None:
    """Records of a compilation; None if schedules are made anew."""
    if store is None or isinstance(opts.tune, Mapping) or not keeps_programs(backend, store):
        return None
    return Schedules(store, opts, backend)


def keeps_programs(backend: Backend, store: KernelCache) -> bool:
    """Are results kept? Not where passes are to be checked, nor for foreign backends, which may change."""
    foreign = not type(backend).__module__.startswith("dnnc.")
    return not (store.path is None or foreign or check_every_pass())


@cache
def sources_version() -> str:
    """A key of what decides schedules and programs: dnnc's version, and names, sizes and times of files (10 ms)."""
    h = hashlib.sha256(dnnc.__version__.encode())
    top, own = Path(str(dnnc.ir.__file__)).parents[1], Path(str(dnnc.__file__)).parent
    below = (p for package in ("ir", "passes", "autotune", "backends") for p in (top / package).rglob("*"))
    for p in sorted([*(p for p in below if p.suffix in (".py", ".npz")), *own.glob("*.py")]):
        s = p.stat()
        h.update(f"{p.parent.name}/{p.name} {s.st_size} {s.st_mtime_ns}\n".encode())
    return h.hexdigest()
