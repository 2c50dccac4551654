"""What a call takes while other processes want the same cores: the median and the 99th percentile, dnnc beside ONNX
Runtime.

    python benchmarks/neighbours.py --models DIR [--set mlp_mnist,mobilenet_v3_large,resnet50] [--neighbours 2]

A neighbour is a process that multiplies numbers all the time. The engines take turns in blocks of calls, first with no
neighbour and then with all; a ratio is ONNX Runtime's time over dnnc's. `idle`: CPU seconds that the threads use in a
second in which nobody calls.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import zoo
from engines import PEERS, Task, dnnc_engine
from rich.console import Console
from rich.table import Table

from dnnc.tools.peers import Engine

BLOCKS, PAUSE = 10, 5e-3  # turns of each engine, and seconds between them: threads of the one before may still spin


def burn() -> None:
    x = 1.0
    while True:
        x = x * 0.999 + 1e-3


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes at work."""
    processes = [multiprocessing.get_context("spawn").Process(target=burn, daemon=True) for _ in range(count)]
    for p in processes:
        p.start()
    time.sleep(1.0 if count else 0.0)
    try:
        yield
    finally:
        for p in processes:
            p.terminate()
            p.join()


def latencies(engines: Sequence[Engine], calls: int) -> list[np.ndarray]:
    """Seconds of each call, of each engine."""
    found: list[list[float]] = [[] for _ in engines]
    for _ in range(BLOCKS):
        for engine, times in zip(engines, found):
            time.sleep(PAUSE)
            for _ in range(max(calls // BLOCKS, 1)):
                start = time.perf_counter()
                engine.call()
                times.append(time.perf_counter() - start)
    return [np.array(t) for t in found]


def idle() -> float:
    """CPU seconds of this process in a second without calls, after the threads have had time to fall asleep."""
    time.sleep(0.1)
    start, used = time.perf_counter(), time.process_time()
    time.sleep(1.0)
    return (time.process_time() - used) / (time.perf_counter() - start)


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--models", type=Path, required=True)
    ap.add_argument("--set", default="mlp_mnist,mobilenet_v3_large,resnet50")
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--neighbours", type=int, default=2)
    ap.add_argument("--seconds", type=float, default=8.0, help="of calls of an engine, for each number of neighbours")
    a = ap.parse_args()
    table = Table(
        "model",
        "neighbours",
        "calls",
        "dnnc ms: median, p99",
        "ONNX Runtime ms: median, p99",
        "ratio of medians",
        "ratio of p99",
        "idle",
    )
    rows = zoo.read_manifest(a.models)
    for name in a.set.split(","):
        with tempfile.TemporaryDirectory() as cache:
            task = Task(name, zoo.load(a.models, rows[name]), zoo.make_inputs(rows[name]), a.threads, Path(cache))
            engines = [dnnc_engine(task), PEERS["onnxruntime"](task)]
            asleep = idle()
            once = max(float(np.median(t)) for t in latencies(engines, 2 * BLOCKS))
            for count in (0, a.neighbours):
                with busy(count):
                    ours, theirs = latencies(engines, max(int(a.seconds / once), 200))
                p = [(np.median(t) * 1e3, np.percentile(t, 99) * 1e3) for t in (ours, theirs)]
                shown = [f"{m:.3f}, {q:.3f}" for m, q in p]
                table.add_row(
                    name,
                    str(count),
                    str(len(ours)),
                    *shown,
                    f"{p[1][0] / p[0][0]:.2f}",
                    f"{p[1][1] / p[0][1]:.2f}",
                    f"{asleep:.3f}",
                )
        del engines
        gc.collect()
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
