"""Is a graph of groups still free of cycles when some of them become one?

Each group has a higher rank than those that feed it. So only groups with ranks between those of two groups are on paths
from one to the other, and when groups become one, only ranks between theirs change (Pearce and Kelly, "A Dynamic
Topological Sort Algorithm for Directed Acyclic Graphs", 2006). Groups that become one are near each other as a rule, so
that all of it takes time in proportion to the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from heapq import heappop, heappush

Fed = Callable[[int], Iterable[int]]  # the groups that read what a group makes, without itself


class GroupOrder:
    """Ranks of groups.

    Args:
        groups: those that nothing keeps apart get their ranks in this order.
        fed: of each group as it is now; kept up to date by the caller.
    """

    def __init__(self, groups: Sequence[int], fed: Fed) -> None:
        self.fed = fed
        waits = dict.fromkeys(groups, 0)
        for g in groups:
            for h in fed(g):
                waits[h] += 1
        place = {g: k for k, g in enumerate(groups)}
        ready = [k for g, k in place.items() if waits[g] == 0]
        self.at: list[int | None] = []  # the group of each rank; None: it became a part of another one
        while ready:
            g = groups[heappop(ready)]
            self.at.append(g)
            for h in fed(g):
                waits[h] -= 1
                if waits[h] == 0:
                    heappush(ready, place[h])
        self.rank = {g: k for k, g in enumerate(self.at) if g is not None}
        assert len(self.rank) == len(waits), "groups read each other's results"

    def runs_between(self, groups: Collection[int]) -> bool:
        """Does some other group need a result of these, and one of these a result of it?"""
        last = max(self.rank[g] for g in groups)
        todo = [h for g in groups for h in self.fed(g) if h not in groups]
        return self._reached(todo, last, groups) is None

    def merge(self, groups: Collection[int], b: int) -> None:
        """Give `b` the place of groups that are one from now on; `fed` knows that already."""
        ranks = [self.rank[g] for g in groups]
        first, last = min(ranks), max(ranks)
        behind = self._reached(list(self.fed(b)), last, ())
        assert behind is not None
        window = [g for g in self.at[first : last + 1] if g is not None and g not in groups]
        order = [*(g for g in window if g not in behind), b, *(g for g in window if g in behind)]
        for g in groups:
            del self.rank[g]
        self.at[first : last + 1] = [*order, *[None] * (last + 1 - first - len(order))]
        self.rank.update((g, first + k) for k, g in enumerate(order))

    def _reached(self, todo: list[int], last: int, end: Collection[int]) -> set[int] | None:
        """The groups of ranks up to `last` on paths that begin at `todo`; None where one of `end` is among them."""
        seen: set[int] = set()
        while todo:
            g = todo.pop()
            if g in end:
                return None
            if g not in seen and self.rank[g] <= last:
                seen.add(g)
                todo += self.fed(g)
        return seen
