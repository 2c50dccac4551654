"""What a tuning log holds, record by record: JSON data to checked records and back.

A record says its format and its kind: `{"dnnc": 1, "record": "trial", ...}`. The fields are those of the dataclass, so
the dataclass is the schema: only fields with defaults may be missing (an older dnnc wrote it), others are mistakes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Union

from dnnc.autotune.search.task import Setting, Task
from dnnc.autotune.search.trial import FAILURES, OK, Trial
from dnnc.ir.errors import TuneError
from dnnc.passes.schedule.problem import Choice

FORMAT = 1
HEAD = b'{"dnnc": %d, "record": "' % FORMAT  # how each line begins


@dataclass(frozen=True)
class Session:
    """One run of the tuner on a model, written when it begins and again when it ends; the later one holds."""

    model: str  # what was tuned, for people
    target: str  # canonical text
    calls: Mapping[str, int] = field(default_factory=dict)  # how often the model calls each task
    machine: str = ""  # what it was measured on
    version: str = ""  # of dnnc
    at: float = 0.0  # when it began, seconds since 1970; with `model` the identity of the session
    budget: float | None = None  # seconds it was given; None for no limit
    seconds: float | None = None  # it took; None while it runs, or where it was killed


@dataclass(frozen=True)
class Winner:
    """The winner of a search: a checked finalist, or the templates' own where none was faster."""

    task: str  # key of the Task
    choice: Choice  # the schedule
    seconds: float  # of one call in the final comparison
    # the same of the templates' own first choice, measured alternately with it; None if unmeasured
    baseline: float | None = None
    machine: str = ""  # what it was measured on
    version: str = ""  # of dnnc
    at: float = 0.0  # seconds since 1970; of several winners of a task the latest holds


@dataclass(frozen=True)
class Fusion:
    """The fusion decision of a search for a group: one kernel, as compiled, or another division."""

    task: str  # key of the Task that is the group in one kernel
    parts: tuple[str, ...]  # keys of the tasks that stand in its place, in order
    cuts: tuple[int, ...] = ()  # numbers of the group's nodes that end one of them; the last node ends the last
    # of the convolution: m of Winograd's F(m x m, 3 x 3), 0 for the direct one; None where that is as it was
    tile: int | None = None
    taken: bool = False  # was the other way faster beyond a tie?
    seconds: float = 0.0  # of the parts together, with their winners
    # of the group in one kernel, with its winner, measured alternately with the parts if these were near
    baseline: float = 0.0
    machine: str = ""  # what it was measured on
    version: str = ""  # of dnnc
    at: float = 0.0  # seconds since 1970; of several decisions on a task the latest holds


Record = Union[Task, Trial, Session, Winner, Fusion]
KINDS: dict[str, type[Any]] = {"task": Task, "trial": Trial, "session": Session, "winner": Winner, "fusion": Fusion}


# --- to bytes ---------------------------------------------------------------------------------------------------------


def to_line(record: Record) -> bytes:
    """The record as a line of a log. TuneError for numbers that JSON does not have."""
    kind = next(k for k, cls in KINDS.items() if type(record) is cls)
    data = {f.name: _plain(getattr(record, f.name)) for f in dataclasses.fields(record)}
    try:
        return json.dumps({"dnnc": FORMAT, "record": kind, **data}, allow_nan=False).encode() + b"\n"
    except ValueError as e:
        raise TuneError(f"a {kind} cannot be logged: {e}: {record}") from None


def plain_choice(choice: Choice) -> list[Any]:
    """A schedule as JSON data: the template's name, and its knobs in their order."""
    return [choice.template, dict(choice.knobs)]


def _plain(v: Any) -> Any:
    if isinstance(v, Choice):
        return plain_choice(v)
    if dataclasses.is_dataclass(v):
        return {f.name: _plain(getattr(v, f.name)) for f in dataclasses.fields(v)}
    return list(v) if isinstance(v, tuple) else dict(v) if isinstance(v, Mapping) else v


# --- from bytes -------------------------------------------------------------------------------------------------------

Read = Callable[[Any, str], Any]


