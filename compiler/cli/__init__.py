"""The command line. In: arguments. Out: text or JSON on stdout, errors on stderr, an exit code.

0 is success, 1 a mistake of the user (a `DnncError`), 2 wrong usage, 3 a failure of dnnc itself, 130 an interruption.
"""

from __future__ import annotations

import gc

# objects between two looks for garbage, of which a compiler makes next to none: it spent 7 % of its time looking
YOUNG = 100_000


def main(argv: list[str] | None = None) -> int:
    """Run `dnnc` with these arguments, or the process's own. Ends by SystemExit with the exit code."""
    gc.set_threshold(YOUNG, 20, 50)
    try:
        from dnnc.cli.app import app  # typer takes 0.1 s: `import dnnc.cli` alone stays free of it

        app(args=argv, prog_name="dnnc")
    except KeyboardInterrupt:
        return 130
    return 0
