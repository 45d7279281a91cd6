"""Token embedding and the output head."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.nn import initializers
from jax.sharding import PartitionSpec

from ..collectives import enter, leave, split_features
from ..mesh import ALIGNMENT, BATCH_AXES, TP, Layout, current_view, degree
from ..ops import linear, look_up, rms_norm
from ._layer import Layer, between_layers, inside_layer
from ._weight import Initializer, WeightOwner, make_vector, make_weight

default_table_init = initializers.normal(0.02)


class Embed(WeightOwner):
    """A table of vectors, its vocabulary cut over tp, then gtp. Ids outside are taken for the nearest inside.

    Args:
        vocab: number of rows.
        features: size of a row.
        sequence_parallel: cut the output's sequence over tp.
        dtype: of the output.
        param_dtype: dtype of the stored slices.
        reduce_dtype: in which gradients are summed over gtp; `dtype` by default.
        alignment: as in `Dense`.
        table_init: called with the key and `(vocab, features)`.
        rngs: the `params` stream is used.

    Raises:
        ValueError: if tp does not divide `vocab`, or a size is not positive.
    """

    def __init__(
        self,
        vocab: int,
        features: int,
        *,
        sequence_parallel: bool = True,
        dtype: Any = jnp.bfloat16,
        param_dtype: Any = jnp.float32,
        reduce_dtype: Any | None = None,
        alignment: int = ALIGNMENT,
        table_init: Initializer = default_table_init,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(dtype=dtype, reduce_dtype=reduce_dtype)
        if min(vocab, features) < 1:
            raise ValueError(f"Embed({vocab}, {features}): sizes are whole numbers of at least 1.")
        layout = Layout.on_mesh((vocab, features), dim=0, tp_dim=0, alignment=alignment)
        self.table = make_weight(layout, table_init, rngs.params(), param_dtype)
        self.sequence_parallel = sequence_parallel

    def weights(self) -> tuple[nnx.Param, ...]:
        return (self.table,)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """`(batch, sequence)` integers to `(batch, sequence, features)`."""
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"Embed takes integer tokens; got {tokens.dtype}.")
        return super().__call__(tokens)

    def local(self, tokens: jax.Array) -> jax.Array:
        return self.with_weight(self._look_up, tokens)

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        del ndim
        return PartitionSpec(BATCH_AXES), between_layers(self.sequence_parallel)

    def attend(self, x: jax.Array) -> jax.Array:
        """Logits from the same table (Press and Wolf 2017, arXiv 1608.05859): features to vocabulary, cut over tp."""
        if current_view() == "global":
            raise ValueError("Embed.attend runs inside a shard_map or without a mesh; call it through a `TiedHead`.")
        x = enter(x.astype(self.dtype), sequence_parallel=self.sequence_parallel)
        return split_features(self.with_weight(lambda w, x: linear(x, w), x), self.layouts)[0]

    def _look_up(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        tokens = jnp.clip(tokens, 0, self.layouts[0].shape[0] - 1)
        if degree(TP) == 1:
            return look_up(table, tokens)
        rows = self.layouts[0].rows
        local = tokens - lax.axis_index(TP) * rows
        here = (local >= 0) & (local < rows)
        found = look_up(table, jnp.where(here, local, 0))
        return leave(jnp.where(here[..., None], found, 0), sequence_parallel=self.sequence_parallel)


class TiedHead(Layer):
    """Final RMSNorm and projection to the vocabulary by an embedding's own table. Untied: a `LayerNormDense`.

    The table is gathered for each of its two uses, and its gradient scattered for each.

    Args:
        embed: whose table is used.
        eps: of the norm.
        rngs: the `params` stream is used.
    """

    def __init__(self, embed: Embed, *, eps: float = 1e-6, param_dtype: Any = jnp.float32, rngs: nnx.Rngs) -> None:
        self.embed = embed
        self.scale = make_vector(embed.layouts[0].shape[1], initializers.ones, rngs.params(), param_dtype)
        self.eps = eps
        self.sequence_parallel = embed.sequence_parallel

    def local(self, x: jax.Array) -> jax.Array:
        """`(batch, sequence, features)` to logits `(batch, sequence, vocab)`, this rank's columns."""
        return self.embed.attend(rms_norm(x, self.scale.get_value(), eps=self.eps))

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        return between_layers(self.sequence_parallel), inside_layer(ndim)
