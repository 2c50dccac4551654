"""Small graphs for tests and experiments."""

from __future__ import annotations

from typing import Any

import numpy as np

from dnnc.ir.dtype import BY_NAME
from dnnc.ir.graph import Graph
from dnnc.ir.graph.text import parse


def graph_of(text: str, seed: int = 0) -> Graph:
    """Return the graph of a text whose constants, `w: f32[8, 4]` after the star, are random, scaled by fan-in."""
    rng = np.random.default_rng(seed)
    constants: dict[str, Any] = {}
    head = text.split("*,")[1].split("):")[0] if "*," in text else ""
    for part in head.split("],"):
        if ":" in part:
            name, kind = (word.strip() for word in part.split("[")[0].split(":"))
            dims = part.split("[")[1].rstrip("] ")
            shape = [int(d) for d in dims.split(",")]
            fan_in = shape[0] if len(shape) == 2 else int(np.prod(shape[1:]))
            constants[name] = (rng.standard_normal(shape) / np.sqrt(fan_in)).astype(BY_NAME[kind].numpy)
    return parse(text, constants)
