"""What a command line says about a model; `open_model` serves every command that calls one."""

from __future__ import annotations

import runpy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dnnc.artifact.format import is_artifact
from dnnc.cli.arguments import Array, load_model, make_arrays, open_dims, parse_cache, parse_dims
from dnnc.cli.errors import say
from dnnc.driver import compile
from dnnc.executable import Executable
from dnnc.ir import checks
from dnnc.ir.errors import ArtifactWarning, DnncError, InputError
from dnnc.ir.expr import Expr, free

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Job:
    """The options that commands with a model share, as texts."""

    model: str
    target: str
    dims: tuple[str, ...]
    threads: int | None
    verify: str
    opt_level: int
    numerics: str
    cache: str
    inputs: tuple[str, ...]
    precision: str | None = None
    tune: str | None = None
    memory: str | None = None
    strict_compile: bool = False
    custom_ops: str | None = None


def open_model(job: Job, progress: Progress | None = None) -> Executable:
    """The model of a command line: compiled for what its options say, or loaded where it is a saved one."""
    if is_artifact(job.model):
        return open_saved(job)
    f: Executable = compile(load_model(job.model), progress, **compile_options(job))
    return f


def compile_options(job: Job) -> dict[str, Any]:
    """The options of `dnnc.compile`."""
    return {
        "target": job.target,
        "dims": parse_dims(job.dims),
        "threads": job.threads,
        "verify": False if job.verify == "none" else job.verify,
        "opt_level": job.opt_level,
        "numerics": job.numerics,
        "precision": job.precision,
        "cache": parse_cache(job.cache),
        "tune": job.tune,
        "memory": job.memory,
        "strict_compile": job.strict_compile,
        "custom_ops": custom_ops(job.custom_ops),
    }


def custom_ops(path: str | None) -> dict[str, Any]:
    """The definitions that a Python file has in its variable `custom_ops`; the file is run."""
    if path is None:
        return {}
    if not Path(path).is_file():
        raise InputError(f"--custom-ops: there is no file {path}")
    try:
        found = runpy.run_path(path).get("custom_ops")
    except DnncError:
        raise
    except Exception as e:  # of the user's code
        raise InputError(f"--custom-ops: {path} failed: {type(e).__name__}: {e}") from e
    if found is None:
        raise InputError(
            f'--custom-ops: {path} defines no `custom_ops`, a dict such as {{"my.domain::MyOp": function}}'
        )
    return checks.operators(found, f"{path}: custom_ops")


def open_saved(job: Job) -> Executable:
    """A saved model. InputError where an option is given that was settled when it was compiled."""
    usual = Job(job.model, "llvm", job.dims, job.threads, "kernels", 3, "standard", job.cache, job.inputs)
    settled = [f.name for f in fields(Job) if getattr(job, f.name) != getattr(usual, f.name)]
    if settled:
        options = ", ".join("--" + name.replace("_", "-") for name in settled)
        raise InputError(
            f"{job.model} is compiled already, so {options} cannot be chosen any more; give the model that it was "
            "compiled from"
        )
    return load_saved(job.model, job.threads, parse_cache(job.cache))


def need_source(model: str) -> None:
    """InputError for a saved model, where a command needs the model before its compilation."""
    if is_artifact(model):
        raise InputError(f"{model} is compiled already; give the model that it was compiled from")


def load_saved(path: str, threads: int | None, cache: Any) -> Executable:
    """`dnnc.load`; a warning becomes a line on stderr."""
    from dnnc.artifact.load import load  # loads the runtime

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ArtifactWarning)
        f: Executable = load(path, threads=threads, cache=cache)
    for w in caught:
        say(f"{'warning' if issubclass(w.category, ArtifactWarning) else w.category.__name__}: {w.message}")
    return f


def open_with_arrays(job: Job, progress: Progress | None, seed: int = 0) -> tuple[Executable, list[Array]]:
    """Compile for the sizes that `--input` and `--dims` give; return model and arrays in input order."""
    f = open_model(job, progress)
    arrays = make_arrays(f, job.inputs, parse_dims(job.dims), seed)
    if not f.deferred:
        f.prepare([a.shape for a in arrays])
    return f, arrays


def prepare(f: Executable, job: Job) -> None:
    """Compile for the sizes that `--dims` and `--input` tell. InputError names the dims that they leave open."""
    dims = parse_dims(job.dims)
    asked = list(
        dict.fromkeys(x.name for v in f.graph.inputs for d in v.type.shape if isinstance(d, Expr) for x in free(d))
    )
    if not job.inputs and not set(asked) <= set(dims):
        given = f" (given: {', '.join(dims)})" if dims else ""
        raise InputError(open_dims(f"the model has symbolic dims{given}", [n for n in asked if n not in dims]))
    f.prepare([a.shape for a in make_arrays(f, job.inputs or ("zeros",), dims, 0)])
