"""Which kernels of the models take longest on the CPU, and which lose most against what bounds them.

    python benchmarks/slowest.py --models DIR [--set float|all|NAME,NAME] [--threads 1] [--top 10] [--by time|loss]

Every model is profiled on its inputs (`Executable.profile`). A kernel's limit is what its arithmetic or its data need
at the measured ceilings of this machine; its loss is the time beyond. Functions (exp, erf) are not counted as
arithmetic, so kernels with many of them seem to lose. DIR is made by `python benchmarks/zoo build DIR`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import zoo
from rich.console import Console
from rich.table import Table

import dnnc

Row = tuple[float, float, str, Any]  # seconds lost, seconds, model, the kernel's times


def rows_of(folder: Path, row: dict[str, Any], threads: int) -> list[Row]:
    inputs = zoo.make_inputs(row)
    f = dnnc.compile(zoo.load(folder, row), threads=threads)
    f(**inputs)
    return [
        (k.seconds * (1 - min(k.reached or 0.0, 1.0)), k.seconds, row["name"], k) for k in f.profile(**inputs).kernels
    ]


def table(found: list[Row], top: int, by: str) -> Table:
    out = Table(title=f"the {top} kernels that {'take longest' if by == 'time' else 'lose most'}")
    for name in (
        "model",
        "kernel",
        "calls",
        "ms",
        "lost ms",
        "of limit",
        "limit",
        "GFLOP/s",
        "GB/s",
        "schedule",
        "nodes",
    ):
        out.add_column(
            name, justify="right" if name in ("calls", "ms", "lost ms", "of limit", "GFLOP/s", "GB/s") else "left"
        )
    for lost, seconds, model, k in sorted(found, key=lambda r: -r[by == "time"])[:top]:
        rates = [f"{r / 1e9:.3g}" if r else "" for r in (k.flops_per_second, k.bytes_per_second)]
        share = f"{100 * (k.reached or 0):.0f} %"
        out.add_row(
            model,
            k.name,
            str(k.calls),
            f"{seconds * 1e3:.3g}",
            f"{lost * 1e3:.3g}",
            share,
            k.bound,
            *rates,
            k.choice,
            k.nodes[0][:60],
        )
    return out


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--models", type=Path, required=True)
    ap.add_argument("--set", default="float", help="float (no quantized models), all, or names separated by commas")
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--top", type=int, default=10)
    ap.add_argument("--by", choices=("time", "loss"), default="loss")
    a = ap.parse_args()
    rows = zoo.read_manifest(a.models)
    names = (
        [n for n, r in rows.items() if a.set == "all" or not zoo.is_quantized(r)]
        if a.set in ("float", "all")
        else a.set.split(",")
    )
    found: list[Row] = []
    console = Console(width=200)
    for name in names:
        made = rows_of(a.models, rows[name], a.threads)
        found += made
        console.print(
            f"{name:22} {1e3 * sum(r[1] for r in made):9.3f} ms in kernels, {1e3 * sum(r[0] for r in made):8.3f} ms "
            "lost",
            highlight=False,
        )
    console.print(table(found, a.top, a.by))


if __name__ == "__main__":
    main()
