"""Ordinary Flax models with gtp_jax modules in them, small and in float64, each with a loss and a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import gtp_jax as gtp

BATCH, LENGTH, WIDTH, VOCAB = 96, 12, 12, 36
DTYPES: dict[str, Any] = dict(dtype="float64", param_dtype="float64")
FLAX: dict[str, Any] = dict(dtype=jnp.float64, param_dtype=jnp.float64)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its loss and its batch."""

    make: Callable[[nnx.Rngs], nnx.Module]
    loss: Callable[[Any, Any], Any]
    batch: Callable[[], dict[str, np.ndarray]]


def _tokens() -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(1).integers(0, VOCAB, (BATCH, LENGTH + 1))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def _token_loss(model: Any, batch: Any) -> Any:
    return gtp.cross_entropy(model(batch["tokens"]), batch["targets"])


class PlainAttention(nnx.Module):
    """Attention of plain Flax layers, in float64 throughout, which `nnx.MultiHeadAttention` is not."""

    def __init__(self, rngs: nnx.Rngs):
        self.q, self.k, self.v = (nnx.LinearGeneral(WIDTH, (3, 4), rngs=rngs, **FLAX) for _ in range(3))
        self.out = nnx.LinearGeneral((3, 4), WIDTH, axis=(-2, -1), rngs=rngs, **FLAX)

    def __call__(self, x, memory, keep=None):
        scores = jnp.einsum("bqhd,bkhd->bhqk", self.q(x), self.k(memory)) / 2
        scores = scores if keep is None else jnp.where(keep[:, None, None, :], scores, -jnp.inf)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), self.v(memory)))


class CrossBlock(nnx.Module):
    """Attends to an encoder's output, which every layer shares."""

    def __init__(self, rngs: nnx.Rngs):
        self.attention = PlainAttention(rngs)
        self.mlp = gtp.MLP(WIDTH, 24, rngs=rngs, **DTYPES)

    def __call__(self, x, memory, keep):
        x = x + self.attention(x, memory, keep)
        return x + self.mlp(x)


class EncoderDecoder(nnx.Module):
    """An encoder of `MLP`s, whose output all decoder layers attend to, but for padding."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = gtp.Embed(VOCAB, WIDTH, rngs=rngs, **DTYPES)
        self.encoder = gtp.Stack(lambda rngs: gtp.MLP(WIDTH, 24, rngs=rngs, **DTYPES), 2, rngs=rngs)
        self.decoder = gtp.Stack(lambda rngs: CrossBlock(rngs), 2, rngs=rngs)
        self.head = gtp.nn.LayerNormDense(WIDTH, VOCAB, rngs=rngs, **DTYPES)

    def __call__(self, tokens):
        keep = tokens % 5 != 0
        keep = keep.at[:, 0].set(True)
        memory = self.encoder(self.embed(tokens)).cumsum(1) * 0.1
        return self.head(self.decoder(self.embed(jnp.flip(tokens, 1)), memory, keep=keep))


class NormedBlock(nnx.Module):
    """Batch statistics, of all tokens of the batch, and a weight that Flax's own annotations shard."""

    def __init__(self, rngs: nnx.Rngs):
        self.dense = gtp.Dense(WIDTH, WIDTH, use_bias=True, rngs=rngs, **DTYPES)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.9, rngs=rngs, **FLAX)
        init = nnx.initializers.normal(0.3)
        if not jax.sharding.get_abstract_mesh().empty:  # Flax wants a mesh for it
            init = nnx.with_partitioning(init, (None, "tp"))
        self.parted = nnx.Param(init(rngs.params(), (WIDTH, WIDTH), jnp.float64))

    def __call__(self, x):
        return x + self.norm(jax.nn.relu(self.dense(x))) @ self.parted[...]


class BatchNormed(nnx.Module):
    """Batch norm outside and inside a `Stack`, and its running statistics."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = gtp.Embed(VOCAB, WIDTH, rngs=rngs, **DTYPES)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs, **FLAX)
        self.blocks = gtp.Stack(lambda rngs: NormedBlock(rngs), 2, rngs=rngs)
        self.head = gtp.Dense(WIDTH, VOCAB, parallel="column", rngs=rngs, **DTYPES)

    def __call__(self, tokens):
        return self.head(self.blocks(self.norm(self.embed(tokens))))


CASES = {
    "batch norm": Case(BatchNormed, _token_loss, _tokens),
    "encoder-decoder": Case(EncoderDecoder, _token_loss, _tokens),
}
