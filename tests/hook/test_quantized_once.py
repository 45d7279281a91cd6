"""A step quantizes the weights of a sharded model once for all its microbatches, unless a loss replaces them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from selection import others_full

import gtp_jax as gtp
from gtp_jax import hlo, native
from gtp_jax.nn import abstract_model

from ..hlo.programs import needs_target
from ..weights.row_scaled import RowScaledRecipe
from .recipes import BATCH, LENGTH, RECIPES, VOCAB, WIDTH, Block, loss, mean_loss, tokens
from .steps import MESHES, scope

PARTS = 3


class Model(nnx.Module):
    """Blocks, of which one is called twice, a table that is the head too, and an array that the model owns itself."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.positions = nnx.Param(jax.random.normal(rngs.params(), (LENGTH, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions[...]
        for block in (*self.blocks, self.blocks[0]):
            x = block(x)
        return self.embed.attend(x)


MATRICES = 2 * 4 + 1 + 1  # of two blocks, the table and the positions


def sharded(rngs, model=Model):
    return gtp.shard(model(rngs), "blocks.*", min_size=64)


def program(degrees, recipe, view):
    """Returns a step of several microbatches, compiled for eight H200s, where XLA moves nothing out of the loop."""
    optimizer, devices = optax.sgd(0.1), hlo.topology_devices(hlo.parse_target("h200:8"))
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=devices)):
        state = gtp.TrainState.create(abstract_model(sharded), optimizer)
        step = gtp.train_step(
            loss, optimizer, recipe=recipe, microbatches=PARTS, view=view, compiler_options=hlo.COMPILE_OPTIONS
        )
        batch = jax.ShapeDtypeStruct((BATCH * PARTS, LENGTH), jnp.int32)
        return hlo.parse(step.lower(state, batch).compile().as_text())


def maxima(module):
    """Returns how often each all-reduce of amaxes runs, and of how many matrices."""
    found = (c for c in hlo.collectives(module) if c.kind == "all-reduce" and "pmax" in c.op_name)
    return [(c.times, sum(shape.elements for shape in c.operands)) for c in found]


def launches(module, kernel):
    return [v.times for v in module.walk() if f'custom_call_target="gtp_{kernel}"' in v.instruction.attributes]


@pytest.mark.full
@needs_target
@pytest.mark.skipif(not native.has("gtp_pack", "CUDA"), reason=native.describe())
@pytest.mark.parametrize("mesh, view", [("gtp 8", "global"), ("dp 2, gtp 4", "global"), ("dp 2, gtp 4", "local")])
def test_a_step_finds_all_amaxes_at_once_and_packs_weights_before_its_microbatches(mesh, view):
    found = program(MESHES[mesh], gtp.NVFP4(exclude=()), view)
    assert maxima(found) == [(1, MATRICES)]
    assert launches(found, "multi_amax") == [1] and set(launches(found, "pack")) == {1}
    # each microbatch unpacks them for each call, in both passes; the lookup, and the last call, only in forward
    assert sum(launches(found, "unpack")) >= PARTS * (2 * 3 + 2 + 1)


def negated(model):
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(jnp.negative, state))


def test_weights_that_a_loss_has_replaced_are_quantized_anew():
    values = []
    for make, function in ((lambda rngs: negated(Model(rngs)), loss), (Model, lambda m, t: loss(negated(m), t))):
        with scope(MESHES["gtp 8"]):
            model = gtp.init(lambda rngs, make=make: sharded(rngs, make), nnx.Rngs(0))
            state = gtp.TrainState.create(model, optax.sgd(0.1))
            values.append(float(gtp.eval_step(function, recipe=gtp.NVFP4())(state, tokens())["loss"]))
    np.testing.assert_allclose(*values, rtol=1e-6)


def two_models(rngs):
    """A model and another one, each sharded by itself, whose weights have the same paths."""
    return nnx.Sequential(*(gtp.shard(nnx.Sequential(Block(rngs), Block(rngs)), Block, min_size=64) for _ in range(2)))


def block_copied(rngs):
    """A model with a copy of a block, whose weights then change."""
    model = gtp.shard(nnx.Sequential(Block(rngs), Block(rngs)), Block, min_size=64)
    blocks: Any = model.layers
    blocks[1] = nnx.clone(blocks[0])
    blocks[1].up.kernel.set_value(-2 * blocks[1].up.kernel.get_value())
    return model


def layer_shared(rngs):
    """A model of two blocks with a layer in common."""
    model = nnx.Sequential(Block(rngs), Block(rngs))
    blocks: Any = model.layers
    blocks[1].up = blocks[0].up
    return gtp.shard(model, Block, min_size=64)


COPIES = [(two_models, "local"), (block_copied, "global"), (layer_shared, "local")]
ALL_COPIES = [*COPIES, (two_models, "global"), (block_copied, "local"), (layer_shared, "global")]


@pytest.mark.parametrize("make, view", others_full(ALL_COPIES, COPIES[:1]))
def test_modules_with_the_same_path_keep_their_own_codes_and_share_those_of_a_layer_in_common(make, view):
    x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)
    loss = lambda model, x: (jnp.square(model(x)).sum(), jnp.float32(x.size))  # noqa: E731
    with scope(MESHES["dp 2, gtp 4"]):
        model, recipe = gtp.init(make, nnx.Rngs(0)), gtp.NVFP4(exclude=())
        state = gtp.TrainState.create(model, optax.sgd(0.1))
        once = jax.jit(lambda state: gtp.train.loss_and_gradients(loss, state, x, recipe=recipe, view=view)[0])(state)
        with gtp.use_recipe(recipe):
            each = nnx.jit(lambda model: loss(model, x)[0] / x.size)(model)
    np.testing.assert_allclose(once, each, rtol=1e-5)


class Mixed(nnx.Module):
    """A block whose weights are stored and used in several dtypes."""

    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 64, dtype=jnp.bfloat16, rngs=rngs)
        self.middle = nnx.Linear(64, 64, dtype=jnp.float32, rngs=rngs)
        self.down = nnx.Linear(64, WIDTH, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, x):
        return x + jnp.tanh(self.down(jnp.tanh(self.middle(jnp.tanh(self.up(x))))))


class OfMixed(Model):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.blocks = nnx.List([Mixed(rngs) for _ in range(2)])


USED = [*(("gtp 8", name) for name in (*RECIPES, "a format of one's own")), ("dp 2, gtp 4", "NVFP4")]


@pytest.mark.full
@pytest.mark.parametrize("mesh, name", USED)
def test_a_step_multiplies_what_calls_multiply_that_quantize_for_themselves(mesh, name):
    recipe = RECIPES[name] if name in RECIPES else RowScaledRecipe()
    with scope(MESHES[mesh]):
        model = gtp.init(lambda rngs: sharded(rngs, OfMixed), nnx.Rngs(0))
        state = gtp.TrainState.create(model, optax.sgd(0.1))
        once = jax.jit(lambda state: gtp.train.loss_and_gradients(mean_loss, state, tokens(), recipe=recipe))(state)
        with gtp.use_recipe(recipe):
            each = nnx.jit(nnx.value_and_grad(mean_loss))(model, tokens())
    np.testing.assert_allclose(once[0], each[0], rtol=1e-6)
    for one, other in zip(jax.tree.leaves(once[1]), jax.tree.leaves(each[1]), strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())
