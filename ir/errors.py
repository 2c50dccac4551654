"""Errors that users see. Each says what is wrong, where, expected against got, and what to do."""

from __future__ import annotations

from dataclasses import dataclass, replace


class DnncError(Exception):
    """Base of all errors that dnnc raises on purpose."""


class ModelError(DnncError):
    """The input is not a model, is malformed, or is unsafe to read."""


class UnsupportedError(DnncError):
    """An operator, opset or dtype that dnnc does not implement."""


class GradientError(UnsupportedError):
    """A derivative that does not exist, or that dnnc has no rule for."""


class ShapeError(DnncError):
    """Shapes or dtypes of a graph do not fit together."""


class InputError(DnncError):
    """A call got arrays that the compiled model cannot take."""


class TargetError(DnncError):
    """The target is unknown or cannot be used on this machine."""


class ArtifactError(DnncError):
    """A saved model is damaged, foreign, or of another version."""


class TuneError(DnncError):
    """Tuning could not start or its log cannot be used."""


class AccuracyError(DnncError):
    """A generated kernel or a whole model disagrees with the float64 reference."""


class NonFiniteError(DnncError):
    """A value of a training step is infinite or NaN."""


class ParseError(DnncError):
    """IR text that does not parse; the message holds line and column."""


class VerifyError(DnncError):
    """An IR breaks one of its invariants; the message quotes the statement or node."""


class ScheduleError(DnncError):
    """A schedule primitive would change the meaning of a kernel."""


class InternalError(DnncError):
    """An invariant of dnnc itself broke; please report it with the text of the message."""


class DnncWarning(UserWarning):
    """Base of all warnings that dnnc gives."""


class ArtifactWarning(DnncWarning):
    """The code in a saved model cannot be used here, so the model is compiled again; says why."""


def count(n: int, what: str, several: str = "") -> str:
    """`1 node`, `2 nodes`."""
    return f"{n} {what if n == 1 else several or f'{what}s'}"


def a_type(x: object) -> str:
    """`an int`, `a str`: the type of a value, for messages."""
    name = type(x).__name__
    return f"{'an' if name[0] in 'aeiouAEIO' else 'a'} {name}"


def install(extra: str, newer: bool = False) -> str:
    """The command that installs an extra or `newer` packages. dnnc is on no package index: it names the clone."""
    return f"pip install {'-U ' if newer else ''}-e '.[{extra}]' in the clone of dnnc"


@dataclass(frozen=True, slots=True)
class Loc:
    """Where a value comes from: an ONNX node (name, operator, opset) or a line of a traced function."""

    name: str
    op: str = ""
    opset: int = 0
    file: str = ""
    line: int = 0
    derivative: bool = False  # is it the derivative of what stands there?

    def __str__(self) -> str:
        if self.file:
            at = f"{self.file}:{self.line}"
        else:
            at = f"{self.name or '?'} ({self.op}, opset {self.opset})" if self.op else self.name
        return f"derivative of {at}" if self.derivative else at


def derivative(locs: tuple[Loc, ...]) -> tuple[Loc, ...]:
    """The places of nodes that differentiate what stands at other places."""
    return tuple(replace(loc, derivative=True) for loc in locs or (Loc("a function"),))


def locations(locs: tuple[Loc, ...]) -> str:
    """`at conv1 (Conv, opset 13)`, shortened when many nodes were fused; empty when nothing is known."""
    if not locs:
        return ""
    shown = ", ".join(str(loc) for loc in locs[:3])
    return f" at {shown}" + (f" and {len(locs) - 3} more" if len(locs) > 3 else "")


def outside(where: str, index: object = None) -> InputError:
    """The error of a program that stopped at an index. `where`: the kernels that may have read it."""
    if "within_bound" in where:
        return InputError(
            f"a loop with a bound reached it while its condition still holds, or an index read at run time lies "
            f"outside of its axis, in {where}: give while_loop a larger bound, and check the values of integer inputs"
        )
    told = "" if index is None else f", {index},"
    return InputError(
        f"an index read at run time{told} lies outside of its axis, in {where}: check the values of integer inputs"
    )
