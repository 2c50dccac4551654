"""The tuning log: what is written is read; damage is refused by line; only winners win."""

from __future__ import annotations

import json
import lzma
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dnnc.autotune.log import record
from dnnc.autotune.log.edit import Keep, merge, prune
from dnnc.autotune.log.file import Log, read
from dnnc.autotune.log.record import KINDS, Session, Winner, from_line, to_line
from dnnc.autotune.search.task import Task
from dnnc.autotune.search.trial import FAILURES, OK, Trial
from dnnc.ir.errors import TuneError
from dnnc.ir.loops.text import show_kernel
from dnnc.passes.schedule.problem import Choice
from support.times import in_a_quiet_round, quiet
from support.tuning_logs import choices, other, tasks, write_log

pytestmark = pytest.mark.family("cases")

ROOT = Path(__file__).resolve().parents[3]
A, B, C = (Choice("map", (("lanes", n), ("order", "rows"))) for n in (4, 8, 16))


def trial(
    choice: Choice, status: str = OK, seconds: tuple[float, ...] = (2e-5, 1e-5, 3e-5), key: str = "k", **more: Any
) -> Trial:
    return Trial(key, choice, status, seconds if status == OK else (), "" if status == OK else "why", **more)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.tune.jsonl"


# --- what is written is read ------------------------------------------------------------------------------------------


def test_a_log_reads_as_it_was_written(path: Path) -> None:
    made, found = write_log(path), read(path)
    assert found.tasks == made.tasks == {t.key: t for t, _ in tasks()}
    assert found.trials == made.trials and sum(map(len, found.trials.values())) == sum(
        len(choices(t)) for t, _ in tasks()
    )
    assert found.sessions == made.sessions and len(found.sessions) == 1 and found.sessions[0].seconds == 12.5
    assert found.winners() == made.winners() == {t.key: other(t) for t, _ in tasks()}
    assert found.torn == 0


def test_tasks_out_of_a_log_are_the_same_kernels(path: Path) -> None:
    write_log(path)
    for t, _ in tasks():
        again = read(path).tasks[t.key]
        assert show_kernel(again.rebuilt[2].kernel) == show_kernel(
            t.rebuilt[2].kernel
        )  # rebuilding checks the key as well


def test_records_are_one_line_each_with_format_and_kind(path: Path) -> None:
    write_log(path)
    lines = path.read_bytes().splitlines()
    assert all(line.startswith(record.HEAD) for line in lines)
    assert [json.loads(line)["record"] for line in lines[:3]] == ["session", "task", "trial"]
    assert all(to_line(from_line(line)) == line + b"\n" for line in lines)


def test_a_log_is_added_to_and_a_task_is_written_once(path: Path) -> None:
    write_log(path)
    size = path.stat().st_size
    with Log.open(path) as log:
        for t, _ in tasks():
            log.append(t)
        assert path.stat().st_size == size
        log.append(trial(A))
    assert read(path).trials["k"] == [trial(A)] and len(read(path).tasks) == len(tasks())


def test_a_log_without_a_file(path: Path) -> None:
    log = Log()
    log.append(trial(A))
    log.append(Winner("k", A, 1e-5))
    assert log.winners() == {"k": A} and log.best("k") == trial(A)


def test_the_order_of_knobs_is_kept(path: Path) -> None:
    back = Choice("map", (("z", 1), ("a", "x"), ("m", 3)))
    with Log.open(path) as log:
        log.append(trial(back))
    assert read(path).trials["k"][0].choice == back


def test_numbers_that_json_does_not_have_are_not_logged(path: Path) -> None:
    with Log.open(path) as log, pytest.raises(TuneError, match="trial cannot be logged"):
        log.append(trial(A, seconds=(float("inf"),)))
    assert path.read_bytes() == b"" and not log.trials


