"""The options of `dnnc quantize`, with help that says what each is good for; loads no NumPy."""

from __future__ import annotations

from enum import Enum
from importlib import import_module
from typing import Annotated, Any

import typer

from dnnc.cli.options import Json, if_given, one_choice
from dnnc.cli.values import number, whole


class Scheme(str, Enum):
    int8 = "int8"
    w8a16 = "w8a16"
    w4a16 = "w4a16"
    fp8 = "fp8"
    auto = "auto"


class Method(str, Enum):
    mse = "mse"
    minmax = "minmax"
    percentile = "percentile"
    entropy = "entropy"


class Activations(str, Enum):
    uint8 = "uint8"
    int8 = "int8"


class Form(str, Enum):
    qdq = "qdq"
    operators = "operators"
    nbits = "nbits"


Data = Annotated[
    str,
    if_given(
        "PATH",
        "What the model will meet, some 100 samples: an .npz file (arrays by input name), an .npy file for a model of "
        "one input, or a folder of them. More rows than the model's batch are several samples.",
    ),
]
Random = Annotated[
    bool, typer.Option("--random", help="Calibrate on random numbers: to see the speed. The accuracy is lost.")
]
SchemeOption = Annotated[
    Scheme,
    one_choice(
        Scheme,
        "int8: weights and activations of convolutions and products. w8a16, w4a16: weights of products alone, in 8 or "
        "4 bits. fp8: both in e4m3, for GPUs. auto: per layer what gains time, within --max-error.",
    ),
]
Output = Annotated[
    str,
    typer.Option(
        "--output", "-o", metavar="FILE", show_default=False,
        help="An .onnx file, or a .dnnc file that is compiled already. Default: MODEL.SCHEME.onnx.",
    ),
]  # fmt: skip
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
MethodOption = Annotated[
    Method,
    one_choice(
        Method,
        "Ranges of activations. mse: least square error. minmax: all that was seen; one outlier makes it wide. "
        "percentile: cuts a fixed share. entropy: least change of the distribution, for long tails.",
    ),
]
Percentile = Annotated[
    float, typer.Option(metavar="P", parser=number(50), help="With --method percentile: the share kept, in percent.")
]
ActivationsOption = Annotated[
    Activations, one_choice(Activations, "uint8 with a zero point, or int8 about 0 (half the steps behind a ReLU).")
]
FormOption = Annotated[
    Form,
    one_choice(
        Form,
        "qdq: quantise where a layer reads; bias, activation and residual stay exact. operators: also behind each "
        "layer, as ONNX Runtime needs it for its integer kernels. nbits: MatMulNBits for w8a16 and w4a16.",
    ),
]
Block = Annotated[
    int | None,
    if_given(
        "N",
        "Weights that share a scale, for w8a16 and w4a16: smaller is more exact and larger in memory. 0: a channel. "
        "Default: 32 in 4 bits, 0 in 8.",
        parser=whole(0),
    ),
]
BiasCorrection = Annotated[
    bool,
    typer.Option("--bias-correction", help="Shift biases by the mean that rounding weights adds. Helps narrow layers."),
]
Smooth = Annotated[
    float | None,
    if_given(
        "ALPHA",
        "SmoothQuant, for transformers with outliers in int8: move scale from activations behind layer normalisations "
        "to weights. 0.5 is usual, 1 moves all. No cost at run time.",
        parser=number(0),
    ),
]
Gptq = Annotated[
    bool,
    typer.Option(
        "--gptq", help="Round weights for the least error of sums over the samples. Slow; worth it in 4 bits."
    ),
]
Keep = Annotated[list[str] | None, if_given("PATTERN", "Layers that stay float, with * and ?. Repeat it.")]
SamplesOption = Annotated[int | None, if_given("N", "Samples at most.", parser=whole(1))]
MaxError = Annotated[
    float | None,
    if_given(
        "X",
        "Of auto: how far outputs may be from float, relative to their size (default 0.05); with --metric, how much it "
        "may lose.",
        parser=number(0),
    ),
]
Metric = Annotated[
    str,
    if_given(
        "SCRIPT.py",
        "Of auto: a script, which is run, with a function metric(model) -> float, better when larger; model is called "
        "with arrays, as dnnc.compile's result.",
    ),
]
LayerErrors = Annotated[
    bool, typer.Option("--layer-errors", help="Measure the error of each layer by itself. auto always does.")
]
Measure = Annotated[bool, typer.Option(help="Compile both models, and compare outputs and times.")]
Html = Annotated[str, if_given("FILE.html", "Write time won and error paid per layer as a page.")]


def quantize_(
    job: Any,
    data: Data = "",
    random: Random = False,
    scheme: SchemeOption = Scheme.int8,
    output: Output = "",
    force: Force = False,
    method: MethodOption = Method.mse,
    percentile: Percentile = 99.99,
    activations: ActivationsOption = Activations.uint8,
    form: FormOption = Form.qdq,
    block: Block = None,
    bias_correction: BiasCorrection = False,
    smooth: Smooth = None,
    gptq: Gptq = False,
    keep: Keep = None,
    samples: SamplesOption = None,
    max_error: MaxError = None,
    metric: Metric = "",
    layer_errors: LayerErrors = False,
    measure: Measure = True,
    html: Html = "",
    as_json: Json = False,
) -> None:
    """Quantise a float32 model after training, and say for each layer what that won and cost.

    The model runs on the samples of --data, which shows the ranges of its values. Out comes an ONNX model with
    QuantizeLinear and DequantizeLinear, which dnnc, ONNX Runtime and OpenVINO run in integers. Begin with int8. Where
    the error is too large: more samples, --bias-correction, --smooth 0.5 for transformers, --keep for the layers that
    --layer-errors shows, or --scheme auto, which leaves float what costs too much or gains nothing.
    """
    c: Any = import_module("dnnc.cli.quantize")  # loads NumPy, onnx and the compiler
    options = {
        "scheme": scheme.value, "method": method.value, "percentile": percentile, "activations": activations.value,
        "form": form.value, "block": block, "bias_correction": bias_correction, "smooth": smooth, "gptq": gptq,
        "keep": tuple(keep or ()), "samples": samples, "random": random, "max_error": max_error,
        "layer_errors": layer_errors, "measure": measure,
    }  # fmt: skip
    c.quantize_command(job, c.Files(data, output, html, metric, force), options, as_json)
