"""Moves rows to the experts that they chose, and back: gathers in both directions, with sums in at least float32 and in
a fixed order."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int32

from ._take import take


class Window(NamedTuple):
    """A window of consecutive places. Each place holds a pair of a row and one of its choices; pairs are sorted by
    expert.

    Attributes:
        pairs: int32 `(size,)`, the pair at each place, `row * choices + choice`.
        places: int32 `(rows, choices)`, the place of each pair; negative, or at least `size`, if the pair is outside
            the window.
        filled: int32, the number of places that hold a pair. The others are empty.
        first: int32, the first filled place. Filled places are consecutive, and wrap around from the last place to
            place 0.
    """

    pairs: jax.Array
    places: jax.Array
    filled: jax.Array
    first: jax.Array | int = 0

    @property
    def rows(self) -> jax.Array:
        """The row at each place."""
        return self.pairs // self.places.shape[1]

    @property
    def real(self) -> jax.Array:
        """Whether each place holds a pair, boolean `(size,)`."""
        return self._is_real(jnp.arange(self.pairs.shape[0]))

    @property
    def here(self) -> jax.Array:
        """Whether each pair has a place in the window, boolean `(rows, choices)`."""
        return (self.places >= 0) & (self.places < self.pairs.shape[0]) & self._is_real(self.places)

    @property
    def chosen(self) -> jax.Array:
        """Whether each row has a place in the window, boolean `(rows,)`."""
        return jnp.any(self.here, axis=1)

    def rolled(self, by: jax.Array) -> Window:
        """Returns the window rotated: place `by` becomes place 0, and the places before it become the last ones."""
        size = self.pairs.shape[0]
        places = jnp.where(self.here, (self.places - by) % size, -1)
        return Window(jnp.roll(self.pairs, -by), places, self.filled, (self.first - by) % size)

    def _is_real(self, place: jax.Array) -> jax.Array:
        return (place - self.first) % self.pairs.shape[0] < self.filled


def window_of(
    order: Int32[jax.Array, " pairs"],
    places: Int32[jax.Array, "rows choices"],
    total: jax.Array,
    start: jax.Array | int,
    size: int,
) -> Window:
    """Returns the window of `size` places that begins at place `start`.

    Args:
        order: the pair at each place, with pairs that belong to no expert last.
        places: the place of each pair.
        total: the number of pairs that belong to an expert.
        start: the first place of the window.
        size: the number of places of the window.
    """
    own = lax.dynamic_slice_in_dim(jnp.pad(order, (0, size)), start, size)
    return Window(own, places - start, jnp.clip(total - start, 0, size))


@jax.custom_vjp
def expand(x: Float[jax.Array, "rows features"], window: Window) -> Float[jax.Array, "size features"]:
    """Returns the row at each place of a window; empty places hold arbitrary rows. The gradient of a row is the sum
    over its places, in at least float32."""
    return take(x, window.rows)


def _expand_fwd(x: jax.Array, window: Window):
    return take(x, window.rows), window


def _expand_bwd(window: Window, gradient: jax.Array):
    return add_up(gradient, window), None


expand.defvjp(_expand_fwd, _expand_bwd)


@jax.custom_vjp
def sum_of_places(y: Float[jax.Array, "size features"], window: Window) -> Float[jax.Array, "rows features"]:
    """Returns for each row the sum over its places, in at least float32 and in order of its choices.

    Args:
        y: `(size, features)`, the values at the places of the window.
        window: the places.
    """
    return add_up(y, window)


def _sum_fwd(y: jax.Array, window: Window):
    return add_up(y, window), window


def _sum_bwd(window: Window, gradient: jax.Array):
    return take(gradient, window.rows, window.real), None


sum_of_places.defvjp(_sum_fwd, _sum_bwd)


@jax.custom_vjp
def shares_of_places(shares: Float[jax.Array, "rows choices"], window: Window) -> Float[jax.Array, " size"]:
    """Returns the routing weight of the pair at each place of a window; empty places hold arbitrary ones. Its gradient
    is computed by a gather too."""
    return jnp.ravel(shares)[window.pairs]


def _shares_fwd(shares: jax.Array, window: Window):
    return jnp.ravel(shares)[window.pairs], window


def _shares_bwd(window: Window, gradient: jax.Array):
    return jnp.where(window.here, gradient[_index(window)], 0), None


shares_of_places.defvjp(_shares_fwd, _shares_bwd)


def add_up(y: jax.Array, window: Window) -> jax.Array:
    """Computes `sum_of_places` without its custom gradient, for use inside the rules of gradients."""
    wide, index, here = jnp.promote_types(y.dtype, jnp.float32), _index(window), window.here

    def part(choice: int) -> jax.Array:
        return jnp.where(here[:, choice, None], y[index[:, choice]].astype(wide), 0)

    return functools.reduce(lax.add, map(part, range(here.shape[1]))).astype(y.dtype)


def _index(window: Window) -> jax.Array:
    return jnp.where(window.here, window.places, 0)