def test_logs_are_opened_where_they_may_be(tmp_path: Path, path: Path) -> None:
    with pytest.raises(TuneError, match=f"there is no tuning log {path}"):
        Log.open(path, create=False)
    with pytest.raises(TuneError, match="No such file or directory"):
        Log.open(tmp_path / "nowhere" / "x.jsonl")
    write_log(path)
    with pytest.raises(TuneError, match=r"opened for reading; Log\.open"):
        read(path).append(trial(A))
    with Log.open(path, create=False) as log:
        assert len(log.tasks) == len(tasks())


def test_packed_logs_are_read_only(path: Path) -> None:
    made = write_log(path)
    packed = path.with_suffix(".jsonl.xz")
    packed.write_bytes(lzma.compress(path.read_bytes()))
    assert read(packed).trials == made.trials
    with pytest.raises(TuneError, match="packed"):
        Log.open(packed)
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(TuneError, match="cannot read the tuning log"):
        read(packed)


# --- crashes ----------------------------------------------------------------------------------------------------------


def test_whatever_a_crash_leaves_the_log_goes_on(path: Path) -> None:
    write_log(path)
    data = path.read_bytes()
    rng = random.Random(0)
    for n in sorted({0, 1, len(record.HEAD), len(data) - 1, len(data), *rng.sample(range(len(data)), 60)}):
        path.write_bytes(data[:n])
        whole = data[:n].count(b"\n")
        left = read(path)
        assert left.torn == n - (data[:n].rfind(b"\n") + 1)
        with Log.open(path, create=False) as log:
            log.append(trial(A))
        lines = path.read_bytes().split(b"\n")
        assert (
            lines[:whole] == data.split(b"\n")[:whole]
            and from_line(lines[whole]) == trial(A)
            and lines[whole + 1 :] == [b""]
        )
        assert read(path).trials["k"] == [trial(A)]


def test_a_long_torn_line_is_cut_off(path: Path) -> None:
    path.write_bytes(to_line(trial(A)) + to_line(trial(B, "crash"))[:-3] + b"x" * 200_000)
    with Log.open(path) as log:
        assert log.torn > 200_000
        log.append(trial(C))
    assert read(path).trials["k"] == [trial(A), trial(C)]


def test_a_file_that_is_no_log_is_left_alone(path: Path) -> None:
    for content in (
        b"my thesis, all of it",
        b"a\nb\n",
        b'{"other": 1}\n',
        to_line(trial(A)) + b"notes of mine",
        b"\x00\xff" * 99,
    ):
        path.write_bytes(content)
        with pytest.raises(TuneError, match=r"m\.tune\.jsonl, line [12]: it is no"):
            Log.open(path)
        assert path.read_bytes() == content


APPEND = """
import sys
from dnnc.autotune.log.file import Log
from dnnc.autotune.search.trial import Trial
from dnnc.passes.schedule.problem import Choice
log, k = Log.open(sys.argv[1]), 0
print("ready", flush=True)
while k < int(sys.argv[3]):
    log.append(Trial(sys.argv[2], Choice("map", (("k", k),)), "ok", (1.0,), "x" * (k % 997)))
    k += 1
"""


def appender(path: Path, name: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", APPEND, str(path), name, str(count)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_processes_append_to_one_log_and_one_is_killed(path: Path) -> None:
    path.write_bytes(to_line(trial(A)) + b'{"dnnc": 1, "rec')  # torn: one of them cuts it off
    two, endless = [appender(path, name, 300) for name in "ab"], appender(path, "c", 10**9)
    assert endless.stdout is not None and endless.stdout.readline() == "ready\n"
    for p in two:
        assert p.wait(600) == 0
    endless.send_signal(signal.SIGKILL)
    endless.wait(600)
    log = read(path)
    for name in "ab":
        assert [t.choice.knobs[0][1] for t in log.trials[name]] == list(range(300))
    assert [t.choice.knobs[0][1] for t in log.trials.get("c", [])] == list(range(len(log.trials.get("c", []))))
    assert log.trials["k"] == [trial(A)]


def test_a_full_disk_leaves_no_half_line(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with Log.open(path) as log:
        log.append(trial(A))
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:20]))
        with pytest.raises(TuneError, match="No space left"):
            log.append(trial(B))
        monkeypatch.undo()
        log.append(trial(C))
    assert read(path).trials["k"] == [trial(A), trial(C)]


