"""Build the corpus.

    python -m benchmarks.families list
    python -m benchmarks.families build DIR [--only REGEX] [--retry] [--seconds 240] [--memory 10]
    python -m benchmarks.families seed DIR SMALL

Each model is built in a process of its own with limits of time and memory; what DIR has already is skipped.
DIR/index.jsonl describes each model, DIR/failed.jsonl says which could not be exported and why; `--retry` tries those
again. `requirements.txt` lists what building needs. `seed` writes the models without their weights, which are drawn
where they are used: a corpus of some GB travels in a few MB.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import onnx
from zoo.seeded import seed_model

from families.apart import run_apart
from families.build import build
from families.entry import Entry
from families.index import FAILED, INDEX, append, is_held, read_lines


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = ap.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="names, families, sources")
    b = commands.add_parser("build", help="write models and their index")
    b.add_argument("dir", type=Path)
    b.add_argument("--only", default="", help="regular expression of names or families; default: all")
    b.add_argument("--retry", action="store_true", help="try again what failed before")
    b.add_argument("--seconds", type=float, default=240.0, help="for one model")
    b.add_argument("--memory", type=float, default=10.0, help="gigabytes for one model")
    s = commands.add_parser("seed", help="write models that travel without their weights")
    s.add_argument("dir", type=Path)
    s.add_argument("small", type=Path)
    a = ap.parse_args()
    if a.command == "seed":
        return seed_all(a.dir, a.small)
    from families.entries import all_entries  # needs torch

    entries = all_entries()
    if a.command == "list":
        for e in entries:
            print(f"{e.name:40} {e.family:14} {e.source}{'  held back' if is_held(e.name) else ''}")
        return 0
    pattern = re.compile(a.only)
    a.dir.mkdir(parents=True, exist_ok=True)
    return build_all(a, [e for e in entries if pattern.search(e.name) or pattern.search(e.family)])


def is_fit(output: dict[str, Any]) -> bool:
    """Is an output finite, and if it holds several floats, neither flat nor enormous?"""
    several = output["dtype"].startswith("float") and prod(output["shape"]) > 1
    return bool(output["finite"]) and (not several or 1e-3 < output["std"] < 1e3)


def build_all(a: argparse.Namespace, entries: list[Entry]) -> int:
    built, failed = read_lines(a.dir / INDEX), read_lines(a.dir / FAILED)
    count = 0
    for e in entries:
        if (e.name in built and (a.dir / f"{e.name}.onnx").exists()) or (e.name in failed and not a.retry):
            continue
        outcome = run_apart(partial(build, e, a.dir), a.seconds, a.memory)
        if outcome.error:
            count += 1
            (a.dir / f"{e.name}.onnx").unlink(missing_ok=True)
            append(
                a.dir / FAILED,
                {"name": e.name, "family": e.family, "source": e.source, "error": outcome.error, "text": outcome.text},
            )
            print(f"{e.name:40} FAILED after {outcome.seconds:.0f} s: {outcome.text[:300]}", flush=True)
            continue
        row = outcome.value
        append(a.dir / INDEX, row)
        unfit = [o for o in row["outputs"] if not is_fit(o)]
        how = f"{row['exporter']} {row['opset']} batch {row['batch']}{' symbolic' if row['symbolic'] else ''}"
        size = f"{row['file_bytes'] / 1e6:7.2f} MB {row['nodes']:5} nodes"
        print(
            f"{e.name:40} {size}  {how:34} {outcome.seconds:4.0f} s {'UNFIT ' + str(unfit) if unfit else ''}",
            flush=True,
        )
    return int(count > 0)


def seed_all(source: Path, small: Path) -> int:
    small.mkdir(parents=True, exist_ok=True)
    for row in read_lines(source / INDEX).values():
        path = small / f"{row['name']}.onnx"
        if not path.exists():
            onnx.save(seed_model(onnx.load(str(source / path.name))), str(path))
            append(small / INDEX, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
