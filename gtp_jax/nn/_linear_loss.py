"""Computes the cross-entropy loss of a head's logits in chunks of tokens, without the logits of all tokens."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from .._numbers import is_size
from ..collectives import gather_sequence
from ..hook import call_with_weights, coded, placement_of
from ..mesh import axes_in_order, current_roles, current_view, degree, sequence_axis, spec_of_tokens
from ..ops import Head, Product, SlottedWeight, TokenLoss, call_with_zeros, linear_token_losses, values_and_slot
from ._dense import Dense
from ._embed import Embed, TiedHead
from ._layer import Layer, between_layers
from ._loss import counted, vocabulary


def linear_cross_entropy(
    x: jax.Array,
    head: Any,
    targets: jax.Array,
    weights: jax.Array | None = None,
    *,
    vocab_size: int | None = None,
    soft_cap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk: int = 4096,
) -> tuple[jax.Array, jax.Array]:
    """Returns what `cross_entropy(head(x), targets, weights)` returns, without the logits of all tokens.

        x = model.hidden(tokens)                                # what the head would get
        total, count = gtp_jax.nn.linear_cross_entropy(x, model.head, targets)

    Each rank computes the logits of its own tokens in chunks. If the loss is differentiated, forward also computes the
    gradients of `x` and of the head, which backward only scales. The head's weight is gathered once, and its gradient
    is summed over chunks in at least float32, and over ranks once.

    Views, tokens that are left out, and derivatives are those of `cross_entropy`. A second derivative computes each
    chunk again. A token that is left out affects nothing, even if its `x` is not finite.

    Args:
        x: `(batch, ..., features)`, the input of the head.
        head: an unsharded array `(features, vocab)`; a `Dense` or a `LayerNormDense` with one kernel that is not
            row-parallel, a `TiedHead`, or an `Embed`, whose table is used; or an `nnx.Linear` or `nnx.Embed`, which
            `gtp_jax.shard` may have sharded.
        targets: `(batch, ...)` integers, as in `cross_entropy`. Inside a `shard_map` with sequence parallelism, they
            are those of the whole sequence, although `x` is this rank's part.
        weights: `(batch, ...)`, the weight of each token in both sums, as in `cross_entropy`.
        vocab_size: as in `cross_entropy`, if the head is an array.
        soft_cap: the largest magnitude of logits: `soft_cap * tanh(logits / soft_cap)` replaces them.
        z_loss: the factor of the square of each token's log-sum-exp, which is added to its loss.
        label_smoothing: the share of the target's probability that is spread evenly over the whole vocabulary.
        chunk: the fewest tokens of a chunk. Below twice this number, a rank has one chunk. Larger chunks take more
            memory, and add to the head's gradient less often.

    Raises:
        ValueError: if shapes are not consistent with each other; if a concrete target is not below the vocabulary size;
            if `vocab_size` is required but missing, or does not fit; if an option is out of range; if a recipe
            multiplies by the head in a quantized format; or if the head has adapters, several kernels, or products of
            its own, or is row-parallel.
        TypeError: if targets are not integers, or the head is anything else.
    """
    _check_options(soft_cap, z_loss, label_smoothing, chunk)
    how = _How(TokenLoss(0, None, soft_cap, z_loss, label_smoothing), Product(chunk=chunk))
    if isinstance(head, Dense | TiedHead | Embed):
        total, weights = _of_own(how, x, head, targets, weights, vocab_size)
    elif isinstance(head, nnx.Linear | nnx.Embed):
        total, weights = _of_stock(how, x, head, targets, weights, vocab_size)
    elif isinstance(head, jax.Array | np.ndarray) and head.ndim == 2:
        total, weights = _of_array(how, x, head, targets, weights, vocab_size)
    else:
        what = f"an array of shape {head.shape}" if hasattr(head, "shape") else f"a {type(head).__name__}"
        raise TypeError(
            f"`head` is {what}; it must be an array (features, vocab), a `gtp_jax.Dense`, `LayerNormDense`, `TiedHead` "
            f"or `Embed`, or an `nnx.Linear` or `nnx.Embed`. {_INSTEAD}"
        )
    return total, jnp.sum(weights.astype(total.dtype))


_INSTEAD = "With another head, use `gtp_jax.cross_entropy(head(x), targets)`."

# The sum of the losses of all tokens of the view, and the weights of tokens, which are 0 where a token is left out. The
# weights are summed outside of calls that gather: a step refuses a count of tokens that depends on parameters.
Total = tuple[jax.Array, jax.Array]


class _How(NamedTuple):
    """How losses are computed; `TokenLoss.vocab_size` and `TokenLoss.axis` are not known yet."""

    loss: TokenLoss
    product: Product

    def total(
        self, x: jax.Array, head: Head, targets: jax.Array, weights: jax.Array, vocab_size: int, axis: str | None
    ) -> jax.Array:
        """Returns the sum over this rank's tokens."""
        loss = self.loss._replace(vocab_size=vocab_size, axis=axis)
        weights = jnp.reshape(weights, -1).astype(jnp.promote_types(x.dtype, jnp.float32))
        x, targets = jnp.reshape(x, (-1, x.shape[-1])), jnp.reshape(targets, -1)
        losses = functools.partial(linear_token_losses, loss, self.product)
        return call_with_zeros(losses, x, head, targets, weights)

    def in_view(
        self, x: jax.Array, head: Head, targets: jax.Array, weights: jax.Array, vocab_size: int, sharded: bool
    ) -> jax.Array:
        """Returns the sum over all tokens of the view in scope.

        Args:
            x: the input of the head, in the dtype of its weight.
            head: the arrays of the head.
            targets: the targets.
            weights: the weights.
            vocab_size: the size of the whole vocabulary.
            sharded: whether tp shards the vocabulary.
        """
        roles = current_roles()
        axis = roles.tensor if sharded else None
        if current_view() != "global":
            return self.total(x, head, targets, weights, vocab_size, axis)
        by_token = spec_of_tokens(roles, targets.shape)

        def local(x: jax.Array, head: Head, targets: jax.Array, weights: jax.Array) -> jax.Array:
            total = self.total(x, head, targets, weights, vocab_size, axis)
            return lax.psum(total, axes_in_order(by_token)) if len(by_token) else total

        of_weight = PartitionSpec(axis) if self.product.vocab_dim == 0 else PartitionSpec(None, axis)
        of_head: Any = Head(of_weight, None if head.bias is None else PartitionSpec(axis))  # pyright: ignore[reportArgumentType]
        into = (by_token, of_head, by_token, by_token)
        mapped = jax.shard_map(local, in_specs=into, out_specs=PartitionSpec(), check_vma=False)
        return mapped(x, head, targets, weights)