def test_winners_are_on_the_disk_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    with Log.open(path) as log:
        log.append(trial(A))
        assert not synced
        log.append(Winner("k", A, 1e-5))
        assert len(synced) == 1


# --- damage -----------------------------------------------------------------------------------------------------------


def edited(change: Callable[[dict[str, Any]], Any], of: Task | Trial | Winner | Session) -> bytes:
    data = json.loads(to_line(of))
    change(data)
    return json.dumps(data).encode() + b"\n"


TASK = Task("k", "relu", "map", "def g(): ...", None, (0,), record.Setting("llvm"), 5)
DAMAGED = [
    (b"{'dnnc': 1}\n", "it is no JSON"),
    (b"\n", "it is no JSON"),
    (b"[1]\n", "no record of a tuning log"),
    (to_line(trial(A))[:-9] + to_line(trial(B)), "it is no JSON"),
    (to_line(trial(A)).replace(b"1e-05", b"NaN"), "NaN is no number"),
    (to_line(trial(A)).replace(b'"dnnc": 1', b'"dnnc": 2'), "another format than 1"),
    (
        to_line(trial(A)).replace(b'"trial"', b'"verdict"'),
        "no record 'verdict' in format 1: expected task, trial, session, winner",
    ),
    (edited(lambda d: d.pop("choice"), trial(A)), "trial has no choice"),
    (edited(lambda d: d.update(mood="good"), trial(A)), "trial has an unknown mood"),
    (edited(lambda d: d.update(status="fine"), trial(A)), "trial.status: expected ok, build"),
    (edited(lambda d: d.update(seconds=1.0), trial(A)), "trial.seconds: expected a list, got 1.0"),
    (edited(lambda d: d.update(seconds=["1"]), trial(A)), "trial.seconds: expected a number, got '1'"),
    (edited(lambda d: d.update(checked=1), trial(A)), "trial.checked: expected true or false"),
    (edited(lambda d: d.update(choice=["map"]), trial(A)), "trial.choice: expected"),
    (edited(lambda d: d.update(choice=["map", {"lanes": 1.5}]), trial(A)), "knobs that are integers or texts"),
    (edited(lambda d: d.update(choice=["map", {"lanes": True}]), trial(A)), "knobs that are integers or texts"),
    (edited(lambda d: d["setting"].pop("target"), TASK), "task.setting has no target"),
    (edited(lambda d: d.update(flops="many"), TASK), "task.flops: expected an integer, got 'many'"),
    (edited(lambda d: d.update(inplace=[]), TASK), "task.inplace: expected an integer"),
    (edited(lambda d: d.update(seconds=None), Winner("k", A, 1.0)), "winner.seconds: expected a number, got None"),
    (edited(lambda d: d.update(calls={"k": "1"}), Session("m", "llvm")), "session.calls.k: expected an integer"),
]


@pytest.mark.parametrize(("line", "why"), DAMAGED, ids=[w[:40] for _, w in DAMAGED])
def test_damage_is_told_by_line(path: Path, line: bytes, why: str) -> None:
    path.write_bytes(to_line(TASK) + to_line(trial(A)) + line + to_line(trial(B)))
    with pytest.raises(TuneError, match=re.escape(f"{path}, line 3: ") + ".*" + re.escape(why)):
        read(path)


