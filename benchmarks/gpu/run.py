"""Whole models on one GPU: first right, then timed, beside PyTorch.

    python benchmarks/gpu/run.py --models DIR [--set all|float|NAME,NAME] [--precision float32,float16,bfloat16,tf32]
        [--peers graph,eager,...]
                                 [--check-only] [--jobs 4] [--cache DIR] [--json OUT] [--markdown OUT]

DIR is made by `python benchmarks/zoo build DIR --weights seeded` on any machine (35 models in 4 MB; weights are drawn
where they are used). Each (model, precision) runs in a process of its own. Outputs are compared with ONNX Runtime on
the CPU in float32. Times are the GPU's per call, by events around calls that are enqueued back to back. Peers: eager
(PyTorch), graph (the same in a CUDA graph), reduce-overhead and max-autotune (torch.compile, which takes minutes;
`results/gpu-peers.json` keeps what was measured on one device, marked `*` in tables). A ratio is the fastest peer's
time over ours.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE)  # gpu_time, one
sys.path.insert(1, str(HERE.parent))  # zoo

import zoo  # noqa: E402

Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--models", type=Path, default=Path("zoo"), help="folder with models and their manifest.json")
    ap.add_argument("--set", default="all", help="all, float (no quantized models), or names separated by commas")
    ap.add_argument("--precision", default="float32", help="of float32, tf32, float16, bfloat16, separated by commas")
    ap.add_argument(
        "--peers", default="graph", help="of eager, graph, reduce-overhead, max-autotune; none for dnnc alone"
    )
    ap.add_argument("--check-only", action="store_true", help="compare outputs, time nothing")
    ap.add_argument("--profile", action="store_true", help="print where the time of each model goes")
    ap.add_argument("--jobs", type=int, default=4, help="models at a time when nothing is timed")
    ap.add_argument("--timeout", type=float, default=180, help="seconds for one model")
    ap.add_argument("--cache", default="auto", help="folder of compiled kernels")
    ap.add_argument("--json", type=Path, help="write everything here")
    ap.add_argument("--markdown", type=Path, help="write the results as a table")
    ap.add_argument("--one", default="", help=argparse.SUPPRESS)  # NAME:PRECISION, in this process
    a = ap.parse_args()
    a.peers = [] if a.peers == "none" else a.peers.split(",")
    return a


def chosen(a: argparse.Namespace) -> list[Row]:
    rows = zoo.read_manifest(a.models)
    if a.set in ("all", "float"):
        return [r for r in rows.values() if a.set == "all" or not zoo.is_quantized(r)]
    return [rows[n] for n in a.set.split(",")]


def child(a: argparse.Namespace) -> None:
    """Measure one model; its row is the last line of the output."""
    from one import measure

    name, precision = a.one.split(":")
    print(json.dumps(measure(a.models, zoo.read_manifest(a.models)[name], precision, a)), flush=True)


def apart(a: argparse.Namespace, name: str, precision: str) -> Row:
    """Measure one model in a process of its own."""
    start = time.perf_counter()
    words = [sys.executable, str(HERE / "run.py"), *sys.argv[1:], "--one", f"{name}:{precision}"]
    blank: Row = {"name": name, "precision": precision, "right": False}
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=a.timeout, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    except subprocess.TimeoutExpired:
        return blank | {"failed": f"not done after {a.timeout:.0f} s", "wall_s": a.timeout}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines and lines[-1].startswith("{"):
        return json.loads(lines[-1]) | {"wall_s": time.perf_counter() - start}
    said = [x for x in done.stderr.strip().splitlines() if x.strip()]
    return blank | {
        "failed": said[-1][:300] if said else f"exit status {done.returncode}",
        "log": said[-30:],
        "wall_s": time.perf_counter() - start,
    }


def line(r: Row) -> str:
    head = f"{r['name']:20} {r['precision']:9}"
    if "failed" in r:
        return f"{head} FAILED {r['failed']}"
    text = (
        f"{head} {'right' if r['right'] else 'WRONG'} {r['error']:.1e}, {r['calls']} calls, compile "
        f"{r['compile_s']:.1f} s"
    )
    if "ms" in r:
        times = ", ".join(f"{k} {t:.4f}" for k, t in r["ms"].items())
        peers = [t for k, t in r["ms"].items() if k != "dnnc"]
        text += (
            f", {times} ms"
            + (f", ratio {min(peers) / r['ms']['dnnc']:.2f}" if peers else "")
            + f", host {r['host_us']:.0f} us"
        )
    return text + "".join(f"; {k}: {v}" for k, v in r.get("failures", {}).items())


def table(about: dict[str, Any], rows: list[Row]) -> str:
    """The results in Markdown, with what is known of torch.compile on this device."""
    known = json.loads((HERE.parent / "results" / "gpu-peers.json").read_text())
    peers = list(dict.fromkeys(k for r in rows for k in r.get("ms", {}) if k != "dnnc"))
    head = [
        "model",
        "precision",
        "batch",
        "error",
        "launches",
        "dnnc",
        *peers,
        "torch.compile*",
        "ratio",
        "compile",
        "a bound call",
    ]
    lines = [
        f"{', '.join(f'{k} {v}' for k, v in about.items())}; milliseconds",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    for r in rows:
        times = r.get("ms", {})
        kept = (
            known["ms"].get(r["name"], {}).get(str(r.get("batch")))
            if r["precision"] == "float16" and about["device"] == known["device"]
            else None
        )
        others = [t for k, t in times.items() if k != "dnnc"] + ([kept] if kept else [])
        ratio = f"{min(others) / times['dnnc']:.2f}" if others and "dnnc" in times else ""
        cells = [
            r["name"],
            r["precision"],
            r.get("batch", ""),
            f"{r['error']:.1e}" if "error" in r else r.get("failed", ""),
            r.get("calls", ""),
        ]
        cells += [f"{times[k]:.4f}" if k in times else "" for k in ("dnnc", *peers)] + [kept or "", ratio]
        cells += [
            f"{r['compile_s']:.1f} s" if "compile_s" in r else "",
            f"{r['host_us']:.0f} us" if "host_us" in r else "",
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", f"* {known['about']}; {known['date']}, {known['versions']}."]) + "\n"


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import cupy

    found = cupy.cuda.runtime.getDeviceProperties(0)
    from cupy_backends.cuda.libs import nvrtc

    versions = {
        "cupy": cupy.__version__,
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "nvrtc": list(nvrtc.getVersion()),
    }
    return {"device": found["name"].decode(), "date": time.strftime("%Y-%m-%d"), **versions}


def main() -> int:
    a = arguments()
    if a.one:
        child(a)
        return 0
    tasks = [(r["name"], p) for p in a.precision.split(",") for r in chosen(a)]
    rows: list[Row] = []
    about = machine()
    print(", ".join(f"{k} {v}" for k, v in about.items()), flush=True)
    with ThreadPoolExecutor(a.jobs if a.check_only else 1) as pool:
        for r in pool.map(lambda t: apart(a, *t), tasks):
            rows.append(r)
            print(line(r), flush=True)
            if a.profile and "profile" in r:
                print(r["profile"], flush=True)
            if a.json:
                a.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1))
            if a.markdown:
                a.markdown.write_text(table(about, rows))
    right = sum(bool(r["right"]) for r in rows)
    print(f"{right} of {len(rows)} right")
    return int(right < len(rows))


if __name__ == "__main__":
    sys.exit(main())
