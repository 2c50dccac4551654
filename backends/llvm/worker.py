"""A compiler process, `python -m dnnc.backends.llvm.worker`: LLVM text on stdin, objects on stdout.

Hello:   {"ready": LLVM version}, no body; sent once, when llvmlite is loaded.
Request: {"key", "cpu", "features", "seconds"}, body: the text. SIGPROF ends the process after so many of CPU time.
Answer:  {"key"}, body: the object; or {"key", "error": message}, no body.
"""

from __future__ import annotations

import os
import signal
import sys

from dnnc.backends.llvm.compile import compile_text, llvm_version
from dnnc.backends.runtime.messages import receive, send
from dnnc.ir.errors import DnncError


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Control-C reaches the whole group: end without a traceback
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints to stdout must not get between the messages
    send(answers, {"ready": llvm_version()})
    while (message := receive(requests)) is not None:
        header, body = message
        _limit(header["seconds"])
        try:
            obj = compile_text(body.decode(), header["cpu"], header["features"])
        except DnncError as e:
            send(answers, {"key": header["key"], "error": str(e)})
        else:
            send(answers, {"key": header["key"]}, obj)
        _limit(0.0)


def _limit(seconds: float) -> None:
    """Let SIGPROF end the process after seconds of CPU time from now on; 0: never. Not on Windows."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the parent has ended
        sys.exit(1)
