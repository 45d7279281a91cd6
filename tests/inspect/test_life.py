"""`explain(model, path=...)` tells of a weight what a step does with it."""

from __future__ import annotations

import functools
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from messages import naming
from selection import others_full, pairwise

import gtp_jax as gtp
from gtp_jax import hlo
from gtp_jax.inspect import Lives
from gtp_jax.nn import abstract_model
from gtp_jax.recipes import Recipe

RECIPES: dict[str, Recipe | None] = {"bf16": None, "fp8": gtp.FP8(), "nvfp4": gtp.NVFP4()}
MESHES = {"gtp 4": {"gtp": 4}, "dp 2 x gtp 2": {"dp": 2, "gtp": 2}}
OPTIMIZER = optax.sgd(0.1)


class Mlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.adapter = nnx.LoRAParam(jnp.zeros(128))
        self.up = gtp.Dense(128, {"gate": 256, "value": 256}, dtype="bfloat16", rngs=rngs)

    def __call__(self, x):
        y = self.up(x + self.adapter)
        return y["gate"] * y["value"]


def loss(model, batch):
    y = model(batch).astype(jnp.float32)
    return jnp.sum(jnp.square(y)), jnp.float32(y.size)


def told(recipe: Recipe | None, path: str = "up") -> dict[str, str]:
    """Returns what is told of each state."""
    lives = gtp.explain(abstract_model(Mlp), recipe, path=path)
    assert isinstance(lives, Lives)
    (life,) = lives.lives
    assert life.module == "up" and life.layers is None
    return {state.state: state.what for state in life.states}


@pytest.mark.parametrize("recipe, mesh", pairwise(sorted(RECIPES), sorted(MESHES), usual=2))
def test_a_weights_life_has_the_bytes_axes_and_dtypes_of_the_compiled_step(mesh, recipe):
    with jax.set_mesh(gtp.make_mesh(**MESHES[mesh], devices=jax.devices()[:4])):
        states = told(RECIPES[recipe])
        state = gtp.TrainState.create(abstract_model(Mlp), OPTIMIZER)
        step = gtp.train_step(loss, OPTIMIZER, recipe=RECIPES[recipe], view="local")
        everywhere = NamedSharding(jax.sharding.get_mesh(), PartitionSpec(tuple(MESHES[mesh])))
        batch = jax.ShapeDtypeStruct((8, 128), np.float32, sharding=everywhere)
        program = hlo.collectives(step.lower(state, batch).compile().as_text())
    over_gtp = [c for c in program if c.kind == "all-gather" and c.axes == ("gtp",)]
    size = hlo.quantity(sum(c.operand_bytes for c in over_gtp if c.direction == "forward"), "B")
    assert re.search(rf"[:,] {size} (in|of) ", states["on the wire"])
    assert f"from {dict(MESHES[mesh])['gtp']} ranks of gtp" in states["gathered"]
    over_dp = [c for c in program if c.kind == "all-gather" and c.axes == ("dp",)]
    assert bool(over_dp) == ("joined over dp" in states["prepared"]) == ("dp" in mesh)
    maxima = [c for c in program if c.kind == "all-reduce" and c.op_name.endswith("pmax")]
    assert bool(maxima) == ("one amax" in states["prepared"])
    sums = {c.axes: c.dtype for c in program if c.kind == "reduce-scatter"}
    assert sums.keys() == {("gtp",), *([("dp",)] if "dp" in mesh else [])}
    for (axis,), dtype in sums.items():
        assert f"reduce-scatter over {axis} in {dict(f32='float32', bf16='bfloat16')[dtype]}" in states["reduced"]


def test_with_one_rank_of_gtp_gradients_are_reduced_over_dp_alone():
    with jax.set_mesh(gtp.make_mesh(dp=2, devices=jax.devices()[:2])):
        assert told(None)["reduced"].endswith("reduce-scatter over dp in float32")
    with jax.set_mesh(gtp.make_mesh(devices=jax.devices()[:1])):
        assert "reduce-scatter" not in told(None)["reduced"]


def test_a_frozen_weight_has_no_gradient_in_its_life():
    with jax.set_mesh(gtp.make_mesh(gtp=4, devices=jax.devices()[:4])):
        model = gtp.nn.freeze(gtp.init(Mlp, nnx.Rngs(0)), gtp.NVFP4())
        (life,) = gtp.explain(model, None, path="up").lives
    states = {state.state: state for state in life.states}
    assert "no master copy, no gradient" in states["stored"].what and "NVFP4" in states["stored"].what
    assert "StoredCodes" in states["on the wire"].what
    assert not {"gradient", "reduced", "gradient of shards"} & states.keys()


class Blocks(nnx.Module):
    """Blocks of stock layers, and a table that the model itself reads."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = nnx.Param(jnp.ones((64, 128)))
        self.blocks = nnx.List([nnx.Linear(128, 128, use_bias=False, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = x @ self.table[...].T @ self.table[...]
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return x


@pytest.mark.parametrize("recipe", others_full(RECIPES, ["fp8"]))
def test_the_life_of_a_weight_of_a_stock_layer_is_that_of_the_compiled_step(recipe):
    chosen = RECIPES[recipe] or gtp.recipes.BF16()
    with jax.set_mesh(gtp.make_mesh(gtp=4, devices=jax.devices()[:4])), gtp.use_recipe(chosen):
        model = gtp.shard(Blocks(nnx.Rngs(0)), "blocks.*", min_size=64)
        (life,) = gtp.explain(model, chosen, path="blocks.1").lives
        (table,) = gtp.explain(model, chosen, path="table").lives
        assert gtp.explain(model, chosen, path="blocks.1.kernel").lives == (life,)
        graph, state = nnx.split(model)
        step = jax.jit(jax.grad(lambda state, x: loss(nnx.merge(graph, state), x)[0]))
        everywhere = NamedSharding(jax.sharding.get_mesh(), PartitionSpec("gtp"))
        batch = jax.ShapeDtypeStruct((8, 128), np.float32, sharding=everywhere)
        program = hlo.collectives(step.lower(state, batch).compile().as_text())
        with pytest.raises(ValueError, match=naming("`path` 'kernel' 'blocks.0.kernel'")):
            gtp.explain(model, chosen, path="kernel")
    states = {state.state: state for state in life.states}
    sizes = {hlo.quantity(c.operand_bytes, "B") for c in program if c.kind == "all-gather"}
    assert any(re.search(rf"[:,] {size} (in|of) ", states["on the wire"].what) for size in sizes)
    assert states["gathered"].what == "weight 128x128, from 4 ranks of gtp"
    assert states["stored"].what.startswith("float32 32x128 of 128x128")
    assert ("one amax" in states["prepared"].what) == (recipe != "bf16")
    assert (
        "ahead of it" in states["gathered"].when
        and "as it begins" in {s.state: s for s in table.states}["gathered"].when
    )
    for name in (state.function for state in life.states if state.function):
        room, module, *rest = name.split(".")
        assert callable(functools.reduce(getattr, rest, importlib.import_module(f"gtp_jax.{room}.{module}")))


def test_a_path_that_is_not_one_modules_is_refused_with_the_nearest():
    with jax.set_mesh(gtp.make_mesh(gtp=4, devices=jax.devices()[:4])):
        with pytest.raises(ValueError, match=naming("`path` 'upp' 'up'")):
            told(None, "upp")

        class Two(nnx.Module):
            def __init__(self, rngs):
                self.a, self.b = Mlp(rngs), Mlp(rngs)

        with pytest.raises(ValueError, match=naming("'a.up' 'b.up'")):
            gtp.explain(abstract_model(Two), path="up")
