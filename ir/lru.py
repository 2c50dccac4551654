"""A mapping of bounded size, which forgets what was used longest ago."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LRU(Generic[K, V]):
    """The last `most` entries that were set or found. A look-up hashes the key once: keys may be long tuples."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._entries: dict[K, list[Any]] = {}  # value, and when it was used
        self._clock = count()

    def find(self, key: K) -> V | None:
        """The value of a key, which is then the last to be forgotten; None without one."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        entry[1] = next(self._clock)
        return entry[0]  # type: ignore[no-any-return]

    def __setitem__(self, key: K, value: V) -> None:
        self._entries[key] = [value, next(self._clock)]
        if len(self._entries) > self.most:
            oldest = min([*self._entries.items()], key=lambda item: item[1][1])[0]
            self._entries.pop(oldest, None)  # another thread may have taken it out

    def __getitem__(self, key: K) -> V:
        return self._entries[key][0]  # type: ignore[no-any-return]

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter([*self._entries])

    def __len__(self) -> int:
        return len(self._entries)

    def values(self) -> list[V]:
        """All values, in the order in which they were set first."""
        return [entry[0] for entry in [*self._entries.values()]]

    def clear(self) -> None:
        """Forget all."""
        self._entries.clear()
