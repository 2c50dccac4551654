"""The models of the benchmarks.

    python benchmarks/zoo list
    python benchmarks/zoo build DIR [--only NAME,NAME] [--weights full|seeded] [--force]

Architectures are exported from PyTorch with random weights from a seed; trained models come out of packages on PyPI.
Nothing else is downloaded. `--weights seeded` leaves out the weights and writes how to make some of their kind instead:
35 models in a few megabytes, which `zoo.materialize(path)` turns back into models with NumPy and onnx alone.
DIR/manifest.json describes inputs and work of each model.

To build (not to run) models, in a virtual environment of its own:

    pip install torch==2.13.0 onnx onnxscript onnxruntime numpy transformers pillow pyyaml huggingface_hub safetensors
    pip install --no-deps timm==1.0.31

torch first and at its version, from an index for CPUs, else it brings gigabytes of CUDA. All models with full weights:
15 minutes, 3 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)  # started as a script: `zoo` is this folder

from zoo.entries import ENTRIES, Entry, Net, Wheel  # noqa: E402


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = ap.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="names, sources and what is special")
    b = commands.add_parser("build", help="write models and their manifest")
    b.add_argument("dir", type=Path)
    b.add_argument("--only", default="", help="names, separated by commas; default: all")
    b.add_argument("--weights", choices=("full", "seeded"), default="full")
    b.add_argument(
        "--wheels",
        type=Path,
        default=Path(tempfile.gettempdir()) / "dnnc-zoo-wheels",
        help="where fetched wheels are kept",
    )
    b.add_argument(
        "--batch",
        type=int,
        default=1,
        help="samples in each input, of architectures that have a batch (into a folder of their own)",
    )
    b.add_argument(
        "--half",
        action="store_true",
        help="architectures in float16, inputs and outputs too (into a folder of their own)",
    )
    b.add_argument("--force", action="store_true", help="build again what the manifest has")
    b.add_argument("--here", action="store_true", help="in this process, one model, its row to standard output")
    a = ap.parse_args()
    if a.command == "list":
        for e in ENTRIES.values():
            print(f"{e.name:20} {_source(e):45} {e.note}")
        return 0
    names = a.only.split(",") if a.only else list(ENTRIES)
    unknown = [n for n in names if n not in ENTRIES]
    if unknown:
        ap.error(f"no model {', '.join(unknown)}; `list` shows all")
    a.dir.mkdir(parents=True, exist_ok=True)
    return _build_here(a, names[0]) if a.here else _build_all(a, names)


def _source(e: Entry) -> str:
    s = e.source
    if isinstance(s, Wheel):
        return f"trained, {s.requirement}"
    return f"PyTorch, {s.make}{s.args or ''}" if isinstance(s, Net) else f"by hand, {s.make}"


def _build_here(a: argparse.Namespace, name: str) -> int:
    from zoo.build import build

    print(json.dumps(build(name, a.dir, a.wheels, a.weights, a.batch, a.half)))
    return 0


def _build_all(a: argparse.Namespace, names: list[str]) -> int:
    """Every model in a process of its own: what one needs in memory goes with it, and one that fails costs no other."""
    path = a.dir / "manifest.json"
    rows: dict[str, dict[str, Any]] = (
        {r["name"]: r for r in json.loads(path.read_text())["models"]} if path.exists() else {}
    )
    failed = 0
    for name in names:
        if (
            not a.force
            and name in rows
            and rows[name].get("weights") == a.weights
            and (a.dir / f"{name}.onnx").exists()
        ):
            continue
        start = time.perf_counter()
        row, error = _build_apart(a, name)
        if row is None:
            failed += 1
            print(f"{name:20} FAILED: {error}", flush=True)
            continue
        rows[name] = row
        path.write_text(json.dumps({"models": [rows[n] for n in ENTRIES if n in rows]}, indent=1))
        sizes = ", ".join(f"{o['absmax']:.3g}" for o in row["outputs"][:3])
        fine = "" if all(o["finite"] for o in row["outputs"]) else "  NOT FINITE"
        print(
            f"{name:20} {row['file_bytes'] / 1e6:8.2f} MB {row['gflops']:9.4f} GFLOP {row['nodes']:5} nodes  "
            f"largest outputs {sizes}{fine}  {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    return int(failed > 0)


def _build_apart(a: argparse.Namespace, name: str) -> tuple[dict[str, Any] | None, str]:
    words = [
        "build",
        str(a.dir),
        "--only",
        name,
        "--weights",
        a.weights,
        "--wheels",
        str(a.wheels),
        "--batch",
        str(a.batch),
        *["--half"] * a.half,
        "--here",
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, str(HERE), *words], capture_output=True, text=True, env=environment)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    if done.returncode == 0 and lines:
        return json.loads(lines[-1]), ""
    return None, lines[-1] if lines else f"exit status {done.returncode}"


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... list | head` ends quietly
    sys.exit(main())
