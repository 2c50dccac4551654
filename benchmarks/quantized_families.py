"""Models of the families' corpus, quantized by ONNX Runtime's tools in many ways: are they right, and how fast?

    python -m benchmarks.families build FLOATS --only REGEX
    python benchmarks/quantized_families.py build DIR --floats FLOATS [--only REGEX] [--schemes NAME,NAME] [--each 2]
    python benchmarks/quantized_families.py check DIR [--only REGEX] [--cache DIR]
    python benchmarks/quantized_families.py time DIR [--only REGEX] [--json ROWS] [--cache DIR] [--budget 3]

`build` quantizes each float model by `--each` schemes, chosen by a hash of its name, or by all of `--schemes`.
Calibration has two draws of the model's inputs. `check` compares dnnc with ONNX Runtime without optimizations, at
inputs where evaluations that differ by roundings alone agree (`judge.py`). `time` is that of `quantized.py`.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import zoo
from families.index import fraction, read_index
from judge import steady
from onnx import ModelProto
from quantized import measure, reference, table

from dnnc.tools.peers import several

Array = np.ndarray[Any, Any]
Row = dict[str, Any]
PRODUCTS = ["Conv", "MatMul", "Gemm"]


@dataclass(frozen=True)
class Scheme:
    """Arguments of ONNX Runtime's quantize_static; `activations` None: of quantize_dynamic."""

    activations: str | None = "QUInt8"
    weights: str = "QInt8"
    form: str = "QDQ"
    per_channel: bool = True
    products_alone: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


SCHEMES = {
    "channel": Scheme(),
    "tensor": Scheme(per_channel=False),
    "signed": Scheme("QInt8", extra={"ActivationSymmetric": True}),
    "signed_asymmetric": Scheme("QInt8", per_channel=False),
    "unsigned": Scheme(weights="QUInt8", per_channel=False),
    "asymmetric_weights": Scheme(weights="QUInt8", extra={"WeightSymmetric": False}),
    "products": Scheme(products_alone=True),
    "operators": Scheme(form="QOperator"),
    "operators_unsigned": Scheme(weights="QUInt8", form="QOperator", per_channel=False),
    "operators_signed": Scheme("QInt8", form="QOperator", per_channel=False, extra={"ActivationSymmetric": True}),
    "dynamic": Scheme(None),
    "dynamic_tensor": Scheme(None, "QUInt8", per_channel=False),
}


# --- models -----------------------------------------------------------------------------------------------------------


def quantize(model: ModelProto, row: Row, scheme: Scheme, scratch: Path) -> ModelProto:
    """The model with 8 bits, by ONNX Runtime's tools."""
    from onnxruntime import quantization as q
    from onnxruntime.quantization.shape_inference import quant_pre_process

    paths = [str(scratch / name) for name in ("float.onnx", "prepared.onnx", "bytes.onnx")]
    onnx.save(model, paths[0])
    quant_pre_process(paths[0], paths[1], skip_symbolic_shape=True)
    common: dict[str, Any] = {
        "per_channel": scheme.per_channel,
        "weight_type": q.QuantType[scheme.weights],
        "op_types_to_quantize": PRODUCTS if scheme.products_alone else None,
    }
    if scheme.activations is None:
        q.quantize_dynamic(*paths[1:], extra_options=scheme.extra, **common)
        return onnx.load(paths[2])

    class Samples(q.CalibrationDataReader):
        def __init__(self) -> None:
            self.left: Iterator[dict[str, Array]] = iter([zoo.make_inputs(row, 100 + k) for k in range(2)])

        def get_next(self) -> dict[str, Array] | None:
            return next(self.left, None)

    common |= {"activation_type": q.QuantType[scheme.activations], "quant_format": q.QuantFormat[scheme.form]}
    q.quantize_static(*paths[1:], Samples(), extra_options=scheme.extra, **common)
    return onnx.load(paths[2])


def build(folder: Path, a: argparse.Namespace) -> None:
    """Write float models, quantized ones, and the manifest of both."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "manifest.json"
    rows = zoo.read_manifest(folder) if manifest.exists() else {}
    for row in read_index(a.floats):
        name = row["name"]
        if not re.search(a.only, name):
            continue
        floats = onnx.load(str(a.floats / f"{name}.onnx"))
        onnx.save(floats, str(folder / f"{name}.onnx"))
        rows[name] = row
        ranked = sorted(SCHEMES, key=lambda s, name=name: fraction(name, s))  # type: ignore[misc]
        for scheme in a.schemes or ranked[: a.each]:
            try:
                with tempfile.TemporaryDirectory() as scratch:
                    model = quantize(floats, row, SCHEMES[scheme], Path(scratch))
                reference(model, zoo.make_inputs(row))
            except Exception as e:  # the tool does not take all models, and makes some that no runtime takes
                print(f"{name} {scheme}: {type(e).__name__}: {e}"[:200], flush=True)
                continue
            whole = f"{name}_{scheme}"
            onnx.save(model, str(folder / f"{whole}.onnx"))
            ops = sorted({n.op_type for n in model.graph.node})
            rows[whole] = row | {"name": whole, "floats": name, "ops": ops}
            print(f"built {whole}", flush=True)
        manifest.write_text(json.dumps({"models": list(rows.values())}, indent=1))


# --- right and fast ---------------------------------------------------------------------------------------------------


def check(folder: Path, row: Row, a: argparse.Namespace) -> bool:
    """Print what is wrong about a model's results, and the warnings of its compilation."""
    import dnnc

    model = zoo.load(folder, row)
    try:
        right = steady(model, partial(zoo.make_inputs, row), reference)
    except Exception as e:
        print(f"{row['name']}: the reference fails, {type(e).__name__}: {e}"[:300], flush=True)
        return True
    try:
        f = dnnc.compile(model, cache=a.cache, threads=a.threads)
        got = several(f(*(right.inputs[i.name] for i in f.inputs)))
        ok = right.accept(got)
        text = "right" if ok else "WRONG"
    except Exception as e:
        ok, text = False, f"FAILED {type(e).__name__}: {e}"[:500]
    print(f"{row['name']}: {text}; evaluations agree in {right.share:.2%}", flush=True)
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=("build", "check", "time", "table"))
    parser.add_argument("path", type=Path, help="a folder of models, or a file of rows for `table`")
    parser.add_argument("--floats", type=Path, help="a folder of `python -m benchmarks.families build`")
    parser.add_argument("--only", default="", help="regular expression of names")
    parser.add_argument("--schemes", type=lambda text: text.split(","))
    parser.add_argument("--each", type=int, default=2, help="schemes for each model")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cache", type=Path, help="of compiled kernels; a new one by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=float, default=3.0, help="seconds of timing for each model")
    a = parser.parse_args()
    if a.job == "build":
        build(a.path, a)
        return 0
    if a.job == "table":
        print(table(list(json.loads(a.path.read_text())["models"].values())))
        return 0
    rows = [r for r in zoo.read_manifest(a.path).values() if "floats" in r and re.search(a.only, r["name"])]
    with tempfile.TemporaryDirectory() as scratch:
        a.cache = a.cache or Path(scratch)
        if a.job == "check":
            return int(not all([check(a.path, r, a) for r in rows]))
        done = json.loads(a.json.read_text()) if a.json and a.json.exists() else {"models": {}}
        for r in rows:
            found = done["models"][r["name"]] = measure(a.path, r["name"], a)
            print(f"{r['name']}: {found['ms']}, {found['failures'] or 'no failures'}", flush=True)
            if a.json:
                a.json.write_text(json.dumps(done, indent=1))
    print(table(list(done["models"].values())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
