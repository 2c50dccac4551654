"""`dnnc bench` and `dnnc profile`: how long a call takes, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from dnnc.cli.console import show_json, show_tables
from dnnc.cli.models import Job, open_with_arrays
from dnnc.cli.outputs import check_output, job_reads
from dnnc.options import thread_count
from dnnc.report.bar import Bar
from dnnc.report.bench_tables import bench_tables
from dnnc.report.profile_tables import profile_tables
from dnnc.tools.bench import bench
from dnnc.tools.peers import PEERS


def parse_peers(texts: Sequence[str]) -> list[str]:
    """`["onnxruntime,openvino"]` -> the names, each once."""
    names = list(dict.fromkeys(n.strip() for text in texts for n in text.split(",") if n.strip()))
    unknown = [n for n in names if n not in PEERS]
    if unknown:
        raise typer.BadParameter(
            f"there is no peer {', '.join(unknown)}; there are {', '.join(PEERS)}", param_hint="--peers"
        )
    return names


def bench_command(job: Job, peers: list[str], duration: float, warmup: float, seed: int, as_json: bool) -> None:
    """Time a model, beside other engines where they are asked for."""
    with Bar() as bar:
        result = bench(
            job.model, lambda: open_with_arrays(job, bar, seed), thread_count(job.threads), peers, duration, warmup, bar
        )
    if as_json:
        show_json(result.as_dict())
    else:
        show_tables(bench_tables(result))


def profile_command(job: Job, repeat: int | None, detail: bool, trace: str | None, seed: int, as_json: bool) -> None:
    """Show where the time of a call goes."""
    if trace is not None:
        check_output(trace, (".json",), job_reads(job), option="--trace")
    with Bar() as bar:
        f, arrays = open_with_arrays(job, bar, seed)
        bar("profile", 0, 1)
        found = f.profile(*arrays, repeats=repeat)
    if trace is not None:
        found.trace(trace)
    if as_json:
        show_json(found.as_dict())
    else:
        show_tables(profile_tables(found, detail))
