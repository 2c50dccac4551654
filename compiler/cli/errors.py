"""Exceptions to exit codes and short messages; the one place where they are caught."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import typer

USER, INTERNAL, INTERRUPTED = 1, 3, 130
F = TypeVar("F", bound=Callable[..., Any])


def guarded(command: F) -> F:
    """A command whose failures become an exit code and a line on stderr; its option `verbose` adds the traceback."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
            return
        except (typer.Exit, typer.BadParameter, BrokenPipeError):  # typer's own ways to end
            raise
        except (Exception, KeyboardInterrupt) as e:
            code = explain(e, bool(options.get("verbose")))
        raise typer.Exit(code)  # out here, so that it does not keep the failed command's frames alive

    return run  # type: ignore[return-value]


def explain(e: BaseException, verbose: bool) -> int:
    """Say on stderr what went wrong; returns the exit code."""
    from dnnc.ir.errors import DnncError, InternalError  # loads NumPy, which `--help` does without

    if verbose:
        traceback.print_exception(type(e), e, e.__traceback__, file=sys.stderr)
    if isinstance(e, KeyboardInterrupt):
        say("interrupted")
        return INTERRUPTED
    if isinstance(e, DnncError) and not isinstance(e, InternalError):
        say(f"{type(e).__name__}: {e}")
        return USER
    if isinstance(e, (OSError, MemoryError)):
        say(str(e) or "not enough memory")
        return USER
    what = str(e) if isinstance(e, InternalError) else f"{type(e).__name__}: {e}"
    how = "" if verbose else "; run it again with -v for the traceback"
    say(
        f"internal error: {what}\nThis is a bug of dnnc. Please report it with this message and the model or its "
        f"graph{how}."
    )
    return INTERNAL


def say(message: str) -> None:
    """A message on stderr, its beginning red on a terminal."""
    head, colon, rest = message.partition(": ")
    typer.echo(typer.style(head + colon, fg=typer.colors.RED, bold=True) + rest, err=True)
