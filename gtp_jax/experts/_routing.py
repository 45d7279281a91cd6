"""Options of a router: which experts a token is sent to, with which shares, and how their load is kept even."""

from __future__ import annotations

import dataclasses
from typing import get_args

import jax
import jax.numpy as jnp
from jax import lax

from .._foreign import brief
from .._words import AuxLossOf, Score
from ..ops import MOST, save_routing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """Defines how a router chooses experts.

    | | Mixtral, Qwen3 | DeepSeek-V3 (arXiv 2412.19437) |
    |---|---|---|
    | `score` | `"softmax"` | `"sigmoid"` |
    | `normalize`, `scale` | `True`, 1 | `True`, 2.5 |
    | `num_groups`, `top_groups` | 1, 1 | 8, 4 |
    | `bias_rate` | `None` | 0.001 |

    Attributes:
        score: how an expert's score is computed from the logits: by a softmax over all experts, or by a sigmoid of its
            own logit.
        normalize: whether a token's shares are divided by their sum.
        scale: the factor by which the shares are multiplied afterwards.
        num_groups: the number of groups of neighbouring experts, all of the same size.
        top_groups: the number of groups from which a token's experts are chosen: those of the highest score. A group's
            score is that of its best expert; with `sigmoid`, the sum of its best two.
        bias_rate: how far the bias of an expert moves in each step: down if it had more than an even share of the
            choices, up if it had less (arXiv 2408.15664). The bias is added to the scores only to choose experts, not
            to compute shares. `train_step` moves it once per step and reports the load; with `0.0` it only reports.
            `None` for no bias.
        aux_loss: the tokens over which the load-balancing term of `aux_loss_coeff` counts the load: those of each
            sequence, or those of the whole microbatch on all ranks, which requires a sum over ranks in each layer.
        z_loss_coeff: the weight of the router's z-loss, the squared logsumexp of a token's logits, averaged over tokens
            (ST-MoE, arXiv 2202.08906). Like the load-balancing term, it is added to the gradient, not to the reported
            loss.
        jitter: if a call is given a key, the router's inputs are multiplied by uniform random numbers from `1 - jitter`
            to `1 + jitter` (arXiv 2101.03961). Without a key, as in evaluation, they are unchanged.

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
                raise ValueError(f"`{name}` is {brief(value)}; it must be at least 0 and below {most:.7g}.")
        if not 0 < self.scale <= MOST:
            raise ValueError(f"`scale` is {brief(self.scale)}; it must be a number above 0, at most {MOST:.7g}.")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"`top_groups` is {self.top_groups} of {self.num_groups} groups; it must be at least 1 and at most all."
            )

    def check(self, num_experts: int, top_k: int) -> None:
        """Refuses groups that do not divide the experts, or that offer a token too few experts.

        Raises:
            ValueError: if the groups are invalid; the message names them.
        """
        if num_experts % self.num_groups:
            raise ValueError(
                f"`num_groups` is {self.num_groups}, which does not divide {num_experts} experts into equal groups."
            )
        found = self.top_groups * (num_experts // self.num_groups)
        if found < top_k:
            raise ValueError(
                f"`top_groups` {self.top_groups} of `num_groups` {self.num_groups} have {found} experts, fewer than "
                f"`top_k` {top_k}. Choose more groups, or larger ones."
            )

    def most_ranks(self, num_experts: int, top_k: int, experts: int) -> int:
        """Returns the most ranks that a single token's experts can be on.

        Args:
            num_experts: the number of experts of the layer.
            top_k: the number of experts per token.
            experts: the number of experts per rank.
        """
        size = num_experts // self.num_groups
        firsts = range(0, num_experts, size)
        of_groups = sorted((first + size - 1) // experts - first // experts + 1 for first in firsts)
        return min(num_experts // experts, top_k, sum(of_groups[-self.top_groups :]))

    def scores(self, logits: jax.Array) -> jax.Array:
        """Returns the scores of experts, `(..., experts)`."""
        return jax.nn.softmax(logits, axis=-1) if self.score == "softmax" else jax.nn.sigmoid(logits)

    def probs(self, scores: jax.Array) -> jax.Array:
        """Returns the scores normalized to sum to 1, for the load-balancing term."""
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
        """Returns each token's experts, chosen within its groups only.

        This must hold even if scores are infinite or NaN, because there is no room for tokens that go to more ranks.
        """
        grouped = jnp.reshape(scores, (*scores.shape[:-1], self.num_groups, -1))
        best = 2 if self.score == "sigmoid" and grouped.shape[-1] > 1 else 1
        of_group = jnp.sum(lax.top_k(grouped, best)[0], axis=-1)
        taken = jnp.sort(lax.top_k(of_group, self.top_groups)[1], axis=-1)
        size = grouped.shape[-1]
        own = jnp.take_along_axis(grouped, taken[..., None], axis=-2)
        place = lax.top_k(jnp.reshape(own, (*scores.shape[:-1], -1)), top_k)[1]
        return jnp.take_along_axis(taken, place // size, axis=-1) * size + place % size
