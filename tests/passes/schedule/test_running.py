"""Running sums of rows that go together, in place too."""

from __future__ import annotations

import pytest

from dnnc.ir.loops.text import parse_kernel, show_kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.schedule.running import running
from dnnc.passes.schedule.state import Schedule
from support.schedules import same_results

TEXT = """\
def sums(x: f32[17, 6], y: f32[17, 6]):
    for p in range(17):
        for s in range(6):
            acc: f32[1] @ register
            acc[0] = 0.0
            for r in range(6):
                if r <= s:
                    acc[0] = acc[0] + x[p, r]
            y[p, s] = acc[0] + {other}
"""


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("other", ["1.0", "y[p, s]"])
@pytest.mark.parametrize("guard", ["r <= s", "s < r"])
def test_rows_are_repeated_only_where_they_do_not_read_what_they_write(guard: str, other: str, overlap: bool) -> None:
    old = parse_kernel(TEXT.format(other=other).replace("r <= s", guard))
    new = verify_kernel(Schedule(old).apply(running, "p", 4, overlap).done())
    assert ("min(" in show_kernel(new)) == (overlap and other == "1.0")
    same_results(old, new)
