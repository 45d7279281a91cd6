"""Provides the low-rank term that LoRA adds to the product with one kernel (Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.nn import initializers

from ..layout import Layout
from ..mesh import current_view, degree
from ..ops import linear, slotted
from ..variables import Leaf, split_nodes
from ._frozen import Frozen
from ._weight import Initializer, placed_once

# uniform within +-1 / sqrt(features in): Kaiming-uniform with a = sqrt(5), as in PEFT
_init_a = initializers.variance_scaling(1 / 3, "fan_in", "uniform")
_WORDS = 2  # the number of words of a threefry key


class DropoutWords(Frozen):
    """The seed of one adapter's dropout: the two words of a threefry key, uint32 `(2,)`, which differ between adapters.
    In a `Stack`, there is a leading dimension of layers.

    Steps do not change it. `with_dropout` combines it with the key of a step. In a model that `with_dropout` did not
    return, nothing is dropped.
    """


class Adapter(nnx.Module):
    """Holds two low-rank matrices, `a` and `b`, for one kernel: `scale * dropout(x) @ a @ b` is added to `x @ kernel`.

    For a column-parallel kernel, tp shards `b` like the kernel's output features, and `a` is whole. For a row-parallel
    kernel, tp shards `a` like the kernel's input features, and `b` is whole. If tp divides the features unevenly, both
    are stored whole on every rank, and each rank slices out its own part in the call. For other kernels, both are
    whole. gtp shards neither matrix.

    Args:
        layout: the layout of the kernel.
        rank: the rank of the product `a @ b`.
        scale: the factor of the product.
        dropout: the fraction of the input that is dropped in training.
        length: the number of layers of the `Stack` that contains the adapter. The matrices then have a leading
            dimension of this size. `None` outside stacks.
        dtype: the dtype of the matrices.
        rngs: the random streams; only the stream `params` is used.

    Attributes:
        a: the first matrix, `(features in, rank)`, initially Kaiming-uniform. In a `Stack`, both matrices have a
            leading dimension of layers.
        b: the second matrix, `(rank, features out)`, initially zero.
        words: the seed of the dropout (`DropoutWords`); `None` without dropout.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        scale: float,
        dropout: float,
        *,
        length: int | None,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        ahead = () if length is None else (length,)
        stored: Any = {"eager_sharding": current_view() == "global"}
        key = rngs.params()

        def make(init: Initializer, shape: tuple[int, int], dim: int) -> nnx.LoRAParam:
            keys = jax.random.split(key, math.prod(ahead))
            values = jax.vmap(lambda key: init(key, shape, dtype))(keys)
            sharding: list[Any] = [None] * (len(ahead) + 2)
            if layout.split is not None and layout.split_dim == dim and not layout.takes_part:
                sharding[len(ahead) + dim] = layout.split.axis
            return placed_once(
                nnx.LoRAParam(jnp.reshape(values, (*ahead, *shape)), out_sharding=tuple(sharding), **stored)
            )

        features_in, features_out = layout.shape
        self.a = make(_init_a, (features_in, rank), 0)
        self.b = make(initializers.zeros, (rank, features_out), 1)
        self.rank, self.scale, self.dropout = rank, scale, dropout
        self.words: Any = nnx.data(None)
        if dropout:
            words = jax.random.bits(jax.random.fold_in(key, 1), (*ahead, _WORDS), jnp.uint32)
            self.words = placed_once(DropoutWords(words, out_sharding=(None,) * words.ndim, **stored))

    def low(self, x: jax.Array, layout: Layout, ranks: tuple[str, ...], part: int) -> jax.Array:
        """Returns `scale * dropout(x) @ a`, which maps this tp rank's `(..., features in)` to `(..., rank)`. For a
        row-parallel kernel, the result is a partial sum, which the caller must sum over tp. Nothing is dropped unless
        `with_dropout` returned the model.

        Args:
            x: the input.
            layout: the layout of the kernel.
            ranks: the mesh axes whose ranks have different examples, positions or features. In local view, these ranks
                draw different dropout masks.
            part: the index of this part of the sequence. Parts have different dropout masks.
        """
        a = self.a.get_value()
        if layout.takes_part and layout.split_dim == 0 and layout.split is not None:
            a = layout.split.take(a, 0)
        if self.words is not None and self.words.get_metadata().get("live"):
            x = self._dropped(x, ranks, part)
        return _product(x, a) * jnp.asarray(self.scale, x.dtype)

    def output(self, low: jax.Array, layout: Layout) -> jax.Array:
        """Maps the result of `low`, `(..., rank)`, to this tp rank's `(..., features out)`."""
        b = self.b.get_value()
        if layout.takes_part and layout.split_dim == 1 and layout.split is not None:
            b = layout.split.take(b, 1)
        return _product(low, b)

    def _dropped(self, x: jax.Array, ranks: tuple[str, ...], part: int) -> jax.Array:
        key = jax.random.fold_in(_key(self.words.get_value()), part)
        axes = tuple(axis for axis in ranks if degree(axis) > 1)
        if axes and current_view() == "local":
            key = jax.random.fold_in(key, lax.axis_index(axes))
        kept = jax.random.bernoulli(key, 1 - self.dropout, x.shape)
        return jnp.where(kept, x / jnp.asarray(1 - self.dropout, x.dtype), jnp.zeros((), x.dtype))


def drops(leaves: Iterable[Leaf]) -> bool:
    """Returns whether a model with these leaves has adapters with dropout."""
    return any(isinstance(leaf, DropoutWords) for leaf in leaves)


def with_dropout[M: nnx.Module](model: M, key: jax.Array) -> M:
    """Returns a copy of the model in which the dropout of the adapters is turned on. All calls of the copy use the same
    key.

    Args:
        model: the model, which is not changed.
        key: the key of a step and a microbatch, uint32 `(2,)`.
    """
    template, leaves = split_nodes(model)

    def live(leaf: Leaf) -> Leaf:
        if not isinstance(leaf, DropoutWords):
            return leaf
        words = leaf.get_raw_value()
        folded = jax.vmap(lambda own: _folded(own, key))(jnp.reshape(words, (-1, _WORDS)))
        return leaf.replace(jnp.reshape(folded, words.shape), live=True)

    return template.merged(list(map(live, leaves)))


def _folded(words: jax.Array, key: jax.Array) -> jax.Array:
    """Returns one adapter's words with the key of a step and a microbatch folded in."""
    return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(_key(words), key[0]), key[1]))


def _key(words: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns `x @ matrix` in the dtype of `x`. The gradient of the matrix has the dtype of the matrix."""
    return linear(x, slotted(matrix.T.astype(x.dtype), matrix.T))
