"""JSON messages over a socket, a line each."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

Message = dict[str, Any]

# Nothing that processes tell each other comes near it. Who sends more is none of them.
_LONGEST = 1 << 24


class Line:
    """One end of a connection.

    Args:
        connection: a connected stream socket, owned from now on.

    Attributes:
        unread: messages that have come with others, for whoever takes one at a time.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._received = b""
        self.unread: list[Message] = []

    def fileno(self) -> int:
        """Returns the socket's file descriptor, for `select`."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Sends a message, from any thread. A peer that is gone is not told; its end is seen elsewhere."""
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """Waits for something to arrive and returns the messages that are complete.

        Returns:
            Messages; `None` if the peer is gone, or sends what is no message.
        """
        try:
            arrived = self._socket.recv(1 << 16)
        except OSError:
            arrived = b""
        if not arrived or len(self._received) > _LONGEST:
            return None
        *lines, self._received = (self._received + arrived).split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        return messages if all(isinstance(message, dict) for message in messages) else None

    def close(self) -> None:
        """Closes this end."""
        self._socket.close()
