"""A dict of bounded size: what was used longest ago goes first."""

from __future__ import annotations

from dnnc.ir.lru import LRU


def test_what_was_used_longest_ago_goes() -> None:
    d: LRU[str, int] = LRU(2)
    d["a"], d["b"] = 1, 2
    assert d.find("a") == 1 and d.find("c") is None
    d["c"] = 3
    assert list(d.items()) == [("a", 1), ("c", 3)]
    d["a"] = 4
    d["b"] = 5
    assert list(d.items()) == [("a", 4), ("b", 5)]
