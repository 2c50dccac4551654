"""The tables of operators: what the documentation says is what there is."""

from __future__ import annotations

from pathlib import Path

from dnnc.frontends.torch.coverage import core, markdown, missing
from dnnc.frontends.torch.operators import REFUSED, TABLE, WHOLE

DOCUMENT = Path(__file__).resolve().parents[3] / "docs/pytorch.md"


def test_the_document_has_these_tables() -> None:
    assert DOCUMENT.read_text().endswith(markdown()), "write them anew: python -m dnnc.frontends.torch.coverage"


def test_few_core_operators_are_missing() -> None:
    assert len(core()) > 140 and len(missing()) <= 10


def test_no_operator_is_read_and_refused() -> None:
    assert not set(REFUSED) & set(TABLE) and set(TABLE) >= WHOLE
