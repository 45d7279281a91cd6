"""A diagnosis names the sample, the rank and the first layer that are not finite."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    num_layers=3,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=48,
    dtype="float32",
    unroll=1,
)
ROWS, BAD_TOKEN = 8, 95


def make_state():
    """A model of which the bad token alone has a feature that layer 1's MLP makes larger than float32 holds."""
    state = gtp.TrainState.create(gtp.init(lambda rngs: Llama(CONFIG, rngs=rngs), nnx.Rngs(1)), optax.sgd(1.0))
    params = jax.tree.map(lambda x: x, state.params)
    table, layers = params["embed"]["table"], params["blocks"]["layers"]
    params["embed"]["table"] = table.at[:, 0].set(0.0).at[BAD_TOKEN, 0].set(100.0)
    for module, name in (("attention", "out"), ("mlp", "down")):  # no layer writes the feature
        layers[module][name]["kernel"] = layers[module][name]["kernel"].at[:, :, 0].set(0.0)
    up = layers["mlp"]["up"]["kernel"]
    for half in ("gate", "up"):
        up[half] = up[half].at[1, 0].set(1e19)
    return gtp.TrainState(params, state.opt_state, state.step, state.model_def)


def make_batch(key, row):
    tokens = jax.random.randint(key, (ROWS, 9), 0, BAD_TOKEN).at[row, 4].set(BAD_TOKEN)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


@pytest.mark.slow
@pytest.mark.parametrize("view", ["local", "global"])
def test_the_sample_the_rank_and_the_first_layer_are_named(view, key):
    with jax.set_mesh(gtp.make_mesh(dp=2, gtp=2, tp=2)):
        state = make_state()
        found = gtp.diagnose(next_token_loss, state, make_batch(key, 5), view=view)
        assert (found.sample, found.rank, found.devices) == (5, {"dp": 1, "gtp": 0}, (4, 5))
        assert found.layer.startswith("blocks.layers[1].mlp") and found.kind == "output"
        assert "sample 5 of the batch of rank dp 1 x gtp 0 (devices 4, 5): the first output that is not finite" in str(
            found
        )
        assert not hasattr(type(state.model().blocks).__call__, "__wrapped__")  # the classes are as they were
        if view == "global":
            return
        ruined = jax.tree.map(lambda x: x, state.params)
        ruined["head"]["scale"] = ruined["head"]["scale"].at[3].set(jnp.inf)
        ruined = gtp.TrainState(ruined, state.opt_state, state.step, state.model_def)
        found = gtp.diagnose(next_token_loss, ruined, make_batch(key, 5), view=view)
    assert str(found).startswith("the parameter head.scale is not finite itself")


class Steep(nnx.Module):
    """A layer whose output is finite, and whose gradient is not, behind one that is neither."""

    def __init__(self, rngs):
        self.first = gtp.Dense(8, 8, dtype=jnp.float32, rngs=rngs)
        self.second = gtp.Dense(8, 8, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x):
        y = self.first(x)
        y = jnp.sqrt(y - jax.lax.stop_gradient(y) + jnp.where(x.sum(-1, keepdims=True) > 100, 0.0, 1.0))
        return self.second(y)


def test_the_first_gradient_that_is_not_finite_is_named(key):
    x = jax.random.normal(key, (4, 2, 8)).at[2].set(100.0)
    state = gtp.TrainState.create(gtp.init(lambda rngs: Steep(rngs), nnx.Rngs(0)), optax.sgd(1.0))

    def loss(model, batch):
        return jnp.mean(model(batch["x"]) ** 2)

    found = gtp.diagnose(loss, state, {"x": x})
    assert (found.sample, found.layer, found.kind) == (2, "first", "gradient")
    sound = gtp.diagnose(loss, state, {"x": jnp.ones((4, 2, 8))})
    assert str(sound).startswith("each sample alone gives finite numbers from this state")
