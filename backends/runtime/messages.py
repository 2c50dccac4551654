"""Messages between a process and its workers, over pipes.

A message is two little-endian uint32 (bytes of the header, bytes of the body), a JSON header, and the body.
"""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

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
