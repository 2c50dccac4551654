"""The options of `dnnc prune`, with help on when to use each; loads no NumPy."""

from __future__ import annotations

from enum import Enum
from importlib import import_module
from typing import Annotated, Any

import typer

from dnnc.cli.options import Json, if_given, one_choice
from dnnc.cli.quantize_options import Force, Keep, SamplesOption
from dnnc.cli.values import whole


class Method(str, Enum):
    magnitude = "magnitude"
    random = "random"
    two_of_four = "2:4"
    block = "block"
    structured = "structured"


class Scope(str, Enum):
    layer = "layer"
    all_layers = "global"
    lamp = "lamp"


Data = Annotated[
    str,
    if_given(
        "PATH",
        "Typical inputs, to measure errors: an .npz file (arrays by input name), an .npy file for a model with one "
        "input, or a folder of them.",
    ),
]
Random = Annotated[bool, typer.Option("--random", help="Without --data: measure errors on random numbers.")]
Sparsity = Annotated[
    list[str] | None,
    if_given(
        "S",
        "Share of weights to remove (default 0.9); for structured, share of output channels (0.5). PATTERN=S applies "
        "to layers by name (wildcards * and ?); the first match counts. May be repeated.",
    ),
]
MethodOption = Annotated[
    Method,
    one_choice(
        Method,
        "magnitude: remove the smallest weights. random: random weights, as a baseline. 2:4: two of every four input "
        "channels. block: blocks of channels. structured: whole output channels and their consumers' weights; the "
        "graph shrinks.",
    ),
]
ScopeOption = Annotated[
    Scope,
    one_choice(
        Scope,
        "layer: the same share of each layer. global: the smallest weights of the whole model. lamp: like global, with "
        "scores normalized per layer; best at high sparsity.",
    ),
]
Block = Annotated[
    str, typer.Option("--block", metavar="OxI", help="With --method block: output and input channels of a block.")
]
Multiple = Annotated[
    int,
    typer.Option(metavar="N", parser=whole(1), help="With --method structured: keep a multiple of N channels."),
]
Candidates = Annotated[
    int,
    typer.Option(
        metavar="N",
        parser=whole(0),
        help="With --method structured: also try N random choices of channels; keep the best on --data.",
    ),
]
Bits = Annotated[
    int | None,
    if_given(
        "N",
        "Share 2^N values among the weights of a layer, by k-means; 5 is usual. With --compress the file stores a "
        "codebook and codes.",
        parser=whole(1),
    ),
]
Compress = Annotated[
    bool,
    typer.Option(
        "--compress",
        help="For a .dnnc file: compress weights; loading runs the passes again. For an .onnx file: store sparse "
        "weights as sparse initializers.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", parser=whole(0), help="Seed of random choices.")]
Output = Annotated[
    str,
    typer.Option(
        "--output", "-o", metavar="FILE", show_default=False,
        help="An .onnx file, or a compiled .dnnc file. Default: MODEL.pruned.onnx.",
    ),
]  # fmt: skip
Metric = Annotated[
    str,
    if_given(
        "SCRIPT.py",
        "Run this script; its function metric(model) returns a float, larger is better. Call model like the result "
        "of dnnc.compile.",
    ),
]
LayerErrors = Annotated[bool, typer.Option("--layer-errors", help="Measure the error of each layer separately.")]
Measure = Annotated[bool, typer.Option(help="Compile both models; compare outputs and times.")]
Explore = Annotated[
    bool,
    typer.Option(
        "--explore",
        help="Write no model. Try methods and sparsities; show density, time and error of each, and the sensitivity "
        "of each layer.",
    ),
]
Methods = Annotated[str, if_given("A,B", "With --explore: the methods. Default: magnitude,2:4,block,structured.")]
Sparsities = Annotated[str, if_given("S,S", "With --explore: the sparsities. Default: 0.5,0.7,0.8,0.9,0.95.")]
Html = Annotated[str, if_given("FILE.html", "Write the report as an HTML page; with --explore, including plots.")]


def prune_(
    job: Any,
    data: Data = "",
    random: Random = False,
    sparsity: Sparsity = None,
    method: MethodOption = Method.magnitude,
    scope: ScopeOption = Scope.layer,
    block: Block = "8x8",
    multiple: Multiple = 8,
    candidates: Candidates = 0,
    bits: Bits = None,
    seed: Seed = 0,
    keep: Keep = None,
    samples: SamplesOption = None,
    output: Output = "",
    force: Force = False,
    compress: Compress = False,
    metric: Metric = "",
    layer_errors: LayerErrors = False,
    measure: Measure = True,
    explore: Explore = False,
    methods: Methods = "",
    sparsities: Sparsities = "",
    html: Html = "",
    as_json: Json = False,
) -> None:
    """Prune a trained float32 model: zero weights or remove channels. Report the speedup and error.

    The result is an ONNX model. Removed weights become zeros; dnnc skips them where that is faster. Start with
    --explore. If accuracy drops too much, fine-tune the model: dnnc.nn.from_onnx imports it as a module, and
    dnnc.optim.GradualPruning prunes during training.
    """
    c: Any = import_module("dnnc.cli.prune")  # loads NumPy, onnx and the compiler
    shared = {"block": block, "keep": tuple(keep or ()), "samples": samples, "random": random}
    files = c.Files(data, output, html, metric, force)
    if explore:
        c.explore_command(job, files, methods, sparsities, shared, as_json)
        return
    if methods or sparsities:
        raise typer.BadParameter("only with --explore", param_hint="--methods" if methods else "--sparsities")
    options = {
        **shared, "sparsity": c.shares(sparsity or ()), "method": method.value, "scope": scope.value,
        "multiple": multiple, "candidates": candidates, "bits": bits, "seed": seed, "layer_errors": layer_errors,
        "measure": measure,
    }  # fmt: skip
    c.prune_command(job, files, options, compress, as_json)
