"""Measuring in other processes: right figures; schedules that crash, hang or compute wrongly do no harm."""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from planted import choice, relu_task

from dnnc.autotune.runners.device_runner import Drift
from dnnc.autotune.runners.machine import Machine, machine_of
from dnnc.autotune.runners.measure import ProcessRunner, at_device
from dnnc.autotune.runners.subprocess_runner import Child, Ended
from dnnc.autotune.runners.worker import build
from dnnc.autotune.search.inspect import look, tasks_of
from dnnc.autotune.search.task import Setting, Task, task_of
from dnnc.autotune.search.trial import Request, Trial
from dnnc.backends.base import Built
from dnnc.backends.cuda.bench import GpuKernel
from dnnc.backends.cuda.interpreted import InterpretedDevice
from dnnc.backends.llvm.bench import CpuBench
from dnnc.backends.runtime.operands import COLD, OUTPUT, WARM, Operands, Rotation
from dnnc.ir.errors import AccuracyError, TuneError
from dnnc.ir.graph.text import parse
from dnnc.passes.planning.fuse import plan_fusion
from dnnc.passes.schedule.problem import Choice
from dnnc.passes.schedule.step import candidates
from support.devices import interpreted
from support.times import in_a_quiet_round, quiet

CPU = "llvm -threads=1"
GPU = "cuda -arch=sm_90a"
TIMEOUT = 4.0  # of what takes microseconds, and may find the machine busy
MATMUL = "def f(x: f32[64, 256], *, w: f32[256, 256]):\n    return matmul(x, w)\n"


@pytest.fixture(scope="module")
def runner() -> Iterator[ProcessRunner]:
    """Of a CPU on which anything may be scheduled."""
    with ProcessRunner(CPU, builders=1, timeout=TIMEOUT, factory="planted:machine_of") as own:
        yield own


@pytest.fixture(scope="module")
def task() -> Task:
    return relu_task(Setting(machine_of(CPU).text))


def measured(runner: ProcessRunner, *requests: Request) -> dict[str, Trial]:
    """Trials by template."""
    trials = list(runner.measure(requests))
    assert Counter((t.task, t.choice) for t in trials) == Counter((r.task.key, r.choice) for r in requests)
    return {t.choice.template: t for t in trials}


# --- what schedules may do --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_crash_is_the_fault_of_one(runner: ProcessRunner, task: Task) -> None:
    names = "right", "crash", "map"
    knobs = {"map": (("lanes", 16), ("unroll", 1))}
    found = measured(runner, *(Request(task, Choice(n, knobs.get(n, ())), check=n == "map") for n in names))
    assert found["crash"].status == "crash" and "exit status -11" in found["crash"].error and not found["crash"].seconds
    for name in ("right", "map"):
        t = found[name]
        assert t.ok and len(t.seconds) == 3 and 1e-8 < t.median < 1e-2 and t.checked == (name == "map")
        assert (
            len(t.code) == 64
            and t.compile_seconds > 0
            and t.machine == machine_of(CPU).name
            and t.version
            and t.at > 1.7e9
        )


@pytest.mark.slow
def test_a_hang_ends_in_time(runner: ProcessRunner, task: Task) -> None:
    start = time.perf_counter()
    found = measured(runner, Request(task, choice("hang")), Request(task, choice("right", again=1)))
    assert found["hang"].status == "hang" and f"{TIMEOUT:.3g} s" in found["hang"].error and found["right"].ok
    assert time.perf_counter() - start < 20 * TIMEOUT


@pytest.mark.slow
def test_wrong_numbers_are_found_where_they_are_looked_for(runner: ProcessRunner, task: Task) -> None:
    wrong = choice("wrong")
    assert measured(runner, Request(task, wrong, repeats=1))["wrong"].ok
    trial = measured(runner, Request(task, wrong, repeats=1, check=True))["wrong"]
    assert trial.status == "wrong" and "float64 reference" in trial.error and not trial.checked
    assert measured(runner, Request(task, wrong, repeats=1))["wrong"].status == "wrong"  # from now on


@pytest.mark.slow
def test_what_strays_is_wrong_without_a_check(runner: ProcessRunner, task: Task) -> None:
    assert measured(runner, Request(task, choice("stray")))["stray"].status == "wrong"


