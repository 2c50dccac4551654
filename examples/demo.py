"""Compile the digits model, show a dozen test images with the digit that it sees in each, and the time of a call.

python examples/demo.py [model.onnx]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

import dnnc

HERE = Path(__file__).parent
SHADES = " ░▒▓█"


def picture(image: np.ndarray) -> str:
    """An image f32[8, 8] of values 0 to 1 as eight lines; a pixel is two characters wide, as these are high."""
    levels = np.rint(image * (len(SHADES) - 1)).astype(int)
    return "\n".join("".join(SHADES[v] * 2 for v in row) for row in levels)


def card(image: np.ndarray, logits: np.ndarray, label: int) -> Panel:
    """The picture with the answer below it: green when right, red with the true digit when wrong."""
    p = np.exp(logits - logits.max())
    digit, certainty = int(logits.argmax()), float(p.max() / p.sum())
    right = digit == label
    answer = f"{digit}  {certainty:.1%}" + ("" if right else f"  is {label}")
    body = Text(picture(image) + "\n") + Text(answer, style="bold green" if right else "bold red")
    return Panel(body, width=20, border_style="dim")


def time_call(f: dnnc.Executable, x: np.ndarray, calls: int = 200) -> float:
    """The median time of a call, in microseconds."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        f(x)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def main(path: str = str(HERE / "digits.onnx")) -> None:
    console = Console()
    with np.load(HERE / "digits_samples.npz", allow_pickle=False) as samples:
        images, labels = samples["images"], samples["labels"]
    start = time.perf_counter()
    f = dnnc.compile(path)
    logits = f(images)
    ready = time.perf_counter() - start
    console.print(Columns(card(image[0], row, int(label)) for image, row, label in zip(images, logits, labels)))
    console.print(
        f"{int((logits.argmax(1) == labels).sum())} of {len(labels)} right; compiled and first answered in {ready:.2f} "
        "s"
    )
    console.print(
        f"one image takes {time_call(f, images[:1]):.0f} us, all {len(images)} take {time_call(f, images):.0f} us"
    )


if __name__ == "__main__":
    main(*sys.argv[1:2])
