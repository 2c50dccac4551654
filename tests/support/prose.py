"""Style of prose, as a check: sentences of pages and docstrings, and the rules that they break.

Rules: no banned paraphrase (`BANNED`, with what to write), no clause with "what" or "whoever" in the place of a noun,
at most `WORDS` words in a clause, at most `PASSIVES` passive verbs in a sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

WORDS = 25
PASSIVES = 2

# What a reader cannot search for, and the field's term.
BANNED = {
    r"of one's own|of your own kernel|own (space|machine|cost model|runner)s?\b": "custom, user-defined",
    r"that (only )?the data (tells|says|decides)": "data-dependent",
    r"(is|are|when|until|be) looked at|somebody looks": "is evaluated, is read",
    r"\bin turns\b|\btake turns\b": "alternating, interleaved",
    r"\b1 outputs\b": "1 output",
    r"\ba (int|array-like|ONNX|axis|error|index|input|output)\b": "an",
    r"\bis no ([a-z-]+) (model|file|array|number)\b": "is not a",
    r"\bnumbers? of the row\b": "row statistics",
    r"\bmade up\b": "generated, synthetic",
    r"\bas (it|they) lies?\b|\bas it lie\b": "in place, unchanged",
    r"\bgoes the way of\b|\bgo the way of\b": "goes through",
    r"\bare those of\b.*\bare those of\b": "one comparison a sentence",
    r"\bwho(ever)? (has|makes|made|calls|wants|writes|knows)\b": "name the person: users, callers",
    r"\bbelongs into\b": "belongs in",
    r"\bsettled\b": "constant, call-invariant",
    r"\bby themselves\b|\bby itself\b": "automatically, alone",
    r"\bfrom outside\b": "from packages",
    r"\bhas no form\b|\bhave no form\b": "cannot be expressed",
    r"\btold (of|in|apart)\b": "reported, distinguished",
    r"\bmade anew\b|\bwrites? .{0,30} anew\b": "again, regenerate",
    r"\bmeanwhile\b": "at the same time",
    r"\bputs? it otherwise\b|\bis another matter\b": "differs",
    r"\bcomes? out of\b": "results from",
    r"\bfound again\b": "looked up, reused",
    r"\bas ever\b|\bas everywhere\b": "as usual",
}
NAMELESS = re.compile(r"\b(what(ever)?(?! to )|whoever)\b[^?]*$|^Who [^?]*$", re.I)
PASSIVE = re.compile(
    r"\b(?:is|are|was|were|be|been|being) (?:\w+ly |not |then |also )?"
    r"(?:\w+(?:ed|own|pt)|given|taken|done|made|found|held|kept|read|run|written|bound|built|chosen|cut|known|left|put|said|sent|set|told)\b"
)


@dataclass(frozen=True)
class Sentence:
    """A sentence and where it begins."""

    text: str
    line: int


def plain(text: str) -> str:
    """Markdown without code, links' targets and emphasis; pieces of code side by side count as one word."""
    text = re.sub(r"`[^`]*`(?: `[^`]*`)*", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"[*_]{1,2}(\S.*?\S|\S)[*_]{1,2}", r"\1", text)


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """(first line, text) of the paragraphs, list items and table cells of Markdown; code is left out."""
    held: list[str] = []
    start, fenced = 1, ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        mark = re.match(r"\s*(`{3,})", line)
        if mark and (not fenced or mark[1] == fenced):
            fenced = "" if fenced else mark[1]
            line = ""
        elif fenced:
            continue
        bare = line.strip()
        ends = not bare or bare.startswith(("#", "|", "- ", "* ", ": ", "<!--", ":::")) or re.match(r"\d+\. ", bare)
        if ends and held:
            yield start, " ".join(held)
            held = []
        if bare.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", bare)[1:-1]:
                yield number, cell.strip()
        elif bare and not bare.startswith(("#", "<!--", ":::", "    options")) and not line.startswith("    "):
            start = start if held else number
            held.append(re.sub(r"^([-*:]|\d+\.) +", "", bare))


def sentences(text: str) -> list[Sentence]:
    """The sentences of Markdown."""
    found = []
    for line, paragraph in paragraphs(text):
        for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z\"(])", plain(paragraph)):
            found.append(Sentence(sentence.strip(), line))
    return found


def count(text: str) -> int:
    """Words of a clause. An enumeration of four and more short items counts as one item."""
    items = text.split(",")
    lengths = [len(re.findall(r"[\w'-]+", item)) for item in items]
    middle = lengths[1:-1]
    if len(middle) >= 3 and max(middle) <= 6:
        lengths[1:-1] = [1]
    return sum(lengths)


def broken(s: Sentence) -> Iterator[str]:
    """The rules that a sentence breaks, each with what to do."""
    for pattern, instead in BANNED.items():
        match = re.search(pattern, s.text)
        if match:
            yield f"{match[0]!r}: write {instead}"
    if NAMELESS.search(s.text):
        yield "a clause with 'what' or 'who' in the place of a noun: name the thing"
    words = max(count(clause) for clause in re.split(r"[;:]", s.text))
    if words > WORDS or count(s.text) > 1.5 * WORDS:
        yield f"{count(s.text)} words: make two sentences"
    passives = len(PASSIVE.findall(s.text))
    if passives > PASSIVES:
        yield f"{passives} passive verbs: say who does it"


def complaints(text: str) -> list[tuple[int, str, str]]:
    """(line, rule, sentence) for each rule that a sentence of Markdown breaks."""
    return [(s.line, rule, s.text) for s in sentences(text) for rule in broken(s)]


def of_docstring(text: str) -> str:
    """A docstring as Markdown: arguments become list items, examples and formulas are left out."""
    text = re.sub(r"^\s*[\w']+ = .*$", "", text, flags=re.M)
    text = re.sub(r"^ {4}(?=[*\w]+: )", "- ", text, flags=re.M)
    text = re.sub(r"^ {8}(?=\S)", "  ", text, flags=re.M)
    return re.sub(r"^(\w+):$", r"# \1", text, flags=re.M)
