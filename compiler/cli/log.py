"""`dnnc log`: what a tuning log holds, logs made into one, logs without what replaying does not need."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from dnnc.autotune.log.edit import Keep, merge, prune
from dnnc.autotune.log.file import Log, read
from dnnc.autotune.log.record import Fusion, Session, Winner, plain_choice
from dnnc.autotune.search.task import Task
from dnnc.autotune.search.trial import Trial
from dnnc.autotune.search.variants import described
from dnnc.cli.console import show_json, show_tables
from dnnc.cli.outputs import LOGS, check_output
from dnnc.ir.errors import TuneError, count
from dnnc.passes.planning.fusion_variants import Variant
from dnnc.report.layout import Table
from dnnc.report.tables import show_bytes, show_count, show_seconds

SHORT = 10  # characters of a key that are shown
SHOWN_TRIALS = 20  # of a task; --json has all of them


def show_command(path: str, pattern: str, as_json: bool) -> None:
    """Sessions and tasks of a log; of the tasks that a pattern selects the trials as well."""
    log = read(path)
    tasks = selected(log, pattern)
    if as_json:
        show_json({**summary(log), "tasks": [task_data(log, t, bool(pattern)) for t in tasks]})
        return
    tables = [_summary_table(log), _task_table(log, tasks)]
    tables[1:1] = [_session_table(log.sessions)] if log.sessions else []
    show_tables([*tables, *_fusion_tables(log, tasks), *(_trial_table(log, t) for t in tasks if pattern)])


def best_command(path: str, pattern: str, as_json: bool) -> None:
    """The schedule of each task."""
    log = read(path)
    tasks = selected(log, pattern)
    if as_json:
        show_json([task_data(log, t) for t in tasks])
        return
    decided = log.decided()
    rows = [_best_row(log, t, decided.get(t.key)) for t in tasks]
    title = f"{path}: {sum(t.key in decided for t in tasks)} of {count(len(tasks), 'task')} have a winner"
    columns = ("key", "task", "node", "shape", "time", "untuned", "gain", "used", "schedule")
    table = Table(title, columns, tuple(rows), frozenset(("time", "untuned", "gain")), ("shape", "node"), "see --json")
    show_tables([table, *_fusion_tables(log, tasks)])


def merge_command(paths: Sequence[str], out: str, as_json: bool) -> None:
    """Several logs as one."""
    check_output(out, LOGS, ())
    _show_written(out, merge(paths, out), as_json)


def prune_command(path: str, out: str, trials: int, target: str, pattern: str, as_json: bool) -> None:
    """A log without what is of no more use."""
    if out:
        check_output(out, LOGS, ())
    log, wanted = read(path), matcher(pattern)
    kept = {t.key for t in log.tasks.values() if wanted(t) and target in t.setting.target}
    if not kept:
        raise TuneError(f"{path}: this would keep none of its {count(len(log.tasks), 'task')}; {_hint(log)}")
    _show_written(out or path, prune(path, Keep(trials, lambda t: t.key in kept), out or None), as_json)


# --- selection --------------------------------------------------------------------------------------------------------


def matcher(pattern: str) -> Callable[[Task], bool]:
    """Return the tasks whose key begins with the pattern or whose name matches its * and ?. Empty: all."""
    return lambda t: (
        not pattern or fnmatchcase(t.name, pattern) or (len(pattern) >= 4 and t.key.startswith(pattern.lower()))
    )


def selected(log: Log, pattern: str) -> list[Task]:
    """The tasks of a log that a pattern means. TuneError where there is none."""
    found = [t for t in log.tasks.values() if matcher(pattern)(t)]
    if pattern and not found:
        raise TuneError(f"{log.path}: no task is called {pattern!r}; {_hint(log)}")
    return found


def _hint(log: Log) -> str:
    names = list(dict.fromkeys(t.name for t in log.tasks.values()))
    return f"there are {', '.join(names[:8])}{' and others' if len(names) > 8 else ''}" if names else "it has no tasks"


# --- as data ----------------------------------------------------------------------------------------------------------


def summary(log: Log) -> dict[str, Any]:
    """The log as a whole."""
    assert log.path is not None
    trials = [t for ts in log.trials.values() for t in ts]
    return {
        "file": str(log.path),
        "bytes": log.path.stat().st_size,
        "torn_bytes": log.torn,
        "trials": dict(Counter(t.status for t in trials)),
        "winners": len(log.decided()),
        "targets": sorted({t.setting.target for t in log.tasks.values()}),
        "machines": sorted({t.machine for t in trials if t.machine}),
        "versions": sorted(({t.version for t in trials} | {s.version for s in log.sessions}) - {""}),
        "sessions": [{**vars(s), "calls": dict(s.calls)} for s in log.sessions],
    }


def task_data(log: Log, task: Task, with_trials: bool = False) -> dict[str, Any]:
    """A task with what is known of it; `best` is the fastest trial, `winner` what compiling takes."""
    trials = log.trials.get(task.key, [])
    best, winner, fusion = log.best(task.key), log.decided().get(task.key), log.fused().get(task.key)
    out = {
        "key": task.key,
        "name": task.name,
        "kind": task.kind,
        "target": task.setting.target,
        "numerics": task.setting.numerics,
        "flops": task.flops,
        "trials": dict(Counter(t.status for t in trials)),
        "best": None if best is None else trial_data(best),
        "winner": None if winner is None else {**vars(winner), "choice": plain_choice(winner.choice)},
        "fusion": None if fusion is None else {**vars(fusion), "parts": list(fusion.parts), "cuts": list(fusion.cuts)},
    }
    if with_trials:
        out |= {"graph": task.graph, "measured": [trial_data(t) for t in sorted(trials, key=_rank)]}
    return out


def trial_data(t: Trial) -> dict[str, Any]:
    return {
        **vars(t),
        "choice": plain_choice(t.choice),
        "seconds": list(t.seconds),
        "median": t.median if t.ok and t.seconds else None,
    }


def _rank(t: Trial) -> tuple[bool, float]:
    return not t.ok, t.median


# --- as tables --------------------------------------------------------------------------------------------------------


def _summary_table(log: Log) -> Table:
    s = summary(log)
    counts = ", ".join(f"{n} {status}" for status, n in s["trials"].items())
    rows = [("size", show_bytes(s["bytes"])), ("tasks", f"{len(log.tasks)}, {s['winners']} with a winner")]
    rows += [("trials", f"{sum(s['trials'].values())}{f': {counts}' if counts else ''}")]
    rows += [(name, "; ".join(s[name])) for name in ("targets", "machines", "versions") if s[name]]
    rows += (
        [("torn", f"{log.torn} bytes of a last line are left out; the next writer removes them")] if log.torn else []
    )
    return Table(f"tuning log {log.path}", ("", ""), tuple(rows))


def _session_table(sessions: Sequence[Session]) -> Table:
    def row(s: Session) -> tuple[str, ...]:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(s.at)) if s.at else ""
        took = "not ended" if s.seconds is None else show_seconds(s.seconds)
        return (
            when,
            s.model,
            s.machine or s.target,
            s.version,
            str(len(s.calls)),
            "" if s.budget is None else show_seconds(s.budget),
            took,
        )

    columns = ("began", "model", "machine", "dnnc", "tasks", "budget", "took")
    return Table(
        "sessions",
        columns,
        tuple(map(row, sessions)),
        frozenset(("began", "tasks", "budget", "took")),
        ("dnnc", "machine"),
        "see --json",
    )


def _task_table(log: Log, tasks: Sequence[Task]) -> Table:
    decided = log.decided()

    def row(t: Task) -> tuple[str, ...]:
        trials, best, winner = log.trials.get(t.key, []), log.best(t.key), decided.get(t.key)
        failed = sum(not x.ok for x in trials)
        times = (
            "" if best is None else show_seconds(best.median),
            "" if winner is None else show_seconds(winner.seconds),
        )
        counts = show_count(t.flops), str(len(trials)), str(failed)
        return t.key[:SHORT], t.name, t.node, t.shape, t.kind, *counts, *times, _gain(winner)

    columns = ("key", "task", "node", "shape", "kind", "flops", "trials", "failed", "best trial", "winner", "gain")
    drop = ("kind", "flops", "failed", "shape")
    return Table(f"tasks: {len(tasks)}", columns, tuple(map(row, tasks)), frozenset(columns[5:]), drop, "see --json")


def _fusion_tables(log: Log, tasks: Sequence[Task]) -> list[Table]:
    """Decisions on these tasks; nothing where there are none."""
    fused = log.fused()
    rows = tuple(_fusion_row(log, t, fused[t.key]) for t in tasks if t.key in fused)
    columns = ("group", "default", "alternative", "time", "used")
    return [Table(f"fusion: {len(rows)}", columns, rows, frozenset(("default", "time")))] if rows else []


def _fusion_row(log: Log, t: Task, f: Fusion) -> tuple[str, ...]:
    way = described(Variant(f.cuts, f.tile), [log.tasks[k].name if k in log.tasks else k[:SHORT] for k in f.parts])
    return t.name, show_seconds(f.baseline), way, show_seconds(f.seconds), "alternative" if f.taken else "default"


def _trial_table(log: Log, task: Task) -> Table:
    trials = sorted(log.trials.get(task.key, []), key=_rank)
    rows = [_trial_row(t) for t in trials[:SHOWN_TRIALS]]
    if len(trials) > SHOWN_TRIALS:
        rows.append(("", "", "", "", f"and {len(trials) - SHOWN_TRIALS} more"))
    title = (
        f"{task.name} {task.key[:SHORT]} for {task.setting.target}, {task.setting.numerics}: "
        f"{count(len(trials), 'trial')}\n"
        f"{task.graph.strip()}"
    )
    return Table(title, ("time", "spread", "status", "checked", "schedule"), tuple(rows), frozenset(("time", "spread")))


def _trial_row(t: Trial) -> tuple[str, ...]:
    known = t.ok and bool(t.seconds)
    spread = f"{max(t.seconds) / min(t.seconds) - 1:.1%}" if known and min(t.seconds) else ""
    what = str(t.choice) if t.ok else f"{t.choice}: {t.error.splitlines()[0] if t.error else 'no message'}"
    return show_seconds(t.median) if known else "", spread, t.status, "yes" if t.checked else "no", what


def _best_row(log: Log, t: Task, winner: Winner | None) -> tuple[str, ...]:
    best, named = log.best(t.key), (t.key[:SHORT], t.name, t.node, t.shape)
    if winner is not None:
        untuned = "" if winner.baseline is None else show_seconds(winner.baseline)
        used = "no: see fusion" if t.key in log.fused() and log.fused()[t.key].taken else "yes"
        return *named, show_seconds(winner.seconds), untuned, _gain(winner), used, str(winner.choice)
    if best is not None:
        return *named, show_seconds(best.median), "", "", "no: not compared yet", str(best.choice)
    return *named, "", "", "", "no: nothing ran", ""


def _gain(winner: Winner | None) -> str:
    return (
        ""
        if winner is None or winner.baseline is None or not winner.seconds
        else f"{winner.baseline / winner.seconds:.2f}x"
    )


def _show_written(out: str, log: Log, as_json: bool) -> None:
    trials, winners, size = (
        sum(map(len, log.trials.values())),
        len(log.decided()),
        Path(out).expanduser().stat().st_size,
    )
    if as_json:
        show_json({"file": out, "bytes": size, "tasks": len(log.tasks), "trials": trials, "winners": winners})
        return
    show_tables(
        [
            Table(
                f"{out}: {count(len(log.tasks), 'task')}, {count(trials, 'trial')}, "
                f"{count(winners, 'winner')}, {show_bytes(size)}",
                (),
                (),
            )
        ]
    )
