"""JSON messages over a socket, a line each."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

Message = dict[str, Any]


class Line:
    """One end of a connection.

    Args:
        connection: a connected stream socket, owned from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._received = b""

    def fileno(self) -> int:
        """Returns the socket's file descriptor, for `select`."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends a message, from any thread. A peer that is gone is not told; its end is seen elsewhere."""
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """Waits for something to arrive and returns the messages that are complete; `None` if the peer is gone."""
        try:
            arrived = self._socket.recv(1 << 16)
        except OSError:
            arrived = b""
        if not arrived:
            return None
        *lines, self._received = (self._received + arrived).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()
