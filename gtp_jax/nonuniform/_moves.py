"""Plans what devices must send each other to change how arrays are stored on them."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ._boxes import Box, elements, intersect, whole_of


@dataclasses.dataclass(frozen=True)
class LeafBoxes:
    """An array, and which part of it each device stores before and after the transfer.

    Devices are numbered from 0. The parts before the transfer together cover the whole array, and any two of them are
    either the same or disjoint. Several devices may store the same part. Parts may extend beyond the logical array:
    they are padded. Padding is not sent. After the transfer it is zero, except in a part that does not change.

    Attributes:
        dtype: the dtype of the array.
        before: the part that each device stores before the transfer.
        after: the part that each device stores after the transfer.
        shape: the logical shape; `None` if no part is padded.
    """

    dtype: np.dtype
    before: Mapping[int, Box]
    after: Mapping[int, Box]
    shape: tuple[int, ...] | None = None

    def logical(self, box: Box) -> Box | None:
        """Returns a part without its padding; `None` if it consists of padding."""
        return box if self.shape is None else intersect(box, whole_of(self.shape))


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of an array that is sent.

    Attributes:
        leaf: the index of the array.
        box: the part.
    """

    leaf: int
    box: Box


@dataclasses.dataclass(frozen=True)
class Message:
    """All data of one dtype that one device sends to another.

    Attributes:
        sender: the number of the sending device.
        receiver: the number of the receiving device.
        pieces: the pieces, in their order in the buffer.
    """

    sender: int
    receiver: int
    pieces: tuple[Piece, ...]

    @property
    def elements(self) -> int:
        """The number of elements of all pieces."""
        return sum(elements(piece.box) for piece in self.pieces)


@dataclasses.dataclass(frozen=True)
class Round:
    """Messages that are sent at the same time. No device sends two of them, and none receives two.

    Attributes:
        dtype: the dtype of the buffers.
        messages: the messages, the longest first.
    """

    dtype: np.dtype
    messages: tuple[Message, ...]

    @property
    def elements(self) -> int:
        """The number of elements of every buffer: that of the longest message. Shorter messages are padded."""
        return max(message.elements for message in self.messages)


@dataclasses.dataclass(frozen=True)
class Moves:
    """A planned transfer; see `plan_moves`.

    Attributes:
        leaves: the arrays.
        local: for each array, the pieces that each device needs after the transfer and already stores.
        rounds: the rounds of messages that are sent.
    """

    leaves: tuple[LeafBoxes, ...]
    local: tuple[Mapping[int, tuple[Box, ...]], ...]
    rounds: tuple[Round, ...]

    @property
    def bytes_needed(self) -> int:
        """The bytes that all devices together receive, without padding."""
        return sum(self.received().values())

    @property
    def bytes_moved(self) -> int:
        """The bytes on the wire of all devices together, including the padding of shorter messages."""
        return sum(r.elements * r.dtype.itemsize * len(r.messages) for r in self.rounds)

    @property
    def bytes_in_turn(self) -> int:
        """The bytes that are sent one after another, in successive rounds, which determine the time if all links have
        the same speed."""
        return sum(r.elements * r.dtype.itemsize for r in self.rounds)

    @property
    def bytes_copied(self) -> int:
        """The bytes that the busiest device reads and writes to fill buffers and to assemble the parts that change."""
        buffers = 2 * self.bytes_in_turn if self.rounds else 0
        made: dict[int, int] = defaultdict(int)
        for leaf in self.leaves:
            for device, box in leaf.after.items():
                if leaf.before.get(device) != box:
                    made[device] += 2 * elements(box) * leaf.dtype.itemsize
        return buffers + max(made.values(), default=0)

    def sent(self) -> dict[int, int]:
        """Returns the bytes that each device sends, without padding."""
        return self._by_device("sender")

    def received(self) -> dict[int, int]:
        """Returns the bytes that each device receives, without padding."""
        return self._by_device("receiver")

    def _by_device(self, end: str) -> dict[int, int]:
        found: dict[int, int] = defaultdict(int)
        for one in self.rounds:
            for message in one.messages:
                found[getattr(message, end)] += message.elements * one.dtype.itemsize
        return dict(found)


def plan_moves(leaves: Sequence[LeafBoxes]) -> Moves:
    """Plans how to change the way in which devices store arrays, with the fewest bytes received.

    A device reuses what it already stores. It gets the rest from the devices that store it; if several store the same
    part, from the one that has the least to send so far. The messages of each dtype are divided into rounds by greedy
    edge colouring: the longest first, each into the first round in which its sender does not send and its receiver does
    not receive.
    """
    load: dict[int, int] = defaultdict(int)
    pieces: dict[tuple[np.dtype, int, int], list[Piece]] = defaultdict(list)
    local: list[dict[int, tuple[Box, ...]]] = []
    for number, leaf in enumerate(leaves):
        holders: dict[Box, list[int]] = defaultdict(list)
        for device, box in leaf.before.items():
            holders[box].append(device)
        own: dict[int, tuple[Box, ...]] = {}
        for device, wanted in leaf.after.items():
            kept = []
            for box, who in holders.items():
                shared = intersect(box, wanted)
                piece = None if shared is None else leaf.logical(shared)
                if piece is None:
                    continue
                if device in who:
                    kept.append(piece)
                    continue
                sender = min(who, key=lambda one: (load[one], one))
                load[sender] += elements(piece) * leaf.dtype.itemsize
                pieces[leaf.dtype, sender, device].append(Piece(number, piece))
            own[device] = tuple(kept)
        local.append(own)
    messages = [(dtype, Message(s, r, tuple(some))) for (dtype, s, r), some in pieces.items()]
    rounds: list[Round] = []
    for dtype in dict.fromkeys(dtype for dtype, _ in messages):
        rounds += _coloured(dtype, [message for kind, message in messages if kind == dtype])
    return Moves(tuple(leaves), tuple(local), tuple(rounds))


def _coloured(dtype: np.dtype, messages: list[Message]) -> list[Round]:
    rounds: list[list[Message]] = []
    for message in sorted(messages, key=lambda m: (-m.elements, m.sender, m.receiver)):
        for one in rounds:
            if all(message.sender != other.sender and message.receiver != other.receiver for other in one):
                one.append(message)
                break
        else:
            rounds.append([message])
    return [Round(dtype, tuple(one)) for one in rounds]
