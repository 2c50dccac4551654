"""The tuning log: JSON lines that a search appends, and out of which compiling reads the winners.

In: records (tasks, trials, sessions, winners). Out: the same by task, and which schedule each task is to have. The file
is append-only and survives what may happen to its writers: a record is one write at the end of the file, under a lock,
and ends with a newline. What follows the last newline was torn off by a crash: readers leave it out, the next writer
cuts it off. Logs are merged by concatenation.
"""

from __future__ import annotations

import errno
import lzma
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from dnnc.autotune.log.record import HEAD, Fusion, Record, Session, Winner, from_line, to_line
from dnnc.autotune.search.task import Task
from dnnc.autotune.search.trial import Trial
from dnnc.autotune.search.variants import as_choice, name_of
from dnnc.ir.errors import TuneError
from dnnc.ir.files import replacing
from dnnc.passes.schedule.problem import Choice

UNSAFE = ("crash", "hang", "wrong")  # what one trial of a schedule may find that bars the schedule for good
PACKED = (".xz",)
_TRIAL, _WELL = HEAD + b'trial"', b'"status": "ok"'
_TAIL = 1 << 16  # bytes that are searched at a time for the last newline


class Log:
    """A tuning log in memory, kept in a file where there is one.

    Attributes:
        path: the file; None keeps the log in memory alone.
        tasks: by key.
        trials: by key of their task, in the order of the log.
        wins: the winners of searches, by key of their task, in the order of the log; `winners` says which holds.
        fusions: decisions on fused groups, by key of the task that is the group in one kernel; `fused` says which hold.
        sessions: runs of the tuner, in the order of the log.
        torn: bytes after the last newline, which are left out.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.tasks: dict[str, Task] = {}
        self.trials: dict[str, list[Trial]] = {}
        self.wins: dict[str, list[Winner]] = {}
        self.fusions: dict[str, list[Fusion]] = {}
        self.torn = 0
        self._sessions: dict[tuple[str, float], Session] = {}
        self._writer: _Writer | None = None

    @staticmethod
    def open(path: str | os.PathLike[str], create: bool = True) -> Log:
        """Open a log to append. TuneError: no tuning log, damaged, not writable, or missing though not `create`."""
        file = Path(path).expanduser()
        if file.suffix in PACKED:
            raise TuneError(f"{file} is packed and cannot be appended to; unpack it first")
        if not create or file.exists():
            log = read(file)
        else:
            log = Log(file)
        log._writer = _Writer(file, create)
        return log

    @property
    def sessions(self) -> list[Session]:
        return list(self._sessions.values())

    def append(self, record: Record) -> None:
        """Add a new record to log and file; winners and fusions are on disk on return. TuneError: not writable."""
        if isinstance(record, Task) and record.key in self.tasks:
            return
        if self._writer is not None:
            self._writer.append(to_line(record), sync=isinstance(record, (Winner, Fusion)))
        elif self.path is not None:
            raise TuneError(f"{self.path} was opened for reading; Log.open opens it to append to")
        self.take(record)

    def take(self, record: Record) -> None:
        """Add a record in memory alone."""
        if isinstance(record, Task):
            self.tasks.setdefault(record.key, record)
        elif isinstance(record, Trial):
            self.trials.setdefault(record.task, []).append(record)
        elif isinstance(record, Winner):
            self.wins.setdefault(record.task, []).append(record)
        elif isinstance(record, Fusion):
            self.fusions.setdefault(record.task, []).append(record)
        else:
            self._sessions[record.model, record.at] = record

    def decided(self) -> dict[str, Winner]:
        """Return each task's latest winner, but none that crashed, hung or was wrong. Mere trials do not win."""
        out = {}
        for key, wins in self.wins.items():
            barred = {t.choice for t in self.trials.get(key, ()) if t.status in UNSAFE}
            fit = [w for w in wins if w.choice not in barred]
            if fit:
                out[key] = max(enumerate(fit), key=lambda item: (item[1].at, item[0]))[1]
        return out

    def fused(self) -> dict[str, Fusion]:
        """The decision on each fused group that has one: the latest."""
        return {
            key: max(enumerate(found), key=lambda item: (item[1].at, item[0]))[1] for key, found in self.fusions.items()
        }

    def winners(self) -> dict[str, Choice]:
        """What compiling takes: winners' schedules by task key, and groups' faster ways by `variants.name_of`."""
        ways = {name_of(key): as_choice(f) for key, f in self.fused().items() if f.taken}
        return {**{key: w.choice for key, w in self.decided().items()}, **ways}

    def best(self, key: str) -> Trial | None:
        """The fastest trial of a task, checked or not; None where none went well."""
        return min((t for t in self.trials.get(key, ()) if t.ok and t.seconds), key=lambda t: t.median, default=None)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# --- reading ----------------------------------------------------------------------------------------------------------


