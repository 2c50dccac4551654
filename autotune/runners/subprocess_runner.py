"""One process of a runner, asked over pipes; see `worker` for what it answers.

It is started by the interpreter's path, never by fork or multiprocessing: a fork of a process with threads can hang,
multiprocessing runs a script without a main guard a second time, and nothing that comes back is unpickled.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO, Any

from dnnc.backends.runtime.messages import receive, send
from dnnc.ir.errors import TuneError

START_SECONDS = 120.0  # until a process has loaded what it needs, a device's libraries on a slow disk too
WORDS = 2000  # bytes of what a process said last
# The parent's sys.path, so that a process imports the very dnnc that starts it, and nothing from its current directory.
_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[1].split(chr(0x1F)); from dnnc.autotune.runners.worker import main; "
    "main(sys.argv[2:])"
)
Answer = tuple[dict[str, Any], bytes]


class Ended(Exception):
    """The process has ended instead of answering; says its last words."""


class Late(Exception):
    """No answer came in time; the process was ended."""


class Closed(Exception):
    """The runner was closed meanwhile."""


class Child:
    """A process with a role, started on demand, restarted after its end. One thread asks, any may `kill`.

    Args:
        arguments: of `worker.main`.

    Attributes:
        hello: what it said when it was ready; empty before.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = list(arguments)
        self.hello: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the process; 0 where there is none."""
        return self._process.pid if self._process is not None and self.running else 0

    def start(self) -> None:
        """Start it unless it runs. TuneError where it cannot be."""
        if self.running:
            return
        self._reap()
        self._said = tempfile.TemporaryFile()
        command = [
            sys.executable,
            "-c",
            _BOOTSTRAP,
            "\x1f".join(p for p in sys.path if isinstance(p, str)),
            *self.arguments,
        ]
        with self._lock:
            if self._closed:
                raise Closed
            try:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said
                )
            except OSError as e:
                raise TuneError(f"cannot start {sys.executable}, which is to measure: {e}") from e
        self._answers = queue.SimpleQueue()
        threading.Thread(target=_read, args=(self._process.stdout, self._answers), daemon=True).start()
        try:
            self.hello = self._next(START_SECONDS)[0]
        except (Ended, Late) as e:
            raise TuneError(
                f"a process that is to {self.arguments[0]} for {self.arguments[1]} did not start: {e}"
            ) from e
        if "error" in self.hello:
            self.kill()
            raise TuneError(f"cannot {self.arguments[0]} for {self.arguments[1]}: {self.hello['error']}")

    def ask(self, header: dict[str, Any], body: bytes, timeout: float) -> Answer:
        """Return the answer. Ended or Late without one (restarts at the next question). Closed: ended on purpose."""
        self.start()
        assert self._process is not None and self._process.stdin is not None
        try:
            send(self._process.stdin, header, body)  # type: ignore[arg-type]
        except OSError:
            raise Ended(self._last_words()) from None
        return self._next(timeout)

    def kill(self) -> None:
        """End it; who waits for its answer gets Ended."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End it for good."""
        with self._lock:
            self._closed = True
        self.kill()
        self._reap()

    def __del__(self) -> None:
        self.kill()

    def _next(self, timeout: float) -> Answer:
        try:
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            self.kill()
            raise Late(f"no answer within {timeout:.3g} s") from None
        if answer is None:
            if self._closed:
                raise Closed
            raise Ended(self._last_words())
        return answer

    def _last_words(self) -> str:
        process, said = self._process, self._said
        if process is None or said is None:
            return "it was ended"
        code = process.wait()
        try:
            size = os.fstat(said.fileno()).st_size
            lines = os.pread(said.fileno(), WORDS, max(size - WORDS, 0)).decode(errors="replace").strip().splitlines()
        except ValueError:  # closed meanwhile
            lines = []
        return f"exit status {code}" + "".join(f"; {line.strip()}" for line in lines[:1] + lines[1:][-2:])

    def _reap(self) -> None:
        for stream in (self._process.stdin, self._said) if self._process is not None else ():
            if stream is not None:
                try:
                    stream.close()
                except OSError:  # what was not yet sent cannot be any more
                    pass


def _read(stream: Any, answers: queue.SimpleQueue[Answer | None]) -> None:
    """Take in answers until the stream ends."""
    try:
        while (message := receive(stream)) is not None:
            answers.put(message)
    except (OSError, ValueError):  # closed
        pass
    finally:
        answers.put(None)
        stream.close()
