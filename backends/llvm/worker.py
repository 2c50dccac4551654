"""A compiler process: `python -m dnnc.backends.llvm.worker`. LLVM text comes in on stdin, objects go out on stdout,
until stdin ends.

A message, either way, is two little-endian uint32 (bytes of the header, bytes of the body), a JSON header, and the
body.
Hello:   {"ready": LLVM version}, no body; sent once, when llvmlite is loaded.
Request: {"key", "cpu", "features"}, body: the text.
Answer:  {"key"}, body: the object; or {"key", "error": message}, no body.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from typing import Any, BinaryIO

from dnnc.backends.llvm.compile import compile_text, llvm_version
from dnnc.ir.errors import DnncError

_LENGTHS = struct.Struct("<II")


def send(stream: BinaryIO, header: dict[str, Any], body: bytes = b"") -> None:
    """Write one message. OSError when the other side is gone."""
    head = json.dumps(header).encode()
    stream.write(_LENGTHS.pack(len(head), len(body)) + head + body)
    stream.flush()


def receive(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """Read one message; None when the stream has ended, in the middle of a message too."""
    lengths = stream.read(_LENGTHS.size)
    if len(lengths) < _LENGTHS.size:
        return None
    head_size, body_size = _LENGTHS.unpack(lengths)
    head, body = stream.read(head_size), stream.read(body_size)
    return (json.loads(head), body) if len(head) == head_size and len(body) == body_size else None


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Control-C reaches the whole group: end without a traceback
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints to stdout must not get between the messages
    send(answers, {"ready": llvm_version()})
    while (message := receive(requests)) is not None:
        header, body = message
        try:
            obj = compile_text(body.decode(), header["cpu"], header["features"])
        except DnncError as e:
            send(answers, {"key": header["key"], "error": str(e)})
        else:
            send(answers, {"key": header["key"]}, obj)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the parent has ended
        sys.exit(1)
