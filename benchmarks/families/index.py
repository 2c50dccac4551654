"""The index of a corpus: a JSON line per model, its export, and whether it is held back. No framework."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Row = dict[str, Any]
INDEX, FAILED = "index.jsonl", "failed.jsonl"
HELD_SHARE = 1 / 3  # of the models, judged for final figures only
HALVES = ("visible", "held", "all")
TRACED_OPSETS = range(11, 21)  # of torch's TorchScript exporter
DYNAMO_OPSETS = range(16, 24)  # below 18 by ONNX' version converter, which may leave 18
BATCHES = (1, 8)


def fraction(name: str, purpose: str) -> float:
    """A number in [0, 1) that depends on both texts alone."""
    digest = hashlib.sha256(f"{purpose}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def is_held(name: str) -> bool:
    """Is a model of the third that is held back?"""
    return fraction(name, "half") < HELD_SHARE


# --- variation --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variation:
    """How a model is exported. `exporter`: "dynamo", "torchscript", or "graph" for what onnx.helper writes."""

    exporter: str
    opset: int
    batch: int
    symbolic: bool


def variation(name: str) -> Variation:
    """The export of a model, by a hash of its name."""
    dynamo = fraction(name, "exporter") < 0.5
    opsets = DYNAMO_OPSETS if dynamo else TRACED_OPSETS
    opset = opsets[int(fraction(name, "opset") * len(opsets))]
    batch = BATCHES[int(fraction(name, "batch") * len(BATCHES))]
    return Variation("dynamo" if dynamo else "torchscript", opset, batch, fraction(name, "symbolic") < 0.4)


def alternatives(v: Variation) -> list[Variation]:
    """What is tried in turn when an export fails: fixed sizes, then the other exporter at an opset that both know."""
    other = "torchscript" if v.exporter == "dynamo" else "dynamo"
    tries = [
        v,
        replace(v, symbolic=False, opset=max(v.opset, 18)),
        replace(v, exporter=other, symbolic=False, opset=18),
    ]
    return list(dict.fromkeys(tries))


# --- files ------------------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> dict[str, Row]:
    """Rows by name, the last of equal names. Empty without a file; a last line cut short is ignored."""
    rows: dict[str, Row] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[row["name"]] = row
    return rows


def append(path: Path, row: Row) -> None:
    with path.open("a") as f:
        f.write(json.dumps(row) + "\n")


def read_index(folder: Path) -> list[Row]:
    """The models of a folder in the order of their names. FileNotFoundError says how to make one."""
    if not (folder / INDEX).exists():
        raise FileNotFoundError(
            f"{folder / INDEX} does not exist; build it with `python -m benchmarks.families build {folder}`"
        )
    rows = read_lines(folder / INDEX)
    return [rows[name] for name in sorted(rows)]


def select(rows: Iterable[Row], half: str, only: str = "") -> list[Row]:
    """The rows of a half whose name or family matches a regular expression."""
    held = {"visible": (False,), "held": (True,), "all": (False, True)}[half]
    pattern = re.compile(only)
    return [
        r for r in rows if is_held(r["name"]) in held and (pattern.search(r["name"]) or pattern.search(r["family"]))
    ]
