"""A gtp_jax layer in an ordinary Flax NNX model, trained by plain jax.jit and optax. No trainer, no chain.

    python examples/01_dense_under_jit.py      # any machine; 8 virtual CPU devices where there is no GPU

Prints the shape of one device's shard and a falling loss.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gtp_jax as gtp

jax.config.update("jax_num_cpu_devices", 8)  # where there is no GPU


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = gtp.Dense(64, 256, parallel="column", dtype=jnp.float32, rngs=rngs)
        self.down = gtp.Dense(256, 64, parallel="row", dtype=jnp.float32, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.gelu(self.up(x)))


mesh = gtp.make_mesh(gtp=jax.device_count() // 2, tp=2) if jax.device_count() > 1 else gtp.make_mesh()
with jax.set_mesh(mesh):
    model = gtp.init(Model, nnx.Rngs(0))
    graph, params = nnx.split(model)
    print("one device holds", params["up"]["kernel"].get_value().addressable_shards[0].data.shape, "of (64, 256)")
    optimizer = optax.adamw(1e-2)
    opt_state = optimizer.init(params)
    x = jax.random.normal(jax.random.key(1), (16, 32, 64))

    @jax.jit
    def step(params, opt_state):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((nnx.merge(graph, p)(x) - jnp.roll(x, 1, -1)) ** 2))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for i in range(50):
        params, opt_state, loss = step(params, opt_state)
        if i % 10 == 9:
            print(f"step {i + 1}: loss {loss:.4f}")
