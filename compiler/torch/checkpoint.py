"""State dicts of PyTorch as arrays by name."""

from __future__ import annotations

import re
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from dnnc.ir.errors import ArtifactError
from dnnc.training.checkpoint import FOREIGN

Array = np.ndarray[Any, Any]


def arrays_of(path: str) -> dict[str, Array]:
    """The tensors of a file that torch.save wrote, by the names of their places; nothing else of it, and no code.

    Raises:
        ArtifactError: the file holds other objects, which only code could make, or tensors of a kind that is no array.
    """
    found: dict[str, Array] = {}

    def collect(x: Any, name: str) -> None:
        if isinstance(x, torch.Tensor):
            found[name or "tensor"] = _array(x, name)
        elif isinstance(x, (dict, list, tuple)):
            for k, v in x.items() if isinstance(x, dict) else enumerate(x):
                collect(v, f"{name}.{k}" if name else str(k))

    collect(_read(path), "")
    return found


def _read(path: str) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as e:
        # PyTorch advises to run the code of the file
        names = re.findall(r"(?:GLOBAL|global|class|function) ([\w.]+)", str(e))
        what = f" ({names[0]})" if names else ""
        raise ArtifactError(
            f"holds other objects than tensors, numbers and texts{what}, or is damaged; their code is not run: save "
            "the model's state_dict() in PyTorch"
        ) from e


def _array(x: torch.Tensor, name: str) -> Array:
    kind = str(x.dtype).removeprefix("torch.")
    if x.layout is not torch.strided or x.is_quantized or x.is_meta:
        raise ArtifactError(f"has {name}, a tensor that is sparse, quantized or without data; save it as a dense one")
    t = x.detach().resolve_conj().resolve_neg().contiguous()
    return (
        t.view(torch.uint8 if t.element_size() == 1 else torch.int16).numpy().view(FOREIGN[kind])
        if (kind in FOREIGN)
        else t.numpy()
    )
