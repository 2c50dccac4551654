"""Merging and pruning of whole tuning logs: paths of logs in, a log replaced in one step out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dnnc.autotune.log.file import UNSAFE, Log, lines_of, locked, read, write_whole
from dnnc.autotune.log.record import Fusion, Record, Session, Winner
from dnnc.autotune.search.task import Task
from dnnc.autotune.search.trial import Trial
from dnnc.ir.errors import TuneError


def merge(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Log:
    """Write the lines of several logs to one, in their order: equal lines once, tasks once, no torn ones.

    Args:
        paths: logs, packed ones too.
        out: a new file, or one of `paths`, which is then replaced.

    Returns:
        The merged log, to read.

    Raises:
        TuneError: a log cannot be read, or `out` exists and is none of them.
    """
    target = Path(out).expanduser()
    _check_free(target, paths)
    with _held(target):
        write_whole(target, _once(pair for p in paths for pair in lines_of(p)))
    return read(target)


def _once(lines: Iterable[tuple[bytes, Record]]) -> Iterator[bytes]:
    seen: set[bytes | str] = set()
    for line, record in lines:
        name = record.key if isinstance(record, Task) else line
        if name not in seen:
            seen.add(name)
            yield line


@dataclass(frozen=True)
class Keep:
    """What pruning leaves."""

    trials: int = 0  # of each task the fastest that many; those that bar a schedule are kept beside them
    task: Callable[[Task], bool] = lambda task: True  # which tasks; the others go with all that belongs to them


def prune(path: str | os.PathLike[str], keep: Keep, out: str | os.PathLike[str] | None = None) -> Log:
    """Write a log anew without what replaying does not need. Its winners stay what they were.

    Kept are, of the tasks that `keep` names and the parts into which these are cut, the winners and decisions that
    compiling takes, the fastest trials, trials that crashed, hung or were wrong; and sessions with these tasks.

    Args:
        path: the log. A tuner may be appending to it.
        keep: what to keep.
        out: a new file; None replaces `path`.

    Returns:
        The pruned log, to read.

    Raises:
        TuneError: the log cannot be read, or `out` exists.
    """
    source = Path(path).expanduser()
    target = source if out is None else Path(out).expanduser()
    _check_free(target, [source])
    with _held(target):
        log = read(source)
        wanted = _wanted(log, keep)
        write_whole(target, _once((line, record) for line, record in lines_of(source) if wanted(record)))
    return read(target)


def _wanted(log: Log, keep: Keep) -> Callable[[Record], bool]:
    tasks = {key for key, t in log.tasks.items() if keep.task(t)}
    fusions = {f for key, f in log.fused().items() if f.taken and key in tasks}
    tasks |= {key for f in fusions for key in f.parts if key in log.tasks}
    trials: set[Trial] = set()
    winners: set[Winner] = {w for key, w in log.decided().items() if key in tasks}
    for key in tasks:
        here = log.trials.get(key, ())
        fast = sorted((t for t in here if t.ok and t.seconds), key=lambda t: t.median)[: keep.trials]
        trials.update(fast, (t for t in here if t.status in UNSAFE))

    def wanted(record: Record) -> bool:
        if isinstance(record, Task):
            return record.key in tasks
        if isinstance(record, Fusion):
            return record in fusions
        if isinstance(record, Session):
            return not tasks.isdisjoint(record.calls)
        return record in winners if isinstance(record, Winner) else record in trials

    return wanted


def _check_free(target: Path, sources: Sequence[str | os.PathLike[str]]) -> None:
    if target.exists() and all(target.resolve() != Path(p).expanduser().resolve() for p in sources):
        raise TuneError(f"{target} exists; remove it, or give it as one of the logs to merge")


@contextmanager
def _held(target: Path) -> Iterator[None]:
    """Keeps writers away from a file while another is put in its place; they find the new one then."""
    if not target.exists():
        yield
        return
    try:
        fd = os.open(target, os.O_RDWR)
    except OSError as e:
        raise TuneError(f"cannot write the tuning log {target}: {e.strerror or e}") from None
    try:
        with locked(fd):
            yield
    finally:
        os.close(fd)
