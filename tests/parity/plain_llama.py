"""The oracle: a Llama out of stock Flax NNX modules, unsharded, that shares no code with gtp_jax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from .plain_moe import plain_experts


class PlainBlock(nnx.Module):
    def __init__(self, c, rngs):
        linear = lambda i, o: nnx.Linear(i, o, use_bias=False, rngs=rngs, param_dtype=c.dtype, dtype=c.dtype)  # noqa: E731
        norm = lambda: nnx.RMSNorm(c.hidden_size, epsilon=c.epsilon, rngs=rngs, param_dtype=c.dtype, dtype=c.dtype)  # noqa: E731
        self.c = c
        self.norm1, self.norm2 = norm(), norm()
        self.q = linear(c.hidden_size, c.num_heads * c.head_dim)
        self.k = linear(c.hidden_size, c.num_kv_heads * c.head_dim)
        self.v = linear(c.hidden_size, c.num_kv_heads * c.head_dim)
        self.o = linear(c.num_heads * c.head_dim, c.hidden_size)
        self.gate, self.up, self.down = (
            linear(c.hidden_size, c.intermediate_size),
            linear(c.hidden_size, c.intermediate_size),
            linear(c.intermediate_size, c.hidden_size),
        )

    def __call__(self, x, experts=None):
        """The output, and the balance term of experts if there are any in place of the MLP."""
        c, (b, s, _) = self.c, x.shape
        h = self.norm1(x)
        q = rotate(self.q(h).reshape(b, s, c.num_heads, c.head_dim), c.rope_theta)
        k = rotate(self.k(h).reshape(b, s, c.num_kv_heads, c.head_dim), c.rope_theta)
        v = self.v(h).reshape(b, s, c.num_kv_heads, c.head_dim)
        k, v = (jnp.repeat(t, c.num_heads // c.num_kv_heads, axis=2) for t in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(c.head_dim)
        scores = jnp.where(np.tril(np.ones((s, s), bool)), scores, -jnp.inf)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
        x = x + self.o(mixed.reshape(b, s, -1))
        if experts is not None:
            y, aux_loss = plain_experts(experts, x, c.top_k, c.epsilon)
            return x + y, aux_loss
        h = self.norm2(x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h)), 0.0


class PlainLlama(nnx.Module):
    def __init__(self, c, rngs):
        self.embed = nnx.Embed(c.vocab_size, c.hidden_size, rngs=rngs, param_dtype=c.dtype, dtype=c.dtype)
        self.blocks = nnx.List([PlainBlock(c, rngs) for _ in range(c.num_layers)])
        self.norm = nnx.RMSNorm(c.hidden_size, epsilon=c.epsilon, rngs=rngs, param_dtype=c.dtype, dtype=c.dtype)
        self.head = nnx.Linear(
            c.hidden_size, c.vocab_size, use_bias=False, rngs=rngs, param_dtype=c.dtype, dtype=c.dtype
        )

    def __call__(self, tokens, head_kernel, experts=None):
        x, aux_loss = self.embed(tokens), 0.0
        for i, block in enumerate(self.blocks):
            x, term = block(x, experts and jax.tree.map(lambda a, i=i: a[i], experts))
            aux_loss += term
        return self.norm(x) @ head_kernel, aux_loss


def rotate(x, theta):
    """Rotary embedding as a complex product."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
    rotated = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None, :]
    return jnp.concatenate([rotated.real, rotated.imag], -1).astype(x.dtype)


class Oracle:
    """Loss, gradients and optimizer steps of the plain model, on the parameters of a gtp_jax Llama."""

    def __init__(self, config):
        self.config = config
        # of shapes alone: `loss` puts every value in
        self.graph, self.state = nnx.split(nnx.eval_shape(lambda: PlainLlama(config, nnx.Rngs(0))))

    def loss(self, params, batch):
        c, state = self.config, self.state
        layers = params["blocks"]["layers"]
        put = lambda path, value: _set(state, path, value)  # noqa: E731
        put(("embed", "embedding"), params["embed"]["table"])
        put(("norm", "scale"), params["head"]["scale"])
        for i in range(c.num_layers):
            attention, mlp = layers["attention"], layers["mlp"]
            put(("blocks", i, "norm1", "scale"), attention["qkv"]["scale"][i])
            for mine, theirs in (("q", "query"), ("k", "key"), ("v", "value")):
                put(("blocks", i, mine, "kernel"), attention["qkv"]["kernel"][theirs][i])
            put(("blocks", i, "o", "kernel"), attention["out"]["kernel"][i])
            if c.num_experts:
                continue
            put(("blocks", i, "norm2", "scale"), mlp["up"]["scale"][i])
            put(("blocks", i, "gate", "kernel"), mlp["up"]["kernel"]["gate"][i])
            put(("blocks", i, "up", "kernel"), mlp["up"]["kernel"]["up"][i])
            put(("blocks", i, "down", "kernel"), mlp["down"]["kernel"][i])
        head = params["embed"]["table"].T if c.tie_embeddings else params["head"]["kernel"]
        experts = layers["mlp"] if c.num_experts else None
        logits, aux_loss = nnx.merge(self.graph, state)(batch["tokens"], head, experts)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        unseen = c.aux_loss_coeff * aux_loss  # in the gradient, and not in the loss
        total = jnp.sum(losses * batch["weights"]) + unseen - jax.lax.stop_gradient(unseen)
        return total / jnp.sum(batch["weights"])

    def train(self, params, batches, optimizer, max_grad_norm):
        """The first batch's gradient as clipped and its norm, every step's loss, and the parameters at the end."""
        clip = optax.clip_by_global_norm(max_grad_norm)

        @jax.jit
        def step(params, state, batch):
            loss, gradient = jax.value_and_grad(self.loss)(params, batch)
            clipped, _ = clip.update(gradient, clip.init(params))
            updates, state = optimizer.update(clipped, state, params)
            return optax.apply_updates(params, updates), state, loss, (clipped, optax.tree.norm(gradient))

        state, losses, first = jax.jit(optimizer.init)(params), [], None
        for batch in batches:
            params, state, loss, gradient = step(params, state, batch)
            first = gradient if first is None else first
            losses.append(float(loss))
        return first, losses, params


@functools.cache
def loss_and_gradient(config):
    """`Oracle(config).loss` and its gradient, compiled; one function for all who ask for the same model."""
    return jax.jit(jax.value_and_grad(Oracle(config).loss))


def _set(state, path, value):
    for part in path[:-1]:
        state = state[part]
    state[path[-1]] = state[path[-1]].replace(value)
