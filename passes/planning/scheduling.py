"""The schedule of one nest: the chosen one, or where it does not hold the next."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from dnnc.ir.errors import DnncError, InternalError, locations
from dnnc.ir.loops.stmt import Kernel
from dnnc.ir.loops.verify import verify_kernel
from dnnc.passes.lower.expand import decompose
from dnnc.passes.planning.ladder import Ladder, Refusal, reason
from dnnc.passes.schedule.problem import Choice, Problem, Template
from dnnc.passes.schedule.step import NAIVE, Choose, apply_choice, candidates, offer

TURNS = 8  # schedules of a nest that are tried, beside the first of each template


def applied(
    problem: Problem, templates: Sequence[Template], choice: Choice, supported: Collection[str], limited: bool = True
) -> Kernel:
    """The kernel by one schedule. `limited`: in the number of its statements."""
    return verify_kernel(decompose(apply_choice(problem, templates, choice), supported), limited)


def try_schedules(
    problem: Problem,
    templates: Sequence[Template],
    choose: Choose,
    supported: Collection[str],
    ladder: Ladder,
    nest: str,
    nodes: int,
) -> tuple[Kernel, Choice, Refusal | None]:
    """A kernel by the schedule chosen. Where one does not hold, another is taken:

    - What is not the templates' own first choice may come out of a log that another version wrote: then that first
      choice is.
    - Where the ladder may step down, the other schedules are tried; those for sparse weights alone, where several nodes
      have some. At last an error says that a group of several nodes is to be split; a single node, and what has sizes
      that leave too little to be proved, stays as it was lowered.
    """
    symbolic = bool(problem.lowered.dims)
    refused = ladder.refused(nest)
    offered = (
        [] if ladder.naive_only(nest) else [c for c in _candidates(problem, templates, ladder) if c not in refused]
    )
    if ladder.down and nodes > 1 and problem.sparse:  # a smaller group rather than all zeros
        known = {t.name for t in templates if t.sparse}
        offered = [c for c in offered if c.template in known] if known else offered
    if not offered and not ladder.down:
        offer(problem, templates)  # raises: no template takes it
    first = next((Refusal(c, why) for c, why in refused.items()), None)
    for k, choice in enumerate(_turns(problem, templates, offered, choose, ladder)):
        try:
            return applied(problem, templates, choice, supported), choice, first
        except Exception as e:  # knobs that a template no longer has may fail in any way
            own = choice == offered[0]
            if not ladder.down and (own or k > 0):
                if isinstance(e, DnncError):
                    raise
                where = f"{problem.kernel.name}{locations(problem.kernel.locs)}"
                raise InternalError(f"schedule {choice} does not apply to {where}: {reason(e)}") from e
            first = first or Refusal(choice, reason(e.__cause__ or e))
            ladder.refuse(nest, choice, reason(e.__cause__ or e), nodes)
    if ladder.down and nodes > 1 and (not symbolic or ladder.naive_only(nest)):
        raise InternalError(first.why if first is not None else f"no template schedules {problem.kernel.name}")
    return applied(problem, templates, NAIVE, supported, limited=False), NAIVE, first


def _candidates(problem: Problem, templates: Sequence[Template], ladder: Ladder) -> list[Choice]:
    """Every schedule that some template offers. Where the ladder may step down, a template that fails offers none."""
    if not ladder.down:
        return candidates(problem, templates)
    found: list[Choice] = []
    for t in templates:
        try:
            found += candidates(problem, [t])
        except Exception as e:
            ladder.notes.append(
                f"{problem.kernel.name}{locations(problem.kernel.locs)}: template {t.name} offers no schedule: "
                f"{reason(e)}"
            )
    return found


def _turns(
    problem: Problem, templates: Sequence[Template], offered: Sequence[Choice], choose: Choose, ladder: Ladder
) -> Iterator[Choice]:
    """Schedules to try, in order: the chosen one, the templates' first choice, each template's first."""
    if not offered:
        return
    try:
        choice = choose(problem, offered)
    except Exception:
        if not ladder.down:
            raise
        choice = offered[0]
    tried = {choice}
    yield choice
    by_template = {c.template: c for c in reversed(offered)}
    rest = [offered[0], *(by_template[t.name] for t in templates if t.name in by_template), *offered]
    for c in rest:
        if c not in tried and len(tried) < TURNS + len(by_template):
            tried.add(c)
            yield c
