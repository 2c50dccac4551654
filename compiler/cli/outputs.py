"""Checks files before any work: suffix, folder, and that nothing which the command reads is overwritten."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import typer

from dnnc.artifact.format import is_artifact
from dnnc.cli.arguments import side_file
from dnnc.cli.models import Job
from dnnc.frontends.onnx.serialize import external_files
from dnnc.ir.errors import DnncError, InputError

LOGS = (".jsonl", ".log")


def check_output(
    path: str,
    suffixes: Sequence[str],
    reads: Iterable[str | Path],
    also: Iterable[str | Path] = (),
    option: str = "--output",
) -> None:
    """Refuse a path that a command cannot or must not write.

    Args:
        path: the file to write.
        suffixes: what its name may end in.
        reads: files that the command reads; listed only where the path exists.
        also: files that are written beside it.
        option: the option that gives the path.

    Raises:
        typer.BadParameter: another suffix, a folder in place of a file, or a file that is read under any of its names.
        InputError: there is no such folder.
    """
    if Path(path).suffix.lower() not in suffixes:
        raise typer.BadParameter(f"{path}: expected a {' or '.join(suffixes)} file", param_hint=option)
    folder = Path(path).parent
    if not folder.is_dir():
        raise InputError(f"cannot write {path}: there is no folder {folder}; create it, or choose another")
    read: list[Path] | None = None
    for file in (Path(path), *map(Path, also)):
        if file.is_dir():
            raise typer.BadParameter(f"{file} is a folder; give the path of a file", param_hint=option)
        if not file.exists():
            continue
        read = [Path(r).expanduser() for r in reads] if read is None else read
        same = next((r for r in read if _same(file, r)), None)
        if same is not None:
            raise typer.BadParameter(
                f"{file} is read by this command ({same}) and would be overwritten; choose another name",
                param_hint=option,
            )


def _same(a: Path, b: Path) -> bool:
    """Are two paths one file: by symbolic links, hard links or another spelling?"""
    try:
        return a.resolve() == b.resolve() or os.path.samefile(a, b)
    except OSError:
        return False


def read_by(model: str) -> Iterator[str | Path]:
    """Return a model's files: itself, graph text constants, and external data, for which ONNX is parsed."""
    yield model
    if model.endswith(".py"):
        yield side_file(model)
    elif not is_artifact(model):
        try:
            yield from (Path(model).parent / name for name in external_files(model))
        except DnncError:  # not a model: its reader says so
            return


def job_reads(job: Job) -> Iterator[str | Path]:
    """The files that a command with this model, these inputs and this tuning log reads."""
    for text in job.inputs:
        yield from (text, text.partition("=")[2] or text)
    if job.tune:
        yield job.tune
    yield from read_by(job.model)
