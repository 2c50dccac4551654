"""The conformance suite that ships inside the onnx package, run against one of dnnc's targets.

    PYTHONPATH=tests python -m support.onnx_suite --target llvm [--match RE] [--kinds node,simple] [--floor N]
        [--json OUT]

Cases run in worker processes with a time limit each, so a crash or a hang costs one case. Printed are the failures with
their reasons, then passed and failed per kind and in all; the exit status is 1 when fewer than `--floor` pass.
The target `import` reads the model and interprets the graph at once: it tests the front end and the op records alone.
`cuda-interpreted` runs the kernels of CUDA programs in the interpreter: all but the printer and the device.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
# Outputs that are random draws: checked for dtype, shape and the set of values, not for the values.
RANDOM = re.compile("bernoulli")
Runner = Callable[[Any, dict[str, Any]], Sequence[Any]]


# --- one case ---------------------------------------------------------------------------------------------------------


def load_cases(kinds: Sequence[str], match: str) -> list[Any]:
    """The suite's cases of these kinds whose names match, in the suite's order."""
    from onnx.backend.test import loader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = [c for k in kinds for c in loader.load_model_tests(kind=k)]
    return [c for c in cases if (c.model is not None or c.model_dir) and re.search(match, c.name)]


def data_sets(case: Any) -> Iterator[tuple[Any, dict[str, Any], list[Any]]]:
    """(model, inputs by name, expected outputs) of every data set of a case, as arrays, lists of them, or None."""
    import onnx

    model = case.model if case.model is not None else onnx.load(Path(case.model_dir) / "model.onnx")
    if case.data_sets is not None:
        for inputs, outputs in case.data_sets:
            yield model, named(model, [plain(v) for v in inputs]), [plain(v) for v in outputs]
        return
    for folder in sorted(Path(case.model_dir).glob("test_data_set_*")):
        count = len(list(folder.glob("input_*.pb")))
        infos = input_infos(model, count)
        inputs = [read_value(folder / f"input_{k}.pb", infos[k].type) for k in range(count)]
        outputs = [read_value(folder / f"output_{k}.pb", o.type) for k, o in enumerate(model.graph.output)]
        yield model, named(model, inputs), outputs


def input_infos(model: Any, count: int) -> list[Any]:
    """The graph inputs that `count` given arrays are for: all, or those without an initializer."""
    initial = {i.name for i in model.graph.initializer}
    every = list(model.graph.input)
    return every if count >= len(every) else [i for i in every if i.name not in initial]


def named(model: Any, inputs: Sequence[Any]) -> dict[str, Any]:
    return {i.name: v for i, v in zip(input_infos(model, len(inputs)), inputs) if i.name}


def read_value(path: Path, type_: Any) -> Any:
    import onnx
    from onnx import numpy_helper

    if type_.HasField("sequence_type"):
        return plain(numpy_helper.to_list(onnx.SequenceProto.FromString(path.read_bytes())))
    if type_.HasField("optional_type"):
        return plain(numpy_helper.to_optional(onnx.OptionalProto.FromString(path.read_bytes())))
    return numpy_helper.to_array(onnx.TensorProto.FromString(path.read_bytes()))


def plain(v: Any) -> Any:
    import onnx

    if isinstance(v, onnx.TensorProto):
        return onnx.numpy_helper.to_array(v)
    if isinstance(v, (list, tuple)):
        return [plain(x) for x in v]
    return np.asarray(v) if isinstance(v, (np.generic, int, float, bool)) else v


def compare(got: Any, want: Any, rtol: float, atol: float) -> None:
    """AssertionError unless structure, shape, dtype and values agree."""
    if want is None or got is None:
        assert got is None and want is None, f"expected {want!r}, got {got!r}"
        return
    if isinstance(want, list):
        assert isinstance(got, (list, tuple)) and len(got) == len(want), (
            f"expected a sequence of {len(want)}, got {type(got).__name__}"
        )
        for g, w in zip(got, want):
            compare(g, w, rtol, atol)
        return
    got = np.asarray(got)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    if want.dtype.kind in "OUST":
        np.testing.assert_array_equal(got.astype(str), want.astype(str))
        return
    assert got.dtype == want.dtype, f"dtype {got.dtype}, expected {want.dtype}"
    if want.dtype.kind not in "fciub":  # ml_dtypes
        got, want = got.astype(np.float32), want.astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=atol)


def run_case(run: Runner, case: Any) -> None:
    for model, inputs, want in data_sets(case):
        got = list(run(model, inputs))
        assert len(got) == len(want), f"{len(got)} outputs, expected {len(want)}"
        if RANDOM.search(case.name):
            assert (
                np.isin(np.asarray(got[0]), (0, 1)).all()
                and got[0].shape == want[0].shape
                and got[0].dtype == want[0].dtype
            )
            continue
        compare(got, want, case.rtol or 1e-3, case.atol or 1e-7)


# --- targets ----------------------------------------------------------------------------------------------------------


def runner(target: str) -> Runner:
    if target == "cuda-interpreted":
        from dnnc.backends.cuda.interpreted import install

        install()
        return compiled("cuda -arch=sm_90a")
    return import_and_interpret if target == "import" else compiled(target)


def compiled(target: str) -> Runner:
    import dnnc

    def run(model: Any, inputs: dict[str, Any]) -> Sequence[Any]:
        out = dnnc.compile(model, target=target)(**inputs)
        return list(out) if isinstance(out, tuple) else [out]  # a list is one sequence

    return run


def import_and_interpret(model: Any, inputs: dict[str, Any]) -> Sequence[Any]:
    from dnnc.frontends.onnx import NeedsValues, read_model
    from dnnc.ir.graph import interp

    shapes = {k: v.shape for k, v in inputs.items() if isinstance(v, np.ndarray)}
    values: dict[str, Any] = {}
    while True:
        try:
            found = read_model(model, shapes=shapes, values=values)
            break
        except NeedsValues as e:
            if not set(e.inputs) - set(values):
                raise
            values.update({k: inputs[k] for k in e.inputs})
    return interp.run(found.graph, [inputs[k] for k in found.inputs])


# --- workers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    target: str
    kinds: tuple[str, ...]
    match: str
    limit: float  # seconds a case may take


def work(settings: Settings) -> None:
    """A worker: reads numbers of cases from stdin, answers `{"case": n, "error": text or null}` on what was stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    warnings.simplefilter("ignore")
    cases, run = load_cases(settings.kinds, settings.match), runner(settings.target)
    print(json.dumps({"ready": len(cases)}), file=answers, flush=True)
    for line in sys.stdin:
        error = None
        try:
            run_case(run, cases[int(line)])
        except KeyboardInterrupt:
            return
        except BaseException as e:
            error = f"{type(e).__name__}: {' '.join(str(e).split())[:400]}"
        print(json.dumps({"case": int(line), "error": error}), file=answers, flush=True)


