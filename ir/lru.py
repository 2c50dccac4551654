"""A dict of bounded size, which forgets what was used longest ago."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LRU(OrderedDict[K, V]):
    """The last `most` entries that were set or found."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def find(self, key: K) -> V | None:
        """The value of a key, which is then the last to be forgotten; None without one."""
        try:
            self.move_to_end(key)
            return self[key]
        except KeyError:  # another thread may have taken it out in between
            return None

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.most:
            self.popitem(last=False)
