"""The low-rank term that LoRA adds to the product with one kernel (Hu et al. 2021, arXiv 2106.09685)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.nn import initializers

from ..layout import Layout
from ..mesh import current_view, degree
from ..ops import linear, slotted
from ._frozen import Frozen
from ._weight import Initializer, placed_once

# uniform within +-1 / sqrt(features in): Kaiming-uniform with a = sqrt(5), as in PEFT
_init_a = initializers.variance_scaling(1 / 3, "fan_in", "uniform")
_WORDS = 2  # the number of words of a threefry key


class DropoutWords(Frozen):
    """The words that make an adapter's dropout differ from that of other adapters: uint32 `(2,)`.

    They are constant. `with_dropout` derives the key of a step from them; without it, nothing is dropped.
    """


class Adapter(nnx.Module):
    """Two low-rank matrices for a kernel: `scale * dropout(x) @ a @ b` is added to `x @ kernel`.

    For a column-parallel kernel, tp shards `b` like the kernel's output features, and `a` is whole. For a row-parallel
    kernel, tp shards `a` like the kernel's input features, and `b` is whole. If tp divides the features unevenly, both
    are stored whole, and each rank takes its part in the call. Both are whole over gtp.

    Args:
        layout: the layout of the kernel.
        rank: the rank of the product `a @ b`.
        scale: the factor of the product.
        dropout: the fraction of the input that is dropped in training.
        length: the number of layers of the stack that the adapter is in, whose adapters are stacked; `None` outside
            stacks.
        dtype: the dtype of the matrices.
        rngs: the random streams, of which `params` is used.

    Attributes:
        a: the first matrix, `(features in, rank)`, initially Kaiming-uniform.
        b: the second matrix, `(rank, features out)`, initially zero.
        words: the words for dropout; `None` without dropout.
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
        """Maps this tp rank's `(..., features in)` to `(..., rank)`. With a row-parallel kernel, the result is a
        partial sum, to be summed over tp.

        Args:
            x: the input.
            layout: the layout of the kernel.
            ranks: the mesh axes whose ranks have different examples, positions or features, and therefore different
                dropout masks.
            part: the index of the part of the sequence.
        """
        a = self.a.get_value()
        if layout.takes_part and layout.split_dim == 0 and layout.split is not None:
            a = layout.split.take(a, 0)
        if self.words is not None and self.words.get_metadata().get("live"):
            x = self._dropped(x, ranks, part)
        return _product(x, a) * jnp.asarray(self.scale, x.dtype)

    def output(self, low: jax.Array, layout: Layout) -> jax.Array:
        """Maps `(..., rank)` to this tp rank's `(..., features out)`."""
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


def drops(variables: Any) -> bool:
    """Returns whether a model, or a state of one, has adapters with dropout."""
    state = nnx.state(variables) if isinstance(variables, nnx.Module) else variables
    return any(isinstance(v, DropoutWords) for _, v in nnx.to_flat_state(state))


def with_dropout[M: nnx.Module](model: M, key: jax.Array) -> M:
    """Returns a copy of the model with the dropout of its adapters on. All calls of the copy use this key.

    Args:
        model: the model, which is not changed.
        key: the key, uint32 `(2,)`, of a step and a microbatch.
    """
    graph, state = nnx.split(model)

    def live(leaf: Any) -> Any:
        if not isinstance(leaf, DropoutWords):
            return leaf
        words = leaf.get_raw_value()
        folded = jax.vmap(lambda own: _folded(own, key))(jnp.reshape(words, (-1, _WORDS)))
        return leaf.replace(jnp.reshape(folded, words.shape), live=True)

    return nnx.merge(graph, jax.tree.map(live, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)))


def _folded(words: jax.Array, key: jax.Array) -> jax.Array:
    """Returns the words of one adapter for one step and microbatch, given their key."""
    return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(_key(words), key[0]), key[1]))


def _key(words: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(words, impl="threefry2x32")


def _product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns `x @ matrix` in the dtype of `x`. The gradient of the matrix has the dtype of the matrix."""
    return linear(x, slotted(matrix.T.astype(x.dtype), matrix.T))
