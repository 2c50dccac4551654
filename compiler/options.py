"""The options of a compilation, checked as they are given, and the environment: no other file reads it.

DNNC_CACHE_DIR   where compiled kernels are kept; default $XDG_CACHE_HOME/dnnc, else ~/.cache/dnnc
DNNC_CHECK       1: verify the graph after every pass, and schedule every kernel anew
DNNC_STRICT      1: `strict_compile` for every compilation
DNNC_THREADS     threads of a call where `threads` is not given
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from difflib import get_close_matches
from inspect import cleandoc
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict, Union

from dnnc.backends.registry import check_target
from dnnc.ir import checks
from dnnc.ir.errors import InputError, TargetError, TuneError, UnsupportedError

if TYPE_CHECKING:
    from dnnc.ir.target import Target

PRECISIONS = ("float32", "tf32", "float16", "bfloat16")
# other names of precisions
PRECISION_ALIASES = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
NUMERICS = ("strict", "standard", "fast")
OPT_LEVELS = (0, 1, 2, 3)
VERIFY = (False, "kernels", "model")

DimChoice = Union[int, tuple[int, int]]


class SearchOptions(TypedDict, total=False):
    """The options of `dnnc.tune` as keyword arguments, for type checkers: it takes the target by name."""

    precision: str | None
    numerics: str
    dims: Mapping[str, DimChoice]
    outputs: Sequence[str]
    opt_level: int
    verify: bool | str
    cache: bool | str | Path
    threads: int | None
    memory: int | str | None
    strict_compile: bool
    custom_ops: Mapping[str, Callable[..., Any] | str]


class JitOptions(SearchOptions, total=False):
    """The options of `dnnc.jit` as keyword arguments, for type checkers; its `donate` names arguments."""

    target: str | Target
    tune: float | str | Path | Mapping[str, Any] | None


class Options(JitOptions, total=False):
    """The fields of CompileOptions as keyword arguments, for type checkers."""

    donate: Mapping[str, str]


NO_FOLDER = ("off", "none", "no", "false", "")  # what somebody writes who wants no cache


@dataclass(frozen=True)
class CompileOptions:
    """How to compile a model. Equal options give equal code on the same machine.

    Args:
        target: "llvm", "llvm -mcpu=skylake-avx512", "cuda", "cuda:1", "cuda -arch=sm_90a", "reference", or a Target.
        precision: how floats are stored, one of PRECISIONS or an alias such as "fp16"; None keeps the model's types.
            "float16" and "bfloat16" are stored so and computed in float32, norms and reductions stay float32; "tf32" is
            float32 on a CPU. Inputs and outputs keep their types.
        numerics: "strict" (bit-identical between runs and thread counts, no reassociation), "standard", or "fast"
            (denormals are zero).
        dims: sizes of symbolic dimensions: {"batch": 8} fixes one, {"batch": (1, 64)} bounds it, both ends included.
        outputs: names of intermediate values to return as well.
        donate: {"past": "present"}: this output takes the memory of this input, of the same type, whose contents are
            gone after the call.
        opt_level: 0 nothing, 1 no fusion or layout, 2 or 3 everything.
        tune: None, a budget in seconds, the path of a tuning log to replay, or its winners (`Log.winners()`).
        verify: False, "kernels" (each new kernel against float64), or "model" (the whole model too).
        cache: where kernels, schedules and whole programs are kept for later compilations: "auto" for the user's cache
            folder, a path, or False.
        threads: threads of a call; None takes all CPUs of the affinity mask, and more than those are never used.
        memory: peak bytes of intermediate values, as a number or "512MB", "2GiB". Values beyond it are recomputed at
            their uses. None keeps all values. The report has the peak.
        strict_compile: raise an error if a kernel fails to schedule, to compile or to pass its check. Otherwise dnnc
            takes the next schedule, then smaller groups of nodes, then naive loop nests; `Executable.report` lists it.
        custom_ops: operators of an ONNX model, {"my.domain::MyOp": function}: a function of dnnc.array that takes the
            node's inputs, and its attributes as keywords, or the text of a kernel in operator IR.

    Raises:
        TargetError: the target is not known, or its -threads= contradicts `threads`.
        UnsupportedError: a precision that dnnc does not have.
        TuneError: `tune` is no budget, no path and no winners.
        InputError: any other value that an option cannot take.
    """

    target: str | Target = "llvm"
    precision: str | None = None
    numerics: str = "standard"
    dims: Mapping[str, DimChoice] = field(default_factory=dict, hash=False)
    outputs: tuple[str, ...] = ()
    donate: Mapping[str, str] = field(default_factory=dict, hash=False)
    opt_level: int = 3
    tune: float | str | Path | Mapping[str, Any] | None = field(default=None, hash=False)
    verify: bool | str = "kernels"
    cache: bool | str | Path = "auto"
    threads: int | None = None
    memory: int | str | None = None
    strict_compile: bool = False
    custom_ops: Mapping[str, Callable[..., Any] | str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _check_target(self.target, self.threads)
        if isinstance(self.precision, str):
            object.__setattr__(self, "precision", PRECISION_ALIASES.get(self.precision, self.precision))
        if self.precision is not None and not (isinstance(self.precision, str) and self.precision in PRECISIONS):
            raise UnsupportedError(
                f"precision={self.precision!r}: expected None (as in the model) or {_either(PRECISIONS)}"
            )
        _one_of("numerics", self.numerics, NUMERICS)
        _one_of("opt_level", self.opt_level, OPT_LEVELS)
        object.__setattr__(self, "opt_level", 3 if self.opt_level == 2 else self.opt_level)
        _one_of("verify", self.verify, VERIFY)
        _one_of("strict_compile", self.strict_compile, (False, True))
        _check_tune(self.tune)
        if (not isinstance(self.cache, (str, Path)) and self.cache is not False) or self.cache in NO_FOLDER:
            raise InputError(
                f'cache={self.cache!r}: expected "auto", a path (one with a slash if it is named so), or False for none'
            )
        if self.threads is not None and not (_is_int(self.threads) and self.threads >= 1):
            raise InputError(
                f"threads={self.threads!r}: expected an integer of at least 1, or None for all CPUs that the process "
                "may use"
            )
        object.__setattr__(self, "memory", _check_memory(self.memory))
        object.__setattr__(self, "dims", MappingProxyType(_check_dims(self.dims)))
        object.__setattr__(self, "outputs", _check_outputs(self.outputs))
        object.__setattr__(self, "donate", MappingProxyType(_check_donate(self.donate)))
        object.__setattr__(self, "custom_ops", MappingProxyType(checks.operators(self.custom_ops, "custom_ops")))

    def __reduce__(self) -> Any:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = {n: dict(v) for n, v in values.items() if isinstance(v, MappingProxyType)}
        return _restore, ({**values, **plain},)


def _restore(values: dict[str, Any]) -> CompileOptions:
    return CompileOptions(**values)


def make_options(values: Mapping[str, Any]) -> CompileOptions:
    """CompileOptions from keyword arguments. InputError names an unknown one and the nearest that exists."""

    known = [f.name for f in fields(CompileOptions)]
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise InputError(f"unknown option {name!r}: {hint}")
    return CompileOptions(**values)


# --- checks -----------------------------------------------------------------------------------------------------------


def _is_int(v: object) -> bool:
    return isinstance(v, int) and not isinstance(v, bool)


def _either(allowed: Iterable[object]) -> str:
    words = [repr(a) for a in allowed]
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _one_of(name: str, v: object, allowed: tuple[object, ...]) -> None:
    if not any(type(v) is type(a) and v == a for a in allowed):  # so that True is not 1, nor 0 False
        raise InputError(f"{name}={v!r}: expected {_either(allowed)}")


def _check_target(target: object, threads: int | None) -> None:
    if not isinstance(target, str):
        if not isinstance(getattr(target, "kind", None), str) or not hasattr(target, "option"):
            raise TargetError(
                f"target={target!r}: expected a string such as 'llvm' or 'cuda -arch=sm_90a', or a dnnc.Target"
            )
        return
    parsed = check_target(target)
    asked = parsed.option("threads")
    if asked and threads is not None and asked != str(threads):
        raise TargetError(f"target={target!r} says -threads={asked}, but threads={threads} is given; give one of them")


UNITS = {
    "": 1,
    "B": 1,
    **{f"{p}{b}": m ** (k + 1) for k, p in enumerate("KMGT") for b, m in (("B", 1000), ("iB", 1024))},
}


def _check_memory(memory: object) -> int | None:
    """A budget in bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", memory) if isinstance(memory, str) else None
    unit = next((u for u in UNITS if found and u.lower() == found[2].lower()), None)
    if found and unit is not None:
        memory = int(float(found[1]) * UNITS[unit])
    if memory is not None and not (_is_int(memory) and memory > 0):  # type: ignore[operator]
        raise InputError(f'memory={memory!r}: expected a number of bytes, such as 1 << 30 or "512MB", or None')
    return memory  # type: ignore[return-value]


