"""Small models, losses and data for replicas of unequal degree."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gtp_jax as gtp

from ..gradients import keeps_gradient

STEPS, SEQ = 5, 12
VOCAB, FEATURES, HIDDEN = 37, 24, 19


class Everything(nnx.Module):
    """Each kind of leaf: what is sharded by columns, by rows, by heads, by experts, by the vocabulary, and what is not.

    Five groups of heads, 19 hidden features and 37 tokens: neither 4, 3 nor 2 divides them. The 24 features are divided
    in storage; 25 are not.
    """

    def __init__(self, rngs, experts="features", features=FEATURES):
        shared = dict(dtype="float64", param_dtype="float64", rngs=rngs)
        self.embed = gtp.Embed(VOCAB, features, **shared)
        self.attention = gtp.Attention(
            features,
            num_heads=10,
            num_kv_heads=5,
            head_dim=4,
            norm="layer",
            qk_norm=True,
            sinks=True,
            use_bias=True,
            **shared,
        )
        self.mlp = gtp.MLP(features, HIDDEN, use_bias=True, **shared)
        self.moe = gtp.nn.MoE(features, HIDDEN, num_experts=5, top_k=2, aux_loss_coeff=0.1, parallel=experts, **shared)
        self.even = gtp.MLP(features, features, gated=False, **shared)
        self.head = gtp.nn.TiedHead(self.embed, param_dtype="float64", rngs=rngs)
        self.temperature = nnx.Param(jnp.ones((), "float64"))

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in (self.attention, self.mlp, self.moe, self.even):
            x = x + layer(x)
        return self.head(x + self.temperature * x**2)


def loss(model, batch):
    return gtp.cross_entropy(model(batch["tokens"]), batch["targets"], batch["weights"], vocab_size=VOCAB)


class Tiny(nnx.Module):
    """An embedding, an MLP and a tied head."""

    def __init__(self, rngs, features=FEATURES, hidden=HIDDEN, dtype="float64"):
        shared = dict(dtype=dtype, param_dtype=dtype, rngs=rngs)
        self.embed = gtp.Embed(VOCAB, features, **shared)
        self.mlp = gtp.MLP(features, hidden, **shared)
        self.head = gtp.nn.TiedHead(self.embed, param_dtype=dtype, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.mlp(x))


# 128 hidden features: of those, ranks of 4 store whole blocks, and ranks of 3 everything.
WIDE = functools.partial(Tiny, features=128, hidden=128)


def adapted_codes(rngs):
    """A model frozen as NVFP4 codes, with adapters."""
    return with_b(gtp.nn.lora(WIDE(rngs), 3, 6, recipe=gtp.NVFP4(), rngs=rngs))


def with_b(model):
    """The model, with other numbers than zeros in the adapters' second matrices, so that adapters add something."""
    for path, v in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
        if path[-1] == "b":
            value = v.get_value()
            key = jax.random.key(sum(map(ord, "/".join(map(str, path)))))
            new = v.replace(value + 0.1 * jax.random.normal(key, value.shape, value.dtype))
            nnx.update(model, nnx.from_flat_state([(path, new)]))
    return model


def batches(rows, seq=SEQ, vocab=VOCAB):
    """Random tokens; ever more of them are masked along the batch, so that replicas have unequal shares of tokens."""
    rng = np.random.default_rng(rows)
    for _ in range(STEPS):
        tokens = rng.integers(0, vocab, (rows, seq + 1)).astype(np.int32)
        weights = (rng.random((rows, seq)) > np.linspace(0, 0.8, rows)[:, None]).astype(np.float32)
        yield {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


OPTIMIZER = keeps_gradient(optax.adamw(1e-2))
