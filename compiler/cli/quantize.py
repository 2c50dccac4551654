"""`dnnc quantize`: a quantized model with its table and page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dnnc.cli.arguments import load_model
from dnnc.cli.errors import say
from dnnc.cli.model_tool import Files as Files
from dnnc.cli.model_tool import check_outputs, compiling, load_metric, show_result
from dnnc.cli.models import Job, need_source
from dnnc.quantization.entry import quantize
from dnnc.quantization.result import Quantized
from dnnc.report.bar import Bar

RANDOM = (
    "warning: calibrating on RANDOM numbers. The speed of the result is right, its accuracy means nothing; give --data "
    "for a model that is used"
)


def quantize_command(job: Job, files: Files, options: dict[str, Any], as_json: bool) -> None:
    """Quantize, write, and say what was won and paid."""
    need_source(job.model)
    output = files.output or f"{Path(job.model).stem}.{options['scheme']}.onnx"
    check_outputs(job, output, files)
    if options["random"]:
        say(RANDOM)
    metric = load_metric(files.metric) if files.metric else None
    with Bar(left=True) as bar:
        q: Quantized = quantize(
            load_model(job.model), files.data or None, metric=metric, progress=bar, **options, **compiling(job)
        )
        q.save(output)
    if files.html:
        q.html(files.html)
    show_result(q, output, files.html, as_json)
