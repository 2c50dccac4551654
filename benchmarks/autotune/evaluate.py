"""How good the cost model is on kernels that it has not seen: tables out of the logs beside this script, five-fold by
tasks.

    python benchmarks/autotune/evaluate.py cpu [--objective gain]
    python benchmarks/autotune/evaluate.py cpu --whole LOG        the model of those logs on tasks of this one, whose
                                                                  whole spaces were measured, and a search that begins
                                                                  with it and learns from what it measures

The goal: the 8 best of a model's list hold a schedule of at least 95 % of the best measured speed for 90 % of the
tasks, and it needs a fifth of the trials that a random order needs until it gets there. `gather.py --seed 1 --each 512`
measures whole spaces of other workloads.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from dataset import MARGINS, Data, best_margins, calibrated, gains, load, out_of_fold, reached, trials_to
from gather import hopeful
from rich.console import Console
from rich.table import Table
from train import fresh

from dnnc.autotune.model.cost_model import Analytic, CostModel
from dnnc.autotune.model.features import NAMES, PROBLEMS
from dnnc.autotune.model.roofline import plan
from dnnc.autotune.model.work import work_of
from dnnc.autotune.runners.machine import machine_of
from dnnc.autotune.search.space import space
from dnnc.autotune.search.task_search import TaskSearch
from dnnc.autotune.search.trial import OK, Trial

Array = np.ndarray[Any, Any]
COUNTS = (1, 2, 4, 8, 16)
MORE_COUNTS = (*COUNTS, 32, 64, 128)  # of whole spaces
WHOLE = 0.95  # share of a space that was measured, which counts as all of it
GOOD = 0.95
DRAWS = 20  # of random orders
BATCH, SEARCHED = (
    4,
    64,
)  # schedules that a search measures before it learns, and in all; what is left comes in the model's order
FIRST = 1e6  # more than there are schedules, or between two scores


def template_order(data: Data) -> Array:
    """The templates' order as scores: schedules in the order of their log, which is that of the space."""
    return -np.arange(len(data.x), dtype=float)


def searched(data: Data, model: CostModel) -> Array:
    """A search's order of schedules as scores: it begins with the default and learns from each batch."""
    scores = model.predict(data.x) - FIRST
    for g, task in enumerate(data.tasks):
        rows = data.rows(g)
        order = sorted(rows, key=lambda r: r != data.defaults[g])
        at = {data.choices[r]: r for r in order}
        search, done = TaskSearch(task, list(at), data.x[order], model), 0
        while done < SEARCHED and (batch := search.propose(BATCH)):
            for c in batch:
                seconds = float(data.pick[at[c]])
                search.add(
                    [Trial(task.key, c, OK, (seconds,)) if np.isfinite(seconds) else Trial(task.key, c, "build")]
                )
                scores[at[c]] = -done
                done += 1
    return scores


def curves(data: Data, models: dict[str, Array], counts: tuple[int, ...] = COUNTS) -> Table:
    table = Table(
        title=f"{len(data.tasks)} tasks, {len(data.x)} trials: share of the best speed after so many trials, mean of "
        f"tasks (part of tasks at {GOOD:.0%})"
    )
    table.add_column("ranked by")
    for n in counts:
        table.add_column(str(n), justify="right")
    table.add_column(f"trials to {GOOD:.0%}: mean, p90", justify="right")
    for name, scores in models.items():
        found, trials = reached(data, scores, counts), trials_to(data, scores, GOOD)
        table.add_row(name, *(_cell(found[n]) for n in counts), f"{trials.mean():.2f}, {np.percentile(trials, 90):.0f}")
    drawn = [np.random.default_rng(k).random(len(data.x)) for k in range(DRAWS)]
    found = {n: np.concatenate([reached(data, d, (n,))[n] for d in drawn]) for n in counts}
    trials = np.concatenate([trials_to(data, d, GOOD) for d in drawn])
    table.add_row("chance", *(_cell(found[n]) for n in counts), f"{trials.mean():.2f}, {np.percentile(trials, 90):.0f}")
    return table


def _cell(shares: Array) -> str:
    return f"{shares.mean():.3f} ({(shares >= GOOD).mean():.0%})"


