"""Choices of a router of experts: which experts a token takes, with which shares, and what keeps their load even."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from .._foreign import brief
from ..ops import MOST, save_routing

Score = Literal["softmax", "sigmoid"]
AuxLossOf = Literal["sequence", "microbatch"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router chooses experts.

    | | Mixtral, Qwen3 | DeepSeek-V3 (arXiv 2412.19437) |
    |---|---|---|
    | `score` | `"softmax"` | `"sigmoid"` |
    | `normalize`, `scale` | `True`, 1 | `True`, 2.5 |
    | `num_groups`, `top_groups` | 1, 1 | 8, 4 |
    | `bias_rate` | `None` | 0.001 |

    Attributes:
        score: of an expert, from its logit: a softmax over all experts, or each by itself.
        normalize: whether a token's shares are divided by their sum.
        scale: what they are multiplied with then.
        num_groups: groups of neighbouring experts, equally many each.
        top_groups: groups of which a token takes experts: those of the highest score, which is that of their best
            expert, or with `sigmoid` the sum of their best two.
        bias_rate: how far the bias of an expert moves in each step, down if it had more than an even share of the
            choices, up if it had less (arXiv 2408.15664). The bias is added to scores where experts are chosen, and to
            no share. `train_step` moves it, once a step, and reports the load; `0.0` only reports. `None`: no bias.
        aux_loss: over what `aux_loss_coeff`'s term takes the load: each sequence, or the whole microbatch over all
            ranks, which takes a sum over ranks in each layer.
        z_loss_coeff: weight of the mean square of the logarithm of the sum of a token's exponentiated logits (ST-MoE,
            arXiv 2202.08906). Like the term for the load it enters the gradient and not the reported loss.
        jitter: inputs of the router are multiplied with uniform random numbers from `1 - jitter` to `1 + jitter`
            (arXiv 2101.03961), where a call is given a key; without one, as in an evaluation, they are not.

    Raises:
        ValueError: if a value is out of its range.
    """

    score: Score = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    bias_rate: float | None = None
    aux_loss: AuxLossOf = "sequence"
    z_loss_coeff: float = 0.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for name, kinds in (("score", get_args(Score)), ("aux_loss", get_args(AuxLossOf))):
            if getattr(self, name) not in kinds:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}; it must be {' or '.join(map(repr, kinds))}.")
        for name, least, most in (("z_loss_coeff", 0.0, MOST), ("jitter", 0.0, 1.0), ("bias_rate", 0.0, MOST)):
            value = getattr(self, name)
            if value is not None and not least <= value < most:
                raise ValueError(f"`{name}` is {brief(value)}; it must be a number from 0 up, below {most:.7g}.")
        if not 0 < self.scale <= MOST:
            raise ValueError(f"`scale` is {brief(self.scale)}; it must be a number above 0, at most {MOST:.7g}.")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"`top_groups` is {self.top_groups} of {self.num_groups} groups; it must be at least 1 and at most all."
            )

    def check(self, num_experts: int, top_k: int) -> None:
        """Refuses groups that experts cannot be divided into, or in which a token finds too few.

        Raises:
            ValueError: naming them.
        """
        if num_experts % self.num_groups:
            raise ValueError(
                f"`num_groups` is {self.num_groups}, which does not divide {num_experts} experts into equal groups."
            )
        found = self.top_groups * (num_experts // self.num_groups)
        if found < top_k:
            raise ValueError(
                f"`top_groups` {self.top_groups} of `num_groups` {self.num_groups} have {found} experts, fewer than "
                f"`top_k` {top_k}. Take more or larger groups."
            )

    def most_ranks(self, num_experts: int, top_k: int, experts: int) -> int:
        """Returns how many ranks have experts of one token at most.

        Args:
            num_experts: of the layer.
            top_k: experts a token.
            experts: of a rank.
        """
        size = num_experts // self.num_groups
        firsts = range(0, num_experts, size)
        of_groups = sorted((first + size - 1) // experts - first // experts + 1 for first in firsts)
        return min(num_experts // experts, top_k, sum(of_groups[-self.top_groups :]))

    def scores(self, logits: jax.Array) -> jax.Array:
        """Returns the scores of experts, `(..., experts)`."""
        return jax.nn.softmax(logits, axis=-1) if self.score == "softmax" else jax.nn.sigmoid(logits)

    def probs(self, scores: jax.Array) -> jax.Array:
        """Returns scores that sum to 1, of which the load's term is."""
        return scores if self.score == "softmax" else scores / jnp.sum(scores, axis=-1, keepdims=True)

    def choose(self, scores: jax.Array, bias: jax.Array | None, top_k: int) -> jax.Array:
        """Returns each token's experts, int32 `(..., top_k)`."""
        scores = lax.stop_gradient(scores)
        scores = scores if bias is None else scores + lax.stop_gradient(bias)
        chosen = lax.top_k(scores, top_k)[1] if self.num_groups == 1 else self._within_groups(scores, top_k)
        return save_routing(chosen)

    def shares(self, scores: jax.Array, chosen: jax.Array) -> jax.Array:
        """Returns the shares of chosen experts, `(..., top_k)`."""
        own = jnp.take_along_axis(scores, chosen, axis=-1)
        if self.normalize:
            own = own / jnp.sum(own, axis=-1, keepdims=True)
        return own if self.scale == 1.0 else own * self.scale

    def _within_groups(self, scores: jax.Array, top_k: int) -> jax.Array:
        """Returns experts of a token's groups, whatever their scores are: none of another group, not even where scores
        are infinite or no numbers, as there is no room for tokens that go to more ranks."""
        grouped = jnp.reshape(scores, (*scores.shape[:-1], self.num_groups, -1))
        best = 2 if self.score == "sigmoid" and grouped.shape[-1] > 1 else 1
        of_group = jnp.sum(lax.top_k(grouped, best)[0], axis=-1)
        taken = jnp.sort(lax.top_k(of_group, self.top_groups)[1], axis=-1)
        size = grouped.shape[-1]
        own = jnp.take_along_axis(grouped, taken[..., None], axis=-2)
        place = lax.top_k(jnp.reshape(own, (*scores.shape[:-1], -1)), top_k)[1]
        return jnp.take_along_axis(taken, place // size, axis=-1) * size + place % size