def _check_tune(tune: object) -> None:
    if tune is None or isinstance(tune, (str, Path)):
        return
    if isinstance(tune, Mapping):
        if not all(isinstance(key, str) for key in tune):
            raise TuneError("tune: expected winners by the key of their workload, such as Log.winners() gives")
        return
    if isinstance(tune, bool) or not isinstance(tune, (int, float)) or not 0 < tune < float("inf"):
        raise TuneError(f"tune={tune!r}: expected None, a budget in seconds, the path of a tuning log, or winners")


def _check_dims(dims: object) -> dict[str, DimChoice]:
    if not isinstance(dims, Mapping):
        raise InputError(f'dims={dims!r}: expected a mapping such as {{"batch": 8}} or {{"batch": (1, 64)}}')
    out: dict[str, DimChoice] = {}
    for name, v in dims.items():
        pair = tuple(v) if isinstance(v, (tuple, list)) else (v, v)
        if (
            not isinstance(name, str)
            or len(pair) != 2
            or not all(_is_int(n) and n >= 0 for n in pair)
            or pair[0] > pair[1]
        ):
            raise InputError(f"dims[{name!r}]={v!r}: expected a size such as 8, or (low, high) with 0 <= low <= high")
        out[name] = pair[0] if pair[0] == pair[1] else (pair[0], pair[1])
    return dict(sorted(out.items()))


