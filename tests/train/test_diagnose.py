"""A diagnosis names the sample, the rank and the first layer that are not finite."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from messages import naming
from placed import placed
from selection import others_full

import gtp_jax as gtp
from gtp_jax.models import Llama, LlamaConfig, next_token_loss

SIZES = dict(
    vocab_size=96, hidden_size=32, num_layers=3, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48
)
CONFIG = LlamaConfig(**SIZES, dtype="float32", unroll=1)
ROWS, BAD_TOKEN = 8, 95


def make_state():
    """A model of which the bad token alone has a feature that layer 1's MLP makes larger than float32 holds."""
    state = gtp.TrainState.create(placed(lambda rngs: Llama(CONFIG, rngs=rngs), 1), optax.sgd(1.0))
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
        found = gtp.train.diagnose(next_token_loss, state, make_batch(key, 5), view=view)
        assert (found.sample, found.rank, found.devices) == (5, {"dp": 1, "gtp": 0}, (4, 5))
        assert found.layer.startswith("blocks.layers[1].mlp") and found.kind == "output"
        assert re.search(naming("sample 5 dp 1 gtp 0 (devices 4, 5) output"), str(found))
        assert not hasattr(type(state.model().blocks).__call__, "__wrapped__")  # the classes are as they were
        if view == "global":
            return
        ruined = jax.tree.map(lambda x: x, state.params)
        ruined["head"]["scale"] = ruined["head"]["scale"].at[3].set(jnp.inf)
        ruined = gtp.TrainState(ruined, state.opt_state, state.step, state.model_def)
        found = gtp.train.diagnose(next_token_loss, ruined, make_batch(key, 5), view=view)
    assert re.search(naming("parameter head.scale"), str(found))


class Steep(nnx.Module):
    """A layer whose output is finite, and whose gradient is not, behind one that is neither."""

    def __init__(self, rngs):
        self.first = gtp.Dense(8, 8, dtype=jnp.float32, rngs=rngs)
        self.second = gtp.Dense(8, 8, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x):
        y = self.first(x)
        y = jnp.sqrt(y - jax.lax.stop_gradient(y) + jnp.where(x.sum(-1, keepdims=True) > 100, 0.0, 1.0))
        return self.second(y)


def sample_two(large):
    """Four samples of which the third is `large` everywhere."""
    x = np.random.default_rng(0).normal(size=(4, 2, 8)).astype(np.float32)
    x[2] = large
    return x


def test_the_first_gradient_that_is_not_finite_is_named():
    state = gtp.TrainState.create(placed(lambda rngs: Steep(rngs)), optax.sgd(1.0))

    def loss(model, batch):
        return jnp.mean(model(batch["x"]) ** 2)

    found = gtp.train.diagnose(loss, state, {"x": sample_two(100.0)})
    assert (found.sample, found.layer, found.kind) == (2, "first", "gradient")
    sound = gtp.train.diagnose(loss, state, {"x": np.ones((4, 2, 8), np.float32)})
    assert sound.sample is None and re.search(naming("each sample alone"), str(sound))


def test_a_sample_with_numbers_that_are_not_finite_is_named_before_one_whose_norm_overflows():
    state = gtp.TrainState.create(placed(dense), optax.sgd(1.0))
    x = np.ones((4, 2, 8), np.float32)
    x[1] = 1e25  # its gradients are finite, and their squares are not

    def loss(model, x):
        return jnp.mean(model(x))

    assert gtp.train.diagnose(loss, state, x).sample == 1
    x[2] = np.inf
    found = gtp.train.diagnose(loss, state, x)
    assert (found.sample, found.layer, found.kind) == (2, "", "output")


class RuinedAtLast(nnx.Module):
    """A model whose own code, after its last layer, is not finite where the input is large."""

    def __init__(self, rngs):
        self.first = gtp.Dense(8, 8, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x):
        return self.first(x) * jnp.where(x > 10, jnp.inf, 1.0)


