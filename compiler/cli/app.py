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
    help="Compile neural networks to native code, run them, and inspect every stage of the compilation.",
    epilog="Start with:  dnnc run model.onnx  or  dnnc inspect model.onnx --stage operator --dims N=1",
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
    """Print the version and exit."""
    if asked:
        from importlib.metadata import version as installed  # takes as long as all of --help

        typer.echo(f"dnnc {installed('dnnc')}")
        raise typer.Exit


@app.callback()
def options(
    asked: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Compile neural networks to native code, run them, and inspect every stage of the compilation."""


cache_app = typer.Typer(no_args_is_help=True, help="Show or clear the cache of compiled kernels on disk.")
app.add_typer(cache_app, name="cache")
log_app = typer.Typer(
    no_args_is_help=True,
    help="Inspect and edit tuning logs: measurements of `dnnc tune`, and the schedules that `--tune LOG` uses.",
)
app.add_typer(log_app, name="log")


@app.command("compile", epilog="Example:  dnnc compile model.onnx --dims batch=1,seq=128 -o model.dnnc")
@compiles()
def compile_(
    job: Job,
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FILE", help="Save the compiled model, for `dnnc run` and dnnc.load."),
    ] = "",
    small: Annotated[
        bool,
        typer.Option("--small", help="Save each weight once. Halves the file; loading runs the passes again."),
    ] = False,
    compress: Annotated[
        bool,
        typer.Option("--compress", help="Like --small, and compress weights: pruned weights take a few bits each."),
    ] = False,
    passes: Annotated[
        bool, typer.Option("--passes", help="Print a row per pass: its time, nodes before and after.")
    ] = False,
    detail: Annotated[bool, typer.Option("--detail", help="Print every kernel's schedule in full.")] = False,
    also: Annotated[
        str,
        typer.Option(
            metavar="ARCH,...",
            help="Also save code for these GPU architectures, such as sm_80,sm_86.",
            show_default=False,
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Compile a model and print a report: passes, kernels with their schedules, memory, time.

    The sizes of symbolic dims come from --dims, or from the arrays of --input. Compiled kernels go to the cache, which
    `dnnc run` and `dnnc.compile` share.
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
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the outputs to an .npz file, or a single one to an .npy file."
        ),
    ] = "",
    repeat: Annotated[
        int, typer.Option(metavar="N", parser=whole(1), help="Number of calls; the median time is shown.")
    ] = 1,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Run a model; print type, range and first values of every output, and the time of a call.

    Without --input, inputs are random: normally distributed floats, integers 0 and 1.
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
        bool, typer.Option("--bisect", help="If an output is wrong, find the first pass or kernel that breaks it.")
    ] = False,
    gradients: Annotated[
        bool, typer.Option("--grad", help="Check the gradients for all float weights and inputs, not the outputs.")
    ] = False,
    directions: Annotated[
        int,
        typer.Option(
            metavar="N", parser=whole(1), help="With --grad: number of random directions per group of weights."
        ),
    ] = 2,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Compare a model's outputs with the float64 interpreter. The exit code is 1 if an error exceeds rounding.

    --bisect names the pass or kernel that breaks the model, and prints a small graph that reproduces the error. --grad
    checks the gradient of a weighted sum of the outputs: the compiled gradient against the interpreter's, and that one
    against finite differences in float64 and forward mode.
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
            help="Engines to compare with: onnxruntime and openvino (extra \\[bench]), torch. "
            "OpenVINO takes --precision.",
            show_default=False,
        ),
    ] = None,
    duration: Annotated[
        float, typer.Option(metavar="SECONDS", parser=number(0), help="Measuring time of each engine.")
    ] = 5.0,
    warmup: Annotated[
        float, typer.Option(metavar="SECONDS", parser=number(0), help="Warm-up time of each engine.")
    ] = 1.0,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure the time of a call: median, tail, throughput, memory, and time to the first result.

    With --peers, other engines run the same file on the same arrays, with the same number of threads, in this process.
    Blocks of calls alternate, with a pause between engines. The command compares the outputs and prints the ratio of
    the median times. Only compare numbers from one run. Each engine takes --warmup plus --duration, and its loading
    time.
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
    budget: Annotated[str, typer.Option(metavar="TIME", help="Total time of the search: 120s, 2m, 1h.")] = "60s",
    trials: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=whole(1),
            help="Maximum number of measurements, not counting finals.",
            show_default=False,
        ),
    ] = None,
    log: Annotated[
        str,
        typer.Option(metavar="FILE", help="The log to append to. Default: MODEL.tune.jsonl.", show_default=False),
    ] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the search of the log; do not repeat its measurements.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Tune only tasks with this name (wildcards * and ?) or key prefix. May be repeated.",
            show_default=False,
        ),
    ] = None,
    runner: Annotated[
        str, typer.Option(metavar="process|ray", help="Measure on this machine, or on a Ray cluster.")
    ] = "process",
    devices: Annotated[
        str, typer.Option(metavar="N,...", help="GPUs of this machine to measure on in parallel.", show_default=False)
    ] = "",
    libraries: Annotated[
        bool, typer.Option("--libraries", help="On a GPU, also measure cuBLASLt and cuDNN if installed.")
    ] = False,
    report: Annotated[
        str, typer.Option(metavar="FILE.html", help="Write a report of the search as an HTML page.", show_default=False)
    ] = "",
    as_json: Json = False,
) -> None:
    """Measure schedules of a model's kernels. Keep the fastest in a log, for `--tune LOG` of other commands.

    The search spends its time on the kernels that can save the most. A schedule wins only if its results are correct
    and it beats the untuned default in alternating runs. Control-C ends the search early; the log keeps every finished
    measurement.
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
        bool, typer.Option("--detail", help="List all kernels, then every call in program order.")
    ] = False,
    repeat: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=whole(1),
            help="Number of calls to measure. Default: about one second.",
            show_default=False,
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
    """Profile a call: time and throughput of each kernel, and the fraction of the machine's roofline.

    dnnc measures the kernels inside the running program, with its threads and warm caches. The remaining time is spent
    at barriers and in Python.
    """

    commands("measure").profile_command(job, repeat, detail, trace, seed, as_json)


