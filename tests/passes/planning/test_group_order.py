"""Ranks of groups: the same answers as reachability, whatever becomes one."""

from __future__ import annotations

import random

from dnnc.passes.planning.group_order import GroupOrder


def reached(fed: dict[int, set[int]], starts: set[int]) -> set[int]:
    seen: set[int] = set()
    todo = list(starts)
    while todo:
        g = todo.pop()
        if g not in seen:
            seen.add(g)
            todo += fed[g]
    return seen


def test_groups_become_one_where_nothing_runs_between() -> None:
    answers = []
    for seed in range(40):
        draw = random.Random(seed)
        fed = {g: {h for h in range(g + 1, 30) if draw.random() < 0.08} for g in range(30)}
        order = GroupOrder(draw.sample(range(30), 30), lambda g, fed=fed: fed[g])
        for _ in range(60):
            groups = set(draw.sample(sorted(fed), min(len(fed), draw.choice((2, 2, 3)))))
            others = {h for g in groups for h in fed[g]} - groups
            want = bool(reached(fed, others) & groups)
            assert order.runs_between(groups) == want
            answers.append(want)
            if want or len(fed) < 4:
                continue
            b = min(groups)
            fed[b] = others
            for g in groups - {b}:
                del fed[g]
            for g, found in fed.items():
                fed[g] = ({b if h in groups else h for h in found}) - {g}
            order.merge(groups, b)
            assert all(order.rank[g] < order.rank[h] for g in fed for h in fed[g])
    assert 0.1 < sum(answers) / len(answers) < 0.9
