"""State dicts of PyTorch as arrays by name."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

Array = np.ndarray[Any, Any]


def arrays_of(path: str) -> dict[str, Array]:
    """The tensors of a file that torch.save wrote, by the names of their places; nothing else of it, and no code."""
    found: dict[str, Array] = {}

    def collect(x: Any, name: str) -> None:
        if isinstance(x, torch.Tensor):
            t = x.detach().cpu().contiguous()
            wide = t.dtype is torch.bfloat16
            found[name or "tensor"] = t.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if wide else t.numpy()
        elif isinstance(x, (dict, list, tuple)):
            for k, v in x.items() if isinstance(x, dict) else enumerate(x):
                collect(v, f"{name}.{k}" if name else str(k))

    collect(torch.load(path, map_location="cpu", weights_only=True), "")
    return found
