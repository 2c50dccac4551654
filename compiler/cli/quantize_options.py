"""The options of `dnnc quantize`, with help on when to use each; loads no NumPy."""

from __future__ import annotations

from enum import Enum
from importlib import import_module
from typing import Annotated, Any

import typer

from dnnc.cli.options import Json, if_given, one_choice
from dnnc.cli.values import number, whole


class Scheme(str, Enum):
    int8 = "int8"
    int16 = "int16"
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
        "About 100 typical inputs: an .npz file (arrays by input name), an .npy file for a model with one input, or a "
        "folder of them. Rows beyond the model's batch size count as further samples.",
    ),
]
Random = Annotated[
    bool, typer.Option("--random", help="Calibrate on random numbers. This shows the speed, but ruins the accuracy.")
]
SchemeOption = Annotated[
    Scheme,
    one_choice(
        Scheme,
        "int8: weights and activations of convolutions and matrix products. w8a16, w4a16: only weights of matrix "
        "products, in 8 or 4 bits. fp8: both in e4m3, for GPUs. int16: both in 16 bits, as products of bytes. "
        "auto: choose per layer what saves time within --max-error.",
    ),
]
Output = Annotated[
    str,
    typer.Option(
        "--output", "-o", metavar="FILE", show_default=False,
        help="An .onnx file, or a compiled .dnnc file. Default: MODEL.SCHEME.onnx.",
    ),
]  # fmt: skip
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]
MethodOption = Annotated[
    Method,
    one_choice(
        Method,
        "How to choose the ranges of activations. mse: minimize the squared error. minmax: cover all values; sensitive "
        "to outliers. percentile: clip a fixed share. entropy: preserve the distribution, for long tails.",
    ),
]
Percentile = Annotated[
    float,
    typer.Option(
        metavar="P", parser=number(50), help="With --method percentile: percentage of values inside the range."
    ),
]
ActivationsOption = Annotated[
    Activations, one_choice(Activations, "uint8: with a zero point. int8: symmetric; loses one bit after a ReLU.")
]
FormOption = Annotated[
    Form,
    one_choice(
        Form,
        "qdq: quantize the inputs of layers; bias, activation and residual stay in float. operators: also quantize "
        "outputs, which ONNX Runtime's integer kernels need. nbits: MatMulNBits for w8a16 and w4a16.",
    ),
]
Block = Annotated[
    int | None,
    if_given(
        "N",
        "Number of weights per scale, for w8a16 and w4a16. Smaller blocks are more accurate and need more memory. 0: "
        "one scale per channel. Default: 32 for 4 bits, 0 for 8.",
        parser=whole(0),
    ),
]
BiasCorrection = Annotated[
    bool,
    typer.Option(
        "--bias-correction", help="Correct biases for the mean error of rounded weights. Helps narrow layers."
    ),
]
Smooth = Annotated[
    float | None,
    if_given(
        "ALPHA",
        "SmoothQuant, for int8 transformers with outliers: move scale from activations after layer normalization to "
        "weights. 0.5 is usual; 1 moves everything. It costs no time at run time.",
        parser=number(0),
    ),
]
Gptq = Annotated[
    bool,
    typer.Option("--gptq", help="Round weights to minimize the output error on the samples. Slow; useful for 4 bits."),
]
Keep = Annotated[
    list[str] | None, if_given("PATTERN", "Keep these layers in float (wildcards * and ?). May be repeated.")
]
SamplesOption = Annotated[int | None, if_given("N", "Maximum number of samples.", parser=whole(1))]
Agreement = Annotated[
    float | None,
    if_given(
        "X",
        "With int8 and fp8: share of outputs, from 0 to 1, whose arg-max must be that of float. Layers get 16 bits or "
        "stay float until it holds. Default: 0.99 where few differ. 0: no bound.",
        parser=number(0),
    ),
]
MaxError = Annotated[
    float | None,
    if_given(
        "X",
        "With --scheme auto: largest relative error of the outputs (default 0.05), or largest loss of --metric.",
        parser=number(0),
    ),
]
Metric = Annotated[
    str,
    if_given(
        "SCRIPT.py",
        "With --scheme auto: run this script; its function metric(model) returns a float, larger is better. Call model "
        "like the result of dnnc.compile.",
    ),
]
LayerErrors = Annotated[
    bool, typer.Option("--layer-errors", help="Measure the error of each layer separately. auto always does.")
]
Measure = Annotated[bool, typer.Option(help="Compile both models; compare outputs and times.")]
Html = Annotated[str, if_given("FILE.html", "Write an HTML page with the speedup and error of each layer.")]


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
    agreement: Agreement = None,
    max_error: MaxError = None,
    metric: Metric = "",
    layer_errors: LayerErrors = False,
    measure: Measure = True,
    html: Html = "",
    as_json: Json = False,
) -> None:
    """Quantize a trained float32 model. Report the speedup and error of each layer.

    The samples of --data determine the ranges of activations. The result is an ONNX model with QuantizeLinear and
    DequantizeLinear, which dnnc, ONNX Runtime and OpenVINO run with integer kernels. Start with int8. If the error is
    too large, try more samples, --bias-correction, --smooth 0.5 for transformers, --keep for the layers that
    --layer-errors shows, or --scheme auto. It keeps layers in float that lose too much accuracy or save no time.
    """
    c: Any = import_module("dnnc.cli.quantize")  # loads NumPy, onnx and the compiler
    options = {
        "scheme": scheme.value, "method": method.value, "percentile": percentile, "activations": activations.value,
        "form": form.value, "block": block, "bias_correction": bias_correction, "smooth": smooth, "gptq": gptq,
        "keep": tuple(keep or ()), "samples": samples, "random": random, "agreement": agreement, "max_error": max_error,
        "layer_errors": layer_errors, "measure": measure,
    }  # fmt: skip
    c.quantize_command(job, c.Files(data, output, html, metric, force), options, as_json)
