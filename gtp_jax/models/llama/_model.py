"""Llama: RMSNorm, rotary embedding, grouped-query attention, gated MLP (Touvron et al. 2023, arXiv 2302.13971,
2307.09288).

With experts instead of the MLP, it is Mixtral (arXiv 2401.04088); with an attention window, Mistral (2310.06825); with
biases of queries, keys and values, Qwen2 (2407.10671); with windows in five of six layers, norms after the branches and
a scaled embedding, Gemma 3 (2503.19786). Phi-3 (2404.14219) is a Llama of which parts of heads may not be rotated.
gpt-oss (2508.10925) is a Mixtral with sinks, biases and a window in every other layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ...experts import MoE
from ...mesh import current_view, degree, sequence_axis
from ...nn import (
    MLP,
    Attention,
    Embed,
    Layer,
    LayerNormDense,
    NormLayer,
    Reach,
    Stack,
    TiedHead,
    cross_entropy,
    linear_cross_entropy,
    run_chain,
)
from ...ops import positions_of
from ._config import LlamaConfig

_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}  # of which the latter approximates by tanh


@dataclasses.dataclass(frozen=True)
class SteepSilu:
    """The function `x * sigmoid(slope * x)`."""

    slope: float

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jax.nn.sigmoid(self.slope * x)


class LlamaBlock(Layer):
    """Attention followed by an MLP or experts, each on a residual branch."""

    context_parallel = True

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        shared = _shared(config)
        reach = _built_with(config)
        self.attention = Attention(
            config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rope_theta=reach.rope_theta,
            rope_scaling=reach.rope_scaling,
            qk_norm=config.qk_norm,
            qkv_bias=config.qkv_bias,
            use_bias=config.out_bias,
            sinks=config.sinks,
            rotary_dim=config.rotary_dim,
            window=reach.window,
            scale=None if config.query_pre_attn_scalar is None else config.query_pre_attn_scalar**-0.5,
            norm=config.norm,
            sequence_exchange=config.sequence_exchange,
            epsilon=config.epsilon,
            rngs=rngs,
            **shared,
        )
        if config.num_experts:
            self.mlp = MoE(
                config.hidden_size,
                config.intermediate_size,
                num_experts=config.num_experts,
                top_k=config.top_k,
                parallel=config.expert_parallel,
                aux_loss_coeff=config.aux_loss_coeff,
                axes=config.expert_axes,
                routing=config.routing,
                shared_hidden=config.shared_hidden,
                transport=config.transport,
                round_size=config.round_size,
                exchange_chunks=config.exchange_chunks,
                activation=jax.nn.silu if config.swiglu_limit is None else SteepSilu(config.swiglu_alpha),
                biases=config.expert_biases,
                limit=config.swiglu_limit,
                epsilon=config.epsilon,
                rngs=rngs,
                **shared,
            )
        else:
            self.mlp = MLP(
                config.hidden_size,
                config.intermediate_size,
                activation=_ACTIVATIONS[config.activation],
                norm=config.norm,
                epsilon=config.epsilon,
                rngs=rngs,
                **shared,
            )
        self.after_attention, self.after_mlp = (_branch_norm(config, rngs) for _ in range(2))

    def local(
        self,
        x: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        reach: Reach | None = None,
    ) -> jax.Array:
        branch = self.attention(x, positions=positions, segment_ids=segment_ids, reach=reach)
        x = x + (branch if self.after_attention is None else self.after_attention(branch))
        branch = self.mlp(x)
        return x + (branch if self.after_mlp is None else self.after_mlp(branch))


class Llama(nnx.Module):
    """Embedding, blocks and head. They run as one chain unless a call takes `logits_at`."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs) -> None:
        shared = _shared(config)
        scale = config.hidden_size**0.5 if config.scale_embedding else None
        self.embed = Embed(config.vocab_size, config.hidden_size, scale=scale, rngs=rngs, **shared)
        self.blocks = Stack(
            lambda rngs: LlamaBlock(config, rngs=rngs),
            config.num_layers,
            schedule=config.schedule,
            remat=config.remat,
            sequence_parallel=config.sequence_parallel,
            each=[{"reach": reach} for reach in config.reaches] if _differ(config) else None,
            rngs=rngs,
        )
        self.loss_chunk = config.loss_chunk
        norm: dict[str, Any] = {"norm": config.norm, "epsilon": config.epsilon}
        self.head = (
            TiedHead(self.embed, param_dtype=shared["param_dtype"], rngs=rngs, **norm)
            if config.tie_embeddings
            else LayerNormDense(config.hidden_size, config.vocab_size, rngs=rngs, **norm, **shared)
        )

    def __call__(
        self,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        logits_at: jax.Array | None = None,
    ) -> jax.Array:
        """Maps `(batch, sequence)` tokens to `(batch, sequence, vocab)` logits.

        Args:
            tokens: the token ids, `(batch, sequence)`.
            positions: the positions of the tokens, `(batch, sequence)`; by default 0, 1, ... in each document.
            segment_ids: an id for each document packed into a row, `(batch, sequence)`; by default, each row is one
                document.
            logits_at: the index in each row of the one token whose logits are returned, `(batch,)`; the result is then
                `(batch, 1, vocab)`. By default, the logits of all tokens are returned.
        """
        if logits_at is None:
            return run_chain(tokens, self.embed, self.blocks, self.head, shared=_given(positions, segment_ids))
        if current_view() == "local" and (axis := sequence_axis(self.embed.roles, 3)) is not None:
            raise ValueError(
                f"`logits_at` names tokens of whole sequences, of which each rank has a part on a mesh with {axis} = "
                f"{degree(axis)}. Call the model in global view."
            )
        x = self.hidden(tokens, positions=positions, segment_ids=segment_ids)
        return self.head(jnp.take_along_axis(x, logits_at[:, None, None], axis=1))

    def hidden(
        self, tokens: jax.Array, *, positions: jax.Array | None = None, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """Maps `(batch, sequence)` tokens to the head's input, `(batch, sequence, hidden_size)`. Arguments are those of
        a call."""
        return run_chain(tokens, self.embed, self.blocks, shared=_given(positions, segment_ids))


def next_token_loss(model: Any, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted sum of token losses and the sum of the weights, as `gtp_jax.nn.cross_entropy` does.

    The batch has `tokens` and `targets`, and optionally `weights`, `positions` and `segment_ids`. If documents are
    packed, set the target of each document's last token to -1, because the next token belongs to another document.

    If the model's configuration has a `loss_chunk`, the logits of all tokens are never computed at once; see
    `gtp_jax.nn.linear_cross_entropy`.
    """
    shared = {"positions": batch.get("positions"), "segment_ids": batch.get("segment_ids")}
    if model.loss_chunk:
        x = model.hidden(batch["tokens"], **shared)
        return linear_cross_entropy(x, model.head, batch["targets"], batch.get("weights"), chunk=model.loss_chunk)
    logits = model(batch["tokens"], **shared)
    return cross_entropy(logits, batch["targets"], batch.get("weights"), vocab_size=model.embed.num_embeddings)


next_token_loss.context_parallel = True  # pyright: ignore[reportFunctionMemberAccess]


def _given(positions: jax.Array | None, segment_ids: jax.Array | None) -> dict[str, jax.Array]:
    """Returns the arrays that every block receives."""
    if positions is None and segment_ids is not None:
        positions = positions_of(segment_ids)
    shared = {"positions": positions, "segment_ids": segment_ids}
    return {name: array for name, array in shared.items() if array is not None}


def _differ(config: LlamaConfig) -> bool:
    """Returns whether layers differ in what their attention reaches."""
    return len(set(config.reaches)) > 1


def _built_with(config: LlamaConfig) -> Reach:
    """Returns the reach with which attention is built: that of all layers, or if they differ, that of whole
    sequences, so that caches have room for all tokens."""
    return Reach(rope_theta=config.rope_theta) if _differ(config) else config.reaches[0]


def _branch_norm(config: LlamaConfig, rngs: nnx.Rngs) -> Any:
    """Returns the norm of what a branch adds; `nnx.data(None)` if there is none."""
    if not config.branch_norms:
        return nnx.data(None)
    shared = {name: value for name, value in _shared(config).items() if name in ("param_dtype", "sequence_parallel")}
    return NormLayer(config.hidden_size, norm=config.norm, epsilon=config.epsilon, rngs=rngs, **shared)


def _shared(config: LlamaConfig) -> dict[str, Any]:
    return {
        "dtype": jnp.dtype(config.dtype),
        "grad_reduce": config.grad_reduce,
        "param_dtype": jnp.promote_types(config.dtype, jnp.float32),
        "sequence_parallel": config.sequence_parallel,
    }