@pytest.mark.slow
@pytest.mark.parametrize(
    "bad, said",
    [(choice("abort"), "ends the process"), (choice("magic"), "no template"), (choice("right", unknown=1), "KeyError")],
)
def test_what_does_not_build_is_said(runner: ProcessRunner, task: Task, bad: Choice, said: str) -> None:
    trial = measured(runner, Request(task, bad))[bad.template]
    assert trial.status == "build" and said in trial.error and trial.median == float("inf")


@pytest.mark.slow
def test_equal_code_is_measured_once(runner: ProcessRunner, task: Task) -> None:
    fast, same = choice("right", a=1), choice("right", a=2)
    first, second = runner.measure([Request(task, fast, repeats=4), Request(task, same, repeats=4)])
    assert first.seconds == second.seconds and len(first.seconds) == 4 and {first.choice, second.choice} == {fast, same}
    (again,) = runner.measure([Request(task, fast, repeats=2)])
    assert again.seconds == first.seconds
    (more,) = runner.measure([Request(task, fast, repeats=5)])
    assert len(more.seconds) == 5


@pytest.mark.slow
def test_slow_ones_are_stopped(runner: ProcessRunner) -> None:
    text = "def f(x: f32[512, 512], y: f32[512, 512]):\n    return matmul(x, y)\n"
    task = max((t for t, _ in tasks_of(text, Setting(machine_of(CPU).text))), key=lambda t: t.flops)
    slow = Choice("naive", ())
    (stopped,) = runner.measure([Request(task, slow, limit=1e-4, repeats=5)])
    assert stopped.ok and len(stopped.seconds) == 1 and stopped.median > 1e-4


def test_a_task_for_another_machine_is_refused(runner: ProcessRunner) -> None:
    other = relu_task(Setting("llvm -mcpu=haswell -threads=1"))
    with pytest.raises(TuneError, match=r"haswell.*this runner measures on"):
        next(runner.measure([Request(other, choice("right"))]))


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_runner_that_was_closed_starts_again(task: Task) -> None:
    runner = ProcessRunner(CPU, builders=1)
    (first,) = runner.measure([Request(task, Choice("naive", ()), repeats=1)])
    pid = runner._stations[0].child.pid
    runner.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    (second,) = runner.measure([Request(task, Choice("naive", ()), repeats=2)])
    runner.close()
    assert first.ok and second.ok and first.code == second.code


@pytest.mark.slow
def test_closing_ends_a_measurement_under_way(task: Task) -> None:
    runner = ProcessRunner(CPU, builders=1, timeout=60, factory="planted:machine_of")
    trials: list[Trial] = []
    thread = threading.Thread(target=lambda: trials.extend(runner.measure([Request(task, choice("hang"))])))
    thread.start()
    time.sleep(1.5)
    runner.close()
    thread.join(120)
    assert not thread.is_alive() and not trials


@pytest.mark.slow
def test_a_caller_that_wants_no_more_leaves_nothing_behind(task: Task) -> None:
    with ProcessRunner(CPU, builders=1, factory="planted:machine_of") as runner:
        trials = runner.measure([Request(task, c) for c in (choice("right"), choice("wrong"))])
        next(trials)
        child = runner._stations[0].child
        trials.close()  # type: ignore[attr-defined]
        assert not child.running and len(list(runner.measure([Request(task, choice("right"), repeats=1)]))) == 1


