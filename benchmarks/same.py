"""Are two states of dnnc the same compiler? Kernel texts and results of both, over models and ONNX's node tests.

    python benchmarks/same.py BEFORE AFTER [--models DIR ...] [--nodes] [--targets llvm,cuda,interpreted]
        [--only REGEX] [--workers 2]
        [--json OUT]

BEFORE and AFTER are checkouts of the project; each runs in processes of its own, with an empty cache. A model's inputs
come from NAME.npz beside NAME.onnx, else they are random ones of a seed. `cuda` compiles for sm_90a and runs nothing;
`interpreted` runs the kernels of node tests in the operator interpreter. The exit code is 1 where results differ though
the texts are equal, where they are further apart than their type explains, or one state fails where the other does not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Row = dict[str, Any]
ARCH = "cuda -arch=sm_90a"
SIZE = 2  # of symbolic dims
VALUES = 2000  # of an output that are compared where texts differ
FAR = 2.0**13  # roundings: 1e-3 of the largest number in float32


def arguments() -> argparse.Namespace:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("before", type=Path)
    ap.add_argument("after", type=Path)
    ap.add_argument("--models", type=Path, action="append", default=[], help="folder of .onnx files; may be repeated")
    ap.add_argument("--nodes", action="store_true", help="ONNX's node tests as well")
    ap.add_argument("--targets", default="llvm,cuda")
    ap.add_argument("--only", default="", help="regular expression of names")
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--timeout", type=float, default=300, help="seconds for one model or batch of node tests")
    ap.add_argument("--json", type=Path, help="write every row here")
    return ap.parse_args()


# --- one state, in a process of its own -------------------------------------------------------------------------------


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def bits(r: Any) -> str:
    """The digest of an array's bytes; the text of anything else, strings too."""
    import numpy as np

    plain = isinstance(r, np.ndarray) and r.dtype.kind != "O"
    return digest(np.ascontiguousarray(r).tobytes()) if plain else repr(r.tolist() if hasattr(r, "tolist") else r)


def describe(f: Any, results: Any) -> Row:
    """The digests of kernel texts in order, and of results."""
    import numpy as np

    inner = f
    while not hasattr(inner, "source") or getattr(inner, "deferred", False):
        inner = (inner.variants if hasattr(inner, "variants") else inner.programs)[-1]
    text = inner.source("operator")
    kernels = [digest(k.encode()) for k in re.split(r"\n(?=# )", text)]
    many = () if results is None else results if isinstance(results, tuple) else (results,)
    arrays = [np.ascontiguousarray(r) for r in many if isinstance(r, np.ndarray) and r.dtype.kind in "biuf"]
    return {
        "kernels": kernels,
        "results": [bits(r) for r in many],
        "values": [np.resize(r, min(r.size, VALUES)).astype(np.float64).tolist() for r in arrays],
        "eps": [float(np.finfo(r.dtype).eps) if r.dtype.kind == "f" else 0.0 for r in arrays],
    }


def model_row(path: Path, target: str) -> Row:
    """Compile and run a model."""
    import numpy as np

    import dnnc

    stored = path.with_suffix(".npz")
    inputs = dict(np.load(stored)) if stored.exists() else None
    options: Row = {"target": ARCH if target == "cuda" else target, "cache": False, "verify": False}
    f = dnnc.compile(path, **options)
    if inputs is None or set(inputs) != {s.name for s in f.inputs}:
        rng = np.random.default_rng(0)
        shapes = {s.name: tuple(d if isinstance(d, int) else SIZE for d in s.shape) for s in f.inputs}
        made = {
            s.name: rng.standard_normal(shapes[s.name]) if "float" in s.dtype else rng.integers(0, 2, shapes[s.name])
            for s in f.inputs
        }
        inputs = {s.name: made[s.name].astype(s.dtype) for s in f.inputs}
    if target == "cuda":
        f.prepare([inputs[s.name].shape for s in f.inputs])
    return describe(
        f, None if target == "cuda" else f(**inputs) if all(n.isidentifier() for n in inputs) else f(inputs)
    )


def interpreted() -> str:
    """The target whose kernels run in the operator interpreter: a backend, or in older states a stand-in."""
    import dnnc

    if Path(dnnc.__path__[0], "backends", "registry.py").exists():  # an installed dnnc may answer for modules
        return "cuda-interpreted"
    from dnnc.testing.interpreted_device import install  # type: ignore[import-not-found]

    install()
    return "cuda"


def node_rows(target: str, part: int, parts: int, only: str) -> dict[str, Row]:
    """Some of ONNX's node tests."""
    from onnx.backend.test.loader import load_model_tests

    import dnnc

    if target == "interpreted":
        target = interpreted()
    rows = {}
    cases = [c for c in load_model_tests(kind="node") if c.model is not None and re.search(only, c.name)]
    for case in cases[part::parts]:
        try:
            f = dnnc.compile(case.model, target=target, cache=False, verify=False)
            inputs, _ = case.data_sets[0]
            rows[case.name] = describe(f, f(*inputs))
        except Exception as e:
            rows[case.name] = {"error": type(e).__name__}
    return rows