def _of_array(
    how: _How, x: jax.Array, head: Any, targets: jax.Array, weights: jax.Array | None, vocab_size: int | None
) -> Total:
    _check_shapes(x, head.shape[0], targets, weights)
    sharded, vocab_size = vocabulary(head.shape[1], vocab_size, "linear_cross_entropy")
    targets, weights = counted(targets, weights, vocab_size)
    x, head = (jnp.asarray(a, jnp.result_type(x, head)) for a in (x, head))
    how = how._replace(product=how.product._replace(vocab_dim=1))
    return how.in_view(x, Head(head), targets, weights, vocab_size, sharded), weights


def _of_stock(
    how: _How, x: jax.Array, head: Any, targets: jax.Array, weights: jax.Array | None, vocab_size: int | None
) -> Total:
    _check_stock(head)
    linear = isinstance(head, nnx.Linear)
    size, features = (head.out_features, head.in_features) if linear else (head.num_embeddings, head.features)
    _check_size(vocab_size, size)
    _check_shapes(x, features, targets, weights)
    targets, weights = counted(targets, weights, size)
    how = how._replace(product=how.product._replace(vocab_dim=int(linear), precision=getattr(head, "precision", None)))

    def compute(head: Any, x: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        kernel, bias = (head.kernel, head.bias) if linear else (head.embedding, None)
        arrays = x, kernel[...], None if bias is None else bias[...]
        x, weight, bias = head.promote_dtype(arrays, dtype=head.dtype)
        sharded, _ = vocabulary(weight.shape[int(linear)], size, "linear_cross_entropy")
        return how.in_view(x, Head(weight, bias), targets, weights, size, sharded)

    return call_with_weights(compute, head, x, targets, weights), weights


def _of_own(
    how: _How, x: jax.Array, head: Any, targets: jax.Array, weights: jax.Array | None, vocab_size: int | None
) -> Total:
    _check_own(head)
    layout = _owner(head).layouts[0]
    size, features = layout.shape[layout.rows], layout.shape[layout.cols]
    _check_size(vocab_size, size)
    whole = degree(head.roles.tensor) if current_view() == "local" and head.shards_sequence(x.ndim) else 1
    _check_shapes(x, features, targets, weights, whole)
    targets, weights = counted(targets, weights, size)
    return _LossOfHead(how, head, x.ndim)(x, targets, weights), weights


class _LossOfHead(Layer):
    """Computes the sum of the losses of one of gtp_jax's own heads.

    Args:
        how: how losses are computed.
        head: the head.
        ndim: the number of dimensions of the head's input.
    """

    fewest_dims = 2
    context_parallel = True

    def __init__(self, how: _How, head: Any, ndim: int) -> None:
        super().__init__()
        self._roles = head.roles
        self.how, self.head = how, head
        axis = sequence_axis(self.roles, ndim)
        self.tokens = PartitionSpec(self.roles.batch) if axis is None else PartitionSpec(self.roles.batch, axis)

    @property
    def title(self) -> str:
        return self.head.title

    def local(self, x: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
        head, owner = self.head, _owner(self.head)
        layout = owner.layouts[0]
        split = layout.split
        x = (x if isinstance(head, Embed) else head.prepare(x)).astype(owner.dtype)
        x = gather_sequence(x, self.roles.tensor, sequence_parallel=head.shards_sequence(x.ndim))
        weight = owner.gathered()
        values, slot = values_and_slot(weight)
        slot = slot if isinstance(weight, SlottedWeight) else None
        bias = head.bias.get_value() if isinstance(head, Dense) and head.bias is not None else None
        if bias is not None and split is not None and layout.takes_part:
            bias = split.take(bias, 0)
        axis = None if split is None or len(split.owners) == 1 else split.axis
        return self.how.total(x, Head(values, bias, slot), targets, weights, layout.shape[layout.rows], axis)

    def partitions(self, ndim: int) -> tuple[PartitionSpec, PartitionSpec]:
        return between_layers(self.roles, ndim, self.head.shards_sequence(ndim)), PartitionSpec()

    def partition_of_input(self, name: int | str, array: Any) -> PartitionSpec:
        del name, array
        return self.tokens

    def to_global(self, y: jax.Array) -> jax.Array:
        axes = axes_in_order(self.tokens)
        return lax.psum(y, axes) if axes else y


def _owner(head: Any) -> Any:
    return head.embed if isinstance(head, TiedHead) else head


def _check_own(head: Any) -> None:
    name = type(head).__name__
    if isinstance(head, TiedHead | Embed):
        return
    if head.parallel == "row":
        raise ValueError(f"`head` is a row-parallel {name}; it must have `parallel='column'` or `None`.")
    if head.names != ("",):
        raise ValueError(f"`head` is a {name} with the kernels {list(head.names)}; it must have one kernel. {_INSTEAD}")
    if head.lora is not None:
        raise ValueError(f"`head` is a {name} with adapters, which `linear_cross_entropy` does not add. {_INSTEAD}")
    if head.operands is not None:
        raise ValueError(_quantized(head, "kernel"))


def _check_stock(head: Any) -> None:
    """Refuses a Flax layer that does not multiply as its class in Flax does."""
    base = nnx.Linear if isinstance(head, nnx.Linear) else nnx.Embed
    own = getattr(type(head), "_gtp_class", type(head))
    method = "__call__" if base is nnx.Linear else "attend"
    products = getattr(head, "dot_general", lax.dot_general), getattr(head, "preferred_element_type", None)
    if getattr(own, method) is not getattr(base, method) or products != (lax.dot_general, None):
        raise ValueError(
            f"`head` is a {type(head).__name__} with a `{method}`, a `dot_general` or a `preferred_element_type` of "
            f"its own, which `linear_cross_entropy` would not use. {_INSTEAD}"
        )
    name = "kernel" if base is nnx.Linear else "embedding"
    placement = placement_of(getattr(head, name))
    format = None if placement is None else coded(getattr(head, name), placement)
    if format is not None and format.operands is not None:
        raise ValueError(_quantized(head, name))


def _quantized(head: Any, name: str) -> str:
    return (
        f"the recipe in scope multiplies by the {name} of `head`, a {type(head).__name__}, in a quantized format, "
        "which `linear_cross_entropy` does not support. Exclude the head, as recipes do by default if it is named "
        "'*head' or '*embed*'; or use `gtp_jax.cross_entropy(head(x), targets)`."
    )


def _check_size(vocab_size: int | None, size: int) -> None:
    if vocab_size not in (None, size):
        raise ValueError(
            f"`vocab_size` is {vocab_size}, but the vocabulary of `head` has {size} tokens. Leave `vocab_size` out: it "
            "is only for a head that is an array."
        )


def _check_shapes(
    x: jax.Array, features: int, targets: jax.Array, weights: jax.Array | None, of_sequence: int = 1
) -> None:
    """Checks the shapes of a call.

    Args:
        x: the input of the head.
        features: the number of features that the head takes.
        targets: the targets.
        weights: the weights, or `None`.
        of_sequence: the number of ranks that divide dimension 1 of `x`, but not that of the targets.
    """
    tokens = tuple(size * (of_sequence if dim == 1 else 1) for dim, size in enumerate(x.shape[:-1]))
    if not x.ndim or x.shape[-1] != features:
        raise ValueError(f"`x` has shape {x.shape}, but `head` takes {features} features as its last dimension.")
    if targets.shape != tokens or (weights is not None and weights.shape != tokens):
        given = None if weights is None else weights.shape
        raise ValueError(
            f"`x` {x.shape}, targets {targets.shape}, weights {given}: targets and weights must have the shape "
            f"{tokens}, that of all tokens whose logits the head returns."
        )


def _check_options(soft_cap: Any, z_loss: Any, label_smoothing: Any, chunk: Any) -> None:
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"`soft_cap` is {soft_cap!r}; it must be a number above 0, or `None` for no cap.")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"`z_loss` is {z_loss!r}; it must be a number of at least 0.")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"`label_smoothing` is {label_smoothing!r}; it must be at least 0 and below 1.")
    if not is_size(chunk):
        raise ValueError(f"`chunk` is {chunk!r}; it must be a whole number of tokens, at least 1.")
