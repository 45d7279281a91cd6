"""A stock Flax image classifier, trained by gtp.Trainer: log, checkpoints, evaluation, and resumption.

    python examples/08_trainer.py runs/images    # any machine; 8 virtual CPU devices where there is no GPU

Stop it with Ctrl-C, and run it again: it continues where it stopped. Prints a report with the accuracy on images that
were not trained on, and leaves log.jsonl, loss.png and checkpoints in the directory.
"""

import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import gtp_jax as gtp

jax.config.update("jax_num_cpu_devices", 8)  # where there is no GPU


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(256, rngs=rngs)
        self.linear = nnx.Linear(256, 256, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.nn.relu(self.linear(self.norm(x)))


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(256, 256, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(3)])
        self.last = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.first(images.reshape(len(images), -1))
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def loss(model: Classifier, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]).mean()


def images(seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Noisy images of 16 x 16 pixels of ten patterns, 20 batches of 64."""
    patterns = np.random.default_rng(0).normal(size=(10, 16, 16))
    random = np.random.default_rng(seed)
    for _ in range(20):
        label = random.integers(0, 10, 64)
        yield {"image": (patterns[label] + 3 * random.normal(size=(64, 16, 16))).astype(np.float32), "label": label}


def accuracy(model: Classifier) -> dict[str, float]:
    found = [jnp.mean(jnp.argmax(model(b["image"]), axis=-1) == b["label"]) for b in images(seed=2)]
    return {"accuracy": float(np.mean(found))}


schedule = optax.cosine_decay_schedule(3e-3, 200)
trainer = gtp.Trainer(
    Classifier,
    loss,
    optax.adamw(schedule),
    data=lambda: images(seed=1),
    out=sys.argv[1] if len(sys.argv) > 1 else "runs/images",
    steps=200,
    schedule=schedule,
    evaluate=accuracy,
    eval_every=50,
    save_every=50,
    max_grad_norm=1.0,
)
trainer.run(resume="auto")