def by_kind(data: Data, scores: Array) -> Table:
    table = Table(title="by kind of problem and template of the default")
    for column in (
        "kind",
        "template",
        "tasks",
        "trials",
        "top 1",
        "top 8",
        "default",
        f"trials to {GOOD:.0%}",
        "at random",
    ):
        table.add_column(column, justify="left" if column in ("kind", "template") else "right")
    top, trials, chance = (
        reached(data, scores, (1, 8)),
        trials_to(data, scores, GOOD),
        trials_to(data, np.random.default_rng(0).random(len(data.x)), GOOD),
    )
    kinds = data.x[:, [NAMES.index(f"kind {k}") for k in PROBLEMS]].argmax(1)
    of: dict[tuple[str, str], list[int]] = {}
    for g in range(len(data.tasks)):
        rows = data.rows(g)
        of.setdefault((PROBLEMS[kinds[rows[0]]], data.choices[max(data.defaults[g], rows[0])].template), []).append(g)
    for (kind, template), found in sorted(of.items()):
        at = np.array(found)
        share = [_of_best(data, g) for g in found if data.defaults[g] >= 0]
        row = (
            str(len(at)),
            str(sum(len(data.rows(g)) for g in found)),
            _cell(top[1][at]),
            _cell(top[8][at]),
            _cell(np.array(share or [0.0])),
        )
        table.add_row(kind, template, *row, f"{trials[at].mean():.2f}", f"{chance[at].mean():.2f}")
    return table


def _of_best(data: Data, g: int) -> float:
    """The default's speed as a share of the best one."""
    rows = data.rows(g)
    return min(float(data.judge[rows[np.argmin(data.pick[rows])]] / data.judge[data.defaults[g]]), 1.0)


def margins(data: Data, scores: Array, spread: Array) -> Table:
    table = Table(
        title="taking the model's choice instead of the template's, where the gain is sure to exceed a margin; at last "
        "that of each template"
    )
    for column in ("margin", "template", "tasks", "changed", "mean speed-up", "slower by 2 %", "worst"):
        table.add_column(column, justify="left" if column == "template" else "right")
    found = [("all", g) for g in gains(data, scores, spread, MARGINS)]
    found += [(t, gains(data, scores, spread, [m], t)[0]) for t, m in best_margins(data, scores, spread).items()]
    for template, g in found:
        figures = (f"{g.changed:.0%}", f"{g.mean:.4f}", f"{g.slower:.1%}", f"{g.worst:.2f}")
        table.add_row(f"{np.expm1(g.margin):.0%}", template, str(g.tasks), *figures)
    return table


def measured_whole(data: Data) -> Data:
    """Without the tasks that the time did not suffice for. `gather` never measures hopeless ones."""
    groups = []
    for g, task in enumerate(data.tasks):
        machine = machine_of(task.setting.target)
        problem = task.rebuilt[2]
        found, work = space(problem, machine.templates(task.setting)), work_of(problem)
        likely, _ = hopeful(found, [plan(work, c, machine.limits).seconds for c in found])
        if len(data.measured[g].intersection(likely)) >= WHOLE * len(likely):
            groups.append(g)
    return data.only(np.array(groups, int))[0]


def evaluate_whole(kind: str, logs: list[Path], whole: list[Path], console: Console) -> None:
    """The model of `logs` on tasks of `whole`."""
    data = measured_whole(load(kind, whole))
    known = load(kind, logs)
    seen = {t.key for t in known.tasks}
    data = data.only(np.array([g for g, t in enumerate(data.tasks) if t.key not in seen], int))[0]
    model = fresh().fit(known.x, known.seconds, known.groups)
    scores = model.predict(data.x)
    ranked = {
        "model": scores,
        "search": searched(data, model),
        "roofline": Analytic().predict(data.x),
        "templates": template_order(data),
    }
    console.print(curves(data, ranked, MORE_COUNTS))
    console.print(by_kind(data, scores))


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("kind", choices=("cpu", "gpu"))
    ap.add_argument("logs", nargs="*", type=Path)
    ap.add_argument("--objective", nargs="+", default=["rank"], choices=("rank", "gain"))
    ap.add_argument(
        "--least", type=int, default=16, help="trials of a task that is evaluated: of few, any 8 hold a good one"
    )
    ap.add_argument("--whole", nargs="+", type=Path, help="logs of tasks that are evaluated, and not trained on")
    a = ap.parse_args()
    console = Console(width=200)
    if a.whole:
        evaluate_whole(a.kind, a.logs, a.whole, console)
        return
    data = load(a.kind, a.logs)
    found = {f"model ({o})": out_of_fold(data, lambda o=o: fresh(o)) for o in a.objective}
    units = {name: calibrated(data, scores) for name, (scores, _) in found.items()}
    data, rows = data.wide(a.least)
    scored = {
        name: (scores[rows] * units[name], spread[rows] * units[name]) for name, (scores, spread) in found.items()
    }
    ranked = {name: scores for name, (scores, _) in scored.items()}
    console.print(curves(data, {**ranked, "roofline": Analytic().predict(data.x), "templates": template_order(data)}))
    for name, (scores, spread) in scored.items():
        console.print(f"\n{name}")
        console.print(by_kind(data, scores))
        console.print(margins(data, scores, spread))


if __name__ == "__main__":
    main()
