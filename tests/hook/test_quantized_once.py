"""A step quantizes the weights of a sharded model once for all its microbatches, unless a loss replaces them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gtp_jax as gtp
from gtp_jax import hlo, native
from gtp_jax.nn import abstract_model

from ..hlo.programs import needs_target
from .recipes import BATCH, LENGTH, VOCAB, WIDTH, Block, loss, tokens
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


class Remat(Model):
    """Passes a block through `nnx.remat`, which calls it with arrays of its own."""

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions[...]
        return self.embed.attend(nnx.remat(lambda block, x: block(x))(self.blocks[0], self.blocks[1](x)))


def sharded(rngs, model=Model):
    return gtp.shard(model(rngs), "blocks.*", min_size=64)


def program(degrees, recipe, view, model=Model):
    """Returns a step of several microbatches, compiled for eight H200s, where XLA moves nothing out of the loop."""
    optimizer, devices = optax.sgd(0.1), hlo.topology_devices(hlo.parse_target("h200:8"))
    with jax.set_mesh(gtp.make_mesh(**degrees, devices=devices)):
        state = gtp.TrainState.create(abstract_model(lambda rngs: sharded(rngs, model)), optimizer)
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


@needs_target
@pytest.mark.skipif(not native.has("gtp_pack", "CUDA"), reason=native.describe())
@pytest.mark.parametrize("mesh, view", [("gtp 8", "global"), ("dp 2, gtp 4", "global"), ("dp 2, gtp 4", "local")])
def test_a_step_finds_all_amaxes_at_once_and_packs_weights_before_its_microbatches(mesh, view):
    found = program(MESHES[mesh], gtp.NVFP4(exclude=()), view)
    assert maxima(found) == [(1, MATRICES)]
    assert launches(found, "multi_amax") == [1] and set(launches(found, "pack")) == {1}
    # each microbatch unpacks them for each call, in both passes; the lookup, and the last call, only in forward
    assert sum(launches(found, "unpack")) >= PARTS * (2 * 3 + 2 + 1)


@needs_target
def test_a_block_within_a_transformation_of_flax_is_quantized_where_it_is_called():
    found = maxima(program(MESHES["gtp 8"], gtp.NVFP4(exclude=()), "global", Remat))
    assert (PARTS, 4) in found and (1, MATRICES) in found


def negated(model):
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(jnp.negative, state))


def test_weights_that_a_loss_has_replaced_are_quantized_anew():
    values = []
    for make, function in ((lambda rngs: negated(Model(rngs)), loss), (Model, lambda m, t: loss(negated(m), t))):
        with scope(MESHES["gtp 8"]):
            state = gtp.TrainState.create(sharded(nnx.Rngs(0), make), optax.sgd(0.1))
            values.append(float(gtp.eval_step(function, recipe=gtp.NVFP4())(state, tokens())["loss"]))
    np.testing.assert_allclose(*values, rtol=1e-6)
