"""Sends JSON messages over a socket, one per line."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from typing import Any

Message = dict[str, Any]

# The maximum number of bytes of a message. The processes of a run send far less; whoever sends more is not one of them.
_LONGEST = 1 << 24


class Line:
    """One end of a connection.

    Args:
        connection: a connected stream socket, which this object owns from now on.

    Attributes:
        unread: messages that arrived together with others, for callers that take one at a time.
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
        """Sends a message; may be called from any thread. Ignores that a peer is gone, which `receive` reports."""
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[Message] | None:
        """Waits until data arrives, and returns the messages that are complete.

        Returns:
            The messages; `None` if the peer is gone or sends something that is not a message.
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
