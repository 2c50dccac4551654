"""Measuring over a Ray cluster: workers die, hang, differ and are not there, and each request has one trial all the
same.

The cluster is real; its two machines are processes here, one of one core, one of two cores and of two GPUs that nobody
asks anything of. Outposts are fakes but for one test; a schedule's knob `x` says what happens to the worker that
measures it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dnnc.autotune.runners.ray_runner import Outpost, Place, RayRunner, open_outpost, places
from dnnc.autotune.search.inspect import schedules, tasks_of
from dnnc.autotune.search.task import Setting, Task
from dnnc.autotune.search.trial import OK, Request, Trial
from dnnc.backends.registry import open_backend
from dnnc.ir.errors import TargetError, TuneError
from dnnc.ir.target import parse_target
from dnnc.passes.schedule.problem import Choice
from support.times import in_a_quiet_round, quiet

SECONDS = 0.02  # that a fake measurement takes


class Fake:
    """A runner whose seconds are the knob x, and whose `code` says where it ran. `does`: what it does first, by x."""

    def __init__(self, does: Callable[[int], None] = lambda x: None) -> None:
        self.does = does

    def measure(self, requests: Sequence[Request]) -> Iterator[Trial]:
        for r in requests:
            x = int(dict(r.choice.knobs)["x"])
            time.sleep(SECONDS)
            self.does(x)
            where = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            yield Trial(r.task.key, r.choice, OK, (float(x),), code=f"{os.getpid()}", machine=where)

    def close(self) -> None:
        pass


def outpost(target: str, cores: int) -> Outpost:
    return Outpost(target, "fake", Fake())


def outpost_by_cores(target: str, cores: int) -> Outpost:
    """As on machines that differ: the CPU is called cpu1 on the one of one core."""
    return Outpost(f"{target} -mcpu=cpu{cores}", f"fake{cores}", Fake())


def request(x: int, target: str = "llvm") -> Request:
    return Request(Task(f"t@{target}", "t", "map", "", None, (), Setting(target), 0), Choice("fake", (("x", x),)))


def asked(requests: Sequence[Request]) -> Counter[Any]:
    return Counter((r.task.key, r.choice) for r in requests)


def answered(trials: Sequence[Trial]) -> Counter[Any]:
    return Counter((t.task, t.choice) for t in trials)


# --- what needs no cluster --------------------------------------------------------------------------------------------


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(TuneError, match=r"pip install -e '\.\[ray\]'"):
        RayRunner("llvm")


@pytest.mark.slow
@in_a_quiet_round
def test_an_address_where_nobody_listens_fails_at_once() -> None:
    with socket.socket() as s:  # bound and not listening: nobody else gets the port
        s.bind(("127.0.0.1", 0))
        start = time.monotonic()
        with pytest.raises(TuneError, match=r"no Ray cluster answers at 127.0.0.1:\d+: .*refused.*ray start --head"):
            RayRunner("llvm", f"127.0.0.1:{s.getsockname()[1]}")
    quiet(time.monotonic() - start < 5)


@pytest.mark.slow
def test_a_target_that_is_none() -> None:
    with pytest.raises(TargetError, match="there is no such backend; expected llvm, cuda"):
        RayRunner("quantum")


def node(**resources: float) -> dict[str, Any]:
    return {"NodeID": "n", "NodeManagerHostname": "host", "Alive": True, "Resources": resources}


def test_a_machine_measures_for_one_target_on_each_of_its_devices() -> None:
    cpu, gpu = parse_target("llvm"), parse_target("cuda")
    assert list(places(node(CPU=8.0), [gpu, cpu])) == [(Place("n", "host", 0), cpu, 8, {"num_cpus": 8, "num_gpus": 0})]
    shares = [
        (p.device, target, cores, taken) for p, target, cores, taken in places(node(CPU=8.0, GPU=2.0), [gpu, cpu])
    ]
    assert shares == [(k, gpu, 4, {"num_cpus": 4, "num_gpus": 1}) for k in range(2)]
    assert [target for _, target, _, _ in places(node(CPU=8.0, GPU=2.0), [cpu, gpu])] == [cpu]
    assert list(places(node(memory=1e9), [gpu, cpu])) == [], "a head that computes nothing"
    assert list(places({**node(CPU=8.0), "Alive": False}, [cpu])) == []
    assert [cores for _, _, cores, _ in places(node(CPU=1.0, GPU=2.0), [gpu])] == [1, 1]


# --- a cluster of its own ---------------------------------------------------------------------------------------------

SCRIPT = """
    import os, signal, sys
    import ray
    sys.path.insert(0, sys.argv[1])
    import test_ray_runner as t
    from dnnc.autotune.runners.ray_runner import RayRunner

    ray.cloudpickle.register_pickle_by_value(t)
    with RayRunner("llvm", "local", outpost=t.outpost) as runner:
        (worker,) = runner.workers
        requests = [t.request(x) for x in range(12)]
        for k, trial in enumerate(runner.measure(requests)):
            if not k:
                os.kill(worker.pid, signal.SIGKILL)
        assert trial.ok and runner.workers[0].pid != worker.pid
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
        pid = runner.workers[0].pid
    assert not ray.is_initialized()
    print(pid)
