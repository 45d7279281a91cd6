"""Models of stock Flax layers in float64, which do not use gtp_jax, and ways to call their blocks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

WIDTH, VOCAB, LENGTH, BATCH, DEPTH = 16, 32, 6, 16, 3
F64: dict[str, Any] = dict(dtype=jnp.float64, param_dtype=jnp.float64)


class Attention(nnx.Module):
    """Attention in float64 throughout, which `nnx.MultiHeadAttention` is not."""

    def __init__(self, rngs: nnx.Rngs, width: int = WIDTH, heads: tuple[int, int] = (4, 4), use_bias: bool = True):
        self.qkv = nnx.LinearGeneral(width, (3, *heads), use_bias=use_bias, rngs=rngs, **F64)
        self.out = nnx.LinearGeneral(heads, width, axis=(-2, -1), rngs=rngs, **F64)
        self.root = math.isqrt(heads[1])

    def __call__(self, x, mask=None):
        q, k, v = jnp.moveaxis(self.qkv(x), -3, 0)
        scores = jnp.einsum("...qhd,...khd->...hqk", q, k) / self.root
        scores = scores if mask is None else jnp.where(mask, scores, -jnp.inf)
        return self.out(jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores, -1), v))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dropout: float):
        self.first = nnx.LayerNorm(WIDTH, rngs=rngs, **F64)
        self.attention = Attention(rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs, **F64)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs, **F64)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x, mask=None, *, scale=1.0):
        x = x + self.attention(self.first(x), mask)
        return x + scale * self.dropout(self.down(jnp.tanh(self.up(x))))


class Brief(nnx.Module):
    """A block of few operations, called as `Block` is."""

    def __init__(self, rngs: nnx.Rngs, dropout: float):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x, mask=None, *, scale=1.0):
        x = x if mask is None else jnp.einsum("bqk,bkd->bqd", mask[:, 0] / x.shape[1], x)
        return x + scale * self.dropout(jnp.tanh(self.linear(x)))


class GPT2(nnx.Module):
    """Learned positions, a causal mask that blocks share, and a tied head."""

    def __init__(self, rngs: nnx.Rngs, dropout: float = 0.1, depth: int = DEPTH, block: Any = Block):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs, **F64)
        self.positions = nnx.Param(0.5 * jax.random.normal(rngs.params(), (LENGTH, WIDTH), jnp.float64))
        self.blocks = nnx.List([block(rngs, dropout) for _ in range(depth)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs, **F64)

    def __call__(self, tokens, way="plain"):
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        return WAYS[way](self, x, nnx.make_causal_mask(tokens))

    def head(self, x):
        return self.embed.attend(self.norm(x))


class Few(nnx.Module):
    """An embedding, two blocks of few operations, and a tied head."""

    def __init__(self, rngs: nnx.Rngs | None = None):
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs, **F64)
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.embed.attend(x)


def _plain(model, x, mask):
    for block in model.blocks:
        x = block(x, mask)
    return model.head(x)


def _hidden_state(model, x, mask):
    hidden = []
    for block in model.blocks:
        x = block(x, mask)
        hidden.append(x)
    return hidden[1]


def _two_outputs(model, x, mask):
    return jnp.concatenate([_hidden_state(model, x, mask), _plain(model, x, mask)], -1)


def _stop_gradient(model, x, mask):
    for i, block in enumerate(model.blocks):
        x = block(x, mask)
        x = lax.stop_gradient(x) if i == 1 else x
    return model.head(x)


def _in_order(*order):
    def way(model, x, mask):
        for i in order:
            x = model.blocks[i](x, mask)
        return model.head(x)

    return way


def _u_shape(model, x, mask):
    a = model.blocks[0](x, mask)
    b = model.blocks[1](a, mask)
    c = model.blocks[2](b + a, mask)
    return (c + x) * a


def _keyword(model, x, mask):
    for block in model.blocks:
        x = block(x, mask=mask, scale=0.5)
    return model.head(x)


def _dropped_result(model, x, mask):
    for block in model.blocks:
        block(x, mask)
        x = block(x, mask)
    return model.head(x)


def _nnx_remat(model, x, mask):
    for block in model.blocks:
        x = nnx.remat(lambda block, x, mask: block(x, mask))(block, x, mask)
    return model.head(x)


def _jax_checkpoint(model, x, mask):
    for block in model.blocks:
        graph, state = nnx.split(block)
        x = jax.checkpoint(lambda state, x, mask, graph=graph: nnx.merge(graph, state)(x, mask))(state, x, mask)
    return model.head(x)


def _cond(model, x, mask):
    for i, block in enumerate(model.blocks):
        sign = -1 if i % 2 else 1
        call, skip = lambda block, x, mask: block(x, mask), lambda block, x, mask: 2 * x
        x = nnx.cond(x.sum() > sign * 1e9, call, skip, block, x, mask)
    return model.head(x)


def _vmap(model, x, mask):
    for block in model.blocks:
        x = jax.vmap(lambda x, block=block: block(x, None, scale=0.5))(x)
    return model.head(x)


def _scan(model, x, mask):
    def body(x, _):
        for block in model.blocks:
            x = block(x, mask)
        return x, None

    return model.head(lax.scan(body, x, length=2)[0])


def _jit(model, x, mask):
    for block in model.blocks:
        x = nnx.jit(lambda block, x, mask: block(x, mask))(block, x, mask)
    return model.head(x)


WAYS: dict[str, Callable[[Any, jax.Array, jax.Array], jax.Array]] = {
    "plain": _plain,
    "hidden state": _hidden_state,
    "stop_gradient": _stop_gradient,
    "two outputs": _two_outputs,
    "any order": _in_order(2, 0, 0),
    "skipped": _in_order(0, 2),
    "reversed": _in_order(2, 1, 0),
    "repeated": _in_order(0, 1, 2, 0, 1, 2),
    "U shape": _u_shape,
    "keyword": _keyword,
    "result dropped": _dropped_result,
    "nnx.remat": _nnx_remat,
    "jax.checkpoint": _jax_checkpoint,
    "cond": _cond,
    "vmap": _vmap,
    "scan": _scan,
    "jit": _jit,
}
# ways with a transformation in which dropout cannot advance its counter
WITHOUT_DROPOUT = {"jax.checkpoint", "vmap", "scan"}


def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, VOCAB, (BATCH, LENGTH)))


@functools.cache
def mean_of(way: str) -> Callable[[Any, Any], jax.Array]:
    """Returns a loss, `(model, tokens) -> mean`."""

    def loss(model, tokens):
        return jnp.mean(jnp.sin(3 * model(tokens, way)))

    return loss
