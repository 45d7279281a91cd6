"""Token embedding and the output head."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jax.sharding import PartitionSpec

from ..collectives import gather_sequence, join_split, reduce_scatter_sequence
from ..layout import layouts_of_kernels
from ..mesh import current_view
from ..ops import SlottedWeight, check_concrete_ids, embedding_lookup, layer_norm, linear, rms_norm, to_index
from ..weights import GradReduce, split_features
from ._dense import Norm, check_norm
from ._layer import Layer, between_layers, inside_layer
from ._weight import Initializer, WeightOwner, make_vector, make_weight

default_embedding_init = initializers.normal(0.02)


class Embed(WeightOwner):
    """A table of vectors, its vocabulary sharded over tp, then gtp.

    A token outside the vocabulary, a negative one too, is an error where its value is at hand, as in a call outside of
    `jax.jit`; inside a program its vector is NaN, and with it the loss. `gtp_jax.check_ids` then names it.

    Where tp and gtp do not divide the vocabulary, the features are sharded; see `gtp_jax.layout.Layout`.

    Args:
        num_embeddings: number of rows.
        features: size of a row.
        sequence_parallel: shard the output's sequence over tp.
        dtype: of the output.
        param_dtype: dtype of the stored shards.
        grad_reduce: how weight gradients are summed over gtp: `"float32"`, `"bf16-wire"` or `"bf16"`; see
            `reduction_of`.
        embedding_init: called with the key and `(num_embeddings, features)`.
        rngs: the `params` stream is used.

    Raises:
        ValueError: if a size is not positive.
    """

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        sequence_parallel: bool = True,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        grad_reduce: GradReduce = "float32",
        embedding_init: Initializer = default_embedding_init,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(dtype=dtype, grad_reduce=grad_reduce)
        if min(num_embeddings, features) < 1:
            raise ValueError(f"Embed({num_embeddings}, {features}): sizes are whole numbers of at least 1.")
        (layout,) = layouts_of_kernels([(num_embeddings, features)], rows=0, split_dim=0)
        self.table = make_weight(layout, embedding_init, rngs.params(), param_dtype)
        self.sequence_parallel = sequence_parallel

    def weights(self) -> tuple[nnx.Param, ...]:
        return (self.table,)

    @property
    def num_embeddings(self) -> int:
        """Number of rows."""
        return self.layouts[0].shape[0]

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps `(batch, ...)` integers to `(batch, ..., features)`.

        Raises:
            TypeError: if tokens are not integers.
            ValueError: if a token whose value is at hand is outside the vocabulary.
        """
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"Embed takes integer tokens; got {tokens.dtype}.")
        check_concrete_ids(tokens, self.num_embeddings, name="tokens")
        return super().__call__(tokens)

    def local(self, tokens: jax.Array) -> jax.Array:
        return self.with_weight(self._embedding_lookup, tokens)

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        return PartitionSpec(self.roles.batch), between_layers(self.roles, self.shards_sequence(ndim + 1))

    def attend(self, x: jax.Array) -> jax.Array:
        """Returns logits by the same table (Press and Wolf 2017, arXiv 1608.05859), this rank's part of the vocabulary.

        Where tp divides the vocabulary unevenly, the padding behind a rank's last logit is -inf.
        """
        if current_view() == "global":
            raise ValueError("Embed.attend runs inside a shard_map or without a mesh; call it through a `TiedHead`.")
        sharded = self.shards_sequence(x.ndim)
        x = gather_sequence(x.astype(self.dtype), self.roles.tensor, sequence_parallel=sharded)
        logits = split_features(self.with_weight(lambda w, x: linear(x, w), x), self.layouts)[0]
        split = self.layouts[0].split
        assert split is not None
        return split.mask(logits, -1, -math.inf)

    def _embedding_lookup(self, table: jax.Array | SlottedWeight, tokens: jax.Array) -> jax.Array:
        split = self.layouts[0].split
        assert split is not None
        if len(split.owners) == 1:
            return embedding_lookup(table, tokens)
        tokens = to_index(tokens)
        local = tokens - split.start()
        here = (local >= 0) & (local < split.count())
        outside = (tokens < 0) | (tokens >= split.size)
        rows = embedding_lookup(table, jnp.where(here, local, 0))
        rows = jnp.where(here[..., None], rows, jnp.where(outside, jnp.nan, 0)[..., None].astype(rows.dtype))
        return reduce_scatter_sequence(rows, self.roles.tensor, sequence_parallel=self.shards_sequence(rows.ndim))


class TiedHead(Layer):
    """Final norm and projection to the vocabulary by an embedding's own table. Untied: a `LayerNormDense`.

    The table is gathered for each of its two uses, and its gradient scattered for each.

    Args:
        embed: whose table is used.
        norm: `rms` (RMSNorm), `layer` (LayerNorm with bias) or `None` for none.
        epsilon: of the norm.
        rngs: the `params` stream is used.

    Raises:
        ValueError: if `norm` is another.
    """

    fewest_dims = 2

    def __init__(
        self,
        embed: Embed,
        *,
        norm: Norm = "rms",
        epsilon: float = 1e-6,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__()
        self.embed = embed
        self.norm, self.epsilon = check_norm(norm), epsilon
        size, ones, zeros = embed.layouts[0].shape[1], initializers.ones, initializers.zeros
        self.scale: Any = make_vector(size, ones, rngs.params(), param_dtype) if norm else nnx.data(None)
        shift = norm == "layer"
        self.shift: Any = make_vector(size, zeros, rngs.params(), param_dtype) if shift else nnx.data(None)
        self.sequence_parallel = embed.sequence_parallel

    def local(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, ..., features)` to logits `(batch, ..., vocab)`, this rank's part."""
        if self.norm == "rms":
            x = rms_norm(x, self.scale.get_value(), epsilon=self.epsilon)
        elif self.norm == "layer":
            x = layer_norm(x, self.scale.get_value(), self.shift.get_value(), epsilon=self.epsilon)
        return self.embed.attend(x)

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        inside = inside_layer(self.roles, ndim, even=not self.converts[1])
        return between_layers(self.roles, self.shards_sequence(ndim)), inside

    @property
    def converts(self) -> tuple[bool, bool]:
        return False, self.embed.layouts[0].takes_part

    def to_global(self, y: Any) -> Any:
        split = self.embed.layouts[0].split
        return join_split(y, split, -1) if self.converts[1] and split is not None else y
