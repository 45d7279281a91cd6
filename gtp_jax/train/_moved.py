"""Moves arrays on the host through the device, one part at a time, and updates each part there.

[Note: copies that XLA does not know] XLA must not reuse, copy or hand on a buffer while a copy runs. What arrives is
given to `arrive`, which XLA keeps, and all that reads a buffer in between (the `after` of other calls) comes before its
`arrive` or `leave` by data. Otherwise XLA would insert a copy of the buffer; the handlers would then find no copy to
its address, and end the program with an error. While parts of an array leave, other parts may be read and written;
whatever else reads the array comes after all of them have left.
"""

from __future__ import annotations

import collections
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax import lax

from ..mesh import UPDATE_IN_BLOCKS, is_on_host
from ..ops import HostCopies, Leaving, Part
from ._known_at import Place

# Bytes that have begun to arrive before the part that is updated, and the same to leave. Where the gradients of a layer
# are known at once, the limit is at least the bytes of a layer, which then move under the backward of the next.
_BYTES_IN_FLIGHT = 1 << 30


class Move(NamedTuple):
    """A part of the arrays of a parameter that moves at once.

    Attributes:
        at: the place at which its gradient is known.
        number: the number of the parameter.
        part: the part.
    """

    at: Place
    number: int
    part: Part


class Gradients(Protocol):
    """The gradients of parts, which may be computed when they are asked for."""

    def of(self, moves: Sequence[Move], place: int) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the gradient of a part, and what must come before the part is updated."""
        ...

    def updated(self, moves: Sequence[Move], place: int, results: list[jax.Array]) -> list[jax.Array]:
        """Returns the arrays of a part after its update."""
        ...


class Known(NamedTuple):
    """Gradients that are all known.

    Attributes:
        arrays: the gradient of each parameter.
    """

    arrays: Sequence[jax.Array]

    def of(self, moves: Sequence[Move], place: int) -> tuple[jax.Array, list[jax.Array]]:
        # A gradient is often known before the last use of its weight. If XLA updated the weight then, it would copy it.
        found = [move.part.of(self.arrays[move.number]) for move in moves[place : place + 2]]
        return found[0], [first_of(gradient) for gradient in found]

    def updated(self, moves: Sequence[Move], place: int, results: list[jax.Array]) -> list[jax.Array]:
        return results


def first_of(array: jax.Array) -> jax.Array:
    """Returns the first element of an array, of shape `(1,)`."""
    return lax.slice_in_dim(array.reshape(-1), 0, 1)


def moved(
    new: Callable[[int, Part, list[Any]], list[jax.Array]],
    moves: Sequence[Move],
    gradients: Gradients,
    arrays: Sequence[Sequence[jax.Array]],
    reading: Sequence[set[int]],
    unrelated: Sequence[set[int]],
    *,
    in_place: bool,
) -> list[list[jax.Array]]:
    """Returns the arrays of all parameters after their update.

    Args:
        new: `(number, part, arrays)` returns a part of the arrays of a parameter after their update. Its arrays are
            that part of the gradient and of those before, or `None` for one that the update does not read.
        moves: the parts, in the order in which they move.
        gradients: their gradients.
        arrays: for each parameter, the arrays that the update replaces.
        reading: for each parameter, the numbers of those of its arrays that the update reads.
        unrelated: of these, the numbers of those whose new values do not depend on their old ones.
        in_place: whether the parts on the device are replaced one by one, because nothing else reads the arrays.
    """
    copies = HostCopies()
    current = [list(own) for own in arrays]
    on_host = [[n for n, array in enumerate(own) if is_on_host(array)] for own in current]
    sizes = [_bytes(move.part, current[move.number]) for move in moves]
    ends = [0, *itertools.accumulate(sizes)]
    most = _in_flight(moves, sizes)
    reads: list[dict[int, jax.Array]] = []  # for each part that has begun to arrive, what arrives, by number
    leaving: dict[int, dict[int, Leaving]] = {}  # for each part that has begun to leave, by number of the array
    left: list[jax.Array] = []  # what comes after the last parts that have left
    updated: list[jax.Array] = []  # the arrays of the last part
    on_device: list[jax.Array] = []  # what of the last part stays on the device

    def leave(places: Iterable[int]) -> list[jax.Array]:
        gone = []
        for place in places:
            number = moves[place].number
            for n, one in leaving.pop(place).items():
                current[number][n] = copies.leave(current[number][n], one, updated)
                gone.append(current[number][n])
        return gone

    for place, (_, number, part) in enumerate(moves):
        begun = len(reads)
        with jax.named_scope(UPDATE_IN_BLOCKS):
            left = leave([p for p in leaving if ends[place] - ends[p + 1] >= most]) or left
            while len(reads) < len(moves) and (len(reads) <= place or ends[len(reads)] - ends[place + 1] < most):
                _, of_next, next_part = moves[len(reads)]
                coming = {n: current[of_next][n] for n in on_host[of_next] if n in reading[of_next]}
                reads.append({n: copies.read(array, next_part, left) for n, array in coming.items()})
        gradient, known = gradients.of(moves, place)
        with jax.named_scope(UPDATE_IN_BLOCKS):
            next_reads = [read for more in reads[max(begun, place + 1) :] for read in more.values()]
            # The last part comes before the next arrives: its arrays as they are now, after any `leave` since.
            last = moves[place - 1].number if place else number
            written = [current[last][n] for n in on_host[last] if place]
            after = [*known, *next_reads, *written, *on_device]
            own = [None if n in on_host[number] else part.of(array) for n, array in enumerate(current[number])]
            for n, read in reads[place].items():
                own[n] = copies.arrive(read, after)
            results = new(number, part, [lax.optimization_barrier(gradient), *own])
            results = gradients.updated(moves, place, results)
            updated, on_device = results, []
            leaving[place] = {}
            for n, result in enumerate(results):
                if n in on_host[number]:
                    old = own[n] if n in unrelated[number] else None
                    arrived = [] if old is None else [first_of(old)]
                    current[number][n], leaving[place][n] = copies.write(current[number][n], part, result, arrived)
                else:
                    on_device.append(result)
                    current[number][n] = part.put(current[number][n], result)
                    if in_place:  # otherwise XLA reads the next part from the old array, which it then keeps
                        current[number][n] = lax.optimization_barrier(current[number][n])
    with jax.named_scope(UPDATE_IN_BLOCKS):
        leave(list(leaving))
    return current


def _in_flight(moves: Sequence[Move], sizes: Sequence[int]) -> int:
    """Returns how many bytes may be on their way in each direction.

    Args:
        moves: the parts, in the order in which they move.
        sizes: the bytes of each.
    """
    known_at = collections.Counter[Place]()
    for move, size in zip(moves, sizes, strict=True):
        known_at[move.at] += size
    return max(_BYTES_IN_FLIGHT, statistics.median_low(known_at.values()) if len(known_at) > 1 else 0)


def _bytes(part: Part, arrays: Iterable[jax.Array]) -> int:
    """Returns the bytes of a part of the arrays that are on the host."""
    return sum(math.prod(part.shape) * array.dtype.itemsize for array in arrays if is_on_host(array))
