"""`dnnc log` and `--tune LOG`: what they print, what their JSON holds, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import dnnc, dnnc_json

from dnnc.autotune.log.file import Log, read
from dnnc.autotune.log.record import Winner
from dnnc.autotune.search.trial import Trial
from dnnc.options import CompileOptions
from support.tuning_logs import TEXT, other, tasks, write_log

COMMANDS = ("show", "best", "merge", "prune")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a model and a log, made the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DNNC_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "g.py").write_text(TEXT + "\n")
    (tmp_path / "g.jsonl").write_text("mine")
    write_log(tmp_path / "m.jsonl")
    yield tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    assert f"Example:  dnnc log {command}" in dnnc("log", command, "--help")
    assert command in dnnc("log", "--help")


# --- looking ----------------------------------------------------------------------------------------------------------


def test_show_lists_sessions_and_tasks() -> None:
    text = dnnc("log", "show", "m.jsonl")
    count = sum(1 for ts in read("m.jsonl").trials.values() for _ in ts)
    assert (
        f"{len(tasks())}, {len(tasks())} with a winner" in text and f"trials    {count}: " in text and "znver5" in text
    )
    assert "12.50 s" in text and "1970" in text
    for t, _ in tasks():
        (line,) = [x for x in text.splitlines() if x.strip().startswith(t.key[:10])]
        assert t.name in line and "9 us" in line and "2.00x" in line
    assert "torn" not in text and "too many registers" not in text


def test_show_of_a_task_lists_its_trials_fastest_first() -> None:
    t = next(t for t, _ in tasks() if t.kind == "contraction")
    for pattern in (t.name, f"{t.name[:3]}*", t.key[:8], t.key[:8].upper()):
        text = dnnc("log", "show", "m.jsonl", "--task", pattern)
        assert t.graph.strip() in text and str(other(t)) in text
        assert "too many registers" in text and "really" not in text and "exp(" not in text
    data = dnnc_json("log", "show", "m.jsonl", "--task", t.key[:8])
    (found,) = data["tasks"]
    times = [m["median"] for m in found["measured"]]
    assert times[-1] is None and times[:-1] == sorted(times[:-1]) and found["measured"][-1]["status"] == "build"
    assert found["best"]["median"] == times[0] and found["winner"]["choice"] == [
        other(t).template,
        dict(other(t).knobs),
    ]
    assert data["winners"] == len(tasks()) and data["sessions"][0]["calls"] == {x.key: n for x, n in tasks()}


def test_show_of_a_log_that_is_torn_or_empty() -> None:
    with open("m.jsonl", "ab") as f:
        f.write(b'{"dnnc": 1')
    assert "10 bytes of a last line are left out" in dnnc("log", "show", "m.jsonl")
    assert dnnc_json("log", "show", "m.jsonl")["torn_bytes"] == 10
    Path("empty.jsonl").write_bytes(b"")
    assert "0, 0 with a winner" in dnnc("log", "show", "empty.jsonl") and dnnc_json("log", "best", "empty.jsonl") == []


def test_best_says_what_is_used_and_what_is_not() -> None:
    (a, _), (b, _), *_ = tasks()
    with Log.open("few.jsonl") as log:
        log.append(a)
        log.append(Trial(a.key, other(a), "ok", (4e-6,)))
        log.append(b)
        log.append(Trial(b.key, other(b), "crash", error="signal 11"))
        log.append(Winner(b.key, other(b), 3e-6))
    text = dnnc("log", "best", "few.jsonl")
    assert (
        "0 of 2 tasks have a winner" in text
        and "4 us" in text
        and "no: not compared yet" in text
        and "no: nothing ran" in text
    )
    text = dnnc("log", "best", "m.jsonl")
    assert f"{len(tasks())} of {len(tasks())} tasks have a winner" in text and text.count("2.00x") == len(tasks())
    assert [x["winner"]["seconds"] for x in dnnc_json("log", "best", "m.jsonl")] == [0.9e-5] * len(tasks())


# --- writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_merge_and_prune() -> None:
    (first, _), *_ = tasks()
    with Log.open("new.jsonl") as log:
        log.append(Trial(first.key, other(first), "ok", (1e-6,)))
    assert "all.jsonl" in dnnc("log", "merge", "m.jsonl", "new.jsonl", "-o", "all.jsonl")
    assert read("all.jsonl").best(first.key).seconds == (1e-6,)  # type: ignore[union-attr]
    data = dnnc_json("log", "prune", "all.jsonl", "--trials", "1", "-o", "small.jsonl")
    assert (
        data["tasks"] == data["trials"] == data["winners"] == len(tasks())
        and data["bytes"] == Path("small.jsonl").stat().st_size
    )
    assert dnnc_json("log", "prune", "all.jsonl", "--task", first.name)["tasks"] == 1  # in its place
    assert list(read("all.jsonl").tasks) == [first.key]
    assert dnnc_json("log", "prune", "m.jsonl", "--target", "x86-64-v3")["tasks"] == len(tasks())


MISTAKES = [
    ("log show nowhere.jsonl", 1, "TuneError: there is no tuning log nowhere.jsonl"),
    ("log show g.py", 1, "g.py, line 1: it is no JSON"),
    ("log show m.jsonl --task conv7", 1, "no task is called 'conv7'; there are pack, "),
    ("log merge m.jsonl", 2, "--output"),
    ("log merge m.jsonl m.jsonl -o g.jsonl", 1, "g.jsonl exists"),
    ("log merge m.jsonl m.jsonl -o g.py", 2, "expected a .jsonl or .log file"),
    ("log prune m.jsonl -o g.onnx", 2, "expected a .jsonl or .log file"),
    ("log prune m.jsonl --target cuda", 1, "would keep none of its 4 tasks"),
    ("compile g.py --tune nowhere.jsonl", 1, "TuneError: there is no tuning log nowhere.jsonl"),
    ("compile g.py --tune g.py", 1, "line 1: it is no JSON"),
]


@pytest.mark.parametrize(("line", "code", "message"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_mistakes(line: str, code: int, message: str) -> None:
    before = Path("m.jsonl").read_bytes()
    assert message in " ".join(dnnc(*line.split(), code=code).split())
    assert Path("m.jsonl").read_bytes() == before


# --- compiling --------------------------------------------------------------------------------------------------------


def write_for_here() -> None:
    from dnnc.autotune.search.task import extract
    from dnnc.tune_option import setting_of
    from support.tuning_logs import program

    opts = CompileOptions(target="llvm -threads=2")
    with Log.open("here.jsonl") as log:
        for t, _ in extract(program(opts), setting_of(opts)):
            log.append(t)
            log.append(Winner(t.key, other(t), 1e-5, 2e-5))


@pytest.mark.slow
def test_compile_and_others_take_a_log() -> None:
    write_for_here()
    wanted = {t.name: str(other(t)) for t in read("here.jsonl").tasks.values()}
    where = ("g.py", "--target", "llvm -threads=2", "--tune", "here.jsonl")
    report = dnnc_json("compile", *where, "-o", "g.dnnc")
    assert {k["name"]: k["choice"] for k in report["programs"][0]["kernels"]} == wanted
    assert f"tuned: {len(wanted)} of {len(wanted)} kernels from here.jsonl" in dnnc("compile", *where)
    kernels = dnnc_json(
        "inspect", "g.py", "--target", "llvm -threads=2", "--tune", "here.jsonl", "--stage", "operator"
    )["kernels"]
    assert {k["name"]: k["schedule"] for k in kernels} == wanted
    assert dnnc_json("verify", *where)["right"] is True
    assert dnnc_json("run", *where)["outputs"] and dnnc_json("run", "g.dnnc")["outputs"]
    assert "--tune cannot be chosen any more" in dnnc("run", "g.dnnc", "--tune", "here.jsonl", code=1)