def child(words: list[str]) -> None:
    """`model PATH TARGET` or `nodes TARGET PART PARTS ONLY`: rows by name as JSON on the last line."""
    warnings.simplefilter("ignore")
    rows: dict[str, Row]
    if words[0] == "model":
        path = Path(words[1])
        try:
            rows = {path.stem: model_row(path, words[2])}
        except Exception as e:
            rows = {path.stem: {"error": f"{type(e).__name__}: {str(e)[:200]}"}}
    else:
        rows = node_rows(words[1], int(words[2]), int(words[3]), words[4])
    print("\n" + json.dumps(rows))


# --- both -------------------------------------------------------------------------------------------------------------


def ask(checkout: Path, words: list[str], timeout: float) -> dict[str, Row]:
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "PYTHONPATH": str(checkout / ".types"), "DNNC_CACHE_DIR": cache, "PYTHONHASHSEED": "0"}
        try:
            done = subprocess.run(
                [sys.executable, __file__, "--child", *words], capture_output=True, text=True, timeout=timeout, env=env
            )
            rows: dict[str, Row] = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.TimeoutExpired, IndexError, ValueError) as e:
            rows = {" ".join(words): {"error": type(e).__name__}}
        return rows


def distance(a: Row, b: Row) -> float:
    """The largest difference of results, in roundings of the largest number of an output; inf where shapes or integers
    differ, or numbers that are not finite.
    """
    import numpy as np

    most = 0.0
    for x, y, eps in zip(map(np.array, a["values"]), map(np.array, b["values"]), a["eps"]):
        finite = np.isfinite(x) & np.isfinite(y) if x.shape == y.shape else np.zeros(0, bool)
        if x.shape != y.shape or not np.array_equal(x[~finite], y[~finite], equal_nan=True):
            return np.inf
        error = np.abs(x - y)[finite].max(initial=0.0)
        if error and not eps:
            return np.inf
        most = max(most, error / (eps * np.abs(x[finite]).max(initial=0.0))) if error else most
    return most if len(a["values"]) == len(b["values"]) else np.inf


def verdict(a: Row, b: Row) -> str:
    if "error" in a or "error" in b:
        return (
            "same"
            if a.get("error") == b.get("error")
            else f"FAILS: {a.get('error', 'runs')} before, {b.get('error', 'runs')} after"
        )
    if a["kernels"] != b["kernels"]:
        changed = len(set(a["kernels"]) ^ set(b["kernels"]))
        apart = distance(a, b)
        words = (
            f"{len(a['kernels'])} and {len(b['kernels'])} kernels, {changed} only in one, {apart:.1f} roundings apart"
        )
        return f"RESULTS and texts differ: {words}" if apart > FAR else f"texts differ: {words}"
    return "same" if a["results"] == b["results"] else "RESULTS differ though texts are equal"


def main() -> int:
    a = arguments()
    for checkout in (a.before, a.after):
        subprocess.run(["make", "-s", ".types"], cwd=checkout, check=True)
    jobs: list[tuple[str, list[str]]] = []
    for target in a.targets.split(","):
        for folder in a.models if target != "interpreted" else []:
            jobs += [
                (target, ["model", str(p), target])
                for p in sorted(folder.resolve().glob("*.onnx"))
                if re.search(a.only, p.stem)
            ]
        if a.nodes and target != "cuda":
            parts = 4 * a.workers
            jobs += [(target, ["nodes", target, str(k), str(parts), a.only]) for k in range(parts)]

    def both(job: tuple[str, list[str]]) -> list[Row]:
        target, words = job
        before, after = (ask(c.resolve(), words, a.timeout) for c in (a.before, a.after))
        names = sorted({*before, *after})
        missing: Row = {"error": "missing"}
        return [
            {"name": n, "target": target, "verdict": verdict(before.get(n, missing), after.get(n, missing))}
            for n in names
        ]

    with ThreadPoolExecutor(a.workers) as pool:
        rows = [r for group in pool.map(both, jobs) for r in group]
    for r in rows:
        if r["verdict"] != "same":
            print(f"{r['target']:12} {r['name']:50} {r['verdict']}")
    for target in a.targets.split(","):
        mine = [r for r in rows if r["target"] == target]
        print(f"{target}: {sum(r['verdict'] == 'same' for r in mine)} of {len(mine)} the same")
    if a.json:
        a.json.write_text(json.dumps(rows, indent=1))
    return int(any(r["verdict"][0].isupper() for r in rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
    else:
        sys.exit(main())
