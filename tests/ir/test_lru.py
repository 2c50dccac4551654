"""A mapping of bounded size: what was used longest ago goes first."""

from __future__ import annotations

from dnnc.ir.lru import LRU


def test_what_was_used_longest_ago_goes() -> None:
    d: LRU[str, int] = LRU(2)
    d["a"], d["b"] = 1, 2
    assert d.find("a") == 1 and d.find("c") is None
    d["c"] = 3
    assert sorted(d) == ["a", "c"] and d["a"] == 1 and d["c"] == 3 and "b" not in d
    d["a"] = 4
    d["b"] = 5
    assert sorted(d) == ["a", "b"] and len(d) == 2 and d.values() == [4, 5]
