"""Many LLVM texts to objects in parallel processes, since llvmlite holds one lock per process.

In: (key, text) pairs. Out: {key: object}. Few or small texts compile in this process; more go to
`dnnc.backends.llvm.worker` processes over pipes, the largest first. They are started by the interpreter's path, never
by fork or multiprocessing: a fork of a process with threads can hang, and multiprocessing reruns unguarded scripts.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import IO, Any

from dnnc.backends.llvm.compile import compile_text, llvm_version
from dnnc.backends.runtime.messages import receive, send
from dnnc.ir.errors import InternalError

Item = tuple[str, str]  # key, text
Progress = Callable[[int, int], None]  # done, of how many

SECONDS_PER_BYTE = 0.3e-6  # of kernel text, all of LLVM: 12 ms for the 40 KB of a large one
START_SECONDS = 0.15  # until a worker has loaded llvmlite, on a core of its own: 0.12 s measured
LARGE = 1 << 20  # bytes of a text from which on it is compiled by a worker, which can be ended
PATIENCE = 60.0  # seconds of CPU time that a text may take at least, a thousand times what a large kernel takes
SLOWER = 200  # times the expected seconds that it may take
COUNTS = hasattr(signal, "setitimer")  # can a worker count its CPU time?
SHARED = 10 if COUNTS else 1  # seconds on the clock for each of CPU time that a text may take
ATTEMPTS = 2  # a worker may have been killed for its memory; a text that ends two of them is at fault
# The parent's sys.path, so that a worker imports the very dnnc that starts it, and nothing from its current directory.
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[1].split(chr(0x1F)); from dnnc.backends.llvm.worker import main; main()"
)


class CompileService:
    """Compiles on up to `threads` cores. Workers start on demand and live until `close` or the `with` ends.

    Attributes:
        reason: why no workers are used, where that is not by choice; empty otherwise.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.reason = ""
        self._workers: list[_Worker] = []

    def __enter__(self) -> CompileService:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; a later compile_many starts new ones."""
        for w in self._workers:
            w.kill()
        self._workers.clear()

    def compile_many(
        self,
        items: Sequence[Item],
        cpu: str,
        features: str,
        progress: Progress | None = None,
        failed: dict[str, Exception] | None = None,
    ) -> dict[str, bytes]:
        """Compile every text, in no given order.

        Args:
            items: (key, text); the keys differ.
            cpu: as for `compile.compile_text`, `features` too.
            progress: called with (done, of how many) in the calling thread.
            failed: takes the errors of texts that do not compile, by key; without it the first is raised.

        InternalError: a text that is not valid, that ends the compiler, or that takes longer than PATIENCE; it names
        the key, and a file with the text in the second case. KeyboardInterrupt: Control-C; the workers are gone by
        then.
        """
        ordered = sorted(items, key=lambda item: (-len(item[1]), item[0]))
        count = self._worker_count([len(text) for _, text in ordered])
        tell = progress or (lambda done, total: None)
        if not count:
            return self._compile_here(ordered, cpu, features, tell, failed)
        while len(self._workers) < count:
            self._workers.append(_Worker())
        try:
            return self._distribute(ordered, cpu, features, tell, failed)
        except BaseException:  # KeyboardInterrupt too: nobody may go on compiling
            self.close()
            raise

    def _worker_count(self, sizes: Sequence[int]) -> int:
        """How many workers to use, 0 for none: those that pay for their start, or those that run already."""
        if self.reason or not sys.executable:
            return 0
        if self.threads < 2 or len(sizes) < 2:
            return int(max(sizes, default=0) > LARGE)
        work = SECONDS_PER_BYTE * sum(sizes)
        many = min(self.threads, len(sizes))
        if self._workers:  # the first is free; another must save more than its start
            return many if work > 2 * START_SECONDS else min(many, len(self._workers))
        slowest = max(work / many, SECONDS_PER_BYTE * max(sizes))
        return many if START_SECONDS + slowest < work else int(max(sizes) > LARGE)

    def _compile_here(
        self, items: Sequence[Item], cpu: str, features: str, tell: Progress, failed: dict[str, Exception] | None
    ) -> dict[str, bytes]:
        out: dict[str, bytes] = {}
        for key, text in items:
            try:
                out[key] = compile_text(text, cpu, features)
            except InternalError as e:
                _failed(key, e, failed)
            tell(len(out), len(items))
        return out

    def _distribute(
        self, items: Sequence[Item], cpu: str, features: str, tell: Progress, failed: dict[str, Exception] | None
    ) -> dict[str, bytes]:
        todo: queue.SimpleQueue[Item] = queue.SimpleQueue()
        for item in items:
            todo.put(item)
        answers: queue.SimpleQueue[tuple[Item, bytes | Exception] | None] = (
            queue.SimpleQueue()
        )  # None: a feeder has ended
        feeders = [
            threading.Thread(target=_feed, args=(w, todo, answers, cpu, features), daemon=True) for w in self._workers
        ]
        for f in feeders:
            f.start()
        out: dict[str, bytes] = {}
        answered: set[str] = set()
        running = len(feeders)
        while running:
            answer = answers.get()
            if answer is None:
                running -= 1
                continue
            (key, _), result = answer
            answered.add(key)
            if isinstance(result, Exception):
                _failed(key, result, failed)
            else:
                out[key] = result
            tell(len(out), len(items))
        rest = [item for item in items if item[0] not in answered]
        if rest:  # no worker could be started
            self.reason = next(w.reason for w in self._workers if w.reason)
            self.close()
            out.update(self._compile_here(rest, cpu, features, tell, failed))
        return out


def _failed(key: str, e: Exception, failed: dict[str, Exception] | None) -> None:
    """Note that a text does not compile, or raise what it failed with."""
    error = InternalError(f"kernel {key}: {e}")
    if failed is None:
        raise error from e
    failed[key] = error


def _feed(
    worker: _Worker, todo: queue.SimpleQueue[Item], answers: queue.SimpleQueue[Any], cpu: str, features: str
) -> None:
    """Hand items to one worker, from a thread of its own, until none is left or the worker cannot be started."""
    while worker.ready():
        try:
            item = todo.get_nowait()
        except queue.Empty:
            break
        answers.put((item, _attempt(worker, item, cpu, features)))
    answers.put(None)


def _attempt(worker: _Worker, item: Item, cpu: str, features: str) -> bytes | Exception:
    said = ""
    for _ in range(ATTEMPTS):
        if not worker.ready():
            break
        answer = worker.request(item, cpu, features)
        if not isinstance(answer, str):
            return answer
        said = answer
    if worker.killed:  # on purpose: nobody waits for this answer
        return InternalError("interrupted")
    return InternalError(f"the compiler process ended on it ({said or worker.reason}); its text is in {_keep(item)}")


def _keep(item: Item) -> str:
    """Write a text that ends the compiler where the user can find it; the path."""
    with tempfile.NamedTemporaryFile("w", prefix=f"dnnc-{item[0][:24]}-", suffix=".ll", delete=False) as f:
        f.write(item[1])
    return f.name


class _Worker:
    """A compiler process, started on demand, restarted after its end; one thread uses, any may `kill`."""

    def __init__(self) -> None:
        self.reason = ""  # why it cannot be started
        self.killed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def ready(self) -> bool:
        """Is there a process that takes requests? Starts one; False with `reason` when that fails, or after `kill`."""
        if self.killed or self.reason:
            return False
        if self._process is not None and self._process.poll() is None:
            return True
        self._errors = tempfile.TemporaryFile()
        command = [sys.executable, "-c", _BOOTSTRAP, "\x1f".join(p for p in sys.path if isinstance(p, str))]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
            )
        except OSError as e:
            self.reason = f"cannot start {sys.executable}: {e}"
            return False
        if self.killed:  # between the check and the start
            self.kill()
            return False
        hello = self._receive()
        if hello is None or hello[0].get("ready") != llvm_version():
            self.reason = f"a compiler process did not start: {hello[0] if hello else self._last_words()}"
        return not self.reason

    def request(self, item: Item, cpu: str, features: str) -> bytes | Exception | str:
        """The object, the compiler's error, or, when the process has ended on it, its last words."""
        assert self._process is not None and self._process.stdin is not None
        limit = max(PATIENCE, SLOWER * SECONDS_PER_BYTE * len(item[1]))
        slow = threading.Timer(SHARED * limit, self._process.kill)
        slow.daemon = True
        slow.start()
        try:
            wanted = {"key": item[0], "cpu": cpu, "features": features, "seconds": limit}
            send(self._process.stdin, wanted, item[1].encode())  # type: ignore[arg-type]
            answer = self._receive()
        except OSError:
            answer = None
        finally:
            late = not slow.is_alive()
            slow.cancel()
        if answer is None:
            late = late or (COUNTS and self._process.wait() == -signal.SIGPROF)
            return InternalError(f"LLVM takes longer than {limit:.0f} s for it") if late else self._last_words()
        header, body = answer
        return InternalError(header["error"]) if "error" in header else body

    def kill(self) -> None:
        """End the process now; whoever waits for its answer gets the end of the stream."""
        self.killed = True
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def __del__(self) -> None:
        self.kill()

    def _receive(self) -> tuple[dict[str, Any], bytes] | None:
        assert self._process is not None and self._process.stdout is not None
        return receive(self._process.stdout)  # type: ignore[arg-type]

    def _last_words(self) -> str:
        assert self._process is not None and self._errors is not None
        code = self._process.wait()
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(self._errors.tell() - 2000, 0))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"exit status {code}" + "".join(f"; {line.strip()}" for line in lines[:1] + lines[1:][-2:])
