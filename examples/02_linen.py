"""gtp_jax layers in a Flax Linen model, through Flax's own bridge.

python examples/02_linen.py      # any machine; 8 virtual CPU devices where there is no GPU
"""

import jax
import jax.numpy as jnp
from flax import linen, nnx

import gtp_jax as gtp

jax.config.update("jax_num_cpu_devices", 8)  # where there is no GPU


class Classifier(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.bridge.to_linen(gtp.Dense, 64, 128, dtype=jnp.float32)(x)
        return linen.Dense(10)(jax.nn.relu(x))


with jax.set_mesh(gtp.make_mesh(gtp=jax.device_count())):
    x = jax.random.normal(jax.random.key(0), (8, 64))
    variables = jax.jit(Classifier().init)(jax.random.key(1), x)
    print("logits", jax.jit(Classifier().apply)(variables, x).shape)
