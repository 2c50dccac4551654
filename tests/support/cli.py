"""`dnnc` in this process. Typer builds its commands for the first call only: that takes as long as many a command."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from unittest.mock import patch

import typer.testing
from typer.testing import CliRunner, Result

from dnnc.cli.app import app

commands = cache(typer.testing._get_command)


def invoke(words: Sequence[str]) -> Result:
    """Run a command line of `dnnc`; the result has the exit code and what was printed."""
    with patch.object(typer.testing, "_get_command", commands):
        return CliRunner().invoke(app, list(words))
