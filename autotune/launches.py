"""How a GPU kernel is launched, as JSON: the process that measures a kernel is not the one that made it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dnnc.backends.cuda.launch import Launch, TensorMap
from dnnc.ir.dtype import BY_NAME


def as_json(launch: Launch) -> dict[str, Any]:
    """A launch as plain data."""
    return {**asdict(launch), "maps": [{**vars(m), "dtype": m.dtype.name} for m in launch.maps]}


def from_json(record: dict[str, Any]) -> Launch:
    """What `as_json` gave, also after it was text."""
    maps = tuple(TensorMap(**{k: _tuples(v) for k, v in m.items() if k != "dtype"}, dtype=BY_NAME[m["dtype"]]) for m in record["maps"])
    return Launch(tuple(record["grid"]), tuple(record["block"]), record["shared_bytes"], record["cluster"], maps)


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, (list, tuple)) else x
