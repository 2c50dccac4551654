"""Orders in memory: their texts, and that packing loses nothing."""

from __future__ import annotations

import numpy as np
import pytest

from dnnc.passes.rewrites.orders import blocked, filters, panels, pixel_blocks


@pytest.mark.parametrize(
    ("order", "text"),
    [
        (blocked(4, 16), "0 1/16 2 3 1%16"),
        (pixel_blocks(4, 16), "0 2 3/16 1 3%16"),
        (filters(4, 16, True), "0/16 1/16 2 3 1%16 0%16"),
        (panels(4, 16), "0 1 3/16 2 3%16"),
    ],
)
def test_packed_arrays_are_unpacked_again(order: object, text: str) -> None:
    assert str(order) == text
    x = np.random.default_rng(0).standard_normal((2, 18, 3, 20)).astype(np.float32)
    layout = order.layout  # type: ignore[attr-defined]
    again, padding = layout.unpack(layout.pack(x), x.shape)
    assert np.array_equal(again, x) and not padding.any()
