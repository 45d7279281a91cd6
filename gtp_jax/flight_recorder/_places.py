"""Names the places of a program, and stamps them: a stamp tells the host that a device has come to a place.

Stamps are in a program only if a recorder was started before the program was traced.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from .. import native
from ..mesh import current_view, platform


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


def stamp(id: jax.Array, after: Sequence[jax.Array]) -> jax.Array:
    """Stamps a place on every device of the program.

    A GPU executes the operations of a program in one order, in which the stamp comes after what is tied to its id. On
    CPUs, it must be computed from the arrays.

    Args:
        id: the id of the place, int32 `(1,)`.
        after: the arrays that come before the stamp, which are tied to the id.

    Returns:
        The id. Whatever must come after the stamp must be tied to it.
    """
    own = after if platform() == "cpu" else ()
    if current_view() != "global":
        return native.stamp(id, *own)
    if own:
        return _in_global_view(tuple(x.ndim for x in own))(id, *own)
    whole = PartitionSpec()
    return jax.shard_map(native.stamp, in_specs=whole, out_specs=whole, check_vma=False)(id)


@functools.cache
def _in_global_view(ndims: tuple[int, ...]) -> Callable[..., jax.Array]:
    """Returns a stamp that takes arrays of these numbers of dimensions as they are sharded."""
    call = custom_partitioning(lambda id, *after: id)

    def partition(mesh: Any, shapes: Any, result: Any) -> Any:
        del result
        whole = NamedSharding(mesh, PartitionSpec(None))
        return mesh, native.stamp, whole, (whole, *(shape.sharding for shape in shapes[1:]))

    dims = itertools.count()
    operands = [" ".join(f"d{next(dims)}" for _ in range(ndim)) for ndim in ndims]
    call.def_partition(
        partition=partition,
        infer_sharding_from_operands=lambda mesh, shapes, result: NamedSharding(mesh, PartitionSpec(None)),
        sharding_rule=f"i, {', '.join(operands)} -> i",
    )
    return call
