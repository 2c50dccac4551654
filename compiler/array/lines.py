"""Which line of the user's code runs: what a traced op carries, and what an error about a traced value says."""

from __future__ import annotations

import sys
from types import FrameType, TracebackType

from dnnc.ir.errors import Loc

_OURS = ("dnnc", "numpy")  # code between the user's line and the one that asks
_TRUTH = "use dnnc.cond, dnnc.while_loop or dnnc.array.where, and & | ~ in place of and, or, not"
_NUMBER = "leave it an array without axes, which stands where numbers do"
_SIZE = "sizes come from .shape or from an argument in static=; dnnc.array.take reads the place that an array names"
_NUMPY = "use the function of dnnc.array in place of NumPy's"
_SHAPES = "a traced shape cannot depend on contents; mark what counts by dnnc.array.where"
_ADVICE = {
    "__bool__": _TRUTH, "__float__": _NUMBER, "__complex__": _NUMBER, "item": _NUMBER, "tolist": _NUMBER,
    "__format__": _NUMBER,
    "__int__": _SIZE, "__index__": _SIZE, "__array__": _NUMPY, "__dlpack__": _NUMPY, "numpy": _NUMPY,
    "nonzero": _SHAPES, "unique_all": _SHAPES, "unique_counts": _SHAPES, "unique_inverse": _SHAPES,
    "unique_values": _SHAPES,
    "repeat": _SHAPES, "__getitem__": _SHAPES, "__setitem__": _SHAPES,
}  # fmt: skip
_ELSE = "make it an argument that is fixed (static=), or compute it before"


def is_user(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS


def user_line() -> tuple[Loc, str]:
    """The line of the user's code that runs, and the name of the function of ours that it called."""
    frame: FrameType | None = sys._getframe(1)
    called = ""
    while frame is not None and not is_user(frame):
        if (
            frame.f_globals.get("__name__", "").startswith("dnnc") and frame.f_code.co_name != "checked"
        ):  # a wrapper of `errors.public`
            called = frame.f_code.co_name
        frame = frame.f_back
    return (Loc(called) if frame is None else Loc("", file=frame.f_code.co_filename, line=frame.f_lineno)), called


def raised_at(traceback: TracebackType | None) -> str:
    """The innermost line of the user's code that an error went through, as `file:line`; empty when there is none."""
    found = ""
    while traceback is not None:
        if is_user(traceback.tb_frame):
            found = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def no_data() -> str:
    """What an error says where a traced value is looked at."""
    line, called = user_line()
    what = f"{called.strip('_')}() needs the contents of an array" if called else "the contents of an array are needed"
    return f"{line}: {what} while a function is traced, where it has none yet; {_ADVICE.get(called, _ELSE)}"
