"""Rows to the experts that they chose, and back: gathers both ways, with sums in float32 and in a fixed order."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int32


class Window(NamedTuple):
    """Consecutive places of the pairs of a row and one of its choices, sorted by expert.

    Attributes:
        pairs: int32 `(size,)`: the pair at each place, `row * choices + choice`.
        places: int32 `(rows, choices)`: the place of each pair; below 0, or `size` and above, of one that is elsewhere.
        count: int32: how many places there are; those behind hold nothing.
    """

    pairs: jax.Array
    places: jax.Array
    count: jax.Array

    @property
    def rows(self) -> jax.Array:
        """The row at each place."""
        return self.pairs // self.places.shape[1]

    @property
    def here(self) -> jax.Array:
        """Says of each pair whether it has a place."""
        return (self.places >= 0) & (self.places < self.count)


def window_of(
    order: Int32[jax.Array, " pairs"],
    places: Int32[jax.Array, "rows choices"],
    total: jax.Array,
    start: jax.Array | int,
    size: int,
) -> Window:
    """Returns the window of `size` places from `start` on.

    Args:
        order: the pair at each place; those of no expert last.
        places: the place of each pair.
        total: how many pairs are of an expert.
        start: the first place.
        size: how many.
    """
    own = lax.dynamic_slice_in_dim(jnp.pad(order, (0, size)), start, size)
    return Window(own, places - start, jnp.clip(total - start, 0, size))


@jax.custom_vjp
def expand(x: Float[jax.Array, "rows features"], window: Window) -> Float[jax.Array, "size features"]:
    """Returns the row at each place of a window, any behind the last; its gradient is the sum over a row's places, in
    float32."""
    return x[window.rows]


def _expand_fwd(x: jax.Array, window: Window):
    return x[window.rows], window


def _expand_bwd(window: Window, gradient: jax.Array):
    return _sum_of_places(gradient, None, window), None


expand.defvjp(_expand_fwd, _expand_bwd)


@jax.custom_vjp
def weighted_sum(
    y: Float[jax.Array, "size features"], shares: Float[jax.Array, "rows choices"], window: Window
) -> Float[jax.Array, "rows features"]:
    """Returns, of each row, the sum of what is at its places, each times its share, in float32 and choice after choice.

    Gradients of shares are sums over features in float32, whatever `y` is.

    Args:
        y: `(size, features)`.
        shares: `(rows, choices)`, float32 at least.
        window: the places.
    """
    return _sum_of_places(y, shares, window)


def _sum_fwd(y: jax.Array, shares: jax.Array, window: Window):
    return _sum_of_places(y, shares, window), (y, shares, window)


def _sum_bwd(saved: tuple[jax.Array, jax.Array, Window], gradient: jax.Array):
    y, shares, window = saved
    wide = _wide(y.dtype)
    there = gradient[window.rows].astype(wide)
    share = jnp.ravel(shares)[window.pairs].astype(wide)
    real = jnp.arange(y.shape[0]) < window.count
    to_y = jnp.where(real[:, None], there * share[:, None], 0).astype(y.dtype)
    products = jnp.sum(y.astype(wide) * there, axis=-1)
    to_shares = jnp.where(window.here, products[_index(window)], 0).astype(shares.dtype)
    return to_y, to_shares, None


weighted_sum.defvjp(_sum_fwd, _sum_bwd)


def _sum_of_places(y: jax.Array, shares: jax.Array | None, window: Window) -> jax.Array:
    """Returns, of each row, the sum of what is at its places, each times its share or as it is."""
    wide, index, here = _wide(y.dtype), _index(window), window.here

    def part(choice: int) -> jax.Array:
        own = y[index[:, choice]].astype(wide)
        own = own if shares is None else own * shares[:, choice, None].astype(wide)
        return jnp.where(here[:, choice, None], own, 0)

    return functools.reduce(lax.add, map(part, range(here.shape[1]))).astype(y.dtype)


def _index(window: Window) -> jax.Array:
    return jnp.where(window.here, window.places, 0)


def _wide(dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    return jnp.promote_types(dtype, jnp.float32)
