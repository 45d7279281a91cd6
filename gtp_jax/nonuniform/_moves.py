"""What must be sent between devices so that arrays stored in one way are stored in another."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ._boxes import Box, elements, intersect


@dataclasses.dataclass(frozen=True)
class LeafBoxes:
    """An array, and which part of it each device stores, before and after.

    Devices are numbered from 0. The parts before together hold the whole array, and two of them are the same or have
    nothing in common. Several devices may store the same part.

    Attributes:
        dtype: of the array.
        before: part by device.
        after: part by device.
    """

    dtype: np.dtype
    before: Mapping[int, Box]
    after: Mapping[int, Box]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of an array, as it travels.

    Attributes:
        leaf: number of the array.
        box: the part.
    """

    leaf: int
    box: Box


@dataclasses.dataclass(frozen=True)
class Message:
    """All that one device sends to another, of arrays of one dtype.

    Attributes:
        sender: device.
        receiver: device.
        pieces: in the order in which they lie in the buffer.
    """

    sender: int
    receiver: int
    pieces: tuple[Piece, ...]

    @property
    def elements(self) -> int:
        """Elements of all pieces."""
        return sum(elements(piece.box) for piece in self.pieces)


@dataclasses.dataclass(frozen=True)
class Round:
    """Messages that travel at once: no device sends two of them, and none receives two.

    Attributes:
        dtype: of the buffers.
        messages: the longest first.
    """

    dtype: np.dtype
    messages: tuple[Message, ...]

    @property
    def elements(self) -> int:
        """Elements of every buffer: those of the longest message. Shorter ones are padded."""
        return max(message.elements for message in self.messages)


@dataclasses.dataclass(frozen=True)
class Moves:
    """A transfer, planned: see `plan_moves`.

    Attributes:
        leaves: the arrays.
        local: for each array and each device that stores a part of it after: the pieces that it had before.
        rounds: what is sent.
    """

    leaves: tuple[LeafBoxes, ...]
    local: tuple[Mapping[int, tuple[Box, ...]], ...]
    rounds: tuple[Round, ...]

    @property
    def bytes_needed(self) -> int:
        """Bytes that devices receive, all together, without padding."""
        return sum(self.received().values())

    @property
    def bytes_moved(self) -> int:
        """Bytes on the wire, all together, with the padding of shorter messages."""
        return sum(r.elements * r.dtype.itemsize * len(r.messages) for r in self.rounds)

    @property
    def bytes_in_turn(self) -> int:
        """Bytes that travel one after another, as rounds do: what sets the time on links of one speed."""
        return sum(r.elements * r.dtype.itemsize for r in self.rounds)

    @property
    def bytes_copied(self) -> int:
        """Bytes that the busiest device reads and writes, to fill its buffers and to assemble what it stores after."""
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
    """Plans how devices that store arrays in one way come to store them in another, with the fewest bytes received.

    A device takes what it can of what it stores already. What it lacks comes from the devices that store it; of several
    that store the same part, from the one that has the least to send so far. Messages are divided into rounds by
    edge colouring: the longest first, each into the first round in which neither of its ends is busy.
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
                piece = intersect(box, wanted)
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
