"""Train the cost model that ships for a kind of machines, from the logs beside this script.

    python benchmarks/autotune/train.py cpu            writes autotune/pretrained/cpu.npz

The unit of its scores and the margins from which `choose` believes it come from predictions for tasks that were not
trained on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from dataset import Data, best_margins, calibrated, load, out_of_fold, reached

from dnnc.autotune.model.cost_model import XGBModel
from dnnc.autotune.model.features import VERSION

PRETRAINED = Path(__file__).parents[2] / "autotune" / "pretrained"


def fresh(objective: str = "rank") -> XGBModel:
    return XGBModel(objective=objective, members=4, trees=200, depth=6)


def train(data: Data, kind: str, objective: str, out: Path) -> None:
    scores, spread = out_of_fold(data, lambda: fresh(objective))
    factor = calibrated(data, scores)
    margins = best_margins(data, scores * factor, spread * factor)
    model = fresh(objective).fit(data.x, data.seconds, data.groups)
    top = reached(data, scores, (1, 8))
    about = {
        "features": VERSION, "kind": kind, "margins": margins, "tasks": len(data.tasks), "trials": len(data.x),
        "targets": sorted({t.setting.target for t in data.tasks}), "top8_95": round(float((top[8] >= 0.95).mean()), 4),
    }  # fmt: skip
    forest = model.forest(**about)
    forest.facts["unit"] *= factor  # type: ignore[index]
    out.parent.mkdir(exist_ok=True)
    forest.save(out)
    print(f"{out}: {out.stat().st_size / 1024:.0f} KB, {forest.feature.shape[0]} trees; {forest.facts}")


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("kind", choices=("cpu", "gpu"))
    ap.add_argument("logs", nargs="*", type=Path)
    ap.add_argument("--objective", default="rank", choices=("rank", "gain"))
    ap.add_argument("--out", type=Path)
    a = ap.parse_args()
    train(load(a.kind, a.logs), a.kind, a.objective, a.out or PRETRAINED / f"{a.kind}.npz")


if __name__ == "__main__":
    main()
