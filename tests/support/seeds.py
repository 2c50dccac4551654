"""Runs of many random cases, one for each seed, from the command line."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable


def main(run: Callable[[int], str | None], what: str, every: int, arguments: list[str]) -> None:
    """Run cases, print those that are wrong, and exit with 1 where there are some.

    Args:
        run: checks the case of a seed; an exception says that it is wrong. It may name what the case took, in words
            with a space between them, which are counted.
        what: cases are.
        every: as many cases a line is printed.
        arguments: how many cases, and the first seed, which is 0 by default.
    """
    count, first = (*map(int, arguments), 0)[:2]
    wrong, taken = 0, Counter[str]()
    for seed in range(first, first + count):
        try:
            taken.update((run(seed) or "").split())
        except Exception as e:
            wrong += 1
            print(f"seed {seed}: {type(e).__name__}: {e}", flush=True)
        if (seed + 1 - first) % every == 0:
            named = "".join(f"{n} by {name}, " for name, n in sorted(taken.items()))
            print(f"{seed + 1 - first} {what}, {named}{wrong} wrong", flush=True)
    sys.exit(bool(wrong))