class Worker:
    """A worker process as seen from outside; it is started anew after a crash or a hang."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.start()

    def start(self) -> None:
        s = self.settings
        command = [
            sys.executable,
            "-m",
            "support.onnx_suite",
            "--worker",
            "--target",
            s.target,
            "--kinds",
            ",".join(s.kinds),
            "--match",
            s.match,
        ]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.answers: queue.Queue[str | None] = queue.Queue()
        self.complaints: list[str] = []
        threading.Thread(target=self._listen, args=(self.process, self.answers), daemon=True).start()
        threading.Thread(target=self._drain, args=(self.process, self.complaints), daemon=True).start()
        ready = self.answers.get(timeout=300)
        if ready is None:
            self.process.wait()
            time.sleep(0.1)
            raise SystemExit(f"the worker did not start: {''.join(self.complaints[-5:])}")

    @staticmethod
    def _listen(process: Any, answers: queue.Queue[str | None]) -> None:
        for line in process.stdout:
            answers.put(line)
        answers.put(None)

    @staticmethod
    def _drain(process: Any, complaints: list[str]) -> None:
        for line in process.stderr:
            complaints.append(line)
            del complaints[:-20]

    def run(self, case: int) -> str | None:
        """The error of a case, or None."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{case}\n")
            self.process.stdin.flush()
            answer = self.answers.get(timeout=self.settings.limit)
        except queue.Empty:
            answer, error = None, f"takes longer than {self.settings.limit:g} s"
        except OSError:
            answer, error = None, "the worker is gone"
        else:
            error = "the worker crashed"
        if answer is not None:
            return json.loads(answer)["error"]  # type: ignore[no-any-return]
        self.stop()
        code = self.process.returncode
        self.start()
        return error if "longer" in error else f"{error} with status {code}"

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def run_suite(
    settings: Settings, jobs: int, progress: Callable[[int, int], None]
) -> tuple[list[Any], dict[int, str | None]]:
    """All cases and the error of each, None where it passed."""
    cases = load_cases(settings.kinds, settings.match)
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for k in range(len(cases)):
        todo.put(k)
    errors: dict[int, str | None] = {}

    def serve() -> None:
        worker = Worker(settings)
        while True:
            try:
                k = todo.get_nowait()
            except queue.Empty:
                worker.stop()
                return
            errors[k] = worker.run(k)
            progress(len(errors), len(cases))

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(max(min(jobs, len(cases)), 1))]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        threads[0].join(0.1)
        time.sleep(0.05)
    return cases, errors


