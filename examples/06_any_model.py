"""A stock Flax model, sharded by one line and trained with nnx.Optimizer under nnx.jit.

    python examples/06_any_model.py      # any machine; 8 virtual CPU devices where there is no GPU

Prints how each module is sharded, the shape of one device's shard, and a falling loss.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gtp_jax as gtp

jax.config.update("jax_num_cpu_devices", 8)  # where there is no GPU


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(128, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(8, 128, decode=False, rngs=rngs)
        self.up = nnx.Linear(128, 512, rngs=rngs)
        self.down = nnx.Linear(512, 128, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(jax.nn.silu(self.up(x)))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, 128, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(3)])
        self.head = nnx.Linear(128, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x, mask = self.embed(tokens), nnx.make_causal_mask(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


@nnx.jit
def step(model, optimizer, tokens):
    def loss(model):
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


mesh = gtp.make_mesh(gtp=jax.device_count())
with jax.set_mesh(mesh):
    model = gtp.shard(Model(nnx.Rngs(0)), blocks="layers.*")
    print(gtp.explain(model))
    kernel = model.layers[0].up.kernel.get_value()
    print("one device holds", kernel.addressable_shards[0].data.shape, "of", kernel.shape)
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    tokens = jnp.cumsum(jax.random.randint(jax.random.key(1), (16, 33), 0, 3), axis=1) % 256
    tokens = jax.device_put(tokens, jax.NamedSharding(mesh, jax.P("gtp")))
    for i in range(20):
        value = step(model, optimizer, tokens)
        if i % 5 == 4:
            print(f"step {i + 1}: loss {value:.4f}")
