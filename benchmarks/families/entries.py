"""All models of the corpus."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from families import timm_models, transformers_models
from families.entry import Drawn, Entry, Made

NETS = {
    "graphs": "graph networks",
    "detection": "detection",
    "signals": "signals",
    "volumes": "volumes and points",
    "tables": "recommenders and tables",
    "generative": "generative and dense",
    "sequences": "sequences",
    "memories": "memories and solvers",
    "drawn": "written with onnx.helper",
}


def all_entries() -> list[Entry]:
    return [*timm_models.entries(), *transformers_models.entries(), *written_out()]


def written_out() -> list[Entry]:
    """The networks of `nets/`."""
    out = []
    for module, family in NETS.items():
        table: dict[str, Callable[[], Made | Drawn]] = importlib.import_module(f"families.nets.{module}").NETS
        out += [
            Entry(f"net_{name}", family, f"nets.{module}:{name}", _without_batch(make)) for name, make in table.items()
        ]
    return out


def _without_batch(make: Callable[[], Made | Drawn]) -> Callable[[int], Made | Drawn]:
    return lambda batch: make()
