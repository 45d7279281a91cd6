"""Names the places of a program, and stamps them: a stamp tells the host that a device has come to a place.

Stamps are in a program only if a recorder was started before the program was traced.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec

from .. import native
from ..mesh import current_view


@dataclasses.dataclass(frozen=True)
class Place:
    """A place in a program.

    Attributes:
        text: the place, for messages, such as `in backward of layers.3` or `after forward of layers.1`.
        waits: the operations that must end before the next place, such as `gather of layers.2`; empty if none is
            planned.
    """

    text: str
    waits: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.text}, before the end of the {' and the '.join(self.waits)}" if self.waits else self.text


class Places:
    """The places of all programs of this process. A place is known by its id, the same one in every program."""

    def __init__(self) -> None:
        self.stamping = False
        self._all: list[Place] = []
        self._ids: dict[tuple[Place, ...], int] = {}

    def id_of(self, places: Sequence[Place]) -> int:
        """Returns the id of the first of several places; those of the others follow it."""
        key = tuple(places)
        if key not in self._ids:
            self._ids[key] = len(self._all)
            self._all += key
        return self._ids[key]

    def digest(self) -> str:
        """Returns a text that is the same if all ids mean the same places."""
        return hashlib.sha256(repr(self._all).encode()).hexdigest()[:16]

    def text(self, id: int) -> str:
        """Returns the place with an id, for messages."""
        return str(self._all[id]) if id < len(self._all) else "a place of another program"


PLACES = Places()


def stamp(id: jax.Array) -> jax.Array:
    """Stamps a place on every device of the program.

    Args:
        id: the id of the place, int32 `(1,)`. Whatever must come before the stamp must be tied to it.

    Returns:
        The id. Whatever must come after the stamp must be tied to it.
    """
    if current_view() != "global":
        return native.stamp(id)
    whole = PartitionSpec()
    return jax.shard_map(native.stamp, in_specs=whole, out_specs=whole, check_vma=False)(id)