"""


@pytest.mark.slow
def test_nothing_is_printed_and_nothing_is_left() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    assert ran.stdout.strip().isdigit(), ran.stdout
    end = time.monotonic() + 60
    while time.monotonic() < end and Path(f"/proc/{ran.stdout.strip()}").exists():
        time.sleep(0.05)
    assert not Path(f"/proc/{ran.stdout.strip()}").exists()


# --- a cluster --------------------------------------------------------------------------------------------------------


def started(start: Callable[[], Any], tries: int = 4) -> Any:
    """Ray gives a node 30 s to start, which a busy machine may take."""
    for _ in range(tries - 1):
        try:
            return start()
        except Exception as e:
            if "timed out during startup" not in str(e):
                raise
    return start()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    import ray
    from ray import cloudpickle
    from ray.cluster_utils import Cluster

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers do not have this file on their path
    config = {
        "health_check_initial_delay_ms": 0,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 10,
    }  # 15 s by default
    made = started(
        lambda: Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "_system_config": config}
        )
    )
    started(lambda: made.add_node(num_cpus=2, num_gpus=2))
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def join(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RayRunner]]:
    monkeypatch.setattr(
        "dnnc.autotune.runners.ray_runner.GRACE_SECONDS", 300.0
    )  # a busy machine starts one worker long after another
    made: list[RayRunner] = []

    def joined(target: str | Sequence[str] = "llvm", **options: Any) -> RayRunner:
        made.append(RayRunner(target, cluster.address, **{"outpost": outpost, "start": 300.0, **options}))
        return made[-1]

    yield joined
    for runner in made:
        runner.close()


@pytest.mark.slow
def test_every_request_has_one_trial_though_a_worker_is_killed(join: Callable[..., RayRunner]) -> None:
    runner = join()
    pids = [w.pid for w in runner.workers]
    assert len(set(pids)) == 2, runner.notes
    requests = [request(x) for x in range(60)]
    trials = []
    for t in runner.measure(requests):
        if not trials:  # the other worker is in the middle of a parcel
            (victim,) = (pid for pid in pids if str(pid) != t.code)
            os.kill(victim, signal.SIGKILL)
        trials.append(t)
    assert answered(trials) == asked(requests)
    assert all(t.ok and t.median == dict(t.choice.knobs)["x"] for t in trials)
    assert any(f"process {victim}: The actor is dead because its worker process has died" in n for n in runner.notes), (
        runner.notes
    )
    late = time.monotonic() + 300  # a new process takes seconds to start, more on a busy machine
    while len({t.code for t in runner.measure(requests)}) < 2:
        assert time.monotonic() < late, "no other worker has taken its place"
    assert victim not in [w.pid for w in runner.workers]


@pytest.mark.slow
def test_requests_go_to_workers_of_their_target_and_are_lost_with_the_last(
    cluster: Any, join: Callable[..., RayRunner]
) -> None:
    node = started(lambda: cluster.add_node(num_cpus=3))
    runner = join(outpost=outpost_by_cores)
    pid_of = {w.target: str(w.pid) for w in runner.workers}
    assert set(pid_of) == {f"llvm -mcpu=cpu{k}" for k in (1, 2, 3)}
    requests = [request(x, f"llvm -mcpu=cpu{x % 4 + 1}") for x in range(80)]
    trials = []
    for t in runner.measure(requests):
        trials.append(t)
        if sum(t.ok for t in trials) == 1:
            cluster.remove_node(node, allow_graceful=False)
            os.kill(int(pid_of["llvm -mcpu=cpu3"]), signal.SIGKILL)
    assert answered(trials) == asked(requests)
    assert all(t.code == pid_of[t.task.removeprefix("t@")] for t in trials if t.ok)
    lost: dict[str, list[str]] = {}
    for t in trials:
        if not t.ok:
            assert t.status == "lost"
            lost.setdefault(t.task, []).append(t.error)
    assert sorted(lost) == ["t@llvm -mcpu=cpu3", "t@llvm -mcpu=cpu4"], "the others have their workers"
    never, gone = lost["t@llvm -mcpu=cpu4"], lost["t@llvm -mcpu=cpu3"]
    assert set(never) == {
        "no worker of the target 'llvm -mcpu=cpu4'; workers there are: llvm -mcpu=cpu1, llvm -mcpu=cpu2, llvm "
        "-mcpu=cpu3"
    }
    assert all(
        "no worker of the target 'llvm -mcpu=cpu3'; workers there are: llvm -mcpu=cpu1, llvm -mcpu=cpu2; " in e
        for e in gone
    ), gone
    assert len(never) == 20 and len(gone) >= 10
    assert all(f"process {pid_of['llvm -mcpu=cpu3']}: " in e for e in gone), "it says which worker went"


@pytest.mark.slow
def test_machines_that_differ_do_not_share_a_target(join: Callable[..., RayRunner]) -> None:
    runner = join(outpost=lambda target, cores: Outpost(target, f"fake{cores}", Fake()))
    assert len(runner.workers) == 1
    assert any("and times must compare" in n for n in runner.notes), runner.notes


@pytest.mark.slow
def test_a_worker_that_hangs_fails_or_is_ended_by_a_request(join: Callable[..., RayRunner], tmp_path: Path) -> None:
    def does(x: int) -> None:
        if x == 30:
            os._exit(1)
        if x in (3, 14) and not (tmp_path / str(x)).exists():  # the first time
            (tmp_path / str(x)).touch()
            if x == 14:
                raise OSError("no space left")
            time.sleep(600)

    runner = join(outpost=lambda target, cores: Outpost(target, "fake", Fake(does)), patience=6.0, parcel=4)
    requests = [request(x) for x in range(40)]
    trials = list(runner.measure(requests))
    assert answered(trials) == asked(requests)
    (bad,) = (t for t in trials if not t.ok)
    assert (
        dict(bad.choice.knobs)["x"] == 30
        and bad.status == "lost"
        and bad.error.startswith("3 workers went while they measured it: ")
    )
    assert any("it gave no answer in time" in n for n in runner.notes), runner.notes
    assert any("OSError: no space left" in n for n in runner.notes), runner.notes


@pytest.mark.slow
def test_a_measure_that_is_left_early_does_not_answer_the_next(join: Callable[..., RayRunner]) -> None:
    runner = join()
    left = runner.measure([request(x) for x in range(40)])
    next(left)
    requests = [request(x) for x in range(100, 110)]
    assert answered(list(runner.measure(requests))) == asked(requests)
    runner.close()
    assert len(list(left)) < 39, "it ends"
    with pytest.raises(TuneError, match="is closed"):
        list(runner.measure(requests))
    runner.close()


@pytest.mark.slow
def test_each_gpu_has_a_worker_that_sees_it_alone(join: Callable[..., RayRunner]) -> None:
    runner = join("cuda:1")  # a number means a device of this machine, and nothing in a cluster
    assert sorted(w.place.device for w in runner.workers) == [0, 1]
    trials = list(runner.measure([request(x, "cuda") for x in range(20)]))
    assert {t.machine for t in trials} == {"0", "1"}


@pytest.mark.slow
def test_no_machine_has_the_target(join: Callable[..., RayRunner]) -> None:
    def refuses(target: str, cores: int) -> Outpost:
        raise TargetError("this machine is an abacus")

    with pytest.raises(
        TuneError,
        match=r"no machine of the Ray cluster measures for llvm: .*, device 0: TargetError: this machine is an abacus",
    ):
        join(outpost=refuses)


@pytest.mark.slow
def test_kernels_are_measured(join: Callable[..., RayRunner]) -> None:
    text = "def layer(x: f32[32, 64], *, w: f32[64, 32]):\n    return relu(matmul(x, w))\n"
    setting = Setting(open_backend("llvm -threads=1").text)
    ((task, _),) = tasks_of(text, setting)
    requests = [Request(task, c, repeats=2, check=True) for c in schedules(task, 4)]
    runner = join("llvm -threads=1", outpost=open_outpost)
    trials = list(runner.measure(requests))
    assert answered(trials) == asked(requests)
    assert sum(t.ok and t.checked and len(t.seconds) == 2 and 0 < t.median < 1e-2 for t in trials) >= 3, trials
    elsewhere = Request(replace(task, setting=Setting("llvm -mcpu=abacus")), requests[0].choice)
    (t,) = runner.measure([elsewhere])
    assert t.status == "lost" and setting.target in t.error
