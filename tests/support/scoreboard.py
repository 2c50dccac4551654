"""What a run of ONNX's conformance suite shows, as a page: in come cases and their errors, out goes markdown, by the
scoreboard's categories.
"""

from __future__ import annotations

import datetime
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The scoreboard names a kind of cases as the test class that runs it.
CATEGORIES = {
    "node": "OnnxBackendNodeModelTest",
    "simple": "OnnxBackendSimpleModelTest",
    "pytorch-converted": "OnnxBackendPyTorchConvertedModelTest",
    "pytorch-operator": "OnnxBackendPyTorchOperatorModelTest",
}


def page(target: str, cases: Sequence[Any], errors: Mapping[int, str | None]) -> str:
    """A page with totals for each category, operators whose cases all pass, and the failures with their reasons.

    Args:
        target: what the cases were compiled for.
        cases: the suite's cases that were run.
        errors: by number of the case: None where it passed, else why not; a case without an entry was not run, and
            counts as failed.
    """
    import onnx

    import dnnc

    failed = {k: errors.get(k, "was not run") for k in range(len(cases)) if errors.get(k, "was not run") is not None}
    total, bad = Counter(c.kind for c in cases), Counter(cases[k].kind for k in failed)
    tested, whole = operators(cases, failed)
    rows = [_row(CATEGORIES.get(kind, kind), total[kind], bad[kind]) for kind in total]
    lines = [
        f"# ONNX conformance, {datetime.date.today().isoformat()}",
        "",
        f"`PYTHONPATH=tests python -m support.onnx_suite --target {target} --markdown`: the tests of onnx "
        f"{onnx.__version__} on dnnc {dnnc.__version__}, target",
        f"`{target}`, Python {platform.python_version()}, {platform.system()} {platform.machine()}. Tolerances are the "
        "suite's own; no case is left out but",
        "those of kind *real*, which download models.",
        "",
        "| category | passed | failed | total | score |",
        "|---|---|---|---|---|",
        *rows,
        _row("**all**", len(cases), len(failed)),
        "",
        f"Of {tested} operators that have cases of kind *node*, {whole} pass all of them.",
    ]
    if failed:
        lines += [
            "",
            "## Failures",
            "",
            *(f"- `{cases[k].name}`: {failed[k]}" for k in sorted(failed, key=lambda k: cases[k].name)),
        ]
    return "\n".join(lines) + "\n"


def _row(category: str, total: int, bad: int) -> str:
    score = 100 * (total - bad) / total if total else 0.0
    return f"| {category} | {total - bad} | {bad} | {total} | {score:.2f} % |"


def operators(cases: Sequence[Any], failed: Mapping[int, Any]) -> tuple[int, int]:
    """(operators that cases of kind `node` are about, those of them whose cases all pass). A case of one node is about
    its operator.
    """
    import onnx

    from dnnc.frontends.onnx.reader import standard

    tested, spoilt = set(), set()
    for k, c in enumerate(cases):
        if c.kind != "node":
            continue
        model = c.model if c.model is not None else onnx.load(Path(c.model_dir) / "model.onnx")
        if len(model.graph.node) == 1:
            key = (standard(model.graph.node[0].domain), model.graph.node[0].op_type)
            tested.add(key)
            spoilt |= {key} if k in failed else set()
    return len(tested), len(tested - spoilt)
