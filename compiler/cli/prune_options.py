"""The options of `dnnc prune`, with help that says what each is good for; loads no NumPy."""

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
        "What the model will meet, for errors: an .npz file (arrays by input name), an .npy file for a model of one "
        "input, or a folder of them.",
    ),
]
Random = Annotated[bool, typer.Option("--random", help="Measure errors on random numbers where there is no --data.")]
Sparsity = Annotated[
    list[str] | None,
    if_given(
        "S",
        "The share of the weights that goes (0.9); of structured, of the output channels (0.5). PATTERN=S is for "
        "layers of these names, with * and ?: the first that fits holds. Repeat it.",
    ),
]
MethodOption = Annotated[
    Method,
    one_choice(
        Method,
        "magnitude: the smallest weights. random: any, to compare with. 2:4: two of each four input channels. block: "
        "blocks of channels. structured: output channels with all that reads them; the graph shrinks.",
    ),
]
ScopeOption = Annotated[
    Scope,
    one_choice(
        Scope,
        "layer: the same share of each layer. global: the smallest weights of all layers. lamp: the same, by scores "
        "that can be compared between layers; best at high sparsities.",
    ),
]
Block = Annotated[
    str, typer.Option("--block", metavar="OxI", help="Of the method block: output and input channels of a block.")
]
Multiple = Annotated[
    int,
    typer.Option(metavar="N", parser=whole(1), help="Of structured: what stays is rounded to a multiple of N."),
]
Candidates = Annotated[
    int,
    typer.Option(
        metavar="N",
        parser=whole(0),
        help="Of structured: random choices of channels that are tried as well; the best on --data is taken.",
    ),
]
Bits = Annotated[
    int | None,
    if_given(
        "N",
        "Let the weights of a layer share 2^N values, which a k-means finds; 5 is usual. With --compress the file "
        "stores a codebook and codes.",
        parser=whole(1),
    ),
]
Compress = Annotated[
    bool,
    typer.Option(
        "--compress",
        help="Of a .dnnc file: code its weights and texts. Loading takes as long as the passes. Of an .onnx file: "
        "store weights of many zeros as sparse initializers.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", parser=whole(0), help="Of random choices.")]
Output = Annotated[
    str,
    typer.Option(
        "--output", "-o", metavar="FILE", show_default=False,
        help="An .onnx file, or a .dnnc file that is compiled already. Default: MODEL.pruned.onnx.",
    ),
]  # fmt: skip
Metric = Annotated[
    str,
    if_given(
        "SCRIPT.py",
        "A script, which is run, with a function metric(model) -> float, better when larger; model is called with "
        "arrays, as dnnc.compile's result.",
    ),
]
LayerErrors = Annotated[bool, typer.Option("--layer-errors", help="Measure the error of each layer by itself.")]
Measure = Annotated[bool, typer.Option(help="Compile both models, and compare outputs and times.")]
Explore = Annotated[
    bool,
    typer.Option(
        "--explore",
        help="Write no model: try methods and sparsities, and show density, time and error of each, and how sensitive "
        "each layer is.",
    ),
]
Methods = Annotated[str, if_given("A,B", "Of --explore: methods. Default: magnitude,2:4,block,structured.")]
Sparsities = Annotated[str, if_given("S,S", "Of --explore: shares. Default: 0.5,0.7,0.8,0.9,0.95.")]
Html = Annotated[str, if_given("FILE.html", "Write the report as a page; of --explore with plots.")]


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
    """Prune a float32 model after training: zero weights, or fewer channels; say what that won and cost.

    Out comes an ONNX model. Zeros stay in the place of the weights that go; dnnc computes with what is left where that
    is faster. Begin with --explore. A model that loses too much can be trained on: dnnc.nn.from_onnx gives a module of
    it, and dnnc.optim.GradualPruning prunes while training.
    """
    c: Any = import_module("dnnc.cli.prune")  # loads NumPy, onnx and the compiler
    shared = {"block": block, "keep": tuple(keep or ()), "samples": samples, "random": random}
    files = c.Files(data, output, html, metric, force)
    if explore:
        c.explore_command(job, files, methods, sparsities, shared, as_json)
        return
    if methods or sparsities:
        raise typer.BadParameter("they are for --explore", param_hint="--methods" if methods else "--sparsities")
    options = {
        **shared, "sparsity": c.shares(sparsity or ()), "method": method.value, "scope": scope.value,
        "multiple": multiple, "candidates": candidates, "bits": bits, "seed": seed, "layer_errors": layer_errors,
        "measure": measure,
    }  # fmt: skip
    c.prune_command(job, files, options, compress, as_json)
