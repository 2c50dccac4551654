"""The tables of operators: nearly all of torch's core operators are read, and none is read and refused."""

from __future__ import annotations

import pytest

from dnnc.frontends.torch.coverage import core, missing
from dnnc.frontends.torch.operators import REFUSED, TABLE, WHOLE


@pytest.mark.slow
def test_few_core_operators_are_missing() -> None:
    assert len(core()) > 140 and len(missing()) <= 10


def test_no_operator_is_read_and_refused() -> None:
    assert not set(REFUSED) & set(TABLE) and set(TABLE) >= WHOLE
