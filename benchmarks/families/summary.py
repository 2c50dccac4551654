"""Results of a race: the class of a failure, a line per model, and tables in Markdown."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from timing import geometric_mean

from families.apart import Outcome
from families.index import Row

COMPILING, JUDGING, RESIZING = "compiling", "judging", "running at other sizes"
SLOW, VERY_SLOW = 0.9, 0.7  # ratios that are counted
WORST = 30
LONGEST = 110  # characters of a failure's text in a table


def failure_class(outcome: Outcome, found: Mapping[str, Any]) -> Row | None:
    """None for a model that compiles and is right; else {"class", "text"}.

    Classes: "does not compile", "refused by the kernel check", "time-out", "crash", "wrong", "unconfirmed", "not
        judged" where a peer or the
    reference failed, and "fails at other sizes" or "wrong at other sizes" where symbolic ones are other than those it
    was built with.
    """
    if outcome.error == "time":
        return {"class": "not judged" if outcome.stage == JUDGING else "time-out", "text": outcome.text}
    if outcome.error == "died":
        return {"class": "crash", "text": outcome.text}
    if outcome.error:
        if outcome.stage == RESIZING:
            return {"class": "fails at other sizes", "text": outcome.text}
        if outcome.stage != COMPILING:
            return {"class": "not judged", "text": f"{outcome.text} while {outcome.stage}"}
        return {
            "class": "refused by the kernel check" if outcome.text.startswith("AccuracyError") else "does not compile",
            "text": outcome.text,
        }
    for verdict, suffix in ((found["verdict"], ""), (found.get("resized"), " at other sizes")):
        if verdict and verdict["word"] != "right":
            return {"class": verdict["word"] + suffix, "text": _unlike(verdict)}
    return None


def _unlike(verdict: Row) -> str:
    others = ", ".join(f"{n} {e:.1e}" for n, e in (verdict.get("others") or {}).items())
    return f"error {verdict['error']:.1e} against {verdict['reference']}, bound {verdict['bound']:.1e}; others {others}"


def kind_of(text: str) -> str:
    """An error's text without what is peculiar to one model: names in quotes, numbers, places."""
    text = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "'..'", text.split("\n")[0])
    return re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "N", text))[:LONGEST]


def middle(r: Row) -> float | None:
    """The ratio of a model: time of the fastest peer over dnnc's."""
    return float(np.median(r["ratios"])) if r.get("ratios") else None


def one_line(r: Row) -> str:
    host = f" host steps {len(r['host'])}" if r.get("host") else ""
    ratio = middle(r)
    speed = f" ratio {ratio:.2f}" if ratio is not None else ""
    head = f"{r['name']:40} {r['seconds']:5.0f} s"
    if r["failure"]:
        return f"{head} {r['failure']['class'].upper()}: {r['failure']['text'].splitlines()[0][:220]}{host}{speed}"
    return (
        f"{head} compiled in {r['compile_s']:.1f} s, error {r['verdict']['error']:.0e} "
        f"({r['verdict']['reference']}){host}{speed}"
    )


# --- Markdown ---------------------------------------------------------------------------------------------------------


def markdown(results: Sequence[Row], options: Mapping[str, str]) -> str:
    """All tables."""
    sections = [
        ", ".join(f"{k} {v}" for k, v in options.items()),
        totals(results),
        by_family(results),
        failures(results),
        hosts(results),
    ]
    if any(r.get("ratios") for r in results):
        sections += [speeds(results), worst(results)]
    return "\n\n".join(s for s in sections if s) + "\n"


def totals(results: Sequence[Row]) -> str:
    classes = Counter(r["failure"]["class"] if r["failure"] else "right" for r in results)
    rows = [f"| {name} | {count} | {count / len(results):.1%} |" for name, count in classes.most_common()]
    return "\n".join([f"| of {len(results)} models | | |", "|---|---:|---:|", *rows])


def by_family(results: Sequence[Row]) -> str:
    groups: dict[str, list[Row]] = defaultdict(list)
    for r in results:
        groups[r["family"]].append(r)
    lines = [
        "| family | models | right | with host steps | compile s, median | ratio, geometric mean | lowest |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for family, rows in sorted(groups.items()):
        seconds = [r["compile_s"] for r in rows if "compile_s" in r]
        found = [m for m in map(middle, rows) if m is not None]
        speed = f"{geometric_mean(found):.2f} | {min(found):.2f}" if found else "- | -"
        right, host = sum(not r["failure"] for r in rows), sum(bool(r.get("host")) for r in rows)
        compile_s = f"{np.median(seconds):.1f}" if seconds else "-"
        lines.append(f"| {family} | {len(rows)} | {right} | {host} | {compile_s} | {speed} |")
    return "\n".join(lines)


def failures(results: Sequence[Row]) -> str:
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for r in results:
        if r["failure"]:
            groups[r["failure"]["class"], kind_of(r["failure"]["text"])].append(r["name"])
    if not groups:
        return ""
    lines = ["| failure | text | models |", "|---|---|---|"]
    for (kind, text), names in sorted(groups.items(), key=lambda g: (-len(g[1]), g[0])):
        lines.append(
            f"| {kind} | {text.replace('|', '/')} | {len(names)}: "
            f"{', '.join(names[:6])}{' ...' if len(names) > 6 else ''} |"
        )
    return "\n".join(lines)


def hosts(results: Sequence[Row]) -> str:
    rows = [r for r in results if r.get("host")]
    if not rows:
        return ""
    lines = ["| model with host steps | steps |", "|---|---|"]
    return "\n".join(lines + [f"| {r['name']} | {len(r['host'])}: {kind_of('; '.join(r['host'][:3]))} |" for r in rows])


def speeds(results: Sequence[Row]) -> str:
    found = [m for m in map(middle, results) if m is not None]
    slow, very = sum(m < SLOW for m in found), sum(m < VERY_SLOW for m in found)
    text = (
        f"Time of the fastest peer over dnnc's: geometric mean {geometric_mean(found):.2f} over {len(found)} models, "
    )
    return f"{text}below {SLOW}: {slow / len(found):.0%}, below {VERY_SLOW}: {very / len(found):.0%}."


def worst(results: Sequence[Row]) -> str:
    rows = sorted((r for r in results if r.get("ratios")), key=lambda r: middle(r) or 0.0)[:WORST]
    lines = ["| model | family | ratio | dnnc ms | fastest peer | its ms |", "|---|---|---:|---:|---|---:|"]
    for r in rows:
        e = r["engines"]
        peer = r["fastest_peer"]
        lines.append(
            f"| {r['name']} | {r['family']} | {middle(r):.2f} | {e['dnnc']['p50']:.3f} | {peer} | {e[peer]['p50']:.3f} "
            "|"
        )
    return "\n".join(lines)