@app.command("inspect", epilog="Example:  dnnc inspect digits.onnx --stage operator --kernel 0 --dims N=1")
@guarded
def inspect(
    model: Model,
    stage: Annotated[
        str,
        typer.Option("--stage", "-s", help="graph, operator, or a language of the target: llvm, asm; cuda, ptx."),
    ] = "graph",
    kernel: Annotated[
        str | None,
        typer.Option(
            "--kernel",
            "-k",
            help="Select one kernel by number, name or symbol, or by a node of the model.",
            show_default=False,
        ),
    ] = None,
    naive: Annotated[
        bool, typer.Option("--naive", help="Print the graph before the passes, or operator IR before scheduling.")
    ] = False,
    locs: Annotated[bool, typer.Option("--locs", help="Add comments that name the model's nodes.")] = False,
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
    """Print a stage of the compilation: graph IR, operator IR, LLVM IR or assembly (CUDA C++ or PTX for --target cuda).

    Each kernel is printed with its schedule and the nodes it computes. Dims without a size stay symbolic if possible.
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
            help="Names of passes in order, or all. Default: the whole pipeline. See `dnnc passes`.",
            show_default=False,
        ),
    ] = None,
    print_after_all: Annotated[
        bool, typer.Option("--print-after-all", help="Print the graph after each pass.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Verify the graph after each pass.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print why rules of a pass do not match.")] = False,
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FILE.py", help="Write the graph to FILE.py and its constants to FILE.npz."
        ),
    ] = "",
    dims: Dims = None,
    lanes: Annotated[
        int, typer.Option(metavar="N", parser=whole(1), help="Vector width in float32 values, for layouts.")
    ] = 16,
    numerics: NumericsOption = Numerics.standard,
    precision: PrecisionOption = Precision.model,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run graph passes on graph text or on a model, and print the graph.

    `fuse` and `memory-plan` do not change the graph; they print their plan. The constants of graph text come from the
    .npz file beside it.
    """
    o = commands("opt")
    settings = o.Settings(passes, print_after_all, check, explain, output)
    o.opt_command(graph, tuple(dims or ()), settings, o.context(lanes, numerics.value, precision.option), as_json)


@app.command("export", epilog="Example:  dnnc export g.py -o model.onnx --opset 21")
@guarded
def export(
    graph: Model,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE.onnx", help="The file to write.", show_default=False)
    ],
    opset: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            parser=whole(18),
            help="The ONNX opset. Default: the latest one that onnx supports.",
            show_default=False,
        ),
    ] = None,
    dims: Dims = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Export graph text or a model as an ONNX model; --dims fixes sizes, --opset converts."""

    commands("export").export_command(graph, output, tuple(dims or ()), opset, as_json)


@app.command("curves", epilog="Example:  dnnc curves run.jsonl -o run.html --report step.json")
@guarded
def curves(
    log: Annotated[
        str, typer.Argument(metavar="LOG", help="A log that dnnc.progress(log=...) has written.", show_default=False)
    ],
    output: Annotated[
        str,
        typer.Option("--output", "-o", metavar="FILE.html", help="The page. Default: LOG.html.", show_default=False),
    ] = "",
    report: Annotated[
        str,
        typer.Option(
            metavar="FILE.json", help="The report of the step's program; adds memory over the step.", show_default=False
        ),
    ] = "",
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Draw a training run as an HTML page: losses, learning rate, throughput, step times, memory."""

    commands("curves").curves_command(log, output, report, as_json)


