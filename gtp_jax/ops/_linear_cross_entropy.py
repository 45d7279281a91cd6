"""Cross-entropy of the product of tokens and a head, in chunks of tokens, without the logits of all tokens.

[Note: gradients made in forward]
The result is one number, so its cotangent is one number too, which scales the gradients. Forward can therefore compute
the gradients of a chunk while it has the chunk's logits, and backward only scales them (Liger Kernel, arXiv 2410.10989,
does so too). Three products per chunk are the fewest: recomputing the logits in backward would take a fourth. No weight
is needed in backward, so nothing gathers it again.

A chunk's logits are an array in the dtype of the product, as those of a head are; XLA fuses everything between the
products. In bfloat16, an array in float32 would double what a chunk takes. The gradient of the weight is summed over
chunks in at least float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Float, Int

from ._as_one import as_one
from ._ids import to_index
from ._save import save_for_backward

_TILE = 128  # the number of tokens of a chunk is a multiple of it, so that products have whole tiles


class TokenLoss(NamedTuple):
    """The loss of a token: `(1 - s) * (L - logit of the target) + s * (L - mean logit) + z * L**2`, where `L` is the
    log-sum-exp of its logits and `s` is `label_smoothing`.

    Attributes:
        vocab_size: the size of the whole vocabulary.
        axis: the manual mesh axis that shards the vocabulary; `None` if it is whole.
        soft_cap: the largest magnitude of logits, `soft_cap * tanh(logits / soft_cap)`; `None` for no cap.
        z_loss: the factor `z`.
        label_smoothing: the share of the loss that is the same for all of the vocabulary.
    """

    vocab_size: int
    axis: str | None = None
    soft_cap: float | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0


class Head(NamedTuple):
    """The arrays of a head. All but `bias` and `slot` must be present.

    Attributes:
        weight: this rank's slice of the vocabulary, `(vocab_slice, features)`, or `(features, vocab_slice)`.
        bias: `(vocab_slice,)`, or `None`.
        slot: an array of the weight's shape, which receives the weight's gradient in its own dtype; see
            `ops.SlottedWeight`. `None` if the weight receives it.
    """

    weight: jax.Array
    bias: jax.Array | None = None
    slot: jax.Array | None = None


class Product(NamedTuple):
    """How tokens are multiplied by a head.

    Attributes:
        vocab_dim: the dimension of the weight that is the vocabulary.
        precision: the precision of all products, as in `jax.lax.dot_general`.
        chunk: the fewest tokens of a chunk. Below twice this number, all tokens are one chunk.
    """

    vocab_dim: int = 0
    precision: Any = None
    chunk: int = 4096


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def linear_token_losses(
    loss: TokenLoss,
    product: Product,
    x: Float[jax.Array, "tokens features"],
    head: Head,
    targets: Int[jax.Array, " tokens"],
    weights: Float[jax.Array, " tokens"],
) -> jax.Array:
    """Returns the weighted sum of the losses of tokens, in at least float32.

    A token with a negative target has no loss, and affects nothing, even if its `x` is not finite. For a target of
    `vocab_size` or more, the loss is NaN, and has no gradient. The function itself can be differentiated in reverse
    mode only; its gradients can be differentiated by `jax.jvp` or `jax.grad`.

    What is differentiated is computed in forward; see [Note: gradients made in forward].

    Args:
        loss: the loss of a token.
        product: how tokens are multiplied by the head.
        x: the tokens. `x` and the weight must have the same dtype, which the logits also have.
        head: the head.
        targets: ids in the whole vocabulary.
        weights: the weight of each token's loss, in at least float32.
    """
    total, _ = as_one(functools.partial(_sums, loss, product, _Wanted()), x, head, targets, weights)
    return total


class _Wanted(NamedTuple):
    """Flags of the operands that are differentiated."""

    x: bool = False
    weight: bool = False
    bias: bool = False


class _Made(NamedTuple):
    """What forward makes for backward, `None` where it is not wanted. The gradient of the weight and of the bias have
    at least float32.

    Attributes:
        x: the gradient of `x`.
        weight: the gradient of the head's weight.
        bias: the gradient of its bias.
        losses: the loss of each token, which is the gradient of its weight.
    """

    x: jax.Array | None
    weight: jax.Array | None
    bias: jax.Array | None
    losses: jax.Array


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Dtypes:
    """The dtypes of the arrays of a head."""

    weight: Any
    bias: Any
    slot: Any


def _forward(loss: TokenLoss, product: Product, *operands: Any):
    of_x, of_head = operands[:2]
    receives = of_head.weight if of_head.slot is None else of_head.slot
    wanted = _Wanted(of_x.perturbed, receives.perturbed, of_head.bias is not None and of_head.bias.perturbed)
    x, head, targets, weights = jax.tree.map(lambda one: one.value, operands)
    total, made = as_one(functools.partial(_sums, loss, product, wanted), x, head, targets, weights)
    dtypes = _Dtypes(*(None if a is None else a.dtype for a in head))
    return total, (save_for_backward(made), dtypes)


def _backward(loss: TokenLoss, product: Product, saved: tuple[_Made, _Dtypes], cotangent: Any):
    del product
    made, dtypes = saved
    if isinstance(cotangent, SymbolicZero):
        cotangent = jnp.zeros((), made.losses.dtype)
    to_weights = made.losses * cotangent
    if loss.axis is not None:
        # every rank's loss depends on every rank's logits
        cotangent = lax.psum(cotangent, loss.axis)

    def scaled(gradient: jax.Array | None, dtype: Any) -> Any:
        return None if gradient is None else (gradient * cotangent).astype(dtype)

    to_x = None if made.x is None else scaled(made.x, made.x.dtype)
    to_weight, to_bias = scaled(made.weight, dtypes.slot or dtypes.weight), scaled(made.bias, dtypes.bias)
    to_head = Head(to_weight, to_bias) if dtypes.slot is None else Head(cast(Any, None), to_bias, to_weight)
    return to_x, to_head, None, to_weights


linear_token_losses.defvjp(_forward, _backward, symbolic_zeros=True)


def _sums(
    loss: TokenLoss,
    product: Product,
    wanted: _Wanted,
    x: jax.Array,
    head: Head,
    targets: jax.Array,
    weights: jax.Array,
) -> tuple[jax.Array, _Made]:
    """Returns the sum of the losses, and what is wanted for backward.

    If the chunks do not divide the tokens, the last one overlaps the one before it. It is computed first, without the
    tokens of both, and the other overwrites what it has stored for them. So no array is padded, which would copy it.
    """
    tokens, targets = x.shape[0], to_index(targets)
    size, count = _chunks(tokens, product.chunk)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    made = _Made(
        jnp.zeros_like(x) if wanted.x else None,
        jnp.zeros(head.weight.shape, wide) if wanted.weight else None,
        jnp.zeros(head.bias.shape, wide) if wanted.bias and head.bias is not None else None,
        jnp.zeros(tokens, wide),
    )

    def add(made: _Made, first: jax.Array | int, begin: jax.Array | int) -> _Made:
        part, own, factors = (lax.dynamic_slice_in_dim(a, first, size) for a in (x, targets, weights))
        own = jnp.where(jnp.arange(size) + first < begin, -1, own)
        part = jnp.where(own[:, None] < 0, 0, part)
        return _added(loss, product, made, part, head, own, factors.astype(wide), first)

    if count == 1:
        made = add(made, 0, 0)
    else:
        firsts = jnp.arange(-1, count - 1) * size
        begins = firsts.at[0].set((count - 1) * size)
        firsts = firsts.at[0].set(tokens - size)
        # a second derivative computes a chunk again, instead of saving its logits
        step = jax.checkpoint(lambda made, at: (add(made, *at), None), prevent_cse=False)
        made, _ = lax.scan(step, made, (firsts, begins))
    return jnp.sum(jnp.where(targets < 0, 0, made.losses * weights.astype(wide))), made


def _chunks(tokens: int, chunk: int) -> tuple[int, int]:
    """Returns the number of tokens of a chunk, and the number of chunks: the largest for which chunks of equal
    size have at least `chunk` tokens."""
    count = max(1, tokens // chunk)
    if count == 1:
        return tokens, 1
    size = -(-tokens // count)
    size = min(tokens, -(-size // _TILE) * _TILE) if chunk % _TILE == 0 else size
    return size, -(-tokens // size)


def _added(
    loss: TokenLoss,
    product: Product,
    made: _Made,
    x: jax.Array,
    head: Head,
    targets: jax.Array,
    weights: jax.Array,
    first: jax.Array | int,
) -> _Made:
    """Adds a chunk of tokens, which begins with the token `first`, to what has been made of others."""
    vocab, precision = product.vocab_dim, product.precision
    logits = lax.dot_general(x, head.weight, (((1,), (1 - vocab,)), ((), ())), precision)
    if head.bias is not None:
        logits += head.bias.astype(logits.dtype)
    losses, slope = _loss_and_slope(loss, logits, targets)
    put = functools.partial(lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
    made = made._replace(losses=put(made.losses, losses))
    if made.x is None and made.weight is None and made.bias is None:
        return made
    slope = (slope * weights[:, None]).astype(logits.dtype)
    if made.x is not None:
        gradient = lax.dot_general(slope, head.weight, (((1,), (vocab,)), ((), ())), precision)
        made = made._replace(x=put(made.x, gradient.astype(made.x.dtype)))
    if made.weight is not None:
        factors = (slope, x) if vocab == 0 else (x, slope)
        own = lax.dot_general(*factors, (((0,), (0,)), ((), ())), precision, made.weight.dtype)
        made = made._replace(weight=made.weight + own)
    if made.bias is not None:
        made = made._replace(bias=made.bias + jnp.sum(slope, axis=0, dtype=made.bias.dtype))
    return made


def _loss_and_slope(loss: TokenLoss, logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the loss of each token, and its gradient with respect to the token's logits, both in at least float32."""
    size, axis, smoothing = logits.shape[-1], loss.axis, loss.label_smoothing
    start = 0 if axis is None else lax.axis_index(axis) * size
    index = lax.broadcasted_iota(targets.dtype, logits.shape, 1) + start
    # a rank's slice may be padded beyond the vocabulary
    padded = axis is not None and size * lax.axis_size(axis) != loss.vocab_size
    wide = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    capped = wide if loss.soft_cap is None else loss.soft_cap * jnp.tanh(wide / loss.soft_cap)
    known = jnp.where(index < loss.vocab_size, capped, -jnp.inf) if padded else capped
    # The maximum is a constant shift: its derivatives cancel, and `pmax` is not differentiable.
    top = lax.stop_gradient(jnp.max(known, axis=-1))
    top = top if axis is None else lax.pmax(lax.stop_gradient(top), axis)
    here = index == targets[:, None]
    total = jnp.sum(jnp.exp(known - top[:, None]), axis=-1)
    picked = jnp.sum(jnp.where(here, capped, 0), axis=-1)
    others = jnp.sum(jnp.where(index < loss.vocab_size, capped, 0), axis=-1) if smoothing else jnp.zeros_like(picked)
    if axis is not None:
        total, picked, others = lax.psum((total, picked, others), axis)
    log_sum_exp = jnp.log(total) + top
    losses = log_sum_exp - (1 - smoothing) * picked
    slope = jnp.exp(known - log_sum_exp[:, None])
    if loss.z_loss:
        losses += loss.z_loss * log_sum_exp**2
        slope *= 1 + 2 * loss.z_loss * log_sum_exp[:, None]
    slope -= jnp.where(here, 1 - smoothing, 0).astype(slope.dtype)
    if smoothing:
        share = smoothing / loss.vocab_size
        losses -= share * others
        slope -= jnp.where(index < loss.vocab_size, share, 0).astype(slope.dtype)
    if loss.soft_cap is not None:
        slope *= 1 - (capped / loss.soft_cap) ** 2
    inside = targets < loss.vocab_size
    losses = jnp.where(inside, jnp.where(targets < 0, 0, losses), jnp.nan)
    return losses, jnp.where(((targets >= 0) & inside)[:, None], slope, 0)
