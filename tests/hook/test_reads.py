"""In local view, code reads gathered weights, or is refused: a rank's shard is never taken for the weight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import naming
from selection import others_full

import gtp_jax as gtp

from .steps import PLAIN, scope

WIDTH = 16


class Block(nnx.Module):
    """A block with a method of another name than `__call__`."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))

    def forward(self, x):
        return self(x)

    def gram(self):
        return self.linear.kernel[...] @ self.linear.kernel.T

    def size(self):
        return self.linear.kernel.get_raw_value().size


class Model(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.scale = nnx.Param(jnp.linspace(0.5, 1.0, WIDTH * WIDTH).reshape(WIDTH, WIDTH))

    def __call__(self, x):
        for block in self.blocks:
            x = block.forward(x) @ self.scale[...]
        return x


def make(methods=("__call__",)):
    return lambda rngs: gtp.shard(Model(rngs), "blocks.*", min_size=64, methods=methods)


def computed(loss, view, factory=None):
    """Returns the metrics and the gradients of a batch, by one program."""
    with scope(dict(gtp=8)):
        state = gtp.TrainState.create(gtp.init(factory or make(), nnx.Rngs(0)), PLAIN)
        run = jax.jit(functools.partial(gtp.train.loss_and_gradients, loss, view=view))
        return jax.tree.map(np.asarray, run(state, np.ones((8, WIDTH), np.float32))[:2])


def called(model, x):
    return jnp.sum(model(x)), jnp.float32(x.shape[0])


def penalized(model, x):
    value, count = called(model, x)
    return value + sum(jnp.sum(jnp.square(block.gram())) for block in model.blocks) * count, count


def test_a_method_that_reads_a_weight_is_refused_by_the_weights_name():
    refused = naming("blocks.0.linear.kernel", "local view", "(2, 16)", "`methods`")
    with pytest.raises(ValueError, match=refused):
        computed(penalized, "local")


def test_it_is_right_once_it_is_named_and_in_global_view():
    one = computed(penalized, "local", make(("__call__", "gram")))
    other = computed(penalized, "global")
    for found, wanted in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)


def test_a_loss_that_reads_a_weight_is_refused_and_may_read_the_shard():
    def read(model, x):
        value, count = called(model, x)
        return value + jnp.sum(model.blocks[0].linear.kernel[...]), count

    def read_shard(model, x):
        value, count = called(model, x)
        return value + jnp.sum(model.blocks[0].linear.kernel.get_raw_value()) + 0 * model.blocks[0].size(), count

    with pytest.raises(ValueError, match=naming("blocks.0.linear.kernel", "local view")):
        computed(read, "local")
    assert np.isfinite(computed(read_shard, "local")[0])


def test_a_hook_of_the_models_author_still_runs():
    def doubled(variable, value):
        return 2 * value

    class Doubling(Model):
        def __init__(self, rngs):
            super().__init__(rngs)
            for block in self.blocks:
                block.linear.kernel.set_metadata(on_get_value=doubled)

    x = np.ones((8, WIDTH), np.float32)
    plain = nnx.jit(lambda x: Doubling(nnx.Rngs(0))(x))(x)
    with scope(dict(gtp=8)):
        model = gtp.shard(nnx.jit(Doubling)(nnx.Rngs(0)), "blocks.*", min_size=64)
        np.testing.assert_allclose(nnx.jit(lambda model: model(x))(model), plain, rtol=1e-5)


class Adding(nnx.Module):
    """A block that adds what it looks up in a table elsewhere, or else in its own."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.table = nnx.Embed(64, WIDTH, rngs=rngs)

    def __call__(self, x, tokens, look=None):
        look = self.parent.look if hasattr(self, "parent") else getattr(self, "shared", look)
        return jnp.tanh(self.linear(x)) + self.look(tokens) * (2 if look is None else look(tokens))

    def look(self, tokens):
        return self.table(tokens)


class Looking(nnx.Module):
    """A model whose second block looks something up in a module outside of itself.

    Args:
        given: a function of the model, which returns what the second block is given.
        held: the attribute by which the second block holds the table of the model, or the model.
    """

    def __init__(self, rngs, given=lambda model: None, held=""):
        self.table = nnx.Embed(64, WIDTH, rngs=rngs)
        self.own = nnx.Param(jax.random.normal(rngs.params(), (64, WIDTH)))
        self.blocks = nnx.List([Adding(rngs) for _ in range(2)])
        self.given = given
        if held:
            setattr(self.blocks[1], held, self if held == "parent" else self.table)

    def __call__(self, tokens):
        x = self.blocks[0](self.table(tokens), tokens)
        return self.blocks[1](x, tokens, self.given(self))

    def look(self, tokens):
        return self.table(tokens) + self.blocks[0](self.table(tokens), tokens) + self.own[...][tokens]


def looked_up(model, tokens):
    return jnp.sum(jnp.sin(model(tokens))), jnp.float32(tokens.size)


def looking(view, **options):
    """Returns the loss and the gradients; without a mesh if there is no view."""
    tokens = np.arange(32).reshape(16, 2) % 8  # a shard has these rows too, so only the check notices that it is one
    make = lambda: Looking(nnx.Rngs(0), **options)  # noqa: E731
    if not view:
        mean = lambda model: looked_up(model, tokens)[0] / tokens.size  # noqa: E731
        return nnx.jit(nnx.value_and_grad(mean))(nnx.jit(make)())
    with scope(dict(gtp=8)):
        state = gtp.TrainState.create(gtp.shard(nnx.jit(make)(), "blocks.*", min_size=64), PLAIN)
        return jax.jit(functools.partial(gtp.train.loss_and_gradients, looked_up, view=view))(state, tokens)[:2]


SEEN = {
    "the module of the model, as an argument": dict(given=lambda model: model.table),
    "a module within a sibling, as an argument": dict(given=lambda model: model.blocks[0].table),
    "the module of the model, as an attribute": dict(held="shared"),
    "the model and its blocks, as an attribute": dict(held="parent"),
    "a parameter of the model itself, by a closure": dict(given=lambda model: lambda tokens: model.own[...][tokens]),
}
UNSEEN = {
    "a bound method": ("table.embedding", lambda model: model.table.__call__),
    "a closure": ("table.embedding", lambda model: lambda tokens: model.table(tokens)),
    "another method of a sibling": ("blocks.0.table.embedding", lambda model: model.blocks[0].look),
    "its own method": ("blocks.1.table.embedding", lambda model: model.blocks[1].look),
    "the call of a sibling": (
        "blocks.0.linear.kernel",
        lambda model: lambda tokens: model.blocks[0](jnp.ones((*tokens.shape, WIDTH)), tokens),
    ),
    "a method of the model": ("table.embedding", lambda model: model.look),
}


@pytest.mark.parametrize("way", others_full(SEEN, list(SEEN)[2:3]))
def test_a_block_computes_with_whole_weights_of_the_modules_that_it_is_given_or_holds(way):
    found, wanted = (jax.tree.leaves(looking(view, **SEEN[way])) for view in ("local", None))
    assert len(found) == len(wanted) > 8
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", others_full(UNSEEN, ["a closure", "the call of a sibling"]))
def test_a_block_that_reaches_the_shards_of_another_module_by_a_function_is_refused(way):
    name, given = UNSEEN[way]
    shard = "(2, 16)" if name.endswith("kernel") else "(8, 16)"
    with pytest.raises(ValueError, match=naming(name, "local view", shard, "argument")):
        looking("local", given=given)
