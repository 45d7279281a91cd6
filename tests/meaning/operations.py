"""Operations that mix positions, examples or features, in plain JAX."""

import jax
import jax.numpy as jnp

LENGTH = 12  # of the sequence to which positions are added

# between layers, on (batch, sequence, features)
OPERATIONS = {
    "positions added": lambda x: x + jnp.arange(LENGTH)[:, None] / LENGTH,
    "mean over the sequence": lambda x: x + x.mean(1, keepdims=True),
    "softmax over the sequence": lambda x: jax.nn.softmax(x, axis=1) * 3,
    "cumulative sum": lambda x: jnp.cumsum(x, axis=1) / 3,
    "sorting": lambda x: jnp.sort(x, axis=1),
    "convolution over the sequence": lambda x: sum(jnp.roll(x, k, axis=1) * (k + 1) / 4 for k in range(3)),
    "a slice of the sequence": lambda x: x.at[:, 2:].set(x[:, :-2]),
    "flip": lambda x: jnp.flip(x, 1),
    "the first position": lambda x: x + x[:, :1],
    "statistics over the batch": lambda x: (x - x.mean((0, 1))) / jnp.sqrt(x.var((0, 1)) + 0.1),
    "a softmax over the batch": lambda x: jax.nn.softmax(x, axis=0) * 9,
    "pairs within the batch": lambda x: x + jnp.einsum("bsf,csf->bc", x, x)[:, :1, None] / 100,
    "the batch reversed": lambda x: x[::-1],
}
# between a column- and a row-parallel layer
INSIDE = {
    "tanh": jnp.tanh,
    "gelu": jax.nn.gelu,
    "norm over features": lambda h: h / jnp.linalg.norm(h, axis=-1, keepdims=True),
    "softmax over features": lambda h: jax.nn.softmax(h, axis=-1) * 9,
    "maximum over features": lambda h: h - h.max(-1, keepdims=True),
    "features reversed": lambda h: h[..., ::-1] * jnp.arange(h.shape[-1]) / 9,
    "split in two": lambda h: jnp.concatenate(jnp.split(h, 2, axis=-1)[::-1], axis=-1) * jnp.arange(h.shape[-1]) / 9,
}
