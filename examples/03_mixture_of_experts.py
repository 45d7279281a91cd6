"""Trains a mixture of experts. All experts of a layer are gathered together, as four-bit codes.

    python examples/03_mixture_of_experts.py      # any machine, a minute; 8 virtual CPU devices where there is no GPU

Prints how each weight is sent, and the falling loss as the model learns to count in steps of five. To train such a
model on text: gtp-jax train --preset tiny-moe
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

jax.config.update("jax_num_cpu_devices", 8)  # where there is no GPU

STEPS = 50
CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=128,
    num_experts=8,
    top_k=2,
    dtype="float32",
)

with jax.set_mesh(gtp.make_mesh(gtp=jax.device_count())):
    recipe, optimizer = gtp.NVFP4(), optax.adamw(3e-3)
    model = gtp.init(lambda rngs: Llama(CONFIG, rngs=rngs), nnx.Rngs(0))
    print(gtp.explain(model, recipe))
    state = gtp.TrainState.create(model, optimizer)
    step = gtp.train_step(next_token_loss, optimizer, recipe=recipe, max_grad_norm=1.0)
    for number in range(STEPS):
        first = jax.random.randint(jax.random.key(number), (2 * jax.device_count(), 1), 0, CONFIG.vocab_size)
        tokens = (first + 5 * jnp.arange(17)) % CONFIG.vocab_size
        state, metrics = step(state, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})
        if number % 10 == 9:
            print(f"step {number + 1}: loss {float(metrics['loss']):.3f}")
