"""Models of stock layers of several kinds, sharded by one line, train as without a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from selection import others_full

from .models import F64, WIDTH, Attention
from .models import Block as TransformerBlock
from .steps import MESHES, assert_equal, together

BATCH, LENGTH = 16, 6


class ViT(nnx.Module):
    """A convolutional stem, a class token, learned positions, and a head on the token."""

    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.stem = nnx.Conv(3, WIDTH, (2, 2), strides=(2, 2), rngs=rngs, **F64)
        self.token = nnx.Param(jax.random.normal(rngs.params(), (WIDTH,), jnp.float64))
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (17, WIDTH), jnp.float64))
        self.blocks = nnx.List([TransformerBlock(rngs, 0.1) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 8, rngs=rngs, **F64)

    def __call__(self, images):
        x = self.stem(images).reshape(len(images), -1, WIDTH)
        x = jnp.concatenate([jnp.broadcast_to(self.token[...], (len(x), 1, WIDTH)), x], axis=1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


class Decoding(nnx.Module):
    """Attends to a memory, which all blocks share."""

    def __init__(self, rngs):
        self.attention, self.memory = Attention(rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs, **F64)

    def __call__(self, x, memory):
        x = x + self.attention(x)
        scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", x, memory))
        return x + jnp.einsum("bst,btd->bsd", scores, self.memory(memory))


class EncoderDecoder(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.encoder = nnx.List([TransformerBlock(rngs, 0.1) for _ in range(2)])
        self.decoder = nnx.List([Decoding(rngs) for _ in range(2)])

    def __call__(self, x):
        memory, y = x, x[:, ::-1]
        for block in self.encoder:
            memory = block(memory)
        for block in self.decoder:
            y = block(y, memory)
        return y


class Recurrent(nnx.Module):
    """Cells that Flax scans over the sequence."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs, **F64)) for _ in range(2)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def drawn(*shape):
    return np.random.default_rng(0).normal(size=shape)


CASES = {
    "ViT": (ViT, drawn(BATCH, 8, 8, 3), "gtp 8"),
    "encoder and decoder": (EncoderDecoder, drawn(BATCH, LENGTH, WIDTH), "dp 2, gtp 4"),
    "recurrent": (Recurrent, drawn(BATCH, LENGTH, WIDTH), "dp 2, gtp 4"),
}


def loss(model, x):
    return jnp.sin(3 * model(x)).mean()


@pytest.mark.parametrize("name", others_full(CASES, ["ViT"]))
def test_losses_gradients_and_steps_are_those_without_a_mesh(name, x64):
    make, x, mesh = CASES[name]
    found, wanted = together(make, loss, jnp.asarray(x), MESHES[mesh], steps=2)
    assert_equal(found, wanted)
