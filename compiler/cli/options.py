"""The options that commands share, and `compiles`, which gives a command all that say how a model is compiled."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Annotated, Any

import typer

from dnnc.cli.errors import guarded
from dnnc.cli.values import choice, one_of, whole


class Verify(str, Enum):
    kernels = "kernels"
    model = "model"
    none = "none"


class Numerics(str, Enum):
    strict = "strict"
    standard = "standard"
    fast = "fast"


class Level(str, Enum):
    none = "0"
    simple = "1"
    usual = "2"
    all = "3"


class Precision(str, Enum):
    model = "model"
    float32 = "float32"
    tf32 = "tf32"
    float16 = "float16"
    bfloat16 = "bfloat16"

    @property
    def option(self) -> str | None:
        """As the option of `dnnc.compile`."""
        return None if self is Precision.model else self.value


def precision_aliases() -> Mapping[str, str]:
    """Other names of precisions."""
    from dnnc.options import PRECISION_ALIASES  # loads NumPy

    return PRECISION_ALIASES


def one_choice(kind: type[Enum], text: str) -> Any:
    """An option that takes a value of an enumeration."""
    return typer.Option(metavar=one_of(kind), parser=choice(kind), help=text)


def if_given(metavar: str, text: str, **options: Any) -> Any:
    """An option without a default that help would show."""
    return typer.Option(metavar=metavar, help=text, show_default=False, **options)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="An .onnx file, a saved .dnnc file, or graph text in a .py file.", show_default=False
    ),
]
Target = Annotated[
    str,
    typer.Option(help="The target, with its options: 'llvm -mcpu=haswell'. `dnnc targets` lists targets."),
]
Dims = Annotated[
    list[str] | None,
    typer.Option(
        "--dims",
        metavar="NAME=SIZE,...",
        help="Sizes or bounds of symbolic dims: batch=1,seq=16..128.",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=whole(1),
        help="Number of threads. Default: all CPUs available to the process.",
        show_default=False,
    ),
]
Verified = Annotated[
    Verify,
    typer.Option(
        metavar=one_of(Verify),
        parser=choice(Verify),
        help="Compare with float64: each new kernel (kernels), also the whole model (model), or nothing (none).",
    ),
]
OptLevel = Annotated[
    Level,
    typer.Option(
        "--opt-level",
        "-O",
        metavar=one_of(Level),
        parser=choice(Level),
        help="0: no optimization. 1: no fusion, no layout changes. 2, 3: all passes.",
    ),
]
NumericsOption = Annotated[
    Numerics,
    typer.Option(
        metavar=one_of(Numerics),
        parser=choice(Numerics),
        help="strict: no reassociation, bit-identical results. fast: flush denormals to zero. standard: neither.",
    ),
]
PrecisionOption = Annotated[
    Precision,
    typer.Option(
        metavar=one_of(Precision),
        parser=choice(Precision, precision_aliases),
        help="Store floats as in the model (model), or all as float32, tf32, float16 or bfloat16. Aliases: fp16, half, "
        "bf16.",
    ),
]
Cache = Annotated[str, typer.Option(metavar="auto|PATH|off", help="Folder of the kernel cache.")]
Tune = Annotated[
    str | None,
    typer.Option(
        "--tune", metavar="LOG", help="Use the schedules of a tuning log (docs/tuning_log.md).", show_default=False
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES",
        help="Memory limit for intermediate values, such as 512MB. Values above it are recomputed.",
        show_default=False,
    ),
]
StrictCompile = Annotated[
    bool,
    typer.Option(
        "--strict-compile",
        help="Fail if a kernel needs a simpler schedule or a smaller group than the first choice.",
    ),
]
CustomOps = Annotated[
    str | None,
    typer.Option(
        "--custom-ops",
        metavar="FILE.py",
        help="Run this Python file; its dict `custom_ops` defines operators of custom ONNX domains.",
        show_default=False,
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        "-i",
        metavar="NAME=VALUE",
        help="NAME=FILE.npy, or NAME=random, zeros or ones; without NAME=, for all inputs. FILE.npz holds arrays by "
        "name. May be repeated.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the traceback of an error.")]
Seed = Annotated[int, typer.Option("--seed", metavar="N", parser=whole(0), help="Seed of random inputs.")]
LogFile = Annotated[
    str, typer.Argument(metavar="LOG", help="A tuning log: .jsonl, or compressed .jsonl.xz.", show_default=False)
]
TaskPattern = Annotated[
    str,
    typer.Option(
        "--task",
        metavar="PATTERN",
        help="Select tasks by name, with the wildcards * and ?, or by the first letters of their key.",
        show_default=False,
    ),
]
LogOutput = typer.Option(
    "--output",
    "-o",
    metavar="FILE",
    help="The log to write. It may replace a log that the command reads, but no other file.",
    show_default=False,
)


def _job(
    model: Model,
    inputs: Inputs = None,
    dims: Dims = None,
    target: Target = "llvm",
    threads: Threads = None,
    verify: Verified = Verify.kernels,
    opt_level: OptLevel = Level.all,
    numerics: NumericsOption = Numerics.standard,
    precision: PrecisionOption = Precision.model,
    cache: Cache = "auto",
    tune: Tune = None,
    memory: Memory = None,
    strict_compile: StrictCompile = False,
    custom_ops: CustomOps = None,
) -> Any:  # a Job, whose class loads NumPy
    from dnnc.cli.models import Job  # loads NumPy

    return Job(
        model,
        target,
        tuple(dims or ()),
        threads,
        verify.value,
        int(opt_level.value),
        numerics.value,
        cache,
        tuple(inputs or ()),
        precision.option,
        tune,
        memory,
        strict_compile,
        custom_ops,
    )


def compiles(*without: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the compile options but those named, as a Job in front; `--json`, `--verbose` come last."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        del command.__annotations__["job"]
        model, *shared = (
            p for p in inspect.signature(_job, eval_str=True).parameters.values() if p.name not in without
        )
        _, *own = inspect.signature(command, eval_str=True).parameters.values()
        verbose = inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Verbose)
        parameters = sorted([model, *own, *shared, verbose], key=lambda p: p.name in ("as_json", "verbose"))

        @guarded
        @functools.wraps(command)
        def run(**options: Any) -> None:
            names = {p.name for p in own}
            job = _job(**{k: v for k, v in options.items() if k not in names and k != "verbose"})
            command(job, **{k: v for k, v in options.items() if k in names})

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate
