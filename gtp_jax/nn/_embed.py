"""Provides token embeddings, and output heads that multiply by the table of an embedding."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.nn import initializers
from jax.sharding import PartitionSpec

from .._numbers import is_size
from ..collectives import all_gather, gather_sequence, join_split, reduce_scatter, reduce_scatter_sequence
from ..layout import layouts_of_kernels
from ..mesh import current_view, sequence_axis
from ..ops import (
    SlottedWeight,
    check_concrete_ids,
    embedding_lookup,
    linear,
    not_ids,
    to_index,
    values_and_slot,
)
from ..weights import GradReduce, WeightGroup, split_features
from ._layer import Layer, between_layers, inside_layer
from ._norm import Norm, make_norm, normalized
from ._weight import Initializer, WeightOwner, apply_gathered, make_weight

default_embedding_init = initializers.normal(0.02)


class Embed(WeightOwner):
    """Looks up vectors in a table that has one row per token of the vocabulary. The vocabulary is usually sharded over
    tp, then gtp.

    A token outside the vocabulary, such as a negative one, raises an error if its value is concrete (not traced), as in
    a call outside of `jax.jit`. In a traced program, its vector is NaN, and so is every loss that depends on it;
    `gtp_jax.ops.check_ids` finds the token.

    If gtp does not divide the rows of each tp rank evenly, or if only shards along the features are whole blocks, gtp
    shards the features instead, if it divides them. If tp does not divide the vocabulary evenly, both tp and gtp shard
    the features in storage, if they divide them. See `gtp_jax.layout.layouts_of_kernels`.

    A lookup usually gathers the table, or its codes, over gtp. If the gtp ranks together look up fewer tokens than the
    table has rows on a tp rank, they exchange the tokens and the rows instead, which takes fewer bytes: the ranks
    gather the tokens, look up those that are in their own rows, and reduce-scatter the results. Backward gathers the
    gradients of these results. This requires a table that is neither quantized nor frozen, and whose shards are whole
    rows without padding.

    Args:
        num_embeddings: the number of rows.
        features: the size of a row.
        scale: if given, what rows are multiplied by, in `dtype`, as in Gemma. A `TiedHead` does not multiply by it.
        sequence_parallel: whether to shard the output along the sequence over tp.
        dtype: the dtype of the output.
        param_dtype: the dtype of the stored shards.
        grad_reduce: how weight gradients are summed over gtp: `"float32"`, `"bf16-wire"` or `"bf16"`; see
            `reduction_of`.
        embedding_init: the initializer, called with the key, `(num_embeddings, features)` and `param_dtype`.
        rngs: the random streams; only the stream `params` is used.

    Raises:
        ValueError: if a size is not a positive integer, or `grad_reduce` is not one of its names.
    """

    context_parallel = True

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        scale: float | None = None,
        sequence_parallel: bool = True,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        grad_reduce: GradReduce = "float32",
        embedding_init: Initializer = default_embedding_init,
        rngs: nnx.Rngs,
    ) -> None:
        super().__init__(dtype=dtype, grad_reduce=grad_reduce)
        if not (is_size(num_embeddings) and is_size(features)):
            raise ValueError(f"Embed({num_embeddings}, {features}): sizes must be whole numbers of at least 1.")
        (layout,) = layouts_of_kernels([(int(num_embeddings), int(features))], rows=0, split_dim=0)
        self.table = make_weight(layout, embedding_init, rngs.params(), param_dtype)
        self.scale = scale
        self.sequence_parallel = sequence_parallel

    def weights(self) -> tuple[nnx.Param, ...]:
        return (self.table,)

    @property
    def num_embeddings(self) -> int:
        """The number of rows."""
        return self.layouts[0].shape[0]

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps `(batch, ...)` integers to `(batch, ..., features)`.

        Raises:
            TypeError: if tokens are not integers.
            ValueError: if tokens are concrete (not traced), and at least one is outside the vocabulary; or if the mesh
                cannot divide the batch or the sequence evenly, or the table was built for other mesh degrees.
        """
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(not_ids("Embed", tokens))
        check_concrete_ids(tokens, self.num_embeddings, name="tokens")
        return super().__call__(tokens)

    def local(self, tokens: jax.Array) -> jax.Array:
        rows = apply_gathered((self,), self._embedding_lookup, tokens, groups=(self.group_for(tokens),))
        return rows if self.scale is None else rows * jnp.asarray(self.scale, rows.dtype)

    def group_for(self, x: jax.Array) -> WeightGroup:
        """Returns the weight group by which a lookup of tokens gathers the table.

        Usually, this is the group of the whole table. It is the group of this rank's own rows if the gtp ranks together
        look up fewer tokens than the table has rows on a tp rank. The table is then not gathered; the ranks send the
        rows that were looked up. This applies only in local view, and only to a table that is sharded evenly by rows
        and is neither quantized nor frozen.
        """
        group = self.group
        (layout,) = group.layouts
        by_rows = layout.ranks > 1 and layout.by_rows and not (layout.takes_part or layout.shard_padding.size)
        plain = group.wire is None and not group.frozen and x.ndim > 0 and current_view() == "local"
        return group.of_rank if by_rows and plain and layout.ranks * x.size < layout.use_shape[0] else group

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        axis = sequence_axis(self.roles, ndim + 1)
        tokens = PartitionSpec(self.roles.batch) if axis is None else PartitionSpec(self.roles.batch, axis)
        return tokens, between_layers(self.roles, ndim + 1, self.shards_sequence(ndim + 1))

    def attend(self, x: jax.Array) -> jax.Array:
        """Multiplies `(batch, ..., features)` by the table, and returns this rank's part of the logits (Press and Wolf
        2017, arXiv 1608.05859).

        If tp divides the vocabulary unevenly, the padding after a rank's last logit is -inf.

        Raises:
            ValueError: in global view; or if the table was built for other mesh degrees.
        """
        if current_view() == "global":
            raise ValueError(
                "Embed.attend is called on global arrays of a mesh. Make a `TiedHead(embed, norm=None, rngs=rngs)` and "
                "call it instead."
            )
        sharded = self.shards_sequence(x.ndim)
        x = gather_sequence(x.astype(self.dtype), self.roles.tensor, sequence_parallel=sharded)
        logits = split_features(self.with_weight(lambda w, x: linear(x, w), x), self.layouts)[0]
        split = self.layouts[0].split
        assert split is not None
        return split.mask(logits, -1, -math.inf)

    def _embedding_lookup(self, table: jax.Array | SlottedWeight, tokens: jax.Array) -> jax.Array:
        layout, split = self.layouts[0], self.layouts[0].split
        assert split is not None
        held = values_and_slot(table)[0].shape[0]
        exchanged = held < layout.use_shape[0]  # `table` has only this rank's rows; see `group_for`
        if len(split.owners) == 1 and not exchanged:
            return embedding_lookup(table, tokens)
        tokens = to_index(tokens)
        start, count = split.start(), split.count()
        if exchanged:
            tokens = all_gather(tokens, layout.axes, dim=0)
            start, count = start + held * lax.axis_index(layout.axes), held
        local = tokens - start
        here = (local >= 0) & (local < count)
        outside = (tokens < 0) | (tokens >= split.size)
        # `% held` spreads the tokens of other ranks over all rows: their gradients, which are zero, are not all added
        # to one row
        rows = embedding_lookup(table, local % held)
        rows = jnp.where(here[..., None], rows, jnp.where(outside, jnp.nan, 0)[..., None].astype(rows.dtype))
        if exchanged:
            rows = reduce_scatter(rows, layout.axes, dim=0)  # exact: all terms but one are zero
        return reduce_scatter_sequence(rows, self.roles.tensor, sequence_parallel=self.shards_sequence(rows.ndim))


class TiedHead(Layer):
    """Applies the final norm, and projects to the vocabulary with the table of an embedding. For a head with a weight
    of its own, use a `LayerNormDense`.

    The embedding and the head each gather the table, and each sum its gradient over the ranks. (A lookup of few tokens
    does not gather the table; see `Embed`.)

    Args:
        embed: the embedding whose table is used.
        norm: the norm, as in `LayerNormDense`; `None` for no norm.
        epsilon: the epsilon of the norm.
        param_dtype: the dtype of the norm's parameters.
        rngs: the random streams; only the stream `params` is used.

    Raises:
        ValueError: if `norm` is none of these.
    """

    fewest_dims = 2
    context_parallel = True

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
        self.scale, self.shift = make_norm(norm, embed.layouts[0].shape[1], rngs, param_dtype)
        self.norm: Norm = norm
        self.epsilon = epsilon
        self.sequence_parallel = embed.sequence_parallel

    def local(self, x: jax.Array) -> jax.Array:
        """Maps `(batch, ..., features)` to this rank's part of the logits `(batch, ..., vocab)`."""
        return self.embed.attend(self.prepare(x))

    def prepare(self, x: jax.Array) -> jax.Array:
        """Returns the input of the product with the table."""
        return normalized(self.norm, x, self.scale, self.shift, self.epsilon)

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        inside = inside_layer(self.roles, ndim, even=not self.converts[1])
        return between_layers(self.roles, ndim, self.shards_sequence(ndim)), inside

    @property
    def converts(self) -> tuple[bool, bool]:
        return False, self.embed.layouts[0].takes_part

    def to_global(self, y: Any) -> Any:
        split = self.embed.layouts[0].split
        return join_split(y, split, -1) if self.converts[1] and split is not None else y
