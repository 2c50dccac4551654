"""The best ceilings that were measured on a machine: what else runs can only lower a measurement."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dnnc.backends.base import Backend, Ceilings, Level
from dnnc.ir.files import replacing


def best_ceilings(backend: Backend, threads: int, folder: Path | None) -> Ceilings:
    """The ceilings of a backend, each at least as high as in all earlier measurements on this kind of machine.

    `folder`: the cache, whose folder `ceilings` keeps them; None or a folder that cannot be written: only this one.
    """
    here = backend.ceilings(threads)
    if folder is None:
        return here
    name = hashlib.sha256(f"{backend.target_key} {here.threads}".encode()).hexdigest()[:16]
    path = folder / "ceilings" / f"{name}.json"
    best = raised(here, _read(path))
    if best != _read(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(json.dumps(asdict(best)).encode())
        except OSError:
            pass
    return best


def raised(a: Ceilings, b: Ceilings | None) -> Ceilings:
    """The higher of each rate. Those of other levels of memory do not count."""
    if b is None or [(v.name, v.capacity) for v in a.levels] != [(v.name, v.capacity) for v in b.levels]:
        return a
    levels = (Level(v.name, v.capacity, max(v.read, w.read), max(v.copy, w.copy)) for v, w in zip(a.levels, b.levels))
    return Ceilings(a.threads, max(a.flops, b.flops), tuple(levels))


def _read(path: Path) -> Ceilings | None:
    try:
        data: dict[str, Any] = json.loads(path.read_bytes())
        return Ceilings(int(data["threads"]), float(data["flops"]), tuple(Level(**v) for v in data["levels"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a damaged file counts as missing
