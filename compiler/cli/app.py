"""Commands and options. Each loads its implementation when run, so `--help` loads no NumPy or LLVM."""

from __future__ import annotations

from importlib import import_module
from inspect import getdoc
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dnnc.cli.errors import guarded
from dnnc.cli.options import (
    Cache,
    CustomOps,
    Dims,
    Json,
    Level,
    LogFile,
    LogOutput,
    Model,
    Numerics,
    NumericsOption,
    OptLevel,
    Precision,
    PrecisionOption,
    Seed,
    Target,
    TaskPattern,
    Tune,
    Verbose,
    compiles,
)
from dnnc.cli.prune_options import prune_
from dnnc.cli.quantize_options import quantize_
from dnnc.cli.values import number, whole
from dnnc.cli.view_options import view_

if TYPE_CHECKING:
    from dnnc.cli.models import Job

app = typer.Typer(
    name="dnnc",
    help="Compile neural networks to fast native code, run them, and look at every stage on the way.",
    epilog="Begin with:  dnnc run model.onnx  and  dnnc inspect model.onnx --stage operator --dims N=1",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def commands(name: str) -> Any:
    """Return the module `dnnc.cli.NAME`, loaded when a command runs: NumPy, onnx and the compiler take longer than
    `--help` may.
    """
    return import_module(f"dnnc.cli.{name}")


def version(asked: bool) -> None:
    """Print the version and end."""
    if asked:
        from importlib.metadata import version as installed  # takes as long as all of --help

        typer.echo(f"dnnc {installed('dnnc')}")
        raise typer.Exit


@app.callback()
def options(
    asked: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Compile neural networks to fast native code, run them, and look at every stage on the way."""


cache_app = typer.Typer(
    no_args_is_help=True, help="Compiled kernels on disk: where they are, how many, and how to remove them."
)
app.add_typer(cache_app, name="cache")
log_app = typer.Typer(
    no_args_is_help=True, help="Tuning logs: what `dnnc tune` has measured, and which schedules `--tune LOG` takes."
)
app.add_typer(log_app, name="log")


@app.command("compile", epilog="Example:  dnnc compile model.onnx --dims batch=1,seq=128 -o model.dnnc")
@compiles()
def compile_(
    job: Job,
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Save the compiled model; `dnnc run` and dnnc.load take it."
        ),
    ] = "",
    small: Annotated[
        bool,
        typer.Option("--small", help="Save each weight once: half the size, but loading takes as long as the passes."),
    ] = False,
    compress: Annotated[
        bool,
        typer.Option("--compress", help="As --small, and code weights and texts: pruned weights take a few bits each."),
    ] = False,
    passes: Annotated[
        bool, typer.Option("--passes", help="A row for each pass: its time, and the nodes before and after.")
    ] = False,
    detail: Annotated[bool, typer.Option("--detail", help="The schedule of every kernel in full.")] = False,
    also: Annotated[
        str,
        typer.Option(
            metavar="ARCH,...", help="Save code for these GPUs as well, such as sm_80,sm_86.", show_default=False
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Compile a model and report what was done: passes, kernels with their schedules, memory, time.

    A model with symbolic dims is compiled for the sizes that --dims gives, or for those of the arrays that --input
    gives. Compiled kernels go to the cache, where `dnnc run` and `dnnc.compile` find them.
    """

    c = commands("compile")
    saving = c.Saving(output, small, tuple(a.strip() for a in also.split(",") if a.strip()), compress)
    c.compile_command(job, as_json, saving, passes, detail)


@app.command("run", epilog="Example:  dnnc run digits.onnx --input image=x.npy --output y.npz")
@compiles()
def run(
    job: Job,
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FILE", help="Write the outputs to a .npz file, or one to a .npy file."),
    ] = "",
    repeat: Annotated[
        int, typer.Option(metavar="N", parser=whole(1), help="How many times to call; the median is shown.")
    ] = 1,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Run a model and show what comes out: type, range and first values of every output, and the time.

    Without --input all inputs are random: normal floats, integers 0 and 1.
    """

    commands("compile").run_command(job, output, repeat, seed, as_json)


@app.command(
    "verify",
    epilog="Example:  dnnc verify model.onnx --dims batch=1 --bisect  and  dnnc verify model.onnx --grad",
)
@compiles("verify")
def verify_(
    job: Job,
    find: Annotated[
        bool, typer.Option("--bisect", help="Where something is off, find the first pass or kernel that does it.")
    ] = False,
    gradients: Annotated[
        bool, typer.Option("--grad", help="Check the gradients by all float weights and inputs instead of the outputs.")
    ] = False,
    directions: Annotated[
        int,
        typer.Option(
            metavar="N", parser=whole(1), help="With --grad: random directions in which each group is differenced."
        ),
    ] = 2,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Compare what a model computes with the float64 interpreter, output by output. Exit code 1 where one is off by
    more than rounding.

    With --bisect the pass or kernel that breaks it is named, and a small graph printed that shows it. With --grad the
    gradients of the outputs' weighed sum are compared: those of the compiled model with the interpreter's, and these
    with differences in float64 and with forward mode.
    """

    if gradients:
        commands("verify_gradients").verify_gradients(job, find, directions, seed, as_json)
    else:
        commands("verify").verify_command(job, find, seed, as_json)


@app.command("bench", epilog="Example:  dnnc bench model.onnx --dims batch=1 --peers onnxruntime,openvino")
@compiles()
def bench(
    job: Job,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peers",
            metavar="NAME,...",
            help="Engines to compare with: onnxruntime, openvino (the extra \\[bench]), torch.",
            show_default=False,
        ),
    ] = None,
    duration: Annotated[
        float, typer.Option(metavar="SECONDS", parser=number(0), help="Seconds of timing, of each engine.")
    ] = 5.0,
    warmup: Annotated[
        float, typer.Option(metavar="SECONDS", parser=number(0), help="Seconds of calls before, of each engine.")
    ] = 1.0,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Time calls of a model: median, tail, throughput, memory, and the time until the first result.

    With --peers other engines run the same file on the same arrays with as many threads, in this process: blocks of
    calls take turns with pauses between, outputs are compared, and the ratio of the medians says who is faster. Compare
    figures of one run only. All takes the time of --warmup and --duration for each engine, and loading them.
    """

    commands("measure").bench_command(
        job,
        commands("measure").parse_peers(peers or ()),
        duration,
        warmup,
        seed,
        as_json,
    )


@app.command(
    "tune",
    epilog="Example:  dnnc tune model.onnx --dims batch=1 --budget 2m && dnnc run model.onnx --dims batch=1 --tune "
    "model.tune.jsonl",
)
@compiles("inputs", "verify", "cache", "tune", "memory", "strict_compile")
def tune_(
    job: Job,
    budget: Annotated[str, typer.Option(metavar="TIME", help="How long it may take in all: 120s, 2m, 1h.")] = "60s",
    trials: Annotated[
        int | None,
        typer.Option(
            metavar="N", parser=whole(1), help="Measurements at most, but for the finals.", show_default=False
        ),
    ] = None,
    log: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="The log to append to. Default: the model's name with .tune.jsonl.", show_default=False
        ),
    ] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where the log ends: what it holds is not measured again.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Names of tasks, with * and ?, or how their keys begin. Repeat it.",
            show_default=False,
        ),
    ] = None,
    runner: Annotated[
        str, typer.Option(metavar="process|ray", help="Measure on this machine, or on a Ray cluster.")
    ] = "process",
    devices: Annotated[
        str, typer.Option(metavar="N,...", help="GPUs of this machine to measure on at once.", show_default=False)
    ] = "",
    libraries: Annotated[
        bool, typer.Option("--libraries", help="On a GPU, measure cuBLASLt and cuDNN too, where they are installed.")
    ] = False,
    report: Annotated[
        str, typer.Option(metavar="FILE.html", help="Write a report of the search as a page.", show_default=False)
    ] = "",
    as_json: Json = False,
) -> None:
    """Measure schedules of a model's kernels, and keep the fastest in a log that `--tune LOG` of other commands takes.

    Time goes where most of the model's time can be saved. A schedule wins only if it computes the right numbers and is
    faster than what dnnc picks unmeasured, in turns with it. Control-C ends the search early; every finished
    measurement is in the log.
    """

    t = commands("tune")
    effort = t.Effort(budget, trials, log, resume, tuple(only or ()), runner, devices, report, libraries)
    t.tune_command(job, effort, as_json)


app.command(
    "quantize",
    epilog="Example:  dnnc quantize model.onnx --data images.npz --scheme auto --max-error 0.02 --html report.html",
)(compiles("inputs", "precision", "memory", "tune", "strict_compile", "custom_ops")(quantize_))
app.command(
    "prune",
    epilog="Example:  dnnc prune model.onnx --data images.npz --explore --html explore.html  and  dnnc prune "
    "model.onnx --sparsity 0.9",
)(compiles("inputs", "precision", "memory", "tune", "strict_compile", "custom_ops")(prune_))


app.command("view", epilog="Example:  dnnc view digits.onnx --dims N=1 -o digits.html")(
    compiles("strict_compile")(view_)
)


@app.command("profile", epilog="Example:  dnnc profile model.onnx --dims batch=1 --detail")
@compiles("strict_compile")
def profile(
    job: Job,
    detail: Annotated[
        bool, typer.Option("--detail", help="All kernels, and every call in the order of the program.")
    ] = False,
    repeat: Annotated[
        int | None,
        typer.Option(
            metavar="N", parser=whole(1), help="Calls to measure. Default: about a second of them.", show_default=False
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.json",
            help="Write the fastest run as a Chrome trace, for ui.perfetto.dev: kernels by thread, memory, producers.",
            show_default=False,
        ),
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Show where the time of a call goes: every kernel with its time, its rates, and how near they are to this
    machine's limits.

    Measured while the program runs, on its threads and with its caches. The rest is waiting at barriers, and what
    passes in Python.
    """

    commands("measure").profile_command(job, repeat, detail, trace, seed, as_json)


@app.command("inspect", epilog="Example:  dnnc inspect digits.onnx --stage operator --kernel 0 --dims N=1")
@guarded
def inspect(
    model: Model,
    stage: Annotated[
        str,
        typer.Option("--stage", "-s", help="graph, operator, or a language of the target: llvm and asm, cuda and ptx."),
    ] = "graph",
    kernel: Annotated[
        str | None,
        typer.Option(
            "--kernel", "-k", help="One kernel: its number, name or symbol, or a node of the model.", show_default=False
        ),
    ] = None,
    naive: Annotated[
        bool, typer.Option("--naive", help="The graph before the passes; operator IR before its schedule.")
    ] = False,
    locs: Annotated[
        bool, typer.Option("--locs", help="Say in comments which nodes of the model graph nodes come from.")
    ] = False,
    dims: Dims = None,
    target: Target = "llvm",
    opt_level: OptLevel = Level.all,
    numerics: NumericsOption = Numerics.standard,
    precision: PrecisionOption = Precision.model,
    tune: Tune = None,
    custom_ops: CustomOps = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Print a model as graph IR, its kernels as operator IR, as LLVM IR or assembly (CUDA C++ or PTX for --target
    cuda).

    Kernels come with their schedule and the nodes that they compute. Dims without a size stay symbols where that works.
    """
    sizes = commands("arguments").parse_dims(dims or ())
    i = commands("inspect")
    level = int(opt_level.value)
    own = commands("models").custom_ops(custom_ops)
    options = i.CompileOptions(
        target, precision.option, numerics.value, sizes, opt_level=level, tune=tune, custom_ops=own
    )
    i.inspect_command(model, i.View(stage.lower(), kernel, naive, locs), options, as_json)


@app.command("opt", epilog='Example:  dnnc opt g.py -p "fold,cse,dce,fuse" --print-after-all')
@guarded
def opt(
    graph: Model,
    passes: Annotated[
        str | None,
        typer.Option(
            "--passes",
            "-p",
            help="Names, in order, or all. Default: the whole pipeline. `dnnc passes` lists them.",
            show_default=False,
        ),
    ] = None,
    print_after_all: Annotated[
        bool, typer.Option("--print-after-all", help="Print the graph after each pass.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Verify the graph after each pass.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Say why rules of a pass do not fire.")] = False,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE.py", help="Write the graph, its constants to FILE.npz.")
    ] = "",
    dims: Dims = None,
    lanes: Annotated[
        int, typer.Option(metavar="N", parser=whole(1), help="float32 values of a vector, for layouts.")
    ] = 16,
    numerics: NumericsOption = Numerics.standard,
    precision: PrecisionOption = Precision.model,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run graph passes on graph text or on a model, and print the graph.

    `fuse` and `memory-plan` change nothing: they print their plan. Constants of graph text are read from the .npz file
    beside it.
    """
    o = commands("opt")
    settings = o.Settings(passes, print_after_all, check, explain, output)
    o.opt_command(graph, tuple(dims or ()), settings, o.context(lanes, numerics.value, precision.option), as_json)


@app.command("export", epilog="Example:  dnnc export g.py -o model.onnx --opset 21")
@guarded
def export(
    graph: Model,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE.onnx", help="Where to write it.", show_default=False)
    ],
    opset: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=whole(18),
            help="Of ONNX's operators. Default: the latest that onnx knows.",
            show_default=False,
        ),
    ] = None,
    dims: Dims = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write graph text or a model as an ONNX model, with fixed sizes or in another opset where asked."""

    commands("export").export_command(graph, output, tuple(dims or ()), opset, as_json)


@app.command("curves", epilog="Example:  dnnc curves run.jsonl -o run.html --report step.json")
@guarded
def curves(
    log: Annotated[str, typer.Argument(metavar="LOG", help="What dnnc.progress(log=...) wrote.", show_default=False)],
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE.html", help="Default: the log's name.", show_default=False)
    ] = "",
    report: Annotated[
        str,
        typer.Option(
            metavar="FILE.json", help="The report of the step's program, for memory over the step.", show_default=False
        ),
    ] = "",
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Draw a training run as a page: losses, learning rate, samples a second, where step time goes, memory."""

    commands("curves").curves_command(log, output, report, as_json)