@app.command("passes", epilog="Example:  dnnc passes")
@guarded
def passes(as_json: Json = False, verbose: Verbose = False) -> None:
    """List the graph passes in pipeline order, with their purpose. `dnnc opt -p` accepts their names."""

    commands("opt").passes_command(as_json)


@app.command("targets", epilog="Example:  dnnc targets --json")
@guarded
def targets(as_json: Json = False, verbose: Verbose = False) -> None:
    """List the available targets; for each unavailable one, print the reason."""

    commands("info").targets_command(as_json)


@app.command("ops", epilog="Example:  dnnc ops --onnx")
@guarded
def ops(
    onnx: Annotated[
        bool,
        typer.Option("--onnx", help="List ONNX operators instead: opsets, types, import, where they run."),
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="With --onnx: print the table of docs/operators.md.")
    ] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """List the ops of the graph IR and their definitions."""

    commands("info").ops_command(onnx, as_json, markdown)


@cache_app.command("info", epilog="Example:  dnnc cache info")
@guarded
def cache_info(cache: Cache = "auto", as_json: Json = False, verbose: Verbose = False) -> None:
    """Show the folder of the cache, its number of entries, and its size."""

    commands("info").cache_info_command(cache, as_json)


@cache_app.command("clear", epilog="Example:  dnnc cache clear")
@guarded
def cache_clear(cache: Cache = "auto", as_json: Json = False, verbose: Verbose = False) -> None:
    """Remove all compiled kernels. The next compilation compiles them again."""

    commands("info").cache_clear_command(cache, as_json)


@log_app.command("show", epilog="Example:  dnnc log show m.tune.jsonl --task 'conv*'")
@guarded
def log_show(log: LogFile, task: TaskPattern = "", as_json: Json = False, verbose: Verbose = False) -> None:
    """Show a tuning log: sessions, and tasks (kernels with their shapes) with trials, best trial and winner.

    With --task, also list the trials, fastest first. `--tune` compiles the winner. The gain is its speedup over the
    untuned kernel, measured in alternating runs.
    """

    commands("log").show_command(log, task, as_json)


@log_app.command("best", epilog="Example:  dnnc log best m.tune.jsonl")
@guarded
def log_best(log: LogFile, task: TaskPattern = "", as_json: Json = False, verbose: Verbose = False) -> None:
    """List the best schedule of each task, and whether it is used.

    A fast trial alone is not used. A winner has been compared with the untuned kernel, and checked against float64.
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
    """Merge tuning logs of several models, machines or interrupted runs.

    Duplicate and truncated lines are dropped. If several logs have a winner for a task, the latest one counts.
    """

    commands("log").merge_command(logs, output, as_json)


@log_app.command("prune", epilog="Example:  dnnc log prune m.tune.jsonl -o m.winners.jsonl")
@guarded
def log_prune(
    log: LogFile,
    output: Annotated[str, LogOutput] = "",
    trials: Annotated[
        int,
        typer.Option("--trials", metavar="N", parser=whole(0), help="Number of the fastest trials to keep per task."),
    ] = 0,
    target: Annotated[
        str,
        typer.Option(
            metavar="TEXT", help="Keep only tasks whose target contains this text: cuda, znver4.", show_default=False
        ),
    ] = "",
    task: TaskPattern = "",
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Shrink a log: keep winners and failed schedules, drop other trials. Without -o, replace the log.

    Compiling with the pruned log gives the same code. A resumed search measures the dropped trials again.
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
