"""Process that builds or measures kernels: `python -m dnnc.autotune.runners.worker ROLE TARGET [FACTORY]`.

Messages are those of `dnnc.backends.runtime.messages`, in on stdin, out on stdout: a JSON header and a body of bytes.
Nothing is unpickled.
ROLE "build":   {"op": "build", "task", "choice"} -> {"symbol", "facts", "spills", "seconds", "text": its bytes}, body:
                text and code.
ROLE "measure": {"op": "load", "id", "task", "choice", "symbol", "facts", "text"}, body -> {};  {"op": "time", "id",
"limit"} -> {"seconds",
                "before", "after"}; {"op": "check", "id"} -> {"checked"}; {"op": "drop", "id"} -> {}.
Hello:          {"ready": name of the machine, "text": of the target, "reference": seconds}, or {"error"} and the end.
Errors:         {"error": message, "kind": one of the failures of a Trial}. What ends the process needs no words.

`before` and `after` are seconds of a reference kernel, always the same, measured around the candidate: they show
disturbances. FACTORY, "module:function", makes the Machine of a target; the function's module may be one of a user.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, BinaryIO

from dnnc.autotune.log.record import read_choice
from dnnc.autotune.runners.machine import Machine
from dnnc.autotune.search.task import Setting, Task, task_of
from dnnc.backends.base import BoundKernel, Built
from dnnc.backends.runtime.messages import receive, send
from dnnc.ir.errors import AccuracyError, DnncError
from dnnc.ir.graph.text import parse
from dnnc.ir.loops.text import show_kernel
from dnnc.passes.planning.fuse import Group
from dnnc.passes.schedule.problem import Choice
from dnnc.passes.schedule.step import candidates

FACTORY = "dnnc.autotune.runners.machine:machine_of"
REFERENCE = """
def reference(x: f32[128, 128], y: f32[128, 128]):
    return matmul(x, y)
"""
REFERENCE_CALLS = 8  # of which the quickest counts
CALIBRATIONS = 7  # of the reference when a process starts
TASKS = 8  # that a process remembers
WATCH_SECONDS = 0.5  # between looks whether the parent lives
Answer = tuple[dict[str, Any], bytes]


def machine_by(factory: str, target: str) -> Machine:
    """The machine that a factory "module:function" makes for a target."""
    module, _, name = factory.partition(":")
    made: Machine = getattr(import_module(module), name)(target)
    return made


class Tasks:
    """Tasks out of messages, the last few kept as they take time to read."""

    def __init__(self) -> None:
        self._known: dict[str, Task] = {}

    def of(self, record: dict[str, Any]) -> Task:
        key = record["key"]
        task = self._known.pop(key, None) or Task.from_json(record)
        while len(self._known) >= TASKS:
            self._known.pop(next(iter(self._known)))
        self._known[key] = task
        return task


def build(machine: Machine, task: Task, choice: Choice) -> tuple[Built, str]:
    """A schedule as machine code, and the text of its kernel. DnncError where it does not apply or does not compile."""
    kernel = machine.kernel(task.rebuilt[2], choice, task.setting)
    text = show_kernel(kernel)
    return machine.compile(kernel, machine.symbol(text)), text


class Builder:
    """The role "build"."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.tasks = machine, Tasks()
        self.hello = {"ready": machine.name, "text": machine.text}

    def answer(self, header: dict[str, Any], body: bytes) -> Answer:
        start = time.perf_counter()
        try:
            built, text = build(self.machine, self.tasks.of(header["task"]), read_choice(header["choice"]))
        except Exception as e:  # knobs that a template does not know may fail in any way
            return {"error": str(e) if isinstance(e, DnncError) else repr(e), "kind": "build"}, b""
        shown = text.encode()
        took = time.perf_counter() - start
        return {
            "symbol": built.symbol,
            "facts": built.facts,
            "spills": built.spills,
            "seconds": took,
            "text": len(shown),
        }, shown + built.code


class Measurer:
    """The role "measure"."""

    def __init__(self, machine: Machine) -> None:
        self.bench, self.tasks = machine.bench(), Tasks()
        self.loaded: dict[int, tuple[BoundKernel, str, Choice]] = {}
        self.standard = self._standard(machine)
        found = sorted(self.reference() for _ in range(CALIBRATIONS))
        self.hello = {"ready": machine.name, "text": machine.text, "reference": found[CALIBRATIONS // 4]}

    def _standard(self, machine: Machine) -> BoundKernel:
        g = parse(REFERENCE)
        nodes = tuple(g.nodes())
        task = task_of(g, Group(nodes, tuple(g.outputs), "contraction"), {}, Setting(machine.text))
        choice = candidates(task.rebuilt[2], machine.templates(task.setting))[0]
        return self.bench.load(task, build(machine, task, choice)[0])

    def reference(self) -> float:
        return self.standard.fastest(REFERENCE_CALLS)

    def answer(self, header: dict[str, Any], body: bytes) -> Answer:
        return getattr(self, header["op"])(header, body), b""

    def load(self, header: dict[str, Any], body: bytes) -> dict[str, Any]:
        built = Built(header["symbol"], body[header["text"] :], header["facts"])
        try:
            kernel = self.bench.load(self.tasks.of(header["task"]), built)
        except DnncError as e:
            return {"error": str(e), "kind": "build"}
        self.loaded[header["id"]] = kernel, body[: header["text"]].decode(), read_choice(header["choice"])
        return {}

    def time(self, header: dict[str, Any], body: bytes) -> dict[str, Any]:
        kernel = self.loaded[header["id"]][0]
        before = self.reference()
        try:
            seconds = kernel.measure(header["limit"])
        except AccuracyError as e:
            return {"error": str(e), "kind": "wrong"}
        return {"seconds": seconds, "before": before, "after": self.reference()}

    def check(self, header: dict[str, Any], body: bytes) -> dict[str, Any]:
        kernel, text, choice = self.loaded[header["id"]]
        try:
            return {"checked": kernel.check(text, choice)}
        except AccuracyError as e:
            return {"error": str(e), "kind": "wrong"}

    def drop(self, header: dict[str, Any], body: bytes) -> dict[str, Any]:
        self.loaded.pop(header["id"], None)
        return {}


def serve(role: Callable[[], Builder | Measurer], requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until requests end. Errors of the device, not of kernels, are reported and end the process."""
    try:
        one = role()
    except DnncError as e:
        send(answers, {"error": str(e)})
        return
    send(answers, one.hello)
    while (message := receive(requests)) is not None:
        try:
            header, body = one.answer(*message)
        except Exception as e:
            send(answers, {"error": f"{type(e).__name__}: {e}", "kind": "crash"})
            return
        send(answers, header, body)


def end_with_the_parent() -> None:
    """A process that hangs in a kernel reads no end of its input: it ends itself when it has lost its parent."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def leave_no_cores() -> None:
    """Schedules that crash are many, and each would leave an image of the process on the disk."""
    try:
        import resource
    except ImportError:  # a system that leaves none
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(arguments: list[str]) -> None:
    """Serve a role: `arguments` are ROLE, TARGET and perhaps FACTORY."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Control-C reaches the whole group; the parent ends this process when it is done
    end_with_the_parent()
    leave_no_cores()
    role, target = arguments[:2]
    factory = arguments[2] if len(arguments) > 2 else FACTORY
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints to stdout must not get between the messages
    kind = Builder if role == "build" else Measurer
    serve(lambda: kind(machine_by(factory, target)), requests, answers)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BrokenPipeError:  # the parent has ended
        sys.exit(1)