@app.command("passes", epilog="Example:  dnnc passes")
@guarded
def passes(as_json: Json = False, verbose: Verbose = False) -> None:
    """List the graph passes in the order of the pipeline, each with its reason. `dnnc opt -p` takes their names."""

    commands("opt").passes_command(as_json)


@app.command("targets", epilog="Example:  dnnc targets --json")
@guarded
def targets(as_json: Json = False, verbose: Verbose = False) -> None:
    """Show what this machine can compile for, and why not for the rest."""

    commands("info").targets_command(as_json)


@app.command("ops", epilog="Example:  dnnc ops --onnx")
@guarded
def ops(
    onnx: Annotated[
        bool,
        typer.Option("--onnx", help="The operators of ONNX instead: opsets, types, how each is read, where it runs."),
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="With --onnx: the table as the page docs/operators.md.")
    ] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """List the ops of the graph IR and how each is defined."""

    commands("info").ops_command(onnx, as_json, markdown)


@cache_app.command("info", epilog="Example:  dnnc cache info")
@guarded
def cache_info(cache: Cache = "auto", as_json: Json = False, verbose: Verbose = False) -> None:
    """Show where compiled kernels are kept, how many there are, and how large they are together."""

    commands("info").cache_info_command(cache, as_json)


@cache_app.command("clear", epilog="Example:  dnnc cache clear")
@guarded
def cache_clear(cache: Cache = "auto", as_json: Json = False, verbose: Verbose = False) -> None:
    """Remove all compiled kernels. The next compilation makes them anew."""

    commands("info").cache_clear_command(cache, as_json)