def from_line(line: bytes) -> Record:
    """A line of a log as a record. ValueError says what is wrong with it."""
    try:
        data = json.loads(line, parse_constant=_no_number)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"it is no JSON ({e})") from None
    if not isinstance(data, dict) or "dnnc" not in data:
        raise ValueError("it is no record of a tuning log")
    if data.pop("dnnc") != FORMAT:
        raise ValueError(
            f"it is of another format than {FORMAT}, which this dnnc reads: use the dnnc that wrote it, or a newer one"
        )
    kind = data.pop("record", None)
    if not isinstance(kind, str) or kind not in _READERS:
        raise ValueError(f"there is no record {kind!r} in format {FORMAT}: expected {', '.join(KINDS)}")
    made: Record = _READERS[kind](data, kind)
    if isinstance(made, Trial) and made.status not in (OK, *FAILURES):
        raise ValueError(f"trial.status: expected {', '.join((OK, *FAILURES))}, got {made.status!r}")
    return made


def read_choice(data: Any, where: str = "choice") -> Choice:
    """A schedule out of JSON data. ValueError where it is none."""
    if (
        not isinstance(data, (list, tuple))
        or len(data) != 2
        or not isinstance(data[0], str)
        or not isinstance(data[1], Mapping)
    ):
        raise _wrong(where, "[template, {knob: value}]", data)
    if not all(isinstance(k, str) and type(v) in (int, str) for k, v in data[1].items()):
        raise _wrong(where, "knobs that are integers or texts", data[1])
    return Choice(data[0], tuple(data[1].items()))


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _wrong(where: str, expected: str, data: Any) -> ValueError:
    return ValueError(f"{where}: expected {expected}, got {repr(data)[:80]}")


def _record(cls: Any) -> Read:
    """A reader of a dataclass; made once for each kind, for there are many lines."""
    hints = typing.get_type_hints(cls)
    readers = {f.name: _reader(hints[f.name]) for f in dataclasses.fields(cls)}
    needed = {
        f.name
        for f in dataclasses.fields(cls)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }

    def read(data: Any, where: str) -> Any:
        if type(data) is not dict:
            raise _wrong(where, "an object", data)
        if not (needed <= data.keys() <= readers.keys()):
            odd = [
                *(f"no {n}" for n in sorted(needed - data.keys())),
                *(f"an unknown {n}" for n in sorted(data.keys() - readers.keys())),
            ]
            raise ValueError(f"{where} has {', '.join(odd)}")
        return cls(**{name: readers[name](v, f"{where}.{name}") for name, v in data.items()})

    return read


def _reader(t: Any) -> Read:
    if t is Choice:
        return read_choice
    if dataclasses.is_dataclass(t):
        return _record(t)
    origin, args = typing.get_origin(t), typing.get_args(t)
    if origin in (Union, types.UnionType):
        (some,) = (_reader(a) for a in args if a is not type(None))
        return lambda data, where: None if data is None else some(data, where)
    if origin is tuple:
        return _list(_reader(args[0]))
    return _mapping(_reader(args[1])) if origin is not None else _number if t is float else _exactly(t)


def _list(item: Read) -> Read:
    def read(data: Any, where: str) -> Any:
        if type(data) is not list:
            raise _wrong(where, "a list", data)
        return tuple([item(v, where) for v in data])

    return read


def _mapping(item: Read) -> Read:
    def read(data: Any, where: str) -> Any:
        if type(data) is not dict:
            raise _wrong(where, "an object", data)
        return {k: item(v, f"{where}.{k}") for k, v in data.items()}

    return read


def _number(data: Any, where: str) -> float:
    if type(data) not in (int, float) or not math.isfinite(data):
        raise _wrong(where, "a number", data)
    return float(data)


def _exactly(t: Any) -> Read:
    name = {str: "text", int: "an integer", bool: "true or false"}[t]

    def read(data: Any, where: str) -> Any:
        if type(data) is not t:
            raise _wrong(where, name, data)
        return data

    return read


_READERS: dict[str, Read] = {kind: _record(cls) for kind, cls in KINDS.items()}
__all__ = [
    "FORMAT",
    "Fusion",
    "HEAD",
    "KINDS",
    "Record",
    "Session",
    "Setting",
    "Winner",
    "from_line",
    "plain_choice",
    "read_choice",
    "to_line",
]