def read(path: str | os.PathLike[str], trials: bool = True) -> Log:
    """A log to read, `.jsonl` or packed as `.jsonl.xz`.

    Args:
        path: the file.
        trials: False leaves out those that went well, which are nearly all of a log and of which `winners` makes no
            use.

    TuneError: there is no such file, or a line is damaged or of another format; the message has its number.
    """
    file = Path(path).expanduser()
    log = Log(file)
    *lines, tail = _bytes_of(file).split(b"\n")
    for record in _records(file, lines, trials):
        log.take(record)
    if not (tail.startswith(HEAD) or HEAD.startswith(tail)):
        raise _damaged(file, len(lines) + 1, "it is no record of a tuning log")
    log.torn = len(tail)
    return log


def lines_of(path: str | os.PathLike[str]) -> Iterator[tuple[bytes, Record]]:
    """The lines of a log with their newlines, and what they say, without a torn one. TuneError as `read`."""
    file = Path(path).expanduser()
    lines = _bytes_of(file).split(b"\n")[:-1]
    return zip((line + b"\n" for line in lines), _records(file, lines))


def _records(file: Path, lines: list[bytes], trials: bool = True) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if not trials and line.startswith(_TRIAL) and _WELL in line and line.endswith(b"}") and line.count(HEAD) == 1:
            continue
        try:
            yield from_line(line)
        except ValueError as e:
            raise _damaged(file, number, str(e)) from None


def _damaged(file: Path, number: int, why: str) -> TuneError:
    return TuneError(f"{file}, line {number}: {why}")


def _bytes_of(file: Path) -> bytes:
    try:
        data = file.read_bytes()
        return lzma.decompress(data) if file.suffix in PACKED else data
    except FileNotFoundError:
        raise TuneError(f"there is no tuning log {file}") from None
    except (OSError, lzma.LZMAError) as e:
        raise TuneError(f"cannot read the tuning log {file}: {getattr(e, 'strerror', None) or e}") from None


# --- writing ----------------------------------------------------------------------------------------------------------


class _Writer:
    """Appends lines to a file that other processes append to as well, or replace."""

    def __init__(self, path: Path, create: bool) -> None:
        self.path, self._flags = path, os.O_RDWR | os.O_APPEND | (os.O_CREAT if create else 0)
        self._lock = threading.Lock()
        self._fd: int | None = None
        with self._current():
            pass

    def append(self, line: bytes, sync: bool) -> None:
        """`sync`: be on the disk before returning."""
        with self._current() as fd:
            size = _cut_torn(fd)
            if os.write(fd, line) != len(line):
                os.ftruncate(fd, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fsync(fd)

    def close(self) -> None:
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    @contextmanager
    def _current(self) -> Iterator[int]:
        """The file that has the path now, locked against other threads and processes."""
        with self._lock:
            try:
                while True:
                    fd = self._opened()
                    with locked(fd):
                        if self._is_current(fd):
                            yield fd
                            return
                    os.close(fd)  # somebody has put another file in its place
                    self._fd = None
            except OSError as e:
                raise TuneError(f"cannot write the tuning log {self.path}: {e.strerror or e}") from None

    def _opened(self) -> int:
        if self._fd is None:
            self._fd = os.open(self.path, self._flags, 0o644)
        return self._fd

    def _is_current(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.path))
        except FileNotFoundError:
            return False


@contextmanager
def locked(fd: int) -> Iterator[None]:
    """Hold the lock of a log's writers. Systems without such locks allow only one process at a time."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _cut_torn(fd: int) -> int:
    """Remove what follows the last newline; the size that is left."""
    size = os.fstat(fd).st_size
    end = size
    while end > 0:
        start = max(end - _TAIL, 0)
        at = os.pread(fd, end - start, start).rfind(b"\n")
        if at >= 0:
            end = start + at + 1
            break
        end = start
    if end < size:
        os.ftruncate(fd, end)
    return end


def write_whole(path: Path, lines: Iterable[bytes]) -> None:
    """Replace a log completely or, on failure, not at all. TuneError where it cannot be written."""
    try:
        with replacing(path) as f:
            f.writelines(lines)
    except OSError as e:
        raise TuneError(f"cannot write the tuning log {path}: {e.strerror or e}") from None