@pytest.mark.slow
def test_a_process_that_hangs_ends_with_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from planted import *; from dnnc.autotune.runners.measure import ProcessRunner; from "
        "dnnc.autotune.search.trial import Request\n"
        "import threading, time\n"
        f"runner = ProcessRunner({CPU!r}, builders=1, timeout=60, factory='planted:machine_of')\n"
        "request = Request(relu_task(Setting(runner.machine.text)), choice('hang'))\n"
        "threading.Thread(target=lambda: list(runner.measure([request])), daemon=True).start()\n"
        "while not (runner._stations and runner._stations[0].child.pid): time.sleep(0.02)\n"
        "time.sleep(1.5); print(runner._stations[0].child.pid, flush=True); time.sleep(60)\n"
    )
    path = str(Path(__file__).parents[1])
    parent = subprocess.Popen([sys.executable, script, path], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.kill(pid, 0)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 60
    while (
        time.monotonic() < end
        and Path(f"/proc/{pid}").exists()
        and "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]
    ):
        time.sleep(0.05)
    assert time.monotonic() < end


@pytest.mark.slow
def test_a_target_that_is_not_here_is_an_error() -> None:
    task = relu_task(Setting("cuda -arch=sm_90a"))
    with (
        ProcessRunner("cuda:7 -arch=sm_90a", builders=1) as runner,
        pytest.raises(TuneError, match=r"cannot measure for cuda:7 -arch=sm_90a.*(device|driver)"),
    ):
        list(runner.measure([Request(task, Choice("naive", ()))]))


@pytest.mark.slow
def test_a_child_says_its_last_words() -> None:
    child = Child(["build", CPU, "planted:machine_of"])
    child.start()
    os.kill(child.pid, signal.SIGSTOP)  # it would start anew if it had ended before it is asked
    threading.Timer(0.2, os.kill, (child.pid, signal.SIGKILL)).start()
    with pytest.raises(Ended, match="exit status -9"):
        child.ask({"op": "build"}, b"", 300.0)
    child.close()


# --- several devices --------------------------------------------------------------------------------------------------


def fakes(*knobs: dict[str, int], check: bool = False) -> list[Request]:
    task = relu_task(Setting("cuda -arch=sm_90a"))
    return [Request(task, choice("fake", **k), check=check) for k in knobs]


ROUND = itertools.count(1)


@pytest.fixture(scope="module")
def pair() -> Iterator[ProcessRunner]:
    with ProcessRunner("cuda -arch=sm_90a", devices=(0, 1), builders=1, factory="planted:gpu_of") as own:
        own._open()
        for station in own._stations:  # so that neither has done much before the other is there
            station.start()
        yield own


@pytest.mark.slow
@in_a_quiet_round
def test_two_devices_share_the_work(pair: ProcessRunner) -> None:
    first = 1000 * next(ROUND)  # what was measured before is not measured again
    trials = list(pair.measure(fakes(*({"us": first + n} for n in range(24)))))
    assert sorted(round(t.median * 1e6) for t in trials) == [first + n for n in range(24)]
    shares = Counter(t.machine for t in trials)
    quiet(set(shares) == {"device 0", "device 1"} and min(shares.values()) >= 3, str(shares))


@pytest.mark.slow
def test_finalists_meet_on_one_device(pair: ProcessRunner) -> None:
    trials = list(pair.measure(fakes(*({"us": 50 + n} for n in range(6)), check=True)))
    assert len({t.machine for t in trials}) == 1 and all(t.checked for t in trials)


@pytest.mark.slow
def test_a_device_that_fails_is_started_anew(pair: ProcessRunner) -> None:
    trials = list(pair.measure(fakes({"us": 80}, {"fails": 1}, {"us": 81}, {"spill": 8}, {"us": 80, "ignored": 1})))
    by = {t.choice: t for t in trials}
    assert by[choice("fake", fails=1)].status == "crash" and "does not answer" in by[choice("fake", fails=1)].error
    assert by[choice("fake", spill=8)].status == "build" and "8 bytes" in by[choice("fake", spill=8)].error
    assert (
        by[choice("fake", us=80)].seconds == by[choice("fake", us=80, ignored=1)].seconds
        and by[choice("fake", us=81)].ok
    )


@pytest.mark.slow
def test_a_wrong_finalist_fails(pair: ProcessRunner) -> None:
    (trial,) = pair.measure(fakes({"wrong": 1}, check=True))
    assert trial.status == "wrong" and trial.error == "it is off"


def test_device_numbers() -> None:
    assert (
        at_device("cuda", 1) == "cuda:1"
        and at_device("cuda -arch=sm_80", 2) == "cuda:2 -arch=sm_80"
        and at_device("cuda:1", 0) == "cuda"
    )
    assert at_device("llvm -threads=2", 1) == "llvm -threads=2"


# --- figures ----------------------------------------------------------------------------------------------------------


def test_disturbances_are_noticed_and_drift_is_taken_out() -> None:
    drift = Drift(1.0)
    assert drift.disturbed(1.0, 1.1) and drift.disturbed(1.1, 1.0) and not drift.disturbed(1.0, 1.04)
    assert drift.scaled(3.0, 1.5, 1.5) == 2.0 and drift.scaled(3.0, 1.02, 1.04) == 3.0


def loaded(machine: Machine, text: str, template: str) -> tuple[CpuBench, object, Task]:
    setting = Setting(machine.text)
    task = tasks_of(text, setting)[0][0]
    choice = next(c for c in candidates(task.rebuilt[2], machine.templates(setting)) if c.template == template)
    bench = machine.bench()
    return bench, bench.load(task, build(machine, task, choice)[0]), task


@pytest.mark.slow
@in_a_quiet_round
def test_times_grow_with_the_work() -> None:
    machine = machine_of(CPU)
    times = []
    for n in (128, 512):
        _, kernel, task = loaded(machine, MATMUL.replace("64, 256", f"{n}, 256"), "contraction")
        times.append(min(kernel.measure() for _ in range(3)))  # type: ignore[attr-defined]
        assert times[-1] > task.flops / 1e12
    quiet(2 < times[1] / times[0] < 8, f"{times}")


@pytest.mark.slow
def test_weights_come_from_another_place_in_each_call() -> None:
    machine = machine_of(CPU)
    _, kernel, task = loaded(machine, MATMUL, "contraction")
    data = kernel.data  # type: ignore[attr-defined]
    roles = [o.role for o in Operands(task).each]
    assert roles == [WARM, COLD, OUTPUT] and data.rotation.sets > 8
    table = data.table
    assert len(set(table[:, 1])) == data.rotation.sets and (np.diff(np.sort(table[:, 1])) >= 256 * 256 * 4).all()
    assert len(set(table[:, 0])) == len(set(table[:, 2])) == 1 and not (table % 64).any()
    assert np.ptp(table[:, 1]) + 256 * 256 * 4 >= machine_last_level()
    before = data.next
    kernel.run(3)  # type: ignore[attr-defined]
    assert data.next == (before + 3) % data.rotation.sets


def machine_last_level() -> int:
    from dnnc.backends.llvm.features import last_level_cache

    return last_level_cache()


def test_operands_of_one_type_do_not_overlap() -> None:
    text = (
        "def f(x: f32[8, 64], *, w: f32[64, 32], b: f32[32], c: f16[32]):\n"
        "    return add(add(matmul(x, w), b), cast(c, to=f32))\n"
    )
    machine = machine_of(GPU)
    task = max((t for t, _ in tasks_of(text, Setting(machine.text))), key=lambda t: len(t.constants))
    operands = Operands(task)
    r = Rotation.over(operands, 100_000, 64, 256)
    spans = sorted(
        (operands.each[k].dtype.name, r.offset(k, call), operands.each[k].nbytes)
        for k in r.strides
        for call in range(r.sets)
    )
    assert len(r.strides) >= 2 and r.sets > 1
    for (t, at, n), (u, following, _) in itertools.pairwise(spans):
        assert t != u or at + n <= following
    assert all(
        at + n <= r.pools[operands.each[k].dtype]
        for k in r.strides
        for at, n in [(r.offset(k, r.sets - 1), operands.each[k].nbytes)]
    )


def test_kernels_that_work_in_place_start_from_the_same_numbers() -> None:
    machine = machine_of(CPU)
    g = parse("def f(x: f32[64, 64]):\n    return mul(x, 0.5)\n")
    task = task_of(g, plan_fusion(g).groups[0], {g.outputs[0]: g.inputs[0]}, Setting(machine.text))
    bench = machine.bench()
    kernel = bench.load(task, build(machine, task, Choice("naive", ()))[0])
    ((part, drawn),) = kernel.data.inplace
    kernel.run(200)
    assert np.abs(part.view(np.float32)).max() == 0 and np.abs(drawn.view(np.float32)).max() > 0.9  # denormals are zero
    kernel.data.refresh()
    assert (part == drawn).all() and kernel.measure() > 0


def test_indices_lie_within_their_axis() -> None:
    ((task, _),) = tasks_of(
        "def f(x: f32[50, 8], i: i64[1000]):\n    return gather(x, i, axis=0)\n", Setting(machine_of(CPU).text)
    )
    operands = Operands(task)
    (indices,) = (a.view(np.int64) for v, a in operands.warm().items() if v.type.dtype.name == "i64")
    assert -50 <= indices.min() and indices.max() < 50 and len(set(indices.tolist())) > 40


# --- a GPU that is an interpreter -------------------------------------------------------------------------------------


def on_device(text: str, change: str = "", seconds: float = 1e-6) -> tuple[InterpretedDevice, GpuKernel, str, Choice]:
    device = InterpretedDevice(seconds)
    machine = Machine(interpreted(device))
    setting = Setting(machine.text)
    task = tasks_of(text, setting)[-1][0]
    chosen = candidates(task.rebuilt[2], machine.templates(setting))[0]
    built, shown = build(machine, task, chosen)
    if change:
        old, new = change.split(" -> ")
        assert old in shown
        built = Built(built.symbol, built.code.replace(old.encode(), new.encode()), built.facts)
    return device, machine.bench().load(task, built), shown, chosen


@pytest.mark.slow
def test_a_graph_of_calls_is_timed() -> None:
    device, kernel, shown, chosen = on_device("def f(x: f32[4, 8], *, w: f32[8]):\n    return relu(add(x, w))\n")
    assert kernel.measure() == pytest.approx(1e-6)  # a call on this device
    assert kernel.calls == 100 and device.launched >= 300
    assert kernel.measure(limit=1e-7) == pytest.approx(1e-6)
    assert kernel.check(shown, chosen)
    cold = {kernel.data.addresses(k)[1] for k in range(100)}
    warm = {tuple(a[:1] + a[2:]) for a in (kernel.data.addresses(k) for k in range(100))}
    assert len(cold) == 100 and len(warm) == 1


@pytest.mark.slow
def test_a_slow_kernel_is_given_up() -> None:
    device, kernel, _, _ = on_device("def f(x: f32[4, 8]):\n    return relu(x)\n", seconds=1e-4)
    assert kernel.measure(limit=1e-5) == pytest.approx(1e-4) and device.launched < 20
    assert kernel.graph is None  # the next time it is measured anew


@pytest.mark.slow
def test_a_quick_kernel_is_not_given_up_for_the_gap_between_two_graphs() -> None:
    """A graph of two calls of a microsecond takes several."""
    _, kernel, _, _ = on_device("def f(x: f32[4, 8]):\n    return relu(x)\n")
    assert kernel.measure(limit=1e-7) == pytest.approx(1e-6) and kernel.calls == 100


@pytest.mark.slow
def test_the_gate_sees_the_device() -> None:
    _, kernel, shown, chosen = on_device("def f(x: f32[4, 8]):\n    return relu(x)\n", "fmax(0.0 -> fmax(0.25")
    assert kernel.measure() > 0
    with pytest.raises(AccuracyError, match="float64 reference"):
        kernel.check(shown, chosen)


@pytest.mark.slow
def test_a_kernel_that_strays_on_the_device_is_wrong() -> None:
    _, kernel, _, _ = on_device("def f(x: f32[4, 8]):\n    return relu(x)\n")
    at = kernel.data.memory.address + kernel.data.starts[-1] - 1
    kernel.bench.device.fill(at, 0, 1, 0)
    with pytest.raises(AccuracyError, match="outside"):
        kernel.measure()


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "layer.txt"
    file.write_text(MATMUL)
    look([str(file), "--target", CPU, "--choices", "3", "--repeats", "1", "--builders", "1", "--check"])
    out = capsys.readouterr().out
    assert out.startswith("matmul: contraction") and out.count(" right  contraction(") == 3 and "GFLOP/s" in out
    rates = [float(line.split()[2]) for line in out.splitlines() if " GFLOP/s" in line]
    assert rates == sorted(rates, reverse=True)
    look([str(file), "--target", CPU, "--choices", "1", "--repeats", "2", "--builders", "1", "--json"])
    trial = Trial.from_json(json.loads(capsys.readouterr().out))
    assert trial.ok and len(trial.seconds) == 2 and statistics.median(trial.seconds) == trial.median


@pytest.mark.slow
def test_the_command_says_what_is_wrong() -> None:
    with pytest.raises(SystemExit, match="error: target='cuda:9'"):
        look(["--target", "cuda:9"])