def test_records_of_an_older_dnnc_lack_fields(path: Path) -> None:
    path.write_bytes(
        b'{"dnnc": 1, "record": "trial", "task": "k", "choice": ["map", {}], "status": "ok", "seconds": [1]}\n'
    )
    assert read(path).trials["k"] == [Trial("k", Choice("map", ()), "ok", (1.0,))]


# --- winners ----------------------------------------------------------------------------------------------------------


def log_of(*records: Trial | Winner) -> Log:
    log = Log()
    for r in records:
        log.append(r)
    return log


def test_trials_alone_make_no_winner() -> None:
    log = log_of(trial(A, checked=True), trial(B, seconds=(1e-9,), checked=True))
    assert log.winners() == {} and log.best("k") == log.trials["k"][1]


def test_the_latest_winner_holds_whatever_the_order_of_the_logs() -> None:
    old, new = Winner("k", A, 1e-6, at=1.0), Winner("k", B, 2e-6, at=2.0)
    assert log_of(old, new).winners() == log_of(new, old).winners() == {"k": B}
    assert log_of(Winner("k", A, 1.0), Winner("k", B, 1.0)).winners() == {"k": B}  # without times the last one


@pytest.mark.parametrize("status", FAILURES)
def test_what_crashed_hung_or_was_wrong_once_never_wins(status: str) -> None:
    wins = Winner("k", A, 1e-6, at=1.0), Winner("k", B, 1e-6, at=2.0)
    bad, unsafe = trial(B, status), status in ("crash", "hang", "wrong")
    for log in (log_of(bad, *wins), log_of(*wins, bad)):
        assert log.winners() == {"k": A if unsafe else B}
    assert log_of(bad, wins[1]).winners() == ({} if unsafe else {"k": B})
    assert log_of(trial(B, status, key="other"), *wins).winners() == {"k": B}


def test_leaving_out_trials_changes_no_winner(path: Path) -> None:
    write_log(path)
    key = tasks()[0][0].key
    with Log.open(path) as log:
        log.append(trial(other(tasks()[0][0]), "wrong", key=key))
    light, whole = read(path, trials=False), read(path)
    assert light.winners() == whole.winners() and key not in light.winners()
    assert not [t for ts in light.trials.values() for t in ts if t.ok] and any(light.trials.values())
    path.write_bytes(to_line(trial(A))[:-9] + to_line(trial(B)))  # two lines in one are seen all the same
    with pytest.raises(TuneError, match="line 1"):
        read(path, trials=False)


@in_a_quiet_round
def test_reading_winners_is_quick(path: Path) -> None:
    path.write_bytes(to_line(trial(A, code="ab" * 32, machine="znver5")) * 30_000 + to_line(Winner("k", A, 1.0)))
    start = time.process_time()
    assert read(path, trials=False).winners() == {"k": A}
    quiet(time.process_time() - start < 0.5)


# --- whole logs -------------------------------------------------------------------------------------------------------


def test_logs_are_merged_by_concatenation(tmp_path: Path) -> None:
    one, two, both, cat = (tmp_path / f"{n}.jsonl" for n in ("one", "two", "both", "cat"))
    write_log(one)
    with Log.open(two) as log:
        log.append(tasks()[0][0])
        log.append(trial(B, key=tasks()[0][0].key))
        log.append(Winner(tasks()[0][0].key, B, 1e-6, at=9.0))
    cat.write_bytes(one.read_bytes() + two.read_bytes())
    two.write_bytes(two.read_bytes() + b'{"dnnc": 1, "re')
    merged, joined = merge([one, two, one], both), read(cat)
    assert (merged.tasks, merged.trials, merged.winners(), merged.torn) == (
        joined.tasks,
        joined.trials,
        joined.winners(),
        0,
    )
    assert merged.winners()[tasks()[0][0].key] == B
    assert len(both.read_bytes().splitlines()) == len(set(cat.read_bytes().splitlines()))
    assert merge([two, one], two).winners() == merged.winners()  # in its place
    with pytest.raises(TuneError, match=r"cat\.jsonl exists"):
        merge([one, two], cat)
    with pytest.raises(TuneError, match="there is no tuning log"):
        merge([one, tmp_path / "three.jsonl"], tmp_path / "new.jsonl")
    assert not (tmp_path / "new.jsonl").exists() and not list(tmp_path.glob(".*"))