class SteepParameter(nnx.Module):
    """A model of which only a parameter's gradient is not finite where the input is large."""

    def __init__(self, rngs):
        self.first = gtp.Dense(8, 8, dtype=jnp.float32, rngs=rngs)
        self.shift = nnx.Param(jnp.zeros(()))

    def __call__(self, x):
        return self.first(x) + jnp.sqrt(self.shift[...] + jnp.where(jnp.any(x > 10), 0.0, 1.0))


def dense(rngs):
    return gtp.Dense(8, 8, dtype=jnp.float32, rngs=rngs)


def square(model, x):
    return jnp.mean(model(x) ** 2)


def beside_the_model(model, x):
    return jnp.mean(jnp.sqrt(jnp.where(x > 10, 0.0, 1.0) * (model(x) ** 2)))


MODELS = {  # model, loss, large input, what is named, and how it is said
    "one layer": (dense, square, jnp.inf, "", "output", "the model itself"),
    "own code": (RuinedAtLast, square, 11.0, "", "output", "the model itself"),
    "one stack": (lambda rngs: gtp.Stack(dense, 3, rngs=rngs), square, jnp.inf, "layers[0]", "output", "layers[0]"),
    "loss": (dense, beside_the_model, 11.0, "", "gradient", "loss function"),
    "parameter": (SteepParameter, square, 11.0, None, None, "loss function parameters"),
}


@pytest.mark.parametrize("name", others_full(MODELS, ["own code", "loss", "parameter"]))
def test_the_model_itself_is_among_what_is_named(name):
    factory, loss, large, layer, kind, said = MODELS[name]
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        state = gtp.TrainState.create(placed(factory), optax.sgd(1.0))
        found = gtp.train.diagnose(loss, state, sample_two(large))
    assert (found.sample, found.layer, found.kind) == (2, layer, kind)
    assert re.search(naming(said), str(found))


class Masked(nnx.Module):
    """A model whose logits are -inf where they are masked, as they may be, and whose layer has no gradient at 0."""

    def __init__(self, rngs):
        self.first = gtp.Dense(8, 8, dtype=jnp.float32, rngs=rngs)

    def __call__(self, x):
        y = self.first(x)
        y = y + jnp.sqrt(jnp.where(x > 10, 0.0, 1.0) * (y - jax.lax.stop_gradient(y) + 1))
        return jnp.where(jnp.arange(8) < 2, -jnp.inf, y)


def test_logits_that_are_masked_with_infinity_are_not_blamed():
    state = gtp.TrainState.create(placed(Masked), optax.sgd(1.0))
    found = gtp.train.diagnose(
        lambda model, x: -jnp.mean(jax.nn.log_softmax(model(x))[..., 2:]), state, sample_two(11.0)
    )
    assert (found.sample, found.layer, found.kind) == (2, "first", "gradient")


class Twice(nnx.Module):
    """A layer that calls a module twice, and makes NaN between the calls if its flag is set."""

    def __init__(self, rngs):
        self.dense = gtp.Dense(8, 8, dtype="float32", rngs=rngs)
        self.ruins = nnx.Param(jnp.zeros(()))

    def __call__(self, x):
        return self.dense(jnp.where(self.ruins[...] > 0, jnp.nan, 1.0) * self.dense(x))


@pytest.mark.parametrize("layer", others_full(range(3), [1]))
def test_a_layer_that_calls_a_module_twice_has_its_own_number(layer):
    with jax.set_mesh(gtp.make_mesh(gtp=2, devices=jax.devices()[:2])):
        model = gtp.init(lambda rngs: gtp.Stack(Twice, 3, rngs=rngs), nnx.Rngs(0))
        model.layers.ruins.set_value(jnp.zeros(3).at[layer].set(1.0))
        found = gtp.train.diagnose(square, gtp.TrainState.create(model, optax.sgd(1.0)), jnp.ones((2, 8)))
    assert (found.layer, found.kind) == (f"layers[{layer}].dense", "output")