def _check_outputs(outputs: object) -> tuple[str, ...]:
    if isinstance(outputs, str) or not isinstance(outputs, Iterable):
        raise InputError(f"outputs={outputs!r}: expected a sequence of names, such as ['conv1']")
    names = tuple(outputs)
    if not all(isinstance(n, str) for n in names):
        raise InputError(f"outputs={outputs!r}: every name must be a string")
    return names


def _check_donate(donate: object) -> dict[str, str]:
    if not isinstance(donate, Mapping) or not all(isinstance(n, str) for pair in donate.items() for n in pair):
        raise InputError(
            f'donate={donate!r}: expected a mapping such as {{"past": "present"}}, names of inputs and of outputs'
        )
    if len(set(donate.values())) != len(donate):
        raise InputError(f"donate={dict(donate)!r}: an output can take the memory of one input")
    return dict(sorted(donate.items()))


# --- environment ------------------------------------------------------------------------------------------------------


def cache_folder(cache: bool | str | Path = "auto") -> Path | None:
    """Where to keep compiled kernels; None when `cache` is False. The folder need not exist, nor be writable."""
    if cache is False:
        return None
    if cache != "auto":
        return Path(str(cache)).expanduser()
    own, base = os.environ.get("DNNC_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return Path(base or "~/.cache").expanduser() / "dnnc"


def check_every_pass() -> bool:
    """Is the IR to be verified after every pass?"""
    return _is_set("DNNC_CHECK")


def _is_set(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


def steps_down(options: CompileOptions) -> bool:
    """May a compilation take lesser schedules where kernels fail? Who checks every pass wants to know."""
    return not (options.strict_compile or check_every_pass() or _is_set("DNNC_STRICT"))


def available_cpus() -> int:
    """The CPUs on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def for_prologue(options: CompileOptions) -> CompileOptions:
    """The options under which a prologue is compiled: its values keep their types, and its graph has other names."""
    return replace(options, dims={}, outputs=(), donate={}, precision=None, tune=None)


def thread_count(threads: int | None = None) -> int:
    """Threads of a call: what is asked for, else DNNC_THREADS, else all; never more than the process may use."""
    asked: object = threads if threads is not None else os.environ.get("DNNC_THREADS") or available_cpus()
    if not str(asked).isdigit() or int(str(asked)) < 1:
        raise InputError(f"DNNC_THREADS={asked!r}: expected an integer of at least 1")
    return min(int(str(asked)), available_cpus())


# --- documentation ----------------------------------------------------------------------------------------------------


def as_markdown() -> str:
    """The page docs/options.md: `python -m dnnc.options > docs/options.md` writes it."""

    text = cleandoc(CompileOptions.__doc__ or "").partition("Args:\n")[2].partition("\n\nRaises:")[0]
    entries: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("     "):
            entries[next(reversed(entries))] += " " + line.strip()
        else:
            name, _, said = line.strip().partition(": ")
            entries[name] = said
    rows = [
        f"| `{f.name}` | {_default(f)} | {entries[f.name].replace('|', '&#124;')} |" for f in fields(CompileOptions)
    ]
    return OPTIONS_PAGE + "\n".join(rows) + "\n"


def _default(f: Field[Any]) -> str:
    value = f.default_factory() if f.default_factory is not MISSING else f.default
    return f"`{value!r}`"


OPTIONS_PAGE = """# Options

`dnnc.compile(model, **options)`, `dnnc.jit(**options)`, `dnnc.tune(model, **options)` and
`torch.compile(model, backend="dnnc", options={...})` take these options. `dnnc.CompileOptions` is their record. The
[command line](cli.md#common-options) has the same options, such as `--opt-level`. `python -m dnnc.options >
docs/options.md` writes this page.

| option | default | meaning |
|---|---|---|
"""


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