# --- the command ------------------------------------------------------------------------------------------------------


def report(settings: Settings, cases: Sequence[Any], errors: dict[int, str | None]) -> int:
    """Print failures and totals; the number of cases that passed."""
    failed = {k: errors.get(k, "was not run") for k in range(len(cases)) if errors.get(k, "was not run") is not None}
    for k in sorted(failed, key=lambda k: cases[k].name):
        print(f"FAIL {cases[k].name}: {failed[k]}")
    total, bad = Counter(c.kind for c in cases), Counter(cases[k].kind for k in failed)
    for kind in total:
        print(f"{kind}: {total[kind] - bad[kind]} passed, {bad[kind]} failed")
    passed = len(cases) - len(failed)
    print(f"{settings.target}: {passed} of {len(cases)} passed, {len(failed)} failed")
    return passed


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m support.onnx_suite", description="The ONNX conformance suite against one target."
    )
    p.add_argument(
        "--target", default="llvm", help="reference, llvm, cuda, ..., cuda-interpreted, or import (default: llvm)"
    )
    p.add_argument("--match", default="", help="only cases whose names match this regular expression")
    p.add_argument("--kinds", default=",".join(KINDS), help="comma-separated, of " + ", ".join(KINDS))
    p.add_argument("--floor", type=int, help="exit with 1 when fewer cases pass")
    p.add_argument("--limit", type=float, default=60.0, help="seconds a case may take")
    p.add_argument("--jobs", type=int, default=2, help="worker processes")
    p.add_argument("--json", help="write passed, total and the failures' reasons to this file")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args(argv)
    settings = Settings(a.target, tuple(k for k in a.kinds.split(",") if k), a.match, a.limit)
    if a.worker:
        work(settings)
        return 0

    def progress(done: int, total: int) -> None:
        if sys.stderr.isatty() and done % 20 == 0:
            print(f"\r{done}/{total}", end="", file=sys.stderr, flush=True)

    cases, errors = run_suite(settings, a.jobs, progress)
    passed = report(settings, cases, errors)
    if a.json:
        fails = {cases[k].name: e for k, e in sorted(errors.items()) if e is not None}
        Path(a.json).write_text(
            json.dumps({"target": a.target, "passed": passed, "of": len(cases), "failures": fails}, indent=1)
        )
    return int(a.floor is not None and passed < a.floor)


if __name__ == "__main__":
    sys.exit(main())