@log_app.command("show", epilog="Example:  dnnc log show m.tune.jsonl --task 'conv*'")
@guarded
def log_show(log: LogFile, task: TaskPattern = "", as_json: Json = False, verbose: Verbose = False) -> None:
    """Show what a log holds: the runs of the tuner, and each task (a kernel with its shapes) with its trials, its best
    and its winner.

    With --task the trials are listed as well, fastest first. The winner is what compiling with --tune takes; "gain" is
    how much faster it is than what is compiled without a log, measured in turns with it.
    """

    commands("log").show_command(log, task, as_json)


@log_app.command("best", epilog="Example:  dnnc log best m.tune.jsonl")
@guarded
def log_best(log: LogFile, task: TaskPattern = "", as_json: Json = False, verbose: Verbose = False) -> None:
    """List the schedule of each task, and whether compiling takes it.

    A trial is not used for being fast: only a winner is, which was compared with the untuned kernel and checked against
        float64.
    """

    commands("log").best_command(log, task, as_json)


@log_app.command("merge", epilog="Example:  dnnc log merge monday.jsonl tuesday.jsonl -o both.jsonl")
@guarded
def log_merge(
    logs: Annotated[list[str], typer.Argument(metavar="LOG...", help="Tuning logs.", show_default=False)],
    output: Annotated[str, LogOutput],
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Make one log of several: of other models, of other machines, of interrupted runs.

    Equal lines are kept once, and lines that a crash has torn are left out. Where several logs have a winner for a
    task, the latest holds.
    """

    commands("log").merge_command(logs, output, as_json)


@log_app.command("prune", epilog="Example:  dnnc log prune m.tune.jsonl -o m.winners.jsonl")
@guarded
def log_prune(
    log: LogFile,
    output: Annotated[str, LogOutput] = "",
    trials: Annotated[
        int,
        typer.Option(
            "--trials", metavar="N", parser=whole(0), help="How many of the fastest trials of each task to keep."
        ),
    ] = 0,
    target: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="Keep only tasks whose target contains this: cuda, znver4.", show_default=False
        ),
    ] = "",
    task: TaskPattern = "",
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Make a log small: the winners stay, and what says that a schedule crashes or is wrong; other trials go. Without
    -o in its place.

    Compiling with the pruned log gives the same code. A search that goes on with it has to measure again what went.
    """

    commands("log").prune_command(log, output, trials, target, task, as_json)


def flow(group: typer.Typer) -> None:
    """Give commands their docstrings as help, each paragraph in one line: the terminal's width breaks it, not the
    source's.
    """
    for command in group.registered_commands:
        text = getdoc(command.callback) or ""
        command.help = "\n\n".join(" ".join(p.split()) for p in text.split("\n\n"))


for _group in (app, cache_app, log_app):
    flow(_group)
