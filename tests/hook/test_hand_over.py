"""A hand-over between blocks that is lost, doubled or stale changes no number."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gtp_jax.hook import _call, _walk

from .models import F64, WIDTH
from .steps import MESHES, assert_equal, together


class Model(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i), **F64) for i in range(4)])

    def __call__(self, x):
        hidden = []
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
            hidden.append(x)
        return hidden


def loss(model, x):
    hidden = model(x)
    return jnp.sin(3 * hidden[-1]).mean() + (hidden[1] ** 2).mean()


# Given the tokens left so far, the last of which is the right one, return the token that a block takes.
TAKEN = {
    "lost": lambda left: _walk.Token(jnp.zeros(()), jnp.zeros(())),
    "doubled": lambda left: left[(len(left) - 1) // 2 * 2],
    "stale": lambda left: left[min(1, len(left) - 1)],
}


@pytest.mark.parametrize("how", TAKEN)
def test_losses_gradients_and_steps_are_those_without_a_mesh(how, x64, monkeypatch):
    left = []

    def take(unit):
        left.append(_walk.take(unit))
        return TAKEN[how](left)

    monkeypatch.setattr(_call, "take", take)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, WIDTH)))
    found, wanted = together(Model, loss, x, MESHES["gtp 8"], blocks="blocks.*")
    assert len(left) == 4  # one program served all steps
    assert_equal(found, wanted)