def test_pruning_keeps_the_winners(path: Path, tmp_path: Path) -> None:
    write_log(path)
    key = tasks()[1][0].key
    with Log.open(path) as log:
        log.append(Winner(key, B, 1e-6, at=9.0))
        log.append(trial(B, "wrong", key=key))
    before, size = read(path), path.stat().st_size
    few = prune(path, Keep(trials=1), tmp_path / "few.jsonl")
    assert path.stat().st_size == size and few.winners() == before.winners() and few.tasks == before.tasks
    assert all(few.best(k) == before.best(k) and len([t for t in few.trials[k] if t.ok]) == 1 for k in before.tasks)
    none = prune(path, Keep())
    assert none.winners() == before.winners() and none.sessions == before.sessions and path.stat().st_size < size
    assert none.trials == {key: [trial(B, "wrong", key=key)]}
    one = prune(path, Keep(task=lambda t: t.key == key))
    assert list(one.tasks) == [key] and one.winners() == {key: before.winners()[key]}


def test_a_writer_follows_a_log_that_is_pruned(path: Path) -> None:
    write_log(path)
    with Log.open(path) as log:
        prune(path, Keep())
        log.append(trial(A))
        path.unlink()
        log.append(trial(B))
    assert read(path).trials == {"k": [trial(B)]}


# --- the documented schema --------------------------------------------------------------------------------------------

Schema = dict[str, dict[str, str]]  # record -> field -> type


def documented() -> Schema:
    """The tables of docs/tuning_log.md."""
    text = (ROOT / "docs/tuning_log.md").read_text()
    out: Schema = {}
    for name, body in re.findall(r"^### (\w+)\n(.*?)(?=^##)", text, re.M | re.S):
        rows = [[c.strip() for c in line.strip("|").split("|")] for line in body.splitlines() if line.startswith("|")][
            2:
        ]
        out[name] = {field: t for field, t, *_ in rows}
    return out


def fits(value: Any, t: str) -> bool:
    """Is a value of a documented type?"""
    if t.endswith(" or null"):
        return value is None or fits(value, t.removesuffix(" or null"))
    if t.startswith("list of "):
        return isinstance(value, list) and all(fits(v, t.removeprefix("list of ")) for v in value)
    if t.startswith("object of "):
        return isinstance(value, dict) and all(fits(v, t.removeprefix("object of ")) for v in value.values())
    if t == "choice":
        return (
            isinstance(value, list)
            and len(value) == 2
            and fits(value[0], "text")
            and all(type(v) in (int, str) for v in value[1].values())
        )
    if t == "setting":
        return (
            set(value) == {"target", "numerics", "rounded"}
            and fits(value["target"], "text")
            and isinstance(value["rounded"], bool)
        )
    return type(value) in {"text": (str,), "integer": (int,), "number": (int, float), "true or false": (bool,)}[t]


def test_every_record_of_a_log_is_as_documented(path: Path) -> None:
    write_log(path)
    with Log.open(path) as log:
        log.append(Winner("k", A, 1e-6))
    schema, seen = documented(), set()
    for line in path.read_bytes().splitlines():
        data = json.loads(line)
        assert data.pop("dnnc") == 1
        fields = schema[kind := data.pop("record")]
        seen.add(kind)
        assert set(data) == set(fields)
        assert [n for n, v in data.items() if not fits(v, fields[n])] == []
    assert seen == set(KINDS)
    assert (
        not fits("1", "integer")
        and not fits([1, "a"], "list of number")
        and not fits(["a", {"k": 1.5}], "choice")
        and not fits(None, "text")
    )
