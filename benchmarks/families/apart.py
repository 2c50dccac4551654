"""Work in a forked process with limits of time and memory, so that a crash, a hang or a leak costs one model."""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """`value` is what the work returned, or None; `error` then says why: "time", "died" or "raised", with a text.
    `stage`: the last one told.
    """

    value: Any
    error: str
    text: str
    stage: str
    seconds: float


def run_apart(work: Callable[[Tell], Any], seconds: float, gigabytes: float) -> Outcome:
    """Run `work(tell)` in a fork. `tell` notes a stage; the value must pickle. `gigabytes`: of private memory."""
    context = get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+b") as log:
        process = context.Process(target=_child, args=(work, writer, log.fileno(), gigabytes))
        process.start()
        writer.close()
        stage, found, error = _listen(reader, start + seconds)
        if error == "time":
            process.kill()
        process.join(10)
        if process.is_alive():
            process.kill()
            process.join()
        text = _last_line(log)
    spent = time.perf_counter() - start
    if error == "time":
        return Outcome(None, "time", f"more than {seconds:g} s while {stage}", stage, spent)
    if found is None:
        code = process.exitcode or 0
        why = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return Outcome(None, "died", f"{why} while {stage}: {text}", stage, spent)
    kind, value = found
    return Outcome(value, "", "", stage, spent) if kind == "value" else Outcome(None, "raised", value, stage, spent)


def _listen(reader: Connection, end: float) -> tuple[str, tuple[str, Any] | None, str]:
    """(last stage, ("value" or "raised", what) or None, "time" or "")."""
    stage = "start"
    while True:
        if not reader.poll(max(end - time.perf_counter(), 0)):
            return stage, None, "time"
        try:
            kind, what = reader.recv()
        except EOFError:
            return stage, None, ""
        if kind != "stage":
            return stage, (kind, what), ""
        stage = what


def _child(work: Callable[[Tell], Any], writer: Connection, log: int, gigabytes: float) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    limit = int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        message = "value", work(lambda stage: writer.send(("stage", stage)))
    except BaseException as e:
        traceback.print_exc()
        message = "raised", f"{type(e).__name__}: {e}"
    writer.send(message)
    sys.stderr.flush()
    os._exit(0)  # threads of runtimes may not end by themselves


def _last_line(log: Any) -> str:
    log.seek(0)
    lines = log.read()[-4000:].decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
